"""Acceptance of drafts when an artifact was evaluated; ``dsa-eval --record`` leaves it there.

The file lies beside the manifest, which does not list it: digest and checksums of an artifact are
those of what was compiled, whether it was measured or not. It names the digest that it is about.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from dsa_compile.artifact.records import ACCEPTANCE
from dsa_compile.common.regular_files import read_regular, write_whole
from dsa_compile.common.strict_json import dump_json, load_json, parse
from dsa_compile.errors import ArtifactError, UserError

_VERSION = 1


@dataclass(frozen=True)
class Counted:
    """Drafts of one depth.

    Attributes:
        drafts: that were checked.
        accepted: of them, those that were right with all before them.
        dispersion: how much more the share varies than that of as many independent drafts would,
            >= 1; drafts of one answer tend to be right or wrong together.
    """

    drafts: int
    accepted: int
    dispersion: float

    def bounds(self, deviations: float) -> tuple[float, float]:
        """Interval of the share, Wilson's, as wide as so many standard deviations."""
        count, square = self.drafts / self.dispersion, deviations**2
        if not count:
            return 0.0, 1.0
        share = self.accepted / self.drafts
        middle = (share + square / (2 * count)) / (1 + square / count)
        spread = share * (1 - share) / count + square / (4 * count**2)
        half = deviations * math.sqrt(spread) / (1 + square / count)
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class MeasuredText:
    """Drafts along answers to pieces of one text.

    Attributes:
        text: its name.
        sampled: answers were drawn at temperature 1; else the likeliest tokens were taken.
        depths: the first draft of a step first.
    """

    text: str
    sampled: bool
    depths: tuple[Counted, ...]


@dataclass(frozen=True)
class AcceptanceRecord:
    """Measurements of an evaluation.

    Attributes:
        version: of the format.
        digest: of the artifact.
        texts: of each, greedy and sampled answers.
    """

    version: int
    digest: str
    texts: tuple[MeasuredText, ...]

    @classmethod
    def of(cls, digest: str, texts: tuple[MeasuredText, ...]) -> "AcceptanceRecord":
        """A record of this version."""
        return cls(_VERSION, digest, texts)

    def lowest(self, sampled: bool) -> tuple[Counted, ...]:
        """Counts of the text with the smallest share, at each depth: requests may be like any."""
        depths: list[list[Counted]] = []
        for measured in (text for text in self.texts if text.sampled == sampled):
            for place, counted in enumerate(measured.depths):
                if place == len(depths):
                    depths.append([])
                if counted.drafts:
                    depths[place].append(counted)
        return tuple(min(d, key=lambda c: c.accepted / c.drafts) for d in depths if d)

    def write(self, path: Path) -> None:
        """Put the record into an artifact's directory, whole or not at all.

        Raises:
            UserError: it cannot be written.
        """
        try:
            write_whole(path / ACCEPTANCE, dump_json(asdict(self)))
        except OSError as error:
            raise UserError(f"{path / ACCEPTANCE}: cannot be written ({error.strerror})") from None

    @classmethod
    def read(cls, path: Path, digest: str) -> "AcceptanceRecord | None":
        """The record in an artifact's directory, or None if there is none of this digest.

        Raises:
            ArtifactError: the file is no such record.
        """
        file = path / ACCEPTANCE
        try:
            data = read_regular(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtifactError(f"{file}: cannot be read ({error.strerror})") from None
        found = parse(cls, load_json(data, str(file)), str(file))
        if found.version != _VERSION or not all(map(_sound, found.texts)):
            raise ArtifactError(
                f"{file}: not a record of this version; measure again with dsa-eval --record, or "
                "remove it"
            )
        return found if found.digest == digest else None


def _sound(measured: MeasuredText) -> bool:
    return all(0 <= c.accepted <= c.drafts and c.dispersion >= 1 for c in measured.depths)

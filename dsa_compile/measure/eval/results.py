"""Results of an evaluation, as data: rows by measure by artifact, and their JSON file."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dsa_compile.common.regular_files import write_whole
from dsa_compile.errors import UserError
from dsa_compile.measure.eval.hf_agreement import GreedyAgreement, LogitAgreement
from dsa_compile.measure.eval.indexer_overlap import Overlap
from dsa_compile.measure.eval.layer_error import LayerError
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.mtp_acceptance import Acceptance
from dsa_compile.measure.eval.perplexity import Perplexity
from dsa_compile.measure.eval.recall_accuracy import Recall
from dsa_compile.version import __version__

Row = Perplexity | Recall | Overlap | Acceptance | LayerError | LogitAgreement | GreedyAgreement
_R = TypeVar("_R", bound=Row)


@dataclass
class ArtifactResults:
    """Results of one artifact.

    Attributes:
        name: in tables.
        path: as given.
        digest: the artifact's identity.
        recipe: numerics.
        disabled: passes it was compiled without.
        rows: what was measured, in order.
        notes: what could not be, and why.
        seconds: by measure.
    """

    name: str
    path: str
    digest: str
    recipe: str
    disabled: tuple[str, ...]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedArtifact) -> "ArtifactResults":
        """Empty results of an artifact."""
        manifest = loaded.manifest
        return cls(
            name=loaded.name,
            path=str(loaded.artifact.path),
            digest=manifest.digest,
            recipe=manifest.recipe,
            disabled=tuple(manifest.compile.disable),
        )

    def of_type(self, kind: type[_R]) -> list[_R]:
        """The rows of one measure."""
        return [row for row in self.rows if isinstance(row, kind)]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; rows are grouped by the name of their class."""
        measured: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            measured.setdefault(type(row).__name__, []).append(row_json(row))
        return {
            "name": self.name,
            "path": self.path,
            "digest": self.digest,
            "recipe": self.recipe,
            "disabled": list(self.disabled),
            "measured": measured,
            "notes": self.notes,
            "seconds": self.seconds,
        }


def row_json(row: Row) -> dict[str, Any]:
    """The fields of a row and the figures derived from them; None for what is not finite."""
    derived = {n: getattr(row, n) for n, v in vars(type(row)).items() if isinstance(v, property)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in (asdict(row) | derived).items()
    }


def as_data(
    artifacts: Sequence[ArtifactResults], settings: dict[str, Any], complete: bool
) -> dict[str, Any]:
    """All results, JSON-ready; see :func:`write_json`."""
    return {
        "producer": {"name": "dsa-eval", "version": __version__},
        "complete": complete,
        "settings": settings,
        "artifacts": [results.to_json() for results in artifacts],
    }


def write_json(
    path: Path, artifacts: Sequence[ArtifactResults], settings: dict[str, Any], complete: bool
) -> None:
    """Write all results, whole or not at all.

    Args:
        path: the file; replaced.
        artifacts: their results so far.
        settings: the options of the evaluation, JSON-ready.
        complete: False while measures are still to come.

    Raises:
        UserError: it cannot be written.
    """
    content = as_data(artifacts, settings, complete)
    try:
        write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None

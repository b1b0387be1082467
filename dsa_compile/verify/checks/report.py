"""Results of ``verify``, as data."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.common.regular_files import read_regular, write_whole

if TYPE_CHECKING:
    from dsa_compile.verify.checks.kernel_check import KernelReport

FILE = "verify.json"
VERSION = 2
"""Version of the JSON of a report; raised whenever a key goes or changes its meaning."""

EXPORT, SELECTION = "export", "selection"
"""Names of a report's rows that are no pass: what the passes begin with, and what ends them."""


@dataclass(frozen=True)
class SiteReport:
    """One rewrite in one layer, on the inputs where it did worst.

    Attributes:
        position: of the rewrite in the compilation, from 1.
        pass_name: whose.
        number: of the rewrite within its pass, from 1.
        region: the graph; empty for a rewrite of several.
        path: the module of the reference model.
        layer: number of the layer, or ``embed`` or ``head``.
        inputs: see :data:`~dsa_compile.verify.checks.variations.VARIATIONS`.
        bitwise: equal to the last bit on every input, as the recipe rounds.
        error: rounding error of the replacement, the norm of the error over the norm; of a rewrite
            held to equal bits, the largest norm of a row's difference over the norm of the row.
        max_abs: largest difference of an element.
        overlap: least share of the same keys in a row, where keys are chosen.
        margin: of scores at the cut, in standard deviations.
        deficit: of the worst key chosen, likewise.
        tolerance: that ``error`` is held to; 0 for one that must be bit-equal.
        healthy: rounding error of the matched subgraph, with what coarser formats of the
            replacement explain; 0 for one that must be bit-equal.
        ratio: ``error`` over ``healthy``; None where nothing rounds.
        exact: in exact arithmetic, the largest norm of a row's difference over the norm of the row;
            None for a rewrite that must be bit-equal.
        values: names of the two values that differ most.
        problem: what is wrong; empty if nothing is.
    """

    position: int
    pass_name: str
    number: int
    region: str
    path: str
    layer: int | str
    inputs: str
    bitwise: bool
    error: float
    max_abs: float
    overlap: float | None
    margin: float | None
    deficit: float | None
    tolerance: float
    healthy: float
    ratio: float | None
    exact: float | None
    values: tuple[str, str]
    problem: str = ""

    @property
    def share(self) -> float:
        """The error as a multiple of the tolerance, for ranking; above 1 is wrong."""
        if self.tolerance:
            return self.error / self.tolerance
        return 0.0 if self.bitwise else math.inf


@dataclass
class PassReport:
    """One pass: what its layers return, given the same inputs before and after it.

    Attributes:
        name: of the pass.
        numerics: what it promises.
        sites: rewrites.
        runs: of both sides of a rewrite, over layers and inputs.
        error: of its rewrites, the largest.
        layers: for each layer the median row's error and the worst row's, of its result.
        problem: what is wrong; empty if nothing is.
        suspect: number of the rewrite from which on the results are wrong, where no rewrite alone
            shows it.
        note: where its promise of equal bits holds but for the last ones, which nothing depends on;
            empty if it holds.
    """

    name: str
    numerics: str
    sites: int
    runs: int = 0
    error: float = 0.0
    layers: dict[str, tuple[float, float]] = field(default_factory=dict)
    problem: str = ""
    suspect: int | None = None
    note: str = ""


@dataclass(frozen=True)
class HazardReport:
    """A violation of a level, and the pass after which it first holds.

    Attributes:
        pass_name: the pass.
        number: its rewrite, where one is known.
        nodes: the two calls between which a hazard is; empty for what is no hazard.
        problem: a sentence.
    """

    pass_name: str
    number: int | None
    nodes: tuple[str, ...]
    problem: str


@dataclass
class VerifyReport:
    """The results of a verification.

    Attributes:
        tokens: of the prompt.
        contexts: where its steps end; ``index_topk`` is among them if the prompt is long enough.
        topk: ``index_topk``.
        passes: in order.
        sites: worst first.
        hazards: of the finished graphs.
        emission: where the artifact is not what the passes make.
        kernels: of an artifact for the CPU of which all else is right, for every op and provider
            that it binds the worst call, of several ranks for collectives alone; empty for others.
        seconds: it took.
        sampled: what was run in place of the model, where it is too wide; empty for all of it.
        several_ranks: whether the artifact is for several ranks.
        weights: where all else is right, those that are not what their expressions say.
    """

    tokens: int
    contexts: tuple[int, ...]
    topk: int
    passes: list[PassReport] = field(default_factory=list)
    sites: list[SiteReport] = field(default_factory=list)
    hazards: list[HazardReport] = field(default_factory=list)
    emission: list[str] = field(default_factory=list)
    kernels: "list[KernelReport]" = field(default_factory=list)
    seconds: float = 0.0
    sampled: str = ""
    several_ranks: bool = False
    weights: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[SiteReport]:
        """The rewrites that are wrong, in the order they were made."""
        return sorted((s for s in self.sites if s.problem), key=lambda s: s.position)

    @property
    def wrong_kernels(self) -> "list[KernelReport]":
        """Kernels that are bound and wrong, the worst first."""
        return [kernel for kernel in self.kernels if kernel.problem]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        failed = any(done.problem for done in self.passes)
        wrong = self.wrong or self.hazards or self.emission or self.wrong_kernels or self.weights
        return not (failed or wrong)

    def rank(self) -> None:
        """Put the worst sites first."""
        self.sites.sort(key=lambda s: (bool(s.problem), s.share, s.error), reverse=True)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; what is not finite is null."""
        data = {"version": VERSION, "ok": self.ok, **asdict(self)}
        return _finite(data)  # type: ignore[no-any-return]

    def write(self, directory: Path) -> Path:
        """Leave :data:`FILE` in a directory, for ``dsa-inspect`` to show.

        Raises:
            OSError: it cannot be written.
        """
        path = directory / FILE
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")
        return path

    def covers(self, directory: Path) -> bool:
        """Whether :data:`FILE` in a directory tells of no pass that this report leaves out."""
        try:
            left = json.loads(read_regular(directory / FILE))
            names = {row["name"] for row in left["passes"]}
        except (OSError, ValueError, LookupError, TypeError):
            return True  # there is none, or none that can be shown
        return names <= {row.name for row in self.passes}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

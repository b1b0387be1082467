"""Result and progress of a compilation; torch is not needed."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from dsa_compile.common.notebook import table_html

if TYPE_CHECKING:
    from dsa_compile.artifact.manifest import Manifest
    from dsa_compile.artifact.records import PassSummary
    from dsa_compile.ir.passes import PassRecord
    from dsa_compile.ir.program import Program
    from dsa_compile.lowering.binding import Binding


class Progress(Protocol):
    """Receives what happens during a compilation."""

    def phase(self, name: str) -> None:
        """A phase begins: ``download``, ``imports``, ``read``, ``export``, ``passes``, ``kernels``
        or ``emit``."""

    def passed(self, record: "PassRecord") -> None:
        """A pass has run."""

    def weights(self, done: int) -> None:
        """``done`` more bytes of weights have been hashed or written."""

    def compiled(self, done: int, total: int) -> None:
        """``done`` of the ``total`` files of CUDA kernels are compiled."""


class Silence:
    """Progress that is shown to nobody; see :class:`Progress`."""

    def phase(self, name: str) -> None:
        """Ignore it."""

    def passed(self, record: "PassRecord") -> None:
        """Ignore it."""

    def weights(self, done: int) -> None:
        """Ignore it."""

    def compiled(self, done: int, total: int) -> None:
        """Ignore it."""


@dataclass
class CompileResult:
    """Result of a compilation.

    Attributes:
        path: the artifact.
        manifest: as written.
        program: at the level it reached.
        bindings: which kernel implements each op, and why.
        seconds: by phase, in order; ``imports`` is short where torch was imported before.
        notes: what was decided or left out, for the user to read.
    """

    path: Path
    manifest: "Manifest"
    program: "Program"
    bindings: "tuple[Binding, ...]"
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        made = f"{self.manifest.target}, {self.manifest.recipe}, {len(self.manifest.layers)} layers"
        took = f"{sum(self.seconds.values()):.1f} s"
        return f"<CompileResult {self.path}: {made}, {self.manifest.digest[:12]}, {took}>"

    def timed_passes(self) -> "list[tuple[PassSummary, float]]":
        """Summaries of the passes, as in the manifest, with the seconds that each took."""
        seconds = {record.name: record.seconds for record in self.program.records}
        return [(summary, seconds[summary.name]) for summary in self.manifest.passes]

    def _repr_html_(self) -> str:
        heads = ("pass", "rewrites", "expected", "nodes before", "after", "ms")
        rows = (
            (s.name, s.rewrites, s.expected, s.nodes_before, s.nodes_after, round(1e3 * seconds))
            for s, seconds in self.timed_passes()
        )
        notes = "".join(f"<div>{escape(note)}</div>" for note in self.notes)
        return table_html(repr(self).strip("<>"), heads, rows) + notes


class Clock:
    """Times the phases of a compilation, and reports them.

    Attributes:
        progress: receives the phases.
        seconds: by phase, in order.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._since = 0.0

    def start(self, name: str) -> None:
        """End the phase that runs, if one does, and begin another."""
        self.stop()
        self._name, self._since = name, perf_counter()
        self.progress.phase(name)

    def stop(self) -> None:
        """End the phase that runs."""
        if self._name:
            self.seconds[self._name] = perf_counter() - self._since

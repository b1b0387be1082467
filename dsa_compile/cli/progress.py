"""What a person sees while a model compiles."""

from types import TracebackType

from rich import box
from rich.console import Console
from rich.progress import (
    Progress as Bar,
)
from rich.progress import (
    SpinnerColumn,
    TaskID,
    TextColumn,
)
from rich.table import Table

from dsa_compile.compiling import CompileResult, Progress
from dsa_compile.ir.passes import PassRecord

_PLAIN_WIDTH = 110
_PHASES = {
    "start": "loading torch and transformers",
    "read": "reading config and checkpoint headers",
    "export": "exporting the reference model",
    "passes": "running passes",
    "emit": "writing the artifact",
}


class Display(Progress):
    """A line per phase, live in a terminal and plain when piped, and a closing table."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        if not self._console.is_terminal:
            self._console.width = _PLAIN_WIDTH  # a pipe has no width of its own
        self._bar = Bar(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            TextColumn("{task.elapsed:5.1f} s"),
            TextColumn("{task.fields[detail]}"),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._passes = 0
        self._bytes = 0

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        self._bar.stop()

    def phase(self, name: str) -> None:
        """Finish the line of the last phase and begin another."""
        self._finish()
        self._task = self._bar.add_task(_PHASES[name], total=1, detail="")

    def passed(self, record: PassRecord) -> None:
        """Name the pass that has just run."""
        self._passes += 1
        self._detail(f"{self._passes} passes, last: {record.name}")

    def weights(self, done: int) -> None:
        """Count bytes."""
        self._bytes += done
        self._detail(f"{self._bytes / 1e9:.2f} GB of weights")

    def table(self, result: CompileResult, seconds: float) -> None:
        """The closing summary: what every pass did, and time by phase."""
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("pass", no_wrap=True)
        for name in ("rewrites", "expected", "nodes before", "after", "ms"):
            table.add_column(name, justify="right")
        for record in result.program.records:
            table.add_row(
                record.name,
                str(record.rewrites),
                "" if record.expected is None else str(record.expected),
                str(record.nodes_before),
                str(record.nodes_after),
                f"{1e3 * record.seconds:.0f}",
            )
        self._console.print(table)
        phases = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
        self._console.print(f"{seconds:.1f} s in all: {phases}")

    def line(self, text: str) -> None:
        """One line of the summary."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _detail(self, text: str) -> None:
        if self._task is not None:
            self._bar.update(self._task, detail=text)

    def _finish(self) -> None:
        if self._task is not None:
            self._bar.update(self._task, completed=1)
            self._bar.stop_task(self._task)

"""Display of a compilation in progress."""

import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TaskID, TextColumn

# The compiler brings torch and transformers with it, and the display is there before them.
if TYPE_CHECKING:
    from dsa_compile.ir.passes import PassRecord

_PHASES = {
    "download": "fetching the model from the Hub",
    "imports": "loading torch and transformers",
    "read": "reading config and checkpoint headers",
    "export": "exporting the reference model",
    "passes": "running passes",
    "kernels": "compiling CUDA kernels",
    "emit": "writing the artifact",
}
_WIDTH = max(map(len, _PHASES.values()))


class Display:
    """A line per phase on standard error; a :class:`~dsa_compile.lowering.compile_model.Progress`.

    In a terminal the line of the running phase moves; elsewhere each line is printed when its phase
    is over. A download shows its own progress, and has no line until it is over.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._live = self._console.is_terminal and not quiet
        self._bar = Bar(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            TextColumn("{task.elapsed:5.1f} s"),
            TextColumn("{task.fields[detail]}"),
            console=self._console,
        )
        self._task: TaskID | None = None
        self._phase = ""
        self._since = 0.0
        self._detail = ""
        self._passes = 0
        self._bytes = 0

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._finish()
        elif self._task is not None:
            self._bar.remove_task(self._task)  # the error says more than a stopped spinner
        if self._live:
            self._bar.stop()

    def phase(self, name: str) -> None:
        """Finish the line of the last phase and begin another."""
        self._finish()
        if self._live and name != "download":
            self._bar.start()
        self._phase, self._since, self._detail = _PHASES[name], time.perf_counter(), ""
        self._task = self._bar.add_task(f"{self._phase:<{_WIDTH}}", total=1, detail="")

    def passed(self, record: "PassRecord") -> None:
        """Name the pass that has just run."""
        self._passes += 1
        self._show(f"{self._passes} run, last: {record.name}")

    def weights(self, done: int) -> None:
        """Count bytes."""
        self._bytes += done
        self._show(f"{_readable(self._bytes)} of weights")

    def compiled(self, done: int, total: int) -> None:
        """Count kernels."""
        self._show(f"{done} of {total}")

    def _show(self, detail: str) -> None:
        self._detail = detail
        if self._task is not None:
            self._bar.update(self._task, detail=detail)

    def _finish(self) -> None:
        if self._task is None:
            return
        self._bar.update(self._task, completed=1)
        self._bar.stop_task(self._task)
        self._task = None
        if not self._live:
            seconds = time.perf_counter() - self._since
            line = f"{self._phase:<{_WIDTH}} {seconds:5.1f} s  {self._detail}"
            self._console.print(line.rstrip(), soft_wrap=True, markup=False)


def _readable(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1000:.1f} kB"

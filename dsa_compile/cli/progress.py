"""What a person sees while a model compiles."""

import shlex
import time
from types import TracebackType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TaskID, TextColumn
from rich.table import Table

# The compiler brings torch and transformers with it, and the display is there before them.
if TYPE_CHECKING:
    from dsa_compile.compiling import CompileResult
    from dsa_compile.ir.passes import PassRecord

_PLAIN_WIDTH = 100
_PHASES = {
    "start": "loading torch and transformers",
    "read": "reading config and checkpoint headers",
    "export": "exporting the reference model",
    "passes": "running passes",
    "kernels": "compiling CUDA kernels",
    "emit": "writing the artifact",
}
_WIDTH = max(map(len, _PHASES.values()))


class Display:
    """A line per phase and a closing table; a :class:`~dsa_compile.compiling.Progress`.

    In a terminal the line of the running phase moves; elsewhere each line is printed when its phase
    is over. All of it goes to standard output.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(quiet=quiet, highlight=False)
        self._live = self._console.is_terminal and not quiet
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
        self._phase = ""
        self._since = 0.0
        self._detail = ""
        self._passes = 0
        self._bytes = 0

    def __enter__(self) -> "Display":
        if self._live:
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
        elif self._task is not None:
            self._bar.remove_task(self._task)  # the error says more than a stopped spinner
        if self._live:
            self._bar.stop()

    def phase(self, name: str) -> None:
        """Finish the line of the last phase and begin another."""
        self._finish()
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

    def summary(self, result: "CompileResult", seconds: float) -> None:
        """What every pass did, the time by phase, and what to do next."""
        self._console.print(_table(result))
        phases = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
        rows = [("time", f"{seconds:.1f} s in all: {phases}")]
        rows += [("note", note) for note in result.notes]
        rows += [
            ("artifact", str(result.path)),
            ("graphs", f"{result.path / 'graphs'} (to read: *.py)"),
            ("passes", f"{result.path / 'passes'} (before.py, after.py, changes.diff)"),
            ("next", _next(result)),
        ]
        for name, text in rows:
            self._console.print(f"{name + ':':<10}{text}", soft_wrap=True, markup=False)

    def kernels(self, result: "CompileResult") -> None:
        """Which kernel implements each op, and why."""
        from dsa_compile.lowering.explain import kernel_table

        self._console.print(kernel_table(result.bindings))

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


def _table(result: "CompileResult") -> Table:
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
    return table


def _next(result: "CompileResult") -> str:
    if result.manifest.compile.stop_after:
        return "read the graphs; stopped early, the artifact cannot run"
    if result.manifest.weights.mode == "none":
        return "read the graphs; without weights, the artifact cannot run"
    speaks = any(path.endswith("/tokenizer.json") for path in result.manifest.tokenizer)
    prompt = '--prompt "Hello"' if speaks else '--prompt-ids "1 2 3"'
    return f"dsa-generate {shlex.quote(str(result.path))} {prompt}"


def _readable(number: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1000:.1f} kB"

"""Display of an evaluation in progress."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from dsa_compile.cli.tables import console, show
from dsa_compile.measure.eval.progress import Tick
from dsa_compile.measure.eval.results import ArtifactResults, write_json
from dsa_compile.measure.eval.suite import Progress
from dsa_compile.measure.eval.tables import tables


class Display(Progress):
    """A bar for each measure on standard error; keeps the JSON file up to date.

    When an exception ends the evaluation, what was measured is shown all the same.

    Args:
        json: the file, or None.
        settings: written to it.
        quiet: show no bars.
        tables: print tables to standard output; notes go to standard error without.
    """

    def __init__(
        self, json: Path | None, settings: dict[str, Any], quiet: bool, tables: bool = True
    ) -> None:
        self._json, self._settings, self._tables = json, settings, tables
        self._bar = Bar(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.elapsed:6.1f} s"),
            console=Console(stderr=True, quiet=quiet, highlight=False),
        )
        self._task: TaskID | None = None
        self._results: Sequence[ArtifactResults] = ()

    def __enter__(self) -> "Display":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._task is not None:  # else it would leave an empty line
            self._bar.stop()
        if error is not None:
            self.show(self._results)

    def begin(self, artifact: str, measure: str) -> Tick:
        """Add a bar."""
        self._bar.start()
        task = self._bar.add_task(f"{artifact}: {measure}", total=1.0)
        self._task = task
        return lambda done: self._bar.update(task, completed=done)

    def found(self, results: Sequence[ArtifactResults]) -> None:
        """Save the results so far."""
        self._results = results
        if self._json is not None:
            write_json(self._json, results, self._settings, complete=False)

    def end(self) -> None:
        """Fill the bar."""
        if self._task is not None:
            self._bar.update(self._task, completed=1.0)
            self._bar.stop_task(self._task)

    def show(self, results: Sequence[ArtifactResults]) -> None:
        """Print the tables and what could not be measured."""
        out = console(stderr=not self._tables)
        for table in tables(results) if self._tables else ():
            show(out, table)
        for artifact in results:
            for note in artifact.notes:
                out.print(f"{artifact.name}: not measured: {note}", soft_wrap=True, markup=False)

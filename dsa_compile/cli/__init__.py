"""The command-line tools."""

import sys
from pathlib import Path
from types import TracebackType


def _quiet_interrupt(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Report Ctrl-C in a line: before a command begins, while its modules are being imported."""
    if issubclass(kind, KeyboardInterrupt):
        print(f"{Path(sys.argv[0]).stem}: error: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _quiet_interrupt

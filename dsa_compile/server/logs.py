"""Logging of both processes: lines of text or of JSON on standard error, with request ids.

No record holds text of prompts or answers.
"""

import contextlib
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

_MOST_LINES = 4096
"""Lines that wait for whoever reads standard error; more are left out, and counted."""
_LAST_LINES = 1.0  # seconds that the last lines may take at the end of the process

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request being served; log records of its task carry it."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(log_format: str, level: str) -> None:
    """Send the logs of the package and of uvicorn, from a level on, to standard error.

    Args:
        log_format: one of :data:`FORMATS`.
        level: one of :data:`LEVELS`.
    """
    handler: logging.Handler
    try:
        handler = _Handler(sys.stderr.fileno())
    except (AttributeError, OSError):  # there is none, or a notebook's
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_format == "json" else _TextLines())
    for name in ("dsa_compile", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


class _Handler(logging.Handler):
    """Writes lines in a thread of its own: nobody waits for whoever reads them.

    Args:
        descriptor: of the file, which is written without the interpreter's buffers: a thread that
            waited with one of these would keep the process from ending.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue(_MOST_LINES)
        self._left_out = 0
        threading.Thread(target=self._write, args=(descriptor,), name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line."""
        try:
            if self._left_out:
                text = f"{self._left_out} lines were left out: nobody has read this log"
                said = {"name": __name__, "levelname": "WARNING", "msg": text}
                self._lines.put_nowait(self.format(logging.makeLogRecord(said)))
                self._left_out = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._left_out += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait for a short time until all lines are written; for the end of the process."""
        lines = self._lines
        with lines.all_tasks_done:
            lines.all_tasks_done.wait_for(lambda: not lines.unfinished_tasks, _LAST_LINES)

    def _write(self, descriptor: int) -> None:
        while True:
            left = f"{self._lines.get()}\n".encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # nobody can read them any more
                while left:
                    left = left[os.write(descriptor, left) :]
            self._lines.task_done()


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    """Fields that the caller gave as ``extra``, and the request's id."""
    found = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    found.pop("color_message", None)  # uvicorn's
    current = request_id.get()
    return {"request_id": current, **found} if current and "request_id" not in found else found


class _TextLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = super().format(record)
        return f"{line} {fields}" if fields else line


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)

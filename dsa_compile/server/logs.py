"""Logging of both processes: lines of text or of JSON on standard error, with request ids.

No record holds text of prompts or answers.
"""

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request being served; log records of its task carry it."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up_logging(log_format: str, level: str) -> None:
    """Send the logs of the package and of uvicorn, from a level on, to standard error.

    Args:
        log_format: one of :data:`FORMATS`.
        level: one of :data:`LEVELS`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if log_format == "json" else _TextLines())
    for name in ("dsa_compile", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


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

"""Structured records on standard error: JSON lines for machines, text for a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what was given as `extra` stands beside time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """A line for a person: time, level, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields = _fields(record)
        message = record.getMessage()
        event = fields.pop("event", None)
        text = message if event in (None, message) else f"{message} [{event}]"
        details = " ".join(f"{name}={value}" for name, value in fields.items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():7} {text}" + (f" {details}" if details else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: str, form: str) -> None:
    """Sets up logging for the daemon.

    Args:
        level: debug, info, warning or error.
        form: json, text, or auto for text on a terminal and JSON elsewhere.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

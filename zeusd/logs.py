"""Structured logs: JSON lines for programs, text for a terminal, fields for the journal."""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from logging.handlers import QueueHandler, QueueListener
from typing import Any

from zeusd import systemd
from zeusd.systemd import fields_of

EVERY_S = 60.0
MOST = 3
"""Equal records that are logged in this time."""

AUDIT = "zeusd.audit"
"""The audit log, which counts what repeats by itself."""


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object per line, with time, level, message and `extra`
    fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formats each record as a line of text: time, level, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        fields = fields_of(record)
        message = record.getMessage()
        event = fields.pop("event", None)
        text = message if event in (None, message) else f"{message} [{event}]"
        details = " ".join(f"{name}={value}" for name, value in fields.items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname.lower():7} {text}" + (f" {details}" if details else "")
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class Repeats(logging.Filter):
    """Drops warnings and errors that were logged often in the last minute, and counts them in the
    next one that says the same.

    A failure of zeusd itself, with its traceback, repeats where it was raised.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._known: dict[object, tuple[float, int]] = {}
        self._guard = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        if record.levelno < logging.WARNING or record.name == AUDIT:
            return True
        try:
            key, now_s = _said(record), self._clock_s()
        except Exception:  # noqa: BLE001 - the handler reports what cannot be formatted
            return True
        with self._guard:
            since_s, count = self._known.get(key, (now_s, 0))
            dropped = max(0, count - MOST)
            if now_s - since_s >= EVERY_S:
                since_s, count = now_s, 0
            elif len(self._known) >= 1000:
                self._known.clear()
            self._known[key] = (since_s, count + 1)
        if count >= MOST:
            return False
        if dropped:
            record.repeated = dropped
        return True


def _said(record: logging.LogRecord) -> object:
    """What a record says, apart from its time."""
    if record.exc_info and record.exc_info[2] is not None:
        *_, (frame, line) = traceback.walk_tb(record.exc_info[2])
        return record.exc_info[0], frame.f_code.co_filename, line
    return record.name, record.getMessage(), repr(fields_of(record))


class _BoundedQueue(QueueHandler):
    """Passes records to another thread, and drops them rather than wait, so logs never block
    zeusd."""

    def __init__(self) -> None:
        # Most records that may wait for the journal.
        self.records: queue.Queue[Any] = queue.Queue(10_000)
        self.dropped = 0
        super().__init__(self.records)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Keeps the fields unformatted, because the other thread is in this process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queues a record, or counts it as dropped."""
        try:
            self.records.put_nowait(record)
            if self.dropped:
                lost = logging.makeLogRecord(
                    {
                        "name": __name__,
                        "levelno": logging.ERROR,
                        "levelname": "ERROR",
                        "msg": f"{self.dropped} log records were dropped: the journal is too slow",
                        "event": "log_lost",
                    }
                )
                self.records.put_nowait(lost)
                self.dropped = 0
        except queue.Full:
            self.dropped += 1


def configure(level: str, form: str, identifier: str = "zeusd") -> None:
    """Sets up logging for the daemon."""
    handler: logging.Handler
    if form == "journal" or (form == "auto" and systemd.logs_to_journal()):
        handler = _BoundedQueue()
        listener = QueueListener(handler.records, systemd.JournalHandler(identifier))
        listener.start()
        atexit.register(listener.stop)
    else:
        if sys.stderr is None:  # it is closed
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
        handler = logging.StreamHandler(sys.stderr)
        text = form == "text" or (form == "auto" and sys.stderr.isatty())
        handler.setFormatter(TextFormatter() if text else JsonFormatter())
    handler.addFilter(Repeats())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_level(level: str) -> None:
    """Changes the level."""
    logging.getLogger().setLevel(level.upper())

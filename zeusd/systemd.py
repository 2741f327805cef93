"""Sockets and watchdog from systemd, and logs for its journal. Does nothing without systemd."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from functools import lru_cache
from typing import Any

from zeus_common.text import known_user

CLIENTS = "clients"
"""Name of the clients' socket (`FileDescriptorName=`)."""

STREAM = "stream"
"""Name of the subscribers' socket."""

_FIELDS = {
    "gpu": "GPU_UUID",
    "uid": "CLIENT_UID",
    "pid": "CLIENT_PID",
    "command": "CLIENT_COMMAND",
    "job": "CLIENT_JOB",
    "control": "CONTROL",
    "old": "OLD",
    "new": "NEW",
    "lease": "LEASE",
    "reason": "REASON",
    "result": "RESULT",
    "event": "EVENT",
}
"""Journal fields by the names of fields in the audit log; others are upper-cased."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a record that are not standard."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


_PRIORITIES = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


def _module(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"systemd.{name}")
    except ImportError:
        raise SystemExit(
            "zeusd: it was started by systemd, but systemd-python is not installed; "
            "install zeusd with its systemd extra"
        ) from None


def _passed(name: str, pid: str | None) -> int:
    """The number in a variable of systemd that is for the process `pid`; 0: not for this one."""
    number = os.environ.get(name, "")
    return int(number) if pid == str(os.getpid()) and re.fullmatch("[0-9]{1,18}", number) else 0


def listening_sockets() -> dict[str, socket.socket]:
    """The sockets that systemd passed, by name. Call it once: children do not inherit them."""
    if not _passed("LISTEN_FDS", os.environ.get("LISTEN_PID")):
        return {}
    passed = _module("daemon").listen_fds_with_names(unset_environment=True)
    for fd in passed:
        os.set_inheritable(fd, False)
    return {str(name): socket.socket(fileno=fd) for fd, name in passed.items()}


def watchdog_s() -> float | None:
    """Time within which systemd expects a heartbeat; None: systemd does not watch zeusd."""
    pid = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    return _passed("WATCHDOG_USEC", pid) / 1e6 or None


def logs_to_journal() -> bool:
    """Whether standard error goes to the journal, so that records can have fields."""
    stream = os.environ.get("JOURNAL_STREAM")
    if stream is None:
        return False
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return stream == f"{status.st_dev}:{status.st_ino}"


@lru_cache(maxsize=1024)
def _user_name(uid: int, minute: int) -> str | None:
    del minute  # another user is looked up again
    return known_user(uid)


class JournalHandler(logging.Handler):
    """Sends records to journald with their fields, so that `journalctl GPU_UUID=...` finds them."""

    def __init__(self, identifier: str) -> None:
        super().__init__()
        self._identifier = identifier
        self._journal = _module("journal")

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one record."""
        extra = fields_of(record)
        message = record.getMessage()
        if record.name == "zeusd.audit":
            message = " ".join([message, *(f"{k}={v}" for k, v in extra.items() if k != "event")])
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        fields = {_FIELDS.get(name, name.upper()): str(value) for name, value in extra.items()}
        if isinstance(extra.get("uid"), int):  # on the log's thread: it may take long
            # How long a user's name is cached, so that many records do not look it up for each.
            name = _user_name(extra["uid"], int(time.monotonic() // 60))
            if name is not None:
                fields["CLIENT_USER"] = name
        try:
            self._journal.send(
                message,
                PRIORITY=_PRIORITIES.get(record.levelno, 6),
                SYSLOG_IDENTIFIER=self._identifier,
                LOGGER=record.name,
                **fields,
            )
        except OSError:
            self.handleError(record)

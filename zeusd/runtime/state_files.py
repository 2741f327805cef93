"""State files. zeusd acts on their contents, so only this user may create or write them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from pathlib import Path

from zeus_ipc.parsing import parse, read_file
from zeusd.core.audit_log import AuditLog
from zeusd.identity import EMBEDDED_PREFIX, JOURNAL_NAME, flock_within, is_trusted

log = logging.getLogger(__name__)

MAX_AUDIT = 4 << 20
"""Largest audit log that is read: its 1,000 records take a tenth of this."""

SAVE_S = 30.0
"""How often to save the audit log. The log has what is lost here by a kill."""

_NOT_MINE = "is not a directory that this user alone may write"


class JournalError(Exception):
    """The journal cannot be used; the message is one sentence that says why and what to do."""


def prepare_directory(directory: Path) -> None:
    """Creates a directory that this user owns and others cannot write.

    It may be this user's link to one: a directory that was moved may have left a link.

    Raises:
        OSError: It cannot be created.
        JournalError: What is in its place is not zeusd's, or cannot be moved away.
    """
    directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid():
            with contextlib.suppress(OSError):
                status = directory.stat()
        mine = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if stat.S_ISDIR(status.st_mode) and mine:
            return
        if not (stat.S_ISDIR(status.st_mode) and _was_zeusds(directory)):
            break  # such as a user's home
        put_aside(directory, _NOT_MINE)
    raise JournalError(
        f"the state directory {directory} {_NOT_MINE}; choose another with --state-dir"
    )


def _was_zeusds(directory: Path) -> bool:
    names = os.listdir(directory)
    return not names or any(name.startswith((JOURNAL_NAME, EMBEDDED_PREFIX)) for name in names)


def take_lock(path: Path, wait_s: float) -> int:
    """Locks a file, and returns its descriptor.

    Raises:
        OSError: It cannot be opened.
        JournalError: Another process has it, or a file in its place cannot be moved away.
    """
    if path.is_symlink() or (path.exists() and not is_trusted(path.lstat())):
        put_aside(path, "is not a lock file that this user alone may write")
    fd = os.open(path, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if flock_within(fd, wait_s):
        return fd
    os.close(fd)
    raise JournalError(
        f"another zeusd uses the state directory {path.parent}; stop it, or choose another "
        "directory with --state-dir"
    )


def put_aside(path: Path, why: str) -> None:
    """Renames a file that must not be used. Renaming does not follow links.

    Raises:
        JournalError: It cannot be moved.
    """
    aside = _name_aside(path)
    try:
        os.rename(path, aside)
    except OSError as error:
        raise JournalError(
            f"{path} {why} and cannot be moved away ({error.strerror}); remove it, or choose "
            "another directory with --state-dir"
        ) from None
    _report(f"{path} {why} and was put aside as {aside.name}", aside)


def keep_aside(path: Path, why: str) -> None:
    """Keeps a second link to a file of this user that is about to be replaced."""
    aside = _name_aside(path)
    try:
        os.link(path, aside, follow_symlinks=False)
    except OSError as error:
        _report(f"{path} {why}; it cannot be kept aside ({error.strerror})", path)
    else:
        _report(f"{path} {why}; it was kept aside as {aside.name}", aside)


def _name_aside(path: Path) -> Path:
    for number in range(1000):
        aside = Path(f"{path}.bad-{number}")
        if not os.path.lexists(aside):
            break
    return aside


def _report(what: str, path: Path) -> None:
    log.error(
        "%s; limits may have to be reset by hand",
        what,
        extra={"event": "quarantined", "path": str(path)},
    )


class AuditFile:
    """Saves the newest records of the audit log, which survive a restart of zeusd."""

    def __init__(self, directory: str, boot: str) -> None:
        self._path = Path(directory, "audit.json")
        self._boot = boot
        self._saved: object = None

    def load(self, audit_log: AuditLog, now_ns: int) -> None:
        """Adds records that an earlier zeusd of this boot saved, if they can be read, and one of
        the restart."""
        try:
            kept = parse(read_file(self._path, MAX_AUDIT, is_trusted), MAX_AUDIT)
            if kept["boot"] == self._boot:
                audit_log.load(kept["records"], int(kept["complete_ns"]))
                age_ns = time.time_ns() - self._path.stat().st_mtime_ns
                audit_log.restarted(now_ns - max(0, age_ns), now_ns)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning(
                "%s cannot be used: %s", self._path, error, extra={"event": "audit_unreadable"}
            )

    def save(self, audit_log: AuditLog) -> None:
        """Saves the records if there are new ones."""
        state = audit_log.state
        if state == self._saved:
            with contextlib.suppress(OSError):
                os.utime(self._path)  # nothing is missing until now
            return
        temporary = self._path.with_suffix(".new")
        try:
            temporary.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                complete = {"boot": self._boot, "complete_ns": audit_log.complete_ns}
                json.dump({**complete, "records": audit_log.dump()}, file)
            temporary.replace(self._path)
        except OSError as error:
            log.warning(
                "%s cannot be written: %s", self._path, error, extra={"event": "audit_not_kept"}
            )
        self._saved = state

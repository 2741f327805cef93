"""What zeusd owes, on disk before it is owed.

An append-only file of JSON lines: a header that names the boot, then `[key, entry]` to put and
`[key]` to delete. A line counts once it is complete and synced; a torn last line was never acted
upon. The file is rewritten, aside and by rename, when it has grown; so at every instant there is
one whole journal. Records of another boot describe GPUs that have been reset since, and are
dropped.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FORMAT = 1
COMPACT_AFTER_LINES = 4096

EMBEDDED_STATE_DIR = "/run/zeusd/embedded"
"""Where engines of root's training processes keep their journals."""

EMBEDDED_PREFIX = "embedded-"
"""Name of the journal of an engine that runs inside a training process, before its pid."""


class JournalError(Exception):
    """The journal cannot be used: one sentence that says why and what to do."""


_compact_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def boot_id() -> str:
    """The kernel's name for this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Journal:
    """A durable map from keys to JSON objects, for one owner at a time.

    Args:
        directory: Made if absent, mode 0700.
        name: File name within it.
        boot: Name of the present boot.
    """

    def __init__(self, directory: str | os.PathLike[str], name: str, boot: str) -> None:
        self._directory = Path(directory)
        self._path = self._directory / name
        self._boot = boot
        self._entries: dict[str, dict[str, Any]] = {}
        self._lines = 0
        self._size = 0
        self._lock_fd = -1
        self._fd = -1

    @property
    def path(self) -> Path:
        """The journal's file."""
        return self._path

    def open(self) -> dict[str, dict[str, Any]]:
        """Takes the journal for this process and returns what it holds.

        Raises:
            JournalError: The directory cannot be used, or another process has the journal.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            self._lock_fd = os.open(
                f"{self._path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except OSError as error:
            raise JournalError(
                f"cannot use the state directory {self._directory} ({error.strerror}); "
                "choose another with --state-dir"
            ) from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise JournalError(
                f"another zeusd uses the state directory {self._directory}; stop it, or choose "
                "another directory with --state-dir"
            ) from None
        try:
            self._entries = self._load()
            self._compact()
        except OSError as error:
            self.close()
            raise JournalError(
                f"cannot write the journal {self._path} ({error.strerror}); "
                "free space or choose another directory with --state-dir"
            ) from None
        return dict(self._entries)

    def _check_owner(self) -> None:
        """What others can write there, zeusd would act upon."""
        found = self._directory.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise JournalError(
                f"the state directory {self._directory} belongs to user {found.st_uid} or may be "
                "written by others; make it this user's own with mode 0700, or choose another with "
                "--state-dir"
            )

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Makes an entry durable. Returns when it is on disk.

        Raises:
            OSError: It is not.
        """
        self._append([key, entry])
        self._entries[key] = entry

    def forget(self, key: str) -> None:
        """Deletes an entry, durably."""
        if key in self._entries:
            self._append([key])
            del self._entries[key]

    def close(self) -> None:
        """Lets another process have the journal."""
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def delete(self) -> None:
        """Removes the journal: nothing in it counts any more."""
        for path in (self._path, Path(f"{self._path}.lock")):
            path.unlink(missing_ok=True)
        self.close()

    @property
    def empty(self) -> bool:
        """Whether nothing is owed."""
        return not any(key.startswith("debt/") for key in self._entries)

    def _append(self, record: list[Any]) -> None:
        if self._lines >= COMPACT_AFTER_LINES:
            self._compact()
        data = (_compact_json(record) + "\n").encode()
        try:
            written = os.write(self._fd, data)
            if written != len(data):
                raise OSError(28, "the journal's file system is full")
            os.fdatasync(self._fd)
        except OSError:
            # Half a line must not swallow the next one.
            os.ftruncate(self._fd, self._size)
            raise
        self._lines += 1
        self._size += len(data)

    def _compact(self) -> None:
        aside = f"{self._path}.new"
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(aside, flags, 0o600)
        try:
            lines: list[Any] = [{"format": FORMAT, "boot": self._boot}]
            lines += [[key, entry] for key, entry in self._entries.items()]
            text = "".join(_compact_json(line) + "\n" for line in lines)
            data = text.encode()
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(fd)
            os.rename(aside, self._path)
            self._sync_directory()
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._lines = len(lines)
        self._size = len(data)

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _load(self) -> dict[str, dict[str, Any]]:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return {}
        with open(fd, "rb") as file:
            data = file.read()
        *lines, torn = data.split(b"\n")
        if torn:
            log.warning(
                "journal ended in half a record, which was never acted upon",
                extra={"event": "journal_torn", "path": str(self._path)},
            )
        try:
            return self._replay(lines)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            aside = f"{self._path}.bad-{os.getpid()}"
            os.rename(self._path, aside)
            log.error(
                "journal is unreadable and was put aside; limits may have to be reset by hand",
                extra={"event": "journal_bad", "path": aside, "error": str(error)},
            )
            return {}

    def _replay(self, lines: list[bytes]) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = {}
        if not lines:
            return entries
        header = json.loads(lines[0])
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']} is not known")
        if header["boot"] != self._boot:
            log.info("journal is of another boot, dropped", extra={"event": "journal_old_boot"})
            return entries
        for line in lines[1:]:
            record = json.loads(line)
            if len(record) == 2 and isinstance(record[1], dict):
                entries[str(record[0])] = record[1]
            elif len(record) == 1:
                entries.pop(str(record[0]), None)
            else:
                raise ValueError("a record is neither a put nor a delete")
        return entries


def orphans(
    directory: str | os.PathLike[str], boot: str
) -> Iterator[tuple[Journal, dict[str, dict[str, Any]]]]:
    """Journals of embedded engines that ended without settling, open, with their entries.

    Whoever takes them over makes the entries durable elsewhere, and then deletes the journal.
    """
    for path in sorted(Path(directory).glob(f"{EMBEDDED_PREFIX}*")):
        if path.suffix:
            continue
        orphan = Journal(directory, path.name, boot)
        try:
            entries = orphan.open()
        except JournalError:
            continue  # its owner lives, or it belongs to another user
        yield orphan, entries

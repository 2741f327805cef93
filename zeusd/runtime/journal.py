"""What zeusd owes, on disk before it is owed.

An append-only file of JSON lines: a header that names the boot, then `[key, entry]` to put and
`[key]` to delete. A line counts once it is complete and synced; a torn last line was never acted
upon. The file is rewritten, aside and by rename, when it has grown; so at every instant there is
one whole journal. Records of another boot describe GPUs that have been reset since, and are
dropped.

Nothing that lies in the way keeps zeusd from starting: what cannot be trusted is put aside under a
name of its own, never followed and never read. Where nothing can be written, each `put` fails until
something can, and so nothing is changed on any GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zeusd.restore import EMBEDDED_PREFIX, FORMAT, is_trusted, replay

log = logging.getLogger(__name__)

COMPACT_AFTER_LINES = 4096
_LOCK_PAUSE_S = 0.05


class JournalError(Exception):
    """The journal cannot be used: one sentence that says why and what to do."""


_compact_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class Journal:
    """A durable map from keys to JSON objects, for one owner at a time.

    Args:
        directory: Made if absent, mode 0700.
        name: File name within it.
        boot: Name of the present boot.
        wait_s: How long `open` waits for whoever has the journal, such as `zeusd restore`.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, boot: str, wait_s: float = 0.0
    ) -> None:
        self._directory = Path(directory)
        self._path = self._directory / name
        self._boot = boot
        self._wait_s = wait_s
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
            JournalError: Another process has the journal, or what lies in its place cannot be
                moved out of the way.
        """
        try:
            self._prepare_directory()
            try:
                self._take_lock()
            finally:
                # Even where nothing can be written, what is there is owed.
                self._entries = self._load()
            self._compact()
        except OSError as error:
            log.error(
                "cannot write the journal %s (%s); nothing is changed on any GPU until it can be: "
                "free space there, or choose another directory with --state-dir",
                self._path,
                error.strerror,
                extra={"event": "journal_unusable"},
            )
        return dict(self._entries)

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
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self.close()

    @property
    def empty(self) -> bool:
        """Whether nothing is owed."""
        return not any(key.startswith("debt/") for key in self._entries)

    # --------------------------------------------------------------------------------- internals

    def _prepare_directory(self) -> None:
        """What others can write there, zeusd would act upon."""
        self._directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        for _ in range(2):
            with contextlib.suppress(FileExistsError):
                self._directory.mkdir(mode=0o700)
            found = self._directory.lstat()
            mine = found.st_uid == os.geteuid() and not found.st_mode & 0o022
            if stat.S_ISDIR(found.st_mode) and mine:
                return
            self._put_aside(self._directory, "is no directory of this user's own")
        raise JournalError(
            f"the state directory {self._directory} is put back by somebody as fast as it is moved "
            "away; choose another with --state-dir"
        )

    def _take_lock(self) -> None:
        if self._lock_fd >= 0:
            return
        path = Path(f"{self._path}.lock")
        if path.is_symlink() or (path.exists() and not is_trusted(path.lstat())):
            self._put_aside(path, "is no lock file of this user's own")
        flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        give_up_at = time.monotonic() + self._wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() >= give_up_at:
                    os.close(fd)
                    raise JournalError(
                        f"another zeusd uses the state directory {self._directory}; stop it, or "
                        "choose another directory with --state-dir"
                    ) from None
                time.sleep(_LOCK_PAUSE_S)
            else:
                self._lock_fd = fd
                return

    def _put_aside(self, path: Path, why: str) -> None:
        """Moves what must not be used to a name that says so. Renaming follows no link."""
        for number in range(1000):
            aside = Path(f"{path}.bad-{number}")
            if not os.path.lexists(aside):
                break
        try:
            os.rename(path, aside)
        except OSError as error:
            raise JournalError(
                f"{path} {why} and cannot be moved away ({error.strerror}); remove it, or choose "
                "another directory with --state-dir"
            ) from None
        log.error(
            "%s %s and was put aside as %s; limits may have to be reset by hand",
            path,
            why,
            aside.name,
            extra={"event": "quarantined", "path": str(aside)},
        )

    def _append(self, record: list[Any]) -> None:
        if self._fd < 0:
            self._prepare_directory()
            self._take_lock()
        if self._fd < 0 or self._lines >= COMPACT_AFTER_LINES:
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
        aside = Path(f"{self._path}.new")
        if os.path.lexists(aside) and not is_trusted(aside.lstat()):
            self._put_aside(aside, "is no file of this user's own")
        aside.unlink(missing_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
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
            found = self._path.lstat()
        except FileNotFoundError:
            return {}
        if not is_trusted(found):
            self._put_aside(self._path, "is no journal of this user's own")
            return {}
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                *lines, torn = file.read().split(b"\n")
        except OSError as error:
            self._put_aside(self._path, f"cannot be read ({error.strerror})")
            return {}
        if torn:
            log.warning(
                "journal ended in half a record, which was never acted upon",
                extra={"event": "journal_torn", "path": str(self._path)},
            )
        try:
            said = replay(lines, self._boot)
        except ValueError as error:
            self._put_aside(self._path, f"cannot be used ({error})")
            return {}
        if said.old_boot:
            log.info("journal is of another boot, dropped", extra={"event": "journal_old_boot"})
        if said.bad_lines:
            self._put_aside(self._path, f"has broken lines ({said.bad_lines[:5]}), the rest counts")
        return said.entries


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

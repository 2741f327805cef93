"""The journal: pending restores, written to disk before a device is changed.

An append-only file of records (`zeusd.records`). The changes of one event are written and synced
together, and are valid from then on. When the file has twice as many records as it needs, zeusd
writes a new one and renames it, so a complete journal exists at every instant. Records of another
boot are dropped, because the GPUs have been reset since.

No file prevents zeusd from starting: an untrusted one is renamed without being read or followed,
and an unreadable one is kept under another name. While the disk cannot be written, new intents
fail, so zeusd makes no new change on any GPU; all other records are written later. A full disk
still takes deletions, which overwrite the records with newlines.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeusd.core.entries import PENDING, Recorded, Strange, parse
from zeusd.identity import EMBEDDED_PREFIX, is_trusted
from zeusd.records import header, record, replay
from zeusd.runtime.state_files import (
    JournalError,
    keep_aside,
    prepare_directory,
    put_aside,
    take_lock,
)

__all__ = ["EntryChange", "Journal", "JournalError", "orphans"]

log = logging.getLogger(__name__)

REWRITE_AFTER = 4096
"""Records in the file before it is rewritten for the first time."""


@dataclass(slots=True)
class EntryChange:
    """A change of one entry.

    Attributes:
        entry: The new entry; None deletes it.
        intent: Whether something else depends on it, which is not done if this cannot be written.
            Other changes are written later.
    """

    key: str
    entry: Recorded | None
    intent: bool = False


class Journal:
    """A durable map from keys to entries, with one owner at a time.

    Attributes:
        failure: Why the last record could not be written; None: it could.
    """

    def __init__(
        self, directory: str | os.PathLike[str], name: str, boot: str, wait_s: float = 0.0
    ) -> None:
        self._directory = Path(directory)
        self._path = self._directory / name
        self._boot = boot
        self._wait_s = wait_s
        self._entries: dict[str, Recorded] = {}
        self._lines: dict[str, bytes] = {}
        # By key, the synced entry if that is not the newest one, ...
        self._durable: dict[str, Recorded | None] = {}
        # ... and the entry in the file, if the newest one is not even there.
        self._late: dict[str, Recorded | None] = {}
        self._records = 0
        self._size = 0
        self._rewrite_after = REWRITE_AFTER
        self._lock_fd = -1
        self._fd = -1
        self.failure: OSError | None = None

    @property
    def path(self) -> Path:
        """The journal's file."""
        return self._path

    def open(self) -> dict[str, Recorded]:
        """Locks the journal for this process and returns its entries.

        Raises:
            JournalError: Another process has the journal, or a file in its place cannot be moved
                away.
        """
        try:
            prepare_directory(self._directory)
            try:
                self._take_lock(self._wait_s)
            finally:
                self._load()  # even if nothing can be written, what it says must be restored
            self._rewrite()
        except OSError as error:
            self.failure = error
        return dict(self._entries)

    def commit(self, changes: Sequence[EntryChange] = (), sync: bool = True) -> None:
        """Appends changes together, in order, after those still to be written.

        Raises:
            OSError: Intents are discarded; the others will be written later. Only deletions may be
                durable, those before the first of the others.
        """
        batch = (
            [EntryChange(key, self._entries.get(key)) for key in self._late] if self._late else []
        )
        added: set[str] = set()
        for change in changes:
            if change.entry is not None:
                added.add(change.key)
            elif change.key not in self._entries and change.key not in added:
                continue  # no entry to delete
            batch.append(change)
        if not batch:
            return
        try:
            lines = self._append(batch, sync)
        except OSError:
            self._delay([change for change in changes if not change.intent])
            self._erase()
            if self._late or any(change.intent for change in changes):
                raise
            return
        for change, line in zip(batch, lines, strict=True):
            self._apply(change, line)
        self._late.clear()
        if sync:
            self._durable.clear()
        self._rewrite_if_grown()

    def retry(self) -> None:
        """Writes what could not be written, or finds out whether it could be now: see `failure`."""
        with contextlib.suppress(OSError):
            if self._late:
                self.commit()
            elif self._fd < 0:
                self._create()
            else:
                # More bytes than a record.
                self._write(b"\n" * 512, sync=True)  # empty lines are no records

    def _create(self) -> None:
        """Writes the whole journal."""
        try:
            prepare_directory(self._directory)
            self._take_lock(0.0)
            self._rewrite()
        except JournalError as error:
            self.failure = OSError(errno.EBUSY, str(error))
            raise self.failure from None
        except OSError as error:
            self.failure = error
            raise
        self.failure = None

    def durable(self, key: str) -> Recorded | None:
        """The valid entry of a key that is certainly on disk; None: none."""
        return self._durable[key] if key in self._durable else self._entries.get(key)

    def states(self, key: str) -> list[Recorded | None]:
        """The entries of a key that the next zeusd may find: what is in the file, and what is still
        to be written."""
        newest = self._entries.get(key)
        return [self._late[key], newest] if key in self._late else [newest]

    def verify(self) -> None:
        """Writes the file again if it was removed or replaced.

        Raises:
            OSError: It cannot be written.
        """
        if self._fd < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self._path), os.fstat(self._fd)):
                return
        log.error(
            "the journal %s was removed or replaced; zeusd writes it again",
            self._path,
            extra={"event": "journal_removed"},
        )
        self._create()

    def close(self) -> None:
        """Unlocks the journal for another process."""
        if self._late:
            with contextlib.suppress(OSError):
                self.commit()
        for fd in (self._fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._lock_fd = -1

    def delete(self) -> None:
        """Removes the journal, whose entries are no longer valid."""
        for path in (self._path, Path(f"{self._path}.lock")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        self._late.clear()
        self.close()

    @property
    def empty(self) -> bool:
        """Whether no restore is pending."""
        return not any(key.startswith(PENDING) for key in self._entries)

    # --------------------------------------------------------------------------------- internals

    def _take_lock(self, wait_s: float) -> None:
        if self._lock_fd < 0:
            self._lock_fd = take_lock(Path(f"{self._path}.lock"), wait_s)

    def _delay(self, changes: Iterable[EntryChange]) -> None:
        """Keeps changes that could not be written now."""
        for change in changes:
            key = change.key
            filed = self._late.pop(key) if key in self._late else self._entries.get(key)
            # What is deleted is void at once: it may be from a driver that is no longer loaded.
            self._late[key] = None if change.entry is None else filed  # the newest is the last
            self._apply(change, self._line(key, change.entry))

    def _erase(self) -> None:
        """Deletes in the file, without needing space, up to the first change that needs some.

        A later deletion may rely on that change.
        """
        gone = [*itertools.takewhile(lambda key: key not in self._entries, self._late)]
        if not gone or self._lock_fd < 0:
            return
        keys = b"|".join(re.escape(json.dumps(key).encode()) for key in gone)
        records = re.compile(rb"^[^[\n]*\[(?:%s)[],].*" % keys, re.MULTILINE)
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "r+b") as file:
                # Older records first, so that none is in force again if this is interrupted.
                erased = records.sub(lambda match: b"\n" * len(match[0]), file.read())
                file.seek(0)
                file.write(erased)
                file.flush()
                os.fdatasync(fd)
            for key in gone:
                del self._late[key]

    def _line(self, key: str, entry: Recorded | None) -> bytes:
        return record(self._boot, key, None if entry is None else entry.to_json())

    def _apply(self, change: EntryChange, line: bytes) -> None:
        """The newest entry of a key, which may not be durable yet."""
        self._durable.setdefault(change.key, self._entries.get(change.key))
        if change.entry is None:
            self._durable[change.key] = None
            self._entries.pop(change.key, None)
            self._lines.pop(change.key, None)
        else:
            self._entries[change.key] = change.entry
            self._lines[change.key] = line

    def _append(self, changes: Sequence[EntryChange], sync: bool) -> list[bytes]:
        """Writes records at the end of the file, and returns them; all of them or none."""
        if self._fd < 0:
            self._create()
        self.verify()
        lines = [self._line(change.key, change.entry) for change in changes]
        self._write(b"".join(lines), sync)
        self._records += len(lines)
        return lines

    def _write(self, data: bytes, sync: bool) -> None:
        """Appends all of it or nothing."""
        try:
            if os.write(self._fd, data) != len(data):
                raise OSError(errno.ENOSPC, "the journal's file system is full")
            if sync:
                os.fdatasync(self._fd)
        except OSError as error:
            self.failure = error
            # A record that zeusd did not act on must not be found later.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self.failure = None
        self._size += len(data)

    def _rewrite_if_grown(self) -> None:
        """Rewrites at most one record for each appended one, whatever the size."""
        if self._records <= self._rewrite_after:
            return
        try:
            self._rewrite()
        except (OSError, JournalError) as error:
            self._rewrite_after = 2 * self._records
            log.warning(
                "the journal %s cannot be rewritten (%s); it grows until it can be",
                self._path,
                error,
                extra={"event": "journal_not_rewritten"},
            )

    def _rewrite(self) -> None:
        aside = Path(f"{self._path}.new")
        if os.path.lexists(aside) and not is_trusted(aside.lstat()):
            put_aside(aside, "is not a file of this user")
        aside.unlink(missing_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(aside, flags, 0o600)
        for key in self._late:
            if key in self._entries:
                self._lines[key] = self._line(key, self._entries[key])
        try:
            whole = b"".join([header(self._boot), *self._lines.values()])
            with open(fd, "wb", closefd=False) as file:
                file.write(whole)
            os.fsync(fd)
            os.rename(aside, self._path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                aside.unlink()  # other programs may need the space
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size = fd, len(whole)
        self._sync_directory()
        self._records = len(self._lines)
        self._rewrite_after = max(REWRITE_AFTER, 2 * self._records)
        self._durable.clear()
        self._late.clear()

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _load(self) -> None:
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return
        if not is_trusted(status):
            put_aside(self._path, "is not a file that this user alone may write")
            return
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as file:
                said = replay(file.read(), self._boot)
        except OSError as error:
            put_aside(self._path, f"cannot be read ({error.strerror})")
            return
        if said.trouble is not None:
            keep_aside(self._path, said.trouble)
        if said.torn:
            log.warning(
                "the last record of the journal %s is incomplete; zeusd never acted on it",
                self._path,
                extra={"event": "journal_torn", "path": str(self._path)},
            )
        if said.old_boot:
            log.info("dropping the journal of another boot", extra={"event": "journal_old_boot"})
        for key, entry in said.entries.items():
            self._entries[key] = parse(key, entry)
            self._lines[key] = record(self._boot, key, entry)
            if isinstance(self._entries[key], Strange):
                log.error(
                    "journal entry %s cannot be read and is ignored",
                    key,
                    extra={"event": "journal_bad_entry", "key": key},
                )


def orphans(
    directory: str | os.PathLike[str], boot: str
) -> Iterator[tuple[Journal, dict[str, Recorded]]]:
    """Journals of embedded engines that ended with pending restores, opened, with their entries.

    The caller makes the entries durable elsewhere, and then deletes the journal.
    """
    for path in sorted(Path(directory).glob(f"{EMBEDDED_PREFIX}*")):
        if path.suffix:
            continue
        orphan = Journal(directory, path.name, boot)
        try:
            entries = orphan.open()
        except JournalError:
            continue  # its owner is running, or it belongs to another user
        yield orphan, entries

"""A journal that no zeusd owns: reads its pending restores, and records those that succeeded.

Standard library only, for `zeusd restore`. The daemon uses `zeusd.runtime.journal`; the records'
format is in `zeusd.records`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zeus_ipc.controls import SPECS, Control
from zeus_ipc.parsing import read_file
from zeusd.identity import flock_within, is_trusted, open_process
from zeusd.records import Entry, Replayed, record, replay
from zeusd.restore_rule import HIGHER, SETTLE_S, Value

CONTROLS = frozenset(control.value for control in SPECS)


@dataclass
class PendingEntry:
    """The pending restore of one control.

    Attributes:
        holder_lives: Whether the holder still runs, and must be told that it lost the lease.
    """

    key: str
    entry: Entry
    holder_lives: bool


class OwnerlessJournal:
    """A journal that no zeusd owns, locked, with its pending restores."""

    def __init__(
        self, path: Path, boot: str, entries: dict[str, Entry], say: Callable[[str], None]
    ) -> None:
        self.path = path
        self._boot = boot
        self._entries = entries
        self._say = say
        self._guard = threading.Lock()
        self._changes: dict[str, Entry | None] = {}
        self._kept: set[str] = set()

    @property
    def driver(self) -> Entry:
        """How to reach the driver, and the load of the driver that the entries refer to."""
        return self._entries.get("driver", {})

    @property
    def settle_s(self) -> float:
        """How long after a write the driver may apply it."""
        settle_s = self.driver.get("settle_s")
        return settle_s if isinstance(settle_s, (int, float)) else SETTLE_S

    def pending(
        self, everything: bool, unique_inodes: bool
    ) -> tuple[list[PendingEntry], list[str]]:
        """The restores that are due, and the keys of entries that are not understood."""
        everything = everything or "stopping" in self._entries
        if everything:
            self._fall_back()
        entries, strange = [], []
        for key, entry in self._entries.items():
            if not key.startswith("pending/"):
                continue
            if not _is_complete(entry):
                strange.append(key)
                continue
            pid, cookie = entry["holder"]
            pidfd = open_process(pid, cookie, unique_inodes)
            if pidfd is not None:
                os.close(pidfd)
            if everything or pidfd is None or entry.get("ending"):
                entries.append(
                    PendingEntry(key, self._bounded(entry), holder_lives=pidfd is not None)
                )
        return entries, strange

    def announce(self, due: list[PendingEntry]) -> None:
        """Records fallen ceilings, and in each entry what is written next, as zeusd does."""
        for one in due:
            target, written = [*one.entry["target"]], one.entry["values"]
            if target not in written and (written or one.entry.get("overwrite") == HIGHER):
                listed = {name: [*one.entry[name], target] for name in ("values", "doubts")}
                self._changes[one.key] = {**self._entries[one.key], **listed}
        self._put(self._changes)

    def _bounded(self, restore: Entry) -> Entry:
        """A pending restore with its target bounded by the ceilings, which may have been set after
        it."""
        control = f"{restore['gpu']}/{restore['control']}"
        target = tuple(restore["target"])
        for key, entry in self._entries.items():
            if key.startswith(f"ceiling/{control}/"):
                target = _least(target, entry, restore["control"])
        return {**restore, "target": [*target]}

    def _fall_back(self) -> None:
        """Applies the fallbacks of all ceilings, because no zeusd will enforce their deadlines. A
        limit is lowered to one like a lease that ends."""
        for key, entry in [*self._entries.items()]:
            kind, *names = key.split("/", 3)
            if kind != "ceiling" or len(names) != 3 or entry.get("deadline_ns") is None:
                continue
            fallback = entry.get("fallback")
            lower: Entry = {"gpu": names[0], "control": names[1], "holder": [0, 0], "uid": 0}
            lower |= {"client": "", "since_ns": 0, "ttl_ns": 0, "target": fallback}
            lower |= {"values": [], "doubts": [], "overwrite": HIGHER, "ending": "ceiling"}
            if _is_complete(lower):
                then = {**entry, "value": fallback, "deadline_ns": None, "fallback": None}
                pending = f"pending/{names[0]}/{names[1]}"
                self._entries |= {key: then, pending: self._entries.get(pending, lower)}
                self._changes |= {key: then, pending: self._entries[pending]}

    def settle(self, one: PendingEntry, holds: Value | None = None) -> None:
        """Mark as restored. The next zeusd tells a running holder that it lost the lease.

        Args:
            holds: The value left in force, of a control with ceilings: it is zeusd's, and follows
                another target later. None: it is another program's.
        """
        key, restore = one.key, one.entry
        changes: dict[str, Entry | None] = {}
        if one.holder_lives:
            gpu, control, (pid, cookie) = (restore[name] for name in ("gpu", "control", "holder"))
            reason = "zeusd had failed, and everything was restored"
            loss = {"gpu": gpu, "control": control, "process": [pid, cookie], "reason": reason}
            changes[f"loss/{gpu}/{control}/{pid}.{cookie}"] = loss
        if holds is not None and SPECS[Control(restore["control"])].ceilings:
            changes[f"resting/{restore['gpu']}/{restore['control']}"] = {"value": [*holds]}
        self._put({**changes, key: None})

    def _put(self, changes: dict[str, Entry | None]) -> None:
        """Appends records, in order."""
        if not changes:
            return
        data = b"".join(record(self._boot, key, entry) for key, entry in changes.items())
        try:
            with self._guard:
                fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    os.write(fd, data)
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        except OSError as error:
            # The next reader finds the control at its target, and does not write.
            pending = (key for key in changes if key.startswith("pending/"))
            if kept := [key for key in pending if key not in self._kept]:
                self._kept.update(kept)
                keys = ", ".join(kept)
                self._say(f"{self.path}: cannot be written ({error.strerror}), so it keeps {keys}")


def _least(target: Value, ceiling: Entry, control: str) -> Value:
    """The lower of a target and a ceiling's present value; the target, if the entry is not a
    ceiling."""
    if not SPECS[Control(control)].ceilings:
        return target
    deadline, bound = ceiling.get("deadline_ns"), ceiling.get("value")
    if type(deadline) is int and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= deadline:
        bound = ceiling.get("fallback")
    known = isinstance(bound, list) and all(type(part) is int for part in bound)
    return min(target, tuple(bound)) if known and bound else target


def _is_complete(entry: Entry) -> bool:
    """Whether an entry has all fields that a restore needs; one of another version may lack
    some."""
    try:
        pid, cookie = entry["holder"]
        numbers = [pid, cookie, *entry["target"]]
        numbers += [
            part for name in ("values", "doubts") for value in entry[name] for part in value
        ]
        known = entry["control"] in CONTROLS and isinstance(entry["gpu"], str)
    except (KeyError, TypeError, ValueError):
        return False
    return known and all(type(number) is int for number in numbers)


@contextlib.contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Whether no zeusd owns the journal; locks it."""
    # Opened for reading, because the disk may be full or read-only; what is there may be a FIFO.
    flags = os.O_CREAT | os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(f"{path}.lock", flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        yield True  # if no lock can be created, nobody has one
        return
    try:
        yield flock_within(fd, 0.0)
    finally:
        os.close(fd)


def read(path: Path, boot: str) -> Replayed:
    """Reads a journal.

    Raises:
        OSError: It cannot be read.
        ValueError: Another user may have written it.
    """
    # Largest journal that is read.
    return replay(read_file(path, 64 << 20, is_trusted), boot)

"""Finds the owner of a subordinate uid: a user may have 65,536 of them in user namespaces
(subuid(5))."""

from __future__ import annotations

import logging
import os
import pwd
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate

from zeus_ipc.parsing import Malformed, read_file

log = logging.getLogger(__name__)

SUBUID = "/etc/subuid"
READ_NS = 10_000_000_000
"""Longest time until a change of the file is noticed."""

MAX_UID = 2**32


class SubordinateUids:
    """Maps uids to their owners, from the file's present contents."""

    def __init__(self, path: str = SUBUID, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._path = path
        self._clock_ns = clock_ns
        self._read_ns: int | None = None
        self._identity: tuple[int, int] | None = None
        self._ranges: list[tuple[int, int, int]] = []
        self._starts: list[int] = []
        self._ends: list[int] = []  # the furthest end of all ranges up to each

    def owner(self, uid: int) -> int:
        """The user to whom this uid was delegated; the uid itself if it was not."""
        now_ns = self._clock_ns()
        if self._read_ns is None or now_ns - self._read_ns > READ_NS:
            self._read_ns = now_ns
            self._look()
        position = bisect_right(self._starts, uid) - 1
        while position >= 0 and uid < self._ends[position]:  # ranges may be in each other
            start, count, owner = self._ranges[position]
            if uid < start + count:
                return owner
            position -= 1
        return uid

    def _look(self) -> None:
        try:
            status = os.stat(self._path)
            identity = (status.st_ino, status.st_mtime_ns)
            if identity == self._identity:
                return
            text = read_file(self._path, 16 << 20).decode(errors="replace")
            self._identity, self._ranges = identity, parse(text.splitlines())
        except FileNotFoundError:
            self._identity, self._ranges = None, []
        except (OSError, Malformed) as error:
            self._identity, self._ranges = None, []
            log.warning("cannot read %s: %s", self._path, error)
        # Of equal starts, the smallest is found first.
        self._ranges.sort(key=lambda one: (one[0], -one[1]))
        self._starts = [start for start, _, _ in self._ranges]
        self._ends = [*accumulate((start + count for start, count, _ in self._ranges), max)]


def parse(lines: Iterable[str]) -> list[tuple[int, int, int]]:
    """`(first uid, count, owner)` for each valid line, which has the owner's name or number.

    If nobody has this name, or the users' directory does not answer, the owner is the first of the
    name's subordinate uids: they are one user all the same.
    """
    ranges: list[tuple[int, int, int]] = []
    unknown: dict[str, int] = {}
    for line in lines:
        parts = line.strip().split(":")
        if len(parts) != 3 or line.startswith("#"):
            continue
        try:
            start, count = int(parts[1]), int(parts[2])
            if not (0 < start < MAX_UID and count > 0):
                continue
            owner = int(parts[0]) if parts[0].isdecimal() else pwd.getpwnam(parts[0]).pw_uid
        except KeyError:
            owner = unknown.setdefault(parts[0], start)
        except ValueError:
            continue
        if owner < MAX_UID:
            ranges.append((start, count, owner))
    return ranges

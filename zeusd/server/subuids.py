"""Finds the owner of a subordinate uid: a user may have 65,536 of them in user namespaces
(subuid(5))."""

from __future__ import annotations

import logging
import os
import pwd
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)

SUBUID = "/etc/subuid"
READ_NS = 10_000_000_000
"""Longest time until a change of the file is noticed."""


class SubordinateUids:
    """Maps uids to their owners, from the file's present contents."""

    def __init__(self, path: str = SUBUID, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._path = path
        self._clock_ns = clock_ns
        self._read_ns: int | None = None
        self._identity: tuple[int, int] | None = None
        self._ranges: list[tuple[int, int, int]] = []
        self._starts: list[int] = []

    def owner(self, uid: int) -> int:
        """The user to whom this uid was delegated; the uid itself if it was not."""
        now_ns = self._clock_ns()
        if self._read_ns is None or now_ns - self._read_ns > READ_NS:
            self._read_ns = now_ns
            self._look()
        position = bisect_right(self._starts, uid) - 1
        if position >= 0:
            start, count, owner = self._ranges[position]
            if uid < start + count:
                return owner
        return uid

    def _look(self) -> None:
        try:
            found = os.stat(self._path)
            identity = (found.st_ino, found.st_mtime_ns)
            if identity != self._identity:
                text = Path(self._path).read_text(encoding="utf-8", errors="replace")
                self._ranges = sorted(parse(text.splitlines()))
                self._starts = [start for start, _, _ in self._ranges]
            self._identity = identity
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("cannot read %s: %s", self._path, error.strerror)
            self._identity, self._ranges, self._starts = None, [], []


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
            owner = int(parts[0]) if parts[0].isdecimal() else pwd.getpwnam(parts[0]).pw_uid
        except KeyError:
            owner = unknown.setdefault(parts[0], start)
        except ValueError:
            continue
        if start > 0 and count > 0:
            ranges.append((start, count, owner))
    return ranges

"""Sets that wait for one control, in the order in which they came."""

from __future__ import annotations

from collections import deque

from zeusd.core.leasing import Set
from zeusd.core.model import Process

MAX_WAITING = 32
"""Sets that may wait for one control."""


class SetQueue:
    """Bounded; of several sets that nobody waits for, only the newest is kept."""

    __slots__ = ("_sets",)

    def __init__(self) -> None:
        self._sets: deque[Set] = deque()

    @property
    def full(self) -> bool:
        """Whether there is no room for another."""
        return len(self._sets) >= MAX_WAITING

    def add(self, item: Set) -> list[Set]:
        """Adds a set. Returns those that are not wanted any more because of it."""
        superseded = [] if item.block else self._take(item.peer.process, unwaited=True)
        self._sets.append(item)
        return superseded

    def next(self) -> Set | None:
        """Takes the first; None: there is none."""
        return self._sets.popleft() if self._sets else None

    def take(self, process: Process, client: str | None = None) -> list[Set]:
        """Takes those of a process, or of one client object in it."""
        return self._take(process, client)

    def clear(self) -> list[Set]:
        """Takes all."""
        sets, self._sets = self._sets, deque()
        return [*sets]

    def _take(
        self, process: Process, client: str | None = None, unwaited: bool = False
    ) -> list[Set]:
        taken = [
            item
            for item in self._sets
            if item.peer.process == process
            and client in (None, item.client)
            and not (unwaited and (item.block or item.value is None))
        ]
        if taken:
            self._sets = deque(item for item in self._sets if item not in taken)
        return taken

"""Sets that wait for one control, in the order in which they came."""

from __future__ import annotations

from collections import deque

from zeusd.core.leasing import Set
from zeusd.core.model import Process

MAX_WAITING = 32
"""Sets that may wait for one control."""


class SetQueue(deque[Set]):
    """Of several sets that nobody waits for, only the newest is kept."""

    def add(self, item: Set) -> list[Set]:
        """Adds a set. Returns those that are not wanted any more because of it."""
        superseded = [] if item.block else self._take(item.peer.process, unwaited=True)
        self.append(item)
        return superseded

    def take(self, process: Process, client: str | None = None) -> list[Set]:
        """Takes those of a process, or of one client object in it."""
        return self._take(process, client)

    def take_all(self) -> list[Set]:
        """Takes all."""
        sets = [*self]
        self.clear()
        return sets

    def _take(
        self, process: Process, client: str | None = None, unwaited: bool = False
    ) -> list[Set]:
        taken = [
            item
            for item in self
            if item.peer.process == process
            and client in (None, item.client)
            and not (unwaited and (item.block or item.value is None))
        ]
        for item in taken:
            self.remove(item)
        return taken

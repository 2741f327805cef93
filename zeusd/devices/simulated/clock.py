"""A virtual clock, for tests that train for hours in milliseconds."""

from __future__ import annotations

import threading
from typing import Protocol


class Timed(Protocol):
    """Something that must be called when its next event is due."""

    @property
    def next_ns(self) -> int | None:
        """Time of that event; None: none is due."""

    def run_due(self, now_ns: int) -> None:
        """Handles an event that is due."""


class VirtualClock:
    """Replaces both `time.monotonic_ns` (call it) and `time.sleep`."""

    def __init__(self, start_ns: int = 1_000_000_000) -> None:
        self._now_ns = start_ns
        self._attached: list[Timed] = []
        self._guard = threading.RLock()

    def __call__(self) -> int:
        """The time, ns."""
        return self._now_ns

    def sleep(self, seconds: float) -> None:
        """Advances the time, and runs attached objects when they become due."""
        with self._guard:
            end_ns = self._now_ns + max(0, round(seconds * 1e9))
            while self._attached:
                due = [(one.next_ns, one) for one in self._attached]
                at_ns, one = min(
                    ((at_ns, one) for at_ns, one in due if at_ns is not None),
                    key=lambda pair: pair[0],
                    default=(end_ns + 1, None),
                )
                if at_ns > end_ns or one is None:
                    break
                self._now_ns = max(self._now_ns, at_ns)
                one.run_due(self._now_ns)
            self._now_ns = max(self._now_ns, end_ns)

    def attach(self, timed: Timed) -> None:
        """Attaches an object, which is called when its events are due."""
        with self._guard:
            self._attached.append(timed)

    def detach(self, timed: Timed) -> None:
        """No longer."""
        with self._guard:
            if timed in self._attached:
                self._attached.remove(timed)

    def hurry(self) -> None:
        """Advances the time until an attached object was called, unless it advances already."""
        if self._guard.acquire(blocking=False):
            try:
                due = [one.next_ns for one in self._attached]
                next_ns = min((at_ns for at_ns in due if at_ns is not None), default=None)
                if next_ns is not None:
                    self.sleep(max(0, next_ns - self._now_ns) / 1e9)
            finally:
                self._guard.release()

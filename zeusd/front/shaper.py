"""Each user's requests at a bounded pace, so that nobody's flood is anybody else's delay.

What comes faster waits in a queue of its user's own; when that is full, requests are refused.
Pure: it is told the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar

from zeusd.core.rates import RateLimiter

MAX_WAITING = 512
"""Requests of one user that may wait."""

BURST_S = 0.05
"""So much of a second's requests may come at once."""

COSTS = {
    "state": 4.0,
    "clocks": 4.0,
    "energy": 2.0,
    "power": 2.0,
    "windows": 4.0,
    "timeline": 8.0,
    "hello": 2.0,
    "leases": 2.0,
    "policy": 8.0,
    "audit": 8.0,
    "metrics": 16.0,
    "restore": 8.0,
}
"""Tokens of operations that cost zeusd more than others."""

T = TypeVar("T")


class Verdict(Enum):
    """What becomes of a request."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"


class Shaper(Generic[T]):
    """One bucket and one queue for each user.

    Args:
        per_second: Requests of one user each second.
    """

    def __init__(self, per_second: float) -> None:
        self._limiter = RateLimiter(per_second, per_second * BURST_S)
        self._waiting: dict[int, deque[T]] = {}

    def configure(self, per_second: float) -> None:
        """Another pace from now on."""
        self._limiter = RateLimiter(per_second, per_second * BURST_S)

    def offer(self, uid: int, item: T, now_ns: int) -> Verdict:
        """A request came. The caller handles it NOW, or refuses it if NEVER."""
        queue = self._waiting.get(uid)
        if queue is None:
            if self._limiter.take(uid, now_ns):
                return Verdict.NOW
            queue = self._waiting[uid] = deque()
        if len(queue) >= MAX_WAITING:
            return Verdict.NEVER
        queue.append(item)
        return Verdict.LATER

    def charge(self, uid: int, operation: str, now_ns: int) -> None:
        """A request that was let through turned out to be a costly one."""
        extra = COSTS.get(operation, 1.0) - 1.0
        if extra:
            self._limiter.spend(uid, extra, now_ns)

    def due(self, now_ns: int) -> Iterator[T]:
        """What has waited long enough: of each user one, and so on while there is any."""
        progress = bool(self._waiting)
        while progress:
            progress = False
            for uid in list(self._waiting):
                if self._limiter.take(uid, now_ns):
                    queue = self._waiting[uid]
                    yield queue.popleft()
                    if not queue:
                        del self._waiting[uid]
                    progress = bool(self._waiting)

    def drop(self, uid: int) -> None:
        """Forgets what waits of one user."""
        self._waiting.pop(uid, None)

    @property
    def waiting(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

"""Decides which user's connections to read next, and how much. Pure arithmetic over the caller's
clock.

Users take turns, and each user's connections take turns within them, so one user delays others by
at most a turn. A token bucket per user limits messages and bytes per second. While a user's bucket
is empty, that user's data wait in the kernel buffers of the user's own processes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The server's limits per user. A subordinate uid counts as its owner.

    Attributes:
        connections: Concurrent connections; further ones are closed at once.
        requests_per_second: Request rate; excess requests wait. A request that takes the server's
            time counts as several.
        bytes_per_second: The same for bytes.
        accepts_per_second: New connections per second; further ones are closed at once.
    """

    connections: int = 128
    requests_per_second: float = 2000.0
    bytes_per_second: float = 4e6
    handshakes: int = 32
    accepts_per_second: float = 200.0


class Cost(NamedTuple):
    """The cost, for its user, of reading a connection once."""

    requests: float
    bytes: int = 0


BURST_S = 0.05
"""Size of a burst, as a share of a second's requests and bytes."""

REFILL = 4.0
"""Requests for which a waiting user is woken, because each wake-up has a cost."""

MAX_FAULTS = 8.0
"""Broken rules, of which one is forgiven each second."""

PENALTY_NS = 1_000_000_000
"""Time for which a user's new connections are closed after `MAX_FAULTS` broken rules."""


@dataclass(slots=True, eq=False)
class UserShare(Generic[T]):
    """One user's connections, token buckets and counts of refusals."""

    uid: int
    connections: int = 0
    handshakes: int = 0
    limited_ns: int = 0
    refused: int = 0
    faults: int = 0
    reason: str = ""
    _readable: deque[T] = field(default_factory=deque)
    _runnable: bool = False
    _waits_since_ns: int | None = None
    _requests: float = 0.0
    _bytes: float = 0.0
    _filled_ns: int = 0
    _accepts: float = 0.0
    _accepted_ns: int = 0
    _recent_faults: float = 0.0
    _fault_ns: int = 0
    _shut_until_ns: int = 0

    @property
    def waiting(self) -> bool:
        """Whether its connections wait for the rate limit."""
        return self._waits_since_ns is not None


class Turns(Generic[T]):
    """Gives turns to users."""

    def __init__(self, limits: Limits) -> None:
        self.configure(limits)
        self._users: dict[int, UserShare[T]] = {}
        self._runnable: deque[UserShare[T]] = deque()
        self._parked: list[tuple[int, int, UserShare[T]]] = []
        self._number = 0

    def configure(self, limits: Limits) -> None:
        """Changes the limits."""
        self.limits = limits
        self._burst_requests = max(2 * REFILL, limits.requests_per_second * BURST_S)
        self._burst_bytes = max(float(64 * 1024), limits.bytes_per_second * BURST_S)

    @property
    def users(self) -> list[UserShare[T]]:
        """All users with a present or recent connection."""
        return list(self._users.values())

    def user(self, uid: int, now_ns: int) -> UserShare[T]:
        """The state of a user."""
        user = self._users.get(uid)
        if user is None:
            self._drop_idle(now_ns)
            user = self._users[uid] = UserShare(uid)
            user._filled_ns = user._accepted_ns = user._fault_ns = now_ns
            user._requests, user._bytes = self._burst_requests, self._burst_bytes
            user._accepts = float(self.limits.connections)
        return user

    # ------------------------------------------------------------------------------- connections

    def admit(self, user: UserShare[T], now_ns: int) -> str | None:
        """Counts a new connection, or returns why it is refused."""
        limits = self.limits
        user._accepts = min(
            float(limits.connections),
            user._accepts + (now_ns - user._accepted_ns) * 1e-9 * limits.accepts_per_second,
        )
        user._accepted_ns = now_ns
        reason = None
        if now_ns < user._shut_until_ns:
            reason = "broke the protocol's rules again and again"
        elif user.connections >= limits.connections:
            reason = f"has {limits.connections} connections"
        elif user.handshakes >= limits.handshakes:
            reason = f"has {limits.handshakes} connections whose handshake is not over"
        elif user._accepts < 1.0:
            reason = f"connects over {limits.accepts_per_second:g} times a second"
        if reason is not None:
            user.refused += 1
            return reason
        user._accepts -= 1.0
        user.connections += 1
        user.handshakes += 1
        return None

    def fault(self, user: UserShare[T], now_ns: int) -> None:
        """Counts a connection that broke a rule."""
        user.faults += 1
        forgiven = (now_ns - user._fault_ns) * 1e-9
        user._recent_faults = max(0.0, user._recent_faults - forgiven) + 1.0
        user._fault_ns = now_ns
        if user._recent_faults >= MAX_FAULTS:
            user._shut_until_ns = now_ns + PENALTY_NS

    def charge(self, user: UserShare[T], requests: float) -> None:
        """Counts what zeusd did for a user besides reading its connections."""
        user._requests -= requests

    # -------------------------------------------------------------------------------------- turns

    def add(self, user: UserShare[T], connection: T) -> None:
        """Queues a connection with data to read. Add it only once until it was read."""
        user._readable.append(connection)
        if not user._runnable:
            user._runnable = True
            self._runnable.append(user)

    def run(self, now_ns: int, read: Callable[[T], tuple[Cost, bool]]) -> int | None:
        """Gives each runnable user one turn. Returns when to call it again, see `due_ns`."""
        while self._parked and self._parked[0][0] <= now_ns:
            user = heapq.heappop(self._parked)[2]
            if user._waits_since_ns is not None:
                user.limited_ns += now_ns - user._waits_since_ns
                user._waits_since_ns = None
            self._runnable.append(user)
        for _ in range(len(self._runnable)):
            self._turn(self._runnable.popleft(), now_ns, read)
        return self.due_ns() if self._runnable or self._parked else None

    def due_ns(self) -> int | None:
        """When to call `run` again; 0: at once; None: not before a connection is added."""
        if self._runnable:
            return 0
        return self._parked[0][0] if self._parked else None

    def _turn(
        self, user: UserShare[T], now_ns: int, read: Callable[[T], tuple[Cost, bool]]
    ) -> None:
        limits, passed_s = self.limits, (now_ns - user._filled_ns) * 1e-9
        user._filled_ns = now_ns
        user._requests = min(
            self._burst_requests, user._requests + passed_s * limits.requests_per_second
        )
        user._bytes = min(self._burst_bytes, user._bytes + passed_s * limits.bytes_per_second)
        # Requests in one turn; a KiB counts as a quarter of one. In a flood, each step of another
        # user's request waits for one turn of each flooding user, so a turn is short.
        readable, credit = user._readable, 1.0
        while readable and credit > 0 and user._requests >= 1.0 and user._bytes > 0:
            connection = readable.popleft()
            (requests, size), more = read(connection)
            user._requests -= requests
            user._bytes -= size
            credit -= requests + size / 4096
            if more:
                readable.append(connection)
        if not readable:
            user._runnable = False
        elif user._requests < 1.0 or user._bytes <= 0:
            self._park(user, now_ns)
        else:
            self._runnable.append(user)

    def _park(self, user: UserShare[T], now_ns: int) -> None:
        limits = self.limits
        wait_s = max(
            (REFILL - user._requests) / limits.requests_per_second,
            (4096 - user._bytes) / limits.bytes_per_second,
        )
        user._waits_since_ns = now_ns
        self._number += 1
        due_ns = now_ns + max(1_000_000, round(wait_s * 1e9))
        heapq.heappush(self._parked, (due_ns, self._number, user))

    def _drop_idle(self, now_ns: int) -> None:
        """Drops users without any state, before there are too many."""
        if len(self._users) < 1024:
            return
        # Beyond this many users, those without a connection are dropped after this time.
        self._users = {
            uid: user
            for uid, user in self._users.items()
            if user.connections or now_ns - max(user._accepted_ns, user._fault_ns) < 60_000_000_000
        }

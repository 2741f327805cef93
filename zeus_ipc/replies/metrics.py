"""Replies to `metrics`."""

from __future__ import annotations

from zeus_ipc.replies.accounting import LedgerState
from zeus_ipc.wire import Message


class Count(Message):
    """How often something happened, by the values of its labels."""

    labels: dict[str, str]
    count: int


class CallTimes(Message):
    """How long calls of one NVML operation took."""

    operation: str
    """Name in zeusd's NVML interface, such as `set_power_limit`."""
    seconds: float
    """Number of calls."""
    buckets: list[int]
    """Number of calls that took at most each of `CALL_BUCKETS_S`; last, the number of all."""
    errors: dict[str, int]
    """Failures by NVML return code (a decimal string)."""


CALL_BUCKETS_S = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0)


class SourceState(Message):
    """The sampler's newest reading of one device."""

    source: str
    energy_uj: int
    """Energy from an arbitrary start, as `windows` counts it."""
    power_mw: int
    t_ns: int
    """CLOCK_MONOTONIC time of its newest tick."""
    tick_ns: int
    """Update period of its sensors."""


class UserLoad(Message):
    """Refused and delayed requests of one user. Counts start with the daemon."""

    uid: int
    """The user; a subordinate uid counts as its owner."""
    connections: int
    """Open connections."""
    limited_ns: int
    """Time that its requests have waited because of the rate limit."""
    limited: bool
    """Whether requests are waiting now."""
    refused: int
    """Connections that were closed on arrival: too many, or too many per second."""
    faults: int
    """Connections that were closed because they broke ZeroMQ's protocol."""


class Metrics(Message):
    """Result of `metrics`. Counts start with the daemon."""

    t_ns: int
    """CLOCK_MONOTONIC time of this reply."""
    started_ns: int
    """The same for the daemon's start."""
    changes: list[Count]
    """Sets that were written or failed: `control`, `result` (ok, failed)."""
    restores: list[Count]
    """Leases that ended: `reason`, `result`."""
    restore_failures: list[Count]
    """Failed attempts to restore a control: `control`."""
    outside_changes: list[Count]
    """Values set outside zeusd: `control`, `result` (adopted, kept, overridden, noticed)."""
    refusals: list[Count]
    """Sets and acquires that were refused: `code`, see `errors.ErrorCode`."""
    lease_expiries: int
    """Leases whose holder's heartbeat stopped."""
    pending: list[list[str]]
    """[gpu, control] of pending restores."""
    connections: int
    """Connected clients."""
    calls: list[CallTimes]
    """By operation."""
    sources: list[SourceState]
    """By device."""
    users: list[UserLoad] = []
    """Users with refused or delayed requests."""
    ledger: LedgerState | None = None
    """The energy ledger; None: there is none."""

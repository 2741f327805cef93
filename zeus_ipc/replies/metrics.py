"""What `metrics` answers."""

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
    """In all."""
    buckets: list[int]
    """How many took at most `CALL_BUCKETS_S`, each; the last: how many there were."""
    errors: dict[str, int]
    """Failures by NVML return code (a decimal string)."""


CALL_BUCKETS_S = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0)


class SourceState(Message):
    """What the sampler last saw of one device."""

    source: str
    energy_uj: int
    """Energy from an arbitrary start, as `windows` counts it."""
    power_mw: int
    t_ns: int
    """CLOCK_MONOTONIC time of its newest tick."""
    tick_ns: int
    """How often its sensors change."""


class UserLoad(Message):
    """What the server refused to one user, or made it wait for. Counts begin with the daemon."""

    uid: int
    """The user; a subordinate uid counts as its owner."""
    connections: int
    """Open at present."""
    limited_ns: int
    """For how long its requests have waited because they come too fast."""
    limited: bool
    """Whether they wait at present."""
    refused: int
    """Connections that were closed as they came: too many, or too many a second."""
    faults: int
    """Connections that were closed because they broke ZeroMQ's protocol."""


class Metrics(Message):
    """Result of `metrics`. Counts begin with the daemon."""

    t_ns: int
    """CLOCK_MONOTONIC time of this answer."""
    started_ns: int
    """The same of the daemon's start."""
    changes: list[Count]
    """Sets that were written or failed: `control`, `result` (ok, failed)."""
    restores: list[Count]
    """Leases that ended: `reason`, `result`."""
    restore_failures: list[Count]
    """Attempts to put a control back that failed: `control`."""
    outside_changes: list[Count]
    """Values that someone else set: `control`, `result` (adopted, kept, overridden, noticed)."""
    refusals: list[Count]
    """Sets and acquires that were refused: `code`, see `errors.ErrorCode`."""
    lease_expiries: int
    """Leases whose holder fell silent."""
    pending: list[list[str]]
    """[gpu, control] of what could not be restored yet."""
    connections: int
    """Clients that are connected."""
    calls: list[CallTimes]
    """By operation."""
    sources: list[SourceState]
    """By device."""
    users: list[UserLoad] = []
    """Users who were refused something, or made to wait."""
    ledger: LedgerState | None = None
    """The energy ledger; None: there is none."""

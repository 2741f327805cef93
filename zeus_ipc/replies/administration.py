"""Replies to administrators and the exporter: permissions, audit log, a closed driver, metrics."""

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
    """Duration of all calls together."""
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
    limited_ns: dict[str, int] = {}
    """How long a GPU's clocks were limited since the driver was loaded, by reason
    (`limited.REASONS`); empty: the driver does not count it."""


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
    reason: str = ""
    """Why the last of these was closed."""


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
    """Values set outside zeusd: `control`, `result` (adopted, kept, overridden, noticed;
    enforced: the board or its BMC moved the limit in force; lost: locked clocks hold no more)."""
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


class Quiesced(Message):
    """Result of `quiesce`."""

    since_ns: int
    """CLOCK_MONOTONIC time."""
    open: list[str]
    """Device files of the driver that zeusd could not close, if any."""
    pending: list[list[str]]
    """[gpu, control] of restores that failed before; they are retried after `resume`."""


class Permission(Message):
    """What a user may do with one control of one GPU."""

    allowed: bool
    """Whether the user may change it at all."""
    why: str
    """Why not, in one sentence; empty if allowed."""
    ranges: list[list[int]]
    """[smallest, largest] in mW or MHz; a value must lie in one of them; empty: no bound."""


class Policy(Message):
    """Result of `policy`."""

    uid: int
    """The requesting user."""
    admin: bool
    """Whether everything is allowed: other users' leases, `restore`, `persist` and `quiesce`."""
    on_host: bool
    """Whether the requesting process is in zeusd's own pid namespace, and not in a container."""
    gpus: dict[str, dict[str, Permission]]
    """By UUID and control."""


class AuditRecord(Message):
    """One record of the audit log."""

    number: int
    """Number of the record."""
    t_ns: int
    """CLOCK_MONOTONIC time at which it happened."""
    last_ns: int
    """Time of the last of several, see `count`."""
    count: int
    """Successful sets of one control under one lease, one after another, are one record: `old` is
    of the first and `new` of the last. So are equal warnings within ten minutes of each other."""
    event: str
    """ceiling, ceiling_set, ceiling_removed, ceiling_expired, set, restore, restored, persisted,
    lease_ended, lease_expired, restore_failed, restore_forgotten, restore_clamped, outside_change,
    refused, quiesced, resumed, revoked, gpu_found, gpu_lost,
    gpu_returned, driver_changed, restarted: zeusd, at `last_ns`, without records since `t_ns`."""
    warning: bool
    """Whether someone should investigate it."""
    gpu: str | None = None
    control: str | None = None
    uid: int | None = None
    pid: int | None = None
    """None if it is another user's and the reader is not an administrator."""
    command: str | None = None
    """What the process runs, see `LeaseInfo.command`; None as for `pid`."""
    job: str | None = None
    """Its job, see `LeaseInfo.job`; empty if it is in none, None as for `pid`."""
    lease: str | None = None
    """The lease it was made under."""
    old: str | None = None
    """Value before, with its unit."""
    new: str | None = None
    """Value after."""
    reason: str | None = None
    """Why it happened, such as `holder_gone`."""
    result: str | None = None
    """The result, such as `ok`."""


class AuditRecords(Message):
    """Result of `audit`."""

    records: list[AuditRecord]
    """The oldest first."""
    dropped: int
    """Number of older records that are no longer kept."""
    complete_ns: int = 0
    """CLOCK_MONOTONIC time since which no record is missing."""

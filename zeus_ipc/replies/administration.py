"""Replies to administrators: permissions, the audit log, a closed driver."""

from __future__ import annotations

from zeus_ipc.wire import Message


class Quiesced(Message):
    """Result of `quiesce`."""

    since_ns: int
    """CLOCK_MONOTONIC time."""
    open: list[str]
    """Device files of the driver that zeusd could not close, if any."""
    pending: list[list[str]]
    """[gpu, control] of restores that failed before; they are retried after `resume`."""
    owed: list[list[str]]
    """The same, by its former name."""


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
    of the first and `new` of the last."""
    event: str
    """ceiling, ceiling_set, ceiling_removed, ceiling_expired, set, restore, restored, persisted,
    lease_ended, lease_expired, restore_failed, restore_clamped, outside_change, refused,
    quiesced, resumed, revoked, gpu_found, gpu_lost,
    gpu_returned, driver_changed."""
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

"""Replies to sets, heartbeats and restores, and about leases."""

from __future__ import annotations

from zeus_ipc.wire import ControlName, Message


class Applied(Message):
    """Result of a set for one GPU; `Done` if the GPU holds the requested value."""

    applied: list[int] | None = None
    """The GPU's value, as read back: a driver may have rounded it, or moved it into its range. The
    requested value if it cannot be read. In the journal's form, see `Back.value`."""


class Back(Message):
    """Restore target of a control."""

    value: list[int]
    """In the journal's form: [mW], [min MHz, max MHz], [] for unlocked clocks, [0 or 1], [profile,
    ...] ascending."""
    source: str
    """configured: by the site. observed: in force when zeusd first saw it. persisted, fleet,
    job:ID: the ceiling of this name, which is lower. unreadable: the device does not report locked
    clocks, so a restore unlocks them."""


class Acquired(Message):
    """Result of `acquire` for one GPU."""

    back: dict[str, Back]
    """Restore targets by control."""


class Released(Message):
    """Result of `release` and `goodbye`."""

    released: int
    """Number of leases that ended."""


class Restored(Message):
    """Result of `restore` for one GPU."""

    controls: dict[str, str]
    """By control: `ok`; `not_offered`: the driver does not offer it, and zeusd has set nothing;
    `held`: another job holds it, see `Restore.jobs`; `forgotten`, see `Restore.forget`; or why the
    restore is pending."""


class CeilingSet(Message):
    """Result of `set_ceiling` for one GPU."""

    highest: list[int]
    """The highest value that may be set now, in the journal's form, see `Back.value`."""


class HeartbeatResult(Message):
    """Result of `heartbeat`."""

    leases: int
    """Number of leases that the process holds."""
    ttl_ms: int
    """The shortest TTL among them; the site's default if there are none."""
    lost: list[list[str]]
    """[gpu, control] of leases that the process lost and has not acquired or released since."""


class PublishedProfile(Message):
    """The value of power limits to a job, see `PublishProfile`."""

    limits_mw: list[int]
    """Ascending."""
    progress: list[float]
    """Relative speed at each; 1 at the highest limit."""


class LeaseInfo(Message):
    """One lease."""

    gpu: str
    control: ControlName
    pid: int | None
    """The holder; None if it is another user's and the reader is not an administrator."""
    uid: int
    """The holder's user."""
    since_ns: int
    """CLOCK_MONOTONIC time at which it was acquired."""
    value: list[int] | None
    """The GPU's value under it, in the journal's form; None: nothing was set yet."""
    asked: list[int] | None = None
    """The holder's last request, if known."""
    restoring: bool
    """Whether the holder is gone and the restore is pending."""
    back: Back
    """The control's restore target."""
    ttl_ms: int
    """Its TTL."""
    expires_ns: int
    """CLOCK_MONOTONIC time at which it expires without a heartbeat."""
    command: str | None = None
    """What the holder runs: its program, with the script of an interpreter (`python train.py`), or
    the command of `zeusctl set`; None as for `pid`."""
    job: str | None = None
    """The holder's job, as a control group that root owns names it: Slurm's job id, or its SLUID
    from Slurm 26.05 on, or Kubernetes' pod uid; None if it is in none, and as for `pid`."""
    trouble: str | None = None
    """Why the last attempt to restore the control failed."""
    pending_ns: int | None = None
    """CLOCK_MONOTONIC time at which the first attempt failed."""
    profile: PublishedProfile | None = None
    """The profile that the holder has published; None: none."""
    measuring: bool = False
    """Whether the holder is measuring and needs its highest limit."""
    needs_mw: int | None = None
    """The limit below which it misses its latency objective; None: it has none."""


class LeaseList(Message):
    """Result of `leases`."""

    leases: list[LeaseInfo]

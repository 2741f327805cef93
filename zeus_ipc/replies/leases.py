"""What answers sets, leases, heartbeats and restores."""

from __future__ import annotations

from zeus_ipc.wire import ControlName, Message


class Applied(Message):
    """Result of a set for one GPU; `Done` where it holds what was asked."""

    applied: list[int] | None = None
    """What the GPU holds now, as read back: a driver may have rounded what was asked, or moved it
    into its range. What was asked, where it cannot be read. As in the journal, see `Back.value`."""


class Back(Message):
    """Restore target of a control."""

    value: list[int]
    """As in the journal: [mW], [min MHz, max MHz], [] for unlocked clocks, [0 or 1], [profile, ...]
    ascending."""
    source: str
    """configured: by the site. observed: in force when zeusd first saw it. persisted, fleet,
    job:ID: the ceiling of this name, which is lower. unreadable: the device cannot tell what clocks
    were locked to before, so they are unlocked."""


class Acquired(Message):
    """Result of `acquire` for one GPU."""

    back: dict[str, Back]
    """By control, what it will be restored to."""


class Released(Message):
    """Result of `release` and `goodbye`."""

    released: int
    """How many leases have ended."""


class Restored(Message):
    """Result of `restore` for one GPU."""

    controls: dict[str, str]
    """By control: `ok`; `not_offered`: the driver does not offer it, and zeusd has set nothing; or
    why it could not be restored yet."""


class CeilingSet(Message):
    """Result of `set_ceiling` for one GPU."""

    highest: list[int]
    """The most that may be set now, as in the journal, see `Back.value`."""


class HeartbeatResult(Message):
    """Result of `heartbeat`."""

    leases: int
    """How many leases the process holds."""
    ttl_ms: int
    """The shortest TTL among them; without any, the site's default."""
    lost: list[list[str]]
    """[gpu, control] of leases that the process lost and has not acquired or released since."""


class PowerProfile(Message):
    """What power limits are worth to a job, see `PublishProfile`."""

    limits_mw: list[int]
    """Ascending."""
    progress: list[float]
    """Relative speed at each: 1 is the highest limit's."""


class LeaseInfo(Message):
    """One lease."""

    gpu: str
    control: ControlName
    pid: int | None
    """The holder; None if it is another user's and the reader is no administrator."""
    uid: int
    """The holder's user."""
    since_ns: int
    """CLOCK_MONOTONIC time at which it was taken."""
    value: list[int] | None
    """What the GPU holds under it, as in the journal; None: nothing was set yet."""
    asked: list[int] | None = None
    """What its holder asked for last, where that is known."""
    restoring: bool
    """The holder is gone, and the restore is pending."""
    back: Back
    """The control's restore target."""
    ttl_ms: int
    """How long it lasts without a heartbeat."""
    expires_ns: int
    """CLOCK_MONOTONIC time at which it ends if no heartbeat comes."""
    command: str | None = None
    """What the holder runs: its program, with the script of an interpreter (`python train.py`), or
    what `zeusctl set` runs for it; None as for `pid`."""
    job: str | None = None
    """The holder's job, as a control group that root owns names it: Slurm's job id, or its SLUID
    from Slurm 26.05 on, or Kubernetes' pod uid; None if it is in none, and as for `pid`."""
    trouble: str | None = None
    """Why the last attempt to put the control back failed."""
    profile: PowerProfile | None = None
    """What the holder has published; None: nothing."""
    measuring: bool = False
    """Whether the holder says that it measures and needs its highest limit."""
    needs_mw: int | None = None
    """The limit below which it says that it misses a latency objective; None: it has none."""


class LeaseList(Message):
    """Result of `leases`."""

    leases: list[LeaseInfo]

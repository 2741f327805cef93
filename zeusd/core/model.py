"""The values that the core works with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zeus_ipc.controls import (
    READABLE,
    SPECS,
    UNLOCKED,
    Control,
    ControlValue,
    describe,
)
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import GpuInfo
from zeusd.devices.port import DeviceError, Outcome
from zeusd.records import doubts_of
from zeusd.restore_rule import OURS

__all__ = ["READABLE", "UNLOCKED", "Control", "ControlValue", "describe"]

DEFAULT_TTL_NS = 15_000_000_000
"""Default TTL of a lease."""


class Process(NamedTuple):
    """One process, distinct from a later one with the same pid.

    Attributes:
        pid: Process id in zeusd's pid namespace.
        cookie: Number that tells it from all other processes of this boot with that pid.
    """

    pid: int
    cookie: int


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process's activity, from the kernel.

    Attributes:
        t_ns: Time of the reading, CLOCK_MONOTONIC.
        cpu_ns: CPU time that its threads have used, plus the time that its first one waited for a
            CPU.
        stopped: Whether it is stopped, as by SIGSTOP or a debugger.
    """

    t_ns: int
    cpu_ns: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, identified by the kernel.

    Attributes:
        conn: The connection.
        process: The process that connected.
        uid: Its user.
        gid: Its primary group.
        groups: All its groups, including the primary one.
        on_host: Whether it is in zeusd's own pid namespace, not in a container.
        command: Name of its program, for display only.
        job: The job or pod in its control groups, see `jobs.job_of`; empty: none.
    """

    conn: int
    process: Process
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    on_host: bool = False
    command: str = ""
    job: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU, as found.

    Attributes:
        info: Constant properties; the core sets `power_limit_site_mw`. `info.controls` has the
            controls that it is known to offer.
        values: Present values of the readable controls.
    """

    info: GpuInfo
    values: dict[Control, ControlValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a device call, or the journal entry that must precede it, failed.

    Attributes:
        code: See `errors.ErrorCode`.
        message: One sentence for a person.
        outcome: The device's outcome; None: the device was not called.
        details: The vendor's own code and text, for people to look up.
        gpu: UUID of the GPU, if any.
    """

    code: str
    message: str
    outcome: Outcome | None = None
    gpu: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def unchanged(self) -> bool:
        """Whether the value of the device certainly did not change."""
        return self.code == ErrorCode.JOURNAL_FAILED or self.outcome in _UNCHANGED


@dataclass(slots=True)
class Applied:
    """The value of a control after a `Write`, or the requested one if it cannot be read."""

    value: ControlValue


@dataclass(frozen=True, slots=True)
class Changed:
    """The unexpected value that a `Write` found and did not change."""

    value: ControlValue


_UNCHANGED = frozenset({Outcome.INVALID, Outcome.UNSUPPORTED, Outcome.DENIED})

_CODES = {
    Outcome.INVALID: ErrorCode.OUT_OF_RANGE,
    Outcome.UNSUPPORTED: ErrorCode.NOT_SUPPORTED,
    Outcome.DENIED: ErrorCode.PERMISSION_DENIED,
    Outcome.LOST: ErrorCode.GPU_LOST,
    Outcome.BUSY: ErrorCode.DEVICE_BUSY,
    Outcome.UNCHANGED: ErrorCode.UNCHANGED,
}

PRIVILEGE_OF_ZEUSD = "zeusd must run with CAP_SYS_ADMIN in the initial user namespace"

_REMEDIES = {
    Outcome.INVALID: "choose a value within the GPU's range",
    Outcome.UNSUPPORTED: "this GPU or its driver does not offer it",
    Outcome.DENIED: PRIVILEGE_OF_ZEUSD,
    Outcome.LOST: "the GPU needs a reset or the node a reboot",
    Outcome.BUSY: "try again",
}


def device_failure(what: str, gpu: str, error: DeviceError) -> Failure:
    """The failure for a call that a device or its driver refused.

    Args:
        what: The attempted operation, such as `setting power_limit`.
        gpu: UUID of the GPU.
        error: The backend's error.
    """
    remedy = _REMEDIES.get(error.outcome, "see the driver's log")
    details: dict[str, Any] = {"outcome": error.outcome.value, "device_call": error.call}
    if error.code is not None:
        details["device_code"] = error.code
    return Failure(
        code=_CODES.get(error.outcome, ErrorCode.DEVICE_ERROR),
        message=f"{what} on {gpu} failed: {error.text}; {remedy}",
        outcome=error.outcome,
        gpu=gpu,
        details=details,
    )


def kept_failure(control: Control, gpu: str, asked: ControlValue, holds: ControlValue) -> Failure:
    """The failure for a write that the driver accepted but the device did not apply."""
    return Failure(
        code=ErrorCode.UNCHANGED,
        message=f"setting {control.value} on {gpu} failed: the driver accepted "
        f"{describe(control, asked)}, but the GPU still holds {describe(control, holds)}; see the "
        "driver's log",
        outcome=Outcome.UNCHANGED,
        details={"outcome": Outcome.UNCHANGED.value, "holds": list(holds)},
    )


LISTED = 16
"""Most values that a record lists; then it starts again with the newest."""


def _joined(
    old: tuple[ControlValue, ...], new: tuple[ControlValue, ...]
) -> tuple[ControlValue, ...]:
    return (*(value for value in old if value not in new), *new)


@dataclass(slots=True)
class PendingRestore:
    """The journal's record of one control that is, or may be, away from its restore target.

    Attributes:
        gpu: UUID.
        control: Which control.
        holder: The process whose end causes the restore.
        uid: That process's user.
        client: Client object within the process (see `Request.client`).
        since_ns: When the lease was acquired, CLOCK_MONOTONIC of this boot.
        ttl_ns: TTL of the lease.
        target: The control's restore target.
        values: Values that zeusd may have written; empty if none.
        doubts: Those that were never confirmed by reading, newest last.
        overwrite: What a restore may overwrite, see `restore_rule`.
        ending: Why the lease has ended, even if its holder is running; empty while it has not.
        acquired: See `leasing.Lease`.
        recoveries: See `leasing.Lease`.
        command: Name of the holder's program.
        job: The holder's job, empty if none.
    """

    gpu: str
    control: Control
    holder: Process
    uid: int
    client: str
    since_ns: int
    ttl_ns: int
    target: ControlValue
    values: tuple[ControlValue, ...]
    doubts: tuple[ControlValue, ...] = ()
    overwrite: str = OURS
    ending: str = ""
    acquired: bool = False
    recoveries: int = 0
    command: str = ""
    job: str = ""

    @property
    def key(self) -> str:
        """Key of the journal entry."""
        return pending_key(self.gpu, self.control)

    def covers(self, other: PendingRestore) -> bool:
        """Whether a restore from this record is correct whenever one from the other record is.

        Then a write that the other announces need not wait for it: both have the same holder and
        target, and this one lists every value of the other, or that value is the target. For a
        control that cannot be read, it is enough that the record says it was changed. A control
        that is shared with other programs needs a record for each change.
        """
        if self.ending and not other.ending:
            return False
        spec = SPECS[self.control]
        if spec.merges or not self._is_of(other):
            return False
        if not spec.readable:
            return bool(self.values)
        # A value that the device may round needs its own record; but a rounded target is a correct
        # restore.
        for known, said in ((self.doubts, other.doubts), (self.values, other.values)):
            for value in said:
                if value not in known and value != self.target:
                    return False
        return True

    def including(self, earlier: PendingRestore) -> PendingRestore:
        """This record, including the values of an earlier one of the same restore.

        So a value that a lease sets again needs no new record, and after a crash the last record on
        disk covers all writes, whichever of the two it is.
        """
        spec = SPECS[self.control]
        if spec.merges or not spec.readable or not self._is_of(earlier):
            return self
        return replace(
            self,
            values=_joined(earlier.values, self.values),
            doubts=_joined(earlier.doubts, self.doubts),
        )

    def following(self, earlier: PendingRestore) -> PendingRestore:
        """The record to make durable after an earlier one: `including` it, unless the list is
        long."""
        both = self.including(earlier)
        return self if len(both.values) > LISTED else both

    def _is_of(self, other: PendingRestore) -> bool:
        return (
            self.target == other.target
            and self.holder == other.holder
            and self.overwrite == other.overwrite
        )

    def to_json(self) -> dict[str, Any]:
        """The entry as the journal keeps it."""
        entry: dict[str, Any] = {
            "kind": "debt",
            "gpu": self.gpu,
            "control": self.control.value,
            "pid": self.holder.pid,
            "cookie": self.holder.cookie,
            "uid": self.uid,
            "client": self.client,
            "since_ns": self.since_ns,
            "ttl_ns": self.ttl_ns,
            "target": list(self.target),
            "values": [list(value) for value in self.values],
            "doubt": list(self.doubts[-1]) if self.doubts else None,
            "overwrite": self.overwrite,
            "ending": self.ending,
            "acquired": self.acquired,
            "recoveries": self.recoveries,
            "command": self.command,
            "job": self.job,
        }
        if len(self.doubts) > 1:
            entry["earlier_doubts"] = [list(value) for value in self.doubts[:-1]]
        return entry

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> PendingRestore:
        """Reads an entry back.

        Raises:
            ValueError, KeyError, TypeError: The entry is not one that `to_json` wrote.
        """
        return cls(
            gpu=str(entry["gpu"]),
            control=Control(entry["control"]),
            holder=Process(int(entry["pid"]), int(entry["cookie"])),
            uid=int(entry["uid"]),
            client=str(entry["client"]),
            since_ns=int(entry["since_ns"]),
            ttl_ns=int(entry.get("ttl_ns", DEFAULT_TTL_NS)),
            target=tuple(int(part) for part in entry["target"]),
            values=tuple(tuple(int(part) for part in value) for value in entry["values"]),
            doubts=tuple(tuple(int(part) for part in value) for value in doubts_of(entry)),
            overwrite=str(entry.get("overwrite", OURS)),
            ending=str(entry.get("ending", "")),
            acquired=bool(entry.get("acquired", False)),
            recoveries=int(entry.get("recoveries", 0)),
            command=str(entry.get("command", "")),
            job=str(entry.get("job", "")),
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A process whose lease on a control was revoked or expired: it must acquire it again.

    Attributes:
        gpu: UUID.
        control: Which control.
        process: The process that lost it.
        reason: Why, as a clause: `its heartbeat stopped for 15 s`.
        uid: That process's user.
    """

    gpu: str
    control: Control
    process: Process
    reason: str
    uid: int = -1

    @property
    def key(self) -> str:
        """Key of the journal entry."""
        pid, cookie = self.process.pid, self.process.cookie
        return f"{LOSS_PREFIX}{self.gpu}/{self.control.value}/{pid}.{cookie}"

    def to_json(self) -> dict[str, Any]:
        """The entry as the journal keeps it."""
        return {
            "gpu": self.gpu,
            "control": self.control.value,
            "pid": self.process.pid,
            "cookie": self.process.cookie,
            "reason": self.reason,
            "uid": self.uid,
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Loss:
        """Reads an entry back.

        Raises:
            ValueError, KeyError, TypeError: The entry is not one that `to_json` wrote.
        """
        return cls(
            gpu=str(entry["gpu"]),
            control=Control(entry["control"]),
            process=Process(int(entry["pid"]), int(entry["cookie"])),
            reason=str(entry["reason"]),
            uid=int(entry.get("uid", -1)),
        )


PENDING_PREFIX, OBSERVED_PREFIX, LOSS_PREFIX = "debt/", "baseline/", "lost/"
CEILING_PREFIX, RESTING_PREFIX = "ceiling/", "resting/"
INITIAL_PREFIX, PIN_PREFIX, GPU_PREFIX = "first/", "pin/", "gpu/"

DRIVER_KEY = "driver"
"""Journal key of the driver that the other entries refer to."""

STOPPING_KEY = "stopping"
"""Journal key that marks a stop in progress: values of running holders are restored, too."""


QUIESCED_KEY = "quiesced"
"""Journal key that marks that an administrator made zeusd close the driver."""


def pending_key(gpu: str, control: Control) -> str:
    """Journal key of one control's pending restore."""
    return f"{PENDING_PREFIX}{gpu}/{control.value}"


def gpu_key(gpu: str) -> str:
    """Journal key of a GPU that was found in this boot."""
    return f"{GPU_PREFIX}{gpu}"


def observed_key(gpu: str, control: Control) -> str:
    """Journal key of a control's restore target if the site configured none."""
    return f"{OBSERVED_PREFIX}{gpu}/{control.value}"


def initial_key(gpu: str, control: Control) -> str:
    """Journal key of a control's initial value."""
    return f"{INITIAL_PREFIX}{gpu}/{control.value}"


def pin_key(gpu: str, control: Control) -> str:
    """Journal key of the value that an administrator persisted."""
    return f"{PIN_PREFIX}{gpu}/{control.value}"


def resting_key(gpu: str, control: Control) -> str:
    """Journal key of the value that zeusd leaves in force, because of ceilings, while nobody holds
    a control."""
    return f"{RESTING_PREFIX}{gpu}/{control.value}"


def ceiling_key(gpu: str, control: Control, name: str) -> str:
    """Journal key of a named ceiling."""
    return f"{CEILING_PREFIX}{gpu}/{control.value}/{name}"

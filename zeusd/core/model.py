"""The values that the core works with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zeus_ipc.controls import Control, ControlValue, describe
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import GpuInfo
from zeusd.devices.port import CallOutcome, DeviceError

DEFAULT_TTL_NS = 15_000_000_000
"""Default TTL of a lease."""


class ProcessIdentity(NamedTuple):
    """One process, distinct from a later one with the same pid.

    Attributes:
        pid: Process id in zeusd's pid namespace.
        cookie: Tells it from all other processes of this boot with that pid.
    """

    pid: int
    cookie: int


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process's activity, from the kernel.

    Attributes:
        cpu_ns: CPU time of its threads, plus the time that its first one waited for a CPU.
        stopped: Whether it is stopped, as by SIGSTOP or a debugger.
    """

    t_ns: int
    cpu_ns: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection, identified by the kernel.

    Attributes:
        on_host: Whether it is in zeusd's own pid namespace, not in a container.
        job: The job or pod in its control groups, see `runtime.control_groups.job_of`; empty: none.
    """

    conn: int
    process: ProcessIdentity
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    on_host: bool = False
    command: str = ""
    job: str = ""

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a record about what it did."""
        return {
            "pid": self.process.pid,
            "uid": self.uid,
            "command": self.command,
            "job": self.job,
        }


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU, as found.

    Attributes:
        info: Constant properties; the core sets `power_limit_site_mw`. `info.controls` has the
            controls that it is known to offer.
    """

    info: GpuInfo
    values: dict[Control, ControlValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a device call, or the journal entry that must precede it, failed.

    Attributes:
        outcome: The device's outcome; None: the device was not called.
        details: The vendor's own code and text, for people to look up.
    """

    code: str
    message: str
    outcome: CallOutcome | None = None
    gpu: str = ""
    details: dict[str, Any] = field(default_factory=dict)


class Refusal(Exception):
    """A request, or its part about one GPU, is refused.

    Attributes:
        failure: Why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def refuse_if(failure: Failure | None) -> None:
    """Raises a `Refusal`, if there is a failure."""
    if failure is not None:
        raise Refusal(failure)


_CODES = {
    CallOutcome.INVALID: ErrorCode.OUT_OF_RANGE,
    CallOutcome.UNSUPPORTED: ErrorCode.NOT_SUPPORTED,
    CallOutcome.DENIED: ErrorCode.PERMISSION_DENIED,
    CallOutcome.LOST: ErrorCode.GPU_LOST,
    CallOutcome.BUSY: ErrorCode.DEVICE_BUSY,
    CallOutcome.UNCHANGED: ErrorCode.UNCHANGED,
}

PRIVILEGE_OF_ZEUSD = "zeusd must run with CAP_SYS_ADMIN in the initial user namespace"

_REMEDIES = {
    CallOutcome.INVALID: "choose a value within the GPU's range",
    CallOutcome.UNSUPPORTED: "this GPU or its driver does not offer it",
    CallOutcome.DENIED: PRIVILEGE_OF_ZEUSD,
    CallOutcome.LOST: "the GPU needs a reset or the node a reboot",
    CallOutcome.BUSY: "try again",
}


def explained(error: DeviceError) -> str:
    """What a driver's error says, and what to do."""
    remedy = _REMEDIES.get(error.outcome, "see the driver's log")
    return f"{error.text}; {remedy}"


def device_failure(what: str, gpu: str, error: DeviceError) -> Failure:
    """The failure for a call that a device or its driver refused."""
    details: dict[str, Any] = {"outcome": error.outcome.value, "device_call": error.call}
    if error.code is not None:
        details["device_code"] = error.code
    return Failure(
        code=_CODES.get(error.outcome, ErrorCode.DEVICE_ERROR),
        message=f"{what} on {gpu} failed: {explained(error)}",
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
        outcome=CallOutcome.UNCHANGED,
        details={"outcome": CallOutcome.UNCHANGED.value, "holds": list(holds)},
    )


FOREVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Values:
    """The values that may be in force because zeusd wrote them.

    Attributes:
        values: The values, newest last; empty: none was written.
        doubts: Those whose write was never confirmed, and until when each may still take effect,
            ns, CLOCK_MONOTONIC.
        confirmed: Whether the last write was.
    """

    values: tuple[ControlValue, ...] = ()
    doubts: dict[ControlValue, int] = field(default_factory=dict)
    confirmed: bool = False

    @property
    def newest(self) -> ControlValue | None:
        """The newest value; None: nothing was written."""
        return self.values[-1] if self.values else None

    def asking(self, value: ControlValue, *before: ControlValue, doubted: bool = True) -> Values:
        """A write of this value begins; these may be in force just before."""
        values = _last(value, (*self.doubts, *self.values, *before))
        if not doubted:
            return Values(values, self.doubts)
        doubts = {one: ns for one, ns in self.doubts.items() if one != value}
        return Values(values, {**doubts, value: FOREVER_NS})

    def holding(
        self,
        asked: ControlValue,
        holds: ControlValue,
        now_ns: int,
        late: tuple[ControlValue, ...] = (),
        until_ns: int = 0,
    ) -> Values:
        """The write of `asked` was confirmed: only later effects of other writes are possible, and
        `late` until then."""
        doubts = {one: ns for one, ns in self.doubts.items() if one != asked and ns > now_ns}
        doubts |= dict.fromkeys(late, until_ns)
        return Values(_last(holds, tuple(doubts)), doubts, True)

    def unknown(self, asked: ControlValue, until_ns: int, holds: ControlValue | None) -> Values:
        """It is not known what the write of `asked` did; it may take effect until then."""
        values = _last(holds, self.values) if holds in self.values else self.values
        doubts = {**self.doubts, asked: until_ns} if asked in self.doubts else self.doubts
        return Values(values, doubts)

    def doubting(self, targets: Iterable[ControlValue], until_ns: int) -> Values:
        """These may have been written too, and it is not known what the driver made of them; they
        may take effect until then (ns, CLOCK_MONOTONIC)."""
        unlisted = [one for one in dict.fromkeys(targets) if one not in self.values]
        return Values((*unlisted, *self.values), dict.fromkeys(unlisted, until_ns) | self.doubts)

    def after(self, now_ns: int, *known: ControlValue) -> Values:
        """Of all values only these are in force. Writes that may still take effect are not over."""
        return Values(known, {one: ns for one, ns in self.doubts.items() if ns > now_ns})

    def settles_ns(self, target: ControlValue) -> int:
        """When no write of another value than the target can take effect any more; 0: there is
        none in doubt."""
        return max((ns for one, ns in self.doubts.items() if one != target), default=0)


def _last(value: ControlValue | None, values: tuple[ControlValue, ...]) -> tuple[ControlValue, ...]:
    """The values without duplicates, and this one last."""
    others = tuple(dict.fromkeys(other for other in values if other != value))
    return others if value is None else (*others, value)

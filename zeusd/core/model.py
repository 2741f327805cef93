"""The values that the core works with."""

from __future__ import annotations

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

"""The values that the core works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from zeus_ipc.errors import ErrorCode
from zeus_ipc.messages import Control, GpuInfo
from zeusd.nvml.api import RETURN_TEXTS, Return

ControlValue: TypeAlias = tuple[int, ...]
"""A control's value, in a form that compares, sorts and journals.

power_limit: `(mW,)`. gpu_clocks, memory_clocks: `(min MHz, max MHz)`, or `()` for unlocked.
persistence_mode: `(0,)` or `(1,)`.
"""

UNLOCKED: ControlValue = ()

DEFAULT_TTL_NS = 15_000_000_000
"""How long a lease lasts without a heartbeat, where neither site nor client says otherwise."""

READABLE = frozenset({Control.POWER_LIMIT, Control.PERSISTENCE_MODE})
"""Controls whose value NVML can tell. Locked clocks can be set and reset, but never read."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process, never to be mistaken for a later one of the same pid.

    Attributes:
        pid: Process id in zeusd's pid namespace.
        cookie: Number that no other process of this boot with that pid has.
    """

    pid: int
    cookie: int


@dataclass(frozen=True, slots=True)
class Peer:
    """Who the kernel says is at the other end of a connection.

    Attributes:
        conn: The connection.
        process: The process that connected.
        uid: Its user.
        gid: Its primary group.
        groups: All its groups, the primary one among them.
        on_host: Whether it lives in zeusd's own pid namespace, and in no container below.
        command: Name of its program; nothing hangs on it.
        job: The job or pod that its control groups name, see `jobs.job_of`; empty: none.
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
    """A GPU as it was found.

    Attributes:
        info: What does not change; `power_limit_site_mw` is filled in by the core.
        power_limit_mw: Limit requested by software at this moment.
        persistence_mode: Persistence mode at this moment.
    """

    info: GpuInfo
    power_limit_mw: int | None
    persistence_mode: bool | None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a device call, or the journal entry that must precede it, did not succeed."""

    code: str
    message: str
    nvml_code: int | None = None

    @property
    def unchanged(self) -> bool:
        """Whether the device certainly kept its value."""
        return self.code == ErrorCode.JOURNAL_FAILED or self.nvml_code in _UNCHANGED


@dataclass(frozen=True, slots=True)
class Changed:
    """What a `Write` found instead of what it expected, and left alone."""

    value: ControlValue


_UNCHANGED = frozenset(
    {
        Return.UNINITIALIZED,
        Return.INVALID_ARGUMENT,
        Return.NOT_SUPPORTED,
        Return.NO_PERMISSION,
        Return.DRIVER_NOT_LOADED,
        Return.LIBRARY_NOT_FOUND,
        Return.FUNCTION_NOT_FOUND,
        Return.LIB_RM_VERSION_MISMATCH,
    }
)

_CODES = {
    Return.INVALID_ARGUMENT: ErrorCode.OUT_OF_RANGE,
    Return.NOT_SUPPORTED: ErrorCode.NOT_SUPPORTED,
    Return.FUNCTION_NOT_FOUND: ErrorCode.NOT_SUPPORTED,
    Return.NO_PERMISSION: ErrorCode.PERMISSION_DENIED,
    Return.GPU_IS_LOST: ErrorCode.GPU_LOST,
    Return.RESET_REQUIRED: ErrorCode.GPU_LOST,
}

_REMEDIES = {
    Return.INVALID_ARGUMENT: "choose a value within the GPU's range",
    Return.NOT_SUPPORTED: "this GPU or driver does not offer it",
    Return.FUNCTION_NOT_FOUND: "a newer driver is needed",
    Return.NO_PERMISSION: "zeusd must run with CAP_SYS_ADMIN in the initial user namespace",
    Return.GPU_IS_LOST: "the GPU needs a reset or the node a reboot",
    Return.RESET_REQUIRED: "the GPU needs a reset",
}


def nvml_failure(what: str, gpu: str, nvml_code: int) -> Failure:
    """The failure of a call that NVML refused.

    Args:
        what: What was tried, such as `setting power_limit`.
        gpu: UUID of the GPU.
        nvml_code: NVML's return code.
    """
    text = RETURN_TEXTS.get(nvml_code, "unknown error")
    remedy = _REMEDIES.get(nvml_code, "see the driver's log")
    return Failure(
        code=_CODES.get(nvml_code, ErrorCode.NVML_ERROR),
        message=f"{what} on {gpu} failed: {text} (NVML {nvml_code}); {remedy}",
        nvml_code=nvml_code,
    )


@dataclass(frozen=True, slots=True)
class Debt:
    """What the journal knows of one control that is not, or may not be, at its restore target.

    Attributes:
        gpu: UUID.
        control: Which control.
        holder: The process whose death puts it back.
        uid: That process's user.
        client: Client object within the process (see `Request.client`).
        since_ns: When the lease was taken, CLOCK_MONOTONIC of this boot.
        ttl_ns: How long it lasts without a heartbeat.
        target: What the control goes back to.
        values: What zeusd may have written; empty if nothing.
        ending: Why the lease has ended, whoever lives; empty while it has not.
        acquired: See `control.Lease`.
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
    ending: str = ""
    acquired: bool = False
    command: str = ""
    job: str = ""

    @property
    def key(self) -> str:
        """Key of the journal entry."""
        return debt_key(self.gpu, self.control)

    def to_json(self) -> dict[str, Any]:
        """The entry as the journal keeps it."""
        return {
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
            "ending": self.ending,
            "acquired": self.acquired,
            "command": self.command,
            "job": self.job,
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Debt:
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
            ending=str(entry.get("ending", "")),
            acquired=bool(entry.get("acquired", False)),
            command=str(entry.get("command", "")),
            job=str(entry.get("job", "")),
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A process that lost a lease on a control without asking: it must acquire it anew.

    Attributes:
        gpu: UUID.
        control: Which control.
        process: Who lost it.
        reason: Why, as a clause: `its heartbeat stopped for 15 s`.
    """

    gpu: str
    control: Control
    process: Process
    reason: str

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
        )


DEBT_PREFIX, BASELINE_PREFIX, LOSS_PREFIX = "debt/", "baseline/", "lost/"
FIRST_PREFIX, PIN_PREFIX = "first/", "pin/"

DRIVER_KEY = "driver"
"""Journal key of the driver that the other entries are about."""

STOPPING_KEY = "stopping"
"""Journal key that says: a stop was under way, everything goes back whoever still lives."""


QUIESCED_KEY = "quiesced"
"""Journal key that says: an administrator had zeusd let go of the driver."""


def debt_key(gpu: str, control: Control) -> str:
    """Journal key of what is owed on one control."""
    return f"{DEBT_PREFIX}{gpu}/{control.value}"


def baseline_key(gpu: str, control: Control) -> str:
    """Journal key of the value that a control goes back to where the site configured none."""
    return f"{BASELINE_PREFIX}{gpu}/{control.value}"


def first_key(gpu: str, control: Control) -> str:
    """Journal key of the value a control had when zeusd first saw the GPU in this boot."""
    return f"{FIRST_PREFIX}{gpu}/{control.value}"


def pin_key(gpu: str, control: Control) -> str:
    """Journal key of the value that an administrator persisted."""
    return f"{PIN_PREFIX}{gpu}/{control.value}"


def describe(control: Control, value: ControlValue) -> str:
    """A control's value for a person, with its unit."""
    if control is Control.POWER_LIMIT:
        return f"{value[0] / 1000:g} W"
    if control is Control.PERSISTENCE_MODE:
        return "on" if value[0] else "off"
    return f"{value[0]}-{value[1]} MHz" if value else "unlocked"

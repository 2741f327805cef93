"""What the core asks the runtime to do, in order.

The runtime carries effects out one after another and never reorders them. Device calls (`Read`,
`Write`) run on the GPU's worker and come back as `Core.device_done(ticket, ...)`. Those that a set
makes are not frozen: a frozen dataclass takes four times as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.replies import CallTimes, LedgerState, SourceState, UserLoad
from zeus_ipc.requests import AccountingRequest
from zeusd.core.model import PendingRestore, Process


class Reading(Enum):
    """What a `Read` reads."""

    STATE = "state"
    ENERGY = "energy"
    POWER = "power"
    CLOCKS = "clocks"
    CONTROL = "control"
    LIMITS = "limits"
    """`(smallest, largest)` power limit at this moment, mW."""
    COMPUTE_UIDS = "compute_uids"
    """Users with a compute process on the GPU, a frozenset of uids."""
    PROCESSES = "processes"
    """Processes with a context on the GPU, `replies.GpuProcesses`."""
    PIDS = "pids"
    """Processes with a context on the GPU, as `Listed`; for the ledger."""
    METRICS = "metrics"
    """What the runtime counts, `Measured`; of no GPU."""


LISTING = 0
"""The ticket of a list of processes, which no request waits for."""


class PidUse(NamedTuple):
    """What one process used of a GPU.

    Attributes:
        pid: The process; 0: none that the driver lists.
        end_ns: Until when this is known, CLOCK_MONOTONIC.
        weight: Beside other processes.
    """

    pid: int
    end_ns: int
    weight: int


@dataclass(frozen=True, slots=True)
class Activity:
    """What the processes of a GPU used of it, for a while.

    Attributes:
        begin_ns: Since when, CLOCK_MONOTONIC.
        uses: What each used. One that is not named used nothing.
        measured: Whether weights are a use that the driver measured, or only sizes of MIG
            instances.
    """

    begin_ns: int
    uses: tuple[PidUse, ...]
    measured: bool = True


@dataclass(frozen=True, slots=True)
class Listed:
    """Processes of a GPU, when they were listed; None: they could not be.

    Attributes:
        gpu: Its UUID.
        t_ns: When, CLOCK_MONOTONIC.
        pids: The processes.
        activity: What they used of it; None: not known, or there is only one.
    """

    gpu: str
    t_ns: int
    pids: tuple[int, ...] | None
    activity: Activity | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What the runtime counts, see `replies.Metrics`."""

    calls: list[CallTimes]
    sources: list[SourceState]
    users: list[UserLoad]
    ledger: LedgerState | None


@dataclass(slots=True)
class Reply:
    """Send this reply. `body` lacks only the protocol version."""

    conn: int
    body: dict[str, Any]


@dataclass(slots=True)
class Read:
    """Read from a GPU. `control` says which one when `reading` is CONTROL."""

    ticket: int
    gpu: str
    reading: Reading
    control: Control | None = None


@dataclass(slots=True)
class Write:
    """Write a control, after the journal durably says under `key` what `restore` does.

    If the journal fails the device is not touched and the ticket comes back with that failure.
    If `expected` is not empty and the control holds none of it, nor what a driver may have made of
    `doubts`, the device is not touched either and the ticket comes back with `Changed`. A readable
    control is read back: `Applied` says what it holds. `before` is what it held just before, where
    that is known.
    """

    ticket: int
    gpu: str
    control: Control
    value: ControlValue
    key: str
    restore: PendingRestore
    expected: tuple[ControlValue, ...] = ()
    before: ControlValue | None = None
    doubts: tuple[ControlValue, ...] = ()


@dataclass(frozen=True, slots=True)
class CloseDriver:
    """Close the driver. Comes back with the device files that stay open all the same."""

    ticket: int


@dataclass(frozen=True, slots=True)
class OpenDriver:
    """Open the driver again. Comes back when the GPUs have been looked for."""

    ticket: int


@dataclass(slots=True)
class Put:
    """Make a journal entry durable that no device write depends on."""

    key: str
    entry: dict[str, Any] | PendingRestore


@dataclass(slots=True)
class Forget:
    """Delete a journal entry: nothing is pending under this key any more."""

    key: str


@dataclass(frozen=True, slots=True)
class Watch:
    """Report the death of this process, which now holds a lease."""

    process: Process


@dataclass(frozen=True, slots=True)
class Unwatch:
    """The process holds no lease any more."""

    process: Process


@dataclass(frozen=True, slots=True)
class Look:
    """Ask the kernel what a process is doing: `model.Usage`, or None if it is gone."""

    ticket: int
    process: Process


@dataclass(frozen=True, slots=True)
class Account:
    """Change the energy ledger, or ask it. Comes back with its result, or a `Failure`.

    Attributes:
        request: What was asked, of GPUs that are here.
        reader: The user who may see only what is the user's own; None: may see everything.
    """

    ticket: int
    request: AccountingRequest
    reader: int | None = None


@dataclass(slots=True)
class Note:
    """Write a record to the log; the audit log is made of these."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)
    warning: bool = False


Effect: TypeAlias = (
    Reply
    | Read
    | Write
    | CloseDriver
    | OpenDriver
    | Put
    | Forget
    | Watch
    | Unwatch
    | Look
    | Account
    | Note
)

"""Effects: what the core asks the runtime to do, in order.

The runtime carries effects out one after another and never reorders them. Device calls (`Read`,
`Write`) run on the GPU's worker and come back as `Core.device_done(ticket, ...)`. The effects of a
set are not frozen: creating a frozen dataclass takes four times as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.replies import CallTimes, Envelope, LedgerState, SourceState, UserLoad
from zeus_ipc.requests import AccountingRequest
from zeusd.core.entries import PendingRestore, Recorded
from zeusd.core.model import ProcessIdentity


class ReadingMade(Enum):
    """The reading that a `Read` makes."""

    STATE = "state"
    ENERGY = "energy"
    POWER = "power"
    CLOCKS = "clocks"
    CONTROL = "control"
    LIMITS = "limits"
    """`(smallest, largest)` power limit at the moment, mW."""
    COMPUTE_UIDS = "compute_uids"
    """Users with a compute process on the GPU, a frozenset of uids."""
    PROCESSES = "processes"
    """Processes with a context on the GPU, `replies.GpuProcesses`."""
    PIDS = "pids"
    """Processes with a context on the GPU, as `runtime.activity.Listed`; for the ledger."""
    SPLIT = "split"
    """Whether the GPU is split (MIG), a bool."""
    METRICS = "metrics"
    """The runtime's counters, `RuntimeCounters`; not of a GPU."""


@dataclass(frozen=True, slots=True)
class RuntimeCounters:
    """The runtime's counters, see `replies.Metrics`."""

    calls: list[CallTimes]
    sources: list[SourceState]
    users: list[UserLoad]
    ledger: LedgerState | None


@dataclass(slots=True)
class Reply:
    """Send this reply."""

    conn: int
    body: Envelope


@dataclass(slots=True)
class Read:
    """Read from a GPU. `control` is the control if `reading` is CONTROL."""

    ticket: int
    gpu: str
    reading: ReadingMade
    control: Control | None = None


@dataclass(slots=True)
class Write:
    """Write a control after the journal has `restore`; returns with a `restore_rule.WriteResult`.

    If the journal fails, or `expected` is not empty and the control has none of these values nor
    one that a driver may have made of `doubts`, the device is not written (`Refused`). A readable
    control is read back.

    Attributes:
        expected: Values that may be overwritten; empty: any.
        before: The value just before, if known.
        doubts: Earlier values whose write was never confirmed.
        others: Whether one of them may still take effect.
        sure: See `restore_rule.WriteControl`.
    """

    ticket: int
    gpu: str
    control: Control
    value: ControlValue
    restore: PendingRestore
    expected: tuple[ControlValue, ...] = ()
    before: ControlValue | None = None
    doubts: tuple[ControlValue, ...] = ()
    others: bool = False
    sure: bool = False


@dataclass(frozen=True, slots=True)
class CloseDriver:
    """Close the driver. Returns with the device files that remain open anyway."""

    ticket: int


@dataclass(frozen=True, slots=True)
class OpenDriver:
    """Open the driver again. Returns after the search for GPUs."""

    ticket: int


@dataclass(slots=True)
class Put:
    """Make a journal entry durable on which no device write depends.

    `soon`: what is in the journal already is right, too, and this one may wait for others. With a
    ticket it returns with None or, if it could not be written and is dropped, a `Failure`.
    """

    key: str
    entry: Recorded
    soon: bool = False
    ticket: int = 0


@dataclass(slots=True)
class Forget:
    """Delete a journal entry: nothing is pending under this key."""

    key: str


@dataclass(frozen=True, slots=True)
class WatchProcess:
    """Report the end of this process, which now holds a lease."""

    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Stop watching a process that holds no lease any more."""

    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class Look:
    """Ask the kernel for a process's activity: `model.ProcessUsage`, or None if it has exited."""

    ticket: int
    process: ProcessIdentity


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """Change or query the energy ledger. Returns with its result, or a `Failure`.

    Attributes:
        reader: A user who may see only the user's own energy; None: everything is visible.
    """

    ticket: int
    request: AccountingRequest
    reader: int | None = None
    uid: int = -1
    conn: int = -1


@dataclass(slots=True)
class Note:
    """Write a record to the audit log."""

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
    | WatchProcess
    | Unwatch
    | Look
    | LedgerCall
    | Note
)

"""zeusd's replies: every field with its unit and meaning. See `requests` and `operations`."""

from __future__ import annotations

from zeus_ipc.replies.accounting import (
    Deallocated,
    EstimatedEnergy,
    Forgotten,
    GpuTotal,
    Held,
    LedgerState,
    LedgerTotal,
    Usage,
    UsageSum,
)
from zeus_ipc.replies.administration import (
    CALL_BUCKETS_S,
    AuditRecord,
    AuditRecords,
    CallTimes,
    Count,
    Metrics,
    Permission,
    Policy,
    Quiesced,
    SourceState,
    UserLoad,
)
from zeus_ipc.replies.common import (
    Deferred,
    EmptyResult,
    Envelope,
    ErrorBody,
    PastResults,
    Refused,
    Results,
)
from zeus_ipc.replies.leases import (
    Acquired,
    Applied,
    Back,
    CeilingSet,
    HeartbeatResult,
    LeaseInfo,
    LeaseList,
    PublishedProfile,
    Released,
    Restored,
)
from zeus_ipc.replies.node import (
    CeilingInfo,
    CpuInfo,
    GpuInfo,
    GpuSupport,
    NodeInfo,
    NodeProblem,
    ProfileInfo,
)
from zeus_ipc.replies.readings import (
    EnergyReading,
    GpuProcesses,
    GpuState,
    MigDevice,
    PowerReading,
    ProcessInfo,
    Sample,
    SupportedClocks,
    Timeline,
    WindowEnergies,
)
from zeus_ipc.wire import Message

__all__ = [
    "CALL_BUCKETS_S",
    "Acquired",
    "Applied",
    "AuditRecord",
    "AuditRecords",
    "Back",
    "CallTimes",
    "CeilingInfo",
    "CeilingSet",
    "Count",
    "CpuInfo",
    "Deallocated",
    "Deferred",
    "EmptyResult",
    "EnergyReading",
    "Envelope",
    "ErrorBody",
    "EstimatedEnergy",
    "Forgotten",
    "GpuInfo",
    "GpuProcesses",
    "GpuState",
    "GpuSupport",
    "GpuTotal",
    "HeartbeatResult",
    "Held",
    "LeaseInfo",
    "LeaseList",
    "LedgerState",
    "LedgerTotal",
    "Metrics",
    "MigDevice",
    "NodeInfo",
    "NodeProblem",
    "PastResults",
    "Permission",
    "Policy",
    "PowerReading",
    "ProcessInfo",
    "ProfileInfo",
    "PublishedProfile",
    "Quiesced",
    "Refused",
    "Released",
    "Restored",
    "Results",
    "Sample",
    "SourceState",
    "SupportedClocks",
    "Timeline",
    "Usage",
    "UsageSum",
    "UserLoad",
    "WindowEnergies",
    "prepare",
]


def prepare() -> None:
    """Builds every message's validator now, not on the thread that first needs it."""
    for one in [*globals().values()]:
        if isinstance(one, type) and issubclass(one, Message):
            one.model_rebuild()

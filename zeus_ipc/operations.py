"""Every operation of the protocol: its request and its result.

zeusd's server and the client know the operations from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from zeus_ipc.replies import (
    Acquired,
    Applied,
    AuditRecords,
    CeilingSet,
    Deallocated,
    EmptyResult,
    EnergyReading,
    Forgotten,
    GpuProcesses,
    GpuState,
    HeartbeatResult,
    LeaseList,
    Metrics,
    NodeInfo,
    Policy,
    PowerReading,
    Quiesced,
    Released,
    Restored,
    SupportedClocks,
    Timeline,
    Usage,
    WindowEnergies,
)
from zeus_ipc.requests import (
    Acquire,
    Allocate,
    Deallocate,
    ForgetUser,
    GetAudit,
    GetClocks,
    GetEnergy,
    GetMetrics,
    GetPolicy,
    GetPower,
    GetProcesses,
    GetState,
    GetTimeline,
    GetUsage,
    GetWindows,
    Goodbye,
    Heartbeat,
    Hello,
    ListLeases,
    Persist,
    PublishProfile,
    Quiesce,
    Release,
    Reset,
    Restore,
    Resume,
    SetCeiling,
    SetControl,
)
from zeus_ipc.wire import Message

R = TypeVar("R", bound=Message)


@dataclass(frozen=True)
class Operation(Generic[R]):
    """One operation.

    Attributes:
        request: The class of the request.
        result: The class of the result: one in all, or one for each GPU or source.
        each: The field of the reply that holds the results by name; empty: there is only one.
    """

    request: type[Message]
    result: type[R]
    each: str = ""

    @cached_property
    def name(self) -> str:
        """The value of the field `op`."""
        return str(self.request.model_fields["op"].default)

    def read(self, result: dict[str, Any]) -> R:
        """Validates a result decoded from the wire."""
        return self.result.model_validate(result, strict=False)


HELLO = Operation(Hello, NodeInfo)
STATE = Operation(GetState, GpuState, "gpus")
ENERGY = Operation(GetEnergy, EnergyReading, "gpus")
POWER = Operation(GetPower, PowerReading, "gpus")
CLOCKS = Operation(GetClocks, SupportedClocks, "gpus")
PROCESSES = Operation(GetProcesses, GpuProcesses, "gpus")
WINDOWS = Operation(GetWindows, WindowEnergies, "sources")
TIMELINE = Operation(GetTimeline, Timeline, "sources")
SET = Operation(SetControl, Applied, "gpus")
RESET = Operation(Reset, Applied, "gpus")
ACQUIRE = Operation(Acquire, Acquired, "gpus")
RELEASE = Operation(Release, Released)
RESTORE = Operation(Restore, Restored, "gpus")
PERSIST = Operation(Persist, EmptyResult, "gpus")
SET_CEILING = Operation(SetCeiling, CeilingSet, "gpus")
PUBLISH_PROFILE = Operation(PublishProfile, EmptyResult, "gpus")
ALLOCATE = Operation(Allocate, EmptyResult, "gpus")
DEALLOCATE = Operation(Deallocate, Deallocated)
USAGE = Operation(GetUsage, Usage)
FORGET_USER = Operation(ForgetUser, Forgotten)
QUIESCE = Operation(Quiesce, Quiesced)
RESUME = Operation(Resume, NodeInfo)
POLICY = Operation(GetPolicy, Policy)
AUDIT = Operation(GetAudit, AuditRecords)
METRICS = Operation(GetMetrics, Metrics)
LEASES = Operation(ListLeases, LeaseList)
HEARTBEAT = Operation(Heartbeat, HeartbeatResult)
GOODBYE = Operation(Goodbye, Released)

OPERATIONS: dict[str, Operation[Any]] = {
    one.name: one for one in [*globals().values()] if isinstance(one, Operation)
}
"""All operations, by name."""

OF_REQUEST = {one.request: one for one in OPERATIONS.values()}
"""All operations, by the class of their request."""

"""Every operation of the protocol: its request and its result.

zeusd's server and the client know the operations from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from zeus_ipc import replies, requests
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


HELLO = Operation(requests.Hello, replies.NodeInfo)
STATE = Operation(requests.GetState, replies.GpuState, "gpus")
ENERGY = Operation(requests.GetEnergy, replies.EnergyReading, "gpus")
POWER = Operation(requests.GetPower, replies.PowerReading, "gpus")
CLOCKS = Operation(requests.GetClocks, replies.SupportedClocks, "gpus")
PROCESSES = Operation(requests.GetProcesses, replies.GpuProcesses, "gpus")
WINDOWS = Operation(requests.GetWindows, replies.WindowEnergies, "sources")
TIMELINE = Operation(requests.GetTimeline, replies.Timeline, "sources")
SET = Operation(requests.SetControl, replies.Applied, "gpus")
RESET = Operation(requests.Reset, replies.Applied, "gpus")
ACQUIRE = Operation(requests.Acquire, replies.Acquired, "gpus")
RELEASE = Operation(requests.Release, replies.Released)
RESTORE = Operation(requests.Restore, replies.Restored, "gpus")
PERSIST = Operation(requests.Persist, replies.EmptyResult, "gpus")
SET_CEILING = Operation(requests.SetCeiling, replies.CeilingSet, "gpus")
PUBLISH_PROFILE = Operation(requests.PublishProfile, replies.EmptyResult, "gpus")
ALLOCATE = Operation(requests.Allocate, replies.EmptyResult, "gpus")
DEALLOCATE = Operation(requests.Deallocate, replies.Deallocated)
USAGE = Operation(requests.GetUsage, replies.Usage)
FORGET_USER = Operation(requests.ForgetUser, replies.Forgotten)
QUIESCE = Operation(requests.Quiesce, replies.Quiesced)
RESUME = Operation(requests.Resume, replies.NodeInfo)
POLICY = Operation(requests.GetPolicy, replies.Policy)
AUDIT = Operation(requests.GetAudit, replies.AuditRecords)
METRICS = Operation(requests.GetMetrics, replies.Metrics)
LEASES = Operation(requests.ListLeases, replies.LeaseList)
HEARTBEAT = Operation(requests.Heartbeat, replies.HeartbeatResult)
GOODBYE = Operation(requests.Goodbye, replies.Released)

OPERATIONS: dict[str, Operation[Any]] = {
    one.name: one for one in [*globals().values()] if isinstance(one, Operation)
}
"""All operations, by name."""

OF_REQUEST = {one.request: one for one in OPERATIONS.values()}
"""All operations, by the class of their request."""

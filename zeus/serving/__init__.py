"""Energy of inference servers: the joules of every request, and clocks under a latency target.

    the engine's process
        vllm.probe, transformers, or vllm.stats -> recorder
            | wire: Arrival, EngineStep, Finish, Owner
    the ledger's process (python -m zeus.serving serve)
        receiver, or forward_pass -> service -> ledger -> rows: log, HTTP, metrics, telemetry
        ledger: meter (zeusd's samples) -> digest (features) -> fit -> settlement
        report reads the log; replay feeds a ledger from files
    clock control's process (python -m zeus.serving clocks, tune)
        receiver, or forward_pass -> clock_requests -> clock_control -> clock_policy
        clock_policy: clock_load, clock_model, clock_power; clock_tune is a policy that tunes
        clock_fleet publishes the power that an instance needs

A feed calls `take` with messages; `Ledger` and `RequestFeed` have it. Clocks have a process of
their own: a fit takes longer than a policy may wait for a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.serving.clock_control import ClockControl as ClockControl
    from zeus.serving.clock_load import Queue as Queue
    from zeus.serving.clock_load import Step as Step
    from zeus.serving.clock_policy import ClockPolicy as ClockPolicy
    from zeus.serving.clock_requests import RequestFeed as RequestFeed
    from zeus.serving.ledger import Ledger as Ledger
    from zeus.serving.recorder import Recorder as Recorder
    from zeus.serving.wire import Arrival as Arrival
    from zeus.serving.wire import EngineStep as EngineStep
    from zeus.serving.wire import Finish as Finish

__all__ = [
    "Arrival",
    "ClockControl",
    "ClockPolicy",
    "EngineStep",
    "Finish",
    "Ledger",
    "Queue",
    "Recorder",
    "RequestFeed",
    "Step",
]

__getattr__ = lazily(
    __name__,
    {
        "Arrival": "wire",
        "ClockControl": "clock_control",
        "ClockPolicy": "clock_policy",
        "EngineStep": "wire",
        "Finish": "wire",
        "Ledger": "ledger",
        "Queue": "clock_load",
        "Recorder": "recorder",
        "RequestFeed": "clock_requests",
        "Step": "clock_load",
    },
)

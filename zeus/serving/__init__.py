"""Energy of inference servers: the joules of every request, and clocks under a latency target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.serving.clock_control import ClockControl as ClockControl
    from zeus.serving.clock_policy import ClockPolicy as ClockPolicy
    from zeus.serving.clock_requests import RequestFeed as RequestFeed
    from zeus.serving.clock_steps import Queue as Queue
    from zeus.serving.clock_steps import Step as Step

__all__ = ["ClockControl", "ClockPolicy", "Queue", "RequestFeed", "Step"]

__getattr__ = lazily(
    __name__,
    {
        "ClockControl": "clock_control",
        "ClockPolicy": "clock_policy",
        "Queue": "clock_steps",
        "RequestFeed": "clock_requests",
        "Step": "clock_steps",
    },
)

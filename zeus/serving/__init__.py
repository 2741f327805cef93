"""Energy of inference servers: the joules of every request, and clocks under a latency target."""

from zeus.utils.lazy import lazily

__all__ = ["ClockControl", "ClockPolicy", "Queue", "Step"]

__getattr__ = lazily(
    __name__,
    {
        "ClockControl": "clock_control",
        "ClockPolicy": "clock_policy",
        "Queue": "clock_steps",
        "Step": "clock_steps",
    },
)

"""Energy of inference servers: the joules of every request, and clocks under a latency target."""

from zeus.utils.lazy import lazily

__all__ = ["Ledger", "Recorder", "RequestEnergy", "Settlement", "Totals"]

__getattr__ = lazily(
    __name__,
    {
        "Ledger": "ledger",
        "Recorder": "recorder",
        "RequestEnergy": "rows",
        "Settlement": "rows",
        "Totals": "rows",
    },
)

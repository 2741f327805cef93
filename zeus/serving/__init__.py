"""Energy of inference servers: the joules of every request, and clocks under a latency target."""

from zeus.utils.lazy import lazily

__all__ = ["Ledger", "RequestEnergy", "Settlement", "Totals"]

__getattr__ = lazily(
    __name__,
    {
        "Ledger": "ledger",
        "RequestEnergy": "rows",
        "Settlement": "rows",
        "Totals": "rows",
    },
)

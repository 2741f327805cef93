"""Energy of inference servers: the joules of every request, and clocks under a latency target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.serving.ledger import Ledger as Ledger
    from zeus.serving.recorder import Recorder as Recorder
    from zeus.serving.rows import RequestEnergy as RequestEnergy
    from zeus.serving.rows import Settlement as Settlement
    from zeus.serving.rows import Totals as Totals

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

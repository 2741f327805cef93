"""The receipt of a measurement: evidence for a figure that is published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.exceptions import ZeusArgumentError
from zeus.monitor.energy import Window
from zeus.monitor.measurement import Measurement

if TYPE_CHECKING:
    from zeus_ipc.receipts import Receipt


def receipt(measurement: Measurement | Window) -> Receipt:
    """Returns what zeusd knows about a window: energy, gaps, limits and who changed them, who used
    the GPUs, and whether anything disturbed them (`valid`, `reasons`); `json_text()` is what
    `zeusctl receipt -o` writes. Waits some seconds for zeusd's energy ledger if the window has just
    ended.

    Raises:
        ZeusArgumentError: It was not measured in this process, or measured no GPU.
        ZeusBaseGPUError: zeusd does not answer, or does not have one of its GPUs now.
    """
    measured = measurement.measurement if isinstance(measurement, Window) else measurement
    if not isinstance(measured, Measurement) or measured._window is None:
        raise ZeusArgumentError("this measurement was not made in this process; use its window's")
    lookup, begin_ns, end_ns = measured._window
    return lookup.receipt(begin_ns, end_ns)

"""Measurement without changing anything: a decorator, a block, and callbacks for trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeus.measure.account import EnergySummary
from zeus.measure.callback import EnergyCallback
from zeus.measure.decorator import measure_energy
from zeus.utils.lazy import lazily

if TYPE_CHECKING:
    from zeus.measure.huggingface import HFEnergyCallback as HFEnergyCallback
    from zeus.measure.lightning_callback import LightningEnergyCallback as LightningEnergyCallback

__all__ = ["EnergyCallback", "EnergySummary", "measure_energy"]

# They import their framework, so they are imported on demand.
__getattr__ = lazily(
    __name__,
    {"HFEnergyCallback": "huggingface", "LightningEnergyCallback": "lightning_callback"},
)

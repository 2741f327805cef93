"""Memory and module power in the sensor readings of a superchip's GPU."""

from __future__ import annotations

from collections.abc import Iterable

from zeusd.devices.port import Sensors
from zeusd.devices.simulated.gpu import SimulatedGpu

SPREAD_MW = 4_000
"""Largest error of a module's power as reported by a GPU: each GPU samples it separately."""


def with_module(
    found: Sensors, gpu: SimulatedGpu, module: Iterable[SimulatedGpu], now_s: float
) -> Sensors:
    """A GPU's readings with those of its memory and of its superchip.

    Args:
        found: The reading of its own sensor.
        gpu: The GPU.
        module: All GPUs of the superchip.
        now_s: The time.
    """
    superchip = gpu.model.superchip
    assert superchip is not None
    noise = (gpu.sensor.last_tick_s * 1000 + 37 * gpu.spec.index) % 17 / 8 - 1
    gpus_mw = sum(other.sensor.instant_mw(now_s) for other in module)
    energy_mj = found.energy_mj
    if energy_mj is not None and superchip.counts_module:
        energy_mj += round(superchip.rest_w * gpu.sensor.last_tick_s * 1000)
    return found._replace(
        energy_mj=energy_mj,
        memory_power_average_mw=round((found.power_average_mw or 0) * superchip.memory_share),
        module_power_mw=gpus_mw + round(superchip.rest_w * 1000 + noise * SPREAD_MW),
    )

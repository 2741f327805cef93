"""`TemperatureMonitor`: temperature over time, without a process of its own."""

from __future__ import annotations

from zeus.monitor.devices import resolve_gpus
from zeus.monitor.timeline import Timelines
from zeus.utils.configured import Configured

TemperatureTimeline = list[tuple[float, int]]
"""Seconds since the epoch, and degrees Celsius."""


class TemperatureMonitor(Configured):
    """Temperature of GPUs over time, from what zeusd (or this process's own sampler) has recorded.

    Args:
        gpu_indices: GPUs, as the framework numbers them; None: all it sees.
        update_period: Minimum seconds between samples; temperature is read once a second.
        max_samples_per_gpu: Maximum number of samples, the newest ones; None: all.

    Raises:
        ValueError: An index names no GPU.
        ZeusBaseGPUError: The GPUs cannot be reached.
    """

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        update_period: float = 1.0,
        max_samples_per_gpu: int | None = None,
    ) -> None:
        gpus, self.gpu_indices, client = resolve_gpus(gpu_indices)
        self.update_period = update_period
        uuids = {index: gpus[index].uuid for index in self.gpu_indices}
        self._timelines = Timelines(client, uuids, update_period, max_samples_per_gpu)

    def get_temperature_timeline(
        self,
        gpu_index: int | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> dict[int, TemperatureTimeline]:
        """Temperature of one GPU, or of each, between two times (seconds since the epoch).

        The default start is when this monitor was created; earlier times are available, too.
        """
        return self._timelines.read("temperature", gpu_index, start_time, end_time)

    def get_temperature(self, time: float | None = None) -> dict[int, int] | None:
        """Temperature of each GPU at a time (None: now); None if it is unknown for one of them."""
        return self._timelines.at("temperature", time)

    def stop(self) -> None:
        """Does nothing: there is nothing to stop."""

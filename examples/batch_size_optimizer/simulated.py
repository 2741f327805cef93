"""Work for a simulated GPU, which otherwise stays idle while this process computes.

A real GPU does not need this module.
"""

from __future__ import annotations

from zeus.device import GPU
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

MEASURED = (64, 128, 256, 512, 1024, 2048)
"""Batch sizes whose training steps were measured on a real V100 (ShuffleNet V2, CIFAR-100)."""

SHARE = 0.25
"""Fraction of a measured step that a step here runs, so that the example ends soon."""


class GpuWork:
    """Replays training steps of a batch size on a simulated GPU.

    Args:
        gpu: The GPU that this process trains on.
        batch_size: For this GPU.
    """

    def __init__(self, gpu: GPU, batch_size: int) -> None:
        self._work: SimulatedWork | None = None
        try:
            with Client() as client:
                devices = client.node().simulated
        except ZeusIpcError:
            return  # no zeusd: the library measures in this process, so the GPUs are real
        if devices is not None:
            nearest = min(MEASURED, key=lambda size: abs(size - batch_size))
            workload = f"nsdi23/v100/cifar100/shufflenetv2/adadelta/{nearest}"
            self._work = SimulatedWork(devices, [gpu.uuid], workload)

    def step(self) -> None:
        """A training step."""
        if self._work is not None:
            self._work.run(SHARE)

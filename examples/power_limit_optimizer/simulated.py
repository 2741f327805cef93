"""Work for a simulated GPU, which otherwise stays idle while this process computes.

A real GPU does not need this module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zeus.device import GPU
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError


class GpuWork:
    """Replays this process's computation on its GPU, if that is simulated.

    Args:
        gpu: The GPU that the process trains on.
    """

    def __init__(self, gpu: GPU) -> None:
        self._work: SimulatedWork | None = None
        try:
            with Client() as client:
                devices = client.node().simulated
        except ZeusIpcError:
            return  # no zeusd: the library measures in this process, so the GPUs are real
        if devices is not None:
            # One unit is a training step that takes 0.1 s at the highest limit.
            measured = "nsdi23/v100/imagenet/resnet50/adadelta/32"
            workload = measured if "V100" in gpu.get_name() else "model/compute"
            self._work = SimulatedWork(devices, [gpu.uuid], workload)

    @contextlib.contextmanager
    def step(self, units: float = 1.0) -> Iterator[None]:
        """The block is a training step, or part of one."""
        if self._work is not None:
            self._work.launch(units)
        yield
        if self._work is not None:
            self._work.synchronize()

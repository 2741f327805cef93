"""Work for a simulated GPU: without, it would stay idle, whatever this process computes.

A real node needs nothing of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from zeus.device import get_gpus
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import RequestRejected, ZeusIpcError

_MEASURED = {"V100": "v100", "A40": "a40", "P100": "p100", "RTX 6000": "rtx6000"}


class GpuWork:
    """What this process computes, replayed on its GPU if that is simulated.

    A unit is a training step of this batch size as it was measured (CIFAR-100, ShuffleNet v2), and
    of other GPUs one of a model's.

    Args:
        batch_size: Samples of a step.
    """

    def __init__(self, batch_size: int) -> None:
        self._work: SimulatedWork | None = None
        try:
            with Client() as client:
                devices = client.node().simulated
        except ZeusIpcError:
            return  # no zeusd: the library measures in this process, and only real GPUs
        if devices is None:
            return
        gpu = get_gpus()[0]
        names = [short for name, short in _MEASURED.items() if name in gpu.get_name()]
        workloads = [f"nsdi23/{n}/cifar100/shufflenetv2/adadelta/{batch_size}" for n in names]
        for workload in [*workloads, "model/compute"]:
            with contextlib.suppress(RequestRejected):  # this batch size was not measured
                self._work = SimulatedWork(devices, [gpu.uuid], workload)
                return

    @contextlib.contextmanager
    def step(self, units: float = 1.0) -> Iterator[None]:
        """The block is a training step, or a part of one."""
        if self._work is not None:
            self._work.launch(units)
        yield
        if self._work is not None:
            self._work.synchronize()

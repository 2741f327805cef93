"""Load on a GPU while limit and clocks settle: simulated, or PyTorch's where it sees the GPU."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from zeus_ipc.simulation import SimulatedWork
from zeusctl.probe.load import Load, TorchLoad, torch_loads

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

BURST_S = 0.2
"""Bursts of a load are queued one ahead, so that it ends soon."""


@contextlib.contextmanager
def load(simulated: str | None, gpu: GpuInfo) -> Iterator[bool]:
    """Puts load on a GPU that nobody uses. Yields whether there is one.

    Args:
        simulated: Socket of the simulated devices; None on a real node.
        gpu: Which.
    """
    if simulated is not None:
        work = SimulatedWork(simulated, [gpu.uuid], "model/compute")
        try:
            work.launch(1e8)
            yield True
        finally:
            work.close()
        return
    number = torch_loads([gpu.pci_address]).get(0)
    if number is None:
        yield False
        return
    import torch

    with kept_up(TorchLoad(number, torch)):
        yield True


@contextlib.contextmanager
def kept_up(bursts: Load) -> Iterator[None]:
    """Queues one burst after another, and waits for their end."""
    over = threading.Event()

    def queue() -> None:
        while not over.wait(BURST_S):
            bursts.burst(BURST_S)

    thread = threading.Thread(target=queue, daemon=True)
    bursts.burst(2 * BURST_S)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        bursts.bursts()
        bursts.close()

"""Something to measure: a step of work on a GPU, real or simulated."""

from __future__ import annotations

import sys
from collections.abc import Callable

from zeus.device import GPU
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError


def step_on(gpu: GPU, index: int) -> Callable[[], None]:
    """Returns a function that keeps the GPU busy for about 0.1 s.

    It may return before the GPU is done.
    """
    try:
        with Client() as client:
            devices = client.node().simulated
    except ZeusIpcError:
        devices = None  # no zeusd: the library measures in this process, so the GPUs are real
    if devices is not None:
        return SimulatedWork(devices, [gpu.uuid], "model/compute").run
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        sys.exit("This example needs PyTorch with CUDA, or a simulated node.")
    matrix = torch.randn(4096, 4096, device=torch.device("cuda", index))

    def multiply() -> None:
        for _ in range(20):
            matrix @ matrix

    return multiply

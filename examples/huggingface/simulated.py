"""Work for simulated GPUs: without, they would stay idle, whatever the trainer computes.

A real node needs nothing of this.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from zeus.monitor import ZeusMonitor
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.simulation import SimulatedWork

MEASURED = "nsdi23/v100/imagenet/resnet50/adadelta/32"
"""A unit is a training step that takes 0.1 s at the highest limit."""


class SimulatedSteps(TrainerCallback):
    """Each optimizer step is one of a measured ResNet-50's, on the simulated GPUs of a monitor.

    Args:
        devices: Where the simulated GPUs take their work.
        monitor: The GPUs.
    """

    def __init__(self, devices: str, monitor: ZeusMonitor) -> None:
        gpus = [monitor.gpus[index] for index in monitor.gpu_indices]
        workload = MEASURED if "V100" in gpus[0].get_name() else "model/compute"
        self._work = SimulatedWork(devices, [gpu.uuid for gpu in gpus], workload)

    def on_step_end(self, *event: Any, **objects: Any) -> None:
        """A step is done when the GPUs have done it."""
        self._work.run(1)


def simulated_steps(monitor: ZeusMonitor) -> SimulatedSteps | None:
    """A callback that keeps the monitor's GPUs busy; None where they are real."""
    try:
        with Client() as client:
            devices = client.node().simulated
    except ZeusIpcError:
        return None  # no zeusd: the library measures in this process, and only real GPUs
    return None if devices is None else SimulatedSteps(devices, monitor)

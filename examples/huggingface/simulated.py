"""Work for simulated GPUs, which otherwise stay idle while the trainer computes.

Real GPUs do not need this module.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from zeus.monitor import ZeusMonitor
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError

MEASURED = "nsdi23/v100/imagenet/resnet50/adadelta/32"
"""A unit is a training step that takes 0.1 s at the highest limit."""


class SimulatedSteps(TrainerCallback):
    """Replays a measured step of ResNet-50 on a monitor's simulated GPUs with each optimizer step.

    Args:
        devices: Endpoint of the simulated GPUs.
        monitor: The GPUs.
    """

    def __init__(self, devices: str, monitor: ZeusMonitor) -> None:
        gpus = [monitor.gpus[index] for index in monitor.gpu_indices]
        workload = MEASURED if "V100" in gpus[0].get_name() else "model/compute"
        self._work = SimulatedWork(devices, [gpu.uuid for gpu in gpus], workload)

    def on_step_end(self, *event: Any, **objects: Any) -> None:
        """Waits until the GPUs have completed the step."""
        self._work.run(1)


def simulated_steps(monitor: ZeusMonitor) -> SimulatedSteps | None:
    """Returns a callback that keeps the monitor's GPUs busy; None if they are real."""
    try:
        with Client() as client:
            devices = client.node().simulated
    except ZeusIpcError:
        return None  # no zeusd: the library measures in this process, so the GPUs are real
    return None if devices is None else SimulatedSteps(devices, monitor)

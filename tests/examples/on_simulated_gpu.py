"""Runs an example whose `Trainer` has no GPU, with a simulated one that works while it trains.

python on_simulated_gpu.py EXAMPLE.py [ITS OPTIONS]
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch
from transformers import TrainerCallback, trainer

from zeus_ipc import Client
from zeus_ipc.simulation import SimulatedWork

WORKLOAD = "nsdi23/v100/imagenet/resnet50/adadelta/32"


class KeepsItsGpuBusy(TrainerCallback):
    """Each step is one of a measured ResNet-50's on this process's simulated GPU."""

    def on_train_begin(self, *event: Any, **objects: Any) -> None:
        node = Client().node()
        gpu = node.gpus[int(os.environ.get("LOCAL_RANK", "0"))]
        assert node.simulated is not None
        self.work = SimulatedWork(node.simulated, [gpu.uuid], WORKLOAD)

    def on_step_end(self, *event: Any, **objects: Any) -> None:
        self.work.run(1)

    def on_train_end(self, *event: Any, **objects: Any) -> None:
        self.work.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer.DEFAULT_CALLBACKS.append(KeepsItsGpuBusy)
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")

"""What the quickstart trains: a measured ResNet-50 on simulated GPUs, a real one on real GPUs."""

from __future__ import annotations

from typing import Protocol

from zeus_common.simulation import SimulatedWork
from zeus_ipc.errors import RequestRejected
from zeus_ipc.replies import NodeInfo

MEASURED_WORKLOAD = "nsdi23/v100/imagenet/resnet50/adadelta/32"
MODELED_WORKLOAD = "model/compute"
"""Where nothing was measured on a product: what the simulator's power model makes of it."""

QUEUED_STEPS = 3


class TrainingWork(Protocol):
    """Something that trains, a step at a time."""

    name: str

    def step(self) -> None:
        """One training step. May return before the GPU is done."""

    def finish(self) -> None:
        """Waits until the GPU is done."""


class ReplayedResNet50:
    """ResNet-50 on ImageNet, batch 32, as it was measured on a V100, on a simulated GPU; on
    another product, the power model's compute load.

    Attributes:
        workload: Its name in the catalog.
    """

    def __init__(self, node: NodeInfo, gpu: str) -> None:
        assert node.simulated is not None
        self.workload = MEASURED_WORKLOAD
        self.name = "ResNet-50, ImageNet, batch 32, replayed from measurements on a V100"
        try:
            self._work = SimulatedWork(node.simulated, [gpu], self.workload)
        except RequestRejected:
            self.workload = MODELED_WORKLOAD
            self.name = "a load of the simulator's power model, as no measurement is of this GPU"
            self._work = SimulatedWork(node.simulated, [gpu], self.workload)

    def step(self) -> None:
        """See `TrainingWork`. Some steps stay queued, as with PyTorch on a real GPU."""
        self._work.launch(1)
        self._work.synchronize(queued=QUEUED_STEPS)

    def finish(self) -> None:
        """See `TrainingWork`."""
        self._work.synchronize()


class TorchResNet50:
    """ResNet-50 on random images, batch 32, with PyTorch on the first visible GPU."""

    name = "ResNet-50, random images, batch 32, PyTorch"

    def __init__(self) -> None:
        import torch
        from resnet import resnet50

        self._torch = torch
        device = torch.device("cuda", 0)
        self._model = resnet50().to(device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        images = torch.randn(32, 3, 224, 224, device=device)
        self._images = images.to(memory_format=torch.channels_last)
        self._labels = torch.randint(0, 1000, (32,), device=device)

    def step(self) -> None:
        """See `TrainingWork`."""
        torch = self._torch
        with torch.autocast("cuda", dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(self._model(self._images), self._labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()

    def finish(self) -> None:
        """See `TrainingWork`."""
        self._torch.cuda.synchronize()

"""The networks: one of torchvision, or a tiny one that needs no torchvision."""

from __future__ import annotations

from typing import Any

import torch
from options import fail
from torch import nn


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, width, height, width of the image)."""
        return torch.relu(x + self.body(x))


def tiny(classes: int) -> nn.Module:
    """A network small enough for a CPU."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, stride=4, padding=3),
        *(Block(16) for _ in range(2)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def make(arch: str, classes: int) -> nn.Module:
    """Creates a network by name, with random weights."""
    if arch == "tiny":
        return tiny(classes)
    models = import_torchvision(f"--arch {arch}").models
    if arch not in models.list_models(module=models):
        fail(
            f"torchvision has no image classifier {arch!r}; --arch takes one of its names, or tiny"
        )
    model: nn.Module = models.get_model(arch, num_classes=classes)
    return model


def import_torchvision(wanted_for: str) -> Any:
    """Imports torchvision, or raises an error that says how to install it."""
    try:
        import torchvision
    except ModuleNotFoundError as error:
        fail(
            f"{wanted_for} needs {error.name}: pip install torchvision; or use --synthetic "
            "--arch tiny"
        )
    except (ImportError, RuntimeError) as error:
        fail(
            f"torchvision does not match torch {torch.__version__} ({error}); install the two "
            "together"
        )
    return torchvision

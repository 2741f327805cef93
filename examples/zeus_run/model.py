"""A network small enough for a CPU."""

from __future__ import annotations

from data import CLASSES
from torch import nn


def network() -> nn.Module:
    """For images of (batch, 3, 32, 32)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, stride=4, padding=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )

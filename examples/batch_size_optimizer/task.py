"""The training task: a small network learns to imitate another one. It needs little CPU."""

from __future__ import annotations

import math

import torch
from torch import nn

FEATURES, CLASSES = 32, 10
TRAIN_SAMPLES, VAL_SAMPLES = 4096, 1024

TARGET_ACCURACY = 0.68
LEARNING_RATE = 0.1
"""Of batch size 256."""


def samples(number: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns features (number, 32) and classes, by a rule that is the same for all seeds."""
    features = torch.randn(number, FEATURES, generator=torch.Generator().manual_seed(seed))
    rule = torch.Generator().manual_seed(7)
    hidden = torch.randn(FEATURES, 64, generator=rule) / math.sqrt(FEATURES)
    out = torch.randn(64, CLASSES, generator=rule)
    return features, (torch.relu(features @ hidden) @ out).argmax(1)


def network() -> nn.Module:
    """A network with random weights, for features (batch, 32)."""
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def learning_rate(batch_size: int) -> float:
    """Scales with the square root of the batch size, so that one learning rate suits all sizes."""
    return LEARNING_RATE * math.sqrt(batch_size / 256)


def accuracy(model: nn.Module, features: torch.Tensor, classes: torch.Tensor) -> float:
    """Share of samples that are classified correctly."""
    with torch.no_grad():
        return float((model(features).argmax(1) == classes).float().mean())

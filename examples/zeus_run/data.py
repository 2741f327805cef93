"""Made-up images in the form of CIFAR's, of ten classes that a small network can learn."""

from __future__ import annotations

import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

CLASSES = 10
SIZE = 32
_NOISE = 4.5
"""Standard deviation of what hides a class's picture, whose own is 1."""


def images(samples: int, seed: int) -> TensorDataset:
    """Images of (3, 32, 32) and their classes; the classes' pictures are the same for all seeds."""
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    pictures = interpolate(coarse, size=SIZE, mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    noise = torch.randn(samples, 3, SIZE, SIZE, generator=generator)
    return TensorDataset(pictures[labels] + _NOISE * noise, labels)

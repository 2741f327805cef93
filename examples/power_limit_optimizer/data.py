"""Images: a folder in ImageNet's layout, or random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import import_torchvision
from options import Options, fail
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 10
"""Of random images."""


class RandomImages(Dataset[tuple[torch.Tensor, int]]):
    """A few random images that repeat: they take no time to load, and can be memorized."""

    def __init__(self, length: int, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._images = torch.randn(64, 3, size, size, generator=generator)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._images[index % 64], index % 64 % CLASSES


def loaders(
    options: Options, rank: int = 0, world_size: int = 1
) -> tuple[DataLoader[Any], DataLoader[Any], int]:
    """Returns this rank's training and evaluation images, and the number of classes."""
    train: Any
    val: Any
    if options.data_dir is None:
        train = RandomImages(100_000, options.image_size, options.seed)
        val = RandomImages(1_000, options.image_size, options.seed)
        classes = CLASSES
    else:
        train, val = _folder(options.data_dir, options.image_size)
        classes = len(train.classes)
    train_loader = _loader(train, options, rank, world_size, training=True)
    if not len(train_loader):
        fail(f"{len(train)} images are fewer than a batch of {options.batch_size} on each GPU")
    return train_loader, _loader(val, options, rank, world_size, training=False), classes


def _loader(
    images: Any, options: Options, rank: int, world_size: int, training: bool
) -> DataLoader[Any]:
    # All ranks must train the same number of steps, so the remainder is dropped.
    sampler: DistributedSampler[Any] = DistributedSampler(
        images, world_size, rank, shuffle=training, seed=options.seed, drop_last=training
    )
    return DataLoader(
        images,
        options.batch_size,
        sampler=sampler,
        num_workers=options.workers,
        pin_memory=torch.cuda.is_available(),
        drop_last=training,
        persistent_workers=options.workers > 0,
    )


def _folder(path: Path, size: int) -> tuple[Any, Any]:
    for part in (path, path / "train", path / "val"):
        if not part.is_dir():
            fail(f"there is no folder {part}; DATA_DIR must have train/CLASS/ and val/CLASS/")
    torchvision = import_torchvision("reading DATA_DIR")
    from torchvision import transforms

    end = [
        transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
    cut = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    fit = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    try:
        train = torchvision.datasets.ImageFolder(path / "train", transforms.Compose(cut + end))
        val = torchvision.datasets.ImageFolder(path / "val", transforms.Compose(fit + end))
    except FileNotFoundError as error:
        fail(" ".join(str(error).split()))
    if train.classes != val.classes:
        fail(f"{path / 'train'} and {path / 'val'} do not have the same classes")
    return train, val

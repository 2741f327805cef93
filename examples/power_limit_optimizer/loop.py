"""The training loop; `fit` calls the power limit optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import checkpoint
import torch
from options import Options
from simulated import GpuWork
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from zeus.exceptions import ZeusBaseError
from zeus.monitor import ZeusMonitor
from zeus.monitor.energy import Window
from zeus.optimizer.power_limit import Done, GlobalPowerLimitOptimizer
from zeus.utils.framework import all_reduce, rank


class Trainer:
    """Trains and evaluates an image classifier, on one device.

    Args:
        model: On its device, wrapped for data parallelism if there are several.
        device: The device.
        gpu_work: Keeps a simulated GPU busy.
    """

    def __init__(
        self, options: Options, model: nn.Module, device: torch.device, gpu_work: GpuWork
    ) -> None:
        self.options = options
        self.model = model
        self.device = device
        self.gpu_work = gpu_work
        self.optimizer = torch.optim.SGD(
            model.parameters(), options.lr, momentum=0.9, weight_decay=1e-4
        )

    def train(self, batches: Iterable[Any], epoch: int) -> float:
        """One epoch. Returns the mean loss."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * 0.1 ** (epoch // 30)
        losses = torch.zeros((), device=self.device)
        steps = 0
        for images, labels in batches:
            with self.gpu_work.step():
                loss = nn.functional.cross_entropy(self._logits(images), self._moved(labels))
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                losses += loss.detach()
            steps += 1
        mean, ranks = all_reduce([losses.item() / steps, 1], "sum")
        return mean / ranks

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any]) -> float:
        """Share of images that are classified correctly."""
        self.model.eval()
        right = torch.zeros((), device=self.device)
        seen = 0
        for images, labels in batches:
            with self.gpu_work.step(1 / 3):  # most of a training step is the backward pass
                right += (self._logits(images).argmax(1) == self._moved(labels)).sum()
            seen += len(labels)
        right_of_all, all_seen = all_reduce([right.item(), seen], "sum")
        return right_of_all / all_seen

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        # Autocast, also with FSDP: its own mixed precision would convert batch norm's weights too.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.amp):
            logits: torch.Tensor = self.model(self._moved(images))
        return logits.float()

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, non_blocking=True)


def fit(
    trainer: Trainer,
    train_loader: DataLoader[Any],
    val_loader: DataLoader[Any],
    monitor: ZeusMonitor,
    plo: GlobalPowerLimitOptimizer,
) -> None:
    """Trains all epochs while the power limit optimizer finds the best limit."""
    options = trainer.options
    first = checkpoint.load(options.resume, trainer.model, trainer.optimizer)
    sampler = train_loader.sampler
    assert isinstance(sampler, DistributedSampler)
    total_s = total_j = 0.0
    with plo:
        for epoch in range(first, options.epochs):
            sampler.set_epoch(epoch)
            batches = itertools.islice(train_loader, options.steps_per_epoch)
            with monitor.window("epoch") as window:
                loss = trainer.train(plo.steps(batches), epoch)
            with plo.paused():  # only training is measured at a limit
                batches = itertools.islice(val_loader, options.steps_per_epoch)
                accuracy = trainer.evaluate(batches)
                checkpoint.save(options.checkpoint, epoch + 1, trainer.model, trainer.optimizer)
            (joules,) = all_reduce([_joules(window)], "sum")
            total_s, total_j = total_s + window.time, total_j + joules
            limit_w = chosen_limit_w(plo)
            say(
                f"epoch {epoch + 1}/{options.epochs}: loss {loss:.3f}, accuracy {accuracy:.1%}, "
                f"{window.time:.1f} s, {joules:.0f} J, "
                + ("searching" if limit_w is None else f"at {limit_w:g} W")
            )
        found = what_was_found(plo)
    say(f"training: {total_s:.1f} s, {total_j:.0f} J")
    say(found)


def what_was_found(plo: GlobalPowerLimitOptimizer) -> str:
    """Formats the limit, and what a step saves compared with the highest one."""
    limit_w = chosen_limit_w(plo)
    if plo.disabled:
        return "no limit was chosen: see the warning above"
    if limit_w is None:
        return "no limit was chosen: {} of {} steps were trained".format(*plo.progress)
    return f"chosen: {limit_w:g} W\n{plo.report()}"


def chosen_limit_w(plo: GlobalPowerLimitOptimizer) -> float | None:
    """Returns the chosen limit; None during the search, or if the search gave up."""
    if plo.disabled or not isinstance(plo.state, Done):
        return None
    return plo.state.optimal_power_limit / 1000


def say(line: str) -> None:
    """Prints on one process only."""
    if rank() == 0:
        print(line, flush=True)


def _joules(window: Window) -> float:
    try:
        return window.total_energy
    except ZeusBaseError:  # zeusd or a sensor is gone: training continues
        return math.nan

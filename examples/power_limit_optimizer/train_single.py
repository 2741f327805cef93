"""Trains an image classifier on one GPU, and finds its best power limit.

python train_single.py DATA_DIR --gpu 0
"""

from __future__ import annotations

import data
import models
import torch
from loop import Trainer, fit
from options import parse, selector, told_in_a_sentence
from simulated import GpuWork

from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer


def main() -> None:
    assert __doc__ is not None
    options = parse(__doc__, one_gpu=True)
    optimum_selector = selector()
    train_loader, val_loader, classes = data.loaders(options)
    torch.manual_seed(options.seed)
    model = models.make(options.arch, classes)
    with told_in_a_sentence():
        monitor = ZeusMonitor(gpu_indices=[options.gpu])
        gpu_work = GpuWork(monitor.gpus[options.gpu])
        plo = GlobalPowerLimitOptimizer(
            monitor,
            optimum_selector,
            warmup_steps=options.warmup_steps,
            profile_steps=options.profile_steps,
            pl_step=options.pl_step,
            profile_path=options.profile_path,
        )

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", options.gpu)
        torch.cuda.set_device(device)
    trainer = Trainer(options, model.to(device), device, gpu_work)
    fit(trainer, train_loader, val_loader, monitor, plo)


if __name__ == "__main__":
    main()

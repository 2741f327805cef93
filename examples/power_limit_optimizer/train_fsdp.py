"""Trains an image classifier on several GPUs, fully sharded, and finds their best power
limit.

torchrun --nnodes 1 --nproc_per_node gpu train_fsdp.py DATA_DIR
"""

from __future__ import annotations

import data
import models
import torch
import torch.distributed as dist
from loop import Trainer, fit
from options import parse, selector, told_in_a_sentence
from ranks import place, process_group
from simulated import GpuWork
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

BLOCKS = {
    "BasicBlock",
    "Block",
    "Bottleneck",
    "CNBlock",
    "EncoderBlock",
    "InvertedResidual",
    "MBConv",
    "SwinTransformerBlock",
}
"""Parts that repeat in `tiny` and in torchvision's networks."""


def shard(model: nn.Module, device: torch.device) -> None:
    """Shards parameters, gradients and the optimizer's state over all ranks.

    Each block is gathered when it runs and freed after it; parameters outside blocks are gathered
    together.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main() -> None:
    assert __doc__ is not None
    options = parse(__doc__)
    optimum_selector = selector()
    rank, world_size, gpu = place()
    device = torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")
    # Errors are found before the processes wait for each other.
    train_loader, val_loader, classes = data.loaders(options, rank, world_size)
    torch.manual_seed(options.seed)
    model = models.make(options.arch, classes)
    with told_in_a_sentence():
        monitor = ZeusMonitor(gpu_indices=[gpu])
        gpu_work = GpuWork(monitor.gpus[gpu])

    with process_group(device):
        # Each process measures its own GPU and sets its limit. All try the same limits at the same
        # steps, and choose one by the energy of all GPUs and the time of the slowest.
        with told_in_a_sentence():
            plo = GlobalPowerLimitOptimizer(
                monitor,
                optimum_selector,
                warmup_steps=options.warmup_steps,
                profile_steps=options.profile_steps,
                pl_step=options.pl_step,
                profile_path=options.profile_path,
            )
        shard(model.to(device), device)
        trainer = Trainer(options, model, device, gpu_work)
        fit(trainer, train_loader, val_loader, monitor, plo)


if __name__ == "__main__":
    main()

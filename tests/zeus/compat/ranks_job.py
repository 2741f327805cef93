"""The calls of ml-energy/zeus's scripts for several ranks, in their order: ranks_job.py FOLDER

Data parallel, then fully sharded; started by `test_rank_scripts` with torchrun, both in one job.
Writes what each rank saw to FOLDER/seen-RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, MaxSlowdownConstraint
from zeus_ipc import Client
from zeus_ipc.simulation import SimulatedWork

UNITS = 0.1
"""A step's work: some 10 ms at the highest limit."""
MOST_EPOCHS, STEPS = 20, 30


def data_parallel(gpu: int, work: SimulatedWork) -> GlobalPowerLimitOptimizer:
    """train_dp.py: trains until the choice is made."""
    from zeus.utils.env import get_env

    model = DistributedDataParallel(nn.Linear(8, 1))
    plo = GlobalPowerLimitOptimizer(
        monitor=ZeusMonitor(gpu_indices=[gpu]),
        optimum_selector=MaxSlowdownConstraint(factor=get_env("ZEUS_MAX_SLOWDOWN", float, 1.1)),
        warmup_steps=10,
        profile_steps=40,
        pl_step=25,
    )
    for _ in range(MOST_EPOCHS):
        plo.on_epoch_begin()
        train(plo, model, work)
        plo.on_epoch_end()
        done = [None] * dist.get_world_size()
        dist.all_gather_object(done, type(plo.state).__name__ == "Done")
        if all(done):
            break
    return plo


def fully_sharded(gpu: int, work: SimulatedWork) -> GlobalPowerLimitOptimizer:
    """train_fsdp.py: a few epochs, too short for its long profiles."""
    model = fully_shard(nn.Linear(8, 1))
    monitor = ZeusMonitor(gpu_indices=[gpu])
    plo = GlobalPowerLimitOptimizer(monitor, profile_steps=200)
    for _ in range(2):
        plo.on_epoch_begin()
        train(plo, model, work)
        plo.on_epoch_end()
    return plo


def train(plo: GlobalPowerLimitOptimizer, model: nn.Module, work: SimulatedWork) -> None:
    """One epoch."""
    for _ in range(STEPS):
        plo.on_step_begin()
        model(torch.ones(4, 8)).sum().backward()
        work.run(UNITS)
        plo.on_step_end()


def wait_for_all(plo: GlobalPowerLimitOptimizer) -> None:
    """Steps on until all ranks hold the same limit: one may still have been setting its last."""
    limits: list[int | None] = [None] * dist.get_world_size()
    for _ in range(1000):
        dist.all_gather_object(limits, plo.current_power_limit)
        if len({*limits}) == 1:
            return
        plo.on_epoch_begin()
        plo.on_step_begin()
        time.sleep(0.01)
        plo.on_step_end()
        plo.on_epoch_end()


def main() -> None:
    """One script after the other; each ends as a process would."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with Client() as client:
        node = client.node()
    assert node.simulated is not None
    work = SimulatedWork(node.simulated, [node.gpus[rank].uuid], "model/compute")
    seen: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        for script in (data_parallel, fully_sharded):
            plo = script(rank, work)
            wait_for_all(plo)
            seen[script.__name__] = {
                "state": type(plo.state).__name__,
                "limit_mw": plo.current_power_limit,
                "disabled": plo.disabled,
            }
            plo.close()
            dist.barrier()
    seen["warned"] = [str(one.message) for one in warned if "zeus" in one.filename]
    Path(sys.argv[1], f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

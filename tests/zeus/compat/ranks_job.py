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
from zeus.optimizer.power_limit import (
    Done,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    Profiling,
    Ready,
)
from zeus.optimizer.power_limit.states import State
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client

UNITS = 0.1
"""A step's work: some 10 ms at the highest limit."""
MOST_EPOCHS, STEPS = 20, 30


measured_mw: list[list[int]] = []
"""The limits that ranks measured at in the same step, in order; more than one: they were apart."""


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
        note_measured(plo)
        model(torch.ones(4, 8)).sum().backward()
        work.run(UNITS)
        plo.on_step_end()


def note_measured(plo: GlobalPowerLimitOptimizer) -> None:
    """Notes the limits that the ranks measure at now."""
    at: list[int | None] = [None] * dist.get_world_size()
    measures = isinstance(plo.state, Profiling)
    dist.all_gather_object(at, plo.current_power_limit if measures else None)
    limits = sorted({limit for limit in at if limit is not None})
    if limits and measured_mw[-1:] != [limits]:
        measured_mw.append(limits)


def wait_for_all(plo: GlobalPowerLimitOptimizer) -> None:
    """Steps on until all ranks have set the limit that they want: one may still be setting its
    last or, beside other work, its first.
    """
    limits: list[list[int] | None] = [None] * dist.get_world_size()
    for _ in range(1000):
        dist.all_gather_object(limits, [wanted_mw(plo.state), plo.current_power_limit])
        if len({limit for of_rank in limits for limit in of_rank or ()}) == 1:
            return
        plo.on_epoch_begin()
        plo.on_step_begin()
        time.sleep(0.01)
        plo.on_step_end()
        plo.on_epoch_end()


def wanted_mw(state: State) -> int:
    """The limit that a search is at, or is about to set."""
    if isinstance(state, Ready):
        return state.next_power_limit
    return state.optimal_power_limit if isinstance(state, Done) else state.current_power_limit


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
                "measured_mw": [*measured_mw],
            }
            measured_mw.clear()
            plo.close()
            dist.barrier()
    seen["warned"] = [str(one.message) for one in warned if "zeus" in one.filename]
    Path(sys.argv[1], f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

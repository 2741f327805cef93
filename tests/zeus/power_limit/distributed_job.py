"""A training job of several processes on simulated GPUs: python distributed_job.py FOLDER CASE...

Runs cases one after another, each with an optimizer of its own, and writes CASE-RANK.json for each
to the folder: what this process saw. Started by `test_distributed`, with torchrun or by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support import wait_for
from zeus.monitor import ZeusMonitor
from zeus.optimizer.power_limit import Done, Energy, GlobalPowerLimitOptimizer, leader, ranks
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client

UNITS = 0.3
"""A step's work: some 30 ms at the highest limit."""
MOST_STEPS = 600
SMALL: dict[str, Any] = {"warmup_steps": 2, "profile_steps": 8, "pl_step": 50}


class Job:
    """One process of the job.

    Args:
        folder: For what it saw.
        gpu: Its GPU.
    """

    def __init__(self, folder: Path, gpu: int) -> None:
        self.folder = folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.on_gpu(gpu)

    def on_gpu(self, gpu: int) -> None:
        """Trains on this one from now on."""
        self.gpu = gpu
        self.monitor = ZeusMonitor(gpu_indices=[gpu], cpu_indices=[])
        with Client() as client:
            devices = client.node().simulated
        self.work = SimulatedWork(devices, [self.monitor.gpus[gpu].uuid], "model/compute")

    def begin(self, case: str, **options: Any) -> GlobalPowerLimitOptimizer:
        """Makes the optimizer of a case."""
        self.case = case
        self.steps = 0
        self.pieces: list[dict[str, float]] = []
        self.told: list[str] = []
        with self._telling():
            self.optimizer = GlobalPowerLimitOptimizer(self.monitor, **{**SMALL, **options})
        self.optimizer.on_metrics = self.pieces.append
        return self.optimizer

    def step(self, train: Callable[[], None] = lambda: None) -> None:
        """One training step."""
        with self._telling():
            self.optimizer.on_step_begin()
        self.work.launch(UNITS)
        train()
        self.work.synchronize()
        self.optimizer.on_step_end()
        self.steps += 1

    def until(self, there: Callable[[], bool]) -> None:
        """Trains until a condition holds in this process."""
        while not there():
            assert self.steps < MOST_STEPS, f"{self.case}: {self.optimizer.state}"
            self.step()

    def until_all_done(self, train: Callable[[], None]) -> None:
        """Trains in lockstep until all processes have chosen."""
        left = torch.ones(1)
        while left.item():
            assert self.steps < MOST_STEPS, f"{self.case}: {self.optimizer.state}"
            self.step(train)
            left = torch.tensor([0.0 if self.done() else 1.0])
            dist.all_reduce(left)

    def done(self) -> bool:
        """Whether this process has chosen, or given up."""
        return isinstance(self.optimizer.state, Done)

    def end(self, **more: Any) -> None:
        """Ends the case's training, and writes the observations."""
        optimizer = self.optimizer
        assert isinstance(optimizer.state, Done)
        chosen_mw = optimizer.state.optimal_power_limit
        with contextlib.suppress(AssertionError):  # the actual state is recorded
            wait_for(lambda: self.limit_mw() == chosen_mw, "the chosen limit", 10)
        seen = {
            "disabled": optimizer.disabled,
            "chosen_w": chosen_mw / 1000,
            "limit_w": self.limit_mw() / 1000,
            "steps": self.steps,
            "pieces": [one for one in self.pieces if "zeus/step_energy_j" in one],
            "measurements": [one.model_dump() for one in optimizer.measurements],
            "estimates": [dataclasses.asdict(one) for one in optimizer.estimates],
            "messages": self.told,
            **more,
        }
        optimizer.on_train_end()
        (self.folder / f"{self.case}-{self.rank}.json").write_text(json.dumps(seen))

    def limit_mw(self) -> int:
        """The limit of this process's GPU."""
        return self.monitor.gpus[self.gpu].get_power_management_limit()

    def _telling(self) -> Any:
        job = self

        class Telling(warnings.catch_warnings):
            def __enter__(self) -> None:
                self.log = super().__enter__()
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", ResourceWarning)  # of others' garbage
                warnings.showwarning = lambda message, *_: job.told.append(str(message))

        return Telling()


class Model:
    """A small model and how it is trained.

    Args:
        sharded: Fully sharded, rather than data parallel.
    """

    def __init__(self, sharded: bool = False) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        if sharded:
            from torch.distributed.fsdp import fully_shard  # half as long as torch itself

            fully_shard(model)
        self.model = model if sharded else DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train(self) -> None:
        """One step."""
        self.model(torch.rand(4, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# -------------------------------------------------------------------------------------------- cases


def agree(job: Job) -> None:
    """Every limit, with the default criterion."""
    profile = job.folder / f"agree-profile-{job.rank}.json"
    job.begin("agree", search="exhaustive", profile_path=profile)
    job.until_all_done(Model().train)
    job.end()


def adaptive(job: Job) -> None:
    """The adaptive search, fully sharded."""
    job.begin("adaptive", optimum_selector=Energy())
    job.until_all_done(Model(sharded=True).train)
    job.end()


def denied(job: Job) -> None:
    """Rank 1 trains on a GPU whose limits it may not set."""
    before = job.gpu
    if job.rank == 1:
        job.on_gpu(3)
    job.begin("denied")
    job.until_all_done(Model().train)
    model = Model()
    for _ in range(5):
        job.step(model.train)
    job.end()
    if job.rank == 1:
        job.work.close()
        job.on_gpu(before)


def killed(job: Job) -> None:
    """Rank 1 is killed while it measures at a lower limit."""
    optimizer = job.begin("killed", search="exhaustive")
    model = Model()
    while True:
        job.step(model.train)
        if job.rank == 1 and 0 < optimizer.current_power_limit < 250_000:
            os.kill(os.getpid(), signal.SIGKILL)


def alone(job: Job) -> None:
    """Rank 2 is killed, then rank 0. Those who are left train on."""
    for module in (leader, ranks):
        module.SILENCE_S = 0.5
    optimizer = job.begin("without-2", search="exhaustive")

    def low() -> bool:
        return job.done() or 0 < optimizer.current_power_limit < 250_000

    job.until(low)
    if job.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    job.until(job.done)
    job.end()

    # Rank 2 will not come. Before anyone gives it up, rank 0 is gone, and the store with it.
    for module in (leader, ranks):
        module.SILENCE_S = 60
    job.begin("without-0")
    for _ in range(5):
        job.step()
    meet(job)
    if job.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    job.until(job.done)
    job.end()


def meet(job: Job) -> None:
    """Ranks 0 and 1 are both here."""
    (job.folder / f"here-{job.rank}").touch()
    while not all((job.folder / f"here-{rank}").exists() for rank in (0, 1)):
        job.step()


def main() -> None:
    """Runs the cases."""
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(Path(folder), int(os.environ["LOCAL_RANK"]))
    for case in cases:
        globals()[case](job)
    if "alone" not in cases:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A pipeline of several processes on simulated GPUs: python pipeline_job.py FOLDER URL CASE.

Each rank is a stage that passes tensors to the next one by torch.distributed, with its simulated
GPU computing for it. Started with torchrun by `test_distributed`; writes CASE-RANK.json.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer
from zeus.optimizer.pipeline_frequency.online_profiler import ProfilerSettings
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client

MICROBATCHES = 3
MOST_ITERATIONS = 4000


class Told(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Stage:
    """One rank.

    Args:
        folder: For what it saw, and the profile that its GPU runs.
        url: Of the server.
        told: Collects warnings.
    """

    def __init__(self, folder: Path, url: str, told: Told, **options: Any) -> None:
        self.folder = folder
        self.told = told
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.client = Client()
        node = self.client.node()
        assert node.simulated is not None
        self.uuid = node.gpus[self.rank].uuid
        workload = f"profile:{folder}/profile.csv#stage={self.rank}"
        self.work = SimulatedWork(node.simulated, [self.uuid], workload)
        self.clocks: dict[int, list[int]] = {}
        self.optimizer = PipelineFrequencyOptimizer(
            rank=self.rank,
            dp_rank=0,
            pp_rank=self.rank,
            tp_rank=0,
            device_id=self.rank,
            dp_degree=1,
            pp_degree=self.world,
            tp_degree=1,
            world_size=self.world,
            server_url=url,
            schedule="gpipe",
            num_microbatches=MICROBATCHES,
            **options,
        )
        # The requests, with their iterations.
        controller = self.optimizer._controller
        send = controller.set_frequency

        def keeping(mhz: int) -> None:
            self.clocks.setdefault(self.optimizer.iteration, []).append(mhz)
            send(mhz)

        controller.set_frequency = keeping

    def slow_down(self, profile: Path) -> None:
        """The GPU takes as long from now on as another profile says."""
        node = self.client.node()
        assert node.simulated is not None
        self.work.close()
        workload = f"profile:{profile}#stage={self.rank}"
        self.work = SimulatedWork(node.simulated, [self.uuid], workload)

    def compute(self, name: str) -> None:
        self.optimizer.on_instruction_begin(name)
        self.work.run(1, name)
        self.optimizer.on_instruction_end(name)

    def pass_on(self, forward: bool, send: bool) -> None:
        """A tensor to, or from, the next stage or the one before."""
        other = self.rank + (1 if forward == send else -1)
        if 0 <= other < self.world:
            tensor = torch.zeros(1)
            dist.send(tensor, other) if send else dist.recv(tensor, other)

    def forward(self) -> None:
        self.pass_on(forward=True, send=False)
        self.compute("forward")
        self.pass_on(forward=True, send=True)

    def backward(self) -> None:
        self.pass_on(forward=False, send=False)
        self.compute("backward")
        self.pass_on(forward=False, send=True)

    def iterate(self) -> None:
        self.optimizer.on_step_begin()
        for _ in range(MICROBATCHES):
            self.forward()
        for _ in range(MICROBATCHES):
            self.backward()
        self.optimizer.on_step_end()

    def everywhere(self, here: bool) -> bool:
        """Whether a condition holds in all ranks."""
        left = torch.tensor([0.0 if here else 1.0])
        dist.all_reduce(left)
        return not left.item()

    def mhz(self) -> int:
        """The clock that the GPU has."""
        return self.client.state(self.uuid)[self.uuid].gpu_clock_mhz or 0

    def energy_j(self) -> float:
        return self.client.energy(self.uuid)[self.uuid].energy_mj / 1000


def profiled(stage: Stage) -> dict[str, Any]:
    """Profiles, gets a plan made of that, and trains under it. Then someone chooses another; this
    goes on until all ranks have it.
    """
    count = 0

    def iterate_until(condition: Callable[[], bool]) -> None:
        nonlocal count
        while not stage.everywhere(condition()):
            stage.iterate()
            count += 1
            assert count < MOST_ITERATIONS

    iterate_until(lambda: not stage.optimizer.profiling)
    assert not stage.told.lines  # such as that there will be no plan
    print(f"rank {stage.rank} has profiled in {count} iterations", flush=True)
    iterate_until(lambda: stage.optimizer.plan_version > 0)
    first = stage.optimizer.plan_version
    for _ in range(3):
        stage.iterate()
    first_mhz = stage.mhz()
    (stage.folder / f"trains-{stage.rank}").touch()
    # Nobody goes on before all know of the choice, however late a report is.
    while stage.optimizer.follower.pending is None:
        time.sleep(0.005)
    iterate_until(lambda: stage.optimizer.plan_version > first)
    for _ in range(3):
        stage.iterate()
    return {"versions": [first, stage.optimizer.plan_version], "first_mhz": first_mhz}


def drifting(stage: Stage) -> dict[str, Any]:
    """Trains under the server's plan. Then the GPU of stage 1 gets slower, and this goes on until
    the server has planned for it. Tells the iterations' times before, meanwhile and after, and the
    energy of one."""
    times: list[list[float]] = [[], [], []]
    energies: list[float] = []
    version = 0
    for part in range(3):
        if part == 1 and stage.rank == 1:
            stage.slow_down(stage.folder / "slower.csv")
        before_j = stage.energy_j()
        for _ in range(MOST_ITERATIONS):
            begin_s = time.monotonic()
            stage.iterate()
            times[part].append(time.monotonic() - begin_s)
            changed = stage.optimizer.plan_version > max(version, 1)
            enough = len(times[part]) >= 12
            if stage.everywhere(changed if part == 1 else enough):
                break
        version = stage.optimizer.plan_version
        energies.append((stage.energy_j() - before_j) / len(times[part]))
    return {"times": times, "energies": energies, "version": version}


def main() -> None:
    folder, url, case = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    # The test gives up a little later; of the benchmark an iteration takes seconds.
    faulthandler.dump_traceback_later(200, exit=case == "profiled")
    told = Told()
    logging.getLogger("zeus").addHandler(told)
    dist.init_process_group("gloo")
    options: dict[str, Any] = {}
    if case == "profiled":
        options["profile"] = ProfilerSettings(
            every=10,
            floor_mhz=900,
            precision=0.05,
            most_iterations=12,
            csv_path=folder / "measured.csv",
        )
    stage = Stage(folder, url, told, **options)
    with stage.optimizer:
        seen = {"profiled": profiled, "drifting": drifting}[case](stage)
    seen |= {
        "told": told.lines,
        "clocks": stage.clocks,
        "job_id": stage.optimizer.job_id,
        "torch": "torch" in sys.modules,
    }
    (folder / f"{case}-{stage.rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

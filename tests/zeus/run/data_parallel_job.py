"""One of two processes of a data parallel job on simulated GPUs: data_parallel_job.py FOLDER RANK

Writes what it saw to FOLDER/seen-RANK.json. Started by `test_dataloader`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from zeus.run import ZeusCostThresholdExceededError, ZeusDataLoader
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client

SAMPLES = TensorDataset(torch.rand(8 * 30, 8))
UNITS = 0.8
"""A step's work: some 80 ms at the highest limit, most of a step on a busy machine too."""


class Job:
    """A small model and this process's simulated GPU."""

    def __init__(self, rank: int) -> None:
        with Client() as client:
            node = client.node()
        assert node.simulated is not None
        gpu = node.gpus[rank].uuid
        self.work = SimulatedWork(node.simulated, [gpu], "model/compute")
        self.model = DistributedDataParallel(torch.nn.Linear(8, 1))

    def train(self, metric: float) -> list[int]:
        """Trains until the loader ends training. Returns the epochs."""
        train = ZeusDataLoader(
            SAMPLES,
            batch_size=4,
            max_epochs=9,
            distributed="dp",
            sampler=DistributedSampler(SAMPLES),
        )
        evaluate = ZeusDataLoader(
            SAMPLES, batch_size=40, distributed="dp", sampler=DistributedSampler(SAMPLES)
        )
        epochs = []
        for epoch in train.epochs():
            epochs.append(epoch)
            for (batch,) in train:
                self.model(batch).sum().backward()
                self.work.run(UNITS)
            for _ in evaluate:
                self.work.run(UNITS)
            train.report_metric(metric * epoch, higher_is_better=True)
        return epochs


def refusals() -> list[str]:
    """The errors for invalid arguments, up to the first comma."""
    said = []
    wrong = DistributedSampler(SAMPLES, num_replicas=8, rank=7)
    options: list[dict[str, Any]] = [{"distributed": "dp"}, {"distributed": "dp", "sampler": wrong}]
    for one in [*options, {}]:
        try:
            ZeusDataLoader(SAMPLES, batch_size=4, max_epochs=1, **one)
        except ValueError as error:
            words = f"{type(error).__name__}: {error}"
            said.append(words.partition(",")[0].partition("=D")[0].partition(";")[0])
    return said


def main() -> None:
    """Two jobs, one after the other."""
    folder, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    job = Job(rank)
    seen: dict[str, Any] = {"refused": refusals()}
    # The processes disagree on the metric; the first reaches the target in its third epoch.
    seen["epochs"] = job.train(0.25 if rank == 0 else 9.0)
    os.environ["ZEUS_COST_THRESH"], os.environ["ZEUS_JOB_ID"] = "1", "dear"
    try:
        job.train(0.0)
    except ZeusCostThresholdExceededError:
        seen["given_up"] = True
    Path(folder, f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

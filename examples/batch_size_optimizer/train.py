"""One run of a recurring job, with the batch size that is found across its runs.

    python train.py --store bso.db --job-id toy       # trials in a file of this machine
    python train.py --job-id toy                      # on the server at $ZEUS_SERVER_URL
    torchrun --nnodes 1 --nproc_per_node 2 train.py   # on two GPUs; the job is $ZEUS_JOB_ID

With --checkpoint, a stopped run resumes, if ZEUS_BSO_RUN_ID is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from simulated import GpuWork
from task import (
    TARGET_ACCURACY,
    TRAIN_SAMPLES,
    VAL_SAMPLES,
    accuracy,
    learning_rate,
    network,
    samples,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeus.exceptions import ZeusBaseError
from zeus.monitor import ZeusMonitor
from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
from zeus.utils.framework import all_reduce

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def main() -> None:
    options = parse()
    logging.basicConfig(format="%(message)s")
    try:
        # Rank 0 measures the GPUs of all.
        monitor = ZeusMonitor(gpu_indices=list(range(WORLD_SIZE)))
        optimizer = BatchSizeOptimizer(
            monitor,
            None if options.store else options.server_url,
            JobSpec(
                job_id=options.job_id,
                job_id_prefix=options.job_id,
                batch_sizes=[64, 128, 256, 512, 1024, 2048],
                default_batch_size=1024,
                target_metric=TARGET_ACCURACY,
                max_epochs=30,
                eta_knob=options.eta,
                mab_seed=options.seed,
            ),
            RANK,
            store=options.store,
        )
    except (ZeusBaseError, ImportError, ValueError) as error:
        fail(" ".join(str(error).split()))
    with processes():
        (chosen,) = all_reduce([optimizer.get_batch_size() if RANK == 0 else 0], "max")
        batch_size = int(chosen)
        train(optimizer, batch_size, options.checkpoint)
    if RANK == 0:
        reached = "reached" if optimizer.converged else "not reached"
        print(
            f"trial {optimizer.trial_number}: batch size {batch_size}, target {reached} in "
            f"{optimizer.cur_epoch} epochs",
            flush=True,
        )


def train(optimizer: BatchSizeOptimizer, batch_size: int, checkpoint: Path | None) -> None:
    """Trains until the optimizer ends training.

    Args:
        optimizer: Covers all processes; only rank 0 has one.
        batch_size: Of all processes together.
        checkpoint: Written after each epoch. If the file exists, training resumes from it.
    """
    torch.set_num_threads(1)
    features, classes = samples(TRAIN_SAMPLES, seed=1)
    validation = samples(VAL_SAMPLES, seed=2)
    torch.seed()  # each run has its own weights
    model = network()
    parameters = torch.optim.SGD(model.parameters(), learning_rate(batch_size), momentum=0.9)
    first = load(checkpoint, model, parameters)
    wrapped = DistributedDataParallel(model) if WORLD_SIZE > 1 else model
    gpu = GpuWork(optimizer.monitor.gpus[RANK], batch_size // WORLD_SIZE)
    with optimizer:
        for epoch in range(first, sys.maxsize):
            shuffled = torch.randperm(len(features), generator=torch.Generator().manual_seed(epoch))
            for batch in shuffled.split(batch_size):
                mine = batch[RANK::WORLD_SIZE]
                loss = nn.functional.cross_entropy(wrapped(features[mine]), classes[mine])
                parameters.zero_grad()
                loss.backward()
                parameters.step()
                gpu.step()
            found = accuracy(model, *validation)
            optimizer.on_evaluate(found)  # does nothing on the other ranks
            if RANK == 0:
                print(f"epoch {epoch + 1}: accuracy {found:.1%}", flush=True)
                save(checkpoint, epoch + 1, model, parameters)
            # All ranks must stop after the same epoch, or some wait for the others forever.
            (finished,) = all_reduce([optimizer.training_finished], "max")  # False on the others
            if finished:
                break


@contextlib.contextmanager
def processes() -> Iterator[None]:
    """Initializes torch.distributed, if there are several processes."""
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    yield
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def save(path: Path | None, epoch: int, model: nn.Module, parameters: torch.optim.SGD) -> None:
    """Writes a checkpoint atomically."""
    if path is not None:
        state = {"epoch": epoch, "model": model.state_dict(), "sgd": parameters.state_dict()}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def load(path: Path | None, model: nn.Module, parameters: torch.optim.SGD) -> int:
    """Continues from a checkpoint, if there is one. Returns the number of epochs trained so far."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    parameters.load_state_dict(state["sgd"])
    return int(state["epoch"])


def parse() -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    env = os.environ
    add("--job-id", default=env.get("ZEUS_JOB_ID"), help="what recurs ($ZEUS_JOB_ID)")
    add("--server-url", default=env.get("ZEUS_SERVER_URL"), help="($ZEUS_SERVER_URL)")
    add("--store", type=Path, help="file for the trials, instead of a server")
    add("--eta", type=float, default=0.5, help="1 counts only energy, 0 only time (0.5)")
    add("--seed", type=int, help="make the choice of batch sizes reproducible")
    add("--checkpoint", type=Path, help="checkpoint file, from which a stopped run resumes")
    options = parser.parse_args()
    if not options.job_id:
        fail("name the recurring job: --job-id, or ZEUS_JOB_ID")
    if not (options.store or options.server_url):
        fail("name the store of trials: --store bso.db, --server-url, or ZEUS_SERVER_URL")
    return options


def fail(sentence: str) -> NoReturn:
    """Exits with an error message."""
    print(f"train.py: {sentence}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()

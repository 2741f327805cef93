"""The six workloads and four GPUs whose measured traces are in this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from zeus.job import Job

GPUS = ("a40", "v100", "p100", "rtx6000")
"""GPUs that the workloads were measured on."""


@dataclass(frozen=True)
class Workload:
    """A workload that was trained many times, with many batch sizes.

    Attributes:
        dataset: Name of the data set; it identifies the workload.
        network: Name of the network.
        optimizer: Name of the optimizer.
        target_metric: The target of training.
        max_epochs: A run is stopped after this many epochs.
        default_bs: The usual batch size.
        usual_time: Time of a run with that, on a V100 at its highest power limit, s.
    """

    dataset: str
    network: str
    optimizer: str
    target_metric: float
    max_epochs: int
    default_bs: int
    usual_time: float

    def job(self, batch_sizes: Sequence[int]) -> Job:
        """Returns it as a recurring job.

        Args:
            batch_sizes: Those that fit into the GPU's memory; the default is chosen among them.
        """
        return Job(
            dataset=self.dataset,
            network=self.network,
            optimizer=self.optimizer,
            target_metric=self.target_metric,
            max_epochs=self.max_epochs,
            default_bs=min(self.default_bs, max(batch_sizes)),
        )


WORKLOADS: tuple[Workload, ...] = (
    Workload("movielens-1m", "ncf", "adam", 0.41, 100, 1024, 85.0),
    Workload("cifar100", "shufflenetv2", "adadelta", 0.60, 100, 1024, 599.0),
    Workload("squad", "bert_base_uncased", "adamw", 84.0, 6, 32, 7106.0),
    Workload("sentiment140", "bert_base_uncased", "adamw", 0.84, 10, 128, 12345.0),
    Workload("librispeech", "deepspeech2", "adamw", 40.0, 16, 256, 59344.0),
    Workload("imagenet", "resnet50", "adadelta", 0.65, 100, 256, 74518.0),
)
"""From the shortest to the longest."""


def workload(dataset: str) -> Workload:
    """Returns the workload with this data set.

    Raises:
        ValueError: There is none.
    """
    for one in WORKLOADS:
        if one.dataset == dataset:
            return one
    raise ValueError(
        f"there is no workload with the data set {dataset!r}; there are "
        f"{', '.join(one.dataset for one in WORKLOADS)}"
    )


def train_trace() -> Path:
    """File of measured training runs: epochs to targets, by batch size and run; xz, a column in
    each line."""
    return _data("summary_train")


def power_trace(gpu: str) -> Path:
    """File of measured epochs: time and average power, by batch size and power limit; xz, a column
    in each line.

    Raises:
        ValueError: There is no such file.
    """
    if gpu.lower() not in GPUS:
        raise ValueError(f"there are no traces of a {gpu}; there are {', '.join(GPUS)}")
    return _data(f"summary_power_{gpu.lower()}")


def _data(name: str) -> Path:
    return Path(str(files("zeusd"))) / "devices" / "simulated" / "data" / f"{name}.columns.csv.xz"

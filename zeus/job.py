"""A recurring job: its model, its target metric, and its command."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_BY_ROOT = ("adam", "adadelta", "adamw")
_LINEAR = ("sgd",)


@dataclass(frozen=True)
class Job:
    """A recurring job. Hashable; the command is not part of a job's identity.

    Attributes:
        dataset: Name of the data set.
        network: Name of the network.
        optimizer: Name of the optimizer; learning rates are scaled by it.
        target_metric: The target of training.
        max_epochs: A run is stopped after this many epochs.
        default_bs: Batch size of the first run.
        default_lr: Learning rate that belongs to `default_bs`.
        workdir: Folder in which the command is run.
        command: The command's words. The words `{bs}` or `{batch_size}`, `{lr}` or
            `{learning_rate}`, `{seed}`, `{epoch}` or `{epochs}` (`max_epochs`), `{slice_number}`
            (the recurrence, from 1) and `{target_metric}` are replaced by each run's values.
    """

    dataset: str
    network: str
    optimizer: str
    target_metric: float
    max_epochs: int
    default_bs: int | None = None
    default_lr: float | None = None
    workdir: str | None = None
    command: list[str] | None = field(default=None, hash=False, compare=False)

    def __str__(self) -> str:
        default = "" if self.default_bs is None else f",bs{self.default_bs}"
        return (
            f"Job({self.dataset},{self.network},{self.optimizer},{self.target_metric}{default}"
            f"~{self.max_epochs})"
        )

    def to_logdir(self) -> str:
        """The job as the name of a folder."""
        name = (
            f"{self.dataset}+{self.network}+bs{self.default_bs}+{self.optimizer}"
            f"+lr{self.default_lr}+tm{self.target_metric}+me{self.max_epochs}"
        )
        return name.replace("/", "-")

    def filter_df(self, df: Any) -> Any:
        """Selects this job's rows of a pandas.DataFrame of training runs."""
        return df.loc[
            (df.dataset == self.dataset)
            & (df.network == self.network)
            & (df.optimizer == self.optimizer)
            & (df.target_metric == self.target_metric)
        ]

    def gen_command(
        self, batch_size: int, learning_rate: float, seed: int, rec_i: int
    ) -> list[str]:
        """The command of one run.

        Raises:
            ValueError: The job has no command.
        """
        if self.command is None:
            raise ValueError(f"{self} has no command to run; give Job(command=[...])")
        values = {
            "{bs}": batch_size,
            "{batch_size}": batch_size,
            "{lr}": learning_rate,
            "{learning_rate}": learning_rate,
            "{seed}": seed,
            "{epoch}": self.max_epochs,
            "{epochs}": self.max_epochs,
            "{slice_number}": rec_i,
            "{target_metric}": self.target_metric,
        }
        return [str(values.get(word, word)) for word in self.command]

    def scale_lr(self, batch_size: int) -> float:
        """Scales the learning rate to another batch size: by the square root for Adam and the like,
        linearly for SGD.

        Raises:
            ValueError: `default_bs` or `default_lr` is not given.
            NotImplementedError: It is not known how this optimizer's learning rate scales.
        """
        if self.default_bs is None or self.default_lr is None:
            raise ValueError(f"to scale a learning rate, {self} needs default_bs and default_lr")
        name = self.optimizer.lower()
        if name in _BY_ROOT:
            return SquareRootScaler(self.default_bs, self.default_lr).compute_lr(batch_size)
        if name in _LINEAR:
            return LinearScaler(self.default_bs, self.default_lr).compute_lr(batch_size)
        raise NotImplementedError(
            f"how {self.optimizer}'s learning rate scales with the batch size is not known; known: "
            f"{', '.join((*_BY_ROOT, *_LINEAR))}"
        )


@dataclass(frozen=True)
class LinearScaler:
    """Learning rate in proportion to the batch size.

    Attributes:
        bs: A batch size.
        lr: Its learning rate.

    Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017.
    """

    bs: int
    lr: float

    def compute_lr(self, new_bs: int) -> float:
        """The learning rate of another batch size."""
        return self.lr * new_bs / self.bs


@dataclass(frozen=True)
class SquareRootScaler:
    """Learning rate in proportion to the batch size's root.

    Attributes:
        bs: A batch size.
        lr: Its learning rate.

    Source: Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    """

    bs: int
    lr: float

    def compute_lr(self, new_bs: int) -> float:
        """The learning rate of another batch size."""
        return self.lr * math.sqrt(new_bs / self.bs)

"""`ZeusDataLoader`: a PyTorch DataLoader that knows when training begins, pays off and ends."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator
from typing import Any, Literal

try:
    import torch
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler
except ModuleNotFoundError:
    raise ImportError(
        "ZeusDataLoader is a DataLoader of PyTorch's, which is not installed; "
        "pip install 'zeusd[torch]'"
    ) from None

from zeus.policy.recurrence import reaches
from zeus.run.exceptions import ZeusCostThresholdExceededError
from zeus.run.session import RunSession
from zeus.run.settings import Settings
from zeus.utils import framework

_train_loader: weakref.ref[ZeusDataLoader] | None = None
"""The one that trains in this process; evaluations belong to its epochs."""


class ZeusDataLoader(DataLoader[Any]):
    """A DataLoader that measures its job, finds the best power limit, and ends training.

    Training ends when the target is reached, after `max_epochs`, or before an epoch that would take
    the cost over its threshold. The result is written to a file. `ZeusMaster` reads that, and sets
    the environment variables (`ZEUS_TARGET_METRIC` and others, see `zeus.run.settings`) that this
    class reads when the train loader is made.

        train_loader = ZeusDataLoader(train_set, batch_size=128, max_epochs=100)
        eval_loader = ZeusDataLoader(eval_set, batch_size=128)
        for epoch in train_loader.epochs():
            for batch in train_loader:
                ...
            for batch in eval_loader:
                ...
            train_loader.report_metric(metric, higher_is_better=True)

    In the first run of a batch size each power limit is held for some iterations and measured. The
    limits are set under leases of the node's daemon, which restores them when training ends,
    however it ends. A failure to measure or to set limits causes a warning, and never ends the
    training.

    Args:
        args: As `torch.utils.data.DataLoader`'s.
        batch_size: Batch size of this process.
        max_epochs: Training ends after this many epochs. Only for the train loader; it marks a
            loader as one.
        distributed: `dp` where several processes of one node train together, data parallel; the
            first measures and limits the GPUs of all, which it must see as 0, 1, ... .
        kwargs: As `torch.utils.data.DataLoader`'s.

    Raises:
        ValueError: An argument or an environment variable makes no sense, there are two train
            loaders, or a sampler is missing or another process's.
        RuntimeError: `dp` without torch.distributed.init_process_group.
        ZeusGPUInitError: The GPUs cannot be reached.
    """

    def __init__(
        self,
        *args: Any,
        batch_size: int,
        max_epochs: int = -1,
        distributed: Literal["dp"] | None = None,
        **kwargs: Any,
    ) -> None:
        if distributed not in (None, "dp"):
            raise ValueError(f"distributed must be None or 'dp', not {distributed!r}")
        if max_epochs != -1 and max_epochs < 1:
            raise ValueError(f"max_epochs must be at least 1, not {max_epochs}")
        if distributed == "dp":
            _check_group(kwargs.get("sampler"))
        kwargs["batch_size"] = batch_size
        super().__init__(*args, **kwargs)
        self._trains = max_epochs != -1
        self._dp = distributed == "dp"
        self._session: RunSession | None = None
        self._begun = self._ended = False
        self._reached = False
        if self._trains:
            self._become_train_loader(batch_size, max_epochs)

    def _become_train_loader(self, batch_size: int, max_epochs: int) -> None:
        global _train_loader
        other = None if _train_loader is None else _train_loader()
        if other is not None and not other._ended:
            raise ValueError(
                "Specify max_epochs only to the train dataloader. There is one already whose "
                "training has not ended; delete it if it is of no use any more"
            )
        world = framework.world_size()
        if world > 1 and not self._dp:
            raise ValueError(
                f"{world} processes train together; pass distributed='dp' to ZeusDataLoader, so "
                "that one of them measures all"
            )
        self._settings = Settings.from_env(os.environ)
        if framework.rank() == 0:
            gpus = list(range(world)) if self._dp else [_own_gpu()]
            self._session = RunSession(self._settings, batch_size * world, max_epochs, gpus)
        _train_loader = weakref.ref(self)

    # ------------------------------------------------------------------------------------ training

    def epochs(self) -> Generator[int, None, None]:
        """Yields the epochs to train, from 0, until training should end.

        Raises:
            RuntimeError: This is not a train loader, or its epochs were trained already.
            ZeusCostThresholdExceededError: Another epoch would cost too much; in all processes. The
                result is written; the script only has to exit.
        """
        self._must_train("epochs")
        if self._begun:
            raise RuntimeError(
                "epochs() was used already; make another ZeusDataLoader to train again"
            )
        self._begun = True
        return self._epochs()

    def _epochs(self) -> Generator[int, None, None]:
        session = self._session
        number = 0
        try:
            self._reached = False  # a model that was evaluated before has trained nothing
            while True:
                if session is not None:
                    session.begin_epoch()
                yield number
                number += 1
                if self._end_epoch():
                    return
        finally:
            self._ended = True
            if session is not None:
                session.close()

    def _end_epoch(self) -> bool:
        """Whether training ends. The first process decides for all."""
        session = self._session
        sums = [0.0] * 5  # the sum over all processes is the first one's value
        if session is not None:
            verdict = session.end_epoch(self._reached)
            if verdict.stop:
                result = session.end(verdict)
                sums = [1.0, result.time, result.energy, result.cost, verdict.next_cost or 0.0]
        if self._dp:
            sums = framework.all_reduce(sums, "sum")
        stop, time_s, energy_j, cost_j, next_cost_j = sums
        if next_cost_j:
            raise ZeusCostThresholdExceededError(
                time_s, energy_j, cost_j, next_cost_j, self._settings.cost_thresh
            )
        return bool(stop)

    def report_metric(self, metric: float, higher_is_better: bool) -> None:
        """Reports the metric of this epoch's evaluation; the last report of an epoch applies. With
        `dp`, that of the first process applies, so reduce it over all processes before.

        Args:
            higher_is_better: Whether a larger one is better.

        Raises:
            RuntimeError: This is not a train loader.
        """
        self._must_train("report_metric")
        self._reached = reaches(float(metric), self._settings.target_metric, higher_is_better)

    def _must_train(self, method: str) -> None:
        if not self._trains:
            raise RuntimeError(
                f"{method}() is for the train loader: the ZeusDataLoader with max_epochs"
            )

    # ------------------------------------------------------------------------------------ batches

    def __iter__(self) -> Any:
        """The batches of an epoch, or of an evaluation."""
        loader = None if _train_loader is None else _train_loader()
        session = None if loader is None or loader._ended else loader._session
        batches: Any = super().__iter__()
        if loader is None or session is None or not loader._begun:
            return batches
        if self._trains and loader is not self:
            return batches
        if self._trains:
            return session.steps(batches, self._length())
        return session.evaluation(batches)

    def _length(self) -> int | None:
        try:
            return len(self)
        except TypeError:  # an iterable data set may not know
            return None


def _own_gpu() -> int:
    """The GPU that a process which trains alone uses, as its framework numbers it."""
    cuda: Any = torch.cuda
    return int(cuda.current_device()) if cuda.is_initialized() else 0


def _check_group(sampler: Any) -> None:
    """Checks that each process has its own share of the samples.

    Raises:
        RuntimeError: There is no process group.
        ValueError: The sampler does not divide them.
    """
    if not framework.initialized():
        raise RuntimeError(
            "distributed='dp' needs a process group; call torch.distributed.init_process_group "
            "before ZeusDataLoader is made"
        )
    world, rank = framework.world_size(), framework.rank()
    if not isinstance(sampler, DistributedSampler):
        raise ValueError(
            "distributed='dp' needs sampler=DistributedSampler(...), so that each process trains "
            "on its share of the samples"
        )
    if sampler.num_replicas != world or sampler.rank != rank:
        raise ValueError(
            f"the DistributedSampler is that of process {sampler.rank} of {sampler.num_replicas}, "
            f"and this is process {rank} of {world}"
        )

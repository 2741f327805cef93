"""What chooses batch sizes and power limits of recurring jobs, in every program that runs them.

The simulator, `ZeusMaster`, the batch size server and the optimizer inside a training process all
hold one of these. A policy has no I/O, no clock, and no randomness but its seed's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from zeus.job import Job
from zeus.policy.knowledge import Knowledge


@dataclass(frozen=True)
class Run:
    """A training run that has ended.

    Attributes:
        batch_size: Its batch size.
        cost: What it cost, J (`zeus.utils.metric.zeus_cost`).
        converged: Whether it reached the target.
        epochs: Epochs that it trained, where known.
        overhead: Of the cost what later runs of this size will not have, J: finding the power
            limit.
        cost_bound: Cost that it was not to exceed, J; None where there was none.
        stopped_by_cost: Whether it did not converge because it would have cost too much, and not
            because it had all its epochs.
        utilization: Mean power over the maximum power limits, 0 to 1, where known. A GPU that draws
            little is not kept busy: larger batches would make an epoch cheaper.
    """

    batch_size: int
    cost: float
    converged: bool
    epochs: int | None = None
    overhead: float = 0.0
    cost_bound: float | None = None
    stopped_by_cost: bool = False
    utilization: float | None = None


@dataclass(frozen=True)
class Estimate:
    """What a policy believes of a batch size.

    Attributes:
        batch_size: The batch size.
        mean: Expected cost of a run that reaches the target, J (for `gp` its median); None while
            nothing is known.
        low: Lower end of the 90 % interval of the expected cost, J; None while nothing is known.
        high: Its upper end, J.
        probability_best: Probability that no other size costs less.
        runs: Runs of this size that were observed.
        explored: Whether the policy may still choose it.
        reach: Probability that a run reaches the target; None where the policy has no opinion.
    """

    batch_size: int
    mean: float | None
    low: float | None
    high: float | None
    probability_best: float
    runs: int
    explored: bool = True
    reach: float | None = None


class BatchSizeOptimizer(ABC):
    """Chooses the batch size of each run of recurring jobs.

    This is all that a policy needs. The protocols below are abilities that only some policies
    have: `isinstance(policy, Transfers)` is true if a policy has the methods of that protocol.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The policy's name."""

    @abstractmethod
    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        """A new job.

        Args:
            job: The job; `job.default_bs` is where the search begins.
            batch_sizes: The sizes to choose among.

        Raises:
            ValueError: The default is not among them.
        """

    @abstractmethod
    def predict(self, job: Job) -> int:
        """The batch size for a run that begins now."""

    @abstractmethod
    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        """A run has ended.

        Args:
            cost: What it cost, J.
            converged: Whether it reached the target; None where the policy need not know.
        """


@runtime_checkable
class ObservesRuns(Protocol):
    """A policy that learns more of a run than its cost."""

    def observe_run(self, job: Job, run: Run) -> None:
        """A run has ended; called instead of `observe`."""


@runtime_checkable
class BoundsCosts(Protocol):
    """A policy with a rule of its own for giving up runs."""

    def cost_bound(self, job: Job, beta_knob: float, failures: int) -> float | None:
        """Cost at which the next run is to be given up, J; infinite for never.

        Args:
            beta_knob: So many times the lowest cost is too much.
            failures: Runs that have failed since the last that converged.

        Returns:
            None: `beta_knob` times the lowest cost at which the target was reached.
        """


@runtime_checkable
class Concurrent(Protocol):
    """A policy for jobs whose runs overlap, as those of a server."""

    def predict_beside(self, job: Job, in_flight: Sequence[int], seed: int | None = None) -> int:
        """The batch size for a run that begins while others of the job still train.

        Args:
            in_flight: Batch sizes of the runs that have not ended.
            seed: Of its draws; None: they continue those before.
        """


@runtime_checkable
class Transfers(Protocol):
    """A policy that uses what was learnt of a job on another GPU."""

    def knowledge(self, job: Job) -> Knowledge | None:
        """What was learnt of a job; None where that is nothing."""

    def transfer(self, job: Job, knowledge: Knowledge) -> None:
        """Uses what was learnt of a job elsewhere.

        Args:
            job: The job, which is registered and has had no run yet.
            knowledge: Of the same job; its sizes need not be the same.
        """


@runtime_checkable
class Excludes(Protocol):
    """A policy that can do without some sizes; for others a run of theirs missed the target."""

    def exclude(self, job: Job, batch_sizes: Sequence[int]) -> None:
        """Never chooses these sizes again: there is no memory for them."""


@runtime_checkable
class Explains(Protocol):
    """A policy with a model of the costs; else those of a size are the mean of its runs."""

    def best(self, job: Job) -> int | None:
        """The cheapest of the sizes that have reached the target; None where none has."""

    def estimates(self, job: Job) -> list[Estimate]:
        """What is believed of each batch size, in ascending order."""


class PowerLimitOptimizer(ABC):
    """Chooses the power limit for each batch size of recurring jobs."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The policy's name."""

    @abstractmethod
    def predict(self, job: Job, batch_size: int) -> int | None:
        """The power limit, W; None where it has to be profiled first."""

    @abstractmethod
    def observe(self, job: Job, batch_size: int, power_limit: int, cost: float) -> None:
        """A power limit was profiled.

        Args:
            batch_size: Batch size it was profiled with.
            power_limit: The limit, W.
            cost: Cost of an epoch with it, J.
        """

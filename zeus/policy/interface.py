"""What chooses batch sizes and power limits of recurring jobs, in every program that runs them.

The simulator, `ZeusMaster`, the batch size server and the optimizer inside a training process all
hold one of these. A policy has no I/O, no clock, and no randomness but its seed's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from zeus.job import Job
from zeus.policy.knowledge import Knowledge
from zeus.utils.metric import zeus_cost


@dataclass(frozen=True)
class LimitProfile:
    """What each power limit does to a batch size; which limits they are does not matter.

    Attributes:
        energy: Energy of the same work at each limit, J.
        time: Time of it, s.
        max_power: As in `zeus.utils.metric.zeus_cost`, W.
    """

    energy: tuple[float, ...]
    time: tuple[float, ...]
    max_power: float

    def change(self, eta_before: float, eta_after: float) -> tuple[float, float]:
        """Energy and time at the best limit under one eta, over those under another."""
        (energy, time), (more_energy, more_time) = self._at(eta_before), self._at(eta_after)
        return more_energy / energy, more_time / time

    def _at(self, eta_knob: float) -> tuple[float, float]:
        pairs = zip(self.energy, self.time, strict=True)
        return min(pairs, key=lambda one: zeus_cost(one[0], one[1], eta_knob, self.max_power))


ProfileOf = Callable[[int], LimitProfile | None]
"""What each power limit does to a batch size; None where that is not measured yet."""


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
        energy: Energy, J; None where only the cost is known.
        time: Time, s; the same.
        max_power: That of its cost, W; the same.
        eta_knob: That of its cost and of its power limit; the same.
    """

    batch_size: int
    cost: float
    converged: bool
    epochs: int | None = None
    overhead: float = 0.0
    cost_bound: float | None = None
    stopped_by_cost: bool = False
    utilization: float | None = None
    energy: float | None = None
    time: float | None = None
    max_power: float | None = None
    eta_knob: float | None = None

    def under(self, eta_knob: float, profile: LimitProfile | None = None) -> Run:
        """As it would have been with another eta; itself where only its cost is known.

        Its bound and its overhead are so many epochs as before.

        Args:
            eta_knob: 1 counts energy only, 0 time only.
            profile: Of its batch size: the run has the limit that is best under this eta. None: it
                keeps its own.
        """
        energy, time, max_power, before = self.energy, self.time, self.max_power, self.eta_knob
        if energy is None or time is None or max_power is None or before is None or not self.cost:
            return self
        if profile is not None:
            more_energy, more_time = profile.change(before, eta_knob)
            energy, time = energy * more_energy, time * more_time
        cost = zeus_cost(energy, time, eta_knob, max_power)
        ratio = cost / self.cost
        return replace(
            self,
            cost=cost,
            overhead=self.overhead * ratio,
            cost_bound=None if self.cost_bound is None else self.cost_bound * ratio,
            energy=energy,
            time=time,
            eta_knob=eta_knob,
        )


@dataclass(frozen=True)
class Forecast:
    """What a policy expects of a run that begins now, with a batch size and a power limit.

    Attributes:
        energy: Expected energy of a run that reaches the target, J (its median).
        log_time: Expected logarithm of its time, s.
        log_most_time: Expected logarithm of the time that all epochs take, s; infinite where that
            is not known.
        max_power: As in `zeus.utils.metric.zeus_cost`, W.
        reach: Probability that a run reaches the target at all; 1 while no run of the job missed.
    """

    batch_size: int
    eta_knob: float
    energy: float
    log_time: float
    log_time_sd: float
    log_most_time: float
    max_power: float
    reach: float
    proven: bool

    @property
    def cost(self) -> float:
        """Expected cost of a run, J."""
        return zeus_cost(self.energy, math.exp(self.log_time), self.eta_knob, self.max_power)

    def done_within(self, seconds: float) -> float:
        """Probability that one run reaches the target within a time, s."""
        if seconds <= 0:
            return 0.0
        latest = min(math.log(seconds), self.log_most_time)
        off = (latest - self.log_time) / self.log_time_sd
        return self.reach * 0.5 * math.erfc(-off / math.sqrt(2))

    def time_of(self, probability: float) -> float:
        """Within which time one run reaches the target so probably, s; infinite for never."""
        if probability >= self.reach:
            return math.inf
        off = NormalDist().inv_cdf(probability / self.reach)
        latest = self.log_time + off * self.log_time_sd
        return math.inf if latest > self.log_most_time else math.exp(latest)


@dataclass(frozen=True)
class Estimate:
    """What a policy believes of a batch size.

    Attributes:
        batch_size: The batch size.
        mean: Expected cost of a run that reaches the target, J (its median, where costs are taken
            to be lognormal); None while nothing is known.
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

    Subclasses must have the first four; the others have defaults that suit a policy that knows
    only these.

    Attributes:
        stops_by_curve: Whether runs are given up by their learning curve, unless a user says
            otherwise.
    """

    stops_by_curve = False

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

    def observe_run(self, job: Job, run: Run) -> None:
        """A run has ended, with all that is known of it."""
        self.observe(job, run.batch_size, run.cost, run.converged)

    def predict_beside(self, job: Job, in_flight: Sequence[int]) -> int:
        """The batch size for a run that begins while others of the job still train.

        Args:
            in_flight: Batch sizes of the runs that have not ended.
        """
        return self.predict(job)

    def cost_bound(self, job: Job, beta_knob: float, failures: int) -> float | None:
        """Cost at which the next run is to be given up, J; infinite for never.

        Args:
            beta_knob: So many times the lowest cost is too much.
            failures: Runs that have failed since the last that converged.

        Returns:
            None where the policy has no rule of its own: `beta_knob` times the lowest cost at
            which a recurrence has reached the target.
        """
        return None

    def price(self, job: Job, eta_knob: float, profile_of: ProfileOf) -> bool:
        """Counts all runs, before and after, with another eta.

        Args:
            eta_knob: 1 counts energy only, 0 time only.
            profile_of: What each power limit does to a batch size; None where that is not known.

        Returns:
            False: the policy cannot.
        """
        return False

    def forecasts(self, job: Job) -> list[Forecast]:
        """Energy and time that are expected of each batch size, in ascending order; empty where
        nothing can be said."""
        return []

    def knowledge(self, job: Job) -> Knowledge | None:
        """What was learnt of a job, for the same job on another GPU; None where that is nothing."""
        return None

    def transfer(self, job: Job, knowledge: Knowledge) -> None:  # noqa: B027 - may be ignored
        """Uses what was learnt of a job on another GPU.

        Args:
            job: The job, which is registered and has had no run yet.
            knowledge: Of the same job; its sizes need not be the same.
        """

    def exclude(self, job: Job, batch_sizes: Sequence[int]) -> bool:
        """Never chooses these sizes again: there is no memory for them.

        Returns:
            False: the policy cannot; a run of theirs that missed the target is to be observed
            instead.
        """
        return False

    def reseed(self, seed: int) -> bool:
        """Begins further draws with another seed, as if the policy had been made with it.

        Returns:
            False: the policy cannot; it has to be made again.
        """
        return False

    def best(self, job: Job) -> int | None:
        """The cheapest of the sizes that have reached the target; None: `estimates` say."""
        return None

    def estimates(self, job: Job) -> list[Estimate]:
        """What is believed of each batch size, in ascending order; empty where nothing can be
        said."""
        return []


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

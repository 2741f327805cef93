"""What the runs of a job begin with, when they end, and what the policy is told then. Pure.

`Runs` is one rule for all who train. `Recurrences` is it where one run follows the other, as in
`ZeusMaster` and the simulator: a recurrence is one time that the job has to be done, and is tried
until a run reaches the target.

A run ends (`judge`) when the target is reached; else when the epochs are used up; else when another
epoch would take it to its bound. One that has reached its target is a success whatever it cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeus.job import Job
from zeus.policy.interface import (
    BatchSizeOptimizer,
    BoundsCosts,
    Concurrent,
    ObservesRuns,
    Run,
    Transfers,
)
from zeus.policy.knowledge import Knowledge
from zeus_ipc.overriding import override

MOST_TRIES = 20
"""A target that so many runs in a row did not reach is out of reach."""


class UnreachableTargetError(RuntimeError):
    """A job's target is out of reach: to begin it again comes to the same."""


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    Attributes:
        cost_bound: Cost at which it is to be given up, J; infinite for never.
        recurrence: Its recurrence, from 1, if one run follows the other.
        number: Which try of the recurrence, from 1.
    """

    batch_size: int
    cost_bound: float
    recurrence: int = 1
    number: int = 1


class Runs:
    """Asks the policy what to run next, and tells it what came of it.

    A policy may have a rule of its own for the cost at which a run is given up
    (`BoundsCosts`). Else it is `beta_knob` times the lowest cost at which the
    target was reached: by a single run here, by a recurrence with all its tries in `Recurrences`.

    Args:
        policy: Chooses batch sizes; the job must be registered with it.
        beta_knob: So many times the lowest cost is too much; infinite or None for never.

    Raises:
        ValueError: `beta_knob` is not positive.
    """

    def __init__(self, policy: BatchSizeOptimizer, job: Job, beta_knob: float | None) -> None:
        if beta_knob is not None and not beta_knob > 0:
            raise ValueError(f"beta_knob must be positive, not {beta_knob:g}")
        self._policy = policy
        self._job = job
        self._beta = math.inf if beta_knob is None else beta_knob
        self._failures = 0
        self._spent = 0.0
        self.min_cost = math.inf
        """The lowest cost at which the target was reached, J."""

    def next(self, in_flight: Sequence[int] = (), seed: int | None = None) -> Start:
        """The next run.

        Args:
            in_flight: Batch sizes of the runs that have not ended.
            seed: Of the policy's draws; None: they continue those before.
        """
        policy, job, bound = self._policy, self._job, None
        if isinstance(policy, Concurrent) and (in_flight or seed is not None):
            size = policy.predict_beside(job, in_flight, seed)
        else:
            size = policy.predict(job)
        if isinstance(policy, BoundsCosts):
            bound = policy.cost_bound(job, self._beta, self._failures)
        if bound is None:
            bound = self._beta * self.min_cost  # infinite while nothing has converged
        return Start(size, bound)

    def observe(self, run: Run) -> None:
        """A run has ended."""
        self._tell(run)
        self.count(run)

    def count(self, run: Run) -> None:
        """A run has ended that the policy is not told of."""
        if not run.converged:
            self._failures += 1
            return
        self.min_cost = min(self.min_cost, self._spent + run.cost)
        self._failures = 0

    def _tell(self, run: Run) -> None:
        if isinstance(self._policy, ObservesRuns):
            self._policy.observe_run(self._job, run)
        else:
            self._policy.observe(self._job, run.batch_size, run.cost, run.converged)


class Recurrences(Runs):
    """The recurrences of a job, and the tries of each."""

    _try = 1
    recurrence = 1
    """The recurrence that is to be done, or being done; from 1."""

    def begin(self) -> Start:
        """The next run.

        Raises:
            UnreachableTargetError: The target was not reached in `MOST_TRIES` tries.
        """
        if self._try > MOST_TRIES:
            raise UnreachableTargetError(
                f"Unreachable target metric. {MOST_TRIES} runs of {self._job} in a row did not "
                "reach it within their cost and epochs; check the target and max_epochs, or take "
                "a larger beta_knob"
            )
        return replace(self.next(), recurrence=self.recurrence, number=self._try)

    def skip(self, now: Start) -> None:
        """Not even the first epoch was within the run's bound, which was found out without a cost:
        the policy takes the batch size for a bad one.

        Raises:
            UnreachableTargetError: As `count`.
        """
        bad = Run(now.batch_size, 100 * now.cost_bound, converged=False, epochs=0)
        self._tell(replace(bad, cost_bound=now.cost_bound, stopped_by_cost=True))
        self.count(Run(now.batch_size, 0.0, converged=False))

    @override
    def count(self, run: Run) -> None:
        """Raises:
        UnreachableTargetError: The default batch size missed the target before any run
            reached it.
        """
        super().count(run)
        if run.converged:
            self.recurrence += 1
            self._try, self._spent = 1, 0.0
            return
        self._spent += run.cost
        if self.recurrence == 1 and run.batch_size == self._job.default_bs:
            raise UnreachableTargetError(
                f"The default batch size {run.batch_size} did not converge. The first run of a "
                f"recurring job must reach its target; check it with {self._job}"
            )
        self._try += 1


def give(policy: BatchSizeOptimizer, job: Job, knowledge: Knowledge) -> None:
    """Gives a policy what was learnt of a job elsewhere, if it can use that."""
    if isinstance(policy, Transfers):
        policy.transfer(job, knowledge)


def learned(policy: BatchSizeOptimizer, job: Job) -> Knowledge | None:
    """What a policy has learned of a job, to be given elsewhere; None where that is nothing."""
    return policy.knowledge(job) if isinstance(policy, Transfers) else None


# -------------------------------------------------------------------------------- ends of runs


@dataclass(frozen=True)
class Used:
    """What a run has used since it began, in all processes that it had.

    Attributes:
        time: Time, s.
        energy: Energy, J.
        overhead_time: Of the time what was spent on finding the power limit, s.
        overhead_energy: Of the energy the same, J.
    """

    time: float = 0.0
    energy: float = 0.0
    overhead_time: float = 0.0
    overhead_energy: float = 0.0


def after_another_epoch(used: Used, epochs: int) -> tuple[float, float]:
    """Energy, J, and time, s, after another epoch like those before, without what finding a power
    limit took.
    """
    epochs = max(1, epochs)
    return (
        used.energy + (used.energy - used.overhead_energy) / epochs,
        used.time + (used.time - used.overhead_time) / epochs,
    )


@dataclass(frozen=True)
class Verdict:
    """Whether to go on.

    Attributes:
        next_cost: Where the run is given up for its cost: what another epoch would take it to, J.
    """

    stop: bool
    reached: bool = False
    next_cost: float | None = None

    @property
    def by_cost(self) -> bool:
        """Whether the run is given up for its cost."""
        return self.next_cost is not None


def reaches(metric: float | None, target: float, higher_is_better: bool) -> bool:
    """Whether a metric reaches its target; one that is not known does not."""
    if metric is None:
        return False
    return metric >= target if higher_is_better else metric <= target


def judge(
    *,
    reached: bool,
    epochs: int,
    max_epochs: int,
    next_cost: float | None,
    cost_bound: float | None,
) -> Verdict:
    """The verdict after an epoch.

    Args:
        reached: Whether the target is reached.
        epochs: Epochs that were trained.
        max_epochs: The run is given up after so many.
        next_cost: What another epoch would take the run's cost to, J; None: that is not known, or
            no cost interrupts the run now.
        cost_bound: Cost at which the run is given up, J; None or infinite for never.
    """
    if reached:
        return Verdict(stop=True, reached=True)
    if epochs >= max_epochs:
        return Verdict(stop=True)
    if next_cost is not None and cost_bound is not None and next_cost >= cost_bound:
        return Verdict(stop=True, next_cost=next_cost)
    return Verdict(stop=False)

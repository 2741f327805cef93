"""One run after the other: the recurrences of a job, and the tries of each.

A recurrence is one time that the job has to be done: it is tried until a run reaches the target.
The simulator and `ZeusMaster` differ only in what happens between `begin` and `end`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Run

MOST_TRIES = 20
"""A target that so many runs in a row did not reach is out of reach."""


@dataclass(frozen=True)
class Try:
    """A run that is to begin.

    Attributes:
        recurrence: From 1.
        number: Which try of the recurrence, from 1.
        batch_size: Its batch size.
        cost_bound: Cost at which it is to be given up, J; infinite for never.
    """

    recurrence: int
    number: int
    batch_size: int
    cost_bound: float


class Recurrences:
    """Asks the policy what to run next, and tells it what came of it.

    Args:
        policy: Chooses batch sizes; the job must be registered with it.
        job: The job.
        beta_knob: So many times the lowest cost of a recurrence a run may cost.
    """

    def __init__(self, policy: BatchSizeOptimizer, job: Job, beta_knob: float) -> None:
        self._policy = policy
        self._job = job
        self._beta = beta_knob
        self.recurrence = 1
        """The recurrence that is to be done, or being done; from 1."""
        self._try = 1
        self._cost_of_recurrence = 0.0
        self.min_cost = math.inf
        """Lowest cost of a recurrence that has ended, all its tries together, J."""

    def begin(self) -> Try:
        """The next run.

        Raises:
            RuntimeError: The target was not reached in `MOST_TRIES` tries.
        """
        if self._try > MOST_TRIES:
            raise RuntimeError(
                f"Unreachable target metric. {MOST_TRIES} runs of {self._job} in a row did not "
                "reach it within their cost and epochs; check the target and max_epochs, or take "
                "a larger beta_knob"
            )
        batch_size = self._policy.predict(self._job)
        bound = self._policy.cost_bound(self._job, self._beta, self._try - 1)
        if bound is None:
            # While nothing has converged, no cost is too much (and 0 times infinity is no number).
            bound = math.inf if math.isinf(self.min_cost) else self._beta * self.min_cost
        return Try(self.recurrence, self._try, batch_size, bound)

    def end(self, run: Run, *, observed: Run | None = None) -> None:
        """The run has ended.

        Args:
            run: As it counts.
            observed: As the policy is told of it, where that differs.

        Raises:
            RuntimeError: The job's first run, of the default batch size, did not converge.
        """
        self._policy.observe_run(self._job, observed or run)
        self._cost_of_recurrence += run.cost
        if run.converged:
            self.min_cost = min(self.min_cost, self._cost_of_recurrence)
            self.recurrence += 1
            self._try = 1
            self._cost_of_recurrence = 0.0
            return
        if self.recurrence == 1:
            raise RuntimeError(
                f"The default batch size {run.batch_size} did not converge. The first run of a "
                f"recurring job must reach its target; check it with {self._job}"
            )
        self._try += 1

"""One run after the other: the recurrences of a job, and the tries of each.

A recurrence is one time that the job has to be done: it is tried until a run reaches the target.
The simulator and `ZeusMaster` differ only in what happens between `begin` and `end`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Run
from zeus.policy.trade_off import Chosen, ProfileOf, TradeOff, Trader

MOST_TRIES = 20
"""A target that so many runs in a row did not reach is out of reach."""


class UnreachableTargetError(RuntimeError):
    """A job's target is out of reach: to begin it again comes to the same."""


@dataclass(frozen=True)
class Try:
    """A run that is to begin.

    Attributes:
        recurrence: From 1.
        number: Which try of the recurrence, from 1.
        batch_size: Its batch size.
        cost_bound: Cost at which it is to be given up, J; infinite for never.
        rerun_cost: What a run of the best batch size is expected to cost, J. None where no learning
            curve is to end the run: nothing has reached the target yet, or its batch size has,
            which says more than the shape of a curve.
        eta_knob: The eta of its cost; None: the job's.
    """

    recurrence: int
    number: int
    batch_size: int
    cost_bound: float
    rerun_cost: float | None = None
    eta_knob: float | None = None


class Bounds:
    """At which cost the runs of a job are given up: one rule for all who train.

    A policy may have a rule of its own (`BatchSizeOptimizer.cost_bound`). Else the bound is
    `beta_knob` times the lowest cost at which the target was reached: by a recurrence with all its
    tries where one run follows the other, by a single run where runs overlap.

    Args:
        policy: Chooses batch sizes; the job must be registered with it.
        job: The job.
        beta_knob: So many times the lowest cost is too much; infinite or None for never.
        overlapping: Whether runs overlap.
    """

    def __init__(
        self,
        policy: BatchSizeOptimizer,
        job: Job,
        beta_knob: float | None,
        *,
        overlapping: bool = False,
    ) -> None:
        self._policy = policy
        self._job = job
        self._beta = math.inf if beta_knob is None else beta_knob
        self._overlapping = overlapping
        self._failures = 0
        self._spent = 0.0
        self.min_cost = math.inf
        """The lowest cost at which the target was reached, J."""

    def observe(self, cost: float, converged: bool) -> None:
        """A run has ended; the policy must be told, too.

        Args:
            cost: Its cost, J.
            converged: Whether it reached the target.
        """
        self._spent = cost if self._overlapping else self._spent + cost
        if not converged:
            self._failures += 1
            return
        self.min_cost = min(self.min_cost, self._spent)
        self._failures, self._spent = 0, 0.0

    def next(self) -> float:
        """Of the next run, J; infinite for never."""
        bound = self._policy.cost_bound(self._job, self._beta, self._failures)
        if bound is not None:
            return bound
        # While nothing has converged, no cost is too much (and 0 times infinity is no number).
        return math.inf if math.isinf(self.min_cost) else self._beta * self.min_cost

    def rerun(self) -> float:
        """What a run of the best batch size is expected to cost, J; infinite while nothing has
        reached the target.
        """
        best = self._policy.cost_bound(self._job, 1.0, 0)
        return self.min_cost if best is None else best


class Recurrences:
    """Asks the policy what to run next, and tells it what came of it.

    Args:
        policy: Chooses batch sizes; the job must be registered with it.
        job: The job.
        beta_knob: So many times the lowest cost of a recurrence a run may cost.
        trade_off: What decides which eta each run has; None: one for all.
        profile_of: With `trade_off`: what each power limit does to a batch size.

    Raises:
        ValueError: The policy cannot follow `trade_off`.
    """

    def __init__(
        self,
        policy: BatchSizeOptimizer,
        job: Job,
        beta_knob: float,
        trade_off: TradeOff | None = None,
        profile_of: ProfileOf = lambda batch_size: None,
    ) -> None:
        self._trader = None
        if trade_off is not None:
            self._trader = Trader(policy, job, trade_off, profile_of)
        self._began_s = 0.0
        self._beta = beta_knob
        self._policy = policy
        self._job = job
        self._bounds = Bounds(policy, job, beta_knob)
        self.recurrence = 1
        """The recurrence that is to be done, or being done; from 1."""
        self._try = 1
        self._proven: set[int] = set()

    @property
    def min_cost(self) -> float:
        """Lowest cost of a recurrence that has ended, all its tries together, J."""
        return self._bounds.min_cost

    def begin(self, now_s: float = 0.0, chosen: tuple[int, float] | None = None) -> Try:
        """The next run.

        Args:
            now_s: The time, s since 1970; only a trade-off has a use for it.
            chosen: Batch size and eta of a run that has begun before, which is gone on with.

        Raises:
            UnreachableTargetError: The target was not reached in `MOST_TRIES` tries.
        """
        if self._try > MOST_TRIES:
            raise UnreachableTargetError(
                f"Unreachable target metric. {MOST_TRIES} runs of {self._job} in a row did not "
                "reach it within their cost and epochs; check the target and max_epochs, or take "
                "a larger beta_knob"
            )
        what = self._choose(now_s, chosen)
        batch_size, eta = what.batch_size, None if self._trader is None else what.eta_knob
        bound = self._bounds.next()
        if what.expected_cost is not None:
            bound = max(bound, self._beta * what.expected_cost)
        bound = min(bound, what.most_cost)
        rerun = None
        if self._proven and batch_size not in self._proven:
            rerun = self._bounds.rerun()
        return Try(self.recurrence, self._try, batch_size, bound, rerun, eta)

    def _choose(self, now_s: float, chosen: tuple[int, float] | None) -> Chosen:
        if self._trader is None:
            return Chosen(self._policy.predict(self._job), math.nan)
        if self._try == 1:
            self._began_s = now_s
        if chosen is None:
            return self._trader.begin(now_s, self._began_s)
        self._trader.price(chosen[1])
        self._policy.predict(self._job)  # its draws are to be the same
        return Chosen(*chosen)

    def price(self, eta_knob: float) -> None:
        """With a trade-off, the policy counts with this eta until the next run begins."""
        if self._trader is not None:
            self._trader.price(eta_knob)

    def end(self, run: Run, *, observed: Run | None = None) -> None:
        """The run has ended.

        Args:
            run: As it counts.
            observed: As the policy is told of it, where that differs.

        Raises:
            UnreachableTargetError: The default batch size missed the target before any run
                reached it.
        """
        self._policy.observe_run(self._job, observed or run)
        self._bounds.observe(run.cost, run.converged)
        if run.converged:
            self._proven.add(run.batch_size)
            if self._trader is not None:
                self._trader.observe(run.time)
            self.recurrence += 1
            self._try = 1
            return
        if self.recurrence == 1 and run.batch_size == self._job.default_bs:
            raise UnreachableTargetError(
                f"The default batch size {run.batch_size} did not converge. The first run of a "
                f"recurring job must reach its target; check it with {self._job}"
            )
        self._try += 1

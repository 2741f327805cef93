"""What the runs of a job begin with, and what the policy is told when they end.

`Runs` is one rule for all who train. `Recurrences` is it where one run follows the other, as in
`ZeusMaster` and the simulator: a recurrence is one time that the job has to be done, and is tried
until a run reaches the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, ProfileOf, Run
from zeus.policy.trade_off import RunTerms, TradeOff, Trader, asked

MOST_TRIES = 20
"""A target that so many runs in a row did not reach is out of reach."""


class UnreachableTargetError(RuntimeError):
    """A job's target is out of reach: to begin it again comes to the same."""


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    Attributes:
        batch_size: Its batch size.
        cost_bound: Cost at which it is to be given up, J; infinite for never.
        rerun_cost: What a run of the best batch size is expected to cost, J. None where no learning
            curve is to end the run: nothing has reached the target yet, or its batch size has,
            which says more than the shape of a curve.
        eta_knob: The eta of its cost; None: the job's.
    """

    batch_size: int
    cost_bound: float
    rerun_cost: float | None = None
    eta_knob: float | None = None


@dataclass(frozen=True)
class Attempt(Start):
    """A run of a recurrence.

    Attributes:
        recurrence: From 1.
        number: Which try of the recurrence, from 1.
    """

    recurrence: int = 1
    number: int = 1


class Runs:
    """Asks the policy what to run next, and tells it what came of it.

    A policy may have a rule of its own for the cost at which a run is given up
    (`BatchSizeOptimizer.cost_bound`). Else it is `beta_knob` times the lowest cost at which the
    target was reached: by a recurrence with all its tries where one run follows the other, by a
    single run where runs overlap.

    Args:
        policy: Chooses batch sizes; the job must be registered with it.
        job: The job.
        beta_knob: So many times the lowest cost is too much; infinite or None for never.
        trade_off: What decides which eta each run has; None: one for all.
        profile_of: With `trade_off`: what each power limit does to a batch size.
        overlapping: Whether runs overlap.

    Raises:
        ValueError: The policy cannot follow `trade_off`, or `beta_knob` is not positive.
    """

    def __init__(
        self,
        policy: BatchSizeOptimizer,
        job: Job,
        beta_knob: float | None,
        trade_off: TradeOff | None = None,
        profile_of: ProfileOf = lambda batch_size: None,
        *,
        overlapping: bool = False,
    ) -> None:
        if beta_knob is not None and not beta_knob > 0:
            raise ValueError(f"beta_knob must be positive, not {beta_knob:g}")
        self._policy = policy
        self._job = job
        self._beta = math.inf if beta_knob is None else beta_knob
        self._overlapping = overlapping
        self._trader = None
        if trade_off is not None:
            self._trader = Trader(policy, job, trade_off, profile_of)
        self._failures = 0
        self._spent = 0.0
        self._proven: set[int] = set()
        self.min_cost = math.inf
        """The lowest cost at which the target was reached, J."""

    def next(
        self,
        now_s: float = 0.0,
        began_s: float | None = None,
        *,
        in_flight: Sequence[int] = (),
        chosen: tuple[int, float] | None = None,
    ) -> Start:
        """The next run.

        Args:
            now_s: The time, s since 1970; only a trade-off has a use for it.
            began_s: When its recurrence began, likewise; None: now.
            in_flight: Batch sizes of the runs that have not ended.
            chosen: Batch size and eta of a run that has begun before, which is gone on with.
        """
        what = self._choose(now_s, now_s if began_s is None else began_s, in_flight, chosen)
        size = what.batch_size
        bound = self._policy.cost_bound(self._job, self._beta, self._failures)
        if bound is None:
            bound = self._beta * self.min_cost  # infinite while nothing has converged
        if what.expected_cost is not None:
            bound = max(bound, self._beta * what.expected_cost)
        rerun = None
        if self._proven and size not in self._proven:
            rerun = self._policy.cost_bound(self._job, 1.0, 0)
            rerun = self.min_cost if rerun is None else rerun
        eta = None if self._trader is None else what.eta_knob
        return Start(size, min(bound, what.most_cost), rerun, eta)

    def _choose(
        self,
        now_s: float,
        began_s: float,
        in_flight: Sequence[int],
        chosen: tuple[int, float] | None,
    ) -> RunTerms:
        if self._trader is not None and chosen is None:
            return self._trader.begin(now_s, began_s, in_flight)
        if self._trader is None or chosen is None:
            return RunTerms(asked(self._policy, self._job, in_flight), math.nan)
        self._trader.price(chosen[1])
        self._policy.predict(self._job)  # its draws are to be the same
        return RunTerms(*chosen)

    def price(self, eta_knob: float) -> None:
        """With a trade-off, the policy counts with this eta until the next run begins."""
        if self._trader is not None:
            self._trader.price(eta_knob)

    def observe(self, run: Run) -> None:
        """A run has ended."""
        self._policy.observe_run(self._job, run)
        self.count(run)

    def count(self, run: Run) -> None:
        """A run has ended that the policy is not told of."""
        self._spent = run.cost if self._overlapping else self._spent + run.cost
        if not run.converged:
            self._failures += 1
            return
        self.min_cost = min(self.min_cost, self._spent)
        self._failures, self._spent = 0, 0.0
        self._proven.add(run.batch_size)
        if self._trader is not None:
            self._trader.observe(run.time)


class Recurrences(Runs):
    """The recurrences of a job, and the tries of each."""

    _began_s = 0.0
    _try = 1
    recurrence = 1
    """The recurrence that is to be done, or being done; from 1."""

    def begin(self, now_s: float = 0.0, chosen: tuple[int, float] | None = None) -> Attempt:
        """The next run; the arguments are those of `next`.

        Raises:
            UnreachableTargetError: The target was not reached in `MOST_TRIES` tries.
        """
        if self._try > MOST_TRIES:
            raise UnreachableTargetError(
                f"Unreachable target metric. {MOST_TRIES} runs of {self._job} in a row did not "
                "reach it within their cost and epochs; check the target and max_epochs, or take "
                "a larger beta_knob"
            )
        if self._try == 1:
            self._began_s = now_s
        start = self.next(now_s, self._began_s, chosen=chosen)
        return Attempt(**asdict(start), recurrence=self.recurrence, number=self._try)

    def skip(self, now: Attempt) -> None:
        """Not even the first epoch was within the run's bound, which was found out without a cost:
        the policy takes the batch size for a bad one.

        Raises:
            UnreachableTargetError: As `end`.
        """
        bad = Run(now.batch_size, 100 * now.cost_bound, converged=False, epochs=0)
        bad = replace(bad, cost_bound=now.cost_bound, stopped_by_cost=True)
        self._policy.observe_run(self._job, bad)
        self._count(Run(now.batch_size, 0.0, converged=False))

    def end(self, run: Run) -> None:
        """The run has ended.

        Raises:
            UnreachableTargetError: The default batch size missed the target before any run
                reached it.
        """
        self._policy.observe_run(self._job, run)
        self._count(run)

    def _count(self, run: Run) -> None:
        self.count(run)
        if run.converged:
            self.recurrence += 1
            self._try = 1
            return
        if self.recurrence == 1 and run.batch_size == self._job.default_bs:
            raise UnreachableTargetError(
                f"The default batch size {run.batch_size} did not converge. The first run of a "
                f"recurring job must reach its target; check it with {self._job}"
            )
        self._try += 1

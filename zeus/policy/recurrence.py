"""What the runs of a job begin with, and what the policy is told when they end. Pure.

`Runs` is one rule for all who train. `Recurrences` is it where one run follows the other, as in
`ZeusMaster` and the simulator: a recurrence is one time that the job has to be done, and is tried
until a run reaches the target.

Where `eta_knob` follows a signal or a deadline (`zeus.policy.trade_off`), eta and batch size are
fixed when a run begins: its bound, and what a rerun costs, are compared with costs under the same
eta, and each power limit that is tried is judged with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Forecast, ProfileOf, Run
from zeus.policy.signal import eta_of
from zeus.policy.trade_off import TradeOff, fastest, least_energy, next_deadline, options
from zeus.utils.warn import warn

MOST_TRIES = 20
"""A target that so many runs in a row did not reach is out of reach."""

_ENOUGH = 1.2
"""A trial that may take so many times its expected time is worth it."""


class UnreachableTargetError(RuntimeError):
    """A job's target is out of reach: to begin it again comes to the same."""


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    Attributes:
        cost_bound: Cost at which it is to be given up, J; infinite for never.
        rerun_cost: What a run of the best batch size is expected to cost, J. None where no learning
            curve is to end the run: nothing has reached the target yet, or its batch size has,
            which says more than the shape of a curve.
        eta_knob: The eta of its cost; None: the job's.
        best: The size with the lowest estimated cost, where that was asked for; None while no run
            has converged.
    """

    batch_size: int
    cost_bound: float
    rerun_cost: float | None = None
    eta_knob: float | None = None
    recurrence: int = 1
    number: int = 1
    best: int | None = None


class Runs:
    """Asks the policy what to run next, and tells it what came of it.

    A policy may have a rule of its own for the cost at which a run is given up
    (`BatchSizeOptimizer.cost_bound`). Else it is `beta_knob` times the lowest cost at which the
    target was reached: by a single run here, by a recurrence with all its tries in `Recurrences`.

    Raises:
        ValueError: The policy stores costs only, which mean nothing under another eta, and there is
            a `trade_off`; or `beta_knob` is not positive.
    """

    def __init__(
        self,
        policy: BatchSizeOptimizer,
        job: Job,
        beta_knob: float | None,
        trade_off: TradeOff | None = None,
        profile_of: ProfileOf = lambda batch_size: None,
    ) -> None:
        if beta_knob is not None and not beta_knob > 0:
            raise ValueError(f"beta_knob must be positive, not {beta_knob:g}")
        self._policy = policy
        self._job = job
        self._beta = math.inf if beta_knob is None else beta_knob
        self._trade_off = trade_off
        self._profile_of = profile_of
        if trade_off is not None and not policy.price(job, trade_off.eta_knob, profile_of):
            raise ValueError(
                f"the policy {policy.name} knows costs only, not energy and time; take make_policy"
                "('gp') where eta_knob follows a signal or a deadline"
            )
        self._expected_s = 0.0
        self._warned = False
        self._failures = 0
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
        """The next run."""
        trade_off = self._trade_off
        if trade_off is None:
            return self._start(self._asked(in_flight), None)
        if chosen is None and trade_off.done_by is not None:
            due_s = next_deadline(trade_off.done_by, now_s if began_s is None else began_s)
            return self._by_deadline(due_s - now_s, trade_off.on_time, in_flight)
        eta = self._by_signal(now_s, trade_off) if chosen is None else chosen[1]
        self.price(eta)
        size = self._asked(in_flight)  # its draws are to be the same where it is chosen
        if chosen is not None:
            size = chosen[0]
        return self._start(size, eta)

    def price(self, eta_knob: float) -> None:
        """With a trade-off, the policy counts with this eta until the next run begins."""
        if self._trade_off is not None:
            self._policy.price(self._job, eta_knob, self._profile_of)

    def observe(self, run: Run) -> None:
        """A run has ended."""
        self._policy.observe_run(self._job, run)
        self.count(run)

    def count(self, run: Run, before: float = 0.0) -> None:
        """A run has ended that the policy is not told of."""
        if not run.converged:
            self._failures += 1
            return
        self.min_cost = min(self.min_cost, before + run.cost)
        self._failures = 0
        self._proven.add(run.batch_size)
        if run.time is not None:
            self._expected_s = run.time

    def _asked(self, in_flight: Sequence[int]) -> int:
        policy, job = self._policy, self._job
        return policy.predict_beside(job, in_flight) if in_flight else policy.predict(job)

    def _start(
        self,
        size: int,
        eta_knob: float | None,
        expected_cost: float = 0.0,
        most_cost: float = math.inf,
    ) -> Start:
        """The policy counts with the run's eta from now on."""
        if eta_knob is not None:
            self.price(eta_knob)
        bound = self._policy.cost_bound(self._job, self._beta, self._failures)
        if bound is None:
            bound = self._beta * self.min_cost  # infinite while nothing has converged
        if expected_cost:
            bound = max(bound, self._beta * expected_cost)
        rerun = None
        if self._proven and size not in self._proven:
            rerun = self._policy.cost_bound(self._job, 1.0, 0)
            rerun = self.min_cost if rerun is None else rerun
        return Start(size, min(bound, most_cost), rerun, eta_knob)

    def _by_signal(self, now_s: float, trade_off: TradeOff) -> float:
        """A signal counts with its mean over the time that the run is expected to take."""
        signal, eta = trade_off.signal, trade_off.eta_knob
        if signal is None:
            return eta
        relative = signal.relative(now_s, now_s + self._expected_s)
        if relative is None:
            self._warn(f"The signal has no value for now; eta_knob is {eta:g} until it has one.")
            return eta
        return eta_of(eta, relative)

    def _by_deadline(self, within_s: float, on_time: float, in_flight: Sequence[int]) -> Start:
        forecasts = self._policy.forecasts(self._job)
        proven = [one for one in forecasts if one.proven]
        known = options(proven, self._profile_of)
        best, kept = least_energy(known, within_s, on_time) if known else (None, False)
        # Trials are for energy, or, where nothing is known or nothing is fast enough, for time.
        aim = 1.0 if kept else 0.0
        self.price(aim)
        wanted = self._asked(in_flight)
        if best is None:
            return self._start(wanted, aim)
        if not kept:
            self._warn(
                f"No batch size that is known is done within {max(0.0, within_s):.0f} s with "
                f"probability {on_time:g}; the fastest of them is {best.batch_size}."
            )
            if not any(one.batch_size == wanted for one in proven):
                return self._start(wanted, aim)
        elif wanted != best.batch_size:
            safe_s = fastest(known).time_of(on_time)
            found = self._trial(forecasts, wanted, best, within_s, safe_s, on_time)
            if found is not None:
                return found
        return self._start(best.batch_size, best.eta_knob, best.cost)

    def _trial(
        self,
        forecasts: Sequence[Forecast],
        wanted: int,
        best: Forecast,
        within_s: float,
        safe_s: float,
        on_time: float,
    ) -> Start | None:
        """A run for energy, of a size other than the best, that puts the deadline at no risk."""
        trials = options([one for one in forecasts if one.batch_size == wanted], self._profile_of)
        if not trials:
            return None
        trial, in_time = least_energy(trials, within_s, on_time)
        if in_time:
            return self._start(wanted, trial.eta_knob, trial.cost)
        trial = min(trials, key=lambda one: one.energy)
        expected_s = math.exp(trial.log_time)
        if within_s - safe_s >= _ENOUGH * expected_s:
            most_cost = trial.cost * (within_s - safe_s) / expected_s
            return self._start(wanted, trial.eta_knob, most_cost=most_cost)
        # Rather than none: the cheapest of those that were never tried and are in time.
        others = options([one for one in forecasts if not one.proven], self._profile_of)
        cheaper = [one for one in others if one.energy < best.energy]
        if cheaper:
            trial, in_time = least_energy(cheaper, within_s, on_time)
            if in_time:
                return self._start(trial.batch_size, trial.eta_knob, trial.cost)
        return None

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn(text)


class Recurrences(Runs):
    """The recurrences of a job, and the tries of each."""

    _began_s = _spent = 0.0
    _try = 1
    recurrence = 1
    """The recurrence that is to be done, or being done; from 1."""

    def begin(self, now_s: float = 0.0, chosen: tuple[int, float] | None = None) -> Start:
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
        return replace(start, recurrence=self.recurrence, number=self._try)

    def skip(self, now: Start) -> None:
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
        self.count(run, self._spent)
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

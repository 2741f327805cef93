"""Which `eta_knob` and which batch size a run has, where they follow a signal or a deadline. Pure.

Both are fixed when a run begins. Its batch size cannot change later; its bound, and what a rerun
costs, are compared with costs under the same eta; and each power limit that is tried is judged with
it. A signal counts with its mean over the time that the run is expected to take.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from typing import Protocol

from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, Forecast, ProfileOf
from zeus.policy.signal import eta_of

ETAS = tuple(tenths / 10 for tenths in range(11))
"""Where a deadline decides, one of these chooses the power limit."""

_ENOUGH = 1.2
"""A trial that may take so many times its expected time is worth it."""


class Relative(Protocol):
    """What `zeus.policy.signal.Signal.relative` has; other sources may ask someone first."""

    def relative(self, begin_s: float, end_s: float) -> float | None:
        """The signal during a run over its mean; None where it is not known."""


@dataclass(frozen=True)
class TradeOff:
    """How the runs of a job trade energy against time.

    Attributes:
        eta_knob: The usual one: 1 counts energy only, 0 time only.
        signal: Moves it (`zeus.policy.signal`); None for none.
        done_by: Each recurrence is to be done at this time of day, with the least energy. Local
            time where it has no offset. None for no deadline.
        on_time: Probability with which that is to be so.

    Raises:
        ValueError: It has both a signal and a deadline, or a number is out of range.
    """

    eta_knob: float
    signal: Relative | None = None
    done_by: time | None = None
    on_time: float = 0.95

    def __post_init__(self) -> None:
        if not 0 <= self.eta_knob <= 1:
            raise ValueError(f"eta_knob must be between 0 and 1, not {self.eta_knob:g}")
        if not 0 < self.on_time < 1:
            raise ValueError(f"on_time must be between 0 and 1, not {self.on_time:g}")
        if self.signal is not None and self.done_by is not None:
            raise ValueError(
                "give a signal or a deadline, not both: with a deadline, the least energy is "
                "chosen at any price"
            )


def options(forecasts: Sequence[Forecast], profile_of: ProfileOf) -> list[Forecast]:
    """Batch sizes, each with all `ETAS` where its power limits are measured.

    Args:
        forecasts: Of the policy, under one eta.
        profile_of: What power limits do.
    """
    found = []
    for one in forecasts:
        profile = profile_of(one.batch_size)
        if profile is None:
            # Its run measures power limits, and judges them by energy.
            found.append(replace(one, eta_knob=1.0))
            continue
        for eta in ETAS:
            energy, time = profile.change(one.eta_knob, eta)
            found.append(
                replace(
                    one,
                    eta_knob=eta,
                    energy=one.energy * energy,
                    log_time=one.log_time + math.log(time),
                    log_most_time=one.log_most_time + math.log(time),
                )
            )
    return found


def least_energy(
    found: Sequence[Forecast], within_s: float, on_time: float
) -> tuple[Forecast, bool]:
    """The option of least energy that is done in time, else the fastest.

    Args:
        found: At least one.
        within_s: Time that is left, s.
        on_time: Probability with which it is to be done by then.

    Returns:
        The option, and whether it is that probable.
    """
    in_time = [one for one in found if one.done_within(within_s) >= on_time]
    if in_time:
        return min(in_time, key=lambda one: (one.energy, one.log_time)), True
    return fastest(found), False


def fastest(found: Sequence[Forecast]) -> Forecast:
    """The option of the shortest expected time, where a run that misses takes another."""
    return min(found, key=lambda one: one.log_time - math.log(max(one.reach, 1e-9)))


def time_of_day(text: str) -> time:
    """A deadline, such as `08:00` or `08:00+01:00`.

    Raises:
        ValueError: It is none.
    """
    try:
        return time.fromisoformat(text)
    except ValueError:
        raise ValueError(f"done_by must be a time of day such as 08:00, not {text!r}") from None


def next_deadline(done_by: time, began_s: float) -> float:
    """The first such time of day after a recurrence began; both in s since 1970."""
    began = datetime.fromtimestamp(began_s, done_by.tzinfo)
    due = datetime.combine(began.date(), done_by)
    # A local time of day is the same on the next day, also where that day has another length.
    while due.timestamp() <= began_s:
        due += timedelta(days=1)
    return due.timestamp()


@dataclass(frozen=True)
class RunTerms:
    """What a run begins with.

    Attributes:
        batch_size: Its batch size.
        eta_knob: Its eta.
        expected_cost: Expected cost, J, where the run is not to be given up for costing more than
            the best one would under its eta: time counts first. None: its bound is the usual one.
        most_cost: It is given up at this cost, J, as there must be time for another run.
    """

    batch_size: int
    eta_knob: float
    expected_cost: float | None = None
    most_cost: float = math.inf


def asked(policy: BatchSizeOptimizer, job: Job, in_flight: Sequence[int]) -> int:
    """The batch size that a policy asks for, beside runs that have not ended."""
    return policy.predict_beside(job, in_flight) if in_flight else policy.predict(job)


class Trader:
    """Chooses eta and batch size of the runs of a job, one after the other.

    Args:
        policy: Knows the job; the job must be registered.
        job: The job.
        trade_off: What is to be traded how.
        profile_of: What power limits do.

    Raises:
        ValueError: The policy stores costs only, which mean nothing under another eta.
    """

    def __init__(
        self, policy: BatchSizeOptimizer, job: Job, trade_off: TradeOff, profile_of: ProfileOf
    ) -> None:
        self._policy = policy
        self._job = job
        self._trade_off = trade_off
        self._profile_of = profile_of
        self._expected_s = 0.0
        self._warned = False
        if not policy.price(job, trade_off.eta_knob, profile_of):
            raise ValueError(
                f"the policy {policy.name} knows costs only, not energy and time; take make_policy"
                "('gp') where eta_knob follows a signal or a deadline"
            )

    def observe(self, time_s: float | None) -> None:
        """A run has reached the target, in so many seconds if that is known."""
        self._expected_s = self._expected_s if time_s is None else time_s

    def price(self, eta_knob: float) -> None:
        """The policy counts with this eta."""
        self._policy.price(self._job, eta_knob, self._profile_of)

    def begin(self, now_s: float, began_s: float, in_flight: Sequence[int] = ()) -> RunTerms:
        """Chooses for a run; the policy counts with its eta then.

        Args:
            now_s: The time, s since 1970.
            began_s: When its recurrence began.
            in_flight: Batch sizes of the runs that have not ended.
        """
        if self._trade_off.done_by is not None:
            due_s = next_deadline(self._trade_off.done_by, began_s)
            return self._by_deadline(due_s - now_s, in_flight)
        eta = self._by_signal(now_s)
        self.price(eta)
        return RunTerms(asked(self._policy, self._job, in_flight), eta)

    def _by_signal(self, now_s: float) -> float:
        signal, eta = self._trade_off.signal, self._trade_off.eta_knob
        if signal is None:
            return eta
        relative = signal.relative(now_s, now_s + self._expected_s)
        if relative is None:
            self._warn(f"The signal has no value for now; eta_knob is {eta:g} until it has one.")
            return eta
        return eta_of(eta, relative)

    def _by_deadline(self, within_s: float, in_flight: Sequence[int]) -> RunTerms:
        policy, job, on_time = self._policy, self._job, self._trade_off.on_time
        forecasts = policy.forecasts(job)
        proven = [one for one in forecasts if one.proven]
        if not proven:
            self.price(0.0)  # nothing is known yet, so there is no time to lose
            return RunTerms(asked(policy, job, in_flight), 0.0)
        known = options(proven, self._profile_of)
        best, kept = least_energy(known, within_s, on_time)
        # Trials are for energy, or, where nothing is fast enough, for time.
        aim = 1.0 if kept else 0.0
        self.price(aim)
        wanted = asked(policy, job, in_flight)
        if not kept:
            self._warn(
                f"No batch size that is known is done within {max(0.0, within_s):.0f} s with "
                f"probability {on_time:g}; the fastest of them is {best.batch_size}."
            )
            if not any(one.batch_size == wanted for one in proven):
                return RunTerms(wanted, aim)
        elif wanted != best.batch_size:
            found = self._trial(forecasts, wanted, best, within_s, fastest(known).time_of(on_time))
            if found is not None:
                self.price(found.eta_knob)
                return found
        self.price(best.eta_knob)
        return RunTerms(best.batch_size, best.eta_knob, best.cost)

    def _trial(
        self,
        forecasts: Sequence[Forecast],
        wanted: int,
        best: Forecast,
        within_s: float,
        safe_s: float,
    ) -> RunTerms | None:
        """A run for energy, of a size other than the best, that puts the deadline at no risk.

        Args:
            forecasts: Of all sizes.
            wanted: The size that the policy asks for.
            best: Of what is known.
            within_s: Time that is left, s.
            safe_s: What a run that is safe takes of it at most, s.
        """
        on_time = self._trade_off.on_time
        trials = options([one for one in forecasts if one.batch_size == wanted], self._profile_of)
        if not trials:
            return None
        trial, in_time = least_energy(trials, within_s, on_time)
        if in_time:
            return RunTerms(wanted, trial.eta_knob, trial.cost)
        trial = min(trials, key=lambda one: one.energy)
        expected_s = math.exp(trial.log_time)
        if within_s - safe_s >= _ENOUGH * expected_s:
            most_cost = trial.cost * (within_s - safe_s) / expected_s
            return RunTerms(wanted, trial.eta_knob, most_cost=most_cost)
        # Rather than none: the cheapest of those that were never tried and are in time.
        others = options([one for one in forecasts if not one.proven], self._profile_of)
        cheaper = [one for one in others if one.energy < best.energy]
        if cheaper:
            trial, in_time = least_energy(cheaper, within_s, on_time)
            if in_time:
                return RunTerms(trial.batch_size, trial.eta_knob, trial.cost)
        return None

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=6)

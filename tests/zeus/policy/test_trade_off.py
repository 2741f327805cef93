"""Which eta and which batch size runs have under a signal or a deadline."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from datetime import datetime, time, timezone
from functools import partial

import pytest

from zeus.job import Job
from zeus.policy import GPBatchSizeOptimizer, make_policy
from zeus.policy.interface import Forecast, LimitProfile, Run
from zeus.policy.recurrence import Recurrences, Runs
from zeus.policy.signal import DAY_S, HOUR_S, Signal, eta_of
from zeus.policy.trade_off import (
    TradeOff,
    fastest,
    least_energy,
    next_deadline,
)
from zeus.utils.metric import zeus_cost

JOB = Job("set", "net", "adam", 0.5, max_epochs=40, default_bs=64)
SIZES = [16, 32, 64, 128, 256]
POWER = 300.0

# Each limit draws less power and takes longer; the last is the best for energy.
PROFILE = LimitProfile((300.0, 220.0, 180.0), (1.0, 1.1, 1.5), POWER)


def run_of(size: int, energy: float, seconds: float, eta: float, epochs: int = 10) -> Run:
    cost = zeus_cost(energy, seconds, eta, POWER)
    return Run(size, cost, True, epochs, energy=energy, time=seconds, max_power=POWER, eta_knob=eta)


# ---- signals


def test_a_signal_stands_at_its_value_over_the_mean_of_its_day() -> None:
    hours = Signal([(hour * HOUR_S, 1.0 + (hour >= 12)) for hour in range(24)], period_s=DAY_S)
    assert hours.at(3 * DAY_S + 11.9 * HOUR_S) == 1.0
    assert hours.at(-0.1 * HOUR_S) == 2.0  # it repeats before, too
    assert hours.mean(0.0, DAY_S) == pytest.approx(1.5)
    assert hours.relative(6 * HOUR_S, 6 * HOUR_S) == pytest.approx(1 / 1.5)
    assert hours.relative(6 * HOUR_S, 18 * HOUR_S) == pytest.approx(1.0)  # half of the run each


def test_unknown_values_of_a_signal_are_not_invented() -> None:
    once = Signal([(0.0, 4.0), (HOUR_S, 8.0)])
    assert once.at(-1.0) is None
    assert once.at(2 * HOUR_S - 1) == 8.0
    assert once.at(2 * HOUR_S) is None
    assert once.relative(2 * HOUR_S, 3 * HOUR_S) is None
    # A run that is longer than the known signal counts with the known part.
    assert once.relative(HOUR_S, 9 * HOUR_S) == pytest.approx(8.0 / 6.0)


def test_negative_prices_and_days_without_a_positive_mean() -> None:
    negative = Signal([(hour * HOUR_S, -1.0 if hour == 12 else 2.0) for hour in range(24)])
    assert negative.relative(12 * HOUR_S, 12 * HOUR_S) == 0.0
    assert Signal([(0.0, -1.0)]).relative(0.0, 0.0) == 1.0


def test_signals_that_cannot_be_are_refused() -> None:
    for points in ([], [(0.0, math.nan)], [(0.0, 1.0), (0.0, 2.0)]):
        with pytest.raises(ValueError, match="signal"):
            Signal(points)
    with pytest.raises(ValueError, match="repeats"):
        Signal([(0.0, 1.0), (DAY_S, 2.0)], period_s=DAY_S)


@pytest.mark.parametrize("relative", [0.25, 1.0, 3.0])
@pytest.mark.parametrize("eta", [0.2, 0.5, 0.9])
def test_eta_orders_runs_as_a_bill_at_that_price_does(eta: float, relative: float) -> None:
    runs = [(910.0, 2.0), (500.0, 3.0), (300.0, 5.0), (200.0, 9.0)]
    by_eta = sorted(runs, key=lambda run: zeus_cost(*run, eta_of(eta, relative), POWER))
    by_bill = sorted(runs, key=lambda run: relative * eta * run[0] + (1 - eta) * POWER * run[1])
    assert by_eta == by_bill
    assert eta_of(eta, 1.0) == pytest.approx(eta)


def test_eta_0_and_1_follow_nothing() -> None:
    assert eta_of(1.0, 0.0) == eta_of(1.0, 5.0) == 1.0
    assert eta_of(0.0, 5.0) == 0.0


# ---- what was learnt under one eta


def test_a_run_counts_under_another_eta_with_that_etas_power_limit() -> None:
    run = run_of(64, 3000.0, 10.0, eta=0.0)
    energy_only = run.under(1.0, PROFILE)
    assert energy_only.energy == pytest.approx(1800.0)
    assert energy_only.time == pytest.approx(15.0)
    assert energy_only.cost == pytest.approx(1800.0)
    back = energy_only.under(0.0, PROFILE)
    assert (back.energy, back.cost) == pytest.approx((run.energy, run.cost))


def test_the_policy_finds_the_size_of_another_eta_without_another_run() -> None:
    policy = make_policy("gp", seed=3)
    policy.register_job(JOB, SIZES)
    # The larger, the faster, and the more energy.
    for size in (64, 64, 128, 128, 256, 256):
        doublings = math.log2(size / 64)
        run = run_of(size, 3000.0 * 1.5**doublings, 20.0 * 0.6**doublings, 0.5)
        policy.observe_run(JOB, run)
    assert policy.price(JOB, 0.0, lambda size: None)
    assert policy.best(JOB) == 256
    policy.price(JOB, 1.0, lambda size: None)
    assert policy.best(JOB) == 64
    forecasts = {one.batch_size: one for one in policy.forecasts(JOB)}
    assert forecasts[256].energy == pytest.approx(6750.0, rel=0.1)
    assert math.exp(forecasts[256].log_time) == pytest.approx(7.2, rel=0.1)
    assert [size for size, one in forecasts.items() if one.proven] == [64, 128, 256]


def test_a_policy_that_keeps_costs_alone_is_refused() -> None:
    policy = make_policy("pruning-gts")
    policy.register_job(JOB, SIZES)
    with pytest.raises(ValueError, match="make_policy"):
        Runs(policy, JOB, 2.0, TradeOff(0.5), lambda size: None)


# ---- deadlines


def option(
    size: int, energy: float, seconds: float, reach: float = 1.0, sd: float = 0.1
) -> Forecast:
    return Forecast(size, 0.5, energy, math.log(seconds), sd, math.inf, POWER, reach, proven=True)


def test_the_least_energy_that_is_done_in_time_is_chosen() -> None:
    slow, quick = option(32, 100.0, 100.0), option(64, 200.0, 50.0)
    assert least_energy([slow, quick], 130.0, 0.95) == (slow, True)
    # The slow size needs e^(1.645 * 0.1) = 1.18 times its median in 95 % of runs.
    assert least_energy([slow, quick], 117.0, 0.95) == (quick, True)
    assert least_energy([slow, quick], 117.0, 0.9) == (slow, True)
    assert least_energy([slow, quick], 40.0, 0.95) == (quick, False)


def test_a_run_that_misses_its_target_is_not_done_in_time() -> None:
    assert option(32, 1.0, 10.0, reach=0.8).done_within(1e6) == pytest.approx(0.8)
    assert option(32, 1.0, 10.0).done_within(0.0) == 0.0
    assert fastest([option(32, 1.0, 10.0, reach=0.5), option(64, 1.0, 15.0)]).batch_size == 64


def test_the_time_of_a_probability_is_that_within_which_it_is_done() -> None:
    one = option(32, 1.0, 10.0, reach=0.97)
    assert one.done_within(one.time_of(0.95)) == pytest.approx(0.95)
    assert one.time_of(0.98) == math.inf


def test_a_trial_that_may_miss_leaves_time_for_a_run_that_does_not() -> None:
    policy = GPBatchSizeOptimizer(seed=1, verbose=False)
    policy.register_job(JOB, SIZES)
    loop = Recurrences(policy, JOB, 20.0, TradeOff(0.5, done_by=time(0, tzinfo=timezone.utc)))
    rate = 1e5 / 900.0  # of every size, in J/s
    capped = 0
    for day in range(6):
        now = loop.begin((day + 1) * DAY_S - HOUR_S)
        if now.batch_size == 64:
            loop.end(run_of(64, 1e5, 900.0, now.eta_knob or 0.0))
            continue
        assert now.eta_knob == 1.0
        capped += now.cost_bound <= 1.1 * rate * (HOUR_S - 900.0)
        spent = run_of(now.batch_size, 1e5, 900.0, 1.0, epochs=40)
        loop.end(replace(spent, converged=False))
        loop.end(run_of(loop.begin((day + 1) * DAY_S - HOUR_S / 2).batch_size, 1e5, 900.0, 1.0))
    # Once a run has missed, no untried size is in time with 95 %.
    assert capped >= 1


def test_a_deadline_is_the_next_such_time() -> None:
    eight = time(8, tzinfo=timezone.utc)
    evening = datetime(2026, 3, 1, 22, tzinfo=timezone.utc).timestamp()
    assert next_deadline(eight, evening) == evening + 10 * HOUR_S
    assert next_deadline(eight, evening + 10 * HOUR_S) == evening + 34 * HOUR_S


def learnt(trade_off: TradeOff) -> tuple[Recurrences, GPBatchSizeOptimizer]:
    """Some runs of each size in: 256 takes 600 s, 64 takes 1500 s and half the energy."""
    policy = GPBatchSizeOptimizer(seed=1, verbose=False)
    policy.register_job(JOB, [64, 256])
    loop = Recurrences(policy, JOB, 2.0, trade_off, lambda size: PROFILE)
    for size, energy, seconds in 4 * ((64, 1e5, 1500.0), (256, 2e5, 600.0)):
        loop.begin(0.0)
        loop.end(run_of(size, energy, seconds, 0.5))
    return loop, policy


def test_less_time_makes_a_run_faster_and_a_retry_keeps_the_recurrences_deadline() -> None:
    midnight = time(0, tzinfo=timezone.utc)
    loop, _ = learnt(TradeOff(0.5, done_by=midnight))
    calm = loop.begin(DAY_S - 8 * HOUR_S)
    assert calm.batch_size == 64
    assert calm.eta_knob is not None
    assert calm.eta_knob > 0.5
    loop.end(run_of(64, 1e5, 1500.0, calm.eta_knob))
    hurried = loop.begin(2 * DAY_S - 900.0)
    assert hurried.batch_size == 256
    # Twice the energy of the best size, and not given up for it.
    assert hurried.cost_bound > 1.9 * run_of(256, 2e5, 600.0, hurried.eta_knob or 0.0).cost
    missed = run_of(256, 2e5, 850.0, hurried.eta_knob or 0.0)
    loop.end(Run(256, missed.cost, False, 40))
    with pytest.warns(UserWarning, match="fastest"):  # not the next midnight, a day from now
        assert loop.begin(2 * DAY_S + 10.0).batch_size == 256
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        loop.end(Run(256, missed.cost, False, 40))
        loop.begin(2 * DAY_S + 900.0)


def test_other_sizes_are_tried_for_time_and_for_energy_as_there_is_time() -> None:
    """The smaller, the less energy and the slower."""
    seen: dict[float, list[int]] = {}
    for hours in (0.2, 12.0):
        policy = GPBatchSizeOptimizer(seed=1, verbose=False)
        policy.register_job(JOB, SIZES)
        loop = Recurrences(policy, JOB, 2.0, TradeOff(0.5, done_by=time(0, tzinfo=timezone.utc)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for day in range(12):
                now = loop.begin((day + 1) * DAY_S - hours * HOUR_S)
                seen.setdefault(hours, []).append(now.batch_size)
                doublings = math.log2(now.batch_size / 64)
                energy, seconds = 1e5 * 1.2**doublings, 900.0 * 0.7**doublings
                loop.end(run_of(now.batch_size, energy, seconds, now.eta_knob or 0.0))
    assert seen[0.2][0] == seen[12.0][0] == 64
    assert seen[0.2][-1] in (128, 256)  # 630 s and 441 s of 720 s
    assert seen[12.0][-1] == 16


def test_a_run_that_continues_has_what_it_began_with() -> None:
    loop, policy = learnt(TradeOff(0.5, done_by=time(0, tzinfo=timezone.utc)))
    now = loop.begin(0.0, chosen=(256, 0.3))
    assert (now.batch_size, now.eta_knob) == (256, 0.3)
    assert policy.forecasts(JOB)[0].eta_knob == 0.3


# ---- signals, in the loop


def test_an_expensive_hour_saves_energy_at_the_cost_of_time() -> None:
    dear = Signal(
        [(hour * HOUR_S, 4.0 if hour == 18 else 1.0) for hour in range(24)], period_s=DAY_S
    )
    loop, _ = learnt(TradeOff(0.5, dear))
    first = loop.begin(18 * HOUR_S)
    # 600 s, as the run before, all of them in that hour; the mean of the day is 27 / 24.
    assert first.eta_knob == pytest.approx(eta_of(0.5, 4 * 24 / 27))
    loop.end(run_of(first.batch_size, 1e5, 1500.0, first.eta_knob))
    assert (loop.begin(DAY_S).eta_knob or 1) < 0.5


def test_a_signal_counts_over_the_time_that_the_run_before_took() -> None:
    dear = Signal(
        [(hour * HOUR_S, 4.0 if hour == 18 else 1.0) for hour in range(24)], period_s=DAY_S
    )
    loop, _ = learnt(TradeOff(0.5, dear))
    # Half of the 600 s are expensive.
    assert loop.begin(19 * HOUR_S - 300.0).eta_knob == pytest.approx(eta_of(0.5, 2.5 * 24 / 27))


def test_a_signal_that_is_not_known_warns_once_and_changes_nothing() -> None:
    loop, _ = learnt(TradeOff(0.4, Signal([(0.0, 1.0)])))
    with pytest.warns(UserWarning, match="no value"):
        now = loop.begin(DAY_S)
    assert now.eta_knob == 0.4


@pytest.mark.parametrize(
    "wrong",
    [
        partial(TradeOff, 1.5),
        partial(TradeOff, 0.5, on_time=1.0),
        partial(TradeOff, 0.5, Signal([(0.0, 1.0)]), time(8)),
    ],
)
def test_trade_offs_that_cannot_be_are_refused(wrong: partial[TradeOff]) -> None:
    with pytest.raises(ValueError, match=r"eta_knob|on_time|deadline"):
        wrong()

"""Measures the gain of an `eta_knob` that follows a daily curve, and the share of deadlines kept.

    python benchmarks/recurring_day.py [--seeds 10 11 12] [--eta 0.5] [--gpus v100]

The measured workloads (six, on four GPUs; see `recurring.py`), 60 recurrences. Curves are
invented, 24 hourly values each: a grid with much solar power, gCO2eq/kWh, and a price with two
tiers, per kWh; both repeat every day. Nothing was tuned; seed 0 was used to find mistakes, others
to report.

- Signal: a recurrence begins every seven hours, or when the one before is done. Energy, carbon or
  money, and time are sums over all runs, over those with the same eta at all hours. "Objective" is
  what the rule minimizes: energy counted with the signal over its mean, and time. Two fixed etas
  are shown for comparison, because more time also saves money. All from the 11th recurrence on, but
  for the last column.
- Known: the same for an hour of work in each hour of the day, if the expected energy and time of
  every batch size and power limit were known: the upper bound of the rule's gain.
- Deadline: a recurrence begins each day at the same time, and its deadline is a multiple of the
expected
  time of the fastest batch size and power limit. Kept: the share of recurrences that
  are done by then, first of all and then from the 11th on. Energy: over that with eta 0. Only
  workloads whose deadline is within half a day.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache

from rich.console import Console
from rich.table import Table

from zeus.analyze import HistoryEntry
from zeus.job import Job
from zeus.policy import JITPowerLimitOptimizer, make_policy
from zeus.policy.signal import DAY_S, HOUR_S, Signal, eta_of
from zeus.policy.trade_off import TradeOff
from zeus.simulate import Simulator
from zeus.simulate.expected import Expected, all_expected
from zeus.simulate.workloads import GPUS, WORKLOADS, power_trace, train_trace
from zeus.utils.metric import zeus_cost

RECURRENCES = 60
BEGIN_S = datetime(2026, 11, 23, tzinfo=timezone.utc).timestamp()
EVERY_S = 7 * HOUR_S
SLACKS = (1.2, 1.5, 2.0, 4.0)
KNOWN_FROM = 10

# gCO2eq/kWh; least at noon, most in the evening.
SOLAR = (290, 285, 280, 280, 285, 300, 310, 280, 210, 150, 115, 100)
SOLAR += (95, 95, 105, 130, 200, 290, 350, 365, 355, 335, 315, 300)
TIERS = tuple(0.34 if 16 <= hour < 21 else 0.14 for hour in range(24))
CURVES = {"solar grid, CO2": SOLAR, "two tiers, money": TIERS}


def signal(curve: tuple[float, ...]) -> Signal:
    """A curve that repeats every day."""
    points = [(BEGIN_S + hour * HOUR_S, value) for hour, value in enumerate(curve)]
    return Signal(points, period_s=DAY_S)


@lru_cache
def simulator(gpu: str, seed: int) -> Simulator:
    """With the default policy."""
    policy = make_policy("gp", seed=seed)
    plo = JITPowerLimitOptimizer(verbose=False)
    return Simulator(train_trace(), power_trace(gpu), policy, plo, seed, verbose=False)


def jobs(gpus: list[str], seed: int) -> Iterator[tuple[Simulator, Job]]:
    """The measured workloads on these GPUs."""
    for gpu in gpus:
        for workload in WORKLOADS:
            sim = simulator(gpu, seed)
            yield sim, workload.job(sim.batch_sizes(workload.job([workload.default_bs])))


def timed(
    history: list[HistoryEntry], every_s: float
) -> Iterator[tuple[int, float, float, HistoryEntry]]:
    """Of each run: its recurrence from 0, when that began, when the run began, and the run."""
    now, recurrence, began = BEGIN_S, 0, BEGIN_S
    for entry in history:
        yield recurrence, began, now, entry
        now += entry.time
        if entry.reached:
            recurrence += 1
            began = now = max(now, BEGIN_S + recurrence * every_s)


@dataclass(frozen=True)
class Sums:
    """Of the recurrences from `KNOWN_FROM` on, and of all.

    Attributes:
        energy: Energy of those, J.
        amount: What that energy stands for by the signal: money, or gCO2eq.
        time: Their time, s.
        objective: Their objective, J.
        everything: The objective of all recurrences, J.
    """

    energy: float
    amount: float
    time: float
    objective: float
    everything: float


def follow(sim: Simulator, job: Job, curve: Signal, eta: float, by: TradeOff | None) -> Sums:
    """A simulated job, counted with the curve and `eta`, and run with those of `by`."""
    used = eta if by is None else by.eta_knob
    history = sim.simulate_one_job(
        job, RECURRENCES, 2.0, used, trade_off=by, begin_s=BEGIN_S, every_s=EVERY_S
    )
    mean = curve.mean(BEGIN_S, BEGIN_S + DAY_S) or 1.0
    worth = (1 - eta) * sim.measurements.max_power
    runs = []
    for recurrence, _, began, entry in timed(history, EVERY_S):
        rate = curve.mean(began, began + entry.time) or 0.0
        runs.append((recurrence, entry.energy, entry.energy * rate, entry.time))
    later = [run[1:] for run in runs if run[0] >= KNOWN_FROM]
    energy, amount, time = (sum(of) for of in zip(*later, strict=True))
    everything = sum(eta * run[2] / mean + worth * run[3] for run in runs)
    return Sums(energy, amount, time, eta * amount / mean + worth * time, everything)


def signals(gpus: list[str], seeds: list[int], eta: float) -> Table:
    """The first table."""
    table = Table(title=f"eta {eta:g} that follows a signal, over a fixed one; mean and range")
    for name in (
        "curve",
        "eta",
        "energy",
        "CO2 or money",
        "time",
        "objective",
        "objective, all",
        "jobs",
    ):
        table.add_column(name)
    for name, values in CURVES.items():
        curve = signal(values)
        found: dict[str, list[tuple[float, ...]]] = {}
        for seed in seeds:
            for sim, job in jobs(gpus, seed):
                base = follow(sim, job, curve, eta, None)
                for by in (
                    TradeOff(eta, curve),
                    TradeOff(max(0.0, eta - 0.2)),
                    TradeOff(min(1.0, eta + 0.2)),
                ):
                    now = follow(sim, job, curve, eta, by)
                    what = f"{by.eta_knob:.1f}, " + ("fixed" if by.signal is None else "follows")
                    ratios = (
                        now.energy / base.energy,
                        now.amount / base.amount,
                        now.time / base.time,
                        now.objective / base.objective,
                        now.everything / base.everything,
                    )
                    found.setdefault(what, []).append(ratios)
        for what, rows in found.items():
            columns = list(zip(*rows, strict=True))
            cells = (f"{statistics.mean(of):.3f} ({min(of):.2f}-{max(of):.2f})" for of in columns)
            table.add_row(name, what, *cells, str(len(rows)))
    return table


def cheapest(found: list[Expected], eta: float, max_power: float) -> Expected:
    """Of the lowest cost."""
    return min(found, key=lambda one: zeus_cost(one.energy, one.time, eta, max_power))


def known(gpus: list[str], eta: float) -> Table:
    """The second table."""
    table = Table(title=f"eta {eta:g} that follows a signal, all being known, over a fixed one")
    for name in ("curve", "CO2 or money", "time", "objective", "best job", "jobs"):
        table.add_column(name)
    for name, values in CURVES.items():
        mean, rows = statistics.mean(values), []
        for sim, job in jobs(gpus, 0):
            most = sim.measurements.max_power
            found = all_expected(sim.measurements, job, eta)
            sums = []
            for moves in (1.0, 0.0):
                amount = time = 0.0
                for value in values:
                    one = cheapest(found, eta_of(eta, (value / mean) ** moves), most)
                    amount, time = amount + one.energy * value, time + one.time
                sums.append((amount, time, eta * amount / mean + (1 - eta) * most * time))
            rows.append([more / less for more, less in zip(*sums, strict=True)])
        columns = list(zip(*rows, strict=True))
        cells = [f"{statistics.mean(of):.4f}" for of in columns]
        table.add_row(name, *cells, f"{min(columns[2]):.4f}", str(len(rows)))
    return table


def deadlines(gpus: list[str], seeds: list[int]) -> Table:
    """The third table."""
    table = Table(title="Deadlines")
    for name in ("time", "runs with", "kept", "kept from the 11th", "energy from the 11th", "jobs"):
        table.add_column(name)
    for slack in SLACKS:
        found: dict[str, list[tuple[float, float, float]]] = {}
        for seed in seeds:
            for sim, job in jobs(gpus, seed):
                least = min(one.time for one in all_expected(sim.measurements, job, 0.0))
                if slack * least > DAY_S / 2:
                    continue
                due = datetime.fromtimestamp(BEGIN_S, timezone.utc) + timedelta(
                    seconds=slack * least
                )
                by_name = {
                    "eta 0": None,
                    "eta 0.5": None,
                    "eta 1": None,
                    "deadline, 0.9": TradeOff(0.5, done_by=due.timetz(), on_time=0.9),
                    "deadline, 0.95": TradeOff(0.5, done_by=due.timetz()),
                }
                energies = {}
                for what, by in by_name.items():
                    eta = float(what.split()[1]) if by is None else 0.5
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        history = sim.simulate_one_job(
                            job, RECURRENCES, 2.0, eta, trade_off=by, begin_s=BEGIN_S, every_s=DAY_S
                        )
                    kept, energies[what] = [], 0.0
                    for recurrence, began, now, entry in timed(history, DAY_S):
                        if recurrence >= KNOWN_FROM:
                            energies[what] += entry.energy
                        if entry.reached:
                            kept.append(now + entry.time - began <= slack * least)
                    found.setdefault(what, []).append(
                        (
                            statistics.mean(kept),
                            statistics.mean(kept[KNOWN_FROM:]),
                            energies[what] / energies["eta 0"],
                        )
                    )
        for what, rows in found.items():
            share, later, energy = (statistics.mean(of) for of in zip(*rows, strict=True))
            cells = (f"{share:.3f}", f"{later:.3f}", f"{energy:.3f}", str(len(rows)))
            table.add_row(f"{slack:g} x the fastest", what, *cells)
    return table


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12])
    parser.add_argument("--eta", type=float, default=0.5)
    parser.add_argument("--gpus", nargs="+", choices=GPUS, default=list(GPUS))
    options = parser.parse_args()
    console = Console(width=150)
    console.print(signals(options.gpus, options.seeds, options.eta))
    console.print(known(options.gpus, options.eta))
    console.print(deadlines(options.gpus, options.seeds))


if __name__ == "__main__":
    main()

"""Measures the cost of the power limit search and the quality of its choices, also under
disturbances.

    python benchmarks/power_limit_search.py [--seeds 20] [--selector cost] [--disturbance all]

Every measured workload that is shipped with the simulated node (218 of the tables of You et al.,
NSDI 2023, and 12 recorded profiles, all from ml-energy/zeus, Apache-2.0) is trained for 5,000
steps. After a change of the limit, time and power follow with a time constant of 150 ms; a window's
energy is known 100 ms after its end and is off by some millijoules per watt. It runs the search
that a job runs (`adaptive.py`) on these tables; slowdown, regret and energy are relative to the
tables.

Disturbances: `start`: the first 25 steps are 15 % slower; `drift`: a GPU gets 3 % slower and draws
3 % more as it warms up; `noise`: steps vary by 5 % rather than 2 %; `interruption`: one of the
first 100 steps takes 2 s more; `together`: all four.

A job "costs more" if its 5,000 steps, including the search, take more energy than 5,000 steps at
the highest limit: at all (beyond the rounding of this program, a billionth), by more than 0.02 %
(one step's energy), and by more than 0.1 %. Some workloads draw less than 75 % of their lowest
limit: their power is the same at each limit, and differences between times are noise of the
recording. The search leaves those at the highest limit, and their regret is the size of that noise;
the column `within reach` is the mean regret of all others.

The thresholds of the search were tuned on every tenth workload (`--part tuned`), by seeds of 1,000
and more; figures are of the other workloads (`--part others`, the default), by seeds from 0.
`STRIDE` and `PEAKS` were chosen on every other workload, by seeds of 1,000 and more. `REACH`,
`FALL` and `AVERAGED_S` follow from how limits work, and were set after looking at all tables.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import random
import statistics
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from zeus.optimizer.power_limit.adaptive import REACH, Adaptive
from zeus.optimizer.power_limit.estimates import SettingSample
from zeus.optimizer.power_limit.planner import costs_of
from zeus.optimizer.power_limit.search import Exhaustive, LimitTrial, Search
from zeus.optimizer.power_limit.selectors import (
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    ZeusCost,
    best,
)
from zeusd.devices.simulated.workloads import MeasuredTable, catalog

JOB_STEPS = 5000
WARMUP_STEPS, PROFILE_STEPS = 10, 40
FOLLOWS_S = 0.15
TICK_S = 0.1
ENERGY_ERROR_S = 0.005  # of the mean power: the uncertainty of a window's two ends
FACTOR = 1.1
TOLERATED = 0.02
"""A slowdown beyond the constraint by more than this counts as one that was not kept."""
ROUNDING = 1e-9
BINDS = 0.02
"""With `--counters`, a limit binds if power is this close to it, or so much below the highest's."""


@dataclass(frozen=True)
class Disturbance:
    """The disturbances of a job.

    Attributes:
        noise: Relative variation of single steps.
        start: Relative slowdown of the first 25 steps.
        drift: Relative increase of a step's time and power as the GPU warms up.
        interruption_s: Duration of an interruption in one of the first 100 steps.
    """

    noise: float = 0.02
    start: float = 0.0
    drift: float = 0.0
    interruption_s: float = 0.0


DISTURBANCES = {
    "none": Disturbance(),
    "start": Disturbance(start=0.15),
    "drift": Disturbance(drift=0.03),
    "noise": Disturbance(noise=0.05),
    "interruption": Disturbance(interruption_s=2.0),
    "together": Disturbance(0.05, 0.15, 0.03, 2.0),
}


@dataclass(frozen=True)
class Run:
    """The result of one search.

    Attributes:
        steps: Training steps until the choice.
        slowdown: Time of a step at the choice over that at the highest limit, less 1.
        regret: Cost of the choice over the least cost, less 1.
        costs_more: Energy of a step at the choice over that at the highest limit, less 1.
        saved: Share of the energy of 5,000 steps at the highest limit that the job saved.
        reached: Whether the workload draws at least `REACH` of its lowest limit.
    """

    steps: int
    slowdown: float
    regret: float
    costs_more: float
    saved: float
    reached: bool


class Training:
    """Noisy steps of a workload, and the windows that measure them."""

    def __init__(
        self, table: MeasuredTable, disturbance: Disturbance, seed: int, counters: bool
    ) -> None:
        self.limits_mw = [round(limit * 1000) for limit in reversed(table.limits_w)]
        self.time_s = list(reversed(table.unit_s))
        self.power_w = [sum(gpu) for gpu in zip(*table.power_w, strict=True)][::-1]
        self.counters = counters
        self.limited = [
            watts < (1 - BINDS) * self.power_w[0]
            or watts / table.gpus * 1000 > (1 - BINDS) * limit_mw
            for watts, limit_mw in zip(self.power_w, self.limits_mw, strict=True)
        ]
        self.disturbance = disturbance
        self.random = random.Random(seed)
        self.interrupted = self.random.randrange(100)
        self.at = 0
        self.now_s = 0.0
        self.steps = 0
        self.true_j = 0.0
        self._time_now, self._power_now = self.time_s[0], self.power_w[0]

    def set(self, limit_mw: int) -> None:
        """Sets the limit."""
        self.at = self.limits_mw.index(limit_mw)

    def step(self) -> tuple[float, float]:
        """Runs a step. Returns its time and energy."""
        time_s, power_w = self.time_s[self.at], self.power_w[self.at]
        off = self.disturbance
        share = math.exp(-self._time_now / FOLLOWS_S)
        self._time_now = time_s + (self._time_now - time_s) * share
        self._power_now = power_w + (self._power_now - power_w) * share
        warmer = 1 + off.drift * (1 - math.exp(-self.steps / 150))
        slower = 1 + off.start if self.steps < 25 else 1.0
        took_s = self._time_now * warmer * slower * math.exp(self.random.gauss(0, off.noise))
        power_now_w = self._power_now * warmer * math.exp(self.random.gauss(0, off.noise / 4))
        joules = took_s * power_now_w
        if self.steps == self.interrupted:
            took_s += off.interruption_s
            joules += off.interruption_s * 0.3 * power_w
        self.steps += 1
        self.now_s += took_s
        self.true_j += time_s * power_w
        return took_s, joules

    def window(self, steps: int) -> SettingSample:
        """Runs and measures steps."""
        begin = self.steps
        took = [self.step() for _ in range(steps)]
        error = ENERGY_ERROR_S * self.power_w[self.at]
        joules = sum(one[1] for one in took) + self.random.gauss(0, error)
        limit = self.limits_mw[self.at]
        seconds = sum(one[0] for one in took)
        limited_s = seconds * self.limited[self.at] if self.counters else None
        middle = begin + steps / 2
        return SettingSample(limit, steps, max(joules, 1e-6), seconds, 2 * error, middle, limited_s)


def search(training: Training, strategy: Search, selector: OptimumSelector) -> int:
    """Runs a search to its end. Returns the chosen limit, mW."""
    late: list[tuple[float, SettingSample]] = []

    def next_trial() -> LimitTrial | None:
        outstanding: Counter[int] = Counter()
        for _, sample in late:
            outstanding[sample.power_limit_mw] += sample.steps
        return strategy.next(current, training.steps, outstanding)

    current = training.limits_mw[training.at]
    trial = next_trial()
    while trial is not None or late:
        if trial is None:
            strategy.add(late.pop(0)[1])
        else:
            training.set(trial.power_limit_mw)
            current = trial.power_limit_mw
            for _ in range(trial.warmup_steps):
                training.step()
            sample = training.window(trial.steps)
            late.append((training.now_s + TICK_S, sample))
            # Training continues while the newest energy is awaited; those steps are measured too.
            while late and (isinstance(strategy, Exhaustive) or late[0][0] <= training.now_s):
                strategy.add(late.pop(0)[1])
        trial = next_trial()
    estimates = strategy.estimates()
    cautious = isinstance(strategy, Adaptive)
    return best(selector, estimates, PROFILE_STEPS, cautious=cautious).power_limit_mw


def run(
    name: str, kind: str, strategy: str, disturbance: Disturbance, seed: int, counters: bool = False
) -> Run:
    """One job."""
    table = catalog()[name]
    assert isinstance(table, MeasuredTable)
    training = Training(table, disturbance, seed, counters)
    selector: OptimumSelector = {
        "cost": ZeusCost(0.5, world_size=table.gpus),
        "energy": Energy(),
        "slowdown": MaxSlowdownConstraint(FACTOR),
    }[kind]
    limits = training.limits_mw
    searching: Search
    if strategy == "exhaustive":
        searching = Exhaustive(limits, WARMUP_STEPS, PROFILE_STEPS)
    else:
        searching = Adaptive(
            limits,
            WARMUP_STEPS,
            PROFILE_STEPS,
            lambda curve: costs_of(selector, limits, curve),
            lambda estimates, cautious: best(selector, estimates, PROFILE_STEPS, cautious=cautious),
            table.gpus,
        )
    chosen = search(training, searching, selector)
    steps = training.steps
    at = limits.index(chosen)
    energy = [t * p for t, p in zip(training.time_s, training.power_w, strict=True)]
    costs = costs_of(selector, limits, (training.time_s, energy))
    assert costs is not None
    nothing_j = JOB_STEPS * energy[0]
    whole_j = training.true_j + (JOB_STEPS - training.steps) * energy[at]
    return Run(
        steps,
        training.time_s[at] / training.time_s[0] - 1,
        costs[at] / min(costs) - 1,
        energy[at] / energy[0] - 1,
        1 - whole_j / nothing_j,
        training.power_w[0] / table.gpus * 1000 >= REACH * limits[-1],
    )


def runs(task: tuple[str, str, str, Disturbance, int, int, bool]) -> list[Run]:
    """All seeds of one workload."""
    name, kind, strategy, disturbance, first, seeds, counters = task
    return [run(name, kind, strategy, disturbance, first + seed, counters) for seed in range(seeds)]


def share(found: list[float], beyond: float) -> str:
    """The share that is greater."""
    return f"{sum(one > beyond for one in found) / len(found):.2%}"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0, help="(tuned: after the 1,000th)")
    parser.add_argument("--workloads", default="*", help="pattern of names, such as 'profiles/*'")
    parser.add_argument("--selector", choices=["cost", "energy", "slowdown"], default="cost")
    parser.add_argument("--disturbance", choices=["every", *DISTURBANCES], default="every")
    parser.add_argument("--part", choices=["all", "tuned", "others"], default="others")
    parser.add_argument("--search", choices=["both", "adaptive"], default="both")
    parser.add_argument(
        "--counters", action="store_true", help="the driver counts the time limited by power"
    )
    parser.add_argument(
        "--worst", type=int, default=0, help="print this many of the worst workloads"
    )
    options = parser.parse_args()
    names = [
        name
        for place, name in enumerate(sorted(fnmatch.filter(catalog(), options.workloads)))
        if options.part == "all" or (options.part == "tuned") == (place % 10 == 0)
    ]
    first = options.first_seed + (1000 if options.part == "tuned" else 0)
    print(f"{len(names)} workloads x {options.seeds} seeds, {options.selector}")
    table = Table()
    for column in (
        "disturbance", "search", "steps", "at most", "slowdown > 12 %", "mean regret",
        "p95", "runs > 3 %", "within reach", "choice costs more",
        "job costs more", "by > 0.02 %", "by > 0.1 %", "saved, mean", "least",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    worst: list[tuple[float, str]] = []
    chosen = [options.disturbance] if options.disturbance != "every" else list(DISTURBANCES)
    with ProcessPoolExecutor() as pool:
        for disturbance in chosen:
            for strategy in ("exhaustive", "adaptive")[options.search == "adaptive" :]:
                tasks = [
                    (name, options.selector, strategy, DISTURBANCES[disturbance], first,
                     options.seeds, options.counters)
                    for name in names
                ]  # fmt: skip
                found = list(pool.map(runs, tasks, chunksize=4))
                every = [one for group in found for one in group]
                regrets = sorted(one.regret for one in every)
                more = [-one.saved for one in every]
                table.add_row(
                    disturbance,
                    strategy,
                    f"{statistics.mean(one.steps for one in every):.0f}",
                    f"{max(one.steps for one in every)}",
                    share([one.slowdown for one in every], FACTOR - 1 + TOLERATED),
                    f"{statistics.mean(regrets):.2%}",
                    f"{regrets[int(0.95 * len(regrets))]:.2%}",
                    share(regrets, 0.03),
                    f"{statistics.mean(one.regret for one in every if one.reached):.2%}",
                    share([one.costs_more for one in every], 0.0),
                    share(more, ROUNDING),
                    share(more, 0.0002),
                    share(more, 0.001),
                    f"{statistics.mean(one.saved for one in every):.2%}",
                    f"{min(one.saved for one in every):.2%}",
                )
                if strategy == "adaptive":
                    badness = (
                        (lambda one: one.slowdown) if options.selector == "slowdown"
                        else (lambda one: one.regret)
                    )  # fmt: skip
                    means = [statistics.mean(map(badness, group)) for group in found]
                    worst += sorted(zip(means, names, strict=True), reverse=True)[: options.worst]
    console = Console(width=200 if not sys.stdout.isatty() else None)
    console.print(table)
    for value, name in worst:
        console.print(f"  {value:.2%} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

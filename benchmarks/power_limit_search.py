"""What the search for a power limit costs and how good its choice is: adaptive, exhaustive, none.

    python benchmarks/power_limit_search.py [--seeds 20] [--workloads PATTERN] [--selector cost]

Every measured workload that is shipped with the simulated node (218 of the tables of You et al.,
NSDI 2023, and 12 recorded profiles, all from ml-energy/zeus, Apache-2.0) is trained for 5,000
steps, with steps that vary by 2 % and by 5 %. After a change of the limit, time and power follow
with a time constant of 150 ms; a window's energy is known 100 ms after its end and is off by some
millijoules per watt. What is compared: the search that a job runs (`zeus.optimizer.power_limit.
search`), with each strategy, on the same tables; the tables are the truth that regret is taken
against. Seeds are 0 to N - 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import random
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from zeus.optimizer.power_limit.estimates import Curve, Sample
from zeus.optimizer.power_limit.planner import costs_of, measurements
from zeus.optimizer.power_limit.search import Adaptive, Exhaustive, Search
from zeus.optimizer.power_limit.selectors import (
    Energy,
    MaxSlowdownConstraint,
    OptimumSelector,
    ZeusCost,
)
from zeusd.devices.simulated.workloads import MeasuredTable, catalog

JOB_STEPS = 5000
WARMUP_STEPS, PROFILE_STEPS = 10, 40
FOLLOWS_S = 0.15
TICK_S = 0.1
ENERGY_ERROR_S = 0.005  # of the mean power: what a window's two ends are uncertain by


@dataclass(frozen=True)
class Run:
    """What one search did.

    Attributes:
        steps: Training steps until the choice.
        regret: Cost of the choice over the least cost, less 1.
        extra: Energy of the search's steps over that of as many at the highest limit, less 1.
        saved: Share of the energy of 5,000 steps at the highest limit that the job saved.
    """

    steps: int
    regret: float
    extra: float
    saved: float


class Training:
    """Noisy steps of a workload, and what windows show of them."""

    def __init__(self, table: MeasuredTable, noise: float, drift: float, seed: int) -> None:
        self.limits_mw = [round(limit * 1000) for limit in reversed(table.limits_w)]
        self.time_s = list(reversed(table.unit_s))
        self.power_w = [sum(gpu) for gpu in zip(*table.power_w, strict=True)][::-1]
        self.noise = noise
        self.drift = drift
        self.random = random.Random(seed)
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
        share = math.exp(-self._time_now / FOLLOWS_S)
        self._time_now = time_s + (self._time_now - time_s) * share
        self._power_now = power_w + (self._power_now - power_w) * share
        warmer = 1 + self.drift * (1 - math.exp(-self.steps / 150))
        took_s = self._time_now * warmer * math.exp(self.random.gauss(0, self.noise))
        joules = took_s * self._power_now * warmer * math.exp(self.random.gauss(0, self.noise / 4))
        self.steps += 1
        self.now_s += took_s
        self.true_j += time_s * power_w
        return took_s, joules

    def window(self, steps: int) -> Sample:
        """Runs and measures steps."""
        begin = self.steps
        took = [self.step() for _ in range(steps)]
        error = ENERGY_ERROR_S * self.power_w[self.at]
        joules = sum(one[1] for one in took) + self.random.gauss(0, error)
        limit = self.limits_mw[self.at]
        seconds = sum(one[0] for one in took)
        return Sample(limit, steps, max(joules, 1e-6), seconds, 2 * error, begin + steps / 2)


def search(training: Training, strategy: Search, selector: OptimumSelector) -> int:
    """Runs a search to its end. Returns the index of the chosen limit."""
    late: list[tuple[float, Sample]] = []
    current = training.limits_mw[0]
    trial = strategy.next(current, 0)
    while trial is not None:
        training.set(trial.power_limit_mw)
        current = trial.power_limit_mw
        for _ in range(trial.warmup_steps):
            training.step()
        sample = training.window(trial.steps)
        strategy.ran(current, trial.steps)
        late.append((training.now_s + TICK_S, sample))
        if isinstance(strategy, Exhaustive):
            strategy.add(late.pop()[1])
        else:
            # Training goes on while the newest energy is awaited; those steps are measured too.
            while late and late[0][0] <= training.now_s:
                strategy.add(late.pop(0)[1])
        trial = strategy.next(current, training.steps)
    measured = measurements(strategy.estimates(training.steps), PROFILE_STEPS)
    return training.limits_mw.index(round(selector.select(measured) * 1000))


def run(name: str, kind: str, strategy: str, noise: float, drift: float, seed: int) -> Run:
    """One job."""
    table = catalog()[name]
    training = Training(table, noise, drift, seed)
    selector: OptimumSelector = {
        "cost": ZeusCost(0.5, world_size=table.gpus),
        "energy": Energy(),
        "slowdown": MaxSlowdownConstraint(1.1),
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
            table.gpus,
        )
    chosen = search(training, searching, selector)
    energy = [t * p for t, p in zip(training.time_s, training.power_w, strict=True)]
    costs = costs_of(selector, limits, Curve(training.time_s, energy))
    assert costs is not None
    nothing_j = JOB_STEPS * energy[0]
    whole_j = training.true_j + (JOB_STEPS - training.steps) * energy[chosen]
    return Run(
        training.steps,
        costs[chosen] / min(costs) - 1,
        training.true_j / (training.steps * energy[0]) - 1,
        1 - whole_j / nothing_j,
    )


def runs(task: tuple[str, str, str, float, float, int]) -> list[Run]:
    """All seeds of one workload."""
    name, kind, strategy, noise, drift, seeds = task
    return [run(name, kind, strategy, noise, drift, seed) for seed in range(seeds)]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--workloads", default="*", help="pattern of names, such as 'profiles/*'")
    parser.add_argument("--selector", choices=["cost", "energy", "slowdown"], default="cost")
    parser.add_argument("--drift", type=float, default=0.0, help="0.03: 3 % slower once warm")
    parser.add_argument("--worst", type=int, default=0, help="name this many worst workloads")
    options = parser.parse_args()
    names = fnmatch.filter(catalog(), options.workloads)
    table = Table(title=f"{len(names)} workloads x {options.seeds} seeds, {options.selector}")
    for column in (
        "step noise", "search", "steps", "of exhaustive", "mean regret", "p95", "worst workload",
        "worst run", "runs > 3 %", "extra energy", "saved, mean", "saved, least",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    worst: list[tuple[float, str]] = []
    with ProcessPoolExecutor() as pool:
        for noise in (0.02, 0.05):
            baseline = 0.0
            for strategy in ("exhaustive", "adaptive"):
                tasks = [
                    (name, options.selector, strategy, noise, options.drift, options.seeds)
                    for name in names
                ]
                found = list(pool.map(runs, tasks, chunksize=4))
                every = [one for group in found for one in group]
                means = [statistics.mean(one.regret for one in group) for group in found]
                steps = statistics.mean(one.steps for one in every)
                baseline = baseline or steps
                regrets = sorted(one.regret for one in every)
                table.add_row(
                    f"{noise:.0%}",
                    strategy,
                    f"{steps:.0f}",
                    f"{steps / baseline:.2f}",
                    f"{statistics.mean(regrets):.2%}",
                    f"{regrets[int(0.95 * len(regrets))]:.2%}",
                    f"{max(means):.2%}",
                    f"{regrets[-1]:.2%}",
                    f"{sum(one > 0.03 for one in regrets) / len(regrets):.2%}",
                    f"{statistics.mean(one.extra for one in every):+.1%}",
                    f"{statistics.mean(one.saved for one in every):.2%}",
                    f"{min(one.saved for one in every):.2%}",
                )
                if strategy == "adaptive":
                    worst += sorted(zip(means, names, strict=True), reverse=True)[: options.worst]
    console = Console()
    console.print(table)
    for regret, name in worst:
        console.print(f"  {regret:.2%} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

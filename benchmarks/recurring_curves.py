"""Measures the gain of stopping runs by their learning curve, and the share of false stops.

    python benchmarks/recurring_curves.py [--seeds 4] [--held-out SEED ...]

Each job is simulated twice with the same seeds, with the default policy, 30 recurrences, eta 0.5,
beta 2: once runs are stopped only by cost, once also by learning curve. A false stop is a run that
would have reached its target within its bound, and at a lower cost than a rerun.

- Measured workloads on four GPUs. The traces (You et al., NSDI 2023) say at which epoch a run
  reached each of 7 to 19 metrics; between these its curve is a straight line, with noise. They are
  not held out: that only sizes that never reached the target are stopped was decided on them.
- `--held-out`: invented jobs (`recurring_held_out.py`) with invented curves: powers and
  exponentials of random speed, some with a jump as of a lower learning rate. The probability at
  which runs are stopped was chosen on seed 1.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from recurring_held_out import BETA, ETA, KINDS, HeldOut, jobs_of
from rich.console import Console
from rich.table import Table

from zeus.job import Job
from zeus.policy import make_policy
from zeus.policy.interface import Run
from zeus.policy.recurrence import Recurrences
from zeus.policy.stopping import LearningCurve, judge
from zeus.simulate.expected import all_expected
from zeus.simulate.tables import Measurements
from zeus.simulate.workloads import GPUS, WORKLOADS, power_trace, train_trace
from zeus.utils.metric import zeus_cost
from zeus_ipc.tables import records

RECURRENCES = 30
NOISE = 0.1
"""Of a metric, in distances of one measured metric to the next."""


@dataclass(frozen=True)
class World:
    """A job as it is trained.

    Attributes:
        job: As the policy knows it.
        sizes: Its batch sizes.
        epoch_cost: Cost of an epoch by size, J.
        utilization: Mean power over the maximum, by size.
        metrics: Makes the metrics of a run, one an epoch: of a size, by a random number generator.
        best_cost: Expected cost of a recurrence with the best size, J.
        higher_is_better: Whether a larger metric is better.
    """

    job: Job
    sizes: list[int]
    epoch_cost: dict[int, float]
    utilization: dict[int, float]
    metrics: Callable[[int, np.random.Generator], np.ndarray]
    best_cost: float
    higher_is_better: bool = True


@dataclass
class Played:
    """The results of simulated jobs.

    Attributes:
        regret: Of each job over its recurrences, in costs of the best size.
        runs: Runs that were trained.
        given_up: Runs that missed their target.
        by_curve: Of these, by their learning curve.
        false: Of these, runs that should have continued.
        stuck: Jobs that could not reach their target.
    """

    regret: list[float] = field(default_factory=list)
    runs: int = 0
    given_up: int = 0
    by_curve: int = 0
    false: int = 0
    stuck: int = 0


def play(world: World, seed: int, by_curve: bool, into: Played) -> None:
    """Simulates a job."""
    policy = make_policy("gp", seed=seed)
    policy.register_job(world.job, world.sizes)
    recurrences = Recurrences(policy, world.job, BETA)
    spent, done = 0.0, 0
    try:
        while recurrences.recurrence <= RECURRENCES:
            now = recurrences.begin()
            # The run does not depend on earlier runs.
            rng = np.random.default_rng([seed, now.recurrence, now.number, now.batch_size])
            metrics = world.metrics(now.batch_size, rng)
            rerun = now.rerun_cost if by_curve else None
            run, wrong = _train(world, now.batch_size, metrics, now.cost_bound, rerun)
            into.runs += 1
            into.given_up += not run.converged
            into.by_curve += wrong is not None
            into.false += bool(wrong)
            spent += run.cost
            recurrences.end(run)
            done = recurrences.recurrence - 1
    except RuntimeError:
        into.stuck += 1
    into.regret.append(spent / world.best_cost - done)


def _train(
    world: World, size: int, metrics: np.ndarray, bound: float, rerun: float | None
) -> tuple[Run, bool | None]:
    """A run; and where it was given up by its curve, whether that was wrong."""
    job, of_epoch = world.job, world.epoch_cost[size]
    sign = 1 if world.higher_is_better else -1
    reaches = np.flatnonzero(sign * metrics >= sign * job.target_metric)
    first = int(reaches[0]) + 1 if len(reaches) else math.inf
    for epoch in range(1, job.max_epochs + 1):
        cost = epoch * of_epoch
        curve = None
        if rerun is not None:
            seen = metrics[:epoch].tolist()
            curve = LearningCurve(seen, job.target_metric, world.higher_is_better, rerun)
        verdict = judge(
            reached=epoch >= first,
            epochs=epoch,
            max_epochs=job.max_epochs,
            next_cost=cost + of_epoch,
            cost_bound=bound,
            cost=cost,
            curve=curve,
        )
        if verdict.stop:
            break
    limit = verdict.next_cost if verdict.by_curve else bound
    run = Run(
        *(size, cost, verdict.reached, epoch, 0.0),
        cost_bound=None if limit is None or math.isinf(limit) else limit,
        stopped_by_cost=verdict.by_cost,
        utilization=world.utilization[size],
    )
    if not verdict.by_curve:
        return run, None
    assert rerun is not None
    until = min(job.max_epochs, bound // of_epoch, epoch + rerun // of_epoch)
    return run, first <= until


# --- measured workloads -------------------------------------------------------------------------


@lru_cache
def crossings() -> dict[tuple[str, str, str, int], list[list[tuple[float, float]]]]:
    """Of each workload and size the metrics that each run has reached, and in which epoch."""
    runs: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for row in records(train_trace()):
        key = row["dataset"], row["network"], row["optimizer"], row["batch_size"], row["run"]
        epoch = float(row["target_epoch"] or math.nan)
        runs[key].append((float(row["target_metric"]), epoch))
    found: dict[tuple[str, str, str, int], list[list[tuple[float, float]]]] = defaultdict(list)
    for (dataset, network, optimizer, size, _), rows in sorted(runs.items()):
        found[dataset, network, optimizer, int(size)].append(rows)
    return found


def curve_through(
    rows: list[tuple[float, float]], lower: bool, epochs: int, rng: np.random.Generator
) -> np.ndarray:
    """A learning curve through the metrics that a run reached, shape (epochs,)."""
    rows = sorted((-metric if lower else metric, epoch) for metric, epoch in rows)
    step = float(np.median(np.diff([metric for metric, _ in rows])))
    at = {epoch: metric for metric, epoch in rows if not math.isnan(epoch)}
    points = sorted(at.items()) or [(float(epochs), rows[0][0] - step)]
    xs = [0.0, *(epoch for epoch, _ in points)]
    ys = [points[0][1] - step, *(metric for _, metric in points)]
    epoch = np.arange(1.0, epochs + 1)
    values = np.interp(epoch, xs, ys)
    # Beyond the last it rises by less than the next one, which it has not reached.
    beyond = np.maximum(0.0, epoch - xs[-1])
    values += 0.5 * step * -np.expm1(-beyond / max(xs[-1], 1.0))
    # Noise never exceeds the metric that the run reached.
    reached = np.isin(epoch, xs)
    noise = np.where(reached, 0.0, np.abs(rng.normal(0, NOISE * step, epochs)))
    return np.asarray((values - noise) * (-1 if lower else 1))


def measured(gpu: str, number: int) -> World:
    """A measured workload."""
    known = Measurements(train_trace(), power_trace(gpu))
    tables = known.of(WORKLOADS[number].job([1]))
    job = WORKLOADS[number].job(list(tables))
    lower = job.dataset == "librispeech"
    costs, utilization = {}, {}
    for size, table in tables.items():
        power = table.power
        costs[size], watts = min(
            (zeus_cost(float(joules), float(seconds), ETA, known.max_power), float(watts))
            for joules, seconds, watts in zip(
                power.energy_per_epoch, power.time_per_epoch, power.average_power, strict=True
            )
        )
        utilization[size] = watts / max(power.limits)

    def metrics(size: int, rng: np.random.Generator) -> np.ndarray:
        runs = crossings()[job.dataset, job.network, job.optimizer, size]
        rows = runs[int(rng.integers(len(runs)))]
        return curve_through(rows, lower, job.max_epochs, rng)

    best = min(one.cost for one in all_expected(known, job, ETA))
    return World(job, list(tables), costs, utilization, metrics, best, not lower)


# --- invented jobs ------------------------------------------------------------------------------


def invented(job: HeldOut) -> World:
    """An invented job, whose metric rises to 1, or not."""
    epoch_cost = dict(zip(job.sizes, map(float, job.epoch_cost), strict=True))
    utilization = dict(zip(job.sizes, map(float, job.utilization), strict=True))

    def metrics(size: int, rng: np.random.Generator) -> np.ndarray:
        at = job.sizes.index(size)
        reaches = rng.random() < job.reach[at]
        needed = max(1.0, round(float(job.epochs[at]) * math.exp(rng.normal(0, job.noise))))
        epoch = np.arange(1.0, job.max_epochs + 1)
        speed = math.exp(rng.uniform(-1.2, 1.2))

        if rng.random() < 0.5:
            values = -np.expm1(-speed * epoch / needed)
        else:
            values = 1 - (1 + epoch) ** -min(speed, 1.0)
        if rng.random() < 0.25:  # the learning rate is lowered
            values = values + 0.15 * (epoch > rng.uniform(0.3, 0.9) * needed)
        if reaches:
            before = epoch < needed
            values = values / values[min(int(needed), len(values)) - 1]
            noisy = values - np.abs(rng.normal(0, 0.01, len(epoch)))
            return np.asarray(np.where(before, np.minimum(noisy, 0.999), np.maximum(noisy, 1.0)))
        ceiling = rng.uniform(0.7, 0.98)
        return np.asarray(ceiling * values / values.max() - np.abs(rng.normal(0, 0.01, len(epoch))))

    best = float(job.expected.min())
    return World(job.job, list(job.sizes), epoch_cost, utilization, metrics, best)


# --- tables -------------------------------------------------------------------------------------


def table(title: str, worlds: dict[str, list[World]], seeds: int) -> Table:
    """Both ways, by kind of job."""
    found = Table(title=title)
    found.add_column("jobs")
    for head in ("R_30 by cost", "by curve", "missed by cost", "stops by curve", "false", "stuck"):
        found.add_column(head, justify="right")
    total = {True: Played(), False: Played()}
    for name, of in [*worlds.items(), ("all", [])]:
        rows = {True: Played(), False: Played()} if of else total
        for by_curve, into in rows.items():
            for world in of:
                for seed in range(seeds):
                    play(world, seed, by_curve, into)
                    total[by_curve].regret.append(into.regret[-1])
            if of:
                for what in ("runs", "given_up", "by_curve", "false", "stuck"):
                    more = getattr(total[by_curve], what) + getattr(into, what)
                    setattr(total[by_curve], what, more)
        cost, curve = rows[False], rows[True]
        found.add_row(
            name,
            f"{np.mean(cost.regret):.2f}",
            f"{np.mean(curve.regret):.2f}",
            f"{cost.given_up}/{cost.runs}",
            f"{curve.by_curve}/{curve.runs}",
            str(curve.false),
            f"{cost.stuck}, {curve.stuck}",
        )
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--held-out", type=int, action="append", metavar="SEED", default=[])
    given = parser.parse_args()
    console = Console()
    worlds = {
        one.job([1]).dataset: [measured(gpu, number) for gpu in GPUS]
        for number, one in enumerate(WORKLOADS)
    }
    console.print(table("measured workloads", worlds, given.seeds))
    if given.held_out:
        of = {kind: [] for kind in KINDS}
        for seed in given.held_out:
            for job in jobs_of(seed):
                of[job.kind].append(invented(job))
        console.print(table("invented jobs", of, 1))


if __name__ == "__main__":
    main()

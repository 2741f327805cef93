"""Who should get the watts? Mean relative progress per busy GPU, by policy, cluster and budget.

    python benchmarks/fleet.py                   the table, of 12 mixes each
    python benchmarks/fleet.py --mixes 2         quickly
    python benchmarks/fleet.py --dynamic         jobs that come and go, by the policies' period

512 GPUs, 85 % of them busy, jobs of 1 to 32 GPUs, at random from measured tables (zeus_nsdi23).
Idle GPUs are charged their minimum limit. In parentheses: the job with the least progress.
Computed, not measured on a cluster.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeus_fleet import policies
from zeus_fleet.policies import POLICIES, JobGroup, water_filling
from zeus_fleet.simulation import (
    BUSY,
    CLUSTERS,
    GPUS,
    SIZES,
    MeasuredRun,
    Mix,
    compare,
    drawn,
    of_jobs,
    tables,
)

STEP_MW = 25_000


def exact(mix: Mix, total_mw: int) -> list[int]:
    """The best limits in steps of 25 W, by dynamic programming."""
    *jobs, idle = mix.jobs
    least = sum(job.gpus * job.low_mw for job in mix.jobs)
    steps = (total_mw - least) // STEP_MW
    best = np.zeros(steps + 1)
    chosen = []
    for job, run in zip(jobs, mix.measured, strict=True):
        gained = np.full(steps + 1, -np.inf)
        choice = np.zeros(steps + 1, int)
        for level in range((job.high_mw - job.low_mw) // STEP_MW + 1):
            cost = level * job.gpus
            if cost > steps:
                break
            gain = job.gpus * run.profile.at(job.low_mw + level * STEP_MW)
            here = np.full(steps + 1, -np.inf)
            here[cost:] = best[: steps + 1 - cost] + gain
            choice[here > gained] = level
            gained = np.maximum(gained, here)
        chosen.append(choice)
        best = gained
    left, limits = int(best.argmax()), []
    for job, choice in zip(reversed(jobs), reversed(chosen), strict=True):
        level = int(choice[left])
        limits.append(job.low_mw + level * STEP_MW)
        left -= level * job.gpus
    return [*reversed(limits), idle.low_mw]


def follow_demand(mix: Mix, total_mw: int, margin: float) -> list[int]:
    """Limits that follow the average power drawn, as in Slurm and EAR.

    A job that draws nearly its limit gets the maximum as its demand; another one its power plus a
    margin.
    """
    jobs, idle = mix.jobs[:-1], mix.jobs[-1]
    counts = [job.gpus for job in jobs]
    lows, highs = [job.low_mw for job in jobs], [job.high_mw for job in jobs]
    total = total_mw - idle.gpus * idle.low_mw
    limits = policies.level(total, lows, highs, counts)
    for _ in range(60):
        wanted = []
        for job, run, limit in zip(jobs, mix.measured, limits, strict=True):
            draw = 1000 * run.drawn_w(limit)
            want = job.high_mw if draw > 0.95 * limit else int(draw * (1 + margin))
            wanted.append(min(max(job.low_mw, want), job.high_mw))
        new = policies.level(total, lows, wanted, counts)
        new = policies.level(total, new, highs, counts)
        limits = [(old + now) // 2 for old, now in zip(limits, new, strict=True)]
    return [*limits, idle.low_mw]


STATIC = {
    "uniform": of_jobs(POLICIES["uniform"]),
    "busy": of_jobs(POLICIES["busy"]),
    "demand +10 %": functools.partial(follow_demand, margin=0.10),
    "demand +25 %": functools.partial(follow_demand, margin=0.25),
    "max-min": of_jobs(POLICIES["max-min"]),
    "water-filling": of_jobs(water_filling),
    "no floor": of_jobs(functools.partial(water_filling, floor=0.0)),
    "exact": exact,
}
DYNAMIC = {
    "uniform": (10,),
    "busy": (10,),
    "demand +25 %": (10,),
    "max-min": (10,),
    "water-filling": (5, 10, 30, 60, 120, 300),
}
"""Policies and their periods, s."""


def play(
    cluster: str,
    share: float,
    policy: Callable[[Mix, int], list[int]],
    *,
    period_s: int,
    seed: int,
    seconds: int = 3600,
    mean_job_s: float = 600.0,
) -> float:
    """Mean progress per busy GPU while jobs start and end, and a policy plans periodically.

    GPUs are lowered within 2 s and raised after 3 s; a new job starts at the minimum limit.

    Args:
        cluster: One of `CLUSTERS`.
        share: The budget, as a share of the sum of the maximum limits.
        policy: The policy.
        period_s: Period of planning.
        seed: Random seed of the jobs.
        seconds: Duration.
        mean_job_s: Mean length of a job, exponentially distributed.
    """
    runs, generator = tables(cluster), random.Random(seed)
    low, high = runs[0].profile.limits_mw[0], runs[0].profile.limits_mw[-1]
    mean_idle_s = mean_job_s * (1 - BUSY) / BUSY
    slots: list[_Slot] = []
    while left := GPUS - sum(slot.gpus for slot in slots):
        slots.append(_Slot(min(left, generator.choice(SIZES)), low, low, low))
    for slot in slots:
        slot.run = drawn(runs, generator) if generator.random() < BUSY else None
        slot.until = generator.expovariate(1 / (mean_job_s if slot.run else mean_idle_s))
    total = int(share * GPUS * high)
    gained = busy = 0.0
    for second in range(seconds):
        for slot in slots:
            if second >= slot.until:
                slot.run = drawn(runs, generator) if slot.run is None else None
                slot.until += generator.expovariate(1 / (mean_job_s if slot.run else mean_idle_s))
        if second % period_s == 0:
            working = [slot for slot in slots if slot.run is not None]
            jobs = [
                JobGroup(slot.gpus, low, high, profile=slot.run.profile)
                for slot in working
                if slot.run
            ]
            idle = JobGroup(GPUS - sum(job.gpus for job in jobs), low, high, busy=False)
            now = Mix((*jobs, idle), tuple(slot.run for slot in working if slot.run))
            limits = policy(now, total)
            for slot in slots:
                slot.before, slot.limit, slot.planned = slot.in_force(second), limits[-1], second
            for slot, limit in zip(working, limits, strict=False):
                slot.limit = limit
        for slot in slots:
            if slot.run is not None:
                gained += slot.gpus * slot.run.profile.at(slot.in_force(second))
                busy += slot.gpus
    return gained / busy


@dataclass
class _Slot:
    """GPUs that run one job after another."""

    gpus: int
    low_mw: int
    limit: int
    before: int
    planned: int = 0
    run: MeasuredRun | None = None
    until: float = 0.0

    def in_force(self, second: int) -> int:
        """The limit, mW: a plan takes effect some seconds later."""
        delay = 2 if self.limit < self.before else 3
        return self.limit if second >= self.planned + delay else self.before


def dynamic(seeds: range) -> None:
    """Prints the gain of each policy and period, where jobs of ten minutes come and go."""
    shares = (0.5, 0.6, 0.7)
    print("| A40, period | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    print("|---|" + "--:|" * len(shares))
    for name, periods in DYNAMIC.items():
        for period_s in periods:
            cells = []
            for share in shares:
                played = [
                    play("a40", share, STATIC[name], period_s=period_s, seed=seed) for seed in seeds
                ]
                cells.append(f"{sum(played) / len(played):.3f}")
            print(f"| {name}, {period_s} s | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", type=int, default=12)
    parser.add_argument("--first-seed", type=int, default=7000)
    parser.add_argument("--known", type=float, default=1.0, help="share of jobs with a profile")
    parser.add_argument("--dynamic", action="store_true", help="jobs come and go")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.mixes)
    if options.dynamic:
        dynamic(seeds)
        return
    print("| cluster, budget | " + " | ".join(STATIC) + " | drawn |")
    print("|---|" + "--:|" * (len(STATIC) + 1))
    for cluster in CLUSTERS:
        found = compare(cluster, (0.5, 0.6, 0.7, 0.8, 0.9), seeds, STATIC, options.known)
        for share, results in found.items():
            cells = [f"{one.progress:.3f} ({one.worst:.2f})" for one in results.values()]
            draw = f"{results['water-filling'].drawn:.2f}"
            print(f"| {cluster} {share:.0%} | " + " | ".join([*cells, draw]) + " |", flush=True)


if __name__ == "__main__":
    main()

"""Computes the benefit of policies from measured tables: jobs on one kind of GPU, under a budget.
Pure.

Results are computed, not measured on a cluster: each GPU's power and progress come from the table
of its job's network.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from zeus_fleet.policies import JobGroup, JobPolicy
from zeus_fleet.profiles import ProgressProfile, interpolated, monotone
from zeusd.devices.simulated.workloads import measured_rows

CLUSTERS: dict[str, str] = {
    "a40": "A40, all networks",
    "a40-sensitive": "A40, networks that lose over 45 % at 100 W",
    "v100": "V100, all networks",
    "v100-sensitive": "V100, networks that lose over 45 % at 100 W",
}
"""By name."""

GPUS = 512
BUSY = 0.85
SERVING = 0.9
SIZES = (1, 1, 1, 2, 4, 8, 8, 16, 32)
"""Numbers of GPUs of a job, with equal probability."""


@dataclass(frozen=True)
class MeasuredRun:
    """A training run that was measured under each limit.

    Attributes:
        network: Name of the network.
        profile: Its progress.
        draw_w: Average power of one GPU by limit.
    """

    network: str
    profile: ProgressProfile
    draw_w: tuple[float, ...]

    def drawn_w(self, limit_mw: float) -> float:
        """Average power of one GPU under a limit."""
        return interpolated(self.profile.limits_mw, self.draw_w, limit_mw)


@dataclass(frozen=True)
class Mix:
    """Jobs that share a cluster, and their measurements.

    Attributes:
        jobs: The jobs; the last one stands for the idle GPUs.
        measured: The measured run of each but the last.
    """

    jobs: tuple[JobGroup, ...]
    measured: tuple[MeasuredRun, ...]


@dataclass(frozen=True)
class PolicyResult:
    """The result of one policy.

    Attributes:
        progress: Mean progress per busy GPU, relative to no limit.
        worst: The lowest progress of any job.
        drawn: Power drawn by busy GPUs and assigned to idle ones, as a share of the budget.
        squeezed: Share of GPUs with a latency objective whose limit is below what it needs.
    """

    progress: float
    worst: float
    drawn: float
    squeezed: float = 0.0


def tables(cluster: str) -> list[MeasuredRun]:
    """The measured runs of a cluster.

    Raises:
        ValueError: The cluster does not exist.
    """
    if cluster not in CLUSTERS:
        raise ValueError(f"there is no cluster {cluster!r}; choose one of {', '.join(CLUSTERS)}")
    gpu, _, sensitive = cluster.partition("-")
    runs: dict[str, dict[int, tuple[float, float]]] = {}
    for row in measured_rows(f"summary_power_{gpu}"):
        key = "/".join(row[name] for name in ("network", "dataset", "batch_size", "optimizer"))
        measured = float(row["time_per_epoch"]), float(row["average_power"])
        runs.setdefault(key, {})[int(row["power_limit"]) * 1000] = measured
    limits = max((sorted(run) for run in runs.values()), key=len)
    measured_runs = []
    for key, run in sorted(runs.items()):
        if sorted(run) == limits:
            profile = ProgressProfile.measured({limit: run[limit][0] for limit in limits})
            if not sensitive or profile.progress[0] < 0.55:
                draw = tuple(monotone(run[limit][1] for limit in limits))
                measured_runs.append(MeasuredRun(key.partition("/")[0], profile, draw))
    return measured_runs


def mix(runs: Sequence[MeasuredRun], seed: int, known: float = 1.0, latency: float = 0.0) -> Mix:
    """Random jobs on 512 GPUs, 85 % of them busy.

    Args:
        runs: The runs to choose from, by network.
        seed: Random seed.
        known: Share of the jobs whose profile is known.
        latency: Share of the jobs with a latency objective: they need the limit at which their
            network has `SERVING` of its progress.
    """
    generator, serving = random.Random(seed), random.Random(~seed)
    low, high = runs[0].profile.limits_mw[0], runs[0].profile.limits_mw[-1]
    left = int(GPUS * BUSY)
    jobs, measured = [], []
    while left:
        gpus = min(left, generator.choice(SIZES))
        run = drawn(runs, generator)
        profile = run.profile if generator.random() < known else None
        needs = run.profile.limit_for(SERVING) if serving.random() < latency else None
        jobs.append(JobGroup(gpus, low, high, profile=profile, needs_mw=needs))
        measured.append(run)
        left -= gpus
    idle = JobGroup(GPUS - int(GPUS * BUSY), low, high, busy=False)
    return Mix((*jobs, idle), tuple(measured))


def drawn(runs: Sequence[MeasuredRun], generator: random.Random) -> MeasuredRun:
    """A random run of a random network."""
    network = generator.choice(sorted({run.network for run in runs}))
    return generator.choice([run for run in runs if run.network == network])


def full_mw(mix: Mix) -> int:
    """The sum of the maximum limits of all GPUs."""
    return sum(job.gpus * job.high_mw for job in mix.jobs)


def evaluate(mix: Mix, limits_mw: Sequence[int], total_mw: int) -> PolicyResult:
    """The result of limits.

    Raises:
        ValueError: They are above the budget.
    """
    held = sum(job.gpus * limit for job, limit in zip(mix.jobs, limits_mw, strict=True))
    least = sum(job.gpus * job.low_mw for job in mix.jobs)
    if held > max(total_mw, least):
        raise ValueError(f"limits of {held / 1000:g} W exceed the {total_mw / 1000:g} W of budget")
    rows = [*zip(mix.jobs, mix.measured, limits_mw, strict=False)]
    busy = sum(job.gpus for job, _, _ in rows)
    progress = [(job.gpus, run.profile.at(limit)) for job, run, limit in rows]
    draw = sum(job.gpus * run.drawn_w(limit) for job, run, limit in rows)
    draw += mix.jobs[-1].gpus * limits_mw[-1] / 1000
    bound = [(job, limit) for job, _, limit in rows if job.needs_mw is not None]
    below = sum(job.gpus for job, limit in bound if limit < (job.needs_mw or 0))
    return PolicyResult(
        sum(gpus * value for gpus, value in progress) / busy,
        min(value for _, value in progress),
        draw * 1000 / total_mw,
        below / max(1, sum(job.gpus for job, _ in bound)),
    )


def compare(
    cluster: str,
    shares: Iterable[float],
    seeds: Iterable[int],
    policies: Mapping[str, Callable[[Mix, int], list[int]]],
    known: float = 1.0,
    latency: float = 0.0,
) -> dict[float, dict[str, PolicyResult]]:
    """Mean results of all mixes, by budget (as a share of the sum of maxima) and policy.

    Args:
        cluster: One of `CLUSTERS`.
        shares: Budgets.
        seeds: Random seeds of the mixes.
        policies: `policy(mix, total_mw)` by name.
        known: Share of the jobs whose profile is known.
        latency: Share of the jobs with a latency objective.
    """
    runs = tables(cluster)
    mixes = [mix(runs, seed, known, latency) for seed in seeds]
    by_share: dict[float, dict[str, PolicyResult]] = {}
    for share in shares:
        by_share[share] = {}
        for name, policy in policies.items():
            results = []
            for mixture in mixes:
                total = int(share * full_mw(mixture))
                results.append(evaluate(mixture, policy(mixture, total), total))
            by_share[share][name] = PolicyResult(
                sum(result.progress for result in results) / len(results),
                sum(result.worst for result in results) / len(results),
                sum(result.drawn for result in results) / len(results),
                sum(result.squeezed for result in results) / len(results),
            )
    return by_share


def blind(policy: JobPolicy) -> Callable[[Mix, int], list[int]]:
    """For comparison: a policy that ignores latency objectives."""
    return lambda mix, total_mw: policy([replace(job, needs_mw=None) for job in mix.jobs], total_mw)


def of_jobs(policy: JobPolicy) -> Callable[[Mix, int], list[int]]:
    """Adapts a policy of jobs for `compare`."""
    return lambda mix, total_mw: policy(mix.jobs, total_mw)

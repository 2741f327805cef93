"""Simulated runs as text: what was chosen, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from zeus.simulate.results import RunRow, Series, series
from zeus_ipc.text import count

_energy: Callable[[RunRow], float] = attrgetter("energy")
_time: Callable[[RunRow], float] = attrgetter("time")
_cost: Callable[[RunRow], float] = attrgetter("cost")


def tables(rows: Iterable[RunRow]) -> str:
    """Returns a table for each policy, GPU and pair of knobs. For one workload, it has a row for
    each batch size, else one for each workload.
    """
    found: dict[tuple[object, ...], list[Series]] = {}
    for job in series(rows):
        row = job.runs[0]
        found.setdefault((row.policy, row.gpu, row.eta_knob, row.beta_knob), []).append(job)
    return "\n\n".join(_table(jobs) for jobs in found.values())


def _table(jobs: Sequence[Series]) -> str:
    first = jobs[0].runs[0]
    datasets = list(dict.fromkeys(job.runs[0].dataset for job in jobs))
    what = f"{first.dataset}, {first.network}, {first.optimizer}" if len(datasets) == 1 else ""
    heading = (
        f"{first.policy}: {what or f'{len(datasets)} workloads'} on {first.gpu}, "
        f"{count(len(jobs), 'job')}, {count(sum(len(job.costs) for job in jobs), 'recurrence')}, "
        f"eta {first.eta_knob:g}, beta {first.beta_knob:g}"
    )
    lines = _by_dataset(jobs, datasets) if len(datasets) > 1 else _by_batch_size(jobs)
    return "\n".join([heading, *lines, *_sentences(jobs)])


def _by_batch_size(jobs: Sequence[Series]) -> list[str]:
    runs = [row for job in jobs for row in job.runs]
    last = [row for job in jobs for row in job.runs[-_LAST:]]
    lines = [
        f"{'batch size':>10} {'limit (W)':>10} {'runs':>6} {'of the last':>12} {'failed':>7} "
        f"{'energy (J)':>14} {'time (s)':>12} {'cost (J)':>14}"
    ]
    for size in sorted({row.batch_size for row in runs}):
        some = [row for row in runs if row.batch_size == size]
        limits = sorted({row.power_limit for row in some if row.power_limit is not None})
        lately = sum(row.batch_size == size for row in last) / len(last)
        lines.append(
            f"{size:>10} {'/'.join(map(str, limits)):>10} {len(some):>6} {lately:>12.0%} "
            f"{sum(not row.reached for row in some):>7} {_mean(some, _energy):>14.1f} "
            f"{_mean(some, _time):>12.2f} {_mean(some, _cost):>14.1f}"
        )
    return [
        *lines,
        f"Energy, time and cost are means of a run; the last are the {_LAST} last of each job.",
    ]


_LAST = 10


def _by_dataset(jobs: Sequence[Series], datasets: Sequence[str]) -> list[str]:
    lines = [
        f"{'':<14} {'jobs':>5} {'recurrences':>12} {'failed':>7} {'batch size':>11} "
        f"{'energy (J)':>11} {'time (s)':>11} {'cost (J)':>11} "
        f"{'energy':>8} {'time':>8} {'cost':>8}"
    ]
    for name in (*datasets, ""):
        some = [job for job in jobs if not name or job.runs[0].dataset == name]
        runs = [row for job in some for row in job.runs]
        sizes = [row.batch_size for job in some for row in job.runs[-_LAST:]]
        often = max(sorted(set(sizes)), key=sizes.count) if name else ""
        totals = [f"{sum(map(of, runs)):>11.4g}" for of in (_energy, _time, _cost)]
        changes = [f"{change:>+8.1%}" for change in _against_default(some)]
        lines.append(
            f"{name or 'all':<14} {len(some):>5} {sum(len(job.costs) for job in some):>12} "
            f"{sum(not row.reached for row in runs):>7} {often:>11} {' '.join(totals + changes)}"
        )
    return [
        *lines,
        f"Batch size: the most frequent of each job's last {_LAST} runs. On the right: against the "
        "default batch size.",
    ]


def _sentences(jobs: Sequence[Series]) -> list[str]:
    energy, time, cost = _against_default(jobs)
    regret = sum(job.regrets[-1] for job in jobs) / len(jobs)
    return [
        f"Against the default batch size at the highest power limit: {energy:+.1%} energy, "
        f"{time:+.1%} time, {cost:+.1%} cost.",
        f"Against the best batch size from the start: {regret:+.2f} recurrences' cost a job, on "
        "average (regret).",
    ]


def _against_default(jobs: Sequence[Series]) -> tuple[float, float, float]:
    """Returns the change of energy, time and cost relative to the default batch size."""
    runs = [row for job in jobs for row in job.runs]
    usual = [row for row in runs if row.reached]
    return (
        sum(map(_energy, runs)) / sum(row.default_energy for row in usual) - 1,
        sum(map(_time, runs)) / sum(row.default_time for row in usual) - 1,
        sum(map(_cost, runs)) / sum(row.default_cost for row in usual) - 1,
    )


def _mean(rows: Sequence[RunRow], of: Callable[[RunRow], float]) -> float:
    return sum(map(of, rows)) / len(rows)

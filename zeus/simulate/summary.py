"""Simulated runs as text: what was chosen, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from zeus.simulate.results import RunRow, Series, series
from zeus_common.text import count, percent, table

_AMOUNTS = (attrgetter("energy"), attrgetter("time"), attrgetter("cost"))
_DEFAULTS = (
    attrgetter("default_energy"),
    attrgetter("default_time"),
    attrgetter("default_cost"),
)
_UNITS = ("energy (J)", "time (s)", "cost (J)")
_LAST = 10


def tables(rows: Iterable[RunRow]) -> str:
    """Returns a table for each policy, GPU and pair of knobs. For one workload, it has a row for
    each batch size, else one for each workload.
    """
    by_job: dict[tuple[object, ...], list[Series]] = {}
    for job in series(rows):
        row = job.runs[0]
        by_job.setdefault((row.policy, row.gpu, row.eta_knob, row.beta_knob), []).append(job)
    return "\n\n".join(_table(jobs) for jobs in by_job.values())


def _table(jobs: Sequence[Series]) -> str:
    first = jobs[0].runs[0]
    datasets = list(dict.fromkeys(job.runs[0].dataset for job in jobs))
    what = f"{first.dataset}, {first.network}, {first.optimizer}" if len(datasets) == 1 else ""
    heading = (
        f"{first.policy}: {what or f'{len(datasets)} workloads'} on {first.gpu}, "
        f"{count(len(jobs), 'job')}, {count(sum(len(job.costs) for job in jobs), 'recurrence')}, "
        f"eta {first.eta_knob:g}, beta {first.beta_knob:g}"
    )
    shown = _by_dataset(jobs, datasets) if len(datasets) > 1 else _by_batch_size(jobs)
    return "\n".join([heading, shown, *_sentences(jobs)])


def _by_batch_size(jobs: Sequence[Series]) -> str:
    runs = [row for job in jobs for row in job.runs]
    last = [row for job in jobs for row in job.runs[-_LAST:]]
    head = ("batch size", "limit (W)", "runs", "of the last", "failed", *_UNITS)
    rows = []
    for size in sorted({row.batch_size for row in runs}):
        some = [row for row in runs if row.batch_size == size]
        limits = sorted({row.power_limit for row in some if row.power_limit is not None})
        lately = percent(sum(row.batch_size == size for row in last) / len(last), ".0")
        means = (
            f"{sum(map(of, some)) / len(some):.{digits}f}"
            for of, digits in zip(_AMOUNTS, (1, 2, 1), strict=True)
        )
        failed = sum(not row.reached for row in some)
        rows.append((size, "/".join(map(str, limits)), len(some), lately, failed, *means))
    note = f"Energy, time and cost are means of a run; the last are the {_LAST} last of each job."
    return f"{table(head, rows, left=0)}\n{note}"


def _by_dataset(jobs: Sequence[Series], datasets: Sequence[str]) -> str:
    changes = ("energy", "time", "cost")
    head = ("", "jobs", "recurrences", "failed", "batch size", *_UNITS, *changes)
    rows = []
    for name in (*datasets, ""):
        some = [job for job in jobs if not name or job.runs[0].dataset == name]
        runs = [row for job in some for row in job.runs]
        sizes = [row.batch_size for job in some for row in job.runs[-_LAST:]]
        often = max(sorted(set(sizes)), key=sizes.count) if name else ""
        failed = sum(not row.reached for row in runs)
        counts = (len(some), sum(len(job.costs) for job in some), failed, often)
        totals = (f"{sum(map(of, runs)):.4g}" for of in _AMOUNTS)
        saved = (percent(change, "+.1") for change in _against_default(some))
        rows.append((name or "all", *counts, *totals, *saved))
    return (
        f"{table(head, rows, left=1)}\nBatch size: the most frequent of each job's last {_LAST} "
        "runs. On the right: against the default batch size."
    )


def _sentences(jobs: Sequence[Series]) -> list[str]:
    energy, time, cost = (percent(change, "+.1") for change in _against_default(jobs))
    regret = sum(job.regrets[-1] for job in jobs) / len(jobs)
    return [
        f"Against the default batch size at the highest power limit: {energy} energy, "
        f"{time} time, {cost} cost.",
        f"Against the best batch size from the start: {regret:+.2f} recurrences' cost a job, on "
        "average (regret).",
    ]


def _against_default(jobs: Sequence[Series]) -> list[float]:
    """Returns the change of energy, time and cost relative to the default batch size."""
    runs = [row for job in jobs for row in job.runs]
    usual = [row for row in runs if row.reached]
    pairs = zip(_AMOUNTS, _DEFAULTS, strict=True)
    return [sum(map(ours, runs)) / sum(map(default, usual)) - 1 for ours, default in pairs]

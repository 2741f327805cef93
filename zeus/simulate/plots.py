"""Plots of simulated jobs. Needs matplotlib: pip install 'zeusd[plot]'."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from zeus.simulate.results import RunRow, Series, series
from zeus.utils.lazy import needed

KINDS = ("cost", "regret", "batch-size")
"""What can be drawn: cost of each recurrence, cumulative regret, batch sizes over time."""

FORMATS = ("png", "svg", "pdf")

_COLOURS = ("#4c72b0", "#dd8452", "#2a9d4a", "#c44e52", "#8172b3", "#937860", "#64b5cd")
_TELLING = ("policy", "gpu", "eta_knob", "beta_knob")
_IN_A_ROW = 3
_MUCH = 20
"""If the highest cost exceeds the lowest by this factor, use a logarithmic axis."""


def draw(
    rows: Iterable[RunRow], path: str | os.PathLike[str], kinds: Sequence[str] = KINDS
) -> None:
    """Draws simulated runs into one file.

    Jobs that differ in policy, GPU or knobs get different colors. For several jobs of one color,
    draws the mean and the range of the middle 80 %. Batch sizes are drawn for each data set, run by
    run; a cross is a run that did not reach the target.

    Args:
        path: Its extension selects the format: `.png`, `.svg` or `.pdf`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is nothing to draw, or the extension or a kind is unknown.
        OSError: The file cannot be written.
    """
    target = Path(path)
    ending = target.suffix.removeprefix(".")
    if ending not in FORMATS:
        raise ValueError(f"{target} must end with .{', .'.join(FORMATS)}: that says what to draw")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} cannot be drawn; there are {', '.join(KINDS)}")
    jobs = series(rows)
    if not jobs or not kinds:
        raise ValueError("there is nothing to draw: no run was simulated")
    curves = by_label(jobs)
    datasets = list(dict.fromkeys(job.runs[0].dataset for job in jobs))
    figure, above, below = _layout(
        [kind for kind in kinds if kind != "batch-size"],
        len(datasets) if "batch-size" in kinds else 0,
    )
    for kind, axes in above.items():
        (_draw_costs if kind == "cost" else _draw_regrets)(axes, curves)
    for axes, dataset in zip(below, datasets, strict=False):
        _draw_batch_sizes(axes, curves, dataset)
    first = next(iter((*above.values(), *below)))
    if len(curves) > 1 or "cost" in above:
        first.legend(frameon=False, fontsize=8)
    figure.suptitle(_title(jobs), fontsize=10)
    # Without the time of day: the same runs give the same file.
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(ending)
    figure.savefig(target, dpi=130, metadata=metadata)


def by_label(jobs: Iterable[Series]) -> dict[str, list[Series]]:
    """Groups jobs by label: those of policy, GPU and knobs that differ."""
    all_jobs = list(jobs)
    firsts = [job.runs[0] for job in all_jobs]
    telling = [name for name in _TELLING if len({getattr(row, name) for row in firsts}) > 1]
    by_words: dict[str, list[Series]] = {}
    for job, row in zip(all_jobs, firsts, strict=True):
        words = [_word(name, getattr(row, name)) for name in telling or ("policy",)]
        by_words.setdefault(", ".join(words), []).append(job)
    return by_words


def _word(name: str, value: object) -> str:
    if name.endswith("_knob"):
        return f"{name.removesuffix('_knob')} {value:g}"
    return str(value)


def _draw_costs(axes: Any, curves: dict[str, list[Series]]) -> None:
    jobs = [job for group in curves.values() for job in group]
    # Joules if all have the same optimum; otherwise only the ratio to the best can be compared.
    alike = len({(job.runs[0].default_cost, best) for job in jobs for best in job.best_costs}) == 1
    for (label, group), colour in zip(curves.items(), _colours(), strict=False):
        values = [[*job.costs] if alike else job.relative_costs for job in group]
        _curve(axes, label, colour, values, dots=True)
    best = jobs[0].best_costs[0] if alike else 1.0
    levels = [(best, "the best batch size", "--")]
    if alike:
        usual = jobs[0].runs[0].default_cost
        levels.append((usual, "the default at the highest power limit", ":"))
    for y, text, style in levels:
        axes.axhline(y, color="0.3", linewidth=0.9, linestyle=style, label=text)
    if axes.get_ylim()[1] > _MUCH * best:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("cost of a recurrence (J)" if alike else "cost of a recurrence / the best's")
    axes.set_xlabel("recurrence")


def _draw_regrets(axes: Any, curves: dict[str, list[Series]]) -> None:
    for (label, jobs), colour in zip(curves.items(), _colours(), strict=False):
        longest = max(len(job.costs) for job in jobs)
        # A job that has ended keeps its regret, so that it stays in the mean.
        values = [[*job.regrets, *[job.regrets[-1]] * (longest - len(job.costs))] for job in jobs]
        _curve(axes, label, colour, values, dots=False)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_ylabel("cumulative regret / the best's cost")
    axes.set_xlabel("recurrence")


def _draw_batch_sizes(axes: Any, curves: dict[str, list[Series]], dataset: str) -> None:
    sizes: set[int] = set()
    for place, ((label, jobs), colour) in enumerate(zip(curves.items(), _colours(), strict=False)):
        runs = [row for job in jobs if job.runs[0].dataset == dataset for row in job.runs]
        several = sum(job.runs[0].dataset == dataset for job in jobs)
        sizes.update(row.batch_size for row in runs)
        # Side by side, so that one policy does not hide another.
        shift = 2 ** (0.12 * (place - (len(curves) - 1) / 2))
        alpha = max(0.15, 0.9 / math.sqrt(max(1, several)))
        for reached, marker in ((True, "o"), (False, "x")):
            some = [row for row in runs if row.reached is reached]
            axes.scatter(
                [row.run for row in some],
                [row.batch_size * shift for row in some],
                s=12 if reached else 26,
                marker=marker,
                color=colour,
                alpha=alpha if reached else min(1.0, 2 * alpha),
                linewidths=0 if reached else 1.2,
                label=label if reached else None,
            )
    axes.set_yscale("log", base=2)
    axes.set_yticks(_ticks(sorted(sizes)), minor=False)
    axes.set_yticklabels([str(size) for size in _ticks(sorted(sizes))])
    axes.set_yticks([], minor=True)
    axes.set_ylabel("batch size")
    axes.set_xlabel("run")
    axes.set_title(dataset, fontsize=9, loc="left")
    axes.grid(alpha=0.25)


def _curve(axes: Any, label: str, colour: str, values: list[list[float]], dots: bool) -> None:
    """The values of one job, or mean and middle of several at each recurrence."""
    longest = max(len(one) for one in values)
    x = range(1, longest + 1)
    if len(values) == 1:
        style = {"marker": ".", "markersize": 4, "linewidth": 0.6} if dots else {"linewidth": 1.4}
        axes.plot(x, values[0], color=colour, label=label, **style)
    else:
        at = [[one[place] for one in values if place < len(one)] for place in range(longest)]
        axes.plot(x, [mean(some) for some in at], color=colour, linewidth=1.4, label=label)
        tenths = [quantiles(some, n=10) if len(some) > 1 else some * 9 for some in at]
        middle = ([one[0] for one in tenths], [one[8] for one in tenths])
        axes.fill_between(x, *middle, color=colour, alpha=0.15, linewidth=0)
    axes.grid(alpha=0.25)


def _ticks(sizes: list[int]) -> list[int]:
    """Selects sizes that are far enough apart for their labels."""
    kept: list[int] = []
    for size in sizes:
        if not kept or math.log2(size / kept[-1]) >= max(0.4, math.log2(sizes[-1] / sizes[0]) / 12):
            kept.append(size)
    return kept


def _title(jobs: Sequence[Series]) -> str:
    rows = [job.runs[0] for job in jobs]
    parts = []
    for names in (("dataset", "network"), ("gpu",), ("eta_knob",), ("beta_knob",)):
        values = {tuple(getattr(row, name) for name in names) for row in rows}
        if len(values) == 1:
            texts = zip(names, values.pop(), strict=True)
            parts.append(" ".join(_word(name, value) for name, value in texts))
    count = sum(len(job.costs) for job in jobs)
    parts.append(f"{len(jobs)} job{'s' * (len(jobs) > 1)}, {count} recurrences")
    return ", ".join(parts)


def _colours() -> Iterable[str]:
    while True:
        yield from _COLOURS


def _layout(above: list[str], below: int) -> tuple[Any, dict[str, Any], list[Any]]:
    """Creates a figure with axes side by side, and more rows below."""
    figures = needed("matplotlib.figure", "a picture", "plot")
    across = min(below, _IN_A_ROW)
    down = math.ceil(below / _IN_A_ROW)
    heights = [3.6] * bool(above) + [2.6 if down > 1 else 3.0] * down
    figure = figures.Figure(figsize=(10, sum(heights) + 0.3), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    first: dict[str, Any] = {}
    if above:
        row = grid[0].subgridspec(1, len(above))
        first = {kind: figure.add_subplot(row[place]) for place, kind in enumerate(above)}
    lower = [grid[bool(above) + number].subgridspec(1, across) for number in range(down)]
    second = [
        figure.add_subplot(lower[place // _IN_A_ROW][place % _IN_A_ROW]) for place in range(below)
    ]
    return figure, first, second

"""Plots of power, limits and clocks over time, and of energy and time per power limit."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from zeus_common.atomic import replacing
from zeusctl.entities import UsedEnergy
from zeusctl.exits import CommandError
from zeusctl.usage import Scale, by_day

Line = list[tuple[float, float]]
"""Times, seconds since 1970, and values."""

_COLORS = ("#3366cc", "#dc7633", "#2e8b57", "#a23b72", "#7f6a3a", "#4aa3a2", "#8064a2", "#666666")
_GAP, _SHORT_S = 5, 1.0
_HEIGHT, _WIDTH = 2.4, 9.0


@dataclass(frozen=True, slots=True)
class Track:
    """One GPU's time series: power and limit in watts, clocks in MHz."""

    name: str
    power_w: Line = field(default_factory=list)
    power_limit_w: Line = field(default_factory=list)
    gpu_clock_mhz: Line = field(default_factory=list)
    memory_clock_mhz: Line = field(default_factory=list)


ENDINGS = (".png", ".svg", ".pdf")

DEBIAN_HOME = "/usr/lib/zeusd"
"""Where the Debian package installs zeusctl."""


def check_available(path: Path | None = None, name: str = "") -> None:
    """Imports matplotlib, and checks the file's ending.

    Args:
        path: The file to draw to; None: any.
        name: Of its option.

    Raises:
        BadParameter: It is no kind of file that can be drawn.
        CommandError: matplotlib is missing.
    """
    if path is not None and path.suffix not in ENDINGS:
        endings = ", ".join(ENDINGS)
        raise click.BadParameter(f"name a file that ends in {endings}", param_hint=name)
    try:
        import matplotlib
    except ImportError:
        raise CommandError(
            f"drawing needs matplotlib, which is not installed; {_installs_matplotlib()}"
        ) from None
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "zeusctl"  # the same plot gives the same bytes


def _installs_matplotlib() -> str:
    """Returns the command that installs matplotlib for this zeusctl."""
    if sys.prefix == DEBIAN_HOME:  # Debian's Python runs it, and sees only Debian's packages
        return (
            "record here (zeusctl record -o run.csv), and draw where you have it: "
            "zeusctl plot --recording run.csv -o run.png"
        )
    return f"run: {sys.executable} -m pip install matplotlib"


def draw_tracks(tracks: Sequence[Track], path: Path) -> int:
    """Draws GPUs one below the other: power within its limit, and clocks. Returns points drawn.

    Raises:
        CommandError: There is nothing to draw.
    """
    from matplotlib import dates
    from matplotlib.figure import Figure

    if not any(track.power_w for track in tracks):
        raise CommandError(
            "there is nothing to draw yet; wait a moment, or choose a longer time span"
        )
    figure = Figure(figsize=(_WIDTH, 0.8 + _HEIGHT * len(tracks)), layout="constrained")
    rows: Any = figure.subplots(len(tracks), 1, sharex=True, squeeze=False)
    points = 0
    for number, (track, axes) in enumerate(zip(tracks, rows[:, 0], strict=True)):
        clocks = axes.twinx()
        for line, color, dashes, label in (
            (track.gpu_clock_mhz, "#999999", "-", "graphics clock"),
            (track.memory_clock_mhz, "#cccccc", ":", "memory clock"),
        ):
            points += _draw(clocks, line, lw=1.0, color=color, ls=dashes, label=label)
        power_color = _COLORS[number % len(_COLORS)]
        points += _draw(axes, track.power_w, color=power_color, linewidth=1.1, label="power")
        points += _draw(
            axes, track.power_limit_w, color="#c0392b", linewidth=1.4, label="limit", step=True
        )
        clocks.set_ylabel("MHz", color="#888888")
        clocks.set_ylim(bottom=0)
        axes.set_ylabel("W")
        axes.set_ylim(bottom=0)
        axes.set_title(track.name, loc="left", fontsize=10)
        axes.grid(alpha=0.25)
        axes.set_zorder(clocks.get_zorder() + 1)  # power is drawn over clocks
        axes.patch.set_visible(False)
        if number == 0:
            place: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0)}
            handles = [*axes.lines, *clocks.lines]
            axes.legend(handles=handles, ncols=4, fontsize=8, frameon=False, **place)
    last = rows[-1, 0]
    formatter: Any = dates.ConciseDateFormatter
    last.xaxis.set_major_formatter(formatter(last.xaxis.get_major_locator()))
    _save(figure, path)
    return points


def _draw(axes: Any, line: Line, step: bool = False, **look: Any) -> int:
    """Draws a line, interrupted where nothing was sampled."""
    if not line:
        return 0
    times: list[datetime] = []
    values: list[float] = []
    for t, value in _with_gaps(line):
        times.append(datetime.fromtimestamp(t))
        values.append(value)
    axes.plot(times, values, drawstyle="steps-post" if step else "default", **look)
    return len(line)


def _with_gaps(line: Line) -> Iterator[tuple[float, float]]:
    """Returns the points with a break where nothing was sampled. Old history is coarser, so a pause
    is compared with its neighbors.
    """
    steps = [later[0] - sooner[0] for sooner, later in pairwise(line)]
    for number, (t, value) in enumerate(line):
        yield t, value
        if number < len(steps):
            beside = [*steps[max(0, number - 1) : number], *steps[number + 1 : number + 2]]
            if steps[number] > _GAP * max([_SHORT_S, *beside]):
                yield t, float("nan")


def draw_energy(sums: Sequence[UsedEnergy], path: Path) -> int:
    """Draws energy by day as stacked bars, the largest accounts first. Returns the sums drawn.

    Raises:
        CommandError: There is nothing to draw.
    """
    from matplotlib.figure import Figure

    if not sums:
        raise CommandError("the ledger has no energy in this time; choose a longer time span")
    scale, days = Scale.of(sums), sorted({f"{used.since:%Y-%m-%d}" for used in sums})
    figure = Figure(figsize=(_WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(days)
    # Accounts with a color of their own.
    for number, (name, stack) in enumerate(by_day(sums, 5).items()):
        heights = [stack.get(day, 0.0) / scale.joules for day in days]
        axes.bar(days, heights, 0.8, below, label=name, color=_COLORS[number % len(_COLORS)])
        below = [one + more for one, more in zip(below, heights, strict=True)]
    axes.set_ylabel(f"energy ({scale.unit})")
    axes.set_xticks(days[:: -(-len(days) // 12)])
    axes.tick_params("x", rotation=30)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path)
    return len(sums)


def _save(figure: Any, path: Path) -> None:
    form = path.suffix[1:]
    with replacing(path) as aside:
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(aside, format=form, dpi=130, metadata=metadata)

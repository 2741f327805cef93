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

from zeusctl.entities import UsedEnergy
from zeusctl.exits import CommandError

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
            _legend(axes, clocks)
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


def _legend(axes: Any, clocks: Any) -> None:
    handles, names = axes.get_legend_handles_labels()
    more_handles, more_names = clocks.get_legend_handles_labels()
    axes.legend(
        handles + more_handles,
        names + more_names,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=4,
        fontsize=8,
        frameon=False,
    )


def draw_profile(measurements: Sequence[tuple[float, float, float]], path: Path) -> int:
    """Draws the cost of each limit: energy against time, and both against the limit.

    Args:
        measurements: Limit (W), time (s) and energy (J), in the order of the limits.
    """
    from matplotlib.figure import Figure

    limits = [limit for limit, _, _ in measurements]
    times = [time for _, time, _ in measurements]
    energies = [energy for _, _, energy in measurements]
    slowest_free, dearest = times[-1], energies[-1]
    figure = Figure(figsize=(_WIDTH, 3.8), layout="constrained")
    trade, relative = figure.subplots(1, 2)
    trade.plot(times, energies, color="#bbbbbb", zorder=1)
    trade.scatter(times, energies, color=_COLORS[0], zorder=2)
    for limit, time, energy in measurements:
        trade.annotate(f"{limit:g} W", (time, energy), textcoords="offset points", xytext=(6, 5))
    trade.set_xlabel("time (s)")
    trade.set_ylabel("energy (J)")
    trade.set_title("trade-off", loc="left", fontsize=10)
    trade.margins(x=0.18, y=0.1)
    slower = [100 * (time / slowest_free - 1) for time in times]
    saved = [100 * (1 - energy / dearest) for energy in energies]
    relative.plot(limits, saved, "o-", color=_COLORS[2], label="energy saved")
    relative.plot(limits, slower, "s-", color=_COLORS[1], label="time added")
    relative.axhline(0, color="#999999", linewidth=0.8)
    relative.set_xlabel("power limit (W)")
    relative.set_ylabel(f"% against {limits[-1]:g} W")
    relative.set_title("relative to the highest limit", loc="left", fontsize=10)
    relative.legend(frameon=False)
    for axes in (trade, relative):
        axes.grid(alpha=0.25)
    _save(figure, path)
    return len(measurements)


SHOWN = 7
"""Accounts with a color of their own."""


def draw_energy(sums: Sequence[UsedEnergy], names: Sequence[str], path: Path) -> int:
    """Draws energy by day as stacked bars, the largest accounts first. Returns the sums drawn.

    Raises:
        CommandError: There is nothing to draw.
    """
    from matplotlib.figure import Figure

    if not sums:
        raise CommandError("the ledger has no energy in this time; choose a longer time span")
    totals: dict[str, float] = {}
    for one, name in zip(sums, names, strict=True):
        totals[name] = totals.get(name, 0.0) + one.energy_j
    shown = sorted(totals, key=lambda name: -totals[name])[:SHOWN]
    kwh = sum(totals.values()) >= 360_000
    days = sorted({f"{one.since:%Y-%m-%d}" for one in sums})
    stacks = {name: dict.fromkeys(days, 0.0) for name in [*shown, "others"]}
    for one, name in zip(sums, names, strict=True):
        amount = one.energy_j / (3_600_000 if kwh else 1)
        stacks[name if name in shown else "others"][f"{one.since:%Y-%m-%d}"] += amount
    figure = Figure(figsize=(_WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    below = [0.0] * len(days)
    for number, (name, stack) in enumerate(stacks.items()):
        heights = [stack[day] for day in days]
        if any(heights):
            color = _COLORS[number % len(_COLORS)]
            axes.bar(days, heights, 0.8, below, label=name, color=color)
            below = [one + more for one, more in zip(below, heights, strict=True)]
    axes.set_ylabel(f"energy ({'kWh' if kwh else 'J'})")
    axes.set_xticks(days[:: -(-len(days) // 12)])
    axes.tick_params("x", rotation=30)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, path)
    return len(sums)


def _save(figure: Any, path: Path) -> None:
    # A reader sees the old file or the complete new one.
    aside = path.with_name(f".{path.stem}.new{path.suffix}")
    try:
        figure.savefig(aside, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
        aside.replace(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None

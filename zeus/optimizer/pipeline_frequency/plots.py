"""Plots of frontiers, plans and profiles. Needs matplotlib: pip install 'zeusd[plot]'."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Setting
from zeus.optimizer.pipeline_frequency.schedules import Instruction

if TYPE_CHECKING:
    from zeus.optimizer.pipeline_frequency.planner import Planner

FORMATS = ("png", "svg")


def plot_frontier(frontier: Frontier, path: str | os.PathLike[str]) -> list[Path]:
    """Plots energy over time: plans, their bound, and everything at the highest clock.

    Returns:
        The written files.
    """
    figure, axes = _figure(7.5, 4.8)
    times = [plan.time_s for plan in frontier.plans]
    axes.plot(
        times,
        [plan.bound_j for plan in frontier.plans],
        color="0.6",
        linewidth=1,
        label="lower bound",
    )
    axes.scatter(
        times,
        [plan.energy_j for plan in frontier.plans],
        s=14,
        color="tab:blue",
        label=f"{len(times)} plans",
        zorder=3,
    )
    axes.scatter(
        [frontier.baseline_time_s],
        [frontier.baseline_energy_j],
        marker="x",
        color="tab:red",
        label="highest clocks",
        zorder=3,
    )
    fastest = frontier.plans[-1]
    saved = 100 * (1 - fastest.energy_j / frontier.baseline_energy_j)
    axes.annotate(
        f"no slowdown: {saved:.1f} % less",
        (fastest.time_s, fastest.energy_j),
        xytext=(12, 10),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set_xlabel("iteration time (s)")
    axes.set_ylabel("energy of an iteration (J)")
    axes.set_title(
        f"{frontier.schedule}, {frontier.num_stages} stages, "
        f"{frontier.num_microbatches} microbatches"
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return _save(figure, path)


def plot_timeline(
    planner: Planner, frontier: Frontier, index: int, path: str | os.PathLike[str]
) -> list[Path]:
    """Plots an iteration at the highest clocks, and under a plan, with a row for each stage.

    Args:
        planner: What made the frontier.
        index: Index of the plan.
        path: Without an extension: writes a PNG and an SVG.
    """
    plan = frontier.plans[index]
    before, after = planner.runs(), planner.runs(plan.stages)
    figure, axes = _figure(12, 1.6 + 0.75 * frontier.num_stages, rows=2)
    colour = _colours({setting for _, setting, _, _ in (*before, *after)})
    shown = [place for setting, place in colour.items() if setting]
    low, high = min(shown, default=0), max(shown, default=0)
    captions = (
        f"highest clocks: {frontier.baseline_time_s:.3f} s, {frontier.baseline_energy_j:.0f} J",
        f"plan {index}: {plan.time_s:.3f} s, {plan.energy_j:.0f} J "
        f"({100 * (1 - plan.energy_j / frontier.baseline_energy_j):.1f} % less)",
    )
    latest_s = max(end_s for _, _, _, end_s in (*before, *after))
    colours = None
    for one, runs, caption in zip(axes, (before, after), captions, strict=True):
        colours = _draw(one, runs, frontier.num_stages, colour, low, high)
        one.set_title(caption, loc="left", fontsize=10)
        one.set_xlim(0, latest_s)
    axes[1].set_xlabel("time (s)")
    bar = figure.colorbar(colours, ax=list(axes), label="clock (MHz)", pad=0.01)
    names = {place: name for name, place in colour.items() if isinstance(name, str)}
    if names:
        bar.set_label("setting")
        bar.set_ticks(list(names), labels=list(names.values()))
    return _save(figure, path, tight=False)


def plot_profile(profile: InstructionProfile, path: str | os.PathLike[str]) -> list[Path]:
    """Plots energy over time of each instruction at each clock."""
    names = profile.names
    figure, axes = _figure(5.5 * max(2, len(names)), 4.5, columns=max(2, len(names)))
    for one, name in zip(axes, names, strict=False):
        for stage in range(profile.num_stages):
            if not profile.has(stage, name):
                continue
            options = profile.options(stage, name)
            one.plot(
                [1000 * option.time_s for option in options],
                [option.energy_j for option in options],
                marker=".",
                linewidth=0.8,
                label=f"stage {stage}",
            )
        one.set_title(name)
        one.set_xlabel("time (ms)")
        one.set_ylabel("energy (J)")
        one.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=8)
    return _save(figure, path)


def _colours(settings: set[Setting]) -> dict[Setting, int]:
    """Position of each setting on the colour scale: clocks at their MHz."""
    names = sorted(setting for setting in settings if isinstance(setting, str))
    colours: dict[Setting, int] = {name: place for place, name in enumerate(names)}
    return colours | {setting: setting for setting in settings if isinstance(setting, int)}


def _draw(
    axes: Any,
    runs: Sequence[tuple[Instruction, Setting, float, float]],
    stages: int,
    colour: dict[Setting, int],
    low: int,
    high: int,
) -> Any:
    from matplotlib.collections import PolyCollection

    corners, clocks, edges = [], [], []
    for one, setting, start_s, end_s in runs:
        top, bottom = one.stage - 0.42, one.stage + 0.42
        corners.append([(start_s, top), (end_s, top), (end_s, bottom), (start_s, bottom)])
        clocks.append(colour[setting])
        edges.append("white" if one.name == "forward" else "black")
    crowded = len(runs) > 600
    bars = PolyCollection(
        corners,
        array=clocks,
        cmap="viridis",
        edgecolors="none" if crowded else edges,
        linewidths=0.0 if crowded else 0.5,
        clim=(low, max(high, low + 1)),
    )
    axes.add_collection(bars)
    if len(runs) <= 160:
        for one, setting, start_s, end_s in runs:
            axes.text(
                (start_s + end_s) / 2,
                one.stage,
                f"{one.name[0].upper()}{one.microbatch}",
                ha="center",
                va="center",
                fontsize=6,
                color="white" if colour[setting] < (low + high) / 2 else "black",
            )
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [f"stage {number}" for number in range(stages)])
    axes.set_facecolor("0.93")
    return bars


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PipelineFrequencyError(
            "plots need matplotlib; pip install 'zeusd[plot]', or disable plots"
        ) from None
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    if rows > 1:
        figure.subplots_adjust(hspace=0.35)
    return figure, figure.subplots(rows, columns)


def _save(figure: Any, path: str | os.PathLike[str], tight: bool = True) -> list[Path]:
    if tight:
        figure.tight_layout()
    written = []
    for ending in FORMATS:
        target = Path(f"{os.fspath(path)}.{ending}")
        # No timestamp, so that the same plan gives the same file.
        metadata = {"Date": None} if ending == "svg" else None
        figure.savefig(target, dpi=130, bbox_inches="tight", metadata=metadata)
        written.append(target)
    return written

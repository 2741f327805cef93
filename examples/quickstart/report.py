"""Shows the optimizer's result: the table, the saving, and a chart of the trade-off."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from zeus.optimizer.power_limit import OptimumSelector, PowerLimitMeasurement, ZeusCost

COST = ZeusCost(eta_knob=0.5)
MOST_REGRET = 0.02
"""What a choice that passes may cost more than the best, as measurements err by as much."""


def print_table(
    console: Console, measurements: list[PowerLimitMeasurement], chosen_w: float, steps: int
) -> None:
    """Time, energy and cost of each limit, per training step."""
    table = Table(title="Cost of each power limit, per training step")
    for column in ("limit (W)", "time (ms)", "energy (J)", "cost (J)", ""):
        table.add_column(column, justify="right")
    for one, cost in zip(measurements, COST.costs(measurements), strict=True):
        table.add_row(
            f"{one.power_limit:g}",
            f"{one.time / steps * 1000:.1f}",
            f"{one.energy / steps:.2f}",
            f"{cost / steps:.2f}",
            "<- chosen" if one.power_limit == chosen_w else "",
            style="bold green" if one.power_limit == chosen_w else None,
        )
    console.print(table)


def print_saving(
    console: Console, measurements: list[PowerLimitMeasurement], chosen_w: float
) -> None:
    """Prints what the choice saves and how much time it costs, compared with the highest limit."""
    highest = measurements[0]
    chosen = next(one for one in measurements if one.power_limit == chosen_w)
    saved = 1 - chosen.energy / highest.energy
    slower = chosen.time / highest.time - 1
    console.print(
        f"At [bold]{chosen_w:g} W[/] instead of {highest.power_limit:g} W this job uses "
        f"[bold green]{saved:.1%} less energy[/] and takes {slower:.1%} more time."
    )


def truth_of(workload: str, product: str, limits_mw: list[int]) -> list[PowerLimitMeasurement]:
    """Returns the true cost of a step of a simulated workload at each limit, from the simulator."""
    from zeusd.devices.simulated.models import DEVICES
    from zeusd.devices.simulated.workloads import find_workload

    model = next(one for one in DEVICES.values() if one.name == product)
    found = []
    for limit_mw in limits_mw:
        point = find_workload(workload, model).point(model, 0, limit_mw / 1000, None)
        one = PowerLimitMeasurement(
            power_limit=limit_mw / 1000, energy=point.power_w / point.rate, time=1 / point.rate
        )
        found.append(one)
    return found


def check_against_truth(
    console: Console,
    measurements: list[PowerLimitMeasurement],
    chosen_w: float,
    steps: int,
    selector: OptimumSelector,
    truth: list[PowerLimitMeasurement],
) -> bool:
    """Compares the measurements with what the simulated GPU really did.

    Returns:
        Whether the choice is the best, or costs little more.
    """
    by_limit = {one.power_limit: one for one in truth}
    time_off = max(abs(m.time / steps / by_limit[m.power_limit].time - 1) for m in measurements)
    energy_off = max(
        abs(m.energy / steps / by_limit[m.power_limit].energy - 1) for m in measurements
    )
    best_w = selector.select(truth)
    costs = selector.costs(truth)
    assert costs is not None
    cost = {one.power_limit: cost for one, cost in zip(truth, costs, strict=True)}
    regret = cost[chosen_w] / cost[best_w] - 1
    found = "[green]the choice is the best[/]"
    if best_w != chosen_w:
        found = f"the choice costs {regret:.1%} more"
        found = f"{found}, because other programs kept the CPUs busy" if time_off > 0.02 else found
    console.print(
        f"The simulated GPU's true best is {best_w:g} W: {found}. Measured through zeusd, time is "
        f"within {time_off:.1%} of the truth and energy within {energy_off:.1%}."
    )
    return regret <= MOST_REGRET


def draw(path: Path, measurements: list[PowerLimitMeasurement], chosen_w: float, name: str) -> None:
    """Draws time against energy, with the choice marked."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    highest = measurements[0]
    slowdown = [(one.time / highest.time - 1) * 100 for one in measurements]
    saving = [(1 - one.energy / highest.energy) * 100 for one in measurements]
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    axes.plot(slowdown, saving, "o-", color="#4c72b0", markersize=6)
    for one, x, y in zip(measurements, slowdown, saving, strict=True):
        chosen = one.power_limit == chosen_w
        axes.annotate(
            f"{one.power_limit:g} W",
            (x, y),
            textcoords="offset points",
            xytext=(8, -12),
            fontsize=10,
            weight="bold" if chosen else "normal",
        )
        if chosen:
            axes.plot([x], [y], "o", color="#2a9d4a", markersize=13, label="chosen", zorder=3)
    axes.set_xlabel("more time than at the highest limit (%)")
    axes.set_ylabel("energy saved (%)")
    axes.set_title(f"Energy and time by power limit\n{name}", fontsize=11)
    axes.grid(alpha=0.3)
    axes.margins(x=0.12, y=0.12)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)

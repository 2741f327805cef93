"""Measures the cost and gain of searching graphics clocks beside limits, on a simulated A100 and
A40.

    python benchmarks/power_clocks.py [--stages 8]

The work is the forward and backward instructions of GPT-3's pipeline stages, with time and energy
at each clock as published with ml-energy/zeus (Apache-2.0), and memory-bound work of the
simulator's model that draws less than the lowest limit of an H100. Regret is how much more the
choice costs than the best setting that was offered, according to the tables. Nothing was measured
on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import warnings
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.zeus.node import VirtualNode, train
from zeus.optimizer.power_limit import (
    Done,
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    PowerLimitMeasurement,
    ZeusCost,
)
from zeus.optimizer.power_limit.settings import CLOCK_SHARES
from zeusd.devices.simulated.instructions import find_instructions
from zeusd.devices.simulated.models import DEVICES, DeviceModel
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import ModelWorkload, SimulatedWorkload

SELECTORS = (Energy(), ZeusCost(0.5, 1), MaxSlowdownConstraint(1.1))


def works(stages: int) -> dict[str, list[tuple[DeviceModel, SimulatedWorkload]]]:
    """The workloads by group, with the product that each runs on."""
    found: dict[str, list[tuple[DeviceModel, SimulatedWorkload]]] = {}
    for gpu, key in (("a100", "a100-sxm-80"), ("a40", "a40")):
        device = DEVICES[key]
        for stage in range(stages):
            tables = find_instructions(f"perseus/{gpu}/gpt3-175b/stage{stage}", device)
            assert tables is not None
            found.setdefault(f"{gpu}, published clocks", []).extend(
                (device, table) for table in tables.tables.values()
            )
    h100 = DEVICES["h100-sxm"]
    lowest_w = h100.power_limits_w[0]
    found["h100, below its limits"] = [
        (h100, ModelWorkload(ModelLoad(0.1, k, share * lowest_w)))
        for k in (0.05, 0.15, 0.3)
        for share in (0.8, 0.97)
    ]
    return found


def truth(
    device: DeviceModel, work: SimulatedWorkload, limit_mw: int, clock: int | None
) -> PowerLimitMeasurement:
    """True time and energy of a step at a setting."""
    point = work.point(device, 0, limit_mw / 1000, clock or device.clocks_mhz[0])
    return PowerLimitMeasurement(
        power_limit=limit_mw / 1000,
        energy=point.power_w / point.rate,
        time=1 / point.rate,
        graphics_clock=clock,
    )


def search(
    device: DeviceModel, work: SimulatedWorkload, selector: OptimumSelector, clocks: bool
) -> tuple[int, float, float, float]:
    """Trains a job until the choice is made. Returns steps, saving, slowdown and regret."""
    with tempfile.TemporaryDirectory() as folder:
        node = VirtualNode(f"{device.key}:setter_ms=0", Path(folder) / "state")
        plo = GlobalPowerLimitOptimizer(node.monitor(), selector, search_clocks=clocks)
        steps = train(plo, node.nvml.open_work([0], work), 10_000, until_done=True)
        state, limits = plo.state, plo.power_limits
        plo.close()
        node.close()
    assert isinstance(state, Done)
    top = device.clocks_mhz[0]
    offered = [
        min(device.clocks_mhz, key=lambda mhz: abs(mhz - share * top)) for share in CLOCK_SHARES
    ]
    rows = [
        truth(device, work, limit, clock)
        for clock in (None, *(offered if clocks else ()))
        for limit in limits
    ]
    chosen = truth(device, work, state.optimal_power_limit, state.optimal_clock)
    best = selector.choose(rows)
    constrained = isinstance(selector, MaxSlowdownConstraint)
    costs = None if constrained else selector.costs([rows[0], chosen, best])
    regret = chosen.energy / best.energy - 1 if costs is None else costs[1] / costs[2] - 1
    highest = rows[0]
    return steps, 1 - chosen.energy / highest.energy, chosen.time / highest.time - 1, regret


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table("work", "selector", "search", "steps", "saved", "slowdown", "regret", "highest")
    for name, group in works(options.stages).items():
        for selector in SELECTORS:
            for clocks in (False, True):
                found = [search(*work, selector, clocks) for work in group]
                steps, saving, slowdown, regret = (
                    statistics.mean(one) for one in zip(*found, strict=True)
                )
                table.add_row(
                    f"{name} ({len(group)})",
                    type(selector).__name__,
                    "limits and clocks" if clocks else "limits",
                    f"{steps:.0f}",
                    *(f"{share:.1%}" for share in (saving, slowdown, regret)),
                    f"{max(one[-1] for one in found):.1%}",
                )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

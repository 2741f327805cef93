"""Measures the cost and gain of searching workload power profiles beside limits, on simulated
GB200s.

    python benchmarks/power_profiles.py [--jobs 10] [--seed 4242]

Jobs are random: the part of their time that depends on the clock, and the power that they draw
without a limit. Each is trained on two GPUs under the optimizer, with and without
`search_profiles`, in virtual time. The effects of profiles are invented (a power cap and a highest
clock each), so this shows how well the search finds the best pair, and nothing about savings on
hardware. Regret is how much more the choice costs than the best possible choice, according to the
simulator.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
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
from zeus_ipc.controls import profile_name
from zeusd.devices.simulated.models import DEVICES
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import ModelWorkload

MODEL = DEVICES["gb200"]
HIGHEST_W = MODEL.power_limits_w[2]
STEP_W = 50
GPUS = 2
SELECTORS = (Energy(), ZeusCost(0.5, GPUS), MaxSlowdownConstraint(1.05))


@dataclass(frozen=True)
class Outcome:
    """One search: its steps, and the choice's saving, slowdown and regret, as shares."""

    steps: int
    saving: float
    slowdown: float
    regret: float


def truth(workload: ModelWorkload, limit_w: float, name: str | None) -> PowerLimitMeasurement:
    """True time and energy of a step at a pair, on all GPUs."""
    clock, cap_w = MODEL.clocks_mhz[0], limit_w
    for one in MODEL.profiles:
        if profile_name(one.profile) == name:
            cap_w, clock = min(limit_w, one.limit * HIGHEST_W), round(one.clock * clock)
    point = workload.point(MODEL, 0, cap_w, clock)
    seconds = 1 / point.rate
    return PowerLimitMeasurement(
        power_limit=limit_w, energy=GPUS * point.power_w * seconds, time=seconds, power_profile=name
    )


def cost(
    selector: OptimumSelector, highest: PowerLimitMeasurement, one: PowerLimitMeasurement
) -> float:
    """The cost that the selector minimizes."""
    if isinstance(selector, MaxSlowdownConstraint):
        return one.energy
    costs = selector.costs([highest, one])
    assert costs is not None
    return costs[1]


def search(workload: ModelWorkload, selector: OptimumSelector, profiles: bool) -> Outcome:
    """Trains a job until the choice is made."""
    with tempfile.TemporaryDirectory() as folder:
        node = VirtualNode(f"{GPUS}xgb200:setter_ms=0", Path(folder) / "state")
        plo = GlobalPowerLimitOptimizer(
            node.monitor(), selector, pl_step=STEP_W, search_profiles=profiles
        )
        work = node.nvml.open_work(list(range(GPUS)), workload)
        steps = train(plo, work, 10_000, until_done=True)
        state, limits_w = plo.state, [limit / 1000 for limit in plo.power_limits]
        plo.close()
        node.close()
    assert isinstance(state, Done)
    names = [None, *(profile_name(one.profile) for one in MODEL.profiles if profiles)]
    pairs = [truth(workload, limit, name) for name in names for limit in limits_w]
    highest = pairs[0]
    chosen = truth(workload, state.optimal_power_limit / 1000, state.optimal_power_profile)
    best = selector.choose(pairs)
    return Outcome(
        steps,
        1 - chosen.energy / highest.energy,
        chosen.time / highest.time - 1,
        cost(selector, highest, chosen) / cost(selector, highest, best) - 1,
    )


def mean(found: Sequence[Outcome], name: str) -> float:
    """Of one figure."""
    return float(statistics.mean(getattr(one, name) for one in found))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=4242)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    chance = random.Random(options.seed)
    jobs = [
        ModelWorkload(
            ModelLoad(unit_s=0.1, k=chance.uniform(0.1, 0.95), power_w=chance.uniform(500, 1400))
        )
        for _ in range(options.jobs)
    ]
    columns = ("selector", "search", "steps", "saved", "slowdown", "regret", "highest regret")
    table = Table(*columns)
    for selector in SELECTORS:
        for profiles in (False, True):
            found = [search(job, selector, profiles) for job in jobs]
            shares = (mean(found, name) for name in ("saving", "slowdown", "regret"))
            table.add_row(
                type(selector).__name__,
                "limits and profiles" if profiles else "limits",
                f"{mean(found, 'steps'):.0f}",
                *(f"{share:.1%}" for share in shares),
                f"{max(one.regret for one in found):.1%}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()

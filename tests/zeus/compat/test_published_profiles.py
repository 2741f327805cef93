"""`search="exhaustive"` over the recorded profiles, interrupted as in ml-energy/zeus's own test:

12 profiles, four ways in which epochs end, five knobs: limits are held in the published order, and
the choice is that of the profile; Energy, Time and eight slowdowns choose from the file that it
leaves. Only the numbers are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.zeus.node import VirtualNode
from zeus.compat.replay import ReplayZeusMonitor
from zeus.optimizer.power_limit import (
    Done,
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    Time,
    ZeusCost,
)
from zeus.utils.metric import zeus_cost
from zeusd.devices.simulated.workloads import MeasuredTable, catalog

PROFILES = sorted(
    (name for name in catalog() if name.startswith("profiles/")),
    key=lambda name: (name.split("+")[0], catalog()[name].gpus),  # those of one node together
)
KNOBS = [0.0, 0.25, 0.5, 0.75, 1.0]
SLOWDOWNS = [1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 100.0]
TRIAL = 50
"""Steps of a limit: 10 to warm up, 40 measured."""


def recorded(name: str, path: Path) -> dict[int, tuple[float, float]]:
    """Writes a monitor's file of a profile. Returns time and energy by limit, W, descending."""
    table = catalog()[name]
    assert isinstance(table, MeasuredTable)
    rows = {}
    gpus = range(table.gpus)
    lines = [",".join(["start_time,window_name,elapsed_time", *(f"gpu{i}_energy" for i in gpus)])]
    for at in reversed(range(len(table.limits_w))):
        time_s = table.unit_s[at] * 40
        joules = [time_s * power_w[at] for power_w in table.power_w]
        limit = int(table.limits_w[at])
        rows[limit] = time_s, sum(joules)
        window = f"__GlobalPowerLimitOptimizer_{limit}"
        lines.append(",".join([f"0,{window},{time_s!r}", *map(repr, joules)]))
    path.write_text("\n".join(lines) + "\n")
    return rows


def published(limits: list[int], per_epoch: int) -> list[int]:
    """The limits in the published order, from the first on, each once for as long as it is held.

    Args:
        limits: Of the profile, W, descending.
        per_epoch: How many are measured in an epoch; the next one's window is cut, and the limit
            tried again.
    """
    found: list[int] = []
    index = 0
    while True:
        tried = limits[index : index + per_epoch + 1]
        found += tried
        if len(tried) <= per_epoch:
            return _without_repeats(found)
        found.append(limits[0])
        index += per_epoch


def _without_repeats(limits: list[int]) -> list[int]:
    return [one for at, one in enumerate(limits) if at == 0 or one != limits[at - 1]]


def selectors(gpus: int) -> list[OptimumSelector]:
    """All that the published test chooses with."""
    costs = [ZeusCost(knob, world_size=gpus) for knob in KNOBS]
    return [*costs, Energy(), Time(), *(MaxSlowdownConstraint(one) for one in SLOWDOWNS)]


def best(rows: dict[int, tuple[float, float]], selector: OptimumSelector, gpus: int) -> int:
    """The choice, W, from the table itself: of equals, the highest limit."""
    highest = max(rows)
    if isinstance(selector, MaxSlowdownConstraint):
        longest_s = rows[highest][0] * selector.factor
        return min(limit for limit, (time_s, _) in rows.items() if time_s <= longest_s)
    if isinstance(selector, ZeusCost):
        knob, power_w = selector.eta_knob, highest * gpus
        return min(rows, key=lambda one: zeus_cost(rows[one][1], rows[one][0], knob, power_w))
    return min(rows, key=lambda one: rows[one][isinstance(selector, Energy)])


@pytest.mark.filterwarnings("ignore:MaxSlowdownConstraint")
@pytest.mark.parametrize("interrupted", ["never", "warming up", "measuring", "every time"])
def test_limits_and_choices_are_the_published_ones(
    virtual_node: Callable[[str], VirtualNode], tmp_path: Path, interrupted: str
) -> None:
    assert len(PROFILES) == 12
    node, spec = None, ""
    for name in PROFILES:
        kind = name.removeprefix("profiles/").split("+")[0].lower()
        table = catalog()[name]
        path = tmp_path / f"{name.replace('/', '-')}.csv"
        rows = recorded(name, path)
        limits = list(rows)
        per_epoch, rest = {
            "never": (len(limits), 10),
            "warming up": (len(limits) // 2, 5),
            "measuring": (len(limits) // 3, 15),
            "every time": (1, 50),
        }[interrupted]
        if node is None or spec != f"{table.gpus}x{kind}":
            if node is not None:
                node.close()
            spec = f"{table.gpus}x{kind}"
            node = virtual_node(f"{spec}:setter_ms=0")
        plo = GlobalPowerLimitOptimizer(
            ReplayZeusMonitor(log_file=path, ignore_sync_execution=True, match_window_name=False),
            ZeusCost(0.5, world_size=table.gpus),
            wait_steps=1,
            profile_path=tmp_path / f"{name.replace('/', '-')}.json",
            search="exhaustive",
        )
        found: list[int] = []
        while not isinstance(plo.state, Done):
            plo.on_epoch_begin()
            for _ in range(TRIAL * per_epoch + rest):
                plo.on_step_begin()
                found.append(round(node.limit_w()))
                plo.on_step_end()
                if isinstance(plo.state, Done):
                    break
            plo.on_epoch_end()
            found.append(round(node.limit_w()))
        assert plo.state == Done(optimal_power_limit=1000 * best(rows, ZeusCost(0.5), table.gpus))
        expected = published(limits, per_epoch)
        chosen = plo.state.optimal_power_limit // 1000
        assert _without_repeats(found) == _without_repeats([*expected, chosen]), name
        for selector in selectors(table.gpus):
            assert selector.select(plo.measurements) == best(rows, selector, table.gpus), name
        plo.close()

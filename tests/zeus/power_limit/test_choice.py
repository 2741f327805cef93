"""The chosen limit is the best of the measured table, for every workload and selector."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.zeus.node import VirtualNode, train
from zeus.optimizer.power_limit import (
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    Time,
    ZeusCost,
)
from zeus.utils.metric import zeus_cost
from zeusd.devices.simulated.workloads import MeasuredTable, catalog

WORKLOADS = sorted(name for name in catalog() if name.startswith("profiles/"))


def best_of_table(table: MeasuredTable, kind: str) -> float:
    """The argmin, worked out from the table alone and in plain terms."""
    rows = [
        (limit, table.unit_s[i], sum(gpu[i] for gpu in table.power_w) * table.unit_s[i])
        for i, limit in reversed(list(enumerate(table.limits_w)))
    ]
    highest, fastest_s, _ = rows[0]
    if kind == "energy":
        return min(rows, key=lambda row: row[2])[0]
    if kind == "time":
        return min(rows, key=lambda row: row[1])[0]
    if kind == "cost":
        max_power = highest * table.gpus
        return min(rows, key=lambda row: zeus_cost(row[2], row[1], 0.5, max_power))[0]
    return min(row[0] for row in rows if row[1] <= 1.1 * fastest_s)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_choice_is_the_best_of_the_table(
    virtual_node: Callable[[str], VirtualNode], name: str
) -> None:
    table = catalog()[name]
    node = virtual_node(f"{table.gpus}x{table.device}:setter_ms=0")
    selectors: dict[str, OptimumSelector] = {
        "energy": Energy(),
        "time": Time(),
        "cost": ZeusCost(0.5, world_size=table.gpus),
        "slowdown": MaxSlowdownConstraint(1.1),
    }
    asked = list(selectors)[WORKLOADS.index(name) % len(selectors)]
    optimizer = GlobalPowerLimitOptimizer(node.monitor(), selectors[asked], search="exhaustive")
    work = node.nvml.open_work(list(range(table.gpus)), name)
    train(optimizer, work, 100_000, until_done=True)
    assert [one.power_limit for one in optimizer.measurements] == list(reversed(table.limits_w))
    for gpu in range(table.gpus):
        assert node.limit_w(gpu) == best_of_table(table, asked)
    # Each of the others would have chosen its best from these measurements, too.
    for kind, selector in selectors.items():
        assert selector.select(optimizer.measurements) == best_of_table(table, kind), kind

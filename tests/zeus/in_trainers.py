"""Shared by the tests of callbacks in trainers: a job, its search, and its expected results."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zeus.node import VirtualNode, train
from zeus.optimizer.power_limit import Energy, GlobalPowerLimitOptimizer
from zeus.optimizer.power_limit.driven import Driven
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import ModelWorkload

WORKLOAD = ModelWorkload(ModelLoad(unit_s=0.1, k=0.4, power_w=240.0))
LIMITS = [250, 200, 150, 100]
SMALL: dict[str, Any] = {
    "warmup_steps": 2,
    "profile_steps": 10,
    "pl_step": 50,
    "search": "exhaustive",
}
STEPS = 2 + len(LIMITS) * 12
"""As many steps as every limit needs, where nothing comes between them."""


def times_in_a_plain_loop(node: VirtualNode) -> dict[float, float]:
    """Seconds that the profiled steps take at each limit in a loop with nothing else in it."""
    optimizer = GlobalPowerLimitOptimizer(node.monitor(), Energy(), **SMALL)
    train(optimizer, node.nvml.open_work([0], WORKLOAD), STEPS + 10)
    optimizer.close()
    return {one.power_limit: one.time for one in optimizer.measurements}


def assert_right(plo: Driven, expected: dict[float, float]) -> None:
    """All limits were measured, and training steps were all that was measured."""
    assert not plo.disabled
    assert [one.power_limit for one in plo.measurements] == LIMITS
    for one in plo.measurements:
        assert one.time == pytest.approx(expected[one.power_limit], rel=0.02)


def assert_given_back(node: VirtualNode) -> None:
    assert node.limit_w() == LIMITS[0]
    assert node.client.leases() == []

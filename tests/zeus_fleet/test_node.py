"""A node's side of the protocol: the limits that it requests of zeusd, and its own messages."""

from __future__ import annotations

from tests.zeus_fleet.bench import GPUS, budget
from zeus_fleet.messages import Grant, GrantPlan, Timing
from zeus_fleet.node import FleetNode


def test_other_gpus_are_lowered_for_one_that_cannot_be() -> None:
    node = FleetNode("a", GPUS, [300_000, 300_000], Timing())
    command = node.tick(0)
    assert command is not None
    assert command.limits_mw == (100_000, 100_000)
    node.applied([300_000, 100_000], 1)
    beat = node.heartbeat(2)
    assert (beat.held_mw, beat.stuck_mw) == (400_000, 200_000)
    plan = GrantPlan(1, {"site": 800_000}, {"a": Grant(1, 500_000, 500_000)})
    command = node.answered(beat.number, plan, budget(1200), 3)
    assert command is not None
    assert command.limits_mw == (100_000, 200_000), "500 W less the 300 W of the stuck GPU"
    command = node.applied([100_000, 200_000], 4)
    assert command is not None
    assert sum(command.limits_mw) == 500_000
    node.applied(command.limits_mw, 5)
    assert node.heartbeat(6).stuck_mw == 0


def test_within_a_node_limits_are_lowered_before_others_are_raised() -> None:
    node = FleetNode("a", GPUS, [100_000, 100_000], Timing())
    node.tick(0)
    node.applied([100_000, 100_000], 0)
    node.wants([300_000, 100_000], 0)
    plan = GrantPlan(1, {"site": 800_000}, {"a": Grant(1, 400_000, 400_000)})
    command = node.answered(node.heartbeat(1).number, plan, budget(1200), 2)
    assert command is not None
    assert command.limits_mw == (300_000, 100_000)
    node.applied(command.limits_mw, 3)
    lower = node.wants([100_000, 300_000], 4)
    assert lower is not None
    assert lower.limits_mw == (100_000, 100_000)
    assert node.heartbeat(5).held_mw == 400_000
    raised = node.applied(lower.limits_mw, 6)
    assert raised is not None
    assert raised.limits_mw == (100_000, 300_000)


def test_possible_effects_of_zeusd_are_reported_until_it_answers() -> None:
    node = FleetNode("a", GPUS, [100_000, 100_000], Timing())
    plan = GrantPlan(1, {"site": 800_000}, {"a": Grant(1, 600_000, 600_000)})
    assert node.answered(node.heartbeat(1).number, plan, budget(1200), 2) is not None
    assert node.heartbeat(3).held_mw == 600_000
    node.failed()
    after = Timing().lease_ns
    assert node.heartbeat(after).held_mw == 600_000
    command = node.tick(after)
    assert command is not None
    assert command.limits_mw == (100_000, 100_000)
    node.applied(command.limits_mw, after)
    assert node.heartbeat(after).held_mw == 200_000


def test_a_grant_is_divided_as_the_policy_says_up_to_what_each_gpu_has_use_for() -> None:
    node = FleetNode("a", GPUS, [100_000, 100_000], Timing())
    plan = GrantPlan(1, {"site": 800_000}, {"a": Grant(1, 400_000, 400_000)})
    limits = {0: 130_000, 1: 270_000}
    command = node.answered(node.heartbeat(0).number, plan, budget(1200), 1, limits)
    assert command is not None
    assert command.limits_mw == (130_000, 270_000)
    node.applied(command.limits_mw, 2)
    command = node.wants([300_000, 100_000], 3)
    assert command is not None
    assert command.limits_mw == (130_000, 200_000), "lower first"


def test_an_answer_that_comes_after_its_deadline_raises_nothing() -> None:
    node = FleetNode("a", GPUS, [100_000, 100_000], Timing())
    plan = GrantPlan(1, {"site": 800_000}, {"a": Grant(1, 600_000, 600_000)})
    beat = node.heartbeat(0)
    command = node.answered(beat.number, plan, budget(1200), Timing().hold_ns)
    assert command is not None
    assert command.limits_mw == (100_000, 100_000)


def test_an_overtaken_answer_is_ignored() -> None:
    node = FleetNode("a", GPUS, [100_000, 100_000], Timing())
    high = GrantPlan(1, {"site": 800_000}, {"a": Grant(1, 600_000, 600_000)})
    low = GrantPlan(1, {"site": 800_000}, {"a": Grant(2, 200_000, 600_000)})
    first, second = node.heartbeat(0), node.heartbeat(1)
    node.answered(second.number, low, budget(1200), 2)
    node.applied([100_000, 100_000], 3)
    assert node.answered(first.number, high, budget(1200), 4) is None
    assert node.heartbeat(5).held_mw == 200_000


def test_a_node_that_is_not_listed_keeps_its_floor() -> None:
    node = FleetNode("c", GPUS, [100_000, 100_000], Timing())
    plan = GrantPlan(1, {"site": 800_000}, {"c": Grant(1, 600_000, 600_000)})
    command = node.answered(node.heartbeat(0).number, plan, budget(1200), 1)
    assert command is not None
    assert command.limits_mw == (100_000, 100_000)

"""A node's side of the protocol: the limits that it requests of zeusd, and its own messages."""

from __future__ import annotations

from tests.zeus_fleet.bench import GPUS, budget
from zeus_fleet.messages import Grant, GrantPlan, Timing
from zeus_fleet.node import FleetCeilings, FleetNode

LOW = (100_000, 100_000)


def a_node(held: tuple[int, ...] = LOW, name: str = "a") -> FleetNode:
    return FleetNode(name, GPUS, [*held], Timing())


def grant(limit_mw: int, name: str = "a", epoch: int = 1) -> GrantPlan:
    return GrantPlan(1, {"site": 800_000}, {name: Grant(epoch, limit_mw, 600_000)})


def answered(node: FleetNode, plan: GrantPlan, now_ns: int = 2) -> FleetCeilings | None:
    """A heartbeat is sent, and answered at once."""
    return node.answered(node.heartbeat(1).number, plan, budget(1200), now_ns)


def limits(command: FleetCeilings | None) -> tuple[int, ...]:
    assert command is not None
    return tuple(command.limits_mw)


def test_other_gpus_are_lowered_for_one_that_cannot_be() -> None:
    node = a_node((300_000, 300_000))
    assert limits(node.tick(0)) == LOW
    node.applied([300_000, 100_000], 1)
    beat = node.heartbeat(2)
    assert (beat.held_mw, beat.stuck_mw) == (400_000, 200_000)
    asked = limits(answered(node, grant(500_000)))
    assert asked == (100_000, 200_000), "500 W less the 300 W of the stuck GPU"
    asked = limits(node.applied([*asked], 4))
    assert sum(asked) == 500_000
    node.applied([*asked], 5)
    assert node.heartbeat(6).stuck_mw == 0


def test_within_a_node_limits_are_lowered_before_others_are_raised() -> None:
    node = a_node()
    node.tick(0)
    node.applied([*LOW], 0)
    node.wants([300_000, 100_000], 0)
    assert limits(answered(node, grant(400_000))) == (300_000, 100_000)
    node.applied([300_000, 100_000], 3)
    assert limits(node.wants([100_000, 300_000], 4)) == LOW
    assert node.heartbeat(5).held_mw == 400_000
    assert limits(node.applied([*LOW], 6)) == (100_000, 300_000)


def test_possible_effects_of_zeusd_are_reported_until_it_answers() -> None:
    node = a_node()
    assert limits(answered(node, grant(600_000))) == (300_000, 300_000)
    assert node.heartbeat(3).held_mw == 600_000
    node.failed()
    after = Timing().lease_ns
    assert node.heartbeat(after).held_mw == 600_000
    assert limits(node.tick(after)) == LOW
    node.applied([*LOW], after)
    assert node.heartbeat(after).held_mw == 200_000


def test_a_grant_is_divided_as_the_policy_says_up_to_what_each_gpu_has_use_for() -> None:
    node = a_node()
    advised = {0: 130_000, 1: 270_000}
    beat = node.heartbeat(0)
    command = node.answered(beat.number, grant(400_000), budget(1200), 1, advised)
    assert limits(command) == (130_000, 270_000)
    node.applied([130_000, 270_000], 2)
    assert limits(node.wants([300_000, 100_000], 3)) == (130_000, 200_000), "lower first"


def test_an_answer_that_comes_after_its_deadline_raises_nothing() -> None:
    assert limits(answered(a_node(), grant(600_000), 1 + Timing().hold_ns)) == LOW


def test_an_overtaken_answer_is_ignored() -> None:
    node = a_node()
    first = node.heartbeat(0)
    answered(node, grant(200_000, epoch=2))
    node.applied([*LOW], 3)
    assert node.answered(first.number, grant(600_000), budget(1200), 4) is None
    assert node.heartbeat(5).held_mw == 200_000


def test_a_node_that_is_not_listed_keeps_its_floor() -> None:
    assert limits(answered(a_node(name="c"), grant(600_000, "c"))) == LOW

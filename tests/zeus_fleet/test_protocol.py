"""Each rule of the protocol in the history that needs it, on two nodes and a store."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.support import known
from tests.zeus_fleet.bench import DRIFT, FLOOR, MOST, NAMES, Bench, all_to, budget
from tests.zeus_fleet.mutants import MUTANTS
from tests.zeus_fleet.parts import Rules
from zeus_fleet.allocator import Allocator, Snapshot
from zeus_fleet.messages import Budget, BudgetDomain, Grant, GrantPlan, NodeReport, S, Timing
from zeus_fleet.wire import budget_from_table


@pytest.fixture
def rules() -> Rules:
    """The shipped rules; mutants replace them further down."""
    return Rules()


def test_a_silent_node_s_watts_are_used_when_it_has_lowered(rules: Rules) -> None:
    """The worst clocks, an answer that took five seconds, and a zeusd that took all of its time."""
    bench = Bench(rules, 800)
    leader = bench.leader(all_to("a"))
    bench.settle(leader)
    assert bench.hardware == {"a": [300_000, 300_000], "b": [100_000, 100_000]}
    answer = bench.beat("a")
    for _ in range(5):
        bench.round(leader, ("b",))
        bench.now += 1
    bench.deliver("a", answer)  # its last answer
    bench.policy = all_to("b")
    deadline_s = bench.nodes["a"].deadline_ns / S / (1 - DRIFT)
    ends = bench.now + 20
    while bench.now < ends:
        bench.now += 0.1
        bench.round(leader, ("b",))
        if bench.now >= deadline_s + 2.4:
            bench.machines["a"].hardware = [100_000, 100_000]
        assert bench.held_w <= 800
    assert bench.hardware["b"] == [300_000, 300_000]


def test_a_heartbeat_between_read_and_commit_keeps_its_watts(rules: Rules) -> None:
    bench = Bench(rules, 800)
    leader = bench.leader(all_to("a"))
    bench.settle(leader)
    assert leader.plan(bench.snapshot(), bench.allocator_ns()) is None
    bench.policy = all_to("b")
    bench.now += 16
    bench.deliver("b", bench.beat("b"))
    commit = known(leader.plan(bench.snapshot(), bench.allocator_ns()))
    assert "a" in commit.heartbeats
    bench.deliver("a", bench.beat("a"))  # it holds the grant of the current plan
    assert bench.hardware["a"] == [300_000, 300_000]
    bench.commit(commit)
    bench.deliver("b", bench.beat("b"))
    assert bench.held_w <= 800
    bench.settle(leader)
    assert bench.hardware == {"a": [100_000, 100_000], "b": [300_000, 300_000]}


def test_a_grant_on_its_way_is_charged_until_it_cannot_arrive(rules: Rules) -> None:
    bench = Bench(rules, 800)
    leader = bench.leader(all_to("a"))
    for _ in range(3):
        bench.round(leader)
    assert known(bench.plan).grants["a"].limit_mw == MOST
    on_its_way = bench.beat("a")
    bench.policy = all_to("b")
    for _ in range(5):
        bench.round(leader, ("b",))
    assert known(bench.plan).grants["a"].limit_mw == FLOOR
    bench.deliver("a", on_its_way)
    assert bench.hardware["a"] == [300_000, 300_000]
    assert bench.held_w <= 800
    bench.settle(leader)
    assert bench.hardware == {"a": [100_000, 100_000], "b": [300_000, 300_000]}


def test_of_two_leaders_one_writes(rules: Rules) -> None:
    bench = Bench(rules, 800)
    first = bench.leader(all_to("a"))
    bench.round(first)
    for name in NAMES * 2:
        bench.deliver(name, bench.beat(name))
    late = first.plan(bench.snapshot(), bench.allocator_ns())
    second = bench.leader(all_to("b"))
    assert bench.commit(second.plan(bench.snapshot(), bench.allocator_ns()))
    bench.deliver("b", bench.beat("b"))
    bench.commit(late)
    bench.deliver("a", bench.beat("a"))
    assert bench.held_w <= 800


def test_watts_are_freed_before_they_are_granted(rules: Rules) -> None:
    bench = Bench(rules, 800)
    leader = bench.leader(all_to("a"))
    bench.settle(leader)
    bench.policy = all_to("b")
    for _ in range(3):  # a's heartbeats do not come for a while
        bench.now += 1
        bench.round(leader, ("b",))
        assert bench.held_w <= 800
    bench.settle(leader)
    assert bench.hardware == {"a": [100_000, 100_000], "b": [300_000, 300_000]}


def test_a_cut_is_obeyed_without_an_allocator(rules: Rules) -> None:
    bench = Bench(rules, 1000)
    bench.settle(bench.leader())
    assert bench.held_w == 1000
    bench.cut(700)
    for name in NAMES:
        bench.deliver(name, bench.beat(name))
    assert bench.held_w == 700, "600 W above the floors became 300 W, and each node had its half"


def test_a_plan_after_a_cut_raises_nothing_that_was_lowered(rules: Rules) -> None:
    """One node reads the new plan; the other keeps the grant of the old one, less the cut."""
    bench = Bench(rules, 1000)
    leader = bench.leader()
    bench.settle(leader)
    bench.cut(700)
    for name in NAMES:
        bench.deliver(name, bench.beat(name))
    bench.policy = all_to("b")
    bench.round(leader, ("b",))
    for _ in range(4):
        bench.round(leader, ("b",))
        assert bench.held_w <= 700
    bench.settle(leader)
    assert bench.hardware == {"a": [100_000, 100_000], "b": [250_000, 250_000]}


def test_a_command_that_is_held_up_raises_nothing_after_its_deadline(rules: Rules) -> None:
    """The agent is stopped between its decision and zeusd; it continues when b has its watts."""
    bench = Bench(rules, 800)
    leader = bench.leader(all_to("a"))
    for _ in range(3):
        bench.round(leader)
    command = known(bench.nodes["a"].answered(*bench.beat("a"), bench.node_ns("a")))
    assert sum(command.limits_mw) == MOST
    ttl_ns = command.deadline_ns - bench.node_ns("a")
    bench.policy = all_to("b")
    bench.pass_by(20, leader, ("b",))
    assert bench.hardware["b"] == [300_000, 300_000]
    bench.carry_out("a", command, ttl_ns)
    assert bench.most_w <= 800


def test_a_machine_that_slept_finds_its_deadline_passed(rules: Rules) -> None:
    bench = Bench(rules, 800)
    leader = bench.leader(all_to("a"))
    bench.settle(leader)
    bench.policy = all_to("b")
    bench.machines["a"].asleep_until, bench.machines["a"].slept = bench.now + 30, 30.0
    bench.pass_by(30, leader, ("b",))
    assert bench.hardware["b"] == [300_000, 300_000]
    assert bench.held_w <= 800, "it lowers when it wakes"


DIRECTED: dict[str, Callable[[Rules], None]] = {
    "no own obedience to cuts": test_a_cut_is_obeyed_without_an_allocator,
    "clock stops in suspend": test_a_machine_that_slept_finds_its_deadline_passed,
    "time to live instead of a deadline": (
        test_a_command_that_is_held_up_raises_nothing_after_its_deadline
    ),
    "no fence": test_of_two_leaders_one_writes,
    "no guard time": test_a_silent_node_s_watts_are_used_when_it_has_lowered,
    "reclaim at 0.8 L": test_a_silent_node_s_watts_are_used_when_it_has_lowered,
    "no heartbeat compare": test_a_heartbeat_between_read_and_commit_keeps_its_watts,
    "no high": test_a_grant_on_its_way_is_charged_until_it_cannot_arrive,
    "deadline from the reply": test_a_silent_node_s_watts_are_used_when_it_has_lowered,
    "charge by the grant": test_watts_are_freed_before_they_are_granted,
    "grants kept after a cut": test_a_plan_after_a_cut_raises_nothing_that_was_lowered,
}


BY_SCHEDULES = {"dead-man in the agent", "proof by the store's leases"}
"""What tests/zeus_fleet/test_schedules.py notices at any seed."""


def test_each_mutant_is_noticed_by_some_test() -> None:
    assert MUTANTS.keys() == DIRECTED.keys() | BY_SCHEDULES


@pytest.mark.parametrize("mutant", DIRECTED)
def test_a_missing_rule_is_noticed(mutant: str) -> None:
    with pytest.raises(AssertionError):
        DIRECTED[mutant](MUTANTS[mutant])


# --------------------------------------------------------------------------------- other behaviour


def test_the_first_plan_gives_nothing_before_nodes_confirm() -> None:
    bench = Bench(Rules(), 800)
    leader = bench.leader()
    commit = known(leader.plan(bench.snapshot(), 0))
    assert commit.plan.grants == dict.fromkeys(NAMES, Grant(0, FLOOR, FLOOR))
    bench.settle(leader)
    assert bench.held_w == 800


def test_a_plan_that_can_stay_is_not_written_again() -> None:
    bench = Bench(Rules(), 800)
    leader = bench.leader()
    bench.settle(leader)
    bench.settle(leader)
    assert leader.plan(bench.snapshot(), bench.allocator_ns()) is None


def test_a_new_leader_waits_a_lease_before_it_reclaims() -> None:
    bench = Bench(Rules(), 800)
    bench.settle(bench.leader(all_to("a")))
    bench.now += 60
    leader = bench.leader(all_to("b"))
    for _ in range(15):
        bench.now += 1
        bench.round(leader, ("b",))
    assert known(bench.plan).grants["b"].limit_mw == FLOOR
    bench.now += 1.1
    bench.round(leader, ("b",))
    assert known(bench.plan).grants["b"].limit_mw == MOST


def test_a_former_leader_plans_nothing() -> None:
    bench = Bench(Rules(), 800)
    first = bench.leader()
    bench.leader()
    assert first.plan(bench.snapshot(), 0) is None
    first.follow()
    assert first.plan(bench.snapshot(), 0) is None


def test_a_silent_node_with_a_stuck_gpu_is_charged_for_it() -> None:
    bench = Bench(Rules(), 800)
    leader = bench.leader(all_to("b"))
    bench.settle(leader)
    bench.heartbeats["a"] = NodeReport(99, -1, 300_000, FLOOR, MOST, MOST, stuck_mw=100_000)
    for _ in range(18):
        bench.now += 1
        bench.round(leader, ("b",))
    assert known(bench.plan).grants["b"].limit_mw == 500_000


def test_a_leaving_node_is_lowered_and_its_watts_are_used() -> None:
    bench = Bench(Rules(), 800)
    leader = bench.leader()
    bench.settle(leader)
    bench.budget = Budget(bench.budget.domains, bench.budget.floors_mw, frozenset({"a"}))
    bench.budget_revision += 1
    bench.settle(leader)
    bench.settle(leader)
    assert bench.hardware == {"a": [100_000, 100_000], "b": [300_000, 300_000]}


def test_nested_domains_each_keep_their_bound() -> None:
    bench = Bench(Rules(), 1000)
    rack = BudgetDomain("rack", 450_000, frozenset({"a"}))
    bench.budget = Budget((bench.budget.site, rack), bench.budget.floors_mw)
    bench.settle(bench.leader())
    assert sum(bench.hardware["a"]) == 450_000
    assert sum(bench.hardware["b"]) == 500_000


def test_a_new_domain_is_obeyed_before_any_plan_knows_of_it() -> None:
    bench = Bench(Rules(), 1000)
    bench.settle(bench.leader())
    rack = BudgetDomain("rack", 450_000, frozenset({"a"}))
    bench.budget = Budget((bench.budget.site, rack), bench.budget.floors_mw)
    bench.deliver("a", bench.beat("a"))
    assert sum(bench.hardware["a"]) == FLOOR


def test_a_reserve_is_not_granted() -> None:
    bench = Bench(Rules(), 1000)
    bench.budget = budget(1000, reserve_w=200)
    bench.settle(bench.leader())
    assert bench.held_w == 800


def table(**settings: object) -> Budget:
    return budget_from_table({"limit_w": 9, **settings})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: budget(399), "site: 399 W is below the minimum limits of its GPUs (400 W)"),
        (lambda: budget(500, reserve_w=200), "allow 600 W or remove nodes"),
        (
            lambda: Budget((BudgetDomain("site", 10**6, frozenset("a")),), {"a": 1, "b": 1}),
            "b is not in",
        ),
        (
            lambda: Budget((BudgetDomain("site", 10**6, frozenset("ab")),), {"a": 1}),
            "b of site needs a floor",
        ),
        (
            lambda: Budget(2 * budget(800).domains, budget(800).floors_mw),
            "two domains have the same name; give each its own",
        ),
        (lambda: table(reserve_w=-1, nodes={"a": 1}), "reserve_w: -1 W is not possible; give 0 W"),
        (lambda: table(nodes={"a": 1, "b": -1}), "nodes.b: -1 W is not possible; give 0 W to 1 GW"),
        (lambda: table(limit_w="lots", nodes={"a": 1}), "limit_w: 'lots' is not a power; write"),
        (lambda: table(limit_w=[9], nodes={"a": 1}), "limit_w: [9] is not a power; write 80kW"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(make: Callable[[], Budget], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make()


def test_one_commit_reclaims_from_as_many_as_a_transaction_compares() -> None:
    names = tuple(f"n{index}" for index in range(130))
    site = budget(130 * 600, names)
    grants = dict.fromkeys(names, Grant(1, MOST, MOST))
    plan = GrantPlan(1, dict(site.spare_mw), grants)
    allocator = Allocator(Timing())
    allocator.lead(1)
    beats = dict.fromkeys(names, NodeReport(1, 1, MOST, FLOOR, MOST, MOST))
    assert allocator.plan(Snapshot(1, site, 1, plan, 1, beats), 0) is None
    first = known(allocator.plan(Snapshot(1, site, 1, plan, 1, beats), 16 * S))
    assert len(first.heartbeats) == 100
    second = known(allocator.plan(Snapshot(1, site, 1, first.plan, 2, beats), 17 * S))
    assert len(second.heartbeats) == 30
    assert {grant.limit_mw for grant in second.plan.grants.values()} == {FLOOR}

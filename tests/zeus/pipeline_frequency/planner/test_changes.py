from __future__ import annotations

import functools
import random

import pytest

from tests import seeds
from tests.zeus.pipeline_frequency.instances import KINDS, random_instance, uniform_clocks
from tests.zeus.pipeline_frequency.timeline import timeline, totals
from tests.zeus.pipeline_frequency.toys import changed, measured, same_options, usual
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner import Changes, Planner, PowerBound
from zeus.optimizer.pipeline_frequency.plans import count_changes
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b

PIPELINE = one_f_one_b(4, 4)


def planner(changes: Changes | None = None, exact: bool | None = None) -> Planner:
    return usual(microbatches=4, changes=changes, exact=exact)


def test_a_changes_time_is_in_the_plans_time() -> None:
    frontier = planner(Changes(time_s=0.01)).frontier(20)
    assert len(frontier.plans) > 5
    for plan in frontier.plans:
        runs = timeline(measured("a100", 4), PIPELINE, plan.stages, change_time_s=0.01)
        # The clock that changes does no work: its GPUs are blocked.
        time_s, energy_j = totals(runs, 4, 83.64)
        assert plan.time_s == pytest.approx(time_s)
        assert plan.energy_j == pytest.approx(energy_j)


def test_where_changes_take_time_there_are_fewer() -> None:
    time_s = 1.05 * planner().fastest_time_s
    free = planner().straggler(time_s).plans[0]
    dear = planner(Changes(time_s=0.02)).straggler(time_s).plans[0]
    assert dear.clock_changes < free.clock_changes / 2
    assert dear.time_s <= time_s * (1 + 1e-9)


def test_the_number_of_changes_can_be_limited_and_more_never_cost_more() -> None:
    time_s = 1.1 * planner().fastest_time_s
    free = planner().straggler(time_s).plans[0]
    effective = []
    for most in (0, 3, 10, 200):
        found = planner(Changes(most=most)).straggler(time_s)
        (plan,) = found.plans
        assert count_changes(plan.stages) == plan.clock_changes <= most
        assert plan.time_s <= time_s * (1 + 1e-9)
        # It still saves much of what any plan saves.
        saved_j = found.baseline_energy_j - plan.energy_j
        assert saved_j > 0.6 * (found.baseline_energy_j - free.energy_j)
        effective.append(plan.effective_energy_j)
    assert effective == sorted(effective, reverse=True)


def test_ties_go_to_fewer_changes() -> None:
    """Two clocks that take the same on one instruction: the neighbour's is taken."""
    options = {
        (0, "forward", 0): [Option(1400, 1.0, 100.0), Option(1300, 2.0, 90.0)],
        (0, "backward", 0): [Option(1400, 1.0, 100.0), Option(1300, 1.0, 100.0)],
    }
    pipeline = one_f_one_b(1, 2)
    found = Planner(InstructionProfile(options), pipeline, p2p_power_w=0.0)
    assert found.straggler(4.0).plans[0].clock_changes == 0
    slow = found.straggler(6.0).plans[0]
    assert slow.effective_energy_j == pytest.approx(380.0)
    assert slow.clock_changes == 0


def test_exact_plans_count_changes_too() -> None:
    pipeline = one_f_one_b(1, 3)
    profile = same_options([Option(1400, 1.0, 100.0), Option(1300, 1.2, 80.0)])
    free = Planner(profile, pipeline, p2p_power_w=0.0).straggler(6.6).plans[0]
    assert free.effective_energy_j == pytest.approx(540.0)
    assert free.clock_changes == 1
    none = Planner(profile, pipeline, p2p_power_w=0.0, changes=Changes(most=0))
    assert none.straggler(6.6).plans[0].effective_energy_j == pytest.approx(600.0)
    slow = Planner(profile, pipeline, p2p_power_w=0.0, changes=Changes(time_s=0.3))
    # 0.6 s are three slow instructions, or one and a change.
    assert slow.straggler(6.6).plans[0].effective_energy_j == pytest.approx(580.0)


@pytest.mark.parametrize("slow", [2, 3, 4, 5, 6])
def test_of_the_best_plans_the_one_with_the_fewest_changes(slow: int) -> None:
    """Any so many of eight instructions may be the slow ones: together they need one change."""
    profile = same_options([Option(1400, 1.0, 100.0), Option(1300, 1.2, 80.0)])
    planner = Planner(profile, one_f_one_b(1, 4), p2p_power_w=0.0)
    (plan,) = planner.straggler(8 + 0.2 * slow).plans
    assert plan.effective_energy_j == pytest.approx(800 - 20 * slow)
    assert plan.clock_changes == 1


def test_bad_costs_are_reported() -> None:
    with pytest.raises(PipelineFrequencyError, match=r"change_time_s: .* not -1\.0"):
        planner(Changes(time_s=-1.0))
    with pytest.raises(PipelineFrequencyError, match=r"max_changes: .* not -1"):
        planner(Changes(most=-1))


@pytest.mark.parametrize(
    ("seed", "changes", "slower"),
    [
        (1044, Changes(time_s=0.00023, most=7), 1.6),
        (1109, Changes(time_s=0.0146), 1.3),
        (1163, Changes(time_s=0.0007), 1.1),
        (1186, Changes(time_s=0.099, most=5), 1.1),
    ],
)
def test_no_plan_takes_more_than_one_clock_or_one_power_limit(
    seed: int, changes: Changes, slower: float
) -> None:
    instance = random_instance(random.Random(seed), KINDS[seed % len(KINDS)])
    profile, pipeline, p2p_w = instance.profile, instance.pipeline, instance.p2p_power_w
    asked = Planner(profile, pipeline, p2p_power_w=p2p_w, changes=changes, exact=False)
    limit_s = slower * asked.fastest_time_s
    (plan,) = asked.deadline(limit_s).plans
    tried = 0
    for clocks in uniform_clocks(instance):
        limited = asked.plan_of(instance.stages(clocks))
        few = changes.most is None or limited.clock_changes <= changes.most
        if few and limited.time_s <= limit_s:
            tried += 1
            assert plan.energy_j <= limited.energy_j * (1 + 1e-9)
    assert tried


@pytest.mark.parametrize("seed", [5144, 5243])
def test_a_plan_that_was_told_is_the_answer_for_its_own_time(seed: int) -> None:
    """Also where it does without a change of the plan that was found, and so is faster."""
    instance = random_instance(random.Random(seed), KINDS[seed % len(KINDS)])
    profile, pipeline, p2p_w = instance.profile, instance.pipeline, instance.p2p_power_w
    asked = Planner(profile, pipeline, p2p_power_w=p2p_w, changes=Changes(0.01), exact=False)
    for plan in asked.frontier().plans:
        (found,) = asked.straggler(plan.time_s).plans
        assert found.effective_energy_j <= plan.effective_energy_j + 1e-9 * abs(plan.energy_j)


@pytest.mark.parametrize("kind", KINDS)
def test_with_changes_that_cost_no_plan_takes_more_than_a_simpler_one(kind: str) -> None:
    """Neither than uniform settings with the time of their changes, nor than the frontier's plan of
    that time, whether or not the planner was asked for the frontier before.
    """
    chance = random.Random(seeds.fresh(kind))
    tried = 0
    while not tried:
        instance = random_instance(chance, kind)
        shortest_s = min(
            option.time_s
            for one in instance.pipeline.instructions
            for option in instance.profile.options(one.stage, one.name, one.chunk)
        )
        time_s = shortest_s * chance.choice([0.0, 0.001, 0.05, 0.5])
        changes = Changes(time_s, chance.choice([None, 0, 3, 12]) if time_s else 5)

        def make() -> Planner:
            return Planner(
                instance.profile,
                instance.pipeline,
                p2p_power_w=instance.p2p_power_w,
                changes=changes,
                exact=False,
            )

        asked = make()
        try:
            frontier = asked.frontier()
        except PipelineFrequencyError:
            assert changes.most is not None
            continue
        uniform = [asked.plan_of(instance.stages(one)) for one in uniform_clocks(instance)]
        if changes.most is not None:
            uniform = [one for one in uniform if one.clock_changes <= changes.most]
        for plan in chance.sample(frontier.plans, min(2, len(frontier.plans))):
            assert changes.most is None or plan.clock_changes <= changes.most
            assert plan.bound_j <= plan.energy_j
            simpler = [
                one for one in (*frontier.plans, *uniform) if one.time_s <= plan.time_s * (1 + 1e-9)
            ]
            blocking_j = instance.p2p_power_w * instance.pipeline.num_stages * plan.time_s
            equal_j = 1e-9 * (abs(plan.energy_j) + blocking_j)
            for who in (asked, make()):
                (found,) = who.deadline(plan.time_s).plans
                assert found.time_s <= plan.time_s * (1 + 1e-9)
                assert found.energy_j <= min(one.energy_j for one in simpler) + equal_j
                (found,) = who.straggler(plan.time_s).plans
                assert found.time_s <= plan.time_s * (1 + 1e-9)
                least_j = min(one.effective_energy_j for one in simpler)
                assert found.effective_energy_j <= least_j + equal_j
                tried += 1


def one_stage(forward: list[Option], backward: list[Option], most: int, exact: bool) -> Planner:
    """A planner of one stage with three microbatches, and at most so many changes."""
    profile = InstructionProfile({(0, "forward", 0): forward, (0, "backward", 0): backward})
    changes = Changes(most=most)
    return Planner(profile, one_f_one_b(1, 3), p2p_power_w=0.0, changes=changes, exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("most", [0, 1])
def test_a_pipeline_that_must_change_clocks_more_often_has_no_plan(most: int, exact: bool) -> None:
    forward = [Option(1400, 1.0, 100.0), Option(1390, 1.2, 80.0)]
    backward = [Option(1300, 1.0, 100.0), Option(1290, 1.2, 80.0)]
    asked = one_stage(forward, backward, most, exact)
    assert asked.shortest_time_s == float("inf")
    for ask in (
        asked.frontier,
        lambda: asked.deadline(7.0),
        lambda: asked.straggler(7.0),
        lambda: asked.bounded([PowerBound(1e6)]),
    ):
        with pytest.raises(PipelineFrequencyError, match="that few clock changes was found"):
            ask()


@pytest.mark.parametrize("exact", [False, True])
def test_the_only_plan_may_be_slower_than_the_least_energy(exact: bool) -> None:
    """Without changes, the one clock that both instructions have takes more time and energy."""
    slow = Option(1000, 2.0, 150.0)
    forward, backward = [Option(1400, 1.0, 100.0), slow], [Option(1300, 1.0, 100.0), slow]
    asked = one_stage(forward, backward, 0, exact)
    for found in (asked.frontier(), asked.deadline(13.0), asked.straggler(100.0)):
        (plan,) = found.plans
        assert plan.time_s == pytest.approx(12.0)
        assert plan.energy_j == pytest.approx(900.0)
    with pytest.raises(PipelineFrequencyError, match="no plan that takes 11 s"):
        asked.deadline(11.0)


@functools.cache
def bounded_planner(changes: Changes | None = None) -> Planner:
    """For a bound, many planners are made: of few microbatches and every fourth clock."""
    few = changed(measured("a100", 4), lambda options: options[::4])
    return Planner(few, PIPELINE, p2p_power_w=83.64, changes=changes, exact=False)


@pytest.mark.parametrize("changes", [Changes(time_s=0.02), Changes(most=6)])
def test_a_power_bound_holds_with_changes_that_cost(changes: Changes) -> None:
    without = bounded_planner()
    free = without.deadline(1.1 * without.fastest_time_s).plans[0]
    asked = bounded_planner(changes)
    (fast,) = asked.bounded([PowerBound(0.98 * free.peak_power_w)]).plans
    (plan,) = asked.bounded([PowerBound(0.98 * free.peak_power_w)], 1.05 * fast.time_s).plans
    for one in (fast, plan):
        assert one.peak_power_w <= 0.98 * free.peak_power_w
        assert changes.most is None or one.clock_changes <= changes.most
    assert fast.time_s >= asked.shortest_time_s * (1 - 1e-9)
    assert plan.time_s <= 1.05 * fast.time_s * (1 + 1e-9)
    assert plan.energy_j <= fast.energy_j * (1 + 1e-9)

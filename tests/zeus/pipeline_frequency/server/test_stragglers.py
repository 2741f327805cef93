"""Which pipeline is late, and how the others respond."""

from __future__ import annotations

import random

import pytest

from tests import seeds
from tests.zeus.pipeline_frequency.server.running import frontier
from zeus.optimizer.pipeline_frequency.server.stragglers import PENDING, StragglerWatch, plans_for

RULES = StragglerWatch
SOON = RULES.window + RULES.patience
RISEN = RULES.window + RULES.up_patience


def run(
    watch: StragglerWatch, first: int, paces: list[float], count: int
) -> list[tuple[float, ...]]:
    """So many iterations with one rank per pipeline; the slowdowns after each change."""
    changes = []
    for iteration in range(first, first + count):
        before = watch.slowdowns
        told = [watch.observe(rank, iteration, pace) for rank, pace in enumerate(paces)]
        assert any(told) == (watch.slowdowns != before)
        if watch.slowdowns != before:
            changes.append(watch.slowdowns)
    return changes


def test_a_pipeline_that_stays_late_is_a_straggler() -> None:
    watch = StragglerWatch([[0], [1], [2]])
    assert run(watch, 0, [1.0, 1.2, 1.0], SOON - 2) == []
    assert run(watch, SOON - 2, [1.0, 1.2, 1.0], 1) == [(1.0, pytest.approx(1.2), 1.0)]


def test_a_delay_of_all_pipelines_is_no_straggler() -> None:
    watch = StragglerWatch([[0], [1]])
    assert run(watch, 0, [1.3, 1.3], 50) == []
    assert watch.paces == (1.3, 1.3)
    assert run(watch, 50, [1.3, 1.3 * 1.2], SOON) == [(1.0, pytest.approx(1.2))]


def test_a_slow_iteration_now_and_then_is_no_straggler() -> None:
    watch = StragglerWatch([[0], [1]])
    for start in range(0, 200, 10):
        assert run(watch, start, [1.0, 1.0], 8) == []
        assert run(watch, start + 8, [1.0, 3.0], 2) == []


@pytest.mark.parametrize("pace", [1.0, 1.024])
def test_it_is_none_any_more_once_it_has_recovered(pace: float) -> None:
    watch = StragglerWatch([[0], [1]], slowdowns=[1.0, 1.2])
    assert run(watch, 0, [1.0, pace], 40) == [(1.0, 1.0)]


@pytest.mark.parametrize("before", [1.0, 1.04])
def test_between_the_thresholds_nothing_changes(before: float) -> None:
    watch = StragglerWatch([[0], [1]], slowdowns=[1.0, before])
    assert run(watch, 0, [1.0, 1.04], 100) == []


def test_a_straggler_that_changes_is_followed_both_ways() -> None:
    watch = StragglerWatch([[0], [1]], slowdowns=[1.0, 1.2])
    assert run(watch, 0, [1.0, 1.3], RISEN)[-1] == (1.0, pytest.approx(1.3))
    assert run(watch, RISEN, [1.0, 1.18], SOON + 2)[-1] == (1.0, pytest.approx(1.18))
    assert run(watch, RISEN + 20, [1.0, 1.175], 20) == []


def test_times_above_the_known_range_are_not_followed() -> None:
    """It saves little, and noise that lasts as long would send plans up, and down again."""
    watch = StragglerWatch([[0], [1]], slowdowns=[1.0, 1.2])
    assert run(watch, 0, [1.0, 1.25], RISEN - 4) == []
    assert run(watch, RISEN - 4, [1.0, 1.2], 40) == []
    assert run(watch, RISEN + 36, [1.0, 1.23], 60) == []
    assert run(watch, RISEN + 96, [1.0, 1.24], 60) == [(1.0, pytest.approx(1.24))]


def test_the_smallest_observed_delay_is_assumed() -> None:
    """The others are slowed down to it; were they slower, training would be."""
    watch = StragglerWatch([[0], [1]])
    watch.window = 1
    late = [1.30, 1.22, 1.25, 1.21, 1.28]
    for iteration, pace in enumerate(late):
        assert watch.slowdowns == (1.0, 1.0)
        watch.observe(0, iteration, 1.0)
        watch.observe(1, iteration, pace)
    assert watch.slowdowns == (1.0, 1.21)


def test_a_pipeline_is_as_late_as_its_slowest_rank() -> None:
    watch = StragglerWatch([[0, 1], [2, 3]])
    for iteration in range(SOON):
        for rank, pace in enumerate([1.0, 0.9, 0.8, 1.2]):
            watch.observe(rank, iteration, pace)
    assert watch.slowdowns == (1.0, pytest.approx(1.2))


def test_after_a_change_of_plans_only_what_came_later_counts() -> None:
    watch = StragglerWatch([[0], [1]])
    run(watch, 0, [1.0, 1.2], SOON - 2)
    watch.restart(after=100)
    assert run(watch, SOON, [1.0, 1.2], 101 - SOON) == []
    assert run(watch, 101, [1.0, 1.2], SOON - 2) == []
    assert run(watch, 101 + SOON - 2, [1.0, 1.2], 1)


def test_without_reports_of_all_ranks_nothing_is_decided_nor_kept_forever() -> None:
    watch = StragglerWatch([[0, 1], [2, 3]])
    for iteration in range(3 * PENDING):
        for rank in (0, 1, 2):
            assert not watch.observe(rank, iteration, 1.5 if rank == 2 else 1.0)
    assert len(watch._pending) <= PENDING
    assert watch.slowdowns == (1.0, 1.0)


def test_a_single_pipeline_has_no_straggler() -> None:
    watch = StragglerWatch([[0, 1]])
    for iteration in range(50):
        assert not watch.observe(0, iteration, 9.0)
        assert not watch.observe(1, iteration, 9.0)


def test_ranks_that_are_no_part_of_the_job_are_not_listened_to() -> None:
    watch = StragglerWatch([[0], [1]])
    assert not watch.observe(7, 0, 1.0)


def test_batches_make_no_difference() -> None:
    """Ranks report about once a second, several iterations at a time, in any order."""
    seed = seeds.fresh()
    chance = random.Random(seed)
    for _ in range(30):
        pipelines = [[0, 1], [2, 3], [4, 5]]
        times = [
            [chance.choice([1.0, 1.2]) if i % 20 else 1.0 for _ in range(6)] for i in range(100)
        ]
        late = chance.randrange(6)
        for row in times[40:80]:
            row[late] = 1.4
        one, other = StragglerWatch(pipelines), StragglerWatch(pipelines)
        for iteration, row in enumerate(times):
            for rank, pace in enumerate(row):
                one.observe(rank, iteration, pace)
        told = [0] * 6
        while min(told) < len(times):
            rank = chance.randrange(6)
            for _ in range(chance.randrange(15)):
                if told[rank] < len(times):
                    other.observe(rank, told[rank], times[told[rank]][rank])
                    told[rank] += 1
        assert other.slowdowns == one.slowdowns
        assert other.paces == one.paces


def test_random_stragglers_are_found_and_plans_do_not_oscillate() -> None:
    seed = seeds.fresh()
    chance = random.Random(seed)
    made = frontier(60)
    for _ in range(seeds.tries(40)):
        count = chance.randrange(2, 9)
        late = chance.randrange(count)
        factor = chance.uniform(1.12, 1.5)
        noise = chance.uniform(0, 0.01)
        common = chance.uniform(1.0, 1.2)
        watch = StragglerWatch([[n] for n in range(count)])
        plans, switches = [made.fastest()] * count, []
        for iteration in range(900):
            begun, ended = iteration >= 300, iteration >= 600
            changed = False
            for n in range(count):
                pace = common * chance.gauss(1, noise)
                if n == late and begun and not ended:
                    pace *= factor
                changed |= watch.observe(n, iteration, pace)
            if changed:
                new = plans_for(made, made.fastest(), watch.slowdowns)
                if new != plans:
                    plans = new
                    switches.append(iteration)
                    watch.restart(iteration + 3)
            if iteration == 599:
                assert plans[late] == made.fastest()
                others = {plan for n, plan in enumerate(plans) if n != late}
                assert len(others) == 1
                planned_s = made.plans[others.pop()].time_s
                # Never later than the straggler, beyond what noise can hide; and nearly as late.
                assert 2 * factor * 0.94 - 0.02 <= planned_s <= 2 * factor * (1 + 3 * noise)
        assert plans == [made.fastest()] * count
        assert not [one for one in switches if one < 300], "nobody was late then"
        assert len([one for one in switches if one < 600]) <= 3, switches
        assert len([one for one in switches if one >= 600]) <= 3, switches


# -------------------------------------------------------------------------- what each pipeline gets


def test_without_a_straggler_all_get_what_was_asked_for() -> None:
    assert plans_for(frontier(), 7, [1.0, 1.0, 1.0]) == [7, 7, 7]


def test_the_others_minimize_energy_while_they_wait_for_a_straggler() -> None:
    made = frontier(101)
    plans = plans_for(made, made.fastest(), [1.0, 1.2, 1.0])
    assert plans == [made.by_straggler(2.4), made.fastest(), made.by_straggler(2.4)]
    assert made.plans[plans[0]].time_s == pytest.approx(2.4)


def test_a_straggler_that_can_keep_up_with_a_slow_plan_is_sped_up_to_it() -> None:
    made = frontier(101)
    base = made.by_deadline(2.6)
    wanted_s = made.plans[base].time_s
    plans = plans_for(made, base, [1.0, 1.1])
    assert plans[0] == base
    assert 1.1 * made.plans[plans[1]].time_s == pytest.approx(wanted_s, abs=0.02)
    assert 1.1 * made.plans[plans[1]].time_s <= wanted_s


def test_of_two_stragglers_the_one_that_is_less_late_is_slowed_down_to_the_other() -> None:
    made = frontier(101)
    plans = plans_for(made, made.fastest(), [1.1, 1.0, 1.3])
    times = [
        made.plans[plan].time_s * late for plan, late in zip(plans, [1.1, 1.0, 1.3], strict=True)
    ]
    assert plans[2] == made.fastest()
    assert all(time_s <= 2.6 * (1 + 1e-9) for time_s in times)
    assert min(times) > 2.55


def test_no_plan_makes_training_slower_than_the_straggler_or_the_request_does() -> None:
    seed = seeds.fresh()
    chance = random.Random(seed)
    for _ in range(300):
        made = frontier(chance.randrange(1, 40))
        base = chance.randrange(len(made.plans))
        late = [
            chance.choice([1.0, chance.uniform(1.03, 2)]) for _ in range(chance.randrange(1, 6))
        ]
        plans = plans_for(made, base, late)
        limit_s = max(made.plans[base].time_s, max(late) * made.plans[-1].time_s)
        for plan, slowdown in zip(plans, late, strict=True):
            slower = slowdown * made.plans[plan].time_s
            assert slower <= limit_s * (1 + 1e-9)

"""The clock of each instruction, for any calls of the program."""

from __future__ import annotations

import random

import pytest

from zeus.optimizer.pipeline_frequency.follower import FREE, Follower, Schedule

PLAN = (("forward", 1410), ("forward", 0), ("backward", 900), ("backward", 1200))
CLOCKS = [1410, 0, 900, 1200]


class Told(list[str]):
    """The warnings."""


def follower(plan: tuple[tuple[str, int], ...] = PLAN) -> tuple[Follower, Told]:
    told = Told()
    made = Follower(told.append)
    if plan:
        made.offer(Schedule(1, plan))
    return made, told


def step(made: Follower, names: tuple[str, ...] = ()) -> list[int]:
    made.begin_step()
    clocks = [made.instruction(name) for name in names or tuple(name for name, _ in PLAN)]
    made.end_step()
    return clocks


def test_each_step_runs_the_plan_from_its_beginning() -> None:
    made, told = follower()
    for iteration in range(3):
        assert step(made) == CLOCKS
        assert made.iteration == iteration
    assert told == []


def test_a_program_that_only_ends_steps_is_followed_too() -> None:
    """As it is with ml-energy/zeus, where the begin of a step means nothing."""
    made, told = follower()
    for iteration in range(3):
        assert [made.instruction(name) for name, _ in PLAN] == CLOCKS
        assert made.iteration == iteration
        made.end_step()
    assert told == []


def test_iterations_are_not_counted_anew_once_a_program_says_where_steps_begin() -> None:
    made, told = follower()
    for _ in range(3):
        for name, _ in PLAN:
            made.instruction(name)
        made.end_step()
    assert step(made) == CLOCKS
    assert made.iteration >= 3
    assert told == []


def test_without_a_plan_clocks_are_the_defaults_and_there_is_no_warning() -> None:
    made, told = follower(())
    assert step(made, ("a", "b", "c")) == [FREE] * 3
    assert told == []


def test_instructions_outside_of_steps_are_no_training() -> None:
    made, told = follower()
    assert made.instruction("forward") == FREE or made.iteration == 0
    assert step(made) == CLOCKS
    assert made.iteration == 0
    assert [made.instruction("forward") for _ in range(9)] == [FREE] * 9
    assert step(made) == CLOCKS
    assert told == []


def test_a_pause_lasts_until_the_next_step() -> None:
    made, told = follower()
    step(made)
    made.pause()
    assert [made.instruction("forward") for _ in range(9)] == [FREE] * 9
    assert step(made) == CLOCKS
    assert told == []


@pytest.mark.parametrize(
    ("names", "clocks", "said"),
    [
        (("forward", "backward", "forward"), [1410, FREE, FREE], "'backward', but 'forward'"),
        (("forward", "forward", "backward", "backward", "forward"), [*CLOCKS, FREE], "more than"),
        (("forward", "forward", "backward"), [1410, 0, 900], "ran 3 instructions, the plan has 4"),
        (("Forward",), [FREE], "'Forward', but 'forward'"),
    ],
)
def test_a_mismatch_is_reported_once_and_the_next_step_fits(
    names: tuple[str, ...], clocks: list[int], said: str
) -> None:
    made, told = follower()
    for _ in range(3):
        assert step(made, names) == clocks
    assert len(told) == 1
    assert said in told[0]
    assert step(made) == CLOCKS


def test_an_unannounced_evaluation_costs_one_step_and_no_more() -> None:
    made, told = follower()
    for name, _ in PLAN:
        made.instruction(name)
    made.end_step()
    for _ in range(6):
        made.instruction("forward")  # of an evaluation that is not announced
    assert [made.instruction(name) for name, _ in PLAN] == [FREE] * 4
    made.end_step()
    assert [made.instruction(name) for name, _ in PLAN] == CLOCKS
    assert len(told) == 1
    assert "paused" in told[0]


def test_a_step_without_an_end_is_followed_by_a_step() -> None:
    made, told = follower()
    made.begin_step()
    made.instruction("forward")
    assert step(made) == CLOCKS
    assert told == []


def test_a_plan_takes_effect_at_its_iteration_and_the_newest_counts() -> None:
    made, _ = follower()
    step(made)
    made.offer(Schedule(2, (("forward", 300),), at_iteration=5))
    made.offer(Schedule(3, (("forward", 600), ("backward", 700)), at_iteration=3))
    for iteration in (1, 2):
        assert step(made) == CLOCKS
        assert (made.iteration, made.schedule.version) == (iteration, 1)
    assert step(made, ("forward", "backward")) == [600, 700]
    assert (made.iteration, made.schedule.version) == (3, 3)
    for _ in range(5):
        assert step(made, ("forward", "backward")) == [600, 700]


def test_a_plan_that_comes_late_takes_effect_with_the_next_step() -> None:
    made, _ = follower()
    for _ in range(10):
        step(made)
    made.begin_step()
    made.instruction("forward")
    made.offer(Schedule(2, (("forward", 300),), at_iteration=4))
    assert made.instruction("forward") == 0
    assert step(made, ("forward",)) == [300]


def test_an_empty_plan_ends_one() -> None:
    made, told = follower()
    step(made)
    made.offer(Schedule(2))
    assert step(made) == [FREE] * 4
    assert told == []


@pytest.mark.parametrize("seed", range(60))
def test_clocks_follow_the_plan_and_steps_recover_after_any_calls(seed: int) -> None:
    """Random calls: never an error, never another clock than the plan's, and a step that does what
    the plan says is always followed.
    """
    print("seed", seed)
    chance = random.Random(seed)
    made, told = follower(())
    allowed = {FREE}
    version = 0
    explicit = chance.random() < 0.7
    for _ in range(400):
        call = chance.randrange(7)
        if call == 0 and explicit:
            made.begin_step()
        elif call == 1:
            made.end_step()
        elif call == 2 and chance.random() < 0.3:
            made.pause()
        elif call == 3 and chance.random() < 0.3:
            version += 1
            plan = tuple(
                (chance.choice(["forward", "backward"]), chance.randrange(0, 1500, 15))
                for _ in range(chance.randrange(8))
            )
            at = made.iteration + chance.randrange(-2, 6)
            made.offer(Schedule(version, plan, at))
            allowed |= {mhz for _, mhz in plan}
        elif call == 4:
            if explicit:
                made.begin_step()
            else:
                made.end_step()
                made.end_step()
            steps = made.schedule.steps
            if explicit or made.count == 0:
                found = [made.instruction(name) for name, _ in steps]
                assert found == [mhz for _, mhz in steps]
        else:
            assert made.instruction(chance.choice(["forward", "backward", ""])) in allowed
        assert made.schedule.version <= version
    assert len(told) <= 3

"""What every frontier and every single plan must be, on random problems and on measured ones."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests import seeds
from tests.zeus.pipeline_frequency.instances import (
    KINDS,
    Instance,
    ask,
    check_frontier,
    missed,
    random_instance,
    uniform_policies,
)
from tests.zeus.pipeline_frequency.toys import same_options, usual
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.planner.linear import Optimum, Program
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import gpipe, one_f_one_b


def check_answers(
    instance: Instance,
    planner: Callable[[], Planner],
    frontier: Frontier,
    policies: list[tuple[float, float]],
    times_s: list[float],
) -> None:
    """Plans within these times are neither late, nor above a policy or the frontier's plan."""
    for time_s, straggler in itertools.product(times_s, (False, True)):
        found = ask(instance, planner(), frontier, policies, time_s, straggler)
        assert max(found.late, found.above_policy, found.above_frontier) <= 1e-9, found


@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_is_late_or_above_what_is_simpler(kind: str) -> None:
    """Simpler are one clock for all, one power limit for all, and the frontier's own plans.

    A thousand more: benchmarks/pipeline_instances.py.
    """
    rnd = random.Random(seeds.fresh(kind))
    for _ in range(seeds.tries(3)):
        instance = random_instance(rnd, kind)
        planner = instance.planner(exact=False)
        frontier = planner.frontier(30)
        check_frontier(instance, frontier)
        policies = uniform_policies(instance)
        fastest_s, slowest_s = frontier.plans[-1].time_s, frontier.plans[0].time_s
        times = [rnd.uniform(fastest_s, 1.1 * slowest_s), rnd.choice(frontier.plans).time_s]
        times.append(rnd.choice(policies)[0])
        check_answers(instance, lambda planner=planner: planner, frontier, policies, times)


@pytest.mark.parametrize("turn", range(seeds.tries(10)))
def test_plans_where_times_tie_and_scales_are_far_apart(turn: int) -> None:
    """One stage, one microbatch, identical stages, one long stage; no and much blocking power."""
    rnd = random.Random(seeds.fresh(f"turn {turn}"))
    make, stages, microbatches = rnd.choice(
        [
            (gpipe, 8, 1),
            (gpipe, 4, 1),
            (one_f_one_b, 1, 1),
            (one_f_one_b, 1, 6),
            (one_f_one_b, 2, 2),
        ]
    )
    unit_s, power_w = 10 ** rnd.uniform(-4, 3), rnd.choice([1.0, 250.0])
    p2p_power_w = power_w * rnd.choice([0.0, 0.3, 1000.0])
    slow, longer = rnd.randrange(stages), rnd.choice([1.0, 5.0])
    usual_s = {name: unit_s * rnd.uniform(0.3, 3) for name in ("forward", "backward")}
    options = {}
    for stage, name in itertools.product(range(stages), ("forward", "backward")):
        time_s = usual_s[name] * (longer if stage == slow else 1.0)
        options[stage, name, 0] = [
            Option(
                1410 - 15 * step, time_s * ratio, time_s * power_w * ratio ** rnd.choice([-2, -1])
            )
            for step, ratio in enumerate((1.0, 1.0, 1.1, 1.1 + 1e-12, 1.3))
        ]
    instance = Instance(
        "ties", InstructionProfile(options), make(stages, microbatches), p2p_power_w
    )
    planner = instance.planner(exact=False)
    frontier, policies = planner.frontier(), uniform_policies(instance)
    check_frontier(instance, frontier)
    times = [plan.time_s for plan in rnd.choices(frontier.plans, k=3)]
    least_s = planner.fastest_time_s
    times += [least_s, max(least_s, times[0] * (1 - 1e-10)), math.inf]
    check_answers(instance, lambda: planner, frontier, policies, times)


@pytest.mark.parametrize("seed", [138492117, 754687985])
def test_times_that_differ_by_rounding_are_one(seed: int) -> None:
    """Sums of hundredths of a second: a plan that is faster by 2e-16 s stood above a policy."""
    instance = random_instance(random.Random(seed), "rounded")
    check_frontier(instance, instance.planner(exact=False).frontier())


@pytest.mark.parametrize("turn", range(seeds.tries(2)))
def test_a_planner_that_is_asked_first_is_not_above_the_frontier(turn: int) -> None:
    rnd = random.Random(seeds.fresh(f"instance {turn}"))
    instance = random_instance(rnd, "not convex")
    while not 100 < len(instance.pipeline.instructions) < 200:
        instance = random_instance(rnd, "not convex")
    frontier = instance.planner(exact=False).frontier()
    policies = uniform_policies(instance)
    times = [plan.time_s for plan in rnd.sample(frontier.plans, 4)]
    check_answers(instance, lambda: instance.planner(exact=False), frontier, policies, times)


@pytest.mark.parametrize(
    ("kind", "seed", "time_s"),
    [("not convex", 992917, 5.9663875594062565), ("other scales", 992950, 97.87501641172153)],
)
def test_a_part_of_the_frontier_is_the_same_whatever_part_came_first(
    kind: str, seed: int, time_s: float
) -> None:
    """Where the linear program has several optima, the solver's state chose one of them."""
    instance = random_instance(random.Random(seed), kind)
    frontier = instance.planner(exact=False).frontier()
    policies = uniform_policies(instance)
    times = [time_s, *(plan.time_s for plan in frontier.plans[::60])]
    check_answers(instance, lambda: instance.planner(exact=False), frontier, policies, times)


def test_a_single_plan_takes_one_more_program_than_the_frontier_and_is_not_above_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[float] = []
    solve = Program.solve

    def counted(program: Program, deadline_s: float, price_w: float = 0.0) -> Optimum:
        solved.append(deadline_s)
        return solve(program, deadline_s, price_w)

    monkeypatch.setattr(Program, "solve", counted)

    planner = functools.partial(usual, exact=False)
    keeper = planner()
    frontier = keeper.frontier()
    whole = len(solved)
    # Times at which the frontier's plans are just possible, and between.
    times = [plan.time_s for plan in frontier.plans[:: (len(frontier.plans) - 1) // 3]]
    fast_s, slow_s = times[-1], times[0]
    times += [fast_s + (part / 3) ** 1.5 * (slow_s - fast_s) for part in (1, 2)]
    for time_s in times:
        for asked, listed in (
            (planner().deadline, frontier.by_deadline),
            (planner().straggler, frontier.by_straggler),
        ):
            solved.clear()
            found, known = asked(time_s).plans[0], frontier.plans[listed(time_s)]
            assert len(solved) <= whole + 1
            assert found.time_s <= time_s * (1 + 1e-9)
            if listed == frontier.by_deadline:
                assert found.energy_j <= known.energy_j * (1 + 1e-12)
            else:
                assert found.effective_energy_j <= known.effective_energy_j + 1e-9
        solved.clear()
        keeper.deadline(time_s)
        assert len(solved) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_frontier_has_every_pareto_point(kind: str) -> None:
    rnd = random.Random(seeds.fresh(kind))
    for _ in range(seeds.tries(2)):
        instance = random_instance(rnd, kind, small=True)
        frontier = instance.planner(exact=True).frontier()
        check_frontier(instance, frontier)
        assert not missed(instance, frontier)[1]


def test_a_long_instruction_does_not_hide_what_a_short_one_does() -> None:
    """A solver's tolerance of a choice, times a second, is more than a millisecond's options."""
    instance = random_instance(random.Random(12), "other scales", small=True)
    frontier = instance.planner(exact=True).frontier()
    assert missed(instance, frontier) == (93, [])
    assert len(frontier.plans) == 93


def test_much_energy_does_not_hide_what_a_little_does() -> None:
    """Points 1.7e-9 of the energy apart: a solver's gap is relative to all of it."""
    rnd = random.Random(399289450)
    random_instance(rnd, "other scales", small=True)
    instance = random_instance(rnd, "other scales", small=True)
    frontier = instance.planner(exact=True).frontier()
    assert missed(instance, frontier) == (22, [])
    costs = np.array([plan.effective_energy_j for plan in frontier.plans])
    assert 1e-9 < np.diff(costs).min() / costs.max() < 2e-9


@pytest.mark.parametrize("seed", [4, 7, 15])
def test_a_deadline_where_time_is_worth_what_blocking_takes(seed: int) -> None:
    """Figures as people round them: the price of time is then that of blocking, up to rounding."""
    rnd = random.Random(seed)
    stages, power_w = rnd.choice([1, 2, 3]), rnd.choice([70.0, 83.64, 100.0])
    options = {}
    for stage in range(stages):
        for name in ("forward", "backward"):
            time_s, energy_j = round(rnd.uniform(0.05, 0.2), 2), 30.0
            rows = []
            for step in range(5):
                rows.append(Option(1400 - 15 * step, time_s, energy_j))
                slower = rnd.choice([0.01, 0.02])
                time_s = round(time_s + slower, 2)
                energy_j -= (stages - 1) * power_w * slower * rnd.choice([1, 1, 1, 2, 0.5])
            options[stage, name, 0] = rows
    planner = Planner(
        InstructionProfile(options), one_f_one_b(stages, 4), p2p_power_w=power_w, exact=False
    )
    for factor in (1.0, 1.02, 1.05, 1.1, 1.2):
        (plan,) = planner.max_slowdown(factor).plans
        assert plan.time_s <= factor * planner.fastest_time_s * (1 + 1e-9)


def test_times_may_be_whole_numbers() -> None:
    profile = same_options([Option(1400, 1, 100), Option(1300, 2, 80)])
    planner = Planner(profile, one_f_one_b(1, 2), p2p_power_w=0, exact=False)
    assert planner.straggler(8).plans[0].energy_j == 320


@pytest.mark.parametrize("ask_for", ["deadline", "straggler", "max_slowdown"])
def test_a_time_that_is_no_number_is_reported(ask_for: str) -> None:
    planner = usual(microbatches=2)
    with pytest.raises(PipelineFrequencyError, match=r"number of seconds|at least 1"):
        getattr(planner, ask_for)(float("nan"))
    assert getattr(planner, ask_for)(float("inf")).plans


@pytest.mark.parametrize(("gpu", "stages", "microbatches"), [("a100", 4, 16), ("a40", 8, 8)])
def test_a_frontier_is_dense_where_pipelines_are_run(
    gpu: str, stages: int, microbatches: int
) -> None:
    planner = usual(gpu, stages, microbatches)
    frontier = planner.frontier()
    close = [one for one in frontier.plans if one.time_s <= 1.05 * planner.fastest_time_s]
    assert len(close) >= 30
    costs = np.array([plan.effective_energy_j for plan in frontier.plans])
    energies = np.array([plan.energy_j for plan in frontier.plans])
    steps = np.diff(costs) / energies[1:]
    # Where a clock just fits there is nothing in between.
    assert np.median(steps) <= 0.001
    assert (steps <= 0.001).mean() >= 0.9
    assert steps.max() <= 0.004
    for factor in (1.005, 1.02, 1.04):
        listed = frontier.plans[frontier.by_max_slowdown(factor)]
        asked = planner.max_slowdown(factor).plans[0]
        assert asked.energy_j <= listed.energy_j * (1 + 1e-12)
        assert listed.energy_j <= 1.002 * asked.energy_j


@pytest.mark.parametrize(("points", "close"), [(100, 30), (40, 18)])
def test_a_short_frontier_keeps_plans_for_small_slowdowns(points: int, close: int) -> None:
    planner = usual(stages=8, microbatches=12)
    plans = planner.frontier(points).plans
    assert 0.8 * points <= len(plans) <= points
    assert sum(one.time_s <= 1.05 * planner.fastest_time_s for one in plans) >= close

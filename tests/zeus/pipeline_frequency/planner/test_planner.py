from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import seeds
from tests.zeus.pipeline_frequency.instances import Instance, check_frontier, every_plan
from tests.zeus.pipeline_frequency.timeline import timeline, totals
from tests.zeus.pipeline_frequency.toys import (
    P2P_W,
    changed,
    measured,
    random_profile,
    same_options,
    usual,
)
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner import Changes, Planner
from zeus.optimizer.pipeline_frequency.planner.linear import Program
from zeus.optimizer.pipeline_frequency.planner.problem import PipelineProblem
from zeus.optimizer.pipeline_frequency.planner.rounding import Rounding
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan
from zeus.optimizer.pipeline_frequency.profile import INSTRUCTIONS, InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import (
    Pipeline,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    whole_iteration,
)


def problem_of(profile: InstructionProfile, pipeline: Pipeline, **figures: Any) -> PipelineProblem:
    """The planner's arrays."""
    return PipelineProblem(profile, pipeline, Planner(profile, pipeline, **figures).problem)


SCHEDULES = [
    (one_f_one_b, 4, 8),
    (one_f_one_b, 8, 3),
    (gpipe, 4, 8),
    (lambda n, m: interleaved_1f1b(n, m, 2), 4, 8),
    (one_f_one_b, 1, 4),
]


@pytest.mark.parametrize("gpu", ["a100", "a40"])
@pytest.mark.parametrize(("make", "stages", "microbatches"), SCHEDULES)
def test_a_frontier_of_any_schedule(gpu: str, make: Any, stages: int, microbatches: int) -> None:
    instance = Instance("", measured(gpu, stages), make(stages, microbatches), P2P_W[gpu])
    planner = instance.planner()
    frontier = planner.frontier(40)
    check_frontier(instance, frontier)
    assert frontier.plans[-1].time_s == pytest.approx(planner.fastest_time_s, rel=1e-12)
    assert 30 <= len(frontier.plans) <= 40
    # A single stage has nobody to wait for.
    saved_j = frontier.baseline_energy_j - frontier.plans[-1].energy_j
    assert (saved_j > 1.0) == (stages > 1)


@pytest.mark.parametrize(
    ("gpu", "stages", "microbatches", "mean", "most"),
    [("a100", 4, 8, 0.08, 0.3), ("a100", 4, 32, 0.1, 0.3), ("a100", 8, 12, 0.06, 0.3)]
    + [("a40", 4, 8, 0.15, 1.0), ("a40", 8, 12, 0.12, 0.8)],
)
def test_plans_are_close_to_the_bound(
    gpu: str, stages: int, microbatches: int, mean: float, most: float
) -> None:
    """In percent of the energy: the closest plan of each hundredth of the frontier's width, which a
    frontier of 100 plans consists of, and, hardly further, the plans between them.

    Timing and larger ones: benchmarks/pipeline_frequency.py.
    """
    frontier = usual(gpu, stages, microbatches).frontier()
    gaps = []
    edges = np.linspace(frontier.plans[-1].time_s, frontier.plans[0].time_s, 100)
    for low, high in itertools.pairwise(edges):
        inside = [plan for plan in frontier.plans if low <= plan.time_s <= high]
        # Where energies hardly differ plans are rare, and the next faster one is run.
        inside = inside or [frontier.plans[frontier.by_straggler(high)]]
        gaps.append(100 * min(plan.gap for plan in inside))
    assert sum(gaps) / len(gaps) <= mean
    assert max(gaps) <= most
    assert max(100 * plan.gap for plan in frontier.plans) <= 1.05 * most


@pytest.mark.parametrize(("gpu", "percent"), [("a100", 15.9), ("a40", 12.0)])
def test_the_published_savings_without_slowdown(gpu: str, percent: float) -> None:
    """Table 6 of Chung et al., SOSP 2024, has 15.2 and 11.8 % for 12 microbatches."""
    planner = usual(gpu, 8, 12)
    found = planner.max_slowdown(1.0)
    (plan,) = found.plans
    assert plan.time_s <= planner.fastest_time_s * (1 + 1e-12)
    assert 100 * (1 - plan.energy_j / found.baseline_energy_j) >= percent


WRONGLY_PROVEN = 862201410
"""A seed of an instance whose best plan HiGHS misses at its first look."""


@pytest.mark.parametrize("turn", [*range(seeds.tries(4)), WRONGLY_PROVEN])
def test_small_pipelines_are_solved_exactly(turn: int) -> None:
    """Compares with all possible plans; energies and times of any scale."""
    rnd = random.Random(turn if turn == WRONGLY_PROVEN else seeds.fresh(f"turn {turn}"))
    for _ in range(4):
        stages, microbatches = rnd.choice([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)])
        most = 3 if stages * microbatches < 4 else 2
        scale = 10 ** rnd.uniform(-4, 4)
        profile = random_profile(rnd, stages, most, time=10 ** rnd.uniform(-4, 1), power=scale)
        pipeline = rnd.choice([one_f_one_b, gpipe])(stages, microbatches)
        p2p_power_w = rnd.choice([0.0, 50.0, 80.0]) * scale
        instance = Instance("", profile, pipeline, p2p_power_w)
        plans = every_plan(instance)
        precision = 1e-7 * max(energy_j for _, _, energy_j, _ in plans)
        planner = instance.planner()
        fastest, slowest = min(plans)[0], max(plans)[0]
        assert planner.fastest_time_s == pytest.approx(fastest, rel=1e-9)

        def least(until_s: float, which: int, plans: Any = plans) -> float:
            return float(min(one[which] for one in plans if one[0] <= until_s * (1 + 1e-9)))

        for time_s in (fastest, rnd.uniform(fastest, slowest), 2 * slowest):
            (plan,) = planner.straggler(time_s).plans
            assert plan.effective_energy_j == pytest.approx(least(time_s, 1), abs=precision)
            (plan,) = planner.deadline(time_s).plans
            assert plan.energy_j == pytest.approx(least(time_s, 2), abs=precision)
            assert plan.time_s <= time_s * (1 + 1e-9)
        frontier = planner.frontier(10)
        check_frontier(instance, frontier)
        # From end to end.
        assert frontier.plans[-1].time_s == pytest.approx(fastest, rel=1e-9)
        assert frontier.plans[0].effective_energy_j == pytest.approx(
            least(2 * slowest, 1), abs=precision
        )
        for plan in frontier.plans:
            assert plan.effective_energy_j == pytest.approx(least(plan.time_s, 1), abs=precision)


def test_the_rest_of_a_stage_runs_at_the_clock_that_costs_no_time() -> None:
    """By hand: the first stage's forward 1 and backward 0 have 4 s each, the rest is critical."""
    clocks = {1400: (1.0, 100.0), 1200: (1.5, 80.0), 1000: (4.5, 20.0)}
    options = {
        (0, name, 0): [Option(mhz, *figures) for mhz, figures in clocks.items()]
        for name in ("forward", "backward")
    } | {(1, name, 0): [Option(1400, 2.0, 250.0)] for name in ("forward", "backward")}
    frontier = Planner(
        InstructionProfile(options), one_f_one_b(2, 2), p2p_power_w=10.0, exact=False
    ).frontier()
    busy_j, busy_s = 2 * 100.0 + 2 * 80.0 + 4 * 250.0, 2 * 1.0 + 2 * 1.5 + 4 * 2.0
    ((time_s, energy_j),) = frontier.policies["critical path"]
    assert time_s == pytest.approx(10.0)
    assert energy_j == pytest.approx(busy_j + 10.0 * (2 * time_s - busy_s))
    assert frontier.plans[-1].energy_j <= energy_j + 1e-9


def test_a_straggler_makes_plans_slower_than_the_cheapest() -> None:
    """GPUs wait anyway: the effective energy is minimized, not the energy and idling apart."""
    planner = usual()
    cheapest = planner.deadline(1e9).plans[0]
    time_s = 1.15 * cheapest.time_s
    straggling = planner.straggler(time_s).plans[0]
    assert straggling.time_s > 1.05 * cheapest.time_s

    def in_all(plan: Plan) -> float:
        return plan.energy_j + 4 * 83.64 * (time_s - plan.time_s)

    assert in_all(straggling) < 0.99 * in_all(cheapest)
    assert planner.straggler(0.5 * planner.fastest_time_s).plans[0].time_s == pytest.approx(
        planner.fastest_time_s, rel=1e-12
    )


def test_a_deadline_that_no_plan_keeps_is_reported() -> None:
    planner = usual(microbatches=4)
    with pytest.raises(PipelineFrequencyError, match=r"the fastest takes 1\.04"):
        planner.deadline(1.0)


def test_energies_are_of_each_of_a_stages_gpus_or_of_all_together() -> None:
    one = usual(microbatches=4).max_slowdown(1.1)
    by_gpu = usual(microbatches=4, gpus_per_stage=8).max_slowdown(1.1)
    assert by_gpu.plans[0].energy_j == pytest.approx(8 * one.plans[0].energy_j, rel=1e-3)
    assert by_gpu.baseline_energy_j == pytest.approx(8 * one.baseline_energy_j)
    whole = changed(
        measured("a100", 4),
        lambda options: [Option(o.frequency, o.time_s, 8 * o.energy_j) for o in options],
    )
    figures: dict[str, Any] = {"gpus_per_stage": 8, "energy_per": "stage"}
    planner = Planner(whole, one_f_one_b(4, 4), p2p_power_w=83.64, **figures)
    by_stage = planner.max_slowdown(1.1)
    assert by_stage.plans[0].energy_j == pytest.approx(by_gpu.plans[0].energy_j, rel=1e-6)


def test_a_folder_of_plans_has_what_further_plans_need(tmp_path: Path) -> None:
    pipeline = interleaved_1f1b(4, 4, 2)
    planner = Planner(
        measured("a100", 4), pipeline, p2p_power_w=83.64, gpus_per_stage=2, changes=Changes(0.001)
    )
    planner.frontier(3).write(tmp_path)
    problem = Frontier.read(tmp_path).problem
    assert problem is not None
    again = Planner.of(problem)
    assert again.problem == problem
    assert again.fastest_time_s == planner.fastest_time_s
    assert again.max_slowdown(1.03) == Planner.of(planner.problem).max_slowdown(1.03)


def test_asking_for_one_plan_gives_the_fastest() -> None:
    planner = usual(microbatches=4)
    (plan,) = planner.frontier(1).plans
    assert plan.time_s == pytest.approx(planner.fastest_time_s, rel=1e-12)
    wrong: Any
    for wrong in (0, 2.5, "2"):
        with pytest.raises(PipelineFrequencyError, match=f"at least one plan, not {wrong!r}"):
            planner.frontier(wrong)
    wrong = {}
    with pytest.raises(PipelineFrequencyError, match="a PlanningProblem, not of "):
        Planner.of(wrong)


def test_progress_ends_where_it_said_it_would() -> None:
    told: list[tuple[int, int]] = []
    planner = usual(microbatches=4)
    planner.frontier(10, lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert len({total for _, total in told}) == 1
    assert told[-1][0] == told[-1][1]


def test_a_plan_that_does_not_fit_is_reported() -> None:
    with pytest.raises(PipelineFrequencyError, match="8 stages and the pipeline 4"):
        Planner(measured("a100"), one_f_one_b(4, 4), p2p_power_w=80)
    with pytest.raises(PipelineFrequencyError, match="p2p_power_w"):
        Planner(measured("a100"), one_f_one_b(8, 4), p2p_power_w=-1)
    with pytest.raises(PipelineFrequencyError, match="gpus_per_stage"):
        Planner(measured("a100"), one_f_one_b(8, 4), p2p_power_w=80, gpus_per_stage=0)


# ----------------------------------------------------------------------------------- its parts


def test_curves_keep_what_another_does_not_beat() -> None:
    """On effective energy, not on energy: the option at 1000 MHz takes less, but 5 s longer."""
    options = [
        Option(1400, 1.0, 300.0),
        Option(1300, 1.1, 310.0),
        Option(1200, 1.2, 250.0),
        Option(1000, 6.2, 249.0),
    ]
    profile = same_options(options)

    def kept(p2p_power_w: float, gpus: int = 1, per: Any = "gpu") -> tuple[list[Any], float]:
        figures: dict[str, Any] = {"gpus_per_stage": gpus, "energy_per": per}
        problem = problem_of(profile, one_f_one_b(1, 1), p2p_power_w=p2p_power_w, **figures)
        curve = problem.curves[0]
        return [problem.settings[one] for one in curve.settings], float(curve.cost_j[0])

    assert kept(0.0) == ([1400, 1200, 1000], 300.0)
    assert kept(10.0, 2) == ([1400, 1200, 1000], 2 * (300.0 - 10.0))
    assert kept(10.0, 2, "stage")[1] == 300.0 - 20.0


@pytest.mark.parametrize("turn", range(seeds.tries(5)))
def test_the_slowest_option_within_a_time_is_what_looking_at_each_finds(turn: int) -> None:
    rng = np.random.default_rng(seeds.fresh(f"turn {turn}"))
    problem = problem_of(measured("a40"), one_f_one_b(8, 4), p2p_power_w=70.38)
    kinds = problem.kind[:, None]
    own = [problem.curves[kind].time_s for kind in problem.kind]
    exact = np.array([rng.choice(times) for times in own])[:, None]
    for budget in (rng.uniform(0.0, 1.0, (problem.count, 50)), exact * (1 + 1e-12)):
        found = problem.option_times[problem.slowest_within(kinds, budget)]
        looked = [
            [max(times[times <= limit], default=times[0]) for limit in limits]
            for times, limits in zip(own, budget, strict=True)
        ]
        assert (found == np.array(looked)).all()


@pytest.mark.parametrize("factor", [1.0, 1.1, 1.3])
def test_prices_of_instructions_are_worth_the_bound(factor: float) -> None:
    """With them, and none between instructions, the cheapest settings cost the bound."""
    problem = problem_of(measured("a40", 4), one_f_one_b(4, 8), p2p_power_w=70.38)
    found = Program(problem).solve(factor * problem.min_time_s)
    assert found.prices_w.min() >= -1e-6
    times, costs = problem.times[problem.kind], problem.costs[problem.kind]
    priced = costs + found.prices_w[:, None] * np.where(np.isfinite(times), times, 0)
    least_j = priced.min(axis=1).sum() - found.price_w * found.deadline_s
    assert least_j == pytest.approx(found.bound_j, rel=1e-6)


def test_the_cheapest_optimum_is_that_of_its_deadline() -> None:
    problem = problem_of(measured("a100", 4), one_f_one_b(4, 8), p2p_power_w=83.64)
    program = Program(problem)
    cheapest = program.solve(problem.max_time_s, problem.blocking_w)
    assert problem.min_time_s < cheapest.deadline_s < problem.max_time_s
    again = program.solve(cheapest.deadline_s)
    assert cheapest.bound_j == pytest.approx(again.bound_j, rel=1e-9)
    for factor in (0.98, 1.02):
        time_s = factor * cheapest.deadline_s
        other = problem.energy(program.solve(time_s).bound_j, time_s)
        assert other > problem.energy(cheapest.bound_j, cheapest.deadline_s)


@pytest.mark.parametrize("gpu", ["a100", "a40"])
def test_rounding_keeps_deadlines_and_uses_them(gpu: str) -> None:
    problem = problem_of(measured(gpu, 4), one_f_one_b(4, 8), p2p_power_w=P2P_W[gpu])
    program, rounding = Program(problem), Rounding(problem)
    deadlines = problem.min_time_s * np.array([1.0, 1.01, 1.1, 1.3])
    durations = np.stack([program.solve(one).durations_s for one in deadlines], axis=1)
    plans = rounding.round(durations, deadlines)
    limits = np.tile(deadlines, plans.shape[1] // len(deadlines))
    times = problem.time(plans)
    assert (times <= limits * (1 + 1e-11)).all()
    assert (times >= 0.99 * np.minimum(limits, problem.max_time_s)).all()
    # No instruction can be slowed down alone, neither after rounding nor after plans were joined.
    highest = problem.offered.argmax(axis=1)[problem.kind][:, None]
    joined = rounding.fill(np.where(np.arange(problem.count)[:, None] % 2, plans, highest))
    for found, until in ((plans, limits), (joined, problem.time(joined))):
        for row in range(problem.count):
            curve = problem.curves[problem.kind[row]]
            place = np.searchsorted(curve.time_s, problem.times[problem.kind[row], found[row]])
            slower, possible = found.copy(), place + 1 < len(curve.time_s)
            slower[row, possible] = curve.settings[place[possible] + 1]
            assert (problem.time(slower)[possible] > until[possible]).all()


def test_planning_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Nor does a solver's library, even if it prints."""
    profile, pipeline = random_profile(random.Random(3), 2, 2), one_f_one_b(2, 2)
    assert Planner(profile, pipeline, p2p_power_w=60.0).frontier(5).plans
    assert capfd.readouterr() == ("", "")


def test_the_price_of_time_is_the_bounds_slope() -> None:
    problem = problem_of(measured("a100", 4), one_f_one_b(4, 8), p2p_power_w=83.64)
    program = Program(problem)
    for factor in (1.05, 1.1, 1.3):
        time_s = factor * problem.min_time_s
        here = program.solve(time_s)
        step = 1e-4 * time_s
        earlier, later = program.solve(time_s - step), program.solve(time_s + step)
        assert later.bound_j >= here.bound_j - here.price_w * step - 1e-6
        assert earlier.bound_j >= here.bound_j + here.price_w * step - 1e-6
        assert here.price_w > 0


def test_settings_that_are_no_clocks_are_planned_like_clocks(tmp_path: Path) -> None:
    """The same figures under other names give the same frontier."""
    clocks = measured("a100", 4)
    names = {
        option.frequency: f"power_limit={option.frequency - 1010}"
        for option in clocks.options(0, "forward")
    }
    lines = ["stage,instruction,setting,time,energy"]
    for stage in range(4):
        for name in INSTRUCTIONS:
            lines += [
                f"{stage},{name},{names[one.frequency]},{one.time_s},{one.energy_j}"
                for one in clocks.options(stage, name)
                if one.frequency in names
            ]
    path = tmp_path / "profile.csv"
    path.write_text("\n".join(lines))
    named = InstructionProfile.read(path)
    instance = Instance("", named, one_f_one_b(4, 6), 83.64)
    frontier = instance.planner().frontier(20)
    check_frontier(instance, frontier)
    expected = usual(microbatches=6).frontier(20)
    assert [plan.energy_j for plan in frontier.plans] == pytest.approx(
        [plan.energy_j for plan in expected.plans], rel=1e-9
    )
    frontier.write(tmp_path / "plans")
    again = Frontier.read(tmp_path / "plans")
    assert again == frontier
    assert again.plans[0].stages[0][0][1] in names.values()
    assert Planner.of(again.problem).fastest_time_s == frontier.plans[-1].time_s


@pytest.mark.parametrize("exact", [None, True])
def test_an_instruction_without_a_setting_takes_the_same_in_every_plan(exact: bool | None) -> None:
    options = {
        (0, "forward", 0): [Option(1400, 1.0, 300.0), Option(1300, 1.2, 250.0)],
        (0, "backward", 0): [Option(1400, 2.0, 600.0), Option(1300, 2.4, 500.0)],
        (0, "all_reduce", 0): [Option(0, 0.5, 60.0)],
        (0, "optimizer_step", 0): [Option(1400, 0.25, 40.0), Option(1300, 0.25, 30.0)],
    }
    profile = InstructionProfile(options)
    pipeline = whole_iteration(one_f_one_b(1, 2), ["all_reduce", "optimizer_step"])
    planner = Planner(
        profile, pipeline, p2p_power_w=80.0, changes=Changes(time_s=0.1, most=1), exact=exact
    )
    frontier = planner.frontier(10)
    for plan in frontier.plans:
        assert plan.stages[0][-2] == ("all_reduce", 0)
        assert plan.clock_changes <= 1
        runs = timeline(profile, pipeline, plan.stages, change_time_s=0.1)
        assert totals(runs, 1, 80.0) == pytest.approx((plan.time_s, plan.energy_j))
    assert frontier.plans[-1].time_s == pytest.approx(2 * 3.0 + 0.75)


def test_programs_that_take_long_do_not_hold_up_a_small_pipeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With identical stages some take minutes: then it is planned as larger ones are."""
    now_s, limits_s = 0.0, []
    best = Program.best

    def slow(self: Program, *given: Any, time_limit_s: float) -> Any:
        nonlocal now_s
        now_s += time_limit_s
        limits_s.append(time_limit_s)
        return best(self, *given, time_limit_s=time_limit_s)

    monkeypatch.setattr(Program, "best", slow)
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    options = [Option(1410 - 60 * k, 1 + 0.3 * k, 300 - 20 * k) for k in range(6)]
    planner = Planner(same_options(options, 3), gpipe(3, 1), p2p_power_w=20.0)
    made = planner.frontier()
    assert limits_s
    assert sum(limits_s) <= 30.0
    assert len(made.plans) > 1
    assert all(0 <= plan.gap < 0.05 for plan in made.plans)
    one = planner.deadline(1.1 * planner.fastest_time_s).plans[0]
    assert one.time_s <= 1.1 * planner.fastest_time_s

"""Instructions that take longer than planned: seen, and planned for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.seeds import fresh
from tests.support import wait_for
from tests.zeus.pipeline_frequency.server.conftest import Serve
from tests.zeus.pipeline_frequency.server.running import ok, register, training_job
from tests.zeus.pipeline_frequency.timeline import timeline, totals
from tests.zeus.pipeline_frequency.toys import measured
from zeus.optimizer.pipeline_frequency.common import Choice, Progress, RankInfo
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.plans import Frontier, PlanningProblem
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b
from zeus.optimizer.pipeline_frequency.server.drift import DriftWatch, in_words, scaled

STAGES, MICROBATCHES, BLOCKED_W = 3, 4, 75.0
RULES = DriftWatch

Pace = Callable[[int, str, int], float]
"""Of a rank's instruction in an iteration: measured time over the profile's."""


def problem() -> PlanningProblem:
    options = [Option(1410, 1.0, 300.0), Option(1200, 1.2, 290.0)]
    profile = InstructionProfile(
        {(stage, name, 0): options for stage in range(2) for name in ("forward", "backward")}
    )
    return Planner(profile, one_f_one_b(2, 1), p2p_power_w=0.0).problem


def watch(replicas: int = 1, tensor: int = 1) -> DriftWatch:
    made = DriftWatch()
    ranks = [
        RankInfo(rank=n, dp_rank=dp, pp_rank=pp, tp_rank=tp, available_frequencies=[])
        for n, (dp, pp, tp) in enumerate(
            (dp, pp, tp) for dp in range(replicas) for pp in range(2) for tp in range(tensor)
        )
    ]
    made.restart(problem(), ranks)
    return made


def run(watch: DriftWatch, ranks: int, iterations: range, pace: Pace) -> list[int]:
    """Every rank reports each iteration. Returns the iterations after which new plans are due."""
    found = []
    for iteration in iterations:
        for rank in range(ranks):
            times = [
                (name, mhz, planned_s * pace(rank, name, iteration))
                for name in ("forward", "backward")
                for mhz, planned_s in ((1410, 1.0), (1200, 1.2))
            ]
            watch.observe(rank, iteration, times)
        if watch.decide() is not None:
            found.append(iteration)
            watch.plans_changed()
    return found


def test_a_stage_that_gets_slower_is_detected_and_its_times_are_reported() -> None:
    seen = watch()
    assert run(seen, 2, range(50), lambda rank, name, n: 1.06 if rank else 1.0) == [
        RULES.window + RULES.patience - 2
    ]
    assert seen.paces[1, "forward"] == pytest.approx(1.06)
    assert in_words(seen.paces) == "stage 1: backward 1.060, forward 1.060"
    again = scaled(problem(), seen.paces)
    slow, slower = again.profile[2].options
    assert (slow.time_s, slow.energy_j) == pytest.approx((1.06, 318.0))
    assert (slower.time_s, slower.energy_j) == pytest.approx((1.272, 307.4))
    assert again.profile[0] == problem().profile[0]


def test_of_an_instruction_that_waits_the_others_count() -> None:
    seen = watch()
    for iteration in range(20):
        for rank in range(2):
            # The only one at 1200 MHz waits for another stage.
            seen.observe(rank, iteration, [("forward", 1410, 1.0), ("forward", 1200, 1.9)])
            seen.observe(rank, iteration, [("backward", 1410, 1.0)])
        assert seen.decide() is None
    assert set(seen.paces.values()) == {1.0}


def test_a_common_slowdown_or_no_drift_changes_no_plan() -> None:
    rnd = random.Random(fresh())
    assert run(watch(), 2, range(60), lambda rank, name, n: 1.3) == []
    assert run(watch(), 2, range(60), lambda rank, name, n: 2.5 if rank else 1.0) == []
    assert run(watch(), 2, range(2000), lambda rank, name, n: rnd.gauss(1, 0.008)) == []
    assert run(watch(), 2, range(60), lambda rank, name, n: 1.025 if rank else 1.0) == []
    for pace in (1.035, 1.95, 0.55):
        assert run(watch(), 2, range(60), lambda rank, name, n: pace if rank else 1.0)
    hiccups = watch()
    assert run(hiccups, 2, range(400), lambda rank, name, n: 1 + (n % 9 == 0) * rank) == []


@pytest.mark.parametrize("pace", [1e308, 1e-300, 0.0])
def test_a_time_that_cannot_be_is_no_pace(pace: float) -> None:
    made = watch()
    assert run(made, 2, range(300), lambda rank, name, n: pace if name == "forward" else 1.0) == []
    assert set(made.paces.values()) == {1.0}


def test_one_replica_that_is_slow_alone_is_a_straggler_and_no_drift() -> None:
    assert run(watch(2), 4, range(40), lambda rank, name, n: 1.1 if rank == 3 else 1.0) == []
    both = run(watch(2), 4, range(40), lambda rank, name, n: 1.1 if rank in (1, 3) else 1.0)
    assert len(both) == 1
    # Ranks that share a stage wait for the slower one.
    assert run(watch(1, 2), 4, range(40), lambda rank, name, n: 1.1 if rank == 3 else 1.0)


def test_where_planning_again_does_not_help_it_becomes_rarer() -> None:
    found = run(watch(), 2, range(1500), lambda rank, name, n: 1.1 if rank else 1.0)
    waits = [later - earlier for earlier, later in itertools.pairwise(found)]
    assert len(found) == 4
    assert all(wait >= RULES.rest * 2**n for n, wait in enumerate(waits))


# ---------------------------------------------------------------------------------- the whole loop


def slower(profile: InstructionProfile, stage: int, factor: float) -> InstructionProfile:
    """The profile of GPUs one of whose stages is slower, at the same power."""
    return InstructionProfile(
        {
            (number, name, 0): [
                Option(one.frequency, one.time_s * by, one.energy_j * by)
                for one in profile.options(number, name)
            ]
            for number in range(STAGES)
            for name in ("forward", "backward")
            for by in [factor if number == stage else 1.0]
        }
    )


def planner(profile: InstructionProfile) -> Planner:
    return Planner(profile, one_f_one_b(STAGES, MICROBATCHES), p2p_power_w=BLOCKED_W)


def reports(frontier: Frontier, plan: int, truth: InstructionProfile, iteration: int) -> list[Any]:
    """The report of each rank on an iteration under a plan."""
    runs = timeline(truth, one_f_one_b(STAGES, MICROBATCHES), frontier.plans[plan].stages)
    end_s = max(one.end_s for one in runs)
    found = []
    for stage in range(STAGES):
        least: dict[tuple[str, Any], float] = {}
        for one in runs:
            if one.instruction.stage == stage:
                kind = one.instruction.name, one.frequency
                least[kind] = min(one.end_s - one.start_s, least.get(kind, 1e9))
        found.append(
            {
                "rank": stage,
                "iteration": iteration + 1,
                "iter_times": [[iteration, end_s]],
                "instruction_times": [[iteration, *kind, s] for kind, s in least.items()],
            }
        )
    return found


def test_a_stage_that_gets_6_percent_slower_is_planned_for() -> None:
    """No new profile is measured; the plan is almost that from the true profile."""
    profile = measured("a100").pick([0, 3, 7])
    truth = slower(profile, 1, 1.06)
    first = planner(profile).frontier(30)
    job = training_job(1, STAGES, first, Choice(max_slowdown=1.05))
    before = job.in_force[0].plan
    for iteration in range(job.in_force[0].at_iteration, 40):
        for body in reports(first, before, truth, iteration):
            job.report(Progress(**body, version=job.version), float(iteration))
        paces = job.drifted()
        if paces is not None:
            break
    else:
        raise AssertionError(job.drift.paces)
    slow = {kind for kind, pace in paces.items() if pace > 1.05}
    assert slow == {(1, "forward"), (1, "backward")}
    assert first.problem is not None
    again = Planner.of(scaled(first.problem, paces)).frontier(30)
    version = job.version
    job.take_replanned(again, float(iteration))
    assert (job.version, job.replans) == (version + 1, 1)
    assert job.effective_choice() == Choice(max_slowdown=1.05)

    def really(frontier: Frontier, plan: int) -> tuple[float, float]:
        runs = timeline(truth, one_f_one_b(STAGES, MICROBATCHES), frontier.plans[plan].stages)
        return totals(runs, STAGES, BLOCKED_W)

    known = planner(truth).frontier(30)
    best_s, best_j = really(known, known.by_max_slowdown(1.05))
    new_s, new_j = really(again, job.in_force[0].plan)
    old_s, _ = really(first, before)
    fastest_s = known.plans[-1].time_s
    assert new_s == pytest.approx(best_s, rel=0.002)
    assert new_j == pytest.approx(best_j, rel=0.002)
    assert new_s <= 1.0501 * fastest_s
    assert old_s > 1.06 * fastest_s  # the deadline was no longer kept


def test_a_plan_that_was_chosen_by_its_number_stays_about_as_fast() -> None:
    frontier = planner(measured("a100").pick([0, 3, 7])).frontier(30)
    job = training_job(1, STAGES, frontier)
    job.choose(Choice(plan=4), 1.0)
    slowdown = frontier.plans[4].time_s / frontier.plans[-1].time_s
    assert frontier.problem is not None
    again = Planner.of(scaled(frontier.problem, {(1, "forward"): 1.06})).frontier(30)
    job.take_replanned(again, 2.0)
    # The slowest of the new plans that is no slower, seen from the fastest one.
    now = job.in_force[0].plan
    limit_s = slowdown * again.plans[-1].time_s
    assert again.plans[now].time_s <= limit_s * (1 + 1e-9) < again.plans[now - 1].time_s
    assert job.initial == Choice(automatic=True)


def test_the_server_plans_again_and_all_ranks_get_the_plan(serve: Serve, tmp_path: Any) -> None:
    profile = measured("a100").pick([0, 3, 7])
    frontier = planner(profile).frontier(12)
    folder = tmp_path / "plans"
    frontier.write(folder)
    http = serve({"solution_path": str(folder)})
    job_id = register(http, 1, STAGES)
    truth = slower(profile, 1, 1.06)
    version = ok(http.get(f"/schedule/{job_id}", params={"rank": 0}))["version"]
    plan = len(frontier.plans) - 1
    for iteration in range(20):
        for body in reports(frontier, plan, truth, iteration):
            ok(http.post(f"/progress/{job_id}", json={**body, "version": version}))
    report = {"rank": 1, "iteration": 21, "version": version}
    wait_for(lambda: ok(http.post(f"/progress/{job_id}", json=report))["frequencies"], "the plan")
    shown = ok(http.get(f"/jobs/{job_id}"))
    assert shown["replans"] == 1
    fastest_s = shown["frontier"]["plans"][-1]["time_s"]
    assert fastest_s == pytest.approx(planner(truth).fastest_time_s, rel=1e-6)

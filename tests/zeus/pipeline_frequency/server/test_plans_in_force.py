"""How ranks switch from one plan to another, and which pipeline is a straggler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.zeus.pipeline_frequency.server.conftest import Serve, TestClient
from tests.zeus.pipeline_frequency.server.running import (
    Clock,
    Training,
    frontier,
    job_body,
    ok,
    rank_bodies,
    refused,
    register,
    training_job,
)
from zeus.optimizer.pipeline_frequency import common
from zeus.optimizer.pipeline_frequency.server.job import TrainingJob


def test_a_job_shows_its_plans_without_their_instructions(http: TestClient) -> None:
    shown = ok(http.get(f"/jobs/{register(http, 2)}"))
    assert (shown["phase"], shown["plan"]) == ("running", 19)
    times = [one["time_s"] for one in shown["frontier"]["plans"]]
    assert times == [one.time_s for one in frontier().plans]
    assert "stages" not in shown["frontier"]["plans"][0]


@pytest.mark.parametrize(
    ("args", "plan"),
    [
        ({}, 19),
        ({"plan": 3}, 3),
        ({"deadline_s": 2.5}, frontier().by_deadline(2.5)),
        ({"max_slowdown": 1.2}, frontier().by_max_slowdown(1.2)),
    ],
)
def test_a_folder_of_plans_begins_as_asked(
    serve: Serve, folder: str, args: dict[str, Any], plan: int
) -> None:
    http = serve({"solution_path": folder, **args})
    job_id = register(http)
    assert ok(http.get(f"/jobs/{job_id}"))["plan"] == plan
    ok(http.post(f"/choose/{job_id}", json={"plan": 0}))
    assert ok(http.post(f"/choose/{job_id}", json={"automatic": True}))["plan"] == plan


def test_all_ranks_go_over_to_another_plan_between_the_same_two_iterations(
    http: TestClient,
) -> None:
    clock = http.app.manager.clock = Clock()
    training = Training(http, 2, clock=clock)
    training.step(5)
    chosen = ok(http.post(f"/choose/{training.job_id}", json={"plan": 4}))
    assert chosen["plan"] == 4
    assert chosen["plans"] == [4, 4]
    assert chosen["at_iteration"] > 5
    training.step(chosen["at_iteration"] + 5 - training.iteration)
    for ran in training.ran.values():
        assert ran == [
            (n, 4 if n >= chosen["at_iteration"] else 19) for n in range(training.iteration)
        ]
    assert len(ran) > chosen["at_iteration"]


def test_an_update_is_reported_once(http: TestClient) -> None:
    job_id = register(http)
    version = ok(http.get(f"/schedule/{job_id}?rank=0"))["version"]
    report = {"rank": 0, "iteration": 3, "version": version}
    update = ok(http.post(f"/progress/{job_id}", json=report))
    assert update["version"] == version
    assert update["frequencies"] is None
    ok(http.post(f"/choose/{job_id}", json={"plan": 4}))
    update = ok(http.post(f"/progress/{job_id}", json=report))
    assert update["version"] > version
    assert update["at_iteration"] > 3
    assert update["frequencies"] == [list(step) for step in frontier().plans[4].stages[0]]
    report["version"] = update["version"]
    assert ok(http.post(f"/progress/{job_id}", json=report))["frequencies"] is None


@pytest.mark.parametrize(
    ("wish", "plan", "note"),
    [
        ({"deadline_s": 2.61}, frontier().by_deadline(2.61), False),
        ({"deadline_s": 1.0}, 19, True),
        ({"max_slowdown": 1.1}, frontier().by_max_slowdown(1.1), False),
        ({"straggler_s": 2.4}, frontier().by_straggler(2.4), False),
        ({"straggler_s": 99}, 0, False),
        ({"plan": 0}, 0, False),
        ({"automatic": True}, 19, False),
    ],
)
def test_plans_are_chosen_by_many_kinds_of_request(
    http: TestClient, wish: dict[str, Any], plan: int, note: bool
) -> None:
    job_id = register(http)
    chosen = ok(http.post(f"/choose/{job_id}", json=wish))
    assert chosen["plan"] == plan
    assert (chosen["note"] is not None) == note
    assert ok(http.get(f"/jobs/{job_id}"))["choice"] == wish


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({}, "exactly one"),
        ({"plan": 1, "deadline_s": 2}, "exactly one"),
        ({"plan": 20}, "plans are 0 (slowest) to 19"),
        ({"plan": -1}, "plan"),
        ({"plan": True}, "plan"),
        ({"plan": "1"}, "plan"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"max_slowdown": 0.9}, "max_slowdown"),
        ({"max_slowdown": 1e308}, "max_slowdown"),
        ({"automatic": False}, "choose a plan"),
        ({"speed": 1}, "speed"),
        ({"plan": 1, "dp_rank": 0}, "straggler_s too"),
        ({"straggler_s": 3, "dp_rank": 5}, "no pipeline 5"),
    ],
)
def test_a_meaningless_request_is_refused(
    http: TestClient, wish: dict[str, Any], words: str
) -> None:
    job_id = register(http)
    before = ok(http.get(f"/jobs/{job_id}"))["choice"]
    assert words in refused(http.post(f"/choose/{job_id}", json=wish), 422)
    assert ok(http.get(f"/jobs/{job_id}"))["choice"] == before


def test_where_there_is_one_plan_there_is_no_choice(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = register(http)
    assert "no frontier" in refused(http.post(f"/choose/{job_id}", json={"plan": 0}), 409)


def test_a_reported_straggler_gets_the_fastest_plan(http: TestClient) -> None:
    job_id = register(http, 3)
    wish = {"straggler_s": 2.4, "dp_rank": 1}
    other = frontier().by_straggler(2.4)
    assert ok(http.post(f"/choose/{job_id}", json=wish))["plans"] == [other, 19, other]


def test_the_server_sees_a_straggler_and_its_recovery(http: TestClient) -> None:
    clock = http.app.manager.clock = Clock()
    training = Training(http, 3, clock=clock)
    training.step(12)
    assert training.plans() == {0: {19}, 1: {19}, 2: {19}}
    training.late = {1: 1.25}
    slowed = frontier().by_straggler(2.5)
    training.step_until({0: {slowed}, 1: {19}, 2: {slowed}})
    shown = ok(http.get(f"/jobs/{training.job_id}"))
    assert shown["stragglers"] == [1]
    assert shown["pipelines"][1]["slowdown"] == pytest.approx(1.25)
    training.step(20)
    assert training.plans() == {0: {slowed}, 1: {19}, 2: {slowed}}
    training.late = {}
    training.step_until({0: {19}, 1: {19}, 2: {19}})
    assert ok(http.get("/jobs"))[0]["stragglers"] == []


@pytest.mark.parametrize("wish", [{"plan": 7}, {"straggler_s": 2.2}])
def test_a_plan_that_someone_chose_stays(http: TestClient, wish: dict[str, Any]) -> None:
    training = Training(http, 2, {0: 1.3})
    ok(http.post(f"/choose/{training.job_id}", json=wish))
    training.step(40)
    shown = ok(http.get(f"/jobs/{training.job_id}"))
    assert shown["stragglers"] == [0]
    assert len({one["plan"] for one in shown["pipelines"]}) == 1


def test_a_rank_that_restarts_does_not_wait_forever(http: TestClient) -> None:
    job_id = register(http)
    report = {"rank": 0, "iteration": 100_000, "version": 1}
    ok(http.post(f"/progress/{job_id}", json=report))
    ok(http.post(f"/choose/{job_id}", json={"plan": 2}))
    ok(http.post(f"/progress/{job_id}", json=report))
    update = ok(http.post(f"/progress/{job_id}", json={**report, "iteration": 2}))
    assert update["at_iteration"] == 3


def report(
    job: TrainingJob,
    rank: int,
    iteration: int,
    *,
    version: int = 1,
    now_s: float = 0.0,
    iter_times: Sequence[tuple[int, float]] = (),
) -> None:
    """A rank reports its progress."""
    figures = {"rank": rank, "iteration": iteration, "version": version, "iter_times": iter_times}
    job.report(common.Progress.model_validate(figures), now_s)


@pytest.mark.parametrize("interval_s", [1, 5])
def test_plans_begin_ahead_of_what_all_ranks_will_have_reached(
    interval_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two reports of a rank there may be many iterations; ranks of large jobs report
    less often."""
    monkeypatch.setattr(common, "REPORTS_PER_S", 2 / interval_s)
    assert common.report_interval_s(2) == interval_s
    clock = Clock()
    job = training_job(1, 2, frontier(), now_s=clock())
    for number in range(4):
        for rank in (0, 1):
            report(job, rank, 40 * interval_s * number + rank, now_s=clock())
        clock.now_s += interval_s
    chosen = job.choose(common.Choice(plan=3), clock())
    reached = 1 + 4 * 40 * interval_s
    assert reached + 40 * interval_s < chosen.at_iteration < reached + 200 * interval_s


def test_times_under_other_plans_make_no_straggler() -> None:
    made = frontier(stages=1)
    job = training_job(2, 1, made)

    def run(first: int, count: int, version: int) -> bool:
        for iteration in range(first, first + count):
            for rank in (0, 1):
                promised_s = made.plans[job.in_force[rank].plan].time_s
                times = [(iteration, promised_s * (1.2 if rank else 1.0))]
                report(job, rank, iteration + 1, version=version, iter_times=times)
        return job.watch.slowdowns != (1.0, 1.0)

    needed = 10  # iterations before the one in which it is seen; the first two do not count
    assert not run(0, needed, 1)
    chosen = job.choose(common.Choice(deadline_s=2.5), 0.0)
    assert not run(chosen.at_iteration, needed, 2)
    assert run(chosen.at_iteration + needed, 1, 2)


def test_the_plans_time_is_the_pace_until_an_iteration_has_ended() -> None:
    """A second of iterations of a tenth of one is ten, though none was seen to end."""
    made = frontier()
    job = training_job(1, 2, made)
    for rank in (0, 1):
        report(job, rank, 0)
    chosen = job.choose(common.Choice(plan=3), 0.0)
    assert chosen.at_iteration >= common.REPORT_INTERVAL_S / made.plans[-1].time_s
    assert chosen.at_iteration > 1


def test_ranks_that_are_silent_for_a_minute_are_not_waited_for() -> None:
    for silent_s, waits in ((59.0, True), (60.0, False)):
        job = training_job(1, 2, frontier())
        for rank in (0, 1):
            report(job, rank, 50)
        chosen = job.choose(common.Choice(plan=3), silent_s)
        assert (chosen.at_iteration > 50, chosen.at_iteration == 0) == (waits, not waits)


def test_long_iterations_are_not_waited_for_longer_than_needed() -> None:
    """Most reports then show no movement, and one that does says little about the pace."""
    clock = Clock()
    job = training_job(1, 2, frontier(), now_s=clock())
    for second in range(91):
        for rank in (0, 1):
            report(job, rank, second // 30, now_s=clock())
        clock.now_s += 1
    assert job.choose(common.Choice(plan=3), clock()).at_iteration == 3 + 2


def test_iterations_under_the_plan_before_are_not_held_against_the_new_one(
    http: TestClient,
) -> None:
    """A rank that learns of the plan late reports old iterations with the new version."""
    job_id = register(http, 2)
    ok(http.post(f"/choose/{job_id}", json={"plan": 0}))
    for body in rank_bodies(2):
        report = {"rank": body["rank"], "version": 2, "iteration": 50}
        # Pipeline 1 ran the fastest plan until now: two thirds of the slowest plan's time.
        time_s = 2.0 if body["dp_rank"] else 3.0
        report["iter_times"] = [[n, time_s] for n in range(1, 50)]
        ok(http.post(f"/progress/{job_id}", json=report))
    assert ok(http.get(f"/jobs/{job_id}"))["stragglers"] == []


def test_one_ranks_mistake_does_not_move_everyones_switch() -> None:
    clock = Clock()
    job = training_job(2, 2, frontier(), now_s=clock())
    for rank in range(4):
        wrong = rank == 2
        times = [(6, 1e-300 if wrong else 2.0)]
        report(job, rank, 10**12 if wrong else 7, now_s=clock(), iter_times=times)
    assert 7 < job.choose(common.Choice(plan=3), clock()).at_iteration < 20


@pytest.mark.parametrize(
    ("first", "others"), [(1e308, 1e-10), (5e-324, 5e-324), (0.0, 0.0), (1e308, 2.0)]
)
def test_times_that_cannot_be_change_no_plan_and_fail_nothing(
    http: TestClient, first: float, others: float
) -> None:
    job_id = register(http, 2)
    for iteration in range(1, 12):
        for body in rank_bodies(2):
            time_s = others if body["dp_rank"] else first
            report = {
                "rank": body["rank"],
                "version": 1,
                "iteration": iteration + 1,
                "iter_times": [[iteration, time_s]],
            }
            assert ok(http.post(f"/progress/{job_id}", json=report))["version"] == 1
    seen = ok(http.get(f"/jobs/{job_id}"))
    assert seen["stragglers"] == []
    assert [one["slowdown"] for one in seen["pipelines"]] == [1.0, 1.0]
    chosen = ok(http.post(f"/choose/{job_id}", json={"plan": 0}))
    assert chosen["at_iteration"] < 10**9
    ok(http.get("/jobs"))


def test_registering_a_rank_costs_the_same_in_large_jobs() -> None:
    """Counted in lines of code, which do not depend on the machine."""

    def lines(ranks: int) -> int:
        job = TrainingJob(common.JobInfo(**job_body(1, ranks)), 0.0)
        infos = [common.RankInfo(**body) for body in rank_bodies(1, ranks)]
        count = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal count
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for info in infos:
                job.register(info)
        finally:
            sys.settrace(before)
        return count

    assert lines(400) < 2.5 * lines(200)

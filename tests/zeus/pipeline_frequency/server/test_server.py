"""What the server answers."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import snippets
from tests.zeus.pipeline_frequency.server.conftest import Serve
from tests.zeus.pipeline_frequency.server.running import (
    PLAN,
    Clock,
    Training,
    eventually,
    frontier,
    job_body,
    ok,
    rank_bodies,
    register,
)
from zeus.optimizer.pipeline_frequency import common
from zeus.optimizer.pipeline_frequency.plans import Frontier, read_plan
from zeus.optimizer.pipeline_frequency.server import job as job_module
from zeus.optimizer.pipeline_frequency.server import job_manager, router

STAGES = (
    [["forward", 1410], ["forward", 1395], ["backward", 1380], ["backward", 1365]],
    [["forward", 1200], ["backward", 1185], ["forward", 1170], ["backward", 1155]],
)


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "freqs_pipeline_00042.py"
    path.write_text(PLAN)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    frontier().write(tmp_path / "plans")
    return str(tmp_path / "plans")


def refused(response: Any, status: int) -> str:
    """The sentence of a refusal."""
    assert response.status_code == status, f"{response.status_code}: {response.text}"
    detail: str = response.json()["detail"]
    assert isinstance(detail, str)
    assert "Traceback" not in detail
    return detail


# --------------------------------------------------------------------------------- registration


def test_a_job_registers_and_each_rank_gets_its_stage(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = register(http)
    for rank in (0, 1):
        assert ok(http.get(f"/schedule/{job_id}?rank={rank}")) == {
            "rank": rank,
            "frequencies": STAGES[rank],
            "version": 1,
        }
    assert ok(http.get(f"/schedule/{job_id}?rank=0"))["frequencies"] == STAGES[0]  # once more
    registered = http.post(f"/register_rank/{job_id}", json=rank_bodies()[0])
    assert registered.text == "null"


def test_ids_say_when_and_what_and_are_never_the_same(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    ids = [ok(http.post("/register_job", json=job_body(2, 3, 4, job_metadata="a b"))) for _ in "xy"]
    assert ids[0] != ids[1]
    assert len(ok(http.get("/jobs"))) == 2
    for job_id in ids:
        assert "+dp2+pp3+tp4+PointSolution+a-b+" in job_id
        assert job_id.startswith("20")


@pytest.mark.parametrize(
    "metadata", ["gpt3/run1", "../../etc", "a?b#c%2F", "<b>é日本</b>", " ", "x" * 4000]
)
def test_any_metadata_works_and_is_kept(serve: Serve, plan_file: str, metadata: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = register(http, job_metadata=metadata)
    assert all(c.isalnum() or c in "+-._" for c in job_id)
    assert job_id.isascii()
    assert len(job_id) < 200
    assert ok(http.get(f"/schedule/{job_id}?rank=1"))["rank"] == 1
    assert ok(http.get(f"/jobs/{job_id}"))["job_metadata"] == metadata


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({**job_body(), "world_size": 3}, "world_size is 3"),
        ({**job_body(), "pp_degree": 0}, "pp_degree"),
        ({**job_body(), "job_id": "mine"}, "leave it empty"),
        (job_body(schedule="zigzag"), "no schedule 'zigzag'"),
        ({}, "pp_degree"),
        ([], "dictionary"),
    ],
)
def test_a_bad_job_is_refused(serve: Serve, plan_file: str, body: Any, words: str) -> None:
    http = serve({"solution_path": plan_file})
    assert words in refused(http.post("/register_job", json=body), 422)


@pytest.mark.parametrize("name", ["rank", "dp_rank", "pp_rank", "tp_rank"])
def test_a_rank_outside_the_job_is_refused(serve: Serve, plan_file: str, name: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    body = {**rank_bodies()[0], name: 2}
    sentence = refused(http.post(f"/register_rank/{job_id}", json=body), 422)
    assert f"{name} 2 is outside" in sentence


def test_registering_a_rank_again_does_no_harm(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    first, second = rank_bodies()
    for _ in range(3):
        ok(http.post(f"/register_rank/{job_id}", json=first))
    # The process began anew on another GPU, before the others were there.
    ok(http.post(f"/register_rank/{job_id}", json={**first, "available_frequencies": [900]}))
    assert ok(http.get(f"/jobs/{job_id}"))["ranks_registered"] == 1
    ok(http.post(f"/register_rank/{job_id}", json=second))
    ok(http.post(f"/register_rank/{job_id}", json=second))
    assert ok(http.get(f"/schedule/{job_id}?rank=0"))["frequencies"] == STAGES[0]
    other = {**second, "available_frequencies": [1]}
    assert "other figures" in refused(http.post(f"/register_rank/{job_id}", json=other), 409)


def test_two_ranks_cannot_have_one_place(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    body = rank_bodies()[0]
    ok(http.post(f"/register_rank/{job_id}", json=body))
    sentence = refused(http.post(f"/register_rank/{job_id}", json={**body, "rank": 1}), 409)
    assert "which is rank 0" in sentence


def test_an_unknown_job_is_not_found(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    result = {"rank": 0, "iter_time": [], "iter_energy": []}
    profile = dict.fromkeys(("rank", "dp_rank", "pp_rank", "tp_rank"), 0)
    row = {"instruction": "forward", "frequency": 1, "time": 1, "energy": 1}
    for response in (
        http.post("/register_rank/x", json=rank_bodies()[0]),
        http.get("/schedule/x?rank=0"),
        http.post("/result/x", json=result),
        http.post("/progress/x", json={"rank": 0, "iteration": 1}),
        http.post("/choose/x", json={"automatic": True}),
        http.post("/profile/x", json={**profile, "rows": [row]}),
        http.get("/jobs/x"),
    ):
        assert "there is no job x" in refused(response, 404)


def test_too_many_jobs_are_refused(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file}, MAX_JOBS=1)
    ok(http.post("/register_job", json=job_body()))
    assert "MAX_JOBS" in refused(http.post("/register_job", json=job_body()), 503)


def test_a_rank_that_has_not_registered_has_no_schedule(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    assert "rank 0 has not registered" in refused(http.get(f"/schedule/{job_id}?rank=0"), 409)
    assert "outside" in refused(http.get(f"/schedule/{job_id}?rank=2"), 422)
    assert "outside" in refused(http.get(f"/schedule/{job_id}?rank=-1"), 422)


# -------------------------------------------------------------------------------------- waiting


def test_who_waits_for_a_rank_that_never_comes_is_told_which(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file}, REGISTER_TIMEOUT=0.2)
    job_id = ok(http.post("/register_job", json=job_body(3, 2, 4)))
    for body in rank_bodies(3, 2, 4)[:3]:
        ok(http.post(f"/register_rank/{job_id}", json=body))
    sentence = refused(http.get(f"/schedule/{job_id}?rank=0"), 504)
    assert "ranks 3, 4, 5" in sentence
    assert "and 5 more of 24 had not registered" in sentence


def test_a_client_may_ask_for_a_shorter_wait(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    ok(http.post(f"/register_rank/{job_id}", json=rank_bodies()[0]))
    refused(http.get(f"/schedule/{job_id}?rank=0&timeout_s=0.05"), 504)
    refused(http.get(f"/schedule/{job_id}?rank=0&timeout_s=nan"), 422)


def test_who_waits_gets_the_schedule_when_the_last_rank_comes(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    first, second = rank_bodies()
    ok(http.post(f"/register_rank/{job_id}", json=first))
    found: list[Any] = []
    waiting = threading.Thread(
        target=lambda: found.append(ok(http.get(f"/schedule/{job_id}?rank=0")))
    )
    waiting.start()
    eventually(lambda: ok(http.get("/healthz"))["waiting"] == 1, "it to wait")
    ok(http.post(f"/register_rank/{job_id}", json=second))
    waiting.join()
    assert found[0]["frequencies"] == STAGES[0]


def test_all_ranks_are_told_what_the_scheduler_failed_for(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body(1, 3, 1)))
    bodies = rank_bodies(1, 3, 1)
    for body in bodies[:2]:
        ok(http.post(f"/register_rank/{job_id}", json=body))
    answers: list[Any] = []
    waiting = [
        threading.Thread(
            target=lambda n=n: answers.append(http.get(f"/schedule/{job_id}?rank={n}"))
        )
        for n in (0, 0, 1)
    ]
    for thread in waiting:
        thread.start()
    eventually(lambda: ok(http.get("/healthz"))["waiting"] == 3, "them to wait")
    ok(http.post(f"/register_rank/{job_id}", json=bodies[2]))
    for thread in waiting:
        thread.join()
    answers += [http.get(f"/schedule/{job_id}?rank={n}") for n in (2, 0, 2)]
    for answer in answers:
        assert "has 2 stages, but the job has 3" in refused(answer, 400)
    assert ok(http.get(f"/jobs/{job_id}"))["phase"] == "failed"


# ------------------------------------------------------------------------ data and tensor parallel


def test_one_plan_serves_all_pipelines_and_tensor_ranks(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = register(http, 2, 2, 2)
    for body in rank_bodies(2, 2, 2):
        answer = ok(http.get(f"/schedule/{job_id}?rank={body['rank']}"))
        assert answer["frequencies"] == STAGES[body["pp_rank"]]


def test_plans_are_never_run(serve: Serve, tmp_path: Path, plan_file: str) -> None:
    witness = tmp_path / "witness"
    http = serve({"solution_path": plan_file})
    Path(plan_file).write_text(f"[__import__('pathlib').Path({str(witness)!r}).touch()]\n")
    job_id = register(http)
    assert "is no Python literal" in refused(http.get(f"/schedule/{job_id}?rank=0"), 400)
    assert not witness.exists()


# ---------------------------------------------------------------------------------- whole frontiers


def test_a_folder_of_plans_begins_with_the_fastest(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    job_id = register(http, 2)
    made = Frontier.read(folder)
    answer = ok(http.get(f"/schedule/{job_id}?rank=3"))
    assert answer["frequencies"] == [list(step) for step in made.plans[-1].stages[1]]
    shown = ok(http.get(f"/jobs/{job_id}"))
    assert (shown["phase"], shown["plan"]) == ("running", 19)
    assert [one["time_s"] for one in shown["frontier"]["plans"]] == [p.time_s for p in made.plans]
    assert "stages" not in shown["frontier"]["plans"][0]


@pytest.mark.parametrize(
    ("args", "plan"),
    [
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
    serve: Serve, folder: str
) -> None:
    http = serve({"solution_path": folder})
    training = Training(http, register(http, 2), rank_bodies(2), frontier())
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


def test_an_update_is_told_once(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
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
def test_plans_are_chosen_by_many_wishes(
    serve: Serve, folder: str, wish: dict[str, Any], plan: int, note: bool
) -> None:
    http = serve({"solution_path": folder})
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
        ({"deadline_s": 0}, "deadline_s"),
        ({"max_slowdown": 0.9}, "max_slowdown"),
        ({"automatic": False}, "choose a plan"),
        ({"speed": 1}, "speed"),
        ({"plan": 1, "dp_rank": 0}, "straggler_s too"),
        ({"straggler_s": 3, "dp_rank": 5}, "no pipeline 5"),
    ],
)
def test_a_wish_that_means_nothing_is_refused(
    serve: Serve, folder: str, wish: dict[str, Any], words: str
) -> None:
    http = serve({"solution_path": folder})
    job_id = register(http)
    before = ok(http.get(f"/jobs/{job_id}"))["choice"]
    assert words in refused(http.post(f"/choose/{job_id}", json=wish), 422)
    assert ok(http.get(f"/jobs/{job_id}"))["choice"] == before


def test_where_there_is_one_plan_there_is_no_choice(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = register(http)
    assert "no frontier" in refused(http.post(f"/choose/{job_id}", json={"plan": 0}), 409)


def test_a_straggler_told_of_gets_the_fastest_plan(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    job_id = register(http, 3)
    wish = {"straggler_s": 2.4, "dp_rank": 1}
    other = frontier().by_straggler(2.4)
    assert ok(http.post(f"/choose/{job_id}", json=wish))["plans"] == [other, 19, other]


def test_the_server_sees_a_straggler_and_its_recovery(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    training = Training(http, register(http, 3), rank_bodies(3), frontier())
    training.step(30)
    assert training.plans() == {0: {19}, 1: {19}, 2: {19}}
    training.late = {1: 1.25}
    slowed = frontier().by_straggler(2.5)
    for _ in range(4000):
        training.step()
        if training.plans() == {0: {slowed}, 1: {19}, 2: {slowed}}:
            break
    else:
        raise AssertionError(training.plans())
    shown = ok(http.get(f"/jobs/{training.job_id}"))
    assert shown["stragglers"] == [1]
    assert shown["pipelines"][1]["slowdown"] == pytest.approx(1.25)
    training.step(50)
    assert training.plans() == {0: {slowed}, 1: {19}, 2: {slowed}}
    training.late = {}
    for _ in range(4000):
        training.step()
        if training.plans() == {0: {19}, 1: {19}, 2: {19}}:
            break
    else:
        raise AssertionError(training.plans())
    assert ok(http.get("/jobs"))[0]["stragglers"] == []


@pytest.mark.parametrize("wish", [{"plan": 7}, {"straggler_s": 2.2}])
def test_a_plan_that_somebody_chose_stays(serve: Serve, folder: str, wish: dict[str, Any]) -> None:
    http = serve({"solution_path": folder})
    training = Training(http, register(http, 2), rank_bodies(2), frontier(), {0: 1.3})
    ok(http.post(f"/choose/{training.job_id}", json=wish))
    training.step(40)
    shown = ok(http.get(f"/jobs/{training.job_id}"))
    assert shown["stragglers"] == [0]
    assert len({one["plan"] for one in shown["pipelines"]}) == 1


def test_a_rank_that_begins_anew_is_not_told_to_wait_for_ever(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    job_id = register(http)
    report = {"rank": 0, "iteration": 100_000, "version": 1}
    ok(http.post(f"/progress/{job_id}", json=report))
    ok(http.post(f"/choose/{job_id}", json={"plan": 2}))
    ok(http.post(f"/progress/{job_id}", json=report))
    update = ok(http.post(f"/progress/{job_id}", json={**report, "iteration": 2}))
    assert update["at_iteration"] == 3


def test_plans_begin_ahead_of_what_all_ranks_will_have_reached() -> None:
    """Between two reports of a rank there may be many iterations."""
    clock = Clock()
    job = job_module.Job(common.JobInfo(**job_body(1, 2)), clock())
    for body in rank_bodies(1, 2):
        job.register(common.RankInfo(**body))
    job.take_frontier(frontier(), common.Choice(automatic=True), clock())
    for second in range(4):
        for rank in (0, 1):
            iteration = 40 * second + rank
            job.report(common.Progress(rank=rank, iteration=iteration, version=1), clock())
        clock.now_s += 1
    chosen = job.choose(common.Choice(plan=3), clock())
    reached = 121 + 40
    assert reached + 40 * common.REPORT_INTERVAL_S < chosen.at_iteration < reached + 200


def test_what_was_seen_under_other_plans_makes_no_straggler() -> None:
    job = job_module.Job(common.JobInfo(**job_body(2, 1)), 0.0)
    for body in rank_bodies(2, 1):
        job.register(common.RankInfo(**body))
    made = frontier(stages=1)
    job.take_frontier(made, common.Choice(automatic=True), 0.0)

    def run(first: int, count: int, version: int) -> bool:
        for iteration in range(first, first + count):
            for rank in (0, 1):
                promised_s = made.plans[job.in_force[rank].plan].time_s
                job.report(
                    common.Progress(
                        rank=rank,
                        iteration=iteration + 1,
                        iter_times=[(iteration, promised_s * (1.2 if rank else 1.0))],
                        version=version,
                    ),
                    0.0,
                )
        return job.watch.slowdowns != (1.0, 1.0)

    needed = 10  # iterations before the one in which it is seen; the first two do not count
    assert not run(0, needed, 1)
    chosen = job.choose(common.Choice(deadline_s=2.5), 0.0)
    assert not run(chosen.at_iteration, needed, 2)
    assert run(chosen.at_iteration + needed, 1, 2)


def test_before_an_iteration_has_ended_the_plans_time_tells_the_pace() -> None:
    """A second of iterations of a tenth of one is ten, though none was seen to end."""
    job = job_module.Job(common.JobInfo(**job_body(1, 2)), 0.0)
    for body in rank_bodies(1, 2):
        job.register(common.RankInfo(**body))
    made = frontier()
    job.take_frontier(made, common.Choice(automatic=True), 0.0)
    for rank in (0, 1):
        job.report(common.Progress(rank=rank, iteration=0, version=1), 0.0)
    chosen = job.choose(common.Choice(plan=3), 0.0)
    assert chosen.at_iteration >= common.REPORT_INTERVAL_S / made.plans[-1].time_s
    assert chosen.at_iteration > 1


def test_long_iterations_are_not_waited_for_longer_than_needed() -> None:
    """Most reports then see no movement, and that one does says little about the pace."""
    clock = Clock()
    job = job_module.Job(common.JobInfo(**job_body(1, 2)), clock())
    for body in rank_bodies(1, 2):
        job.register(common.RankInfo(**body))
    job.take_frontier(frontier(), common.Choice(automatic=True), clock())
    for second in range(91):
        for rank in (0, 1):
            report = common.Progress(rank=rank, iteration=second // 30, version=1)
            job.report(report, clock())
        clock.now_s += 1
    assert job.choose(common.Choice(plan=3), clock()).at_iteration == 3 + 2


def test_iterations_under_the_plan_before_are_not_held_against_the_new_one(
    serve: Serve, folder: str
) -> None:
    """A rank that hears late reports old iterations together with the new version."""
    http = serve({"solution_path": folder})
    job_id = register(http, 2)
    ok(http.post(f"/choose/{job_id}", json={"plan": 0}))
    for body in rank_bodies(2):
        report = {"rank": body["rank"], "version": 2, "iteration": 50}
        # Pipeline 1 ran the fastest plan until now: two thirds of what the slowest promises.
        time_s = 2.0 if body["dp_rank"] else 3.0
        report["iter_times"] = [[n, time_s] for n in range(1, 50)]
        ok(http.post(f"/progress/{job_id}", json=report))
    assert ok(http.get(f"/jobs/{job_id}"))["stragglers"] == []


# ------------------------------------------------------------------------------ your own scheduler


PLUG_IN = """
from zeus.optimizer.pipeline_frequency.common import FrequencySchedule, PFOServerSettings
from zeus.optimizer.pipeline_frequency.server.scheduler import FrequencyScheduler

class Descending(FrequencyScheduler):
    '''Halves the clock as long as that saves energy.'''

    def __init__(self, job_info, rank_infos, pfo_settings: PFOServerSettings, start: int):
        super().__init__(job_info, rank_infos, pfo_settings)
        self.start = start

    def _run(self):
        mhz, least = self.start, float("inf")
        while True:
            schedule = [("forward", mhz), ("backward", mhz)]
            results = yield [
                FrequencySchedule(rank=info.rank, frequencies=schedule)
                for info in reversed(self.rank_infos)
            ]
            assert [result.rank for result in results] == list(range(self.world_size))
            energy = sum(sum(result.iter_energy) for result in results)
            if energy >= least:
                return
            mhz, least = mhz // 2, energy

class Failing(FrequencyScheduler):
    def _run(self):
        raise KeyError("nothing in here")
        yield []

class Silent(FrequencyScheduler):
    def _run(self):
        yield []
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    name = f"plug_in_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def one_round(http: Any, job_id: str, joules: float, world: int = 2) -> list[int]:
    """All ranks get schedules and send results; the clocks they got."""
    clocks = [
        ok(http.get(f"/schedule/{job_id}?rank={rank}"))["frequencies"][0][1]
        for rank in range(world)
    ]
    for rank in range(world):
        result = {"rank": rank, "iter_time": [1.0], "iter_energy": [joules]}
        ok(http.post(f"/result/{job_id}", json=result))
    return clocks


def test_a_scheduler_of_ones_own_goes_round_by_round(serve: Serve, plug_in: str) -> None:
    http = serve({"start": 1600}, SCHEDULER=f"{plug_in}:Descending", REGISTER_TIMEOUT=0.3)
    job_id = register(http)
    assert "+Descending+" in job_id
    assert one_round(http, job_id, 9) == [1600, 1600]
    assert one_round(http, job_id, 8) == [800, 800]
    result = {"rank": 0, "iter_time": [1.0], "iter_energy": [8.5]}
    ok(http.post(f"/result/{job_id}", json=result))
    sentence = refused(http.get(f"/schedule/{job_id}?rank=0"), 504)
    assert "rank 1 had not sent results" in sentence
    assert ok(http.get(f"/schedule/{job_id}?rank=1"))["frequencies"][0][1] == 400
    ok(http.post(f"/result/{job_id}", json={**result, "rank": 1}))
    for _ in range(3):  # it has ended: its last schedule stays
        assert one_round(http, job_id, 8.5) == [400, 400]


def test_the_manuals_scheduler_runs(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[4] / "docs/pipeline_frequency_server.md"
    (block,) = snippets.of(page)
    (tmp_path / "mine_of_the_manual.py").write_text(block.source)
    monkeypatch.syspath_prepend(tmp_path)
    http = serve({"step": 2}, SCHEDULER="mine_of_the_manual:Descend3D")
    job_id = register(http, 2)
    assert one_round(http, job_id, 9, world=4) == [1410] * 4
    assert one_round(http, job_id, 8, world=4) == [900] * 4
    assert one_round(http, job_id, 7, world=4) == [900] * 4


def test_its_rounds_are_taken_up_after_a_restart(
    serve: Serve, plug_in: str, tmp_path: Path
) -> None:
    settings = {"SCHEDULER": f"{plug_in}:Descending", "DATABASE": str(tmp_path / "d.sqlite")}
    http = serve({"start": 1600}, **settings)
    job_id = register(http)
    assert one_round(http, job_id, 9) == [1600, 1600]
    assert one_round(http, job_id, 8) == [800, 800]
    http.__exit__(None, None, None)
    again = serve({"start": 1600}, **settings)
    assert one_round(again, job_id, 7) == [400, 400]
    assert one_round(again, job_id, 9) == [200, 200]
    assert one_round(again, job_id, 9) == [200, 200]


def test_schedules_and_results_are_dumped(serve: Serve, plug_in: str, tmp_path: Path) -> None:
    http = serve({"start": 1600}, SCHEDULER=f"{plug_in}:Descending", DUMP_DIR=tmp_path / "here")
    job_id = register(http)
    one_round(http, job_id, 9)
    ok(http.get(f"/schedule/{job_id}?rank=0"))
    dumped = tmp_path / "here" / job_id
    schedule = [["forward", 1600], ["backward", 1600]]
    assert json.loads((dumped / "0.sched.json").read_text()) == [
        {"rank": rank, "frequencies": schedule} for rank in (0, 1)
    ]
    assert [one["iter_energy"] for one in json.loads((dumped / "0.prof.json").read_text())] == [
        [9.0],
        [9.0],
    ]
    assert json.loads((dumped / "ranks.json").read_text()) == rank_bodies()


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("Failing", 500, "KeyError: 'nothing in here'"),
        ("Silent", 500, "no schedule for ranks 0, 1"),
    ],
)
def test_a_scheduler_that_fails_is_told_in_a_sentence(
    serve: Serve, plug_in: str, name: str, status: int, words: str
) -> None:
    http = serve(SCHEDULER=f"{plug_in}:{name}")
    job_id = register(http)
    for rank in (0, 1, 0):
        assert words in refused(http.get(f"/schedule/{job_id}?rank={rank}"), status)


# ------------------------------------------------------------------------------- jobs that profile


def profile_body(rank: dict[str, Any], **more: Any) -> dict[str, Any]:
    rows = [
        {
            "instruction": name,
            "frequency": mhz,
            "time": work * (1 + rank["pp_rank"]) * 1410 / mhz,
            "energy": work * (1 + rank["pp_rank"]) * (120 + 280 * (mhz / 1410) ** 2),
        }
        for name, work in (("forward", 0.1), ("backward", 0.2))
        for mhz in (1410, 1200, 1050, 900)
    ]
    place = {name: rank[name] for name in ("rank", "dp_rank", "pp_rank", "tp_rank")}
    return {**place, "rows": rows, "p2p_power_w": 80.0, **more}


def order_of(rank: dict[str, Any]) -> list[str]:
    """1F1B with two stages and four microbatches."""
    pairs = ["backward", "forward"]
    if rank["pp_rank"] == 0:
        return ["forward", "forward", *pairs, *pairs, "backward", "backward"]
    return ["forward", "backward"] * 4


def phase(http: Any, job_id: str) -> str:
    found: str = ok(http.get(f"/jobs/{job_id}"))["phase"]
    return found


def planned(http: Any, job_id: str) -> dict[str, Any]:
    """The job, once the planner has ended."""

    def ended() -> Any:
        found = ok(http.get(f"/jobs/{job_id}"))
        return (found["error"] or found["frontier"]) and found["phase"] != "planning" and found

    found: dict[str, Any] = eventually(ended, "the planner to end")
    return found


def test_a_job_that_profiles_itself_gets_a_frontier(serve: Serve, tmp_path: Path) -> None:
    http = serve({"points": 10}, DUMP_DIR=tmp_path / "dump")
    job_id = register(http, 2)
    assert phase(http, job_id) == "profiling"
    empty = {"rank": 0, "frequencies": [], "version": 0}
    assert ok(http.get(f"/schedule/{job_id}?rank=0")) == empty
    report = {"rank": 0, "iteration": 1, "version": 0}
    assert ok(http.post(f"/progress/{job_id}", json=report))["frequencies"] is None
    for body in rank_bodies(2):
        assert phase(http, job_id) == "profiling"
        profile = profile_body(body, instructions=order_of(body))
        ok(http.post(f"/profile/{job_id}", json=profile))
        ok(http.post(f"/profile/{job_id}", json=profile))
    shown = planned(http, job_id)
    assert shown["error"] is None
    made = shown["frontier"]
    assert (made["schedule"], made["num_stages"], made["num_microbatches"]) == ("1f1b", 2, 4)
    assert made["p2p_power_w"] == 80.0
    assert shown["plan"] == len(made["plans"]) - 1
    update = ok(http.post(f"/progress/{job_id}", json=report))
    assert [name for name, _ in update["frequencies"]] == order_of(rank_bodies(2)[0])
    assert update["version"] == 1
    written = Frontier.read(tmp_path / "dump" / job_id)
    assert len(written.plans) == len(made["plans"])
    header = (tmp_path / "dump" / job_id / "profile.csv").read_text().splitlines()[0]
    assert header.startswith("rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy")


def test_a_profile_that_cannot_be_planned_is_told(serve: Serve) -> None:
    http = serve()
    job_id = register(http, num_microbatches=3)
    for body in rank_bodies():
        ok(http.post(f"/profile/{job_id}", json=profile_body(body, instructions=order_of(body))))
    assert "another order" in planned(http, job_id)["error"]
    # The ranks hear of it, too.
    report = {"rank": 1, "iteration": 3, "version": 0}
    update = ok(http.post(f"/progress/{job_id}", json=report))
    assert update["frequencies"] is None
    assert "another order" in update["note"]
    # Mended, and sent again.
    job_id = register(http)
    for body in rank_bodies():
        ok(http.post(f"/profile/{job_id}", json=profile_body(body)))
    assert "num_microbatches" in planned(http, job_id)["error"]
    for body in rank_bodies():
        ok(http.post(f"/profile/{job_id}", json=profile_body(body, instructions=order_of(body))))
    eventually(lambda: ok(http.get(f"/jobs/{job_id}"))["frontier"], "plans after all")


def test_profiles_are_checked(serve: Serve, folder: str) -> None:
    http = serve()
    job_id = register(http)
    rank = rank_bodies()[0]
    moved = {**profile_body(rank), "pp_rank": 1}
    assert "another place" in refused(http.post(f"/profile/{job_id}", json=moved), 409)
    for wrong in ({"time": -1}, {"energy": float("nan")}, {"frequency": 0}):
        body = profile_body(rank)
        body["rows"][0].update(wrong)
        text = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        refused(http.post(f"/profile/{job_id}", content=text, headers=headers), 422)
    assert ok(http.get(f"/jobs/{job_id}"))["profiles"] == 0
    fixed = serve({"solution_path": folder}, DATABASE=":memory:")
    job_id = register(fixed)
    sentence = refused(fixed.post(f"/profile/{job_id}", json=profile_body(rank)), 409)
    assert "FrontierSolution" in sentence


def test_the_references_form_of_a_profile_is_taken(serve: Serve) -> None:
    http = serve()
    job_id = register(http)
    place = {"rank": 0, "dp_rank": 0, "pp_rank": 0, "tp_rank": 0}
    body = {
        **place,
        "forward_time": {"1410": 0.1, "1200": 0.12},
        "forward_energy": {"1410": 30.0, "1200": 25.0},
        "backward_time": {"1410": 0.2},
        "backward_energy": {"1410": 60.0},
    }
    ok(http.post(f"/profile/{job_id}", json=body))
    assert ok(http.get(f"/jobs/{job_id}"))["profiles"] == 1
    body["backward_energy"] = {"1200": 60.0}
    assert "same clocks" in refused(http.post(f"/profile/{job_id}", json=body), 422)
    body["backward_energy"], body["backward_time"] = {"1410": -1.0}, {"1410": 0.2}
    assert "energy" in refused(http.post(f"/profile/{job_id}", json=body), 422)


# ------------------------------------------------------------------------------- state and its loss


def test_everything_is_there_again_after_a_restart(
    serve: Serve, folder: str, tmp_path: Path
) -> None:
    http = serve({"solution_path": folder})
    training = Training(http, register(http, 3, job_metadata="a/b"), rank_bodies(3), frontier())
    job_id = training.job_id
    training.late = {2: 1.2}
    while ok(http.get(f"/jobs/{job_id}"))["stragglers"] != [2]:
        training.step()
    half = ok(http.post("/register_job", json=job_body()))
    ok(http.post(f"/register_rank/{half}", json=rank_bodies()[0]))
    before = ok(http.get(f"/jobs/{job_id}"))
    http.__exit__(None, None, None)
    again = serve({"solution_path": folder})
    after = ok(again.get(f"/jobs/{job_id}"))
    for shown in (before, after):
        del shown["heard_ago_s"]
        for one in shown["pipelines"]:
            del one["pace"]
        for one in shown["ranks"]:
            del one["heard_ago_s"]
    assert after == before
    # Ranks that go on, or begin anew, notice nothing.
    training.http = again
    training.step(3)
    rank = ok(again.get(f"/schedule/{job_id}?rank=0"))
    assert rank["version"] == before["ranks"][0]["wanted_version"]
    ok(again.post(f"/register_rank/{half}", json=rank_bodies()[1]))
    assert ok(again.get(f"/schedule/{half}?rank=1"))["frequencies"]


def test_a_change_for_a_straggler_is_on_disk_before_any_rank_hears_of_it(
    serve: Serve, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_manager, "FLUSH_S", 3600.0)
    http = serve({"solution_path": folder})
    training = Training(http, register(http, 2), rank_bodies(2), frontier(), {1: 1.2})
    while not ok(http.get(f"/jobs/{training.job_id}"))["stragglers"]:
        training.step()
    with contextlib.closing(sqlite3.connect(tmp_path / "dump/pfo.sqlite")) as database:
        rows = database.execute("SELECT body FROM records WHERE kind = 'job'").fetchall()
    (state,) = (json.loads(body) for (body,) in rows)
    assert state["slowdowns"] == [1.0, pytest.approx(1.2)]
    assert [one["version"] for one in state["in_force"]] == [2, 1]


def test_jobs_that_nothing_is_heard_of_are_forgotten(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder}, MAX_JOB_IDLE_TIME=2)
    idle = register(http)
    kept = register(http)
    report = {"rank": 0, "iteration": 1, "version": 1}

    def gone() -> bool:
        ok(http.post(f"/progress/{kept}", json=report))
        return [job["job_id"] for job in ok(http.get("/jobs"))] == [kept]

    eventually(gone, "the idle job to be forgotten")
    refused(http.get(f"/schedule/{idle}?rank=0"), 404)
    http.__exit__(None, None, None)
    again = serve({"solution_path": folder})
    assert [job["job_id"] for job in ok(again.get("/jobs"))] == [kept]


# ---------------------------------------------------------------------------------- and the rest


def test_a_client_of_the_reference_is_served(serve: Serve, plan_file: str) -> None:
    """Bodies as the models of ml-energy/zeus 0.16 write them."""
    http = serve({"solution_path": plan_file})
    degrees = '"pp_degree": 2, "dp_degree": 1, "tp_degree": 1, "world_size": 2'
    place = '"dp_rank": 0, "pp_rank": {0}, "tp_rank": 0, "available_frequencies": [1410, 900]'
    json_type = {"Content-Type": "application/json"}
    for metadata in ('"gpt3/run1"', "null"):
        body = '{"job_id": "", ' + degrees + ', "job_metadata": ' + metadata + "}"
        job_id = ok(http.post("/register_job", content=body, headers=json_type))
        for rank in (0, 1):
            body = "{" + f'"rank": {rank}, ' + place.format(rank) + "}"
            response = http.post(f"/register_rank/{job_id}", content=body, headers=json_type)
            assert (response.status_code, response.text) == (200, "null")
        for rank in (0, 1):
            answer = ok(http.get(f"/schedule/{job_id}", params={"rank": rank}))
            assert (answer["rank"], answer["frequencies"]) == (rank, STAGES[rank])
            body = (
                f'{{"rank": {rank}, "iter_time": [1.0], "iter_energy": [2.0], "time_breakdown": '
                '{"forward": [[0.1, 0.2]]}, "energy_breakdown": {"forward": [[1.0, 2.0]]}}'
            )
            response = http.post(f"/result/{job_id}", content=body, headers=json_type)
            assert (response.status_code, response.text) == (200, "null")
        assert ok(http.get(f"/schedule/{job_id}", params={"rank": 0}))["frequencies"] == STAGES[0]


def test_changes_need_the_token_where_there_is_one(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder}, TOKEN="secret")
    bearer = {"Authorization": "Bearer secret"}
    job_id = ok(http.post("/register_job", json=job_body(), headers=bearer))
    for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
        for path, body in (
            ("/register_job", job_body()),
            (f"/register_rank/{job_id}", rank_bodies()[0]),
            (f"/progress/{job_id}", {"rank": 0, "iteration": 0}),
            (f"/result/{job_id}", {"rank": 0, "iter_time": [], "iter_energy": []}),
            (f"/choose/{job_id}", {"plan": 0}),
            (f"/profile/{job_id}", profile_body(rank_bodies()[0])),
        ):
            assert "token" in refused(http.post(path, json=body, headers=headers), 401)
    assert len(ok(http.get("/jobs"))) == 1
    assert ok(http.get("/info"))["token_required"]
    assert "secret" not in http.get("/info").text + http.get("/jobs").text


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_what_another_sites_page_could_send_is_refused(
    serve: Serve, folder: str, kind: str | None
) -> None:
    http = serve({"solution_path": folder})
    job_id = register(http)
    headers = {} if kind is None else {"Content-Type": kind}
    response = http.post(f"/choose/{job_id}", content=b'{"plan": 0}', headers=headers)
    assert "Content-Type: application/json" in refused(response, 415)
    assert ok(http.get(f"/jobs/{job_id}"))["plan"] == 19


def test_requests_without_end_are_refused(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    many = b" " * (router.MOST_BYTES + 1)
    assert "bytes" in refused(http.post("/register_job", content=many), 413)

    def chunks() -> Any:
        for _ in range(router.MOST_BYTES // 2**20 + 1):
            yield b" " * 2**20

    assert "bytes" in refused(http.post("/register_job", content=chunks()), 413)


def test_what_is_no_number_is_refused_and_breaks_nothing(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    job_id = register(http)
    headers = {"Content-Type": "application/json"}
    for time in ("NaN", "Infinity", "-1", "1e999", '"x"'):
        text = f'{{"rank": 0, "iteration": 5, "iter_times": [[4, {time}]], "version": 1}}'
        refused(http.post(f"/progress/{job_id}", content=text, headers=headers), 422)
    assert ok(http.get(f"/jobs/{job_id}"))["iteration"] is None


def test_metrics_are_prometheus_text(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    register(http)
    training = Training(http, register(http, 2), rank_bodies(2), frontier())
    training.step(3)
    ok(http.post("/register_job", json=job_body()))
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, *sorted(v for k, v in sample.labels.items() if k != "job_id")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.labels.get("job_id", training.job_id) == training.job_id
    }
    assert found["zeus_pfo_jobs", "running"] == 2
    assert found["zeus_pfo_jobs", "registering"] == 1
    assert found["zeus_pfo_plan", "1"] == 19
    assert found["zeus_pfo_planned_iteration_seconds", "1"] == pytest.approx(2.0)
    assert found["zeus_pfo_iteration_seconds", "0"] == pytest.approx(2.0)
    assert found["zeus_pfo_iteration",] == 3
    assert found["zeus_pfo_straggler_slowdown_ratio", "0"] == 1


def test_info_and_health(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    info = ok(http.get("/info"))
    assert info["scheduler"] == "PointSolution"
    assert info["token_required"] is False
    assert ok(http.get("/healthz")) == {"status": "ok", "jobs": 0, "waiting": 0}


def test_the_plan_of_a_rank_is_the_files(serve: Serve, plan_file: str) -> None:
    assert [list(map(list, stage)) for stage in read_plan(plan_file).stages] == list(STAGES)


def test_the_page_runs_only_its_own_script(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    page = http.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "innerHTML =" not in page.text
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text

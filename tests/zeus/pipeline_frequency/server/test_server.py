"""The server's answers."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import TIMEOUT_S
from tests.zeus.pipeline_frequency.server.conftest import Serve, TestClient
from tests.zeus.pipeline_frequency.server.running import (
    Training,
    asked,
    frontier,
    job_body,
    ok,
    profile_body,
    rank_bodies,
    refused,
    register,
)

MOST_BYTES = 32 * 2**20
JSON = {"Content-Type": "application/json"}
STAGES = [[list(step) for step in stage] for stage in frontier().plans[-1].stages]
POSTS: dict[str, Any] = {
    "register_rank": rank_bodies()[0],
    "progress": {"rank": 0, "iteration": 0},
    "result": {"rank": 0, "iter_time": [], "iter_energy": []},
    "choose": {"plan": 0},
    "profile": profile_body(rank_bodies()[0]),
}
"""All that may be sent for a job."""


# --------------------------------------------------------------------------------- registration


def test_ids_say_when_and_what_and_are_never_the_same(http: TestClient) -> None:
    ids = [ok(http.post("/register_job", json=job_body(2, 3, 4, job_metadata="a b"))) for _ in "xy"]
    assert ids[0] != ids[1]
    assert len(ok(http.get("/jobs"))) == 2
    for job_id in ids:
        assert "+dp2+pp3+tp4+FrontierSolution+a-b+" in job_id
        assert job_id.startswith("20")


@pytest.mark.parametrize(
    "metadata", ["gpt3/run1", "../../etc", "a?b#c%2F", "<b>é日本</b>", " ", "x" * 4000]
)
def test_any_metadata_works_and_is_kept(http: TestClient, metadata: str) -> None:
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
        ([], "object"),
        ({**job_body(), "num_microbatches": True}, "num_microbatches"),
    ],
)
def test_a_bad_job_is_refused(http: TestClient, body: Any, words: str) -> None:
    assert words in refused(http.post("/register_job", json=body), 422)


@pytest.mark.parametrize("name", ["rank", "dp_rank", "pp_rank", "tp_rank"])
def test_a_rank_outside_the_job_is_refused(http: TestClient, name: str) -> None:
    job_id = ok(http.post("/register_job", json=job_body()))
    body = {**rank_bodies()[0], name: 2}
    sentence = refused(http.post(f"/register_rank/{job_id}", json=body), 422)
    assert f"{name} 2 is outside the job: {name} must be from 0 to " in sentence


def test_registering_a_rank_again_does_no_harm(http: TestClient) -> None:
    job_id = ok(http.post("/register_job", json=job_body()))
    first, second = rank_bodies()
    for _ in range(3):
        ok(http.post(f"/register_rank/{job_id}", json=first))
    # The process began again on another GPU, before the others were there.
    ok(http.post(f"/register_rank/{job_id}", json={**first, "available_frequencies": [900]}))
    assert ok(http.get(f"/jobs/{job_id}"))["ranks_registered"] == 1
    ok(http.post(f"/register_rank/{job_id}", json=second))
    ok(http.post(f"/register_rank/{job_id}", json=second))
    assert ok(http.get(f"/schedule/{job_id}?rank=0"))["frequencies"] == STAGES[0]
    other = {**second, "available_frequencies": [1]}
    assert "other figures" in refused(http.post(f"/register_rank/{job_id}", json=other), 409)


def test_two_ranks_cannot_have_one_place(http: TestClient) -> None:
    job_id = ok(http.post("/register_job", json=job_body()))
    body = rank_bodies()[0]
    ok(http.post(f"/register_rank/{job_id}", json=body))
    sentence = refused(http.post(f"/register_rank/{job_id}", json={**body, "rank": 1}), 409)
    assert "which is rank 0" in sentence
    # Once rank 0 has moved, its place is free.
    ok(http.post(f"/register_rank/{job_id}", json={**body, "pp_rank": 1}))
    ok(http.post(f"/register_rank/{job_id}", json={**body, "rank": 1}))


def test_an_unknown_job_is_not_found(http: TestClient) -> None:
    for response in (
        http.get("/schedule/x?rank=0"),
        http.get("/jobs/x"),
        *(http.post(f"/{name}/x", json=body) for name, body in POSTS.items()),
    ):
        assert "there is no job x" in refused(response, 404)


def test_too_many_jobs_are_refused(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file}, MAX_JOBS=1)
    ok(http.post("/register_job", json=job_body()))
    assert "MAX_JOBS" in refused(http.post("/register_job", json=job_body()), 503)


def test_a_rank_that_has_not_registered_has_no_schedule(http: TestClient) -> None:
    job_id = ok(http.post("/register_job", json=job_body()))
    assert "rank 0 has not registered" in refused(http.get(f"/schedule/{job_id}?rank=0"), 409)
    assert "outside" in refused(http.get(f"/schedule/{job_id}?rank=2"), 422)
    assert "outside" in refused(http.get(f"/schedule/{job_id}?rank=-1"), 422)


# -------------------------------------------------------------------------------------- waiting


def test_a_rank_that_waits_for_a_missing_rank_learns_which(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file}, REGISTER_TIMEOUT=0.2)
    job_id = ok(http.post("/register_job", json=job_body(3, 2, 4)))
    for body in rank_bodies(3, 2, 4)[:3]:
        ok(http.post(f"/register_rank/{job_id}", json=body))
    refused(http.get(f"/schedule/{job_id}?rank=0&timeout_s=nan"), 422)
    sentence = refused(http.get(f"/schedule/{job_id}?rank=0"), 504)
    assert "ranks 3, 4, 5" in sentence
    assert "and 5 more of 24 had not registered" in sentence


def test_waiting_ranks_get_the_schedule_when_the_last_rank_registers(http: TestClient) -> None:
    job_id = ok(http.post("/register_job", json=job_body()))
    first, second = rank_bodies()
    ok(http.post(f"/register_rank/{job_id}", json=first))
    (waiting,) = asked(http, job_id, 0)
    ok(http.post(f"/register_rank/{job_id}", json=second))
    assert ok(waiting.result(TIMEOUT_S))["frequencies"] == STAGES[0]


def test_all_ranks_learn_why_the_scheduler_failed(http: TestClient) -> None:
    job_id = ok(http.post("/register_job", json=job_body(1, 3, 1)))
    bodies = rank_bodies(1, 3, 1)
    for body in bodies[:2]:
        ok(http.post(f"/register_rank/{job_id}", json=body))
    waiting = asked(http, job_id, 0, 0, 1)
    ok(http.post(f"/register_rank/{job_id}", json=bodies[2]))
    answers = [one.result(TIMEOUT_S) for one in waiting]
    answers += [http.get(f"/schedule/{job_id}?rank={n}") for n in (2, 0, 2)]
    for answer in answers:
        assert "has 2 stages, but the job has 3" in refused(answer, 400)
    assert ok(http.get(f"/jobs/{job_id}"))["phase"] == "failed"


# ---------------------------------------------------------------------------------- and the rest


def test_a_client_of_the_reference_is_served(http: TestClient) -> None:
    """Bodies as the models of ml-energy/zeus 0.16 write them."""
    degrees = '"pp_degree": 2, "dp_degree": 1, "tp_degree": 1, "world_size": 2'
    place = '"dp_rank": 0, "pp_rank": {0}, "tp_rank": 0, "available_frequencies": [1410, 900]'
    result = '"iter_time": [1.0], "iter_energy": [2.0], "time_breakdown": {"forward": [[0.1, 0.2]]}'
    result += ', "energy_breakdown": {"forward": [[1.0, 2.0]]}'
    for metadata in ('"gpt3/run1"', "null"):
        body = '{"job_id": "", ' + degrees + ', "job_metadata": ' + metadata + "}"
        job_id = ok(http.post("/register_job", content=body, headers=JSON))
        for path, text in (("register_rank", place), ("result", result)):
            for rank in (0, 1):
                body = f'{{"rank": {rank}, ' + text.replace("{0}", str(rank)) + "}"
                response = http.post(f"/{path}/{job_id}", content=body, headers=JSON)
                assert (response.status_code, response.text) == (200, "null")
            for rank in (0, 1):
                answer = ok(http.get(f"/schedule/{job_id}", params={"rank": rank}))
                assert answer == {"rank": rank, "frequencies": STAGES[rank], "version": 1}


def test_changes_need_the_token_where_there_is_one(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder}, TOKEN="secret")
    bearer = {"Authorization": "Bearer secret"}
    job_id = ok(http.post("/register_job", json=job_body(), headers=bearer))
    posts = {"register_job": job_body()}
    posts |= {f"{name}/{job_id}": body for name, body in POSTS.items()}
    for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
        for path, body in posts.items():
            assert "token" in refused(http.post(f"/{path}", json=body, headers=headers), 401)
    assert len(ok(http.get("/jobs"))) == 1
    assert ok(http.get("/info"))["token_required"]
    assert "secret" not in http.get("/info").text + http.get("/jobs").text


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_cross_site_requests_are_refused(http: TestClient, kind: str | None) -> None:
    job_id = register(http)
    headers = {} if kind is None else {"Content-Type": kind}
    response = http.post(f"/choose/{job_id}", content=b'{"plan": 0}', headers=headers)
    assert "Content-Type: application/json" in refused(response, 415)
    assert ok(http.get(f"/jobs/{job_id}"))["plan"] == 19


def test_requests_without_end_are_refused(http: TestClient) -> None:
    many = b" " * (MOST_BYTES + 1)
    assert "bytes" in refused(http.post("/register_job", content=many), 413)


@pytest.mark.parametrize(
    "figures",
    [f'"iteration": 5, "iter_times": [[4, {one}]]' for one in ("NaN", "Infinity", "-1", "1e999")]
    + [f'"iteration": {one}' for one in ("1e320", "1" + 320 * "0", "1e18", "-1")],
)
def test_figures_that_cannot_be_are_refused_and_break_nothing(
    http: TestClient, figures: str
) -> None:
    job_id = register(http)
    text = f'{{"rank": 0, "version": 1, {figures}}}'
    response = http.post(f"/progress/{job_id}", content=text, headers=JSON)
    assert "iter" in refused(response, 422)
    assert ok(http.get(f"/jobs/{job_id}"))["iteration"] is None


def test_metrics_are_prometheus_text(http: TestClient) -> None:
    register(http)
    training = Training(http, 2)
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
    assert (found["zeus_pfo_ranks_registered",], found["zeus_pfo_ranks",]) == (4, 4)
    assert found["zeus_pfo_plans",] == 20
    assert found["zeus_pfo_planned_iteration_joules", "1"] == frontier().plans[19].energy_j
    assert found["zeus_pfo_replans_total",] == 0
    (job,) = [one for one in ok(http.get("/jobs")) if one["job_id"] == training.job_id]
    heard_s = found["zeus_pfo_heard_timestamp_seconds",]
    assert job["created_s"] <= heard_s <= job["created_s"] + 600
    assert 0 <= job["heard_ago_s"] <= 600
    assert found["zeus_pfo_straggler_slowdown_ratio", "0"] == 1


def test_info_and_health(http: TestClient) -> None:
    info = ok(http.get("/info"))
    assert info["scheduler"] == "FrontierSolution"
    assert info["token_required"] is False
    assert ok(http.get("/healthz")) == {"status": "ok", "jobs": 0, "waiting": 0}


def test_the_page_runs_only_its_own_script(http: TestClient) -> None:
    page = http.get("/")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "innerHTML =" not in page.text
    assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page.text

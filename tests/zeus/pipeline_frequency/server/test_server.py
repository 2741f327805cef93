"""The server's answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support import wait_for
from tests.zeus.pipeline_frequency.server.conftest import Serve
from tests.zeus.pipeline_frequency.server.running import (
    Training,
    frontier,
    job_body,
    ok,
    profile_body,
    rank_bodies,
    refused,
    register,
)
from zeus.optimizer.pipeline_frequency.plans import read_plan

MOST_BYTES = 32 * 2**20
STAGES = (
    [["forward", 1410], ["forward", 1395], ["backward", 1380], ["backward", 1365]],
    [["forward", 1200], ["backward", 1185], ["forward", 1170], ["backward", 1155]],
)


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
        ([], "object"),
        ({**job_body(), "num_microbatches": True}, "num_microbatches"),
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
    assert f"{name} 2 is outside the job: {name} must be from 0 to " in sentence


def test_registering_a_rank_again_does_no_harm(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
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


def test_two_ranks_cannot_have_one_place(serve: Serve, plan_file: str) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    body = rank_bodies()[0]
    ok(http.post(f"/register_rank/{job_id}", json=body))
    sentence = refused(http.post(f"/register_rank/{job_id}", json={**body, "rank": 1}), 409)
    assert "which is rank 0" in sentence
    # Once rank 0 has moved, its place is free.
    ok(http.post(f"/register_rank/{job_id}", json={**body, "pp_rank": 1}))
    ok(http.post(f"/register_rank/{job_id}", json={**body, "rank": 1}))


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


def test_a_rank_that_waits_for_a_missing_rank_learns_which(serve: Serve, plan_file: str) -> None:
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


def test_waiting_ranks_get_the_schedule_when_the_last_rank_registers(
    serve: Serve, plan_file: str
) -> None:
    http = serve({"solution_path": plan_file})
    job_id = ok(http.post("/register_job", json=job_body()))
    first, second = rank_bodies()
    ok(http.post(f"/register_rank/{job_id}", json=first))
    found: list[Any] = []
    waiting = threading.Thread(
        target=lambda: found.append(ok(http.get(f"/schedule/{job_id}?rank=0")))
    )
    waiting.start()
    wait_for(lambda: ok(http.get("/healthz"))["waiting"] == 1, "it to wait")
    ok(http.post(f"/register_rank/{job_id}", json=second))
    waiting.join()
    assert found[0]["frequencies"] == STAGES[0]


def test_all_ranks_learn_why_the_scheduler_failed(serve: Serve, plan_file: str) -> None:
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
    wait_for(lambda: ok(http.get("/healthz"))["waiting"] == 3, "them to wait")
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
    assert "is not a Python literal" in refused(http.get(f"/schedule/{job_id}?rank=0"), 400)
    assert not witness.exists()


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
def test_cross_site_requests_are_refused(serve: Serve, folder: str, kind: str | None) -> None:
    http = serve({"solution_path": folder})
    job_id = register(http)
    headers = {} if kind is None else {"Content-Type": kind}
    response = http.post(f"/choose/{job_id}", content=b'{"plan": 0}', headers=headers)
    assert "Content-Type: application/json" in refused(response, 415)
    assert ok(http.get(f"/jobs/{job_id}"))["plan"] == 19


def test_requests_without_end_are_refused(serve: Serve, folder: str) -> None:
    http = serve({"solution_path": folder})
    many = b" " * (MOST_BYTES + 1)
    assert "bytes" in refused(http.post("/register_job", content=many), 413)

    def chunks() -> Any:
        for _ in range(MOST_BYTES // 2**20 + 1):
            yield b" " * 2**20

    headers = {"Content-Type": "application/json"}
    response = http.post("/register_job", content=chunks(), headers=headers)
    assert "bytes" in refused(response, 413)


def test_a_value_that_is_not_finite_is_refused_and_breaks_nothing(
    serve: Serve, folder: str
) -> None:
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

"""The server's answers: to ml-energy/zeus's clients, to ours, and to readers."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.zeus.batch_size.server.conftest import Serve
from tests.zeus.batch_size.server.training import body, convex

Answer = Any
MOST_BYTES = 2**20


def ok(answer: Answer, status: int = 200) -> Any:
    """Its reply, which must be a success."""
    assert answer.status_code == status, answer.text
    return answer.json()


def refused(answer: Answer, status: int) -> str:
    """The sentence of a refusal."""
    assert answer.status_code == status, answer.text
    ((key, sentence),) = answer.json().items()
    assert key == "detail"
    assert isinstance(sentence, str)
    return sentence


def sent(message: dict[str, Any]) -> dict[str, Any]:
    """As ml-energy/zeus's clients send it: JSON, and they do not say so."""
    return {"content": json.dumps(message)}


def epoch(trial: dict[str, Any], number: int, cost: float = 1000.0, **more: Any) -> dict[str, Any]:
    """The report of one of four epochs."""
    share = number * cost / 4
    which = {name: trial[name] for name in ("job_id", "batch_size", "trial_number")}
    metric = 0.6 if number >= 4 else 0.1
    used = {"time": share / 300, "energy": share, "metric": metric, "current_epoch": number}
    return {**which, **used, **more}


def test_the_clients_of_the_reference_are_served(serve: Serve) -> None:
    http = serve(LEASE_S=60, REFERENCE_LEASE_S=5000)
    made = ok(http.post("/jobs", **sent(body(None))), 201)
    name = made["job_id"]
    assert name.startswith("job-")
    assert len(name) == len("job-") + 8
    given = {**body(None), "job_id": name}
    assert {field: made[field] for field in given} == given
    assert ok(http.post("/jobs", **sent(given)), 200) == made
    assert "gpu_model" in refused(http.post("/jobs", **sent({**given, "gpu_model": "A40"})), 409)
    refused(http.post("/jobs", **sent({**given, "default_batch_size": 65})), 422)
    trial = ok(http.get("/jobs/batch_size", params={"job_id": name}))
    assert trial == {"job_id": name, "batch_size": 64, "trial_number": 1}
    refused(http.get("/jobs/batch_size", params={"job_id": "other"}), 400)
    for number in (1, 2, 3):
        answer = ok(http.post("/report", **sent(epoch(trial, number))))
        assert (answer["stop_train"], answer["converged"]) == (False, False)
    answer = ok(http.post("/report", **sent(epoch(trial, 4))))
    assert (answer["stop_train"], answer["converged"]) == (True, True)
    answer = ok(http.post("/report", **sent(epoch(trial, 4))))
    assert (answer["stop_train"], answer["converged"]) == (True, True)
    assert "already reported" in answer["message"]
    refused(http.post("/report", **sent(epoch({**trial, "trial_number": 7}, 1))), 400)
    ok(http.patch("/trials", **sent(trial)))  # at the end of each process, whatever came before
    second = ok(http.get("/jobs/batch_size", params={"job_id": name}))
    ok(http.patch("/trials", **sent(second)))
    refused(http.patch("/trials", **sent({**trial, "trial_number": 7})), 404)
    shown = ok(http.get(f"/jobs/{name}"))
    assert [one["status"] for one in shown["trials"]] == ["ok", "failed"]
    assert [one["lease_s"] for one in shown["trials"]] == [5000.0, 5000.0]
    ok(http.delete("/jobs", params={"job_id": name}))
    refused(http.delete("/jobs", params={"job_id": name}), 404)


def test_a_request_without_a_key_is_a_new_one_and_an_end_has_a_known_reason(serve: Serve) -> None:
    http = serve(LEASE_S=60)
    ok(http.post("/jobs", json=body()), 201)
    first, second = (ok(http.post("/jobs/job/trials"), 201) for _ in range(2))
    assert (first["trial_number"], second["trial_number"]) == (1, 2)
    assert (first["lease_s"], first["cost_bound"]) == (60.0, None)
    refused(http.post("/jobs/other/trials"), 404)
    refused(http.patch("/trials", json={**first, "reason": "bored"}), 422)
    assert "by a report" in refused(http.patch("/trials", json={**first, "reason": "ok"}), 422)
    ok(http.patch("/trials", json={**first, "reason": "oom"}))
    assert ok(http.post("/jobs/job/release")) == {"released": [64, 128, 256]}


def test_a_job_is_shown_with_what_is_known_of_it(serve: Serve) -> None:
    http = serve()
    assert ok(http.get("/jobs")) == []
    refused(http.get("/jobs/job"), 404)
    ok(http.post("/jobs", json=body(policy="pruning-gts")), 201)
    assert ok(http.get("/jobs/job"))["best_batch_size"] is None
    for _ in range(2):
        trial = ok(http.post("/jobs/job/trials"), 201)
        for number in range(1, 5):
            ok(http.post("/report", json=epoch(trial, number, convex(trial["batch_size"]))))
    running = ok(http.post("/jobs/job/trials"), 201)
    ok(http.post("/report", json=epoch(running, 1)))
    shown = ok(http.get("/jobs/job"))
    assert (shown["best_batch_size"], shown["best_cost_j"]) == (32, pytest.approx(1000.0))
    assert shown["default_mean_cost_j"] == pytest.approx(1300.0)
    assert shown["spec"] == ok(http.post("/jobs", json=body(policy="pruning-gts")))
    assert [one["regret_j"] for one in shown["regret"]] == pytest.approx([300.0, 300.0])
    last = shown["trials"][-1]
    assert (last["status"], last["epochs"], last["batch_size"]) == ("running", 1, 16)
    assert last["cost_j"] == pytest.approx(250.0)
    assert last["cost_bound_j"] == pytest.approx(2000.0)
    sizes = {one["batch_size"]: one for one in shown["estimates"]}
    assert list(sizes) == body()["batch_sizes"]
    assert sizes[64]["measured_mean_j"] == pytest.approx(1300.0)
    assert sizes[8]["mean_j"] is None
    assert sizes[32]["runs"] == 1
    (line,) = ok(http.get("/jobs"))
    assert line == {name: shown[name] for name in line} | {"heard_ago_s": line["heard_ago_s"]}
    assert line["counts"]["running"] == 1
    assert line["converged"] == 2
    assert ok(http.get("/healthz")) == {"status": "ok", "jobs": 1}


def test_prometheus_reads_the_figures(serve: Serve) -> None:
    http = serve()
    ok(http.post("/jobs", json=body()), 201)
    trial = ok(http.post("/jobs/job/trials"), 201)
    for number in range(1, 5):
        ok(http.post("/report", json=epoch(trial, number)))
    ok(http.post("/jobs/job/trials"), 201)
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (sample.name, sample.labels.get("status", sample.labels.get("job_id", ""))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["zeus_bso_jobs", ""] == 1
    assert found["zeus_bso_trials", "ok"] == 1
    assert found["zeus_bso_trials", "running"] == 1
    assert found["zeus_bso_trials", "lost"] == 0
    assert found["zeus_bso_converged_trials_total", "job"] == 1
    assert found["zeus_bso_training_joules_total", "job"] == pytest.approx(1000.0)
    assert found["zeus_bso_training_seconds_total", "job"] == pytest.approx(1000.0 / 300)
    assert found["zeus_bso_cost_joules_total", "job"] == pytest.approx(1000.0)
    assert found["zeus_bso_cheapest_batch_size", "job"] == 64
    assert found["zeus_bso_default_cost_joules", "job"] == pytest.approx(1000.0)


_CHANGING = [
    ("POST", "/jobs"),
    ("DELETE", "/jobs?job_id=job"),
    ("GET", "/jobs/batch_size?job_id=job"),
    ("POST", "/jobs/job/trials"),
    ("POST", "/jobs/job/release"),
    ("POST", "/report"),
    ("PATCH", "/trials"),
    ("POST", "/trials/heartbeat"),
]
_READING = ["/jobs", "/jobs/job", "/metrics"]
_OPEN = ["/", "/healthz", "/info"]


def test_requests_that_change_something_need_the_token(serve: Serve) -> None:
    http = serve(TOKEN="secret")
    right = {"Authorization": "Bearer secret"}
    ok(http.post("/jobs", json=body(), headers=right), 201)
    for method, path in _CHANGING:
        for wrong in ({}, {"Authorization": "Bearer Secret"}, {"Authorization": "secret"}):
            answer = http.request(method, path, headers=wrong, json={})
            assert "ZEUS_BSO_TOKEN" in refused(answer, 401), path
    for path in (*_READING, *_OPEN):
        assert http.get(path).status_code == 200, path
    assert ok(http.get("/jobs"))[0]["counts"]["running"] == 0
    assert ok(http.post("/jobs/job/trials", headers=right), 201)["trial_number"] == 1
    assert ok(http.get("/info"))["token_required"]


def test_reading_may_need_a_token_too(serve: Serve) -> None:
    http = serve(TOKEN="secret", READ_TOKEN="look")
    ok(http.post("/jobs", json=body(), headers={"Authorization": "Bearer secret"}), 201)
    for path in _READING:
        assert "ZEUS_BSO_READ_TOKEN" in refused(http.get(path), 401)
        for token in ("look", "secret"):
            answer = http.get(path, headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 200, path
    looking = {"Authorization": "Bearer look"}
    for method, path in _CHANGING:
        refused(http.request(method, path, headers=looking, json={}), 401)
    for path in _OPEN:
        assert http.get(path).status_code == 200, path


def test_pages_of_other_sites_change_nothing(serve: Serve) -> None:
    http = serve()
    ok(http.post("/jobs", json=body()), 201)
    for method, path in _CHANGING:
        for site in ("cross-site", "same-site"):
            answer = http.request(method, path, json=body(), headers={"Sec-Fetch-Site": site})
            refused(answer, 403)
        # To an address that is neither https nor localhost, browsers send only the page's origin.
        for origin in ("http://evil.example", "http://testserver:81", "null"):
            answer = http.request(method, path, json=body(), headers={"Origin": origin})
            assert "a page of another site" in refused(answer, 403)
    text = {"Content-Type": "text/plain"}
    trial = {"job_id": "job", "batch_size": 64, "trial_number": 1}
    answer = http.post("/trials/heartbeat", content=json.dumps(trial), headers=text)
    assert "Content-Type: application/json" in refused(answer, 415)
    assert ok(http.get("/jobs"))[0]["counts"]["running"] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"batch_sizes": []}, "batch_sizes"),
        ({"batch_sizes": [0, 64]}, "batch_sizes"),
        ({"batch_sizes": [64, 2**31]}, "batch_sizes"),
        ({"default_batch_size": 65}, "default_batch_size 65 is not in batch_sizes"),
        ({"eta_knob": 1.5}, "eta_knob"),
        ({"beta_knob": 0}, "beta_knob"),
        ({"max_power": 0}, "max_power"),
        ({"max_power": 250_000}, "no GPU has such a limit, so give it in W"),
        ({"policy": "guess"}, "policy"),
        ({"job_id": "a/b"}, "job_id: 'a/b' is not valid; use 1 to 400 characters"),
        ({"job_id": "job-\ud800"}, "lone surrogates, which are no characters"),
        ({"job_id": "other"}, "must begin with job_id_prefix"),
        ({"gpu_model": ""}, "gpu_model"),
        ({"target_metric": "NaN"}, "target_metric"),
    ],
)
def test_an_invalid_job_is_reported(serve: Serve, more: Any, words: str) -> None:
    http = serve()
    text = json.dumps(body(**more))
    assert words in refused(http.post("/jobs", content=text), 422)
    assert ok(http.get("/jobs")) == []


def test_invalid_reports_change_nothing(serve: Serve) -> None:
    http = serve()
    ok(http.post("/jobs", json=body()), 201)
    trial = ok(http.post("/jobs/job/trials"), 201)
    for name, value in (
        ("time", -1),
        ("energy", "x"),
        ("current_epoch", 0),
        ("time", 1e999),
        ("energy", 1e300),
    ):
        text = json.dumps(epoch(trial, 1, **{name: value}))
        refused(http.post("/report", content=text), 422)
    refused(http.post("/report", content="{"), 422)
    millijoules = epoch(trial, 1, time=10, energy=2_500_000)
    assert "which no GPU draws" in refused(http.post("/report", json=millijoules), 422)
    # A loss that exploded is no error, and no target.
    answer = ok(http.post("/report", content=json.dumps(epoch(trial, 1, metric=float("nan")))))
    assert not answer["stop_train"]
    (kept,) = ok(http.get("/jobs/job"))["trials"]
    assert (kept["epochs"], kept["metric"]) == (1, None)


def test_its_own_page_may_change_jobs_by_any_of_its_names(serve: Serve) -> None:
    http = serve(HOSTS="bso.example,Proxy:8443")
    ok(http.post("/jobs", json=body()), 201)
    for origin in ("http://testserver", "https://bso.example", "https://proxy:8443"):
        ok(http.post("/jobs/job/release", headers={"Origin": origin}))


def test_it_works_behind_a_prefix_and_redirects_nowhere(serve: Serve) -> None:
    plain, behind = serve(), serve(ROOT_PATH="/plans")
    for http, path in (
        (plain, "/jobs/"),
        (behind, "/jobs/"),
        (behind, "/plans/jobs"),
        (behind, "/plans/jobs/"),
        (behind, "/plans/"),
        (behind, "/"),
    ):
        assert http.get(path, follow_redirects=False).status_code == 200, path


def test_requests_without_end_are_refused(serve: Serve) -> None:
    http = serve()
    assert "bytes" in refused(http.post("/jobs", content=b" " * (MOST_BYTES + 1)), 413)


def test_errors_of_the_database_contain_no_path_or_host(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve()
    with sqlite3.connect(tmp_path / "bso.db") as connection:
        connection.execute("DROP TABLE trials")
    sentence = refused(client.get("/jobs"), 503)
    assert sentence.startswith("the database cannot be used now")
    assert str(tmp_path) not in sentence
    assert "no such table" not in sentence
    assert str(tmp_path / "bso.db") in caplog.text

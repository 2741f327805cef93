"""What the server remembers after a restart, and what it forgets."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from pathlib import Path

import pytest

from tests.support import wait_for
from tests.zeus.pipeline_frequency.server.conftest import Serve, TestClient
from tests.zeus.pipeline_frequency.server.running import (
    Training,
    job_body,
    ok,
    rank_bodies,
    refused,
    register,
)
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.server import job_manager
from zeus.optimizer.pipeline_frequency.server.records import JobRecords
from zeus.optimizer.pipeline_frequency.server.settings import PlanServerSettings


def test_everything_is_there_again_after_a_restart(
    serve: Serve, folder: str, tmp_path: Path
) -> None:
    http = serve({"solution_path": folder})
    training = Training(http, 3, job_metadata="a/b")
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
    # Ranks that continue, or restart, notice nothing.
    training.http = again
    training.step(3)
    rank = ok(again.get(f"/schedule/{job_id}?rank=0"))
    assert rank["version"] == before["ranks"][0]["wanted_version"]
    ok(again.post(f"/register_rank/{half}", json=rank_bodies()[1]))
    assert ok(again.get(f"/schedule/{half}?rank=1"))["frequencies"]


def test_ranks_of_a_restored_server_run_its_plans(
    serve: Serve, folder: str, tmp_path: Path
) -> None:
    """They run a plan that was made after the backup, whose version the server would give again."""
    path, copy = tmp_path / "dump/pfo.sqlite", tmp_path / "copy"
    http = serve({"solution_path": folder})
    job_id = register(http)
    ok(http.get(f"/schedule/{job_id}?rank=0"))
    with contextlib.closing(sqlite3.connect(path)) as source:
        source.execute(f"VACUUM INTO '{copy}'")
    ok(http.post(f"/choose/{job_id}", json={"plan": 3}))
    report = {"rank": 0, "iteration": 1, "version": 1}
    report["version"] = ok(http.post(f"/progress/{job_id}", json=report))["version"]
    http.__exit__(None, None, None)
    for ending in ("", "-wal", "-shm"):
        Path(f"{path}{ending}").unlink(missing_ok=True)
    copy.rename(path)
    again = serve({"solution_path": folder})
    restored = ok(again.post(f"/progress/{job_id}", json=report))
    assert restored["frequencies"][0] == ["forward", 1391]  # the fastest, as at the backup
    ok(again.post(f"/choose/{job_id}", json={"plan": 9}))
    chosen = ok(again.post(f"/progress/{job_id}", json=report))
    assert chosen["version"] > report["version"]
    assert chosen["frequencies"][0] == ["forward", 1401]


def test_no_folder_is_made_for_a_database(tmp_path: Path) -> None:
    with pytest.raises(PipelineFrequencyError, match=r"no/x\.sqlite cannot be used \(.*No such"):
        JobRecords(
            PlanServerSettings.from_env({"ZEUS_PFO_DATABASE": str(tmp_path / "no" / "x.sqlite")})
        )
    assert not (tmp_path / "no").exists()


def test_a_damaged_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    settings = PlanServerSettings.from_env({"ZEUS_PFO_DATABASE": str(path)})
    JobRecords(settings).close()
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 4096)  # the table's page
    with contextlib.closing(JobRecords(settings)) as records:
        with pytest.raises(
            PipelineFrequencyError, match=r"used \(database disk image is malformed"
        ):
            records.load(0.0)


def test_a_job_that_cannot_be_restored_and_files_that_cannot_be_written_end_nothing(
    serve: Serve, folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    http = serve({"solution_path": folder})
    lost, kept = register(http), register(http)
    half = ok(http.post("/register_job", json=job_body()))
    (tmp_path / "dump" / half).write_text("in the way")
    for body in rank_bodies():
        ok(http.post(f"/register_rank/{half}", json=body))
    wait_for(lambda: f"files of job {half} cannot be written: " in caplog.text, "it to be told")
    http.__exit__(None, None, None)
    with contextlib.closing(sqlite3.connect(tmp_path / "dump/pfo.sqlite")) as database:
        database.execute("UPDATE records SET body = '{}' WHERE kind = 'job' AND job_id = ?", [lost])
        database.commit()
    again = serve({"solution_path": folder})
    assert {job["job_id"] for job in ok(again.get("/jobs"))} == {kept, half}
    assert f"job {lost} cannot be restored and is left out: " in caplog.text


def test_a_state_that_cannot_be_written_refuses_what_would_be_lost(http: TestClient) -> None:
    with http.app.manager._records._engine.connect() as database:
        database.exec_driver_sql("DROP TABLE records")
        database.commit()
    sentence = refused(http.post("/register_job", json=job_body()), 503)
    assert "cannot write its state to" in sentence
    assert "see to its disk and send this again" in sentence
    assert ok(http.get("/jobs")) == []


def test_a_change_for_a_straggler_is_on_disk_before_it_is_sent_to_any_rank(
    http: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_manager, "FLUSH_S", 3600.0)
    training = Training(http, 2, {1: 1.2})
    while not ok(http.get(f"/jobs/{training.job_id}"))["stragglers"]:
        training.step()
    with contextlib.closing(sqlite3.connect(tmp_path / "dump/pfo.sqlite")) as database:
        rows = database.execute("SELECT body FROM records WHERE kind = 'job'").fetchall()
    (state,) = (json.loads(body) for (body,) in rows)
    assert state["slowdowns"] == [1.0, pytest.approx(1.2)]
    assert [one["version"] for one in state["in_force"]] == [2, 1]


def test_jobs_without_messages_are_forgotten(
    serve: Serve, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_manager, "FLUSH_S", 0.05)
    monkeypatch.setattr(job_manager, "CLEANUP_S", 0.1)
    http = serve({"solution_path": folder}, MAX_JOB_IDLE_TIME=3600)
    idle = register(http)
    kept = register(http)

    def passes(seconds: float) -> None:
        for job in http.app.manager.jobs.values():
            job.idle_from_s -= seconds

    passes(3000)
    ok(http.post(f"/progress/{kept}", json={"rank": 0, "iteration": 1, "version": 1}))
    passes(1800)
    wait_for(
        lambda: [job["job_id"] for job in ok(http.get("/jobs"))] == [kept],
        "the idle job to be forgotten",
    )
    refused(http.get(f"/schedule/{idle}?rank=0"), 404)
    http.__exit__(None, None, None)
    again = serve({"solution_path": folder})
    assert [job["job_id"] for job in ok(again.get("/jobs"))] == [kept]


def test_setting_the_clock_makes_no_job_idle(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_manager, "FLUSH_S", 0.05)
    monkeypatch.setattr(job_manager, "CLEANUP_S", 0.1)
    looked: list[float] = []
    forget = job_manager.JobManager._forget_idle

    def look(manager: job_manager.JobManager, before_s: float) -> None:
        forget(manager, before_s)
        looked.append(before_s)

    monkeypatch.setattr(job_manager.JobManager, "_forget_idle", look)
    http = serve(MAX_JOB_IDLE_TIME=3600)
    job_id = ok(http.post("/register_job", json=job_body()))
    http.app.manager.clock = lambda: time.time() + 30 * 24 * 3600
    wait_for(lambda: len(looked) > 2, "the server to look for idle jobs")
    assert [job["job_id"] for job in ok(http.get("/jobs"))] == [job_id]

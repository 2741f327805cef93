"""The server as operators start it: in its own process, killed, started twice, misconfigured."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.preloaded import preloaded
from tests.serving import IMPORTED
from tests.support import TIMEOUT_S, free_port, wait_for
from tests.zeus.pipeline_frequency.server.running import (
    APP,
    PLAN,
    RunningServer,
    Training,
    asked,
    frontier,
    job_body,
    ok,
    rank_bodies,
    refused,
    register,
    running_server,
)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    frontier().write(tmp_path / "plans")
    return {"SCHEDULER_ARGS": json.dumps({"solution_path": "plans"})}


def test_it_starts_with_the_command_in_the_docs(tmp_path: Path) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path/freqs_pipeline_00042.py").write_text(PLAN)
    port = free_port()
    line = (
        'ZEUS_PFO_SCHEDULER_ARGS=\'{"solution_path": "path/freqs_pipeline_00042.py"}\' '
        f"uvicorn {APP} --port 7787"
    )
    line = line.replace("7787", str(port))  # that one may be taken
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", f"exec env {line}"],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(f"{url}/healthz", verify=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(answers, "the server to answer")
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, verify=False) as http:
            job_id = register(http)
            answer = ok(http.get(f"/schedule/{job_id}?rank=1"))
            assert answer["frequencies"][0] == ["forward", 1200]
        assert (tmp_path / "dump/pfo.sqlite").exists()
    finally:
        process.terminate()
        assert process.wait(TIMEOUT_S) in (0, -signal.SIGTERM)


def test_it_imports_neither_torch_nor_what_only_the_planner_needs(tmp_path: Path) -> None:
    script = """
import sys
for name in ("torch", "numpy", "scipy", "httpx", "matplotlib", "zmq", "pynvml"):
    sys.modules[name] = None  # importing it fails
from zeus.optimizer.pipeline_frequency.server.router import app
assert app.settings.scheduler.__name__ == "OnlineSolution"
"""
    env = {name: v for name, v in os.environ.items() if not name.startswith("ZEUS_PFO_")}
    ran = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert list(tmp_path.iterdir()) == []  # nothing is opened before it serves


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SCHEDULER_ARGS", "{solution_path: x}", "ZEUS_PFO_SCHEDULER_ARGS are not JSON"),
        ("SCHEDULER_ARGS", "[1]", "must be a JSON object"),
        ("SCHEDULER_ARGS", '{"solution_path": "gone.py"}', "gone.py cannot be read"),
        ("SCHEDULER_ARGS", '{"solution_path": "."}', "frontier.json cannot be read"),
        ("SCHEDULER_ARGS", '{"solution_path": "evil.py"}', "is not a Python literal"),
        ("SCHEDULER_ARGS", '{"path": "x"}', "there is no setting path; check the spelling"),
        ("SCHEDULER_ARGS", '{"points": 0}', "points must be"),
        ("SCHEDULER", "Nothing", "Nothing is not a FrequencyScheduler; there are"),
        ("SCHEDULER", "no.such:Thing", "cannot be imported"),
        ("SCHEDULER", "json:JSONDecoder", "is not a FrequencyScheduler"),
        ("SCHEDULER", "PointSolution", "missing a required argument: 'solution_path'"),
        ("SCHEDULER", "PointSolution3D", "missing a required argument: 'solution_path'"),
        ("LOG_LEVEL", "LOUD", "must be one of DEBUG"),
        ("MAX_JOB_IDLE_TIME", "-5", "ZEUS_PFO_MAX_JOB_IDLE_TIME"),
        ("REGISTER_TIMEOUT", "soon", "ZEUS_PFO_REGISTER_TIMEOUT"),
        ("DUMP_DATA", "perhaps", "ZEUS_PFO_DUMP_DATA"),
        ("SHEDULER", "x", "ZEUS_PFO_SHEDULER is not a setting; there are ZEUS_PFO_SCHEDULER"),
        ("DATABASE", "/proc/nowhere/x", "the database /proc/nowhere/x cannot be used"),
    ],
)
def test_a_bad_setting_is_reported_in_one_sentence(
    tmp_path: Path, name: str, value: str, words: str
) -> None:
    (tmp_path / "evil.py").write_text("[open('/tmp/x')]")
    env = {n: v for n, v in os.environ.items() if not n.startswith("ZEUS_PFO_")}
    env[f"ZEUS_PFO_{name}"] = value
    serve = ("-m", "uvicorn", APP, "--port", str(free_port()))
    ran = preloaded(*IMPORTED).run(*serve, cwd=tmp_path, env=env)
    assert ran.returncode == 3
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.splitlines()) <= 5


def test_a_killed_server_restarts_with_its_whole_state(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with running_server(tmp_path, settings) as server:
        training = Training(server.http, 2)
        waiting = ok(server.http.post("/register_job", json=job_body()))
        ok(server.http.post(f"/register_rank/{waiting}", json=rank_bodies()[0]))
        training.step(5)
        chosen = ok(server.http.post(f"/choose/{training.job_id}", json={"plan": 4}))
        server.kill()
        with pytest.raises(httpx.TransportError):
            training.step()
        server.start_again()
        shown = ok(server.http.get(f"/jobs/{training.job_id}"))
        assert shown["plan"] == 4
        assert [one["at_iteration"] for one in shown["pipelines"]] == [chosen["at_iteration"]] * 2
        # The ranks continue, and switch when they would have.
        training.step(chosen["at_iteration"] + 3 - training.iteration)
        assert training.plans() == {0: {4}, 1: {4}}
        # One that begins again gets its schedule at once.
        ok(server.http.post(f"/register_rank/{training.job_id}", json=rank_bodies(2)[3]))
        answer = ok(server.http.get(f"/schedule/{training.job_id}?rank=3&timeout_s=0"))
        assert answer["frequencies"] == [list(step) for step in frontier().plans[4].stages[1]]
        # And the job that was half there completes.
        ok(server.http.post(f"/register_rank/{waiting}", json=rank_bodies()[1]))
        assert ok(server.http.get(f"/schedule/{waiting}?rank=0"))["frequencies"]


def test_progress_is_kept_within_a_second_or_so(tmp_path: Path, settings: dict[str, str]) -> None:
    with running_server(tmp_path, settings) as server:
        job_id = register(server.http)
        report = {"rank": 0, "iteration": 77, "iter_times": [[76, 2.0]], "version": 1}
        ok(server.http.post(f"/progress/{job_id}", json=report))

        def kept() -> bool:
            with sqlite3.connect(tmp_path / "dump/pfo.sqlite") as database:
                rows = database.execute("SELECT body FROM records WHERE kind = 'progress'")
                reports = [one for (body,) in rows for one in json.loads(body).values()]
                return any(one["iteration"] == 77 for one in reports)

        wait_for(kept, "progress to be written")
        server.kill()
        server.start_again()
        assert ok(server.http.get(f"/jobs/{job_id}"))["ranks"][0]["iteration"] == 77


def test_it_stops_although_ranks_wait_for_their_schedules(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with running_server(tmp_path, {**settings, "LOG_LEVEL": "debug"}) as server:
        job_id = ok(server.http.post("/register_job", json=job_body()))
        ok(server.http.post(f"/register_rank/{job_id}", json=rank_bodies()[0]))
        (waiting,) = asked(server.http, job_id, 0)
        assert server.stop() in (0, -signal.SIGTERM)
        assert "stopping" in refused(waiting.result(TIMEOUT_S), 503)
        assert f"POST /register_rank/{job_id}: 200" in server.log()
        assert "scheduler FrontierSolution" in server.log()


def test_a_second_server_on_the_same_state_is_refused(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with running_server(tmp_path, settings) as server:
        second = RunningServer(tmp_path, settings)
        assert second.process.wait(TIMEOUT_S) == 3
        assert "another server process has dump/pfo.sqlite" in server.log()
        assert "Traceback" not in server.log()
        # The first continues.
        register(server.http)


def test_several_workers_are_refused(tmp_path: Path, settings: dict[str, str]) -> None:
    server = RunningServer(tmp_path, settings, "--workers", "2")
    try:
        wait_for(lambda: "run one server with one worker" in server.log(), "the refusal")
        # uvicorn ends then; one before 0.35 or so serves on with the first of them.
        assert "Traceback" not in server.log()
    finally:
        server.stop()

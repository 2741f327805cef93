"""The server as operators start it: several workers, which are killed, on both databases."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import seeds
from tests.postgresql import PostgreSQL
from tests.support import wait_for
from tests.zeus.batch_size.server.running import RunningServer, running_server
from tests.zeus.batch_size.server.training import EPOCHS, body, convex, result
from zeus.optimizer.batch_size.common import (
    IDEMPOTENCY_HEADER,
    NewTrial,
    ReportResponse,
    TrainingResult,
)


class Client:
    """A training job that repeats unanswered requests.

    Args:
        url: The server's.
        key: Of its trial.
    """

    def __init__(self, url: str, key: str) -> None:
        self.key = key
        self.repeated = 0
        self.told: TrainingResult | None = None
        self.last: ReportResponse | None = None
        self._http = httpx.Client(base_url=url, timeout=60, verify=False)

    def run(self, between: Callable[[], None]) -> NewTrial:
        """One training, up to the end."""
        answer = self._ask("/jobs/job/trials", headers={IDEMPOTENCY_HEADER: self.key})
        trial = NewTrial.model_validate(answer)
        epoch = 0
        while self.last is None or not self.last.stop_train:
            between()
            epoch += 1
            self.told = result(trial, epoch, convex(trial.batch_size))
            answer = self._ask("/report", content=self.told.model_dump_json())
            self.last = ReportResponse.model_validate(answer)
        self._http.close()
        return trial

    def _ask(self, path: str, **more: Any) -> Any:
        def answered() -> Any:
            try:
                answer = self._http.post(path, **more)
            except httpx.TransportError:
                self.repeated += 1
                return None
            assert answer.is_success, answer.text
            return answer.json()

        return wait_for(answered, f"an answer to {path}")


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, str]]:
    """A server with three workers, and the database that it has."""
    directory = tmp_path_factory.mktemp(request.param)
    database = str(directory / "bso.db")
    if request.param == "postgresql":
        cluster: PostgreSQL = request.getfixturevalue("cluster")
        database = cluster.new_database()
    with running_server(directory, database, "--workers", "3", LEASE_S="3600") as server:
        yield server, database


def test_forty_requests_at_once_get_forty_trials(served: tuple[RunningServer, str]) -> None:
    server, _ = served
    assert server.http.post("/jobs", json=body("job-of-many")).status_code == 201
    at_once = threading.Barrier(40)
    found: list[tuple[int, Any]] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60, verify=False) as http:
            at_once.wait()
            answer = http.get("/jobs/batch_size", params={"job_id": "job-of-many"})
            found.append((answer.status_code, answer.json()))

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [status for status, _ in found] == [200] * 40
    assert sorted(one["trial_number"] for _, one in found) == list(range(1, 41))


def test_workers_that_are_killed_lose_nothing(served: tuple[RunningServer, str]) -> None:
    """Six jobs train again and again, and between their requests workers are killed -9."""
    seed = seeds.fresh()
    draw = random.Random(seed)
    lock = threading.Lock()
    kills = 0
    begun: dict[str, NewTrial] = {}
    clients: dict[str, Client] = {}
    errors: list[BaseException] = []
    server, _ = served
    assert server.http.post("/jobs", json=body()).status_code == 201

    def between() -> None:
        nonlocal kills
        with lock:
            workers = server.worker_pids()
            if kills < 3 and len(workers) > 1 and draw.random() < 0.2:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(draw.choice(workers), signal.SIGKILL)
                    kills += 1

    def trains(n: int) -> None:
        try:
            for k in range(3):
                key = f"client {n} run {k}"
                clients[key] = Client(server.url, key)
                begun[key] = clients[key].run(between)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=trains, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert kills > 0
    wait_for(lambda: len(server.worker_pids()) == 3, "killed workers to be started again")
    shown = server.http.get("/jobs/job").json()
    assert "Traceback" not in server.log()
    # Each run has its own trial, with the values that it got.
    numbers = sorted(trial.trial_number for trial in begun.values())
    assert numbers == list(range(1, 19))
    kept = {trial["trial_number"]: trial for trial in shown["trials"]}
    assert sorted(kept) == numbers
    for key, trial in begun.items():
        told, last, one = clients[key].told, clients[key].last, kept[trial.trial_number]
        assert told is not None
        assert last is not None
        assert one["status"] == "ok"
        assert one["batch_size"] == trial.batch_size
        assert one["epochs"] == told.current_epoch
        assert one["energy_j"] == told.energy
        assert one["converged"] == last.converged == (told.current_epoch == EPOCHS)


def test_a_killed_server_restarts_with_its_whole_state(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        server.http.post("/jobs", json=body())
        headers = {IDEMPOTENCY_HEADER: "one"}
        trial = NewTrial.model_validate(
            server.http.post("/jobs/job/trials", headers=headers).json()
        )
        told = result(trial, 1, 1000.0)
        server.http.post("/report", content=told.model_dump_json())
        before = _still(server)
        server.kill()
        server.start_again()
        assert _still(server) == before
        again = NewTrial.model_validate(
            server.http.post("/jobs/job/trials", headers=headers).json()
        )
        assert (again.trial_number, again.current_epoch, again.energy) == (1, 1, told.energy)
        told = result(trial, EPOCHS, 1000.0)
        answer = server.http.post("/report", content=told.model_dump_json()).json()
        assert answer["converged"]
    assert (tmp_path / "bso.db").exists()


def _still(server: RunningServer) -> Any:
    """All of the job but what time changes."""
    shown = server.http.get("/jobs/job").json()
    del shown["heard_ago_s"]
    for trial in shown["trials"]:
        del trial["heard_ago_s"]
    return shown

"""The server as operators start it: several workers, which are killed, on both databases."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests import seeds
from tests.postgresql import PostgreSQL
from tests.support import wait_for
from tests.zeus.batch_size.server.running import RunningServer, running_server
from tests.zeus.batch_size.server.training import EPOCHS, body, convex, result, spec
from zeus.optimizer.batch_size.common import ReportResponse, TrainingResult
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.http import HttpTrials

Reply = TypeVar("Reply")


def patiently(ask: Callable[[], Reply]) -> Reply:
    """The reply to a request that is repeated while nobody answers."""

    def answered() -> Reply | None:
        try:
            return ask()
        except ZeusBSORuntimeError as error:
            if error.status:  # it has answered
                raise
        return None

    reply: Reply = wait_for(answered, "an answer")
    return reply


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


def test_workers_that_are_killed_lose_nothing(served: tuple[RunningServer, str]) -> None:
    """Six jobs train again and again, and between their requests workers are killed -9."""
    seed = seeds.fresh()
    draw = random.Random(seed)
    lock = threading.Lock()
    kills = 0
    ended: dict[int, tuple[TrainingResult, ReportResponse]] = {}
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
                trial = patiently(partial(trials.begin_trial, "job", f"client {n} run {k}"))
                for epoch in itertools.count(1):
                    between()
                    told = result(trial, epoch, convex(trial.batch_size))
                    answer = patiently(partial(trials.report, told))
                    if answer.stop_train:
                        break
                ended[trial.trial_number] = told, answer
        except BaseException as error:
            errors.append(error)

    trials = HttpTrials(server.url)
    threads = [threading.Thread(target=trains, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trials.close()
    assert errors == []
    assert kills > 0
    wait_for(lambda: len(server.worker_pids()) == 3, "killed workers to be started again")
    shown = server.http.get("/jobs/job").json()
    assert "Traceback" not in server.log()
    # Each run has its own trial, with the values that it got.
    assert sorted(ended) == list(range(1, 19))
    kept = {trial["trial_number"]: trial for trial in shown["trials"]}
    assert sorted(kept) == sorted(ended)
    for number, (told, last) in ended.items():
        one = kept[number]
        assert one["status"] == "ok"
        assert one["batch_size"] == told.batch_size
        assert one["epochs"] == told.current_epoch
        assert one["energy_j"] == told.energy
        assert one["converged"] == last.converged == (told.current_epoch == EPOCHS)


def test_a_killed_server_restarts_with_its_whole_state(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        trials = HttpTrials(server.url)
        trials.register(spec())
        trial = trials.begin_trial("job", "one")
        told = result(trial, 1, 1000.0)
        trials.report(told)
        before = _still(server)
        server.kill()
        server.start_again()
        assert _still(server) == before
        again = patiently(lambda: trials.begin_trial("job", "one"))
        assert (again.trial_number, again.current_epoch, again.energy) == (1, 1, told.energy)
        assert trials.report(result(trial, EPOCHS, 1000.0)).converged
        trials.close()
    assert (tmp_path / "bso.db").exists()


def _still(server: RunningServer) -> Any:
    """All of the job but what time changes."""
    shown = server.http.get("/jobs/job").json()
    del shown["heard_ago_s"]
    for trial in shown["trials"]:
        del trial["heard_ago_s"]
    return shown

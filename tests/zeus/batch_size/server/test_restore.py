"""A database that was restored from a backup, while runs that the backup lacks go on."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.zeus.batch_size.client.fakes import FakeMonitor, epochs, job
from tests.zeus.batch_size.server.conftest import Serve
from tests.zeus.batch_size.server.running import running_server
from tests.zeus.batch_size.server.training import EPOCHS, body, result, spec
from zeus.optimizer.batch_size import BatchSizeOptimizer
from zeus.optimizer.batch_size.command import main
from zeus.optimizer.batch_size.common import EndTrial, TrialId
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store

Restore = Callable[[], None]


@pytest.fixture
def backed_up(database: str, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, Restore]:
    """A database with the job `job`, and a way back to a backup of that, as the docs have it."""
    store = Store(database)
    store.register(spec())
    backup = tmp_path / "backup"
    if database.startswith("postgresql"):
        cluster = request.getfixturevalue("cluster")
        cluster.back_up(database, backup)
        restore: Restore = lambda: cluster.restore(database, backup)  # noqa: E731 - one of two
    else:
        with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(backup)) as copy:
            source.backup(copy)

        def restore() -> None:
            for ending in ("", "-wal", "-shm"):
                Path(f"{database}{ending}").unlink(missing_ok=True)
            shutil.copy(backup, database)

    store.close()
    return database, restore


def test_a_run_that_the_backup_lacks_changes_no_other_run(
    backed_up: tuple[str, Restore],
) -> None:
    """Also if nobody has said that the database was restored."""
    database, restore = backed_up
    before = Store(database)
    lost = before.begin_trial("job", "a")
    before.close()
    restore()
    store = Store(database)
    other = store.begin_trial("job", "b")
    assert (other.trial_number, other.batch_size) == (lost.trial_number, lost.batch_size)

    own = lost.model_dump(include=set(TrialId.model_fields))
    for ask in (
        lambda: store.report(result(lost, EPOCHS, 1000.0, key=lost.key)),
        lambda: store.heartbeat(TrialId(**own)),
        lambda: store.end_trial(EndTrial(**own, reason="oom")),
    ):
        with pytest.raises(ZeusBSORuntimeError) as told:
            ask()
        assert told.value.status == 409
        assert told.value.message == (
            "trial 1 of job job is another run's, as the database was restored from a backup "
            "without yours; this run does not count"
        )
    answer = store.report(result(other, 1, 1000.0, key=other.key))
    assert (answer.stop_train, answer.converged) == (False, False)
    store.close()


def test_numbers_never_come_again_once_a_restore_is_told(
    backed_up: tuple[str, Restore],
) -> None:
    database, restore = backed_up
    given: list[int] = []
    for number in range(3):
        store = Store(database)
        given += [store.begin_trial("job", f"{number}-{n}").trial_number for n in range(3)]
        store.register(spec("job-2"))
        given.append(store.begin_trial("job-2", "first").trial_number)
        store.close()
        restore()
        done = CliRunner().invoke(main, ["restored", "--db", database])
        assert done.exit_code == 0, done.output
        assert done.output.startswith("numbers of new trials are above ")
    assert given[:4] == [1, 2, 3, 1]
    of_job = [number for n, number in enumerate(given) if n % 4 < 3]
    for numbers in (of_job, given[3::4]):
        assert numbers == sorted(set(numbers))


def test_two_clients_of_a_server_whose_database_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Run A began after the backup, and goes on; run B gets its number."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, copy = tmp_path / "bso.db", tmp_path / "copy.db"
    with running_server(tmp_path, str(path)) as server:

        def client() -> tuple[BatchSizeOptimizer, FakeMonitor]:
            monitor: Any = FakeMonitor()
            return BatchSizeOptimizer(monitor, server.url, job(), 0), monitor

        a, of_a = client()
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        a.get_batch_size()
        server.stop()
        for ending in ("", "-wal", "-shm"):
            Path(f"{path}{ending}").unlink(missing_ok=True)
        copy.rename(path)
        server.start_again()
        b, of_b = client()
        b.get_batch_size()
        assert a.trial_number == b.trial_number == 1
        with caplog.at_level(logging.WARNING), a:
            epochs(a, of_a, 0.9)
        assert a.converged  # its training ends as it should
        assert caplog.text.count("is another run's, as the database was restored") == 1
        with b:
            epochs(b, of_b, 0.1)
            assert not b.training_finished
            assert not b.converged


def test_a_job_needs_no_prefix(serve: Serve) -> None:
    http = serve()
    given = body("nightly")
    del given["job_id_prefix"]
    assert http.post("/jobs", json=given).status_code == 201
    assert http.get("/jobs/nightly").json()["job_id"] == "nightly"

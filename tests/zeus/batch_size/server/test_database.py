"""Databases: their names, their tables, and what happens when they cannot be used."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.pool import QueuePool

from tests.late import late
from tests.postgresql import PostgreSQL
from tests.preloaded import preloaded
from tests.serving import IMPORTED
from tests.support import wait_for
from tests.zeus.batch_size.server.training import spec
from zeus.optimizer.batch_size.database import CREATE_LOCK, Database, url_of
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store

psycopg = late("psycopg")


def test_several_processes_may_be_the_first(database: str) -> None:
    script = (
        "import sys\n"
        "from zeus.optimizer.batch_size.store import Store\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(Store(sys.argv[1]).count())\n"
    )
    pipe, python = subprocess.PIPE, preloaded(*IMPORTED).python
    processes = [
        subprocess.Popen(
            [python, "-c", script, database],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        said, errors = process.communicate()
        assert (said, process.returncode) == ("0\n", 0), errors


def test_tables_of_another_release_are_not_touched(database: str) -> None:
    found = Database(database)
    found.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    found.close()
    with pytest.raises(ZeusBSORuntimeError, match="another release \\(tables 9999, here") as told:
        Store(database)
    assert told.value.status == 503


def test_a_file_of_another_program_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "pictures.db"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE pictures (name TEXT)")
    with pytest.raises(ZeusBSORuntimeError, match="or by another program; upgrade zeusd, or name"):
        Store(path)
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("pictures",)]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("bso.db", "sqlite:///bso.db"),
        ("/var/lib/bso.db", "sqlite:////var/lib/bso.db"),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("sqlite:////var/lib/x.db", "sqlite:////var/lib/x.db"),
        ("sqlite+aiosqlite:///x.db", "sqlite:///x.db"),
        ("postgresql://u:secret@h/n", "postgresql+psycopg://u:***@h/n"),
        ("postgres://h/n", "postgresql+psycopg://h/n"),
        ("postgresql+asyncpg://h/n", "postgresql+psycopg://h/n"),
    ],
)
def test_a_database_may_be_named_in_several_ways(given: str, used: str) -> None:
    assert url_of(given).render_as_string(hide_password=True) == used


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("mysql+aiomysql://u:secret@h/n", "mysql databases are not supported; use SQLite"),
        ("://", "cannot be read"),
        ("postgresql://h:port/n", "cannot be read"),
        (":memory:", "name a file"),
        ("sqlite://", "name a file"),
    ],
)
def test_a_file_that_is_no_database_is_reported(given: str, words: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match=words) as told:
        Store(given)
    assert "secret" not in told.value.message


def test_a_database_that_cannot_be_used_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, though long enough to be taken for one" * 99)
    for path, words in (
        (tmp_path / "text", "not a database"),
        (tmp_path, "unable to open"),
        (tmp_path / "text" / "bso.db", "name another file"),
    ):
        with pytest.raises(ZeusBSORuntimeError, match=words) as told:
            Store(path)
        assert told.value.status == 503
        assert "\n" not in told.value.message
    nobody = "postgresql://u:secret@127.0.0.1:1/n"
    with pytest.raises(ZeusBSORuntimeError, match="cannot be used: connection") as told:
        Database(nobody)
    assert "secret" not in told.value.message


def test_a_relative_name_is_of_the_folder_in_which_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    database = Database("bso.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")

    def on_another_connection(connection: Any) -> int:
        return len(database.read(lambda other: other.execute(text("SELECT * FROM jobs")).all()))

    assert database.read(on_another_connection) == 0
    assert list(Path().iterdir()) == []
    database.close()


def test_a_writer_that_waits_for_another_gets_its_turn(tmp_path: Path) -> None:
    database = Database(tmp_path / "bso.db")
    other = sqlite3.connect(tmp_path / "bso.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    begun = threading.Event()
    counted: list[int] = []

    def count(connection: Any) -> None:
        # What is read must still hold when it is written: who reads waits, too, before it writes.
        counted.append(connection.execute(text("SELECT count(*) FROM jobs")).scalar())

    def work() -> None:
        begun.set()
        database.write(count)

    writer = threading.Thread(target=work)
    writer.start()
    begun.wait()
    assert database.read(lambda c: c.execute(text("SELECT * FROM jobs")).all()) == []
    other.execute("INSERT INTO jobs VALUES ('job', '{}', '1', 0, 0, 0, 0, NULL, NULL)")
    other.execute("COMMIT")
    writer.join()
    assert counted == [1]
    other.close()
    database.close()


def _waiting(database: Database, thread: threading.Thread) -> int:
    """Number of threads that finally wait for a lock; without any, the thread runs to its end."""
    blocked = text("SELECT count(*) FROM pg_locks WHERE NOT granted")

    def count() -> int:
        found: int = database.read(lambda c: c.execute(blocked).scalar())
        return found

    wait_for(lambda: count() or not thread.is_alive(), "someone to wait, or nobody")
    return count()


def test_a_job_belongs_to_one_transaction_at_a_time(cluster: PostgreSQL) -> None:
    url = cluster.new_database()
    store = Store(url)
    store.register(spec())
    database = Database(url)
    begun: list[int] = []
    thread = threading.Thread(
        target=lambda: begun.append(store.begin_trial("job", "one").trial_number)
    )

    def work(connection: Any) -> None:
        connection.execute(text("UPDATE jobs SET trials = 7"))
        thread.start()
        assert _waiting(watching, thread) == 1

    watching = Database(url)
    database.write(work)
    thread.join()
    assert begun == [8]  # it has read what the other has written
    for one in (store, database, watching):
        one.close()


def test_tables_are_made_by_one_process(cluster: PostgreSQL) -> None:
    watching = Database(cluster.new_database())
    opened: list[Database] = []
    url = cluster.new_database()
    thread = threading.Thread(target=lambda: opened.append(Database(url)))
    with psycopg.connect(url) as first:
        first.execute("SELECT pg_advisory_xact_lock(%s)", [CREATE_LOCK])
        thread.start()
        assert _waiting(watching, thread) == 1
        assert first.execute("SELECT * FROM pg_tables WHERE tablename = 'jobs'").fetchall() == []
    thread.join()
    assert len(opened) == 1
    for one in (watching, *opened):
        one.close()


def test_a_restarted_postgresql_is_found_again(cluster: PostgreSQL) -> None:
    store = Store(cluster.new_database())
    store.register(spec())
    trial = store.begin_trial("job", "one")
    cluster.restart()
    assert store.begin_trial("job", "one").trial_number == trial.trial_number
    store.heartbeat(trial)
    store.close()


def test_a_transaction_that_others_made_fail_is_repeated(cluster: PostgreSQL) -> None:
    database = Database(cluster.new_database())
    tries = []

    def work(connection: Any) -> int:
        tries.append(1)
        if len(tries) < 3:
            connection.execute(text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$"))
        return len(tries)

    assert database.write(work) == 3
    with pytest.raises(ZeusBSORuntimeError, match="cannot be used") as told:
        database.write(lambda c: c.execute(text("SELECT * FROM nothing")))
    assert told.value.status == 503
    database.close()


@pytest.mark.parametrize("workers", [1, 4, 1000])
def test_all_workers_together_stay_below_what_postgresql_allows(
    cluster: PostgreSQL, workers: int
) -> None:
    database = Database(cluster.new_database(), workers=workers)
    pool = database._engine.pool
    assert isinstance(pool, QueuePool)
    assert pool.size() == max(1, int(0.75 * (300 - 3)) // workers)
    assert pool._max_overflow == 0
    database.close()

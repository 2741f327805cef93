"""Databases: their names, their tables, and what happens when they cannot be used."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import preloaded
from tests.serving import IMPORTED
from zeus.optimizer.batch_size.database import Database, path_of
from zeus.optimizer.batch_size.exceptions import ZeusBSOConfigError, ZeusBSORuntimeError
from zeus.optimizer.batch_size.store import Store


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
    found.write(lambda c: c.execute("PRAGMA user_version = 9999"))
    found.close()
    with pytest.raises(ZeusBSORuntimeError, match="another release \\(tables 9999, here"):
        Store(database)


def test_tables_of_another_program_are_not_touched(database: str) -> None:
    with closing(sqlite3.connect(database)) as other:
        other.execute("CREATE TABLE pictures (name TEXT)")
    with pytest.raises(ZeusBSORuntimeError, match="or by another program; upgrade zeusd, or name"):
        Store(database)
    with closing(sqlite3.connect(database)) as other:
        assert other.execute("SELECT name FROM sqlite_master").fetchall() == [("pictures",)]


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("bso.db", "bso.db"),
        ("/var/lib/bso.db", "/var/lib/bso.db"),
        ("sqlite:///x.db", "x.db"),
        ("sqlite:////var/lib/x.db", "/var/lib/x.db"),
        ("sqlite+aiosqlite:///x.db", "x.db"),
    ],
)
def test_a_database_may_be_named_in_several_ways(given: str, used: str) -> None:
    assert path_of(given) == used


@pytest.mark.parametrize(
    "given",
    ["mysql+aiomysql://u:secret@h/n", "postgresql://u:secret@h/n", "://", ":memory:", "sqlite://"],
)
def test_a_file_that_is_no_database_is_reported(given: str) -> None:
    with pytest.raises(ZeusBSOConfigError, match="not supported; use SQLite: name a file") as told:
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


def test_a_relative_name_is_of_the_folder_in_which_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    database = Database("bso.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")

    def on_another_connection(connection: Any) -> int:
        return len(database.read(lambda other: other.execute("SELECT * FROM jobs").fetchall()))

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
        counted.append(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])

    def work() -> None:
        begun.set()
        database.write(count)

    writer = threading.Thread(target=work)
    writer.start()
    begun.wait()
    assert database.read(lambda c: c.execute("SELECT * FROM jobs").fetchall()) == []
    other.execute("INSERT INTO jobs VALUES ('job', '{}', '1', 0, 0, 0, 0, NULL, NULL)")
    other.execute("COMMIT")
    writer.join()
    assert counted == [1]
    other.close()
    database.close()

"""The command `bso`, on a database and on a server."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support import free_port
from tests.zeus.batch_size.server.training import spec, train
from zeus.optimizer.batch_size.command import joules, main
from zeus.optimizer.batch_size.common import EndTrial
from zeus.optimizer.batch_size.store import Store

Bso = Callable[..., Result]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with a job that has trained, and a new one."""
    path = tmp_path_factory.mktemp("jobs") / "bso.db"
    store = Store(path)
    store.register(spec(policy="pruning-gts"))
    for n in range(4):
        train(store, store.begin_trial("job", f"run {n}"))
    last = store.begin_trial("job", "last")
    store.end_trial(
        EndTrial(**last.model_dump(include={"job_id", "batch_size", "trial_number"}), reason="oom")
    )
    store.register(spec("job-new"))
    store.close()
    return path


@pytest.fixture
def bso(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bso:
    """Runs the command where there is such a database."""
    for name in [name for name in os.environ if name.startswith("ZEUS_BSO_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    shutil.copy(jobs, "bso.db")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(main, arguments)

    return run


def done(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def failed(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.stderr


def test_jobs_are_listed(bso: Bso) -> None:
    lines = done(bso("jobs")).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:6] == ["job", "1", "x", "V100", "pruning-gts", "3"]
    assert "1 kJ" in lines[1]
    assert lines[2].startswith("job-new")
    assert "never" in lines[2]
    listed = json.loads(done(bso("jobs", "--json")))
    assert [one["job_id"] for one in listed] == ["job", "job-new"]
    assert listed[0]["counts"]["oom"] == 1


def test_a_job_is_shown(bso: Bso) -> None:
    text = done(bso("show", "job"))
    assert "target at least 0.5 within 10 epochs; eta 0.5, beta 2" in text
    assert "best batch size 32, expected to cost" in text
    assert "GPU memory does not suffice for 128" in text
    assert "reached the target" in text
    assert "out of GPU memory" in text
    shown = json.loads(done(bso("show", "job", "--json")))
    assert shown["best_batch_size"] == 32
    assert len(shown["trials"]) == 5
    assert "no batch size is known to reach it" in done(bso("show", "job-new"))
    store = Store("bso.db")
    store.begin_trial("job-new", "one")
    store.close()
    assert "running, heard 0 s ago" in done(bso("show", "job-new"))
    assert "there is no job other" in failed(bso("show", "other"), 6)


def test_trials_are_exported(bso: Bso) -> None:
    rows = list(csv.DictReader(io.StringIO(done(bso("export", "job")))))
    assert [row["trial_number"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert rows[0]["batch_size"] == "64"
    assert rows[0]["converged"] == "True"
    assert float(rows[0]["energy_j"]) == pytest.approx(1300.0)
    assert rows[-1]["status"] == "oom"
    assert done(bso("export", "job", "-o", "out.csv")) == ""
    assert Path("out.csv").read_text().count("\n") == 6
    assert "no/where.csv cannot be written" in failed(bso("export", "job", "-o", "no/where.csv"), 1)


def test_a_reader_that_has_enough_costs_no_word(bso: Bso) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zeus.optimizer.batch_size", "export", "job"]
    ran = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert ran.stderr == ""


def test_jobs_are_released_and_deleted(bso: Bso) -> None:
    assert "may choose again: 128, 256" in done(bso("release", "job"))
    assert "no batch size of job job was parked" in done(bso("release", "job"))
    assert "add --yes" in failed(bso("delete", "job"), 2)
    assert "is deleted" in done(bso("delete", "job", "--yes"))
    failed(bso("delete", "job", "--yes"), 6)
    assert len(json.loads(done(bso("jobs", "--json")))) == 1


@pytest.mark.parametrize(
    ("verb", "name"), [("show", ""), ("delete", "."), ("release", ".."), ("export", "a/b")]
)
def test_what_cannot_be_the_name_of_a_job_is_wrong_usage(bso: Bso, verb: str, name: str) -> None:
    for source in ((), ("--server", f"http://127.0.0.1:{free_port()}")):
        assert f"{name!r} is not valid; use 1 to" in failed(bso(verb, name, *source), 2)


def test_no_database_is_made_by_looking_for_one(bso: Bso) -> None:
    assert "there is no database other.db; name it" in failed(bso("jobs", "--db", "other.db"), 3)
    assert not Path("other.db").exists()
    Path("text").write_text("nothing" * 999)
    assert "text cannot be used" in failed(bso("jobs", "--db", "text"), 3)
    assert "not supported" in failed(bso("jobs", "--db", "mysql://h/n"), 2)
    assert "a server's URL must be such as" in failed(bso("jobs", "--server", "master"), 2)
    url = f"http://127.0.0.1:{free_port()}"
    assert f"the batch size server at {url} cannot be reached" in failed(
        bso("jobs", "--server", url), 3
    )


@pytest.mark.parametrize(
    ("arguments", "settings", "words", "code"),
    [
        ("", {"LEASE": "5"}, "ZEUS_BSO_LEASE is not a setting; there are ZEUS_BSO_DATABASE_URL", 2),
        ("", {"LEASE_S": "soon"}, "ZEUS_BSO_LEASE_S: ", 2),
        ("--log-level loud", {}, "ZEUS_BSO_LOG_LEVEL: must be one of DEBUG", 2),
        ("--db /proc/nowhere/x.db", {}, "/proc/nowhere/x.db cannot be used", 3),
        ("--db no/x.db", {}, "make it, or name another file", 3),
        ("", {"DATABASE_URL": "mysql://h/n"}, "mysql databases are not supported", 2),
    ],
)
def test_failures_to_start_a_server_are_reported_in_one_sentence(
    bso: Bso,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    settings: dict[str, str],
    words: str,
    code: int,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"ZEUS_BSO_{name}", value)
    monkeypatch.setenv("ZEUS_BSO_DB_USER", "of a compose file")  # no concern of the server's
    said = failed(bso("serve", *arguments.split()), code)
    assert words in said
    assert not Path("no").exists()
    assert len(said.splitlines()) == 1


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for name in sys.argv[1].split(','): sys.modules[name] = None\n"
        "from zeus.optimizer.batch_size.command import main\n"
        "main(sys.argv[2:])\n"
    )
    for missing, verb, words in (
        ("sqlalchemy", "jobs", "sqlalchemy: pip install 'zeusd[bso-server]'"),
        ("numpy", "jobs", "numpy: pip install 'zeusd[bso-server]'"),
        ("fastapi", "serve", "fastapi: pip install 'zeusd[bso-server]'"),
        ("psycopg", "serve --db postgresql://h/n", "psycopg: pip install 'zeusd[postgresql]'"),
        ("httpx", "jobs --server http://h", "httpx; install it with pip install 'zeusd[bso]'"),
        ("sqlalchemy,numpy,fastapi,httpx,torch", "--help", ""),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", script, missing, *verb.split()],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert words in ran.stderr, (missing, ran.stderr)
        assert len(ran.stderr.splitlines()) <= 1, ran.stderr
        assert (ran.returncode == 0) == (words == "")


def test_figures_are_written_as_people_read_them() -> None:
    assert [joules(v) for v in (None, 0.0, 999.0, 1000.0, 11_303_022.51, -2e9)] == [
        "-",
        "0 J",
        "999 J",
        "1 kJ",
        "11.3 MJ",
        "-2 GJ",
    ]

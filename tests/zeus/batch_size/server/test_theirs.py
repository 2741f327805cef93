"""Databases of ml-energy/zeus's server can be imported."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from zeus.optimizer.batch_size.command import main
from zeus.optimizer.batch_size.store import LEASE_S, Store

TABLES = """
CREATE TABLE "Job" (
    job_id VARCHAR(400) PRIMARY KEY, job_id_prefix VARCHAR(300), default_batch_size INTEGER,
    higher_is_better_metric BOOLEAN, eta_knob FLOAT, beta_knob FLOAT, target_metric FLOAT,
    max_epochs INTEGER, num_pruning_rounds INTEGER, window_size INTEGER, max_power FLOAT,
    number_of_gpus INTEGER, gpu_model VARCHAR(30), mab_prior_mean FLOAT, mab_prior_precision FLOAT,
    mab_num_explorations INTEGER, mab_seed INTEGER, mab_random_generator_state VARCHAR(10000),
    exp_default_batch_size INTEGER, stage VARCHAR(7), min_cost FLOAT, min_cost_batch_size INTEGER);
CREATE TABLE "BatchSize" (job_id VARCHAR, batch_size INTEGER, PRIMARY KEY (job_id, batch_size));
CREATE TABLE "Trial" (
    job_id VARCHAR(300), batch_size INTEGER, trial_number INTEGER, start_timestamp DATETIME,
    type VARCHAR(11), status VARCHAR(10), end_timestamp DATETIME, time FLOAT, energy FLOAT,
    converged BOOLEAN, PRIMARY KEY (job_id, trial_number));
"""
JOB = """INSERT INTO "Job" VALUES (?, 'mnist', 32, 0, 0.3, ?, 0.5, 7, 2, 10, 300.0, 1, 'V100', 0.0,
    0.0, 2, 17, '{"state": 1}', 32, 'Pruning', 900.0, 64)"""
TRIAL = "INSERT INTO \"Trial\" VALUES ('mnist-a', ?, ?, ?, 'Exploration', ?, ?, ?, ?, ?)"
DAY = "2024-05-01 1"
"""Of a summer day before noon; an hour and more follows."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two jobs; the first has converged, missed its target, failed, and trains."""
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(TABLES)
        database.execute(JOB, ("mnist-a", 2.0))
        database.execute(JOB, ("mnist-b", None))
        for job in ("mnist-a", "mnist-b"):
            for size in (64, 32, 16):
                database.execute('INSERT INTO "BatchSize" VALUES (?, ?)', (job, size))
        for row in (
            (32, 1, f"{DAY}0:00:00", "Succeeded", f"{DAY}0:10:00", 600.0, 60_000.0, 1),
            (64, 2, f"{DAY}0:20:00", "Succeeded", f"{DAY}0:25:00.500000", 300.0, 30_000.0, 1),
            (16, 3, f"{DAY}0:30:00", "Succeeded", f"{DAY}1:30:00", 3600.0, 300_000.0, 0),
            (32, 4, f"{DAY}0:30:00", "Failed", f"{DAY}0:31:00", None, None, None),
            (64, 5, f"{DAY}2:00:00", "Dispatched", None, None, None, None),
        ):
            database.execute(TRIAL, row)
    return path


@pytest.fixture
def take_over(tmp_path: Path) -> Callable[[object], Result]:
    where = str(tmp_path / "bso.db")
    return lambda source: CliRunner().invoke(main, ["import", str(source), "--db", where])


def test_jobs_continue_where_they_were(
    source: Path, tmp_path: Path, take_over: Callable[[object], Result]
) -> None:
    before = source.read_bytes()
    done = take_over(source)
    assert done.exit_code == 0, done.output
    assert done.stdout == "mnist-a: 5 trials\nmnist-b: 0 trials\n"
    assert source.read_bytes() == before

    store = Store(tmp_path / "bso.db")
    record, trials = store.job("mnist-a")
    spec = record.spec
    assert (spec.batch_sizes, spec.default_batch_size, record.seed) == ([16, 32, 64], 32, 17)
    assert (spec.eta_knob, spec.beta_knob, spec.higher_is_better_metric) == (0.3, 2.0, False)
    assert (spec.policy, spec.window_size, spec.gpu_model) == ("pruning-gts", 10, "V100")
    assert store.job("mnist-b")[0].spec.beta_knob is None
    assert [(one.batch_size, one.status, one.converged) for one in trials] == [
        (32, "ok", True),
        (64, "ok", True),
        (16, "ok", False),
        (32, "failed", False),
        (64, "running", False),
    ]
    first, second = trials[:2]
    assert first.ended_s is not None
    assert first.ended_s - first.began_s == 600
    assert (second.time, second.energy) == (300.0, 30_000.0)
    # In the order in which they ended: the failed one before the one that took an hour.
    assert [one.number for one in sorted(trials[:4], key=lambda one: one.order)] == [1, 2, 4, 3]

    begun = store.begin_trial("mnist-a", "new")
    assert (begun.trial_number, begun.best_batch_size) == (6, 64)
    # Its client may come here, or is lost like others.
    assert trials[4].lease_s == LEASE_S
    store.close()


def test_existing_jobs_stay(
    source: Path, tmp_path: Path, take_over: Callable[[object], Result]
) -> None:
    take_over(source)
    store = Store(tmp_path / "bso.db")
    store.begin_trial("mnist-b", "one")
    done = take_over(source)
    assert done.stdout.count("is here already, and stays as it is") == 2
    assert len(store.job("mnist-b")[1]) == 1
    store.close()


def test_an_empty_one_and_others_are_distinguished(
    tmp_path: Path, take_over: Callable[[object], Result]
) -> None:
    empty, other, text = (tmp_path / name for name in ("empty.db", "other.db", "text.db"))
    with closing(sqlite3.connect(empty)) as database:
        database.executescript(TABLES)
    with closing(sqlite3.connect(other)) as database:
        database.execute("CREATE TABLE jobs (id INTEGER)")
    text.write_text("no database at all, and longer than a header of SQLite's\n" * 20)
    assert take_over(empty).stdout == "there are no jobs in it\n"
    for source, said in (
        (other, "it has no table Job"),
        (text, "cannot be read: file is not a database"),
        (tmp_path / "none.db", "there is no database"),
        ("oracle://host/name", "use SQLite"),
    ):
        done = take_over(source)
        assert done.exit_code != 0
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "none.db").exists()


def test_a_job_that_cannot_be_taken_over_is_named(
    source: Path, take_over: Callable[[object], Result]
) -> None:
    with closing(sqlite3.connect(source)) as database, database:
        database.execute("UPDATE \"Job\" SET default_batch_size = 48 WHERE job_id = 'mnist-b'")
    done = take_over(source)
    assert done.exit_code != 0
    assert "job mnist-b of sqlite:///" in done.stderr
    assert "default_batch_size 48 is not in batch_sizes" in done.stderr

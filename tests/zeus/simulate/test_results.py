from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zeus.simulate.results import COLUMNS, RunRow, read_rows, series, write_rows

ROW = RunRow(
    name="a group, with a comma",
    policy="gp",
    gpu="v100",
    dataset="squad",
    network="bert",
    optimizer="adamw",
    eta_knob=0.5,
    beta_knob=float("inf"),
    seed=4294967295,
    run=1,
    recurrence=1,
    batch_size=32,
    power_limit=None,
    energy=1.1,
    time=2.2,
    cost=1 / 3,
    reached=False,
    best_cost=0.1,
    default_energy=1e9,
    default_time=7.0,
    default_cost=8.0,
)
ROWS = [ROW, replace(ROW, run=2, power_limit=150, reached=True)]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_rows_are_read_back_as_they_were_written(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"runs.{ending}"
    write_rows(ROWS, path)
    assert read_rows(path) == ROWS


def test_a_file_without_rows_is_read_back(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path / "none.parquet"):
        write_rows([], path)
        assert read_rows(path) == []


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("runs.csv", "a,b\n1,2\n", "columns name, policy, .* are missing"),
        ("runs.csv", "", "columns name, .* are missing"),
        (
            "runs.csv",
            ",".join(COLUMNS) + "\n" + ",".join("x" * len(COLUMNS)),
            "line 2: eta_knob is 'x'",
        ),
        ("runs.csv", ",".join(COLUMNS) + "\nx\n", "line 2: it has 1 field, the header has 21"),
        ("runs.parquet", "PAR", "is not a Parquet file"),
    ],
)
def test_files_without_runs_are_reported(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=wrong):
        read_rows(path)


def test_without_pyarrow_there_is_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write_rows(ROWS, tmp_path / "runs.csv")
    assert read_rows(tmp_path / "runs.csv") == ROWS
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'zeusd\[parquet\]'"):
        write_rows(ROWS, tmp_path / "runs.parquet")


def test_jobs_are_distinguished_by_what_is_no_property_of_a_run() -> None:
    other = [
        [replace(row, **{name: value}) for row in ROWS]
        for name, value in (("seed", 1), ("gpu", "a40"), ("eta_knob", 0.0), ("policy", "gts"))
    ]
    # Also when their runs are mixed, for any batch size.
    mixed = [row for pair in zip(ROWS, *other, strict=True) for row in pair]
    assert [job.runs for job in series(mixed)] == [tuple(ROWS), *map(tuple, other)]


def test_a_recurrence_costs_what_all_its_runs_cost() -> None:
    rows = [
        replace(ROW, run=1, recurrence=1, cost=3.0, best_cost=2.0, reached=True),
        replace(ROW, run=2, recurrence=2, cost=1.0, best_cost=4.0, reached=False),
        replace(ROW, run=3, recurrence=2, cost=4.0, best_cost=4.0, reached=True),
        replace(ROW, run=4, recurrence=3, cost=0.0, best_cost=0.0, reached=True),
    ]
    (job,) = series(rows)
    assert job.costs == (3.0, 5.0, 0.0)
    assert job.relative_costs == [1.5, 1.25, 1.0]
    assert job.regrets == [0.5, 0.75, 0.75]

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from tests import seeds
from tests.zeus.serving.server import Served, serve
from zeus.serving.command import main

STEPS = "step,begin_ns,end_ns,request,phase,tokens,context"
ENERGY = "begin_ns,end_ns,joules,seen_begin_ns,seen_end_ns,clock_mhz"
GOOD_STEPS = ["0,0,10,a,prefill,5,0", "0,0,10,b,decode,1,7", "1,10,30,a,decode,1,5"]
GOOD_ENERGY = ["0,20,2,,,", "20,40,3,30,40,1500"]


def _run(directory: Path, *options: str) -> tuple[int, str]:
    arguments = ["replay"]
    for name, file in (
        ("steps", "steps.csv"),
        ("energy", "energy.csv"),
        ("out", "requests.csv"),
        ("totals", "totals.json"),
    ):
        if f"--{name}" not in options:
            arguments += [f"--{name}", str(directory / file)]
    result = CliRunner().invoke(main, [*arguments, *options])
    return result.exit_code, result.output


def _files(directory: Path, steps: list[str], energy: list[str]) -> None:
    text = "\n".join([STEPS, *steps]) + "\n"
    (directory / "steps.csv").write_bytes(text.encode(errors="surrogateescape"))
    (directory / "energy.csv").write_text("\n".join([ENERGY, *energy]) + "\n")


def _results(directory: Path) -> tuple[list[dict[str, str]], dict[str, float]]:
    with (directory / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    return rows, json.loads((directory / "totals.json").read_text())


def _save(served: Served, directory: Path) -> None:
    steps, updates = served.steps, served.updates
    rows = [
        f"{step},{steps.begin_ns[step]},{steps.end_ns[step]},{served.names[request]},"
        f"{'prefill' if prefill else 'decode'},{tokens:.0f},{context:.0f}"
        for step, request, prefill, tokens, context in zip(
            steps.step_of_row,
            steps.request,
            steps.prefill,
            steps.tokens,
            steps.context,
            strict=True,
        )
    ]
    energy = [
        f"{begin},{end},{joules},{first},{last},"
        for begin, end, joules, first, last, _ in zip(*vars(updates).values(), strict=True)
    ]
    _files(directory, rows, energy)


def _adds_up(rows: list[dict[str, str]], totals: dict[str, float], measured_j: float) -> None:
    parts = totals["requests_j"] + totals["idle_j"] + totals["unattributed_j"]
    assert parts == pytest.approx(measured_j, rel=1e-9)
    assert totals["measured_j"] == pytest.approx(measured_j, rel=1e-9)
    known = [row for row in rows if row["joules"]]
    assert math.fsum(float(row["joules"]) for row in known) == pytest.approx(totals["requests_j"])
    for row in known:
        split = sum(float(row[f"{part}_j"]) for part in ("prefill", "decode", "shared"))
        assert split == pytest.approx(float(row["joules"]))


def test_a_run_is_attributed(tmp_path):
    served = serve(seeds.fresh(), seen=0.3)
    _save(served, tmp_path)

    assert _run(tmp_path) == (0, "")

    rows, totals = _results(tmp_path)
    assert list(rows[0]) == [
        "request", "joules", "prefill_j", "decode_j", "shared_j", "uncertainty_j",
        "rule_uncertainty_j", "method", "reason",
    ]  # fmt: skip
    _adds_up(rows, totals, served.measured_j)
    found = {row["request"]: float(row["joules"]) for row in rows}
    errors = [
        abs(found[name] / true - 1) for name, true in zip(served.names, served.true_j, strict=True)
    ]
    assert np.mean(errors) < 0.02


@pytest.mark.parametrize("idle", ["exclude", "proportional", "owner"])
def test_idle_energy_goes_where_the_bill_says(tmp_path, idle):
    served = serve(seeds.fresh(), seconds=180, rate=0.6)
    _save(served, tmp_path)
    tenants = [f"{name},{'even' if n % 2 == 0 else 'odd'}" for n, name in enumerate(served.names)]
    (tmp_path / "tenants.csv").write_text("\n".join(["request,tenant", *tenants]))

    code, output = _run(tmp_path, "--idle", idle, "--tenants", str(tmp_path / "tenants.csv"))

    assert (code, output) == (0, "")
    rows, totals = _results(tmp_path)
    _adds_up(rows, totals, served.measured_j)
    assert totals["idle"]["policy"] == idle
    idle_j = totals["idle"]["measured_j"]
    assert idle_j > 100
    assert totals["idle_j"] == (0.0 if idle == "proportional" else idle_j)
    billed = sum(one["joules"] for one in totals["tenants"].values())
    owed = totals["requests_j"] + (idle_j if idle == "owner" else 0)
    assert billed == pytest.approx(owed)
    assert set(totals["tenants"]) == {"even", "odd"} | ({"owner"} if idle == "owner" else set())


def test_refused_requests_have_a_reason_and_no_figures(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)

    assert _run(tmp_path)[0] == 0

    rows, totals = _results(tmp_path)
    _adds_up(rows, totals, 5.0)
    assert [row["request"] for row in rows] == ["a", "b"]
    assert all("too few" in row["reason"] and row["joules"] == "" for row in rows)


def test_tokens_need_no_fit(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)

    assert _run(tmp_path, "--method", "tokens")[0] == 0

    rows, totals = _results(tmp_path)
    _adds_up(rows, totals, 5.0)
    # Step 0 had 1 J of the first update, shared 5 to 1; the rest was a's alone.
    assert float(rows[1]["joules"]) == pytest.approx(1 / 6, rel=1e-6)


def test_rows_may_come_in_any_order(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    _run(tmp_path, "--method", "tokens")
    expected = _results(tmp_path)[1]

    _files(tmp_path, GOOD_STEPS[::-1], GOOD_ENERGY[::-1])

    assert _run(tmp_path, "--method", "tokens")[0] == 0
    assert _results(tmp_path)[1] == expected


def test_empty_files_are_a_run_without_requests(tmp_path):
    _files(tmp_path, [], GOOD_ENERGY)
    assert _run(tmp_path)[0] == 0
    rows, totals = _results(tmp_path)
    assert rows == []
    assert totals["idle_j"] == pytest.approx(5.0)

    _files(tmp_path, GOOD_STEPS, [])
    assert _run(tmp_path, "--method", "tokens")[0] == 0
    rows, totals = _results(tmp_path)
    assert totals["measured_j"] == 0
    assert all(row["reason"] == "no sensor update covers its steps" for row in rows)


def test_blank_lines_count_but_do_not_matter(tmp_path):
    _files(tmp_path, [GOOD_STEPS[0], "", *GOOD_STEPS[1:], ""], ["", *GOOD_ENERGY, "", ""])
    assert _run(tmp_path, "--method", "tokens")[0] == 0

    _files(tmp_path, [GOOD_STEPS[0], "", "1,10,30,a,decode,-1,5"], GOOD_ENERGY)
    assert "steps.csv, line 4: tokens is -1" in _run(tmp_path)[1]
    _files(tmp_path, [GOOD_STEPS[0], "", *GOOD_STEPS[1:], "0,0,11,c,decode,1,5"], GOOD_ENERGY)
    assert "steps.csv, line 6: begin_ns or end_ns is not that" in _run(tmp_path)[1]


BAD_STEPS = [
    ("1,30,20,a,decode,1,5", "begin_ns 30 is after end_ns 20"),
    ("1,10,30,a,decode,-1,5", "tokens is -1"),
    ("1,10,30,a,decode,nan,5", "tokens is nan"),
    ("1,10,30,a,decode,,5", "tokens is ''"),
    ("1,10,30,a,decode,1,nan", "context is nan"),
    ("1,10,30,a,decode,1,-2", "context is -2"),
    ("1,10,30,a,decode,inf,2", "tokens is inf"),
    ("1,10,30,a,encode,1,5", "phase is 'encode'"),
    ("1,10,30,,decode,1,5", "request is empty"),
    ("1,ten,30,a,decode,1,5", "begin_ns is 'ten'"),
    ("1,10,30,a,decode,1", "6 fields"),
    (f"1,10,{2**62},a,decode,1,5", "end_ns is '4611686018427387904'"),
    ("1,10,30,a,decode,1e300,5", "tokens is 1e300"),
    ("1,10,30,a\udcff,decode,1,5", "it is not text in UTF-8"),
    (f"1,10,30,{'a' * 140_000},decode,1,5", "field larger than field limit"),
    ("0,0,10,b,decode,1,5", "request 'b' is in this step twice"),
    ("0,0,11,c,decode,1,5", "not that of another row"),
]


@pytest.mark.parametrize(("row", "what"), BAD_STEPS)
def test_a_bad_row_of_the_steps_is_named(tmp_path, row, what):
    _files(tmp_path, [*GOOD_STEPS[:2], row], GOOD_ENERGY)
    _named(tmp_path, "steps.csv, line 4: ", what)


BAD_ENERGY = [
    ("40,40,1,,,", "begin_ns 40 is not before end_ns 40"),
    ("50,40,1,,,", "begin_ns 50 is not before end_ns 40"),
    ("40,60,-1,,,", "joules is -1"),
    ("40,60,nan,,,", "joules is nan"),
    ("40,60,,,,", "joules is ''"),
    ("40,60,1e300,,,", "joules is 1e300"),
    (f"40,{2**62},1,,,", "end_ns is '4611686018427387904'"),
    ("40,60,1,30,60,", "the seen part 30 to 60"),
    ("40,60,1,50,45,", "the seen part 50 to 45"),
    ("40,60,1,x,60,", "seen_begin_ns is 'x'"),
    ("40,60,1,,,fast", "clock_mhz is 'fast'"),
    ("40,60,1,,,-5", "clock_mhz is -5"),
    ("30,50,1,,,", "overlaps the one of line 3"),
    ("5,15,1,,,", "overlaps the one of line 2"),
]


@pytest.mark.parametrize(("row", "what"), BAD_ENERGY)
def test_a_bad_update_is_named(tmp_path, row, what):
    _files(tmp_path, GOOD_STEPS, [*GOOD_ENERGY, row])
    _named(tmp_path, "energy.csv, line 4: ", what)


def test_a_row_after_a_quoted_newline_is_named_by_its_line(tmp_path):
    _files(tmp_path, ['0,0,10,"a\nb",decode,1,0', "", "1,10,20,c,decode,-1,0"], GOOD_ENERGY)
    _named(tmp_path, "steps.csv, line 5: ", "tokens is -1")


def _named(directory: Path, place: str, what: str) -> None:
    code, output = _run(directory)
    assert code == 1
    assert place in output
    assert what in output
    assert output.count("\n") == 1
    assert not (directory / "requests.csv").exists()


def test_nan_is_empty_and_a_request_may_be_called_so(tmp_path):
    rows = [one.replace(",a,", ",nan,").replace(",b,", ",=1,") for one in GOOD_STEPS]
    _files(tmp_path, rows, [one.replace(",,,", ",nan,NaN,nan") for one in GOOD_ENERGY])

    assert _run(tmp_path, "--method", "tokens") == (0, "")
    assert {row["request"] for row in _results(tmp_path)[0]} >= {"nan", "=1"}


def test_idle_time_within_an_update_draws_no_more_than_the_update(tmp_path):
    updates = [*GOOD_ENERGY, "1000000,1000001,1e6,,,"]  # alone, an idle power that cannot be
    _files(tmp_path, GOOD_STEPS, updates)
    assert _run(tmp_path, "--method", "tokens")[0] == 0

    rows, totals = _results(tmp_path)

    assert totals["requests_j"] > 0
    assert all(row["joules"] for row in rows)


def test_missing_columns_and_files_are_named(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    (tmp_path / "steps.csv").write_text("step,begin_ns,end_ns\n")
    code, output = _run(tmp_path)
    assert code == 1
    assert "steps.csv, line 1: the columns request, phase, tokens, context are missing" in output

    (tmp_path / "steps.csv").unlink()
    code, output = _run(tmp_path)
    assert code == 1
    assert "cannot read" in output
    assert "steps.csv: No such file" in output

    (tmp_path / "steps.csv").write_bytes(b"step,\xff\xfe\n")
    assert _run(tmp_path)[0] == 1

    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    code, output = _run(tmp_path, "--totals", str(tmp_path / "none" / "totals.json"))
    assert code == 1
    assert output.startswith("Error: ")


def test_two_tenants_of_one_request_are_named(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    (tmp_path / "tenants.csv").write_text("request,tenant\na,x\na,y\n")

    code, output = _run(tmp_path, "--tenants", str(tmp_path / "tenants.csv"))

    assert code == 1
    assert "tenants.csv, line 3: request 'a' has two tenants" in output


def test_parquet_gives_the_same(tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet
    from pyarrow.csv import read_csv as read

    served = serve(seeds.fresh(), seconds=40)
    _save(served, tmp_path)
    assert _run(tmp_path)[0] == 0
    expected, _ = _results(tmp_path)
    for name in ("steps", "energy"):
        parquet.write_table(read(tmp_path / f"{name}.csv"), tmp_path / f"{name}.parquet")
    files = [
        option
        for name in ("steps", "energy")
        for option in (f"--{name}", str(tmp_path / f"{name}.parquet"))
    ]

    assert _run(tmp_path, *files, "--out", str(tmp_path / "requests.parquet")) == (0, "")

    table = parquet.read_table(tmp_path / "requests.parquet")
    assert table.schema.field("joules").type == arrow.float64()
    found = table.column("joules").to_pylist()
    assert found == pytest.approx([float(row["joules"]) for row in expected])

    (tmp_path / "bad.parquet").write_text("no parquet")
    code, output = _run(tmp_path, "--steps", str(tmp_path / "bad.parquet"))
    assert code == 1
    assert "is not a Parquet file" in output

    whole = (tmp_path / "steps.parquet").read_bytes()
    (tmp_path / "bad.parquet").write_bytes(whole[:2000] + bytes(2000) + whole[4000:])
    code, output = _run(tmp_path, "--steps", str(tmp_path / "bad.parquet"))
    assert code == 1
    assert "bad.parquet" in output
    assert "None" not in output

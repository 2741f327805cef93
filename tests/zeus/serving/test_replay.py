from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
"""Times are in milliseconds here; `_files` writes nanoseconds."""


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


def _in_ns(rows: list[str], times: tuple[int, ...]) -> list[str]:
    found = []
    for row in rows:
        cells = row.split(",")
        for n in times:
            if n < len(cells) and cells[n].isdigit() and len(cells[n]) < 10:
                cells[n] += "000000"
        found.append(",".join(cells))
    return found


def _files(directory: Path, steps: list[str], energy: list[str]) -> None:
    steps, energy = _in_ns(steps, (1, 2)), _in_ns(energy, (0, 1, 3, 4))
    _write(directory, steps, energy)


def _write(directory: Path, steps: list[str], energy: list[str]) -> None:
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
    _write(directory, rows, energy)


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

    code, output = _run(tmp_path)

    assert code == 1
    assert "no request has a figure (2 of 2: too few" in output
    rows, totals = _results(tmp_path)
    _adds_up(rows, totals, 5.0)
    assert [row["request"] for row in rows] == ["a", "b"]
    assert all("too few" in row["reason"] and row["joules"] == "" for row in rows)


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "the last row first"])
def test_tokens_need_no_fit_and_no_order(tmp_path, order):
    _files(tmp_path, GOOD_STEPS[::order], GOOD_ENERGY[::order])

    assert _run(tmp_path, "--method", "tokens")[0] == 0

    rows, totals = _results(tmp_path)
    _adds_up(rows, totals, 5.0)
    # Step 0 had 1 J of the first update, shared 5 to 1; the rest was a's alone.
    joules = {row["request"]: float(row["joules"]) for row in rows}
    assert joules == pytest.approx({"a": 5 - 1 / 6, "b": 1 / 6}, rel=1e-6)


@pytest.mark.parametrize("empty", ["steps", "energy"])
def test_an_empty_file_has_nothing_to_attribute(tmp_path, empty):
    _files(
        tmp_path, [] if empty == "steps" else GOOD_STEPS, [] if empty == "energy" else GOOD_ENERGY
    )
    _named(tmp_path, f"{empty}.csv has no rows", "nothing to attribute")


def test_blank_lines_count_but_do_not_matter(tmp_path):
    _files(tmp_path, [GOOD_STEPS[0], "", *GOOD_STEPS[1:], ""], ["", *GOOD_ENERGY, "", ""])
    assert _run(tmp_path, "--method", "tokens")[0] == 0

    _files(tmp_path, [GOOD_STEPS[0], "", "1,10,30,a,decode,-1,5"], GOOD_ENERGY)
    assert "steps.csv, line 4: tokens is '-1'" in _run(tmp_path)[1]
    _files(tmp_path, [GOOD_STEPS[0], "", *GOOD_STEPS[1:], "0,0,11,c,decode,1,5"], GOOD_ENERGY)
    assert "steps.csv, line 6: begin_ns or end_ns is not that" in _run(tmp_path)[1]


BAD_STEPS = [
    ("1,30,20,a,decode,1,5", "begin_ns 30000000 is after end_ns 20000000"),
    ("1,10,30,a,decode,-1,5", "tokens is '-1'"),
    ("1,10,30,a,decode,nan,5", "tokens is 'nan'"),
    ("1,10,30,a,decode,,5", "tokens is empty"),
    ("1,10,30,a,decode,1,nan", "context is 'nan'"),
    ("1,10,30,a,decode,1,-2", "context is '-2'"),
    ("1,10,30,a,decode,inf,2", "tokens is 'inf'"),
    ("1,10,30,a,encode,1,5", "phase is 'encode'"),
    ("1,10,30,,decode,1,5", "request is empty"),
    ("1,ten,30,a,decode,1,5", "begin_ns is 'ten'"),
    ("1,10,30,a,decode,1", "6 fields"),
    (f"1,10,{2**62},a,decode,1,5", "end_ns is '4611686018427387904'"),
    ("1,10,30,a,decode,1e300,5", "tokens is '1e300'"),
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
    ("40,40,1,,,", "begin_ns 40000000 is not before end_ns 40000000"),
    ("50,40,1,,,", "begin_ns 50000000 is not before end_ns 40000000"),
    ("40,60,-1,,,", "joules is '-1'"),
    ("40,60,nan,,,", "joules is 'nan'"),
    ("40,60,,,,", "joules is empty"),
    ("40,60,1e300,,,", "joules is '1e300'"),
    (f"40,{2**62},1,,,", "end_ns is '4611686018427387904'"),
    ("40,60,1,30,60,", "the seen part 30000000 to 60000000"),
    ("40,60,1,50,45,", "the seen part 50000000 to 45000000"),
    ("40,60,1,x,60,", "seen_begin_ns is 'x'"),
    ("40,60,1,,,fast", "clock_mhz is 'fast'"),
    ("40,60,1,,,-5", "clock_mhz is '-5'"),
    ("30,50,1,,,", "overlaps the one of line 3"),
    ("5,15,1,,,", "overlaps the one of line 2"),
]


@pytest.mark.parametrize(("row", "what"), BAD_ENERGY)
def test_a_bad_update_is_named(tmp_path, row, what):
    _files(tmp_path, GOOD_STEPS, [*GOOD_ENERGY, row])
    _named(tmp_path, "energy.csv, line 4: ", what)


def test_a_row_after_a_quoted_newline_is_named_by_its_line(tmp_path):
    _files(tmp_path, ['0,0,10,"a\nb",decode,1,0', "", "1,10,20,c,decode,-1,0"], GOOD_ENERGY)
    _named(tmp_path, "steps.csv, line 5: ", "tokens is '-1'")


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
    updates = [*GOOD_ENERGY, "1000,1001,19,,,"]  # alone, an idle power of 19 kW
    _files(tmp_path, GOOD_STEPS, updates)
    assert _run(tmp_path, "--method", "tokens")[0] == 0

    rows, totals = _results(tmp_path)

    assert totals["requests_j"] > 0
    assert all(row["joules"] for row in rows)


def test_missing_columns_and_files_are_named(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    (tmp_path / "steps.csv").write_text("step,begin_ns,end_ns\n")
    _named(tmp_path, "steps.csv, line 1", "the columns request, phase, tokens, context are missing")
    (tmp_path / "steps.csv").unlink()
    _named(tmp_path, "steps.csv", "cannot be read: No such file")
    (tmp_path / "steps.csv").write_bytes(b"step,\xff\xfe\n")
    _named(tmp_path, "steps.csv", "")

    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    code, output = _run(tmp_path, "--totals", str(tmp_path / "none" / "totals.json"))
    assert code == 1
    assert output.startswith("Error: ")


def _times(rows: list[str], columns: tuple[int, ...], change: Callable[[int], str]) -> list[str]:
    cells = (row.split(",") for row in rows)
    return [
        ",".join(change(int(cell)) if n in columns and cell else cell for n, cell in enumerate(row))
        for row in cells
    ]


def _joules(rows: list[str], change: Callable[[list[float]], list[float]]) -> list[str]:
    split = [row.split(",") for row in rows]
    amounts = change([float(cells[2]) for cells in split])
    return [
        ",".join([*row[:2], f"{joules}", *row[3:]])
        for row, joules in zip(split, amounts, strict=True)
    ]


def _both(change: Callable[[int], str]) -> Any:
    return lambda steps, energy: (
        _times(steps, (1, 2), change), _times(energy, (0, 1, 3, 4), change)
    )  # fmt: skip


def _steps_only(change: Callable[[int], str]) -> Any:
    return lambda steps, energy: (_times(steps, (1, 2), change), energy)


def _energies(change: Callable[[list[float]], list[float]]) -> Any:
    return lambda steps, energy: (steps, _joules(energy, change))


NOT_POSSIBLE = {
    "seconds": (_both(lambda t: f"{t / 1e9}"), "a time in whole nanoseconds"),
    "whole seconds": (_both(lambda t: f"{t // 10**9}"), "are they of another unit?"),
    "milliseconds": (_both(lambda t: f"{t // 10**6}"), "steps are 10 ns long, but times are in "
                     "nanoseconds; are the times milliseconds?"),
    "microseconds": (_both(lambda t: f"{t // 10**3}"), "are the times microseconds?"),
    "milliseconds in one": (_steps_only(lambda t: f"{t // 10**6}"), "are the times milliseconds?"),
    "a spreadsheet's": (_both(lambda t: f"{t:.5E}"), "'; it must be a time in whole"),
    "another clock": (_steps_only(lambda t: f"{t + 10**17}"), "do not overlap"),
    "an offset": (_steps_only(lambda t: f"{t + 30 * 10**9}"),
                  "the power rises 30 s before the steps"),
    "a counter": (_energies(lambda j: [*itertools.accumulate(j)]), "joules only grow"),
    "a counter since boot": (
        _energies(lambda j: [*itertools.accumulate(j, initial=28e6)][1:]), "joules only grow"),
    "a short counter": (lambda steps, energy: (steps, _energies(
        lambda j: [*itertools.accumulate(j)])(steps, energy[:9])[1]), "joules only grow"),
    "a sensor that fails": (_energies(lambda j: [*j[:100], *[0.0] * 30, *j[130:]]),
                            "line 102: the power is below 1 W for 3 s from here"),
    "starts of another clock": (
        lambda steps, energy: (_times(steps, (1,), lambda t: "0"), energy), "of two clocks?"),
    "millijoules": (_energies(lambda j: [1e3 * one for one in j]), "are the joules millijoules?"),
    "kilojoules": (_energies(lambda j: [one / 1e3 for one in j]), "are the joules kilojoules?"),
    "one row": (_energies(lambda j: [28e6, *j[1:]]), "line 2: joules is 2.8e+07, in an update"),
    "underscores": (_energies(lambda j: ["1_0.5", *j[1:]]), "line 2: joules is '1_0.5'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def two_minutes(tmp_path_factory):
    """Rows of steps and of energy."""
    folder = tmp_path_factory.mktemp("two minutes")
    _save(serve(seeds.fresh(), seconds=120, rate=2.1), folder)
    return [(folder / f"{file}.csv").read_text().splitlines()[1:] for file in ("steps", "energy")]


@pytest.mark.parametrize("name", NOT_POSSIBLE)
def test_figures_that_no_gpu_has_are_refused_with_the_likely_unit(tmp_path, two_minutes, name):
    change, says = NOT_POSSIBLE[name]
    _write(tmp_path, *change(*two_minutes))
    _named(tmp_path, "", says)


def test_no_file_is_overwritten_that_is_read_or_written(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    (tmp_path / "link.csv").symlink_to("steps.csv")
    before = (tmp_path / "steps.csv").read_text()
    for option, file, says in (
        ("--out", "steps.csv", "is read"),
        ("--out", "link.csv", "is read"),
        ("--totals", "energy.csv", "is read"),
        ("--out", "totals.json", "is already written"),
    ):
        code, output = _run(tmp_path, "--method", "tokens", option, str(tmp_path / file))
        assert code == 1
        assert says in output
        assert (tmp_path / "steps.csv").read_text() == before
        assert not (tmp_path / "totals.json").exists()


def test_a_full_disk_is_reported_with_the_files_name(tmp_path):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    code, output = _run(tmp_path, "--method", "tokens", "--out", "/dev/full")
    assert (code, output) == (1, "Error: /dev/full cannot be used: No space left on device\n")


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ("x1,alice\n", "names none of the 2 requests of .*: it has 'x1', and the steps 'a'"),
        ("a,x\na,y\n", "tenants.csv, line 3: request 'a' has two tenants"),
    ],
)
def test_tenants_that_cannot_be_meant_are_refused(tmp_path, tenants, says):
    _files(tmp_path, GOOD_STEPS, GOOD_ENERGY)
    (tmp_path / "tenants.csv").write_text(f"request,tenant\n{tenants}")
    code, output = _run(tmp_path, "--method", "tokens", "--tenants", str(tmp_path / "tenants.csv"))
    assert code == 1
    assert re.search(says, output)


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

"""The reader of tables: each kind of file, and each kind of fault, with its place."""

from __future__ import annotations

import bz2
import gc
import gzip
import lzma
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import pytest
from pydantic import Field

from zeus_common.tables import (
    Amount,
    Nanoseconds,
    Seconds,
    TableError,
    Text,
    Watts,
    distinct,
    kinds,
    read,
    read_columns,
    read_lines,
    records,
    rows,
    write,
)


class Row(NamedTuple):
    stage: Annotated[int, Field(ge=0)]
    name: Text
    begin_ns: Nanoseconds
    energy: Amount
    kind: Literal["prefill", "decode"] = "decode"
    clock: Amount | None = None


PLAIN = "stage,name,begin_ns,energy\n0,a,1764332412345678901,1.5\n1,b c,2,2\n"
ROWS = [Row(0, "a", 1764332412345678901, 1.5), Row(1, "b c", 2, 2.0)]


Content: TypeAlias = str | bytes | Callable[[], bytes]
"""Of a file; what pyarrow writes is written in the test: it imports pandas."""


def content(data: Content) -> bytes:
    found = data() if callable(data) else data
    return found if isinstance(found, bytes) else found.encode()


def arrow(columns: dict[str, Any]) -> bytes:
    import io

    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    arrays = [
        value if hasattr(value, "type") else pyarrow.array(value) for value in columns.values()
    ]
    parquet.write_table(pyarrow.Table.from_arrays(arrays, names=list(columns)), file)
    return file.getvalue()


def in_parquet(kind: str = "int") -> bytes:
    import pyarrow

    times = [row.begin_ns for row in ROWS]
    of = {
        "int": times,
        "timestamp": pyarrow.array(times, pyarrow.timestamp("ns", "UTC")),
        "duration": pyarrow.array(times, pyarrow.duration("ns")),
    }
    names = pyarrow.array(["a", "b c"]).dictionary_encode()
    return arrow({"Stage": [0.0, 1.0], "name": names, "begin_ns": of[kind], "energy": [1.5, 2.0]})


TRANSPOSED = "stage,0,1\nname,a,b c\nbegin_ns,1764332412345678901,2\nenergy,1.5,2\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.csv", PLAIN),
        ("t.csv", "\ufeff" + PLAIN.replace("\n", "\r\n")),
        ("t.txt", PLAIN + "\n,,,\n\n"),
        ("t.csv", " Stage , NAME,begin_ns, Energy ,note\n0, a ,1764332412345678901, 1.5,\n"
                  '1,"b c",2.0,2e0,"x,y\nz"\n'),
        ("t.csv", "energy,begin_ns,name,stage\n1.5,1764332412345678901,a,0\n2,2,b c,1\n"),
        ("t.csv", PLAIN.replace("energy\n", "energy,clock,kind\n").replace("1.5\n", "1.5,nan,\n")
                       .replace(",2\n", ",2,,decode\n")),
        ("t.csv.gz", gzip.compress(PLAIN.encode(), mtime=0)),
        ("t.csv", gzip.compress(PLAIN.encode(), mtime=0)),
        ("t.csv.xz", lzma.compress(PLAIN.encode())),
        ("t.columns.csv", TRANSPOSED),
        ("t.columns.csv.xz", lzma.compress(TRANSPOSED.encode())),
        ("t.parquet", in_parquet),
        ("t.pq", in_parquet),
        ("T.PARQUET", lambda: in_parquet("timestamp")),
        ("t.csv", lambda: in_parquet("duration")),
    ],
)  # fmt: skip
def test_a_table_is_the_same_however_it_is_stored(tmp_path: Path, name: str, data: Content) -> None:
    path = tmp_path / name
    path.write_bytes(content(data))
    assert [row for _, row in read(path, Row)] == ROWS


HEAD = "stage,name,begin_ns,energy\n"
NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("", ", line 1: the columns stage, name, begin_ns, energy are missing; the table needs "),
        ("stage,name,begin_ns\n", ", line 1: the column energy is missing"),
        ("stage,name,begin_ns,energy,Name\n", ", line 1: the column name is there twice"),
        (PLAIN.replace(",", ";"), ", line 1: columns are separated by semicolons; separate them"),
        (PLAIN.replace(",", "\t"), ", line 1: columns are separated by tabs; separate them by"),
        (HEAD + "0,a,1,1,5\n", ", line 2: it has 5 fields, the header has 4; are there decimal"),
        (HEAD + "0\n", ", line 2: it has 1 field, the header has 4"),
        (HEAD + '\n0,a,1,"1,5"\n', ", line 3: energy is '1,5'; it must be a number from 0 to 1e+30,"
                                   " with a decimal point and no comma"),
        (HEAD + '0,"a\nb",1,1\n0,a,1,x\n', ", line 4: energy is 'x'"),
        (HEAD + "0,a,1,-1\n", ", line 2: energy is '-1'; it must be a number from 0 to 1e+30"),
        (HEAD + "0,a,1,nan\n", ", line 2: energy is 'nan'"),
        (HEAD + "0,a,1,inf\n", ", line 2: energy is 'inf'"),
        (HEAD + "0,a,1,1_0.5\n", ", line 2: energy is '1_0.5'"),
        ("clock," + HEAD + ",0,a,1,1\n1_0,0,a,1,1\n",
         ", line 3: clock is '1_0'; it must be a number from 0 to 1e+30"),
        (lambda: arrow({"stage": [0, 0], "name": ["a", "b"], "begin_ns": [1, 1], "energy": [1, 1],
                "clock": [None, "1_0"]}), ", row 2: clock is '1_0'"),
        (HEAD + "1_0,a,1,1\n", ", line 2: stage is '1_0'; it must be a whole number at least 0"),
        (HEAD + "0,a,1,\n", ", line 2: energy is empty; it must be a number from 0 to 1e+30"),
        (HEAD + "0,,1,1\n", ", line 2: name is empty"),
        (HEAD + "0,a,0.25,1\n", ", line 2: begin_ns is '0.25'; it must be a time in whole nano"),
        (HEAD + "0,a,1.76400E+18,1\n", ", line 2: begin_ns is '1.76400E+18'; it must be a time in"),
        (HEAD + f"0,a,{2**62},1\n", ", line 2: begin_ns is '4611686018427387904'"),
        (HEAD + "0,a,1,1\n-1,a,x,1\n", ", line 3: stage is '-1'"),
        ("kind," + HEAD + "pre,0,a,1,1\n", ", line 2: kind is 'pre'; it must be prefill or decode"),
        (HEAD + "0,a" + "a" * 140_000 + ",1,1\n", ", line 2: field larger than field limit"),
        (HEAD.encode() + b"0,\xff,1,1\n", ", line 2: it is not text in UTF-8"),
        (gzip.compress(HEAD.encode() + b"0,\xff,1,1\n"), ", line 2: it is not text in UTF-8"),
        (PLAIN.encode("utf-16"), ", line 1: it is not text in UTF-8"),
        (gzip.compress(PLAIN.encode())[:-9], " is not a CSV file, or not whole"),
        (lzma.compress(PLAIN.encode())[:-20], " is not a CSV file, or not whole"),
        (b"PK\x03\x04 a workbook", " is a workbook or an archive; save its table as CSV"),
        (bz2.compress(PLAIN.encode()), ", line 1: it is not text in UTF-8"),
        (lambda: in_parquet()[:-30], " is not a whole Parquet file"),
        (lambda: arrow({"stage": [0], "name": ["a"], "begin_ns": [0.5], "energy": [1.0]}),
         ", row 1: begin_ns is 0.5; it must be a time in whole nanoseconds"),
        (lambda: arrow({"stage": [0], "name": ["a"], "begin_ns": [1], "energy": [None]}),
         ", row 1: energy is empty"),
        (lambda: arrow({"stage": [0], "name": ["a"], "begin_ns": [1], "energy": [NOW]}),
         ": the column energy is timestamp[us, tz=UTC]; it must be numbers"),
        (lambda: arrow({"stage": [0], "name": ["a"], "begin_ns": [1], "energy": [timedelta(1)]}),
         ": the column energy is duration[us]; it must be numbers"),
        (lambda: arrow({"stage": [0], "name": ["a"], "Name": ["b"], "begin_ns": [1],
                        "energy": [1.0]}),
         ": the column name is there twice"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_fault_is_one_sentence_with_its_place(tmp_path: Path, data: Content, says: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content(data))
    with pytest.raises(TableError) as raised:
        list(read(path, Row))
    assert str(raised.value).startswith(f"{path}{says}")
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_and_one_of_another_kind_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_text(PLAIN)
    for path, says in (
        (tmp_path / "no.csv", "no.csv cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "t.parquet", "t.parquet is not a Parquet file"),
    ):
        with pytest.raises(TableError, match=says):
            list(read(path, Row))


def test_without_pyarrow_parquet_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(in_parquet())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (lambda: list(read(path, Row)), lambda: write(path, kinds(Row), ROWS)):
        with pytest.raises(ImportError, match=r"pip install 'zeusd\[parquet\]'"):
            use()


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=(tmp_path / "pipe").write_text, args=(PLAIN,), daemon=True).start()
    assert [row for _, row in read(tmp_path / "pipe", Row)] == ROWS


def test_rows_that_are_wrong_as_a_whole_are_named(tmp_path: Path) -> None:
    @dataclass
    class Span:
        begin: int
        end: int

        def __post_init__(self) -> None:
            if self.end < self.begin:
                raise ValueError(f"end {self.end} is before begin {self.begin}")

    path = tmp_path / "t.csv"
    path.write_text("begin,stop\n1,2\n5,4\n")
    with pytest.raises(TableError, match=r"t\.csv, line 3: end 4 is before begin 5"):
        list(read(path, Span, {"stop": "end"}))
    with pytest.raises(TableError, match=r"the table, row 2: end is 'x'"):
        list(read({"begin": [1, 2], "end": [2, "x"]}, Span))


def test_many_rows_are_read_in_parts_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "".join(f"{n},a,{n},1\n" for n in range(50_000)) + "x,a,1,1\n")
    found = []
    with pytest.raises(TableError, match="line 50002: stage is 'x'"):
        for part in read_columns(path, Row):
            found += [part.columns["stage"][0], part.place(0)]
            assert gc.isenabled()
    assert found == [0, f"{path}, line 2", 20_000, f"{path}, line 20002"]
    stages = [*range(20_001), -1]
    many = dict.fromkeys(["name"], ["a"] * 20_002) | dict.fromkeys(["begin_ns", "energy"], stages)
    path.write_bytes(arrow({**many, "stage": stages, "energy": [*map(abs, stages)]}))
    with pytest.raises(TableError, match="row 20002: stage is -1"):
        list(read(path, Row))


def test_a_cell_that_may_be_empty_is_none_and_others_are_not() -> None:
    class Cells(NamedTuple):
        clock: int | None
        name: str | None
        text: str = "usual"

    columns = {
        "clock": [7, "", "nan", None],
        "name": ["a", "", "nan", None],
        "text": ["b", "", "c", None],
    }
    assert [row for _, row in read(columns, Cells)] == [
        (7, "a", "b"),
        (None, None, "usual"),
        (None, "nan", "c"),
        (None, None, "usual"),
    ]


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [(Amount, 0.0, 1e30), (Seconds, 0.0, 1e11), (Watts, 1.0, 20_000.0)],
)
def test_amounts_times_and_powers_have_bounds(kind: Any, least: float, most: float) -> None:
    row = make_dataclass("row", [("x", kind)])
    assert [one.x for _, one in read({"x": [least, most]}, row)] == [least, most]
    for beyond in (math.nextafter(least, -1), math.nextafter(most, math.inf)):
        with pytest.raises(TableError, match="row 1: x is "):
            list(read({"x": [beyond]}, row))


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "T.CSV.GZ", "t.csv.xz", "t.parquet"])
def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, kinds(Row), ROWS)
    assert [row for _, row in read(path, Row)] == ROWS
    before = path.read_bytes()
    assert before.startswith(b"\x1f\x8b") == name.lower().endswith(".gz")

    def torn() -> Any:
        yield ROWS[0]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        write(path, kinds(Row), torn())
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [name]
    write(path, kinds(Row), [])
    assert list(read(path, Row)) == []


def test_an_error_of_writing_has_the_files_name(tmp_path: Path) -> None:
    for path in (Path("/dev/full"), tmp_path / "no" / "t.csv"):
        with pytest.raises(OSError, match=path.name) as raised:
            write(path, kinds(Row), ROWS)
        assert raised.value.filename == str(path)
    os.mkfifo(tmp_path / "fifo.parquet")  # it would be replaced by a file
    with pytest.raises(TableError, match="is not a file; name one for Parquet, or write CSV"):
        write(tmp_path / "fifo.parquet", kinds(Row), ROWS)


def test_lines_of_json_are_read_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"stage": 1, "begin_ns": 2}\n\n{"name": "a"}\n{"sta')

    @dataclass
    class Named:
        name: str

    @dataclass
    class Staged:
        stage: int
        begin_ns: Nanoseconds

    found = list(read_lines(path, Named, Staged))
    assert found == [(f"{path}, line 1", Staged(1, 2)), (f"{path}, line 3", Named("a"))]
    for text, says in (
        ('{"sta\n{"name": "a"}', "line 1: this is not a line of JSON"),
        ('{"stage": 1}', "line 1: begin_ns is missing"),
        ('{"stage": 1.5, "begin_ns": 1}', "line 1: stage: .*, not 1.5"),
        ('{"name": NaN}\n', "line 1: name: .*, not nan"),
    ):
        path.write_text(text)
        with pytest.raises(TableError, match=says):
            list(read_lines(path, Named, Staged))


def test_files_that_would_be_overwritten_are_refused(tmp_path: Path) -> None:
    read_, written = tmp_path / "a.csv", tmp_path / "b.csv"
    read_.write_text("")
    (tmp_path / "link.csv").symlink_to(read_)
    os.link(read_, tmp_path / "hard.csv")
    for path in (read_, tmp_path / "link.csv", tmp_path / "hard.csv", tmp_path / "x/../a.csv"):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(TableError, match="is read by this command; name another file"):
            distinct([read_, None], [path])
    with pytest.raises(TableError, match=r"b\.csv is already written by this command"):
        distinct([read_], [written, tmp_path / "x/../b.csv"])
    distinct([read_, read_], [written, None, Path("/dev/null"), Path("/dev/null")])


def test_the_lines_of_our_own_tables_are_read_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "t.columns.csv"
    path.write_text("stage,0,1\ntime,1.5,2.5\n")
    assert list(rows(path)) == [("stage", "time"), ("0", "1.5"), ("1", "2.5")]
    assert list(records(path)) == [{"stage": "0", "time": "1.5"}, {"stage": "1", "time": "2.5"}]
    path.write_text("stage,0,1\ntime,1.5\n")
    with pytest.raises(TableError, match="is not a CSV file"):
        list(rows(path))

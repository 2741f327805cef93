"""Tables in files, and invalid tables."""

from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import pytest

from zeus_ipc.tables import TableError, records, rows

PLAIN = b"stage,time\r\n0,1.5\n1,2.5\n"
COLUMNS = b"stage,0,1\ntime,1.5,2.5\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", PLAIN),
        ("a.csv", b"\xef\xbb\xbf" + PLAIN + b"\n"),
        ("a.csv.gz", gzip.compress(PLAIN, mtime=0)),
        ("a.csv.xz", lzma.compress(PLAIN)),
        ("a.columns.csv", COLUMNS),
        ("a.columns.csv.xz", lzma.compress(COLUMNS)),
    ],
)
def test_a_table_is_the_same_however_it_is_stored(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert next(rows(path)) == ("stage", "time")
    found = list(records(path))
    assert found == [{"stage": "0", "time": "1.5"}, {"stage": "1", "time": "2.5"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"\xff\xfe"),
        ("a.csv.xz", b"garbage"),
        ("a.csv.gz", gzip.compress(PLAIN, mtime=0)[:-9]),
        ("a.columns.csv", b"stage,0,1\ntime,1.5\n"),
    ],
)
def test_an_invalid_table_is_reported(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TableError):
        list(rows(path))


def test_a_row_of_another_length_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("stage,time\n0\n")
    with pytest.raises(TableError, match=r"row 2 of a\.csv has 1 fields, and its header 2"):
        list(records(path))

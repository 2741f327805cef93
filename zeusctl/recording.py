"""Samples in files: written as they arrive, read back as a whole."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from zeus_common import tables
from zeus_common.atomic import replacing
from zeusctl.entities import RecordedSample
from zeusctl.exits import CommandError

COLUMNS = tables.kinds(RecordedSample)
"""Columns of a recording, and what they hold."""

Row = Mapping[str, Any]


class CsvWriter:
    """Rows as CSV, to a file or standard output."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] = sys.stdout if path is None else path.open("w", encoding="utf-8")
        self._own = path is not None
        self._csv = csv.DictWriter(self._file, COLUMNS, lineterminator="\n")
        self._csv.writeheader()

    def write(self, row: Row) -> None:
        """One row."""
        self._csv.writerow(row)

    def flush(self) -> None:
        """Makes what was written so far readable by others."""
        self._file.flush()

    def close(self) -> None:
        """Completes the file."""
        if self._own:
            self._file.close()  # even if writing the rest fails
        else:
            self.flush()


class ParquetWriter:
    """Rows as Parquet. The file appears under its name once it is complete: half of one is not
    readable.
    """

    def __init__(self, path: Path) -> None:
        pyarrow, parquet = tables.pyarrow()
        tables.needs_file(path)
        self._schema = tables.schema(COLUMNS)
        self._table = pyarrow.Table
        self._whole = ExitStack()
        aside = self._whole.enter_context(replacing(path))
        self._file = parquet.ParquetWriter(aside, self._schema, compression="zstd")
        self._rows: list[Row] = []

    def write(self, row: Row) -> None:
        """One row."""
        self._rows.append(row)
        if len(self._rows) >= 4096:
            self._write_rows()

    def flush(self) -> None:
        """Rows wait until there are enough of them."""

    def close(self) -> None:
        """Completes the file."""
        self._write_rows()
        self._file.close()
        self._whole.close()

    def _write_rows(self) -> None:
        if self._rows:
            self._file.write_table(self._table.from_pylist(self._rows, schema=self._schema))
            self._rows.clear()


Writer = CsvWriter | ParquetWriter


def writer_for(path: Path | None, form: str | None) -> Writer:
    """Returns the writer for a path, by its extension unless a format is given.

    Raises:
        CommandError: Parquet needs a file and pyarrow.
    """
    if form is None:
        form = "parquet" if path is not None and path.suffix == ".parquet" else "csv"
    if form == "csv":
        return CsvWriter(path)
    if path is None:
        raise CommandError("Parquet cannot go to standard output; name a file with -o")
    return ParquetWriter(path)


class Recording(NamedTuple):
    """The recording of one GPU: columns of equal length."""

    gpu: int
    columns: dict[str, list[float | None]]


def read(path: Path) -> list[Recording]:
    """Reads a recording, by GPU.

    Raises:
        CommandError: The file is not a zeusctl recording; the message names the wrong line.
    """
    by_gpu: dict[int, Recording] = {}
    numbers = [name for name, kind in COLUMNS.items() if kind is not str]
    try:
        for _, row in tables.read(path, RecordedSample):
            empty = Recording(row.gpu, {name: [] for name in numbers})
            for name, values in by_gpu.setdefault(row.gpu, empty).columns.items():
                values.append(getattr(row, name))
    except tables.TableError as error:
        raise CommandError(f"{path} is not a zeusctl recording: {error}") from None
    if not by_gpu:
        raise CommandError(f"{path} holds no samples; record for longer")
    return [by_gpu[gpu] for gpu in sorted(by_gpu)]

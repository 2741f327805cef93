"""Tables as Parquet, where pyarrow is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zeusctl.exits import CommandError


def load() -> tuple[Any, Any]:
    """Imports pyarrow and pyarrow.parquet.

    Raises:
        CommandError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CommandError(
            'Parquet needs pyarrow, which is not installed; pip install "zeusd[parquet]"'
        ) from None
    return pyarrow, pyarrow.parquet


def beside(path: Path) -> Path:
    """The name that a file has until it is complete.

    Raises:
        CommandError: Something else than a file has its name, such as /dev/null.
    """
    if path.exists() and not path.is_file():
        raise CommandError(f"{path} is not a file; name one for Parquet, or give --format csv")
    return path.with_name(f".{path.name}.{os.getpid()}")


def schema(kinds: Mapping[str, type]) -> Any:
    """The schema of columns of these kinds: int, float, str or bool."""
    pyarrow, _ = load()
    types = {
        int: pyarrow.int64(),
        float: pyarrow.float64(),
        str: pyarrow.string(),
        bool: pyarrow.bool_(),
    }
    return pyarrow.schema([(name, types[kind]) for name, kind in kinds.items()])


def write(path: Path, rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, type]) -> None:
    """Writes a table; the file appears under its name once it is complete.

    Args:
        path: The file.
        rows: By column; None: no value.
        kinds: The columns in their order; see `schema`.
    """
    pyarrow, parquet = load()
    aside = beside(path)
    table = pyarrow.Table.from_pylist([dict(row) for row in rows], schema=schema(kinds))
    try:
        parquet.write_table(table, aside, compression="zstd")
        aside.replace(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror or error}") from None


def read(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a table.

    Raises:
        ValueError: It is not a Parquet file, or lacks a column.
    """
    pyarrow, parquet = load()
    try:
        rows: list[dict[str, Any]] = parquet.read_table(path, columns=list(columns)).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from None
    return rows

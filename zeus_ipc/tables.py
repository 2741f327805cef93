"""Tables in CSV files, plain or compressed: those of users, and those of this package."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

_MODULES = {".gz": "gzip", ".xz": "lzma"}


class TableError(ValueError):
    """A file is not a table."""


def rows(path: str | os.PathLike[str]) -> Iterator[tuple[str, ...]]:
    """Reads the rows of a file, the header first. Its name says whether it is compressed (`.gz`,
    `.xz`) and has a column in each line (`.columns.csv`), which compresses better.

    Raises:
        OSError: It cannot be read.
        TableError: It is not such a file.
    """
    name = os.path.basename(os.fspath(path))
    module = _MODULES.get(name[-3:])
    # Imported on demand: some builds of Python lack lzma.
    library: Any = None if module is None else import_module(module)
    opened = open if library is None else library.open
    try:
        with opened(path, "rt", newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file)
            if ".columns." in name:
                yield from zip(*lines, strict=True)
            else:
                yield from map(tuple, lines)
    except (ValueError, csv.Error, EOFError, getattr(library, "LZMAError", ValueError)) as error:
        raise TableError(f"{name} is not a CSV file ({error})") from None


def records(path: str | os.PathLike[str]) -> Iterator[Mapping[str, str]]:
    """Reads the rows of a file by the names in its header, without empty lines.

    Raises:
        OSError: It cannot be read.
        TableError: It is not such a file, or a row has more or fewer fields than the header.
    """
    found = rows(path)
    names = next(found, ())
    for number, row in enumerate(found, start=2):
        if row and len(row) != len(names):
            raise TableError(
                f"row {number} of {os.path.basename(os.fspath(path))} has {len(row)} fields, and "
                f"its header {len(names)}"
            )
        if row:
            yield dict(zip(names, row, strict=True))

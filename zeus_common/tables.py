"""Tables in files: CSV, plain or compressed, and Parquet; the content says which.

A row is a dataclass or a NamedTuple: its fields are the columns, by name in any order and case, and
their types say what a cell may be. Fields with a default may be missing or empty.

    class Power(NamedTuple):
        power_limit: Annotated[int, Field(gt=0, description="a power limit in whole W")]
        average_power: Annotated[float, Field(gt=0)]

    for place, row in read("power.csv", Power): ...

An error is one sentence with the file, the line, the column and its value.
"""

from __future__ import annotations

import csv
import gc
import inspect
import io
import itertools
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import IO, Annotated, Any, NoReturn, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from zeus_common.atomic import replacing
from zeus_common.text import sentence

_CHUNK = 20_000
"""Rows that are read at a time."""

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "lzma"}
_KINDS = {"integer": int, "number": float, "boolean": bool}
_PARQUET = b"PAR1"
_ARCHIVE = b"PK\x03\x04"

_EMPTY = frozenset({"", "nan", "NaN", "NAN", "null", "None", None})
"""An empty number: several programs write NaN for that."""

Text = Annotated[str, Field(min_length=1, description="text")]
Amount = Annotated[float, Field(ge=0, le=1e30, description="a number from 0 to 1e+30")]
"""Squares and products of amounts are finite."""
Seconds = Annotated[float, Field(ge=0, le=1e11, description="a time in s since 1970")]
"""Milliseconds since 1970 are more."""
Nanoseconds = Annotated[
    int, Field(gt=-(2**62), lt=2**62, description="a time in whole nanoseconds")
]
"""Differences of two fit into 64 bits."""
Watts = Annotated[float, Field(ge=1, le=20_000, description="a power in W, from 1 to 20000")]
"""What a GPU may draw; outside, the unit is wrong."""

Row = TypeVar("Row")
PathLike = str | os.PathLike[str]
Source = PathLike | Mapping[str, Sequence[Any]]
"""A file, or columns in memory."""


class TableError(ValueError):
    """A file is not the table that it should be."""


@dataclass(frozen=True)
class TablePart:
    """Some rows of a table.

    Attributes:
        path: The file.
        word: What messages call a row: `line`, or `row` in Parquet.
        lines: Where each row is, from 1.
        columns: Cells by column.
    """

    path: Path
    word: str
    lines: Sequence[int]
    columns: Mapping[str, Any]

    def place(self, n: int) -> str:
        """Where a row is."""
        return f"{self.path}, {self.word} {self.lines[n]}"

    def wrong(self, n: int, what: str) -> NoReturn:
        """Raises a TableError about a row."""
        raise TableError(f"{self.place(n)}: {what}")


def read(
    source: Source, row: Callable[..., Row], aliases: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Row]]:
    """Reads a table's rows, each with its place for messages, such as `power.csv, line 7`.

    Args:
        source: The table.
        row: Kind of the rows; it may raise ValueError.
        aliases: Other names of columns.

    Raises:
        TableError: It cannot be read, or a cell is wrong.
        ImportError: Parquet needs pyarrow.
    """
    for part in read_columns(source, row, aliases):
        names = tuple(part.columns)
        for n, cells in enumerate(zip(*part.columns.values(), strict=True)):
            try:
                typed = row(**dict(zip(names, cells, strict=True)))
            except ValueError as error:
                part.wrong(n, str(error))
            yield part.place(n), typed


def read_columns(
    source: Source, row: Callable[..., Any], aliases: Mapping[str, str] | None = None
) -> Iterator[TablePart]:
    """Reads a table by columns, some rows at a time; see `read`."""
    fields = _fields(row)
    for part in _parts(source, fields, aliases or {}):
        columns, faults = {}, []
        for name, cells in part.columns.items():
            try:
                columns[name] = fields[name].checked(cells)
            except ValidationError as error:
                faults.append((int(error.errors()[0]["loc"][0]), name))
        if faults:
            n, name = min(faults, key=lambda fault: fault[0])
            part.wrong(n, fields[name].fault(part.columns[name][n]))
        yield replace(part, columns=columns)


def read_lines(path: PathLike, *kinds: Any) -> Iterator[tuple[str, Any]]:
    """Reads JSON lines, each with its place. A last line without its end is left out: its writer
    was stopped, or is writing it.

    Args:
        path: The file.
        kinds: Kinds of lines: the first whose first field is there, else the last.

    Raises:
        TableError: It cannot be read, or a line is of no such kind.
    """
    path = Path(path)
    adapters = [
        (next(iter(inspect.signature(kind).parameters)), TypeAdapter(kind)) for kind in kinds
    ]
    with _reading(path) as file:
        for number, line in enumerate(_text(path, file), 1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            adapter = next((one for name, one in adapters if f'"{name}":' in line), adapters[-1][1])
            try:
                yield place, adapter.validate_json(line)
            except ValidationError as error:
                if error.errors()[0]["type"] != "json_invalid":
                    raise TableError(f"{place}: {sentence(error)}") from None
                if line.endswith("\n"):
                    raise TableError(f"{place}: this is not a line of JSON") from None


def rows(path: PathLike) -> Iterator[tuple[str, ...]]:
    """Reads the lines of a CSV file as they are, the header first, if it has one. A file named
    `.columns.csv` has a column in each line, which compresses better.

    Raises:
        TableError: It cannot be read, or is not such a file.
    """
    with _reading(Path(path)) as file:
        lines = csv.reader(_text(Path(path), file))
        if ".columns." in os.path.basename(path):
            yield from zip(*lines, strict=True)
        else:
            yield from map(tuple, lines)


def records(path: PathLike) -> Iterator[Mapping[str, str]]:
    """Reads the rows of this project's own tables by the names in their headers."""
    names, *lines = rows(path)
    return (dict(zip(names, row, strict=True)) for row in lines)


def kinds(row: Callable[..., Any]) -> dict[str, type]:
    """The columns of a kind of rows, for `write`."""
    return {name: field.kind for name, field in _fields(row).items()}


def write(
    path: Path,
    kinds: Mapping[str, type],
    rows: Iterable[Sequence[Any]],
    *,
    is_parquet: bool | None = None,
) -> None:
    """Writes a table: Parquet if the path ends with `.parquet`, else CSV, compressed if it ends
    with `.gz` or `.xz`. The file appears under its name once it is complete.

    Args:
        path: The file.
        kinds: The columns, and whether they are int, float, str or bool.
        rows: The rows; None: no value.
        is_parquet: Whether it is Parquet, whatever its name.

    Raises:
        OSError: It cannot be written.
        ImportError: Parquet needs pyarrow.
    """
    if is_parquet is None:
        is_parquet = path.suffix.lower() in (".parquet", ".pq")
    if is_parquet:
        needs_file(path)
    with replacing(path) as aside:
        if is_parquet:
            arrow, parquet = pyarrow()
            columns = [*zip(*rows, strict=True)] or [()] * len(kinds)
            arrays = [
                arrow.array(column, kind.type)
                for column, kind in zip(columns, schema(kinds), strict=True)
            ]
            parquet.write_table(
                arrow.Table.from_arrays(arrays, schema=schema(kinds)), aside, compression="zstd"
            )
            return
        module = {".gz": "gzip", ".xz": "lzma"}.get(path.suffix.lower())
        opened: Any = open if module is None else import_module(module).open
        with opened(aside, "wt", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(kinds)
            table.writerows(rows)


def needs_file(path: Path) -> None:
    """Raises TableError if Parquet cannot be written there, as to a pipe."""
    if path.exists() and not path.is_file():
        raise TableError(f"{path} is not a file; name one for Parquet, or write CSV")


def distinct(reads: Iterable[Path | None], writes: Iterable[Path | None]) -> None:
    """Checks, before anything is written, that a command writes no file twice and none that it
    reads.

    Raises:
        TableError: It would.
    """
    taken = {_identity(path): "is read" for path in reads if path is not None}
    for path in writes:
        if path is None or (path.exists() and not path.is_file()):  # such as /dev/null
            continue
        use = taken.setdefault(_identity(path), "")
        if use:
            raise TableError(f"{path} {use} by this command; name another file to write")
        taken[_identity(path)] = "is already written"


def _identity(path: Path) -> object:
    try:
        status = path.stat()
    except OSError:
        return path.resolve()
    return status.st_dev, status.st_ino


def pyarrow() -> tuple[Any, Any]:
    """Imports pyarrow and pyarrow.parquet.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError("Parquet needs pyarrow: pip install 'zeusd[parquet]'") from None


def schema(kinds: Mapping[str, type]) -> Any:
    """The schema of a Parquet file with these columns; see `write`."""
    arrow, _ = pyarrow()
    types = {int: "int64", float: "float64", str: "string", bool: "bool_"}
    return arrow.schema([(name, getattr(arrow, types[kind])()) for name, kind in kinds.items()])


# ---------------------------------------------------------------------------------------- internals


@dataclass(frozen=True)
class _Column:
    """A field of a row, as a column."""

    name: str
    adapter: TypeAdapter[list[Any]]
    wanted: str
    kind: type
    may_be_empty: bool
    default: Any

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def checked(self, cells: Sequence[Any]) -> list[Any]:
        if self.kind in (int, float) and "_" in "".join(c for c in cells if isinstance(c, str)):
            cells = [str(c).replace("_", "?") for c in cells]  # pydantic reads 1_0 as 10
        if self.may_be_empty:
            empty, default = _EMPTY if self.kind in (int, float) else ("", None), self.default
            default = None if self.required else default
            cells = [default if c in empty or c != c else c for c in cells]
        return self.adapter.validate_python(cells)

    def fault(self, value: Any) -> str:
        if value in ("", None):
            return f"{self.name} is empty; it must be {self.wanted}"
        said = f"{self.name} is {value!r:.60}; it must be {self.wanted}"
        if isinstance(value, str) and re.fullmatch(r"\s*-?[\d.]*,\d+\s*", value):
            said += ", with a decimal point and no comma"
        return said


@lru_cache(maxsize=64)
def _fields(row: Callable[..., Any]) -> dict[str, _Column]:
    hints = get_type_hints(row, include_extras=True)
    columns = {}
    config = ConfigDict(coerce_numbers_to_str=True, str_strip_whitespace=True, allow_inf_nan=False)
    for name, parameter in inspect.signature(row).parameters.items():
        hint = hints[name]
        known: dict[str, Any] = TypeAdapter(hint, config=config).json_schema()
        kinds = known.get("anyOf", [known])
        types = [kind.get("type", "") for kind in kinds]
        columns[name] = _Column(
            name,
            TypeAdapter(list[hint], config=config),  # type: ignore[valid-type]  # made at run time
            _in_words({**kinds[0], **known}),
            str if "string" in types else _KINDS.get(types[0], str),
            "null" in types or parameter.default is not inspect.Parameter.empty,
            parameter.default,
        )
    return columns


def _in_words(known: Mapping[str, Any]) -> str:
    """What a JSON schema of a cell allows."""
    if "description" in known:
        return str(known["description"])
    if "enum" in known:
        return " or ".join(map(str, known["enum"]))
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "True or False"}
    bounds = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{word} {known[key]:g}" for key, word in bounds.items() if key in known]
    return " ".join([kinds.get(known.get("type", ""), "text"), " and ".join(limits)]).strip()


def _parts(
    source: Source, fields: Mapping[str, _Column], aliases: Mapping[str, str]
) -> Iterator[TablePart]:
    if isinstance(source, Mapping):
        yield _of_columns(Path("the table"), source, fields, aliases)
        return
    path = Path(source)
    with _reading(path) as file:
        if file.peek(4)[:4] == _PARQUET:
            yield from _parquet(path, file, fields, aliases)
        elif path.suffix.lower() in (".parquet", ".pq"):
            raise TableError(f"{path} is not a Parquet file")
        elif ".columns." in path.name:
            columns = {name: cells for name, *cells in csv.reader(_text(path, file))}
            yield _of_columns(path, columns, fields, aliases)
        else:
            yield from _csv(path, file, fields, aliases)


def _of_columns(
    path: Path,
    columns: Mapping[str, Sequence[Any]],
    fields: Mapping[str, _Column],
    aliases: Mapping[str, str],
) -> TablePart:
    chosen = _chosen(str(path), list(columns), fields, aliases)
    cells = list(columns.values())
    typed = {name: cells[at] for name, at in chosen.items()}
    return TablePart(path, "row", range(1, 1 + len(cells[0])), typed)


def _parquet(
    path: Path,
    binary: IO[bytes],
    fields: Mapping[str, _Column],
    aliases: Mapping[str, str],
) -> Iterator[TablePart]:
    arrow, parquet = pyarrow()
    try:
        with parquet.ParquetFile(binary) as file:
            header = list(file.schema_arrow.names)
            chosen = _chosen(str(path), header, fields, aliases)
            base = 1
            for batch in file.iter_batches(_CHUNK, columns=[header[n] for n in chosen.values()]):
                columns = {
                    name: _cells(arrow, path, name, batch.column(header[n]))
                    for name, n in chosen.items()
                }
                if batch.num_rows:
                    yield TablePart(path, "row", range(base, base + batch.num_rows), columns)
                base += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        said = str(error).strip().partition("\n")[0]
        raise TableError(f"{path} is not a whole Parquet file ({said})") from None


def _cells(arrow: Any, path: Path, name: str, column: Any) -> list[Any]:
    kind = column.type
    if arrow.types.is_timestamp(kind) or arrow.types.is_duration(kind):
        if not name.endswith("_ns"):
            raise TableError(f"{path}: the column {name} is {kind}; it must be numbers")
        ns = (
            arrow.duration("ns")
            if arrow.types.is_duration(kind)
            else arrow.timestamp("ns", kind.tz)
        )
        column = column.cast(ns).cast(arrow.int64())
    cells: list[Any] = column.to_pylist()
    return cells


def _csv(
    path: Path,
    binary: io.BufferedReader,
    fields: Mapping[str, _Column],
    aliases: Mapping[str, str],
) -> Iterator[TablePart]:
    reader = csv.reader(_text(path, binary), skipinitialspace=True)
    header = next(reader, [])
    chosen = _chosen(f"{path}, line 1", header, fields, aliases)
    width = len(header)
    base = 1 + reader.line_num
    while batch := _taken(path, reader):
        lines: Sequence[int] = range(base, base + len(batch))
        if lines[-1] != reader.line_num:  # quoted fields have newlines
            counts = (1 + sum(cell.count("\n") for cell in row) for row in batch[:-1])
            lines = [*itertools.accumulate(counts, initial=base)]
        base = 1 + reader.line_num
        if not all(map(any, batch)):  # blank lines, also those of spreadsheets
            lines = [line for line, row in zip(lines, batch, strict=True) if any(row)]
            batch = [row for row in batch if any(row)]
        part = TablePart(path, "line", lines, {})
        if set(map(len, batch)) - {width}:
            _miscounted(part, batch, width)
        turned = list(zip(*batch, strict=True))
        if turned:
            yield replace(part, columns={name: turned[at] for name, at in chosen.items()})


def _miscounted(part: TablePart, batch: Sequence[Sequence[str]], width: int) -> NoReturn:
    n = next(n for n, row in enumerate(batch) if len(row) != width)
    count = len(batch[n])
    commas = "; are there decimal commas? Write 1.5" if count > width else ""
    part.wrong(n, f"it has {count} field{'s'[: count != 1]}, the header has {width}{commas}")


def _taken(path: Path, reader: Any) -> list[list[str]]:
    """Some rows, with the garbage collector off, which halves the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(itertools.islice(reader, _CHUNK))
    except csv.Error as error:
        raise TableError(f"{path}, line {reader.line_num}: {error}") from None
    finally:
        if collects:
            gc.enable()


def _chosen(
    place: str, header: Sequence[str], fields: Mapping[str, _Column], aliases: Mapping[str, str]
) -> dict[str, int]:
    """The positions of the columns that are there."""
    by_case = {name.lower(): name for name in fields}
    positions: dict[str, int] = {}
    for position, given in enumerate(header):
        name = given.strip().lower()
        name = by_case.get(aliases.get(name, name), "")
        if name and positions.setdefault(name, position) != position:
            raise TableError(f"{place}: the column {name} is there twice; leave one of them out")
    missing = [name for name, field in fields.items() if field.required and name not in positions]
    if not missing:
        return positions
    for character, name in ((";", "semicolons"), ("\t", "tabs")):
        if character in "".join(header):
            raise TableError(
                f"{place}: columns are separated by {name}; separate them by commas, and write "
                "decimal points"
            )
    what = f"column {missing[0]} is" if len(missing) == 1 else f"columns {', '.join(missing)} are"
    needed = ",".join(name for name, field in fields.items() if field.required)
    raise TableError(f"{place}: the {what} missing; the table needs {needed}")


@contextmanager
def _reading(path: Path) -> Iterator[io.BufferedReader]:
    """Opens a file; converts errors of reading it."""
    try:
        with path.open("rb") as file:
            yield file
    except UnicodeDecodeError:
        raise TableError(f"{path}, line {_undecodable(path)}: it is not text in UTF-8") from None
    except OSError as error:
        raise TableError(f"{path} cannot be read: {error.strerror or error}") from None
    except TableError:
        raise
    except _not_whole() as error:
        raise TableError(f"{path} is not a CSV file, or not whole ({error})") from None


def _not_whole() -> tuple[type[Exception], ...]:
    """Errors of reading a truncated or other file; some are of modules imported on demand."""
    errors: list[type[Exception]] = [csv.Error, EOFError, ValueError, zlib.error]
    for module, name in (("lzma", "LZMAError"), ("tarfile", "TarError")):
        if module in sys.modules:
            errors.append(getattr(sys.modules[module], name))
    return tuple(errors)


def _text(path: Path, file: io.BufferedReader) -> IO[str]:
    if path.name.endswith((".tar.gz", ".tgz")):
        return io.TextIOWrapper(_of_archive(path, file), encoding="utf-8-sig", newline="")
    head = file.peek(6)[:6]
    if head.startswith(_ARCHIVE):
        raise TableError(f"{path} is a workbook or an archive; save its table as CSV")
    return io.TextIOWrapper(_plain(file, head), encoding="utf-8-sig", newline="")


def _of_archive(path: Path, file: io.BufferedReader) -> IO[bytes]:
    """The first CSV file in an archive."""
    archive = import_module("tarfile").open(fileobj=file)
    for member in archive:
        content: IO[bytes] | None = archive.extractfile(member)
        if content is not None and member.name.endswith(".csv"):
            return content
    raise TableError(f"there is no CSV file in {path}")


def _plain(file: io.BufferedReader, head: bytes) -> Any:
    """The file without its compression."""
    for magic, module in _COMPRESSED.items():
        if head.startswith(magic):
            return import_module(module).open(file)  # on demand: some builds of Python lack lzma
    return file


def _undecodable(path: Path) -> int:
    """The first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(_plain(file, file.peek(6)), 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1  # the file has changed meanwhile

"""Reads steps, updates and tenants from files, and reports errors in one sentence."""

from __future__ import annotations

import csv
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from zeus.serving.columns import Floats, Ints, StepColumns, Updates, by_end
from zeus.utils.lazy import needed

STEP_COLUMNS = ("step", "begin_ns", "end_ns", "request", "phase", "tokens", "context")
WORK_COLUMNS = ("flops", "bytes")
ENERGY_COLUMNS = ("begin_ns", "end_ns", "joules", "seen_begin_ns", "seen_end_ns", "clock_mhz")
TENANT_COLUMNS = ("request", "tenant")

_CHUNK = 20_000
"""Rows that are read at a time."""

_MOST_NS = 2**62
"""Largest absolute time: differences of two fit into 64 bits."""
_MOST = 1e30
"""Largest amount: squares and products of amounts are finite."""

Columns = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Where:
    """A place in a file, for messages."""

    path: Path
    line: int
    word: str

    def wrong(self, what: str) -> NoReturn:
        """Raises a `ValueError` that names the place."""
        raise ValueError(f"{self.path}, {self.word} {self.line}: {what}")


@dataclass(frozen=True)
class Rows:
    """The rows of a part of a file, for messages."""

    path: Path
    lines: Sequence[int]
    word: str

    def __call__(self, n: int) -> Where:
        """The place of the row at a position."""
        return Where(self.path, self.lines[n], self.word)


def read_steps(path: Path) -> tuple[StepColumns, list[str]]:
    """Reads steps, one row per request and step.

    Returns:
        The steps in the order of their ends, and the names of the requests in the order in which
        the file has them.

    Raises:
        ValueError: The file, or a row of it, is wrong; the message names file, line and fault.
    """
    names: dict[str, int] = {}
    labels: dict[str, int] = {}
    parts: list[tuple[Ints, Ints, Ints, Ints, Any, Floats, Floats, Floats, Floats, Ints]] = []
    work = False
    for columns, place in _chunks(path, STEP_COLUMNS, WORK_COLUMNS):
        work = all(name in columns for name in WORK_COLUMNS)
        step = _numbered(columns["step"], labels, "step", place)
        request = _numbered(columns["request"], names, "request", place)
        begin = _instants(columns["begin_ns"], "begin_ns", place)
        end = _instants(columns["end_ns"], "end_ns", place)
        _each(begin <= end, place, lambda n: f"begin_ns {begin[n]} is after end_ns {end[n]}")  # noqa: B023 - called at once
        phase = columns["phase"]
        phases = np.array([str(one) for one in phase])
        prefill, decode = phases == "prefill", phases == "decode"
        _each(
            prefill | decode,
            place,
            lambda n: f"phase is {phase[n]!r}; it must be prefill or decode",  # noqa: B023 - called at once
        )
        tokens = _amounts(columns["tokens"], "tokens", place)
        context = _amounts(columns["context"], "context", place)
        flops = _amounts(columns["flops"], "flops", place) if work else tokens
        moved = _amounts(columns["bytes"], "bytes", place) if work else tokens
        line = np.array(place.lines, np.int64)
        parts.append((step, begin, end, request, prefill, tokens, context, flops, moved, line))
    if not parts:
        none, zero = np.zeros(0, np.int64), np.zeros(0)
        one = np.zeros(1, np.int64)
        return StepColumns(none, none, one, none, np.zeros(0, bool), zero, zero), []
    whole = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
    step, begin, end, request, prefill, tokens, context, flops, moved, line = whole
    order = np.lexsort((request, step))
    _consistent(
        path, step[order], request[order], begin[order], end[order], line[order], list(names)
    )
    in_steps = np.argsort(step, kind="stable")
    first = np.searchsorted(step[in_steps], np.arange(len(labels) + 1))
    heads = in_steps[first[:-1]]
    steps = StepColumns(
        begin[heads],
        end[heads],
        first.astype(np.int64),
        request[in_steps],
        prefill[in_steps],
        tokens[in_steps],
        context[in_steps],
        flops[in_steps] if work else None,
        moved[in_steps] if work else None,
    )
    return by_end(steps), list(names)


def read_updates(path: Path) -> Updates:
    """Reads a sensor's updates, in any order.

    Raises:
        ValueError: The file, or a row of it, is wrong; the message names file, line and fault.
    """
    parts: list[tuple[Ints, Ints, Floats, Ints, Ints, Floats, Ints]] = []
    for columns, place in _chunks(path, ENERGY_COLUMNS):
        begin = _instants(columns["begin_ns"], "begin_ns", place)
        end = _instants(columns["end_ns"], "end_ns", place)
        _each(begin < end, place, lambda n: f"begin_ns {begin[n]} is not before end_ns {end[n]}")  # noqa: B023 - called at once
        joules = _amounts(columns["joules"], "joules", place)
        first = _seen(columns["seen_begin_ns"], begin, "seen_begin_ns", place)
        last = _seen(columns["seen_end_ns"], end, "seen_end_ns", place)
        _each(
            (begin <= first) & (first < last) & (last <= end),
            place,
            lambda n: f"the seen part {first[n]} to {last[n]} is not within the update",  # noqa: B023 - called at once
        )
        clock = _amounts(columns["clock_mhz"], "clock_mhz", place, empty=True)
        line = np.array(place.lines, np.int64)
        parts.append((begin, end, joules, first, last, clock, line))
    if not parts:
        none, zero = np.zeros(0, np.int64), np.zeros(0)
        return Updates(none, none, zero, none, none, zero)
    whole = tuple(np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.argsort(whole[0], kind="stable")
    begin, end, joules, first, last, clock, line = (part[order] for part in whole)
    over = np.flatnonzero(begin[1:] < end[:-1])
    if over.size:
        one = int(over[0])
        later, earlier = max(line[one], line[one + 1]), min(line[one], line[one + 1])
        Where(path, int(later), _word(path)).wrong(
            f"the update overlaps the one of {_word(path)} {earlier}"
        )
    return Updates(begin, end, joules, first, last, clock)


def read_tenants(path: Path) -> dict[str, str]:
    """Reads the tenant of each request.

    Raises:
        ValueError: The file, or a row of it, is wrong; the message names file, line and fault.
    """
    found: dict[str, str] = {}
    for columns, place in _chunks(path, TENANT_COLUMNS):
        for n, (request, tenant) in enumerate(
            zip(columns["request"], columns["tenant"], strict=True)
        ):
            if request in (None, "") or tenant in (None, ""):
                place(n).wrong("request or tenant is empty")
            if found.setdefault(str(request), str(tenant)) != str(tenant):
                place(n).wrong(f"request {request!r} has two tenants")
    return found


# ---------------------------------------------------------------------------------------- internals


def _word(path: Path) -> str:
    return "row" if path.suffix == ".parquet" else "line"


def _chunks(
    path: Path, names: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[Columns, Rows]]:
    """Yields columns of one part of a file at a time, and the places of its rows."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path, names, optional)
        else:
            yield from _csv(path, names, optional)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        Where(path, _undecodable(path), "line").wrong("it is not text in UTF-8")


def _undecodable(path: Path) -> int:
    """The first line that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1  # the file has changed meanwhile


def _csv(
    path: Path, names: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[Columns, Rows]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        header = [one.strip() for one in next(reader, [])]
        _has(path, header, names)
        chosen = [(name, header.index(name)) for name in (*names, *optional) if name in header]
        width = len(header)
        base = 1 + reader.line_num
        while rows := _taken(path, reader):
            lines: Sequence[int] = range(base, base + len(rows))
            if lines[-1] != reader.line_num:  # quoted fields have newlines
                counts = (1 + sum(cell.count("\n") for cell in row) for row in rows[:-1])
                lines = [*itertools.accumulate(counts, initial=base)]
            base = 1 + reader.line_num
            if [] in rows:  # blank lines
                lines = [line for line, row in zip(lines, rows, strict=True) if row]
                rows = [row for row in rows if row]
                if not rows:
                    continue
            place = Rows(path, lines, "line")
            if set(map(len, rows)) != {width}:
                n = next(n for n, row in enumerate(rows) if len(row) != width)
                fields = "1 field" if len(rows[n]) == 1 else f"{len(rows[n])} fields"
                place(n).wrong(f"it has {fields}, the header has {width}")
            turned = list(zip(*rows, strict=True))
            yield {name: turned[position] for name, position in chosen}, place


def _taken(path: Path, reader: Any) -> list[list[str]]:
    """Yields rows with the garbage collector off, which halves the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(itertools.islice(reader, _CHUNK))
    except csv.Error as error:
        Where(path, reader.line_num, "line").wrong(str(error))
    finally:
        if collects:
            gc.enable()


def _parquet(
    path: Path, names: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[Columns, Rows]]:
    parquet = needed("pyarrow.parquet", "Parquet", "parquet")
    arrow = needed("pyarrow", "Parquet", "parquet")
    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    with file:
        header = list(file.schema_arrow.names)
        _has(path, header, names)
        chosen = [name for name in (*names, *optional) if name in header]
        base = 1
        for batch in file.iter_batches(_CHUNK, columns=chosen):
            columns = {name: batch.column(name).to_pylist() for name in chosen}
            yield columns, Rows(path, range(base, base + batch.num_rows), "row")
            base += batch.num_rows


def _has(path: Path, header: Sequence[str], names: Sequence[str]) -> None:
    missing = [name for name in names if name not in header]
    if missing:
        what = (
            f"column {missing[0]} is" if len(missing) == 1 else f"columns {', '.join(missing)} are"
        )
        Where(path, 1, "line").wrong(f"the {what} missing; the header must be {','.join(names)}")


def _each(good: Any, place: Callable[[int], Where], say: Callable[[int], str]) -> None:
    if not good.all():
        n = int(np.argmin(good))
        place(n).wrong(say(n))


def _numbered(
    values: Sequence[Any], known: dict[str, int], name: str, place: Callable[[int], Where]
) -> Ints:
    """Numbers for a column's names, in the order of first appearance."""
    if not (values and isinstance(values[0], str)):
        values = ["" if _empty(value) else str(value) for value in values]
    if "" in values:
        n = values.index("")
        place(n).wrong(f"{name} is empty")
    add, size = known.setdefault, known.__len__
    return np.array([add(value, size()) for value in values], np.int64)


def _instants(values: Sequence[Any], name: str, place: Callable[[int], Where]) -> Ints:
    try:
        found = np.fromiter(map(int, values), np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.array([_instant(value, name, place, n) for n, value in enumerate(values)])
    good = (found > -_MOST_NS) & (found < _MOST_NS)
    _each(good, place, lambda n: _no_instant(values[n], name))
    return found


def _no_instant(value: Any, name: str) -> str:
    return f"{name} is {value!r}; it must be a time in whole nanoseconds"


def _empty(value: Any) -> bool:
    """Whether a field is empty; several programs write NaN for that."""
    return value in ("", None, "nan", "NaN") or value != value


def _instant(value: Any, name: str, place: Callable[[int], Where], n: int) -> int:
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        try:
            found = int(float(value))
        except (TypeError, ValueError, OverflowError):
            place(n).wrong(_no_instant(value, name))
    if abs(found) >= _MOST_NS:
        place(n).wrong(_no_instant(value, name))
    return found


def _seen(values: Sequence[Any], whole: Ints, name: str, place: Callable[[int], Where]) -> Ints:
    if not any(map(_empty, values)):
        return _instants(values, name, place)
    return np.array(
        [
            int(whole[n]) if _empty(value) else _instant(value, name, place, n)
            for n, value in enumerate(values)
        ],
        np.int64,
    )


def _amounts(
    values: Sequence[Any], name: str, place: Callable[[int], Where], *, empty: bool = False
) -> Floats:
    """Numbers of at least 0; with `empty`, NaN for an empty field."""
    try:
        found = np.fromiter(map(float, values), np.float64, len(values))
    except (TypeError, ValueError):
        found = np.array([_amount(value, name, place, n, empty) for n, value in enumerate(values)])
    good = (found >= 0) & (found <= _MOST)
    if empty:
        good |= np.isnan(found)
    _each(good, place, lambda n: f"{name} is {values[n]}; it must be a number from 0 to {_MOST:g}")
    return found


def _amount(value: Any, name: str, place: Callable[[int], Where], n: int, empty: bool) -> float:
    if empty and value in ("", None):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        place(n).wrong(f"{name} is {value!r}; it must be a number from 0 to {_MOST:g}")


def _consistent(
    path: Path, step: Ints, request: Ints, begin: Ints, end: Ints, line: Ints, names: list[str]
) -> None:
    """Checks that rows of one step agree on its instants and name each request once."""
    same = step[1:] == step[:-1]
    twice = np.flatnonzero(same & (request[1:] == request[:-1]))
    if twice.size:
        n = int(twice[0]) + 1
        Where(path, int(max(line[n - 1 : n + 1])), _word(path)).wrong(
            f"request {names[request[n]]!r} is in this step twice"
        )
    apart = np.flatnonzero(same & ((begin[1:] != begin[:-1]) | (end[1:] != end[:-1])))
    if apart.size:
        n = int(apart[0]) + 1
        Where(path, int(max(line[n - 1 : n + 1])), _word(path)).wrong(
            "begin_ns or end_ns is not that of another row of the same step"
        )

"""Columns of GPUs, leases and the like, each declared once: for tables, `--columns`, CSV and JSON's
rows.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import click

from zeus_ipc.options import Number
from zeusctl.text import energy, memory, number, table

if TYPE_CHECKING:
    from zeusctl.reports import Report

_UNITS: dict[str, Callable[[Any], str]] = {
    "w": number,
    "mhz": number,
    "percent": lambda value: number(value, "%"),
    "c": lambda value: number(value, "C"),
    "mib": memory,
    "j": energy,
}
"""Formats by the unit at the end of a name."""

E = TypeVar("E")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Column(Generic[E]):
    """One column.

    Attributes:
        name: In `--columns` and CSV, with its unit; empty: only in the table.
        heading: In the table; empty: only by name.
        text: Its text in the table; None: that of the value, in the unit of the name.
        get: Its value; None: the attribute of that name.
        spare: Which columns a narrow terminal drops first: the highest; 0: none.
    """

    name: str = ""
    heading: str = ""
    text: Callable[[E], str] | None = None
    get: Callable[[E], Any] | None = None
    spare: int = 0
    number: bool = False

    @property
    def right(self) -> bool:
        """Whether the table aligns it to the right."""
        return self.number or self._unit in _UNITS

    @property
    def _unit(self) -> str:
        return self.name.rpartition("_")[2]

    def value(self, item: E) -> Any:
        """Its value for an item: a number, text, list of them, or None."""
        return (self.get or attrgetter(self.name))(item)

    def cell(self, item: E) -> str:
        """Its text in the table."""
        if self.text is not None:
            return self.text(item)
        value = self.value(item)
        if isinstance(value, (list, tuple)):
            return ", ".join(map(str, value))
        return "-" if value is None else _UNITS.get(self._unit, _text)(value)


Columns = Sequence[Column[E]]


def plain(*names: str) -> Iterable[Column[Any]]:
    """Columns that no table has, named like attributes."""
    return map(Column, names)


def lines(columns: Columns[E], items: Iterable[E], width: int | None = None) -> list[str]:
    """A table of items."""
    there = with_headings(columns)
    return table(
        [one.heading for one in there],
        [[one.cell(item) for one in there] for item in items],
        [place for place, one in enumerate(there) if one.right],
        spare(there),
        width,
    )


def with_headings(columns: Columns[E]) -> list[Column[E]]:
    """The columns of the table."""
    return [one for one in columns if one.heading]


def spare(columns: Columns[E]) -> list[int]:
    """Positions of the columns that a narrow terminal drops, the first one first."""
    order = sorted(range(len(columns)), key=lambda place: -columns[place].spare)
    return [place for place in order if columns[place].spare]


def output_options(columns: Columns[Any]) -> Callable[[F], F]:
    """Adds `--columns`, `--format` and `--watch`; the verb passes them to `Output`."""
    known = [one.name for one in columns if one.name]

    def chosen(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return ()
        names = [one.strip() for one in text.split(",") if one.strip()]
        unknown = [one for one in names if one not in known]
        if unknown or not names:
            what = f"there is no column {unknown[0]!r}" if unknown else "no column is named"
            raise click.UsageError(f"{what}; there are: {', '.join(known)}")
        return tuple(names)

    def add(function: F) -> F:
        function = click.option(
            "--watch",
            metavar="SECONDS",
            type=Number(0.1, 86_400),
            help="Repeat after this many seconds, until Ctrl-C.",
        )(function)
        function = click.option(
            "--format",
            "form",
            type=click.Choice(["table", "csv", "json"]),
            help="Print a table, CSV or JSON.  [default: table]",
        )(function)
        return click.option(
            "--columns",
            callback=chosen,
            metavar="NAME,...",
            help=f"Print these columns: {', '.join(known)}.",
        )(function)

    return add


class Output(Generic[E]):
    """Prints a verb's result, once or repeatedly."""

    def __init__(
        self,
        json_wanted: bool,
        names: Sequence[str],
        form: str | None,
        watch_s: float | None,
        columns: Columns[E],
    ) -> None:
        if json_wanted and form in ("table", "csv"):
            raise click.UsageError(f"--json and --format {form} contradict each other; give one")
        self._json = json_wanted or form == "json"
        self._form = form
        self._rows = bool(names) or form == "csv"
        known = {one.name: one for one in columns if one.name}
        self._columns = [known[name] for name in names or known]
        self._watch_s = watch_s

    def run(
        self,
        look: Callable[[], Report],
        text: Callable[[Any], Iterable[str]],
        items: Callable[[Any], Iterable[E]],
    ) -> None:
        """Gets and prints the report."""
        first = True
        while True:
            report = look()
            for line in self._lines(report, text, items, first):
                click.echo(line)
            sys.stdout.flush()
            if self._watch_s is None:
                return
            first = False
            time.sleep(self._watch_s)

    def _lines(
        self,
        report: Report,
        text: Callable[[Any], Iterable[str]],
        items: Callable[[Any], Iterable[E]],
        first: bool,
    ) -> Iterable[str]:
        if not self._rows:
            return [report.model_dump_json(by_alias=True)] if self._json else text(report)
        names = [one.name for one in self._columns]
        rows = [[one.value(item) for one in self._columns] for item in items(report)]
        if self._json:
            at, found = report.at.isoformat(), [dict(zip(names, row, strict=True)) for row in rows]
            return [json.dumps({"schema": "zeusctl.rows/1", "at": at, "rows": found})]
        if self._form == "csv":
            return _csv(names if first else None, rows)
        numbers = [
            place
            for place in range(len(names))
            if any(isinstance(row[place], (int, float)) for row in rows)
        ]
        cells = [[_text(value) for value in row] for row in rows]
        return table([name.upper() for name in names], cells, numbers, width=0)


def _csv(heading: Sequence[str] | None, rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(
        [
            *([] if heading is None else [heading]),
            *(["" if value is None else _text(value) for value in row] for row in rows),
        ]
    )
    return text.getvalue().splitlines()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)

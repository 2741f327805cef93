"""Entities, each declared once: its fields are JSON and its schema, table, `--columns`, CSV, live
view, metrics, and the tables of the documentation.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial, wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import click

from zeus_common.options import Number, option
from zeus_common.text import duration, energy, memory, number
from zeusctl.text import table

if TYPE_CHECKING:
    from typing_extensions import Self, dataclass_transform

    from zeusctl.reports import ReportHeader
else:

    def dataclass_transform(**_):
        """For type checkers only."""
        return lambda kind: kind


_UNITS: dict[str, Callable[[Any], str]] = {
    "w": number,
    "mhz": number,
    "percent": lambda value: number(value, "%"),
    "c": lambda value: number(value, "C"),
    "mib": memory,
    "j": energy,
    "s": duration,
}
"""Formats by the unit at the end of a name."""

_TABLES_OMIT = {"w": " W", "mhz": " MHz"}

_OF_REPLIES = {"w": ("w", "mw"), "j": ("j", "mj", "uj"), "s": ("s", "ms")}
"""The units that a reply may have for a unit here."""

_SCALES = {"mw": 1000, "mj": 1000, "uj": 1_000_000, "ms": 1000}
"""How many of a reply's unit make one here."""

_OF_METRICS = {"mhz": 1e6, "mib": 2**20, "percent": 0.01}
"""What one unit is in Prometheus's base unit."""

TITLE = 19
"""Characters of a title on a page."""

E = TypeVar("E")
F = TypeVar("F", bound=Callable[..., Any])


class ExporterMetric(NamedTuple):
    """A field as a metric of the exporter.

    Attributes:
        labels: Besides those of the entity.
        values: Their values for this field. One more label has the field's text, or the end of a
            range.
    """

    name: str
    help: str
    labels: tuple[str, ...]
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> ExporterMetric:
        """A metric from `NAME{LABEL=VALUE,LABEL} HELP`; only the first of a name needs a help."""
        head, _, help_text = text.partition(" ")
        name, _, labels = head.removesuffix("}").partition("{")
        pairs = [one.split("=") for one in labels.split(",") if one]
        values = tuple(pair[1] for pair in pairs if len(pair) > 1)
        return cls(name, help_text, tuple(pair[0] for pair in pairs), values)


@dataclass(frozen=True, slots=True)
class Column(Generic[E]):
    """A field of an entity, or a column of a table.

    Attributes:
        name: In `--columns` and CSV, with its unit; empty: only in the table.
        heading: In the table; empty: only by name.
        text: Its text in the table; None: that of the value, in the unit of the name.
        title: On the page of one item; empty: it is not there.
        page: Its text there, empty: no line; None: that of the value, with its unit.
        get: Its value; None: the attribute of that name.
        spare: Which columns a narrow terminal drops first: the highest; 0: none.
        number: Whether the table aligns it to the right, also if its name has no unit.
        width: Characters in the live view; 0: it is not there.
        source: The attribute of zeusd's reply, or what makes the value of the replies; empty: the
            attribute of the field's name, in the reply's unit.
        part: The entity that it is.
        metric: As `ExporterMetric.parse` takes it; empty: none.
        optional: Whether it may be None, as an empty text is then.
    """

    name: str = ""
    heading: str = ""
    text: Callable[[E], str] | None = None
    title: str = ""
    page: Callable[[E], str] | None = None
    get: Callable[[E], Any] | None = None
    spare: int = 0
    number: bool = False
    width: int = 0
    source: str | Callable[..., Any] = ""
    part: Any = None
    metric: str = ""
    optional: bool = False

    @property
    def right(self) -> bool:
        """Whether the table aligns it to the right."""
        return self.number or (self.unit in _UNITS and self.unit != "s")

    @property
    def unit(self) -> str:
        """At the end of its name."""
        return self.name.rpartition("_")[2]

    def value(self, item: E) -> Any:
        """Its value for an item: a number, text, list of them, or None."""
        return (self.get or attrgetter(self.name))(item)

    def cell(self, item: E) -> str:
        """Its text in the table."""
        return self._formatted(item) if self.text is None else self.text(item)

    def line(self, item: E) -> str:
        """Its text on the page."""
        if self.page is not None:
            return self.page(item)
        text = self._formatted(item)
        return text if text == "-" else text + _TABLES_OMIT.get(self.unit, "")

    def _formatted(self, item: E) -> str:
        value = self.value(item)
        if isinstance(value, (list, tuple)):
            return ", ".join(map(str, value))
        return "-" if value is None else _UNITS.get(self.unit, _text)(value)

    def read(self, replies: Sequence[Any]) -> Any:
        """Its value, from replies."""
        if callable(self.source):
            return self.source(*replies)
        if self.part is not None:
            return self.part.of(*replies)
        stem = self.name.removesuffix(self.unit)
        units = _OF_REPLIES.get(self.unit, (self.unit,))
        for name in [self.source] if self.source else [stem + unit for unit in units]:
            for reply in replies:
                if hasattr(reply, name):
                    return self._converted(getattr(reply, name), name.rpartition("_")[2])
        if None in replies:  # one of them is missing
            return None
        raise AttributeError(f"no reply has {self.source or self.name}")

    def _converted(self, value: Any, unit: str) -> Any:
        """A reply's value here: instants are ages, or what is left until then."""
        if value is None or (value == "" and self.optional):
            return None
        if unit == "ns":
            sign = -1 if self.name.endswith("_in_s") else 1
            return round(max(0.0, sign * (time.monotonic_ns() - value) / 1e9), 3)
        return value / _SCALES[unit] if unit in _SCALES else value

    def samples(self, item: E) -> Iterator[tuple[tuple[str, ...], float]]:
        """Values of its metric's labels, each with a number in Prometheus's unit."""
        values = ExporterMetric.parse(self.metric).values
        value, scale = self.value(item), _OF_METRICS.get(self.unit, 1)
        if isinstance(value, str):
            yield (*values, value), 1
        elif isinstance(value, list):
            for end, one in zip(("lowest", "highest"), value, strict=True):
                yield (*values, end), one * scale
        elif value is not None:
            yield values, round(value * scale, 6)


def column(heading: str = "", **more: Any) -> Any:
    """A field of an entity: its heading, and the other attributes of its `Column`."""
    shown: Column[Any] = Column(heading=heading, **more)
    return field(metadata={"column": shown})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(column, field))
class Entity:
    """A thing that zeusctl shows, with units in the names of its fields."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, eq=False, repr=False)(cls)  # the rest would cost a start 15 ms

    @classmethod
    def of(cls, *replies: Any, **known: Any) -> Self:
        """Converts replies of zeusd; None: one is missing, and its fields are None.

        Args:
            known: Fields that no reply has.
        """
        kind: Any = cls
        shown = _fields(kind).items()
        return cls(**known, **{name: one.read(replies) for name, one in shown if name not in known})


@cache
def _fields(kind: Any) -> dict[str, Column[Any]]:
    """The column of each field."""
    columns = {}
    for one in fields(kind):
        column = one.metadata.get("column", Column())
        name, optional = column.name or one.name, str(one.type).endswith("| None")
        columns[one.name] = replace(column, name=name, get=attrgetter(one.name), optional=optional)
    return columns


@cache
def columns_of(kind: Any) -> Columns[Any]:
    """An entity's columns. Those of a part follow the part's own, which only the table has."""
    columns: list[Column[Any]] = []
    for name, one in _fields(kind).items():
        columns.append(one if one.part is None else replace(one, name=""))
        parts = columns_of(one.part) if one.part is not None else ()
        columns += [replace(sub, get=partial(_inside, name, sub)) for sub in parts]
    return columns


def _inside(name: str, column: Column[Any], item: Any) -> Any:
    return column.value(getattr(item, name))


Columns = Sequence[Column[E]]


def lines(columns: Columns[E], items: Iterable[E], width: int | None = None) -> list[str]:
    """A table of items.

    Args:
        width: Characters of a line; 0: any number; None: the terminal's.
    """
    there = with_headings(columns)
    return table(
        [one.heading for one in there],
        [[one.cell(item) for one in there] for item in items],
        [place for place, one in enumerate(there) if one.right],
        spare(there),
        width,
    )


def page(columns: Columns[E], item: E) -> Iterator[str]:
    """The page of one item: a line for each field with a title."""
    for column in columns:
        if column.title and (text := column.line(item)):
            yield entry(column.title, text)


def entry(title: str, text: str) -> str:
    """A line of such a page."""
    return f"  {title:{TITLE}} {text}"


def with_headings(columns: Columns[E]) -> list[Column[E]]:
    """The columns of the table."""
    return [column for column in columns if column.heading]


def spare(columns: Columns[E]) -> list[int]:
    """Positions of the columns that a narrow terminal drops, the first one first."""
    order = sorted(range(len(columns)), key=lambda place: -columns[place].spare)
    return [place for place in order if columns[place].spare]


def output_options(columns: Columns[Any]) -> Callable[[F], Callable[..., Any]]:
    """Adds `--columns`, `--format` and `--watch`; the verb gets an `Output`."""
    known = [column.name for column in columns if column.name]

    def checked(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return ()
        names = [one.strip() for one in text.split(",") if one.strip()]
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            what = f"there is no column {unknown[0]!r}" if unknown else "no column is named"
            raise click.UsageError(f"{what}; there are: {', '.join(known)}")
        return tuple(names)

    def add(function: F) -> Callable[..., Any]:
        @wraps(function)
        def run(
            session: Any,
            /,
            chosen: Sequence[str],
            form: str | None,
            watch: float | None,
            **more: Any,
        ) -> Any:
            output = Output(session.json, chosen, form, watch, columns)
            return function(session, output=output, **more)

        shown = f"Print these columns: {', '.join(known)}."
        forms = ("table", "csv", "json")
        text = "Print a table, CSV or JSON.  [default: table]"
        option("--columns chosen", shown, callback=checked, metavar="NAME,...")(run)
        option("--format form", text, forms)(run)
        text, seconds = "Repeat after this many seconds, until Ctrl-C.", Number(0.1, 86_400)
        option("--watch", text, seconds, metavar="SECONDS")(run)
        return run

    return add


class Output(Generic[E]):
    """Prints a verb's result, once or repeatedly.

    Args:
        names: Of columns; empty: the verb's own table, or all columns for CSV.
        form: `table`, `csv`, `json` or None.
        watch_s: Seconds between updates; None: print once.

    Attributes:
        rows: Whether to print columns by name, instead of the verb's own output.
    """

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
        self.rows = bool(names) or form == "csv"
        known = {column.name: column for column in columns if column.name}
        self._columns = [known[name] for name in names or known]
        self._watch_s = watch_s

    def shows(self, name: str) -> bool:
        """Whether to print a column by this name."""
        return self.rows and name in (column.name for column in self._columns)

    def run(
        self,
        look: Callable[[], ReportHeader],
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
        report: ReportHeader,
        text: Callable[[Any], Iterable[str]],
        items: Callable[[Any], Iterable[E]],
        first: bool,
    ) -> Iterable[str]:
        if not self.rows:
            return [report.json()] if self._json else text(report)
        names = [column.name for column in self._columns]
        rows = [[column.value(item) for column in self._columns] for item in items(report)]
        if self._json:
            at, body = report.at.isoformat(), [dict(zip(names, row, strict=True)) for row in rows]
            return [json.dumps({"schema": "zeusctl.rows/1", "at": at, "rows": body}, default=str)]
        if self._form == "csv":
            cells = [["" if value is None else _text(value) for value in row] for row in rows]
            return csv_lines([*([names] if first else []), *cells])
        numbers = [
            place
            for place in range(len(names))
            if any(isinstance(row[place], (int, float)) for row in rows)
        ]
        cells = [[_text(value) for value in row] for row in rows]
        return table([name.upper() for name in names], cells, numbers, width=0)


def csv_lines(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().splitlines()


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)

"""Columns by name, for `--columns` and `--format`: the same values as in the reports."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zeus_ipc.options import Number
from zeusctl.text import table

if TYPE_CHECKING:
    from zeusctl.reports import Report

F = TypeVar("F", bound=Callable[..., Any])
Row = Mapping[str, Any]
"""Values by column: numbers, texts, lists of them, or None."""

GPU_COLUMNS = (
    *("index", "name", "uuid", "pci_address", "utilization_percent", "memory_used_mib"),
    *("memory_total_mib", "power_w", "power_limit_w", "enforced_power_limit_w", "site_limit_w"),
    *("min_power_limit_w", "max_power_limit_w", "default_power_limit_w", "gpu_clock_mhz"),
    *("memory_clock_mhz", "locked_gpu_clocks_mhz", "locked_memory_clocks_mhz", "temperature_c"),
    *("memory_power_w", "module", "energy_scope"),
    *("energy_j", "throttle_reasons", "persistence_mode", "processes", "leases", "error"),
)
"""Columns of a GPU. Units are in the names; `processes` and `leases` are counts."""

PROCESS_COLUMNS = (
    *("gpu", "uuid", "pid", "user", "command", "job", "type", "memory_mib", "gpu_instance"),
    "leases",
)
"""Columns of a process on a GPU."""


def output_options(columns: Sequence[str]) -> Callable[[F], F]:
    """Adds `--columns`, `--format` and `--watch`; the verb receives them as one `Output`."""

    def chosen(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        if text is None:
            return ()
        names = [one.strip() for one in text.split(",") if one.strip()]
        unknown = [one for one in names if one not in columns]
        if unknown or not names:
            what = f"there is no column {unknown[0]!r}" if unknown else "no column is named"
            raise click.UsageError(f"{what}; there are: {', '.join(columns)}")
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
            help=f"Print these columns: {', '.join(columns)}.",
        )(function)

    return add


class Output:
    """Prints a verb's result, once or repeatedly.

    Args:
        json_wanted: `--json`.
        columns: Names of columns; empty: the verb's own table, or all columns for CSV.
        form: `table`, `csv`, `json` or None.
        watch_s: Seconds between updates; None: print once.
        known: All columns, in order.
    """

    def __init__(
        self,
        json_wanted: bool,
        columns: Sequence[str],
        form: str | None,
        watch_s: float | None,
        known: Sequence[str],
    ) -> None:
        self._json = json_wanted or form == "json"
        self._form = form
        self._columns = columns
        self._watch_s = watch_s
        self._known = known

    def run(
        self,
        look: Callable[[], Report],
        lines: Callable[[Any], Iterable[str]],
        rows: Callable[[Any], Iterable[Row]],
    ) -> None:
        """Gets and prints the report.

        Args:
            look: Returns the report.
            lines: The report as text.
            rows: The report's rows.
        """
        first = True
        while True:
            report = look()
            for line in self._lines(report, lines, rows, first):
                click.echo(line)
            sys.stdout.flush()
            if self._watch_s is None:
                return
            first = False
            time.sleep(self._watch_s)

    def _lines(
        self,
        report: Report,
        lines: Callable[[Any], Iterable[str]],
        rows: Callable[[Any], Iterable[Row]],
        first: bool,
    ) -> Iterable[str]:
        if not self._columns and self._form != "csv":
            return [report.model_dump_json(by_alias=True)] if self._json else lines(report)
        names = self._columns or self._known
        found = [{name: row[name] for name in names} for row in rows(report)]
        if self._json:
            at = report.at.isoformat()
            return [json.dumps({"schema": "zeusctl.rows/1", "at": at, "rows": found})]
        if self._form == "csv":
            return _csv(names, found, heading=first)
        cells = [[_cell(row[name]) for name in names] for row in found]
        numbers = [
            place
            for place, name in enumerate(names)
            if any(isinstance(row[name], (int, float)) for row in found)
        ]
        return table([name.upper() for name in names], cells, numbers)


def _csv(names: Sequence[str], rows: Iterable[Row], heading: bool) -> Iterable[str]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if heading:
        writer.writerow(names)
    for row in rows:
        writer.writerow(["" if row[name] is None else _cell(row[name]) for name in names])
    return text.getvalue().splitlines()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return "; ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)

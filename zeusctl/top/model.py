"""The content of `zeusctl top`: which columns fit, which GPUs, and their order. It draws
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from zeusctl.columns import Column, spare, with_headings
from zeusctl.entities import GPU, LEASE, PROCESS, Gpu, Lease, Process
from zeusctl.reports import StatusReport
from zeusctl.text import bar, plain, resample, shorten, sparkline, style_of_share
from zeusctl.text import fitting as fit

if TYPE_CHECKING:
    from zeusctl.columns import Columns

E = TypeVar("E")

SPAN_S = 120
"""Time span of the power lines."""

Points = Sequence[tuple[float, float]]
"""Times, seconds of CLOCK_MONOTONIC, and watts."""


Shown = list[tuple[Column[Any], int]]
"""Columns and their widths."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and its style."""

    text: str
    style: str = ""


HOLDER: Column[Gpu] = Column("holder", "HELD BY", width=10)
BAR: Column[Gpu] = Column("bar", "WITHIN LIMIT", width=16, spare=2)
LINE: Column[Gpu] = Column("line", f"POWER, {SPAN_S // 60} MIN", spare=1)
COLUMNS = [one for one in GPU if one.width]
"""All columns of the GPU table, in order."""

for _after, _own in (("POWER", BAR), ("ENERGY", LINE), (LINE.heading, HOLDER)):
    COLUMNS.insert([one.heading for one in COLUMNS].index(_after) + 1, _own)

NARROWEST_LINE, WIDEST_LINE = 10, 60

SORTS: dict[str, Callable[[Gpu, View], float | str]] = {
    "gpu": lambda gpu, _: gpu.index,
    "util": lambda gpu, _: -(gpu.utilization_percent or 0),
    "memory": lambda gpu, _: -(gpu.memory_used_mib or 0),
    "power": lambda gpu, _: -(gpu.power_w or 0.0),
    "limit": lambda gpu, _: in_force(gpu) or 0.0,
    "clock": lambda gpu, _: -(gpu.gpu_clock_mhz or 0),
    "temp": lambda gpu, _: -(gpu.temperature_c or 0),
    "energy": lambda gpu, _: -(gpu.energy_j or 0.0),
    "holder": lambda gpu, view: view.holder(gpu) or "~",
    "throttle": lambda gpu, _: ", ".join(gpu.throttle_reasons or ()) or "~",
}
"""Orders, by column: the most interesting rows first."""


def in_force(gpu: Gpu) -> float | None:
    """The power limit in force, in watts."""
    limit = gpu.power_limit_w
    return limit.enforced if limit.enforced is not None else limit.requested


@dataclass(slots=True)
class View:
    """The visible part of a report.

    Attributes:
        power: Power of the last minutes, by UUID.
        sort: The order of GPUs, of `SORTS`.
        pattern: Hides GPUs, leases and processes without this text; empty: hides none.
    """

    report: StatusReport
    power: Mapping[str, Points] = field(default_factory=dict)
    sort: str = "gpu"
    inverted: bool = False
    pattern: str = ""

    def sort_by(self, step: int) -> None:
        """Sorts by the next or previous column that has an order."""
        names = list(SORTS)
        self.sort = names[(names.index(self.sort) + step) % len(names)]

    # --------------------------------------------------------------------------------- what

    def holder(self, gpu: Gpu) -> str:
        """Names the first holder of a lease on a GPU, or else its first ceiling."""
        held = [lease for lease in self.report.leases if lease.uuid == gpu.uuid]
        if held:
            return held[0].job or held[0].user
        bounds = (ceiling.name for ceiling in self.report.ceilings if ceiling.uuid == gpu.uuid)
        return next(bounds, "").removeprefix("job:")

    def gpus(self) -> list[Gpu]:
        """Returns the visible GPUs, in order."""
        held = {lease.uuid for lease in self.report.leases if self._finds(LEASE, lease)}
        processes = self.report.processes or ()
        used = {process.uuid for process in processes if self._finds(PROCESS, process)}
        named = self._named() | held | used
        shown = [gpu for gpu in self.report.gpus if gpu.uuid in named]
        shown.sort(key=lambda gpu: (SORTS[self.sort](gpu, self), gpu.index))
        return shown[::-1] if self.inverted else shown

    def leases(self) -> list[Lease]:
        """Returns the visible leases: pending restores first."""
        named = self._named()
        shown = [
            lease
            for lease in self.report.leases
            if lease.uuid in named or self._finds(LEASE, lease)
        ]
        return sorted(shown, key=lambda lease: (not lease.restoring, lease.gpu, lease.control))

    def processes(self) -> list[Process]:
        """Returns the visible processes."""
        named = self._named()
        return [
            process
            for process in self.report.processes or ()
            if process.uuid in named or self._finds(PROCESS, process)
        ]

    def _named(self) -> set[str]:
        """Returns the GPUs that match the filter themselves: everything on them is visible."""
        return {gpu.uuid for gpu in self.report.gpus if self._finds(GPU, gpu)}

    def _finds(self, columns: Columns[Any], one: Any) -> bool:
        """Whether a text of the row, or its GPU's UUID, has the text of the filter."""
        cells = [plain(column.cell(one)) for column in with_headings(columns)]
        return any(self.pattern.lower() in cell.lower() for cell in (one.uuid, *cells))

    # ---------------------------------------------------------------------------------- how

    def row(self, gpu: Gpu, columns: Shown, now_s: float) -> list[Cell]:
        """Returns one GPU's row."""
        return [self._cell(gpu, column, width, now_s) for column, width in columns]

    def _cell(self, gpu: Gpu, column: Column[Gpu], width: int, now_s: float) -> Cell:
        if column is BAR:
            return _power_bar(gpu, width)
        if column is LINE:
            values = resample(self.power.get(gpu.uuid, ()), now_s - SPAN_S, now_s, width)
            return Cell(sparkline(values, 0.0, gpu.power_limit_w.largest or 1.0), "cyan")
        if column is HOLDER:
            return Cell(shorten(self.holder(gpu), width), "yellow")
        text = plain(column.cell(gpu))
        if column.name == "throttle_reasons":
            text = gpu.error or text
        style = "dim" if text == "-" else _STYLES.get(column.heading, _none)(gpu)
        return Cell(shorten(text, width), style)


def fitting(width: int) -> Shown:
    """Returns the columns that fit a table of this width, with their widths: spare ones are dropped
    first, then those on the right. The line of power takes what is left, within bounds.
    """
    shown = [*COLUMNS]
    for place in (*spare(COLUMNS), *range(len(COLUMNS))[::-1]):
        taken = sum((one.width or NARROWEST_LINE) + 1 for one in shown)
        if taken > width and COLUMNS[place] in shown:
            shown.remove(COLUMNS[place])
    line = min(WIDEST_LINE, width - sum(one.width + 1 for one in shown))
    return [(one, one.width or line) for one in shown]


def listed(
    columns: Columns[E],
    items: Sequence[tuple[str, E]],
    width: int,
    style: Callable[[E], str] = lambda _: "",
) -> tuple[Shown, list[tuple[str, list[Cell]]]]:
    """Returns the columns that fit a table of this width, with their widths, and its rows."""
    there = with_headings(columns)
    cells = [[plain(one.cell(item)) for one in there] for _, item in items]
    shown, widths, _ = fit([one.heading for one in there], cells, spare(there), width)
    last = shown[-1]
    widths[last] = max(8, width - sum(widths[one] + 2 for one in shown if one != last))
    return [(there[one], widths[one]) for one in shown], [
        (key, [Cell(shorten(row[one], widths[one]), style(item)) for one in shown])
        for (key, item), row in zip(items, cells, strict=True)
    ]


def _power_bar(gpu: Gpu, width: int) -> Cell:
    power, largest, limit = gpu.power_w, gpu.power_limit_w.largest, in_force(gpu)
    if power is None or not largest:
        return Cell("-" * width, "dim")
    text = bar(power / largest, width, None if limit is None else limit / largest)
    return Cell(text, style_of_share(power / (limit or largest)))


def _none(_: Gpu) -> str:
    return ""


def _limit(gpu: Gpu) -> str:
    limit = gpu.power_limit_w
    return "red" if limit.raised else "yellow" if limit.lowered else ""


def _share(part: float | None, whole: float | None) -> str:
    return style_of_share(part / whole if part is not None and whole else None)


_STYLES: dict[str, Callable[[Gpu], str]] = {
    "GPU": lambda gpu: "bold red" if gpu.error else "bold",
    "UTIL": lambda gpu: _share(gpu.utilization_percent, 100),
    "MEM USED": lambda gpu: _share(gpu.memory_used_mib, gpu.memory_total_mib),
    "LIMIT": _limit,
    "CLOCK": lambda gpu: "yellow" if gpu.locked_gpu_clocks_mhz else "",
    "THROTTLED BY": lambda _: "yellow",
}

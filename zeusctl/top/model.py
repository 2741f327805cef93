"""The content of `zeusctl top`: which columns fit, which GPUs, and their order. It draws
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from zeusctl.columns import spare, with_headings
from zeusctl.entities import GPU
from zeusctl.text import bar, plain, resample, shorten, sparkline, style_of_share
from zeusctl.text import fitting as fit

if TYPE_CHECKING:
    from zeusctl.columns import Columns
    from zeusctl.reports import Gpu, Lease, Process, StatusReport

E = TypeVar("E")

SPAN_S = 120
"""Time span of the power lines."""

Points = Sequence[tuple[float, float]]
"""Times, seconds of CLOCK_MONOTONIC, and watts."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text and its style."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class TopColumn:
    """A column of the GPU table.

    Attributes:
        width: Characters; 0: what is left.
    """

    name: str
    title: str
    width: int
    from_width: int = 0
    right: bool = True


COLUMNS = (
    TopColumn("gpu", "GPU", 3),
    TopColumn("name", "NAME", 22, 150, right=False),
    TopColumn("util", "UTIL", 5),
    TopColumn("memory", "MEM USED", 11),
    TopColumn("power", "POWER", 6),
    TopColumn("bar", "WITHIN LIMIT", 16, 108, right=False),
    TopColumn("limit", "LIMIT", 7),
    TopColumn("clock", "CLOCK", 5, 58),
    TopColumn("memory_clock", "MEMORY", 6, 118),
    TopColumn("temp", "TEMP", 4, 46),
    TopColumn("energy", "ENERGY", 9, 130),
    TopColumn("spark", f"POWER, {SPAN_S // 60} MIN", 0, 92, right=False),
    TopColumn("holder", "HELD BY", 11, 72, right=False),
    TopColumn("throttle", "THROTTLED BY", 18, 79, right=False),
)
"""All columns, in order."""

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
        bounds = (one.name for one in self.report.ceilings if one.uuid == gpu.uuid)
        return next(bounds, "").removeprefix("job:")

    def gpus(self) -> list[Gpu]:
        """Returns the visible GPUs, in order."""
        shown = [gpu for gpu in self.report.gpus if self._shows(gpu)]
        shown.sort(key=lambda gpu: (SORTS[self.sort](gpu, self), gpu.index))
        return shown[::-1] if self.inverted else shown

    def leases(self) -> list[Lease]:
        """Returns the visible leases: pending restores first."""
        named = self._named()
        shown = [
            one
            for one in self.report.leases
            if one.uuid in named or self._finds(_words_of_lease(one))
        ]
        return sorted(shown, key=lambda lease: (not lease.restoring, lease.gpu, lease.control))

    def processes(self) -> list[Process]:
        """Returns the visible processes."""
        named = self._named()
        return [
            one
            for one in self.report.processes or ()
            if one.uuid in named or self._finds(_words_of_process(one))
        ]

    def _named(self) -> set[str]:
        """Returns the GPUs that match the filter themselves: everything on them is visible."""
        return {gpu.uuid for gpu in self.report.gpus if self._finds(_words_of_gpu(gpu))}

    def _shows(self, gpu: Gpu) -> bool:
        words = _words_of_gpu(gpu)
        for lease in self.report.leases:
            if lease.uuid == gpu.uuid:
                words += _words_of_lease(lease)
        for process in self.report.processes or ():
            if process.uuid == gpu.uuid:
                words += _words_of_process(process)
        return self._finds(words)

    def _finds(self, words: Sequence[str]) -> bool:
        wanted = self.pattern.lower()
        return not wanted or any(wanted in word.lower() for word in words)

    # ---------------------------------------------------------------------------------- how

    def row(self, gpu: Gpu, columns: Sequence[tuple[TopColumn, int]], now_s: float) -> list[Cell]:
        """Returns one GPU's row."""
        return [self._cell(gpu, column.name, width, now_s) for column, width in columns]

    def _cell(self, gpu: Gpu, name: str, width: int, now_s: float) -> Cell:
        match name:
            case "bar":
                return _power_bar(gpu, width)
            case "spark":
                values = resample(self.power.get(gpu.uuid, ()), now_s - SPAN_S, now_s, width)
                return Cell(sparkline(values, 0.0, gpu.power_limit_w.largest or 1.0), "cyan")
            case "holder":
                return Cell(shorten(self.holder(gpu), width), "yellow")
        text = plain(_TEXTS[name].cell(gpu))
        if name == "throttle":
            text = gpu.error or text
        return Cell(shorten(text, width), "dim" if text == "-" else _STYLES.get(name, _none)(gpu))


def fitting(width: int) -> list[tuple[TopColumn, int]]:
    """Returns the columns that fit a table of this width, with their widths.

    Columns are one blank apart; the line of power takes what is left, within bounds.
    """
    chosen = [column for column in COLUMNS if width >= column.from_width]
    fixed = sum(column.width + 1 for column in chosen)
    line = min(WIDEST_LINE, width - fixed - 1)
    return [
        (column, column.width or line)
        for column in chosen
        if column.width or line >= NARROWEST_LINE
    ]


def listed(
    columns: Columns[E],
    items: Sequence[tuple[str, E]],
    width: int,
    style: Callable[[E], str] = lambda _: "",
) -> tuple[list[tuple[TopColumn, int]], list[tuple[str, list[Cell]]]]:
    """Returns the columns that fit a table of this width, with their widths, and its rows."""
    there = with_headings(columns)
    cells = [[plain(one.cell(item)) for one in there] for _, item in items]
    shown, widths, _ = fit([one.heading for one in there], cells, spare(there), width)
    last = shown[-1]
    widths[last] = max(8, width - sum(widths[one] + 2 for one in shown if one != last))
    found = [
        (TopColumn("", there[one].heading, widths[one], 0, there[one].right), widths[one])
        for one in shown
    ]
    return found, [
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
    if limit.requested is None or limit.site is None:
        return ""
    lowered = min(limit.requested, limit.enforced or limit.requested) < limit.site
    return "red" if limit.requested > limit.site else "yellow" if lowered else ""


def _share(part: float | None, whole: float | None) -> str:
    return style_of_share(part / whole if part is not None and whole else None)


_TEXTS = {
    column.name: one
    for column in COLUMNS
    for one in with_headings(GPU)
    if one.heading == column.title
}
_STYLES: dict[str, Callable[[Gpu], str]] = {
    "gpu": lambda gpu: "bold red" if gpu.error else "bold",
    "util": lambda gpu: _share(gpu.utilization_percent, 100),
    "memory": lambda gpu: _share(gpu.memory_used_mib, gpu.memory_total_mib),
    "limit": _limit,
    "clock": lambda gpu: "yellow" if gpu.locked_gpu_clocks_mhz else "",
    "throttle": lambda _: "yellow",
}


def _words_of_gpu(gpu: Gpu) -> list[str]:
    return [gpu.uuid, gpu.name, str(gpu.index), *(gpu.throttle_reasons or ())]


def _words_of_lease(lease: Lease) -> list[str]:
    return [lease.user, lease.command or "", lease.job or "", lease.control]


def _words_of_process(process: Process) -> list[str]:
    return [process.user or "", process.command or "", process.job or "", str(process.pid or "")]

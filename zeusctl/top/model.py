"""The content of `zeusctl top`: which columns fit, which GPUs, and their order. It draws
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zeusctl.text import bar, energy, resample, shorten, sparkline, style_of_share

if TYPE_CHECKING:
    from zeusctl.reports import Gpu, Lease, Process, StatusReport

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
class Column:
    """A column of the GPU table.

    Attributes:
        name: Sort key.
        title: Its heading.
        width: Characters; 0: what is left.
        from_width: Minimum width of the terminal to show it.
        right: Whether it is aligned to the right.
    """

    name: str
    title: str
    width: int
    from_width: int = 0
    right: bool = True


COLUMNS = (
    Column("gpu", "GPU", 3),
    Column("name", "NAME", 22, 150, right=False),
    Column("util", "UTIL", 4),
    Column("memory", "MEM", 8),
    Column("power", "POWER", 5),
    Column("bar", "WITHIN LIMIT", 16, 106, right=False),
    Column("limit", "LIMIT", 7),
    Column("clock", "CLOCK", 5, 58),
    Column("memory_clock", "MCLK", 5, 118),
    Column("temp", "TEMP", 4, 46),
    Column("energy", "ENERGY", 9, 130),
    Column("spark", f"POWER, {SPAN_S // 60} MIN", 0, 92, right=False),
    Column("holder", "HELD BY", 12, 72, right=False),
    Column("throttle", "THROTTLED BY", 18, 79, right=False),
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
        report: The node at the last update.
        power: Power of the last minutes, by UUID.
        sort: Column by which GPUs are ordered.
        inverted: Whether the order is reversed.
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

    def row(self, gpu: Gpu, columns: Sequence[tuple[Column, int]], now_s: float) -> list[Cell]:
        """Returns one GPU's row.

        Args:
            gpu: The GPU.
            columns: What `fitting` returned.
            now_s: CLOCK_MONOTONIC.
        """
        return [self._cell(gpu, column.name, width, now_s) for column, width in columns]

    def _cell(self, gpu: Gpu, name: str, width: int, now_s: float) -> Cell:
        limit, power = gpu.power_limit_w, gpu.power_w
        match name:
            case "gpu":
                return Cell(str(gpu.index), "bold red" if gpu.error else "bold")
            case "name":
                return Cell(shorten(gpu.name, width))
            case "util":
                share = gpu.utilization_percent
                return _number(share, "%", style_of_share(None if share is None else share / 100))
            case "memory":
                return _memory(gpu)
            case "power":
                return _number(None if power is None else round(power), "W")
            case "bar":
                return _power_bar(gpu, width)
            case "limit":
                return _limit(gpu)
            case "clock":
                locked = "*" if gpu.locked_gpu_clocks_mhz else ""
                return _number(gpu.gpu_clock_mhz, locked, "yellow" if locked else "")
            case "memory_clock":
                return _number(gpu.memory_clock_mhz, "*" if gpu.locked_memory_clocks_mhz else "")
            case "temp":
                return _number(gpu.temperature_c, "C")
            case "energy":
                return Cell("-" if gpu.energy_j is None else energy(gpu.energy_j))
            case "spark":
                values = resample(self.power.get(gpu.uuid, ()), now_s - SPAN_S, now_s, width)
                return Cell(sparkline(values, 0.0, limit.largest or 1.0), "cyan")
            case "holder":
                return Cell(shorten(self.holder(gpu), width), "yellow")
        return Cell(shorten(gpu.error or ", ".join(gpu.throttle_reasons or ()), width), "yellow")


def fitting(width: int) -> list[tuple[Column, int]]:
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


def _number(value: float | None, unit: str, style: str = "") -> Cell:
    return Cell("-", "dim") if value is None else Cell(f"{value}{unit}", style)


def _memory(gpu: Gpu) -> Cell:
    used, total = gpu.memory_used_mib, gpu.memory_total_mib
    if used is None or not total:
        return Cell("-", "dim")
    text = f"{used / 1024:.1f}/{total / 1024:.0f}G"
    if len(text) > 8:
        text = f"{used / 1024:.0f}/{total / 1024:.0f}G"
    return Cell(text, style_of_share(used / total))


def _power_bar(gpu: Gpu, width: int) -> Cell:
    power, largest, limit = gpu.power_w, gpu.power_limit_w.largest, in_force(gpu)
    if power is None or not largest:
        return Cell("-" * width, "dim")
    text = bar(power / largest, width, None if limit is None else limit / largest)
    return Cell(text, style_of_share(power / (limit or largest)))


def _limit(gpu: Gpu) -> Cell:
    limit, enforced = gpu.power_limit_w.requested, gpu.power_limit_w.enforced
    if limit is None:
        return Cell("-", "dim")
    text = f"{limit:g}W"
    if enforced is not None and enforced < limit:
        text = f"{limit:g}>{enforced:g}"
    site = gpu.power_limit_w.site
    lowered = site is not None and min(limit, enforced or limit) < site
    above = site is not None and limit > site
    return Cell(text, "red" if above else "yellow" if lowered else "")


def _words_of_gpu(gpu: Gpu) -> list[str]:
    return [gpu.uuid, gpu.name, str(gpu.index), *(gpu.throttle_reasons or ())]


def _words_of_lease(lease: Lease) -> list[str]:
    return [lease.user, lease.command or "", lease.job or "", lease.control]


def _words_of_process(process: Process) -> list[str]:
    return [process.user or "", process.command or "", process.job or "", str(process.pid or "")]

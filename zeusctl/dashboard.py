"""What `zeusctl top` shows: bars, lines of the last minutes, leases."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from zeus_ipc.errors import ZeusIpcError
from zeusctl.commands.status import headline, read
from zeusctl.reports import Gpu, Lease, StatusReport
from zeusctl.session import Session
from zeusctl.text import duration, energy, shorten
from zeusctl.views import holder

LEVELS = "▁▂▃▄▅▆▇█"
SPAN_S = 120
"""What the lines of power show."""

BAR, NARROW_BAR = 20, 12
_LOOK_BACK_NS = SPAN_S * 10**9


def sparkline(values: Sequence[float | None], lowest: float, highest: float) -> str:
    """Values as a line of blocks, blank where there is none."""
    span = max(1e-9, highest - lowest)
    steps = len(LEVELS) - 1
    return "".join(
        " " if value is None else LEVELS[min(steps, max(0, round((value - lowest) / span * steps)))]
        for value in values
    )


def resample(
    points: Sequence[tuple[float, float]], begin: float, end: float, width: int
) -> list[float | None]:
    """The mean of each of `width` spans of time; a span without a value has the one before, if any.

    Args:
        points: Times and values, in order.
        begin: Where the first span begins.
        end: Where the last one ends.
        width: How many.
    """
    each = (end - begin) / width
    found: list[float | None] = []
    position = 0
    last: float | None = None
    for number in range(width):
        until = begin + (number + 1) * each
        inside = []
        while position < len(points) and points[position][0] <= until:
            if points[position][0] > begin + number * each:
                inside.append(points[position][1])
            else:
                last = points[position][1]
            position += 1
        if inside:
            last = sum(inside) / len(inside)
        found.append(last)
    return found


def bar(power_w: float | None, limit_w: float | None, largest_w: float | None, width: int) -> Text:
    """Power as a bar; `|` stands where the limit is."""
    if power_w is None or not largest_w:
        return Text("-" * width, style="dim")
    filled = min(width, round(power_w / largest_w * width))
    cells = ["━"] * filled + ["─"] * (width - filled)
    share = power_w / (limit_w or largest_w)
    color = "red" if share > 0.97 else "yellow" if share > 0.85 else "green"
    text = Text("".join(cells))
    text.stylize(color, 0, filled)
    text.stylize("dim", filled, width)
    if limit_w is not None:
        mark = min(width - 1, max(0, round(limit_w / largest_w * width) - 1))
        text = text[:mark] + Text("|", style="bold") + text[mark + 1 :]
    return text


class Dashboard:
    """The node, look by look.

    Args:
        session: The connection.
        gpus: Which GPUs, as a person names them.
    """

    def __init__(self, session: Session, gpus: str) -> None:
        self._session = session
        self._gpus = gpus
        self._report: StatusReport | None = None
        self._trouble = ""
        self._power: dict[str, list[tuple[float, float]]] = {}

    def refresh(self) -> None:
        """Looks at the node. What fails after the first look is shown, and tried again.

        Raises:
            ZeusIpcError: The first look failed.
        """
        self._session.look_again()
        try:
            self._report = read(self._session, self._gpus)
            self._look_back()
        except ZeusIpcError as error:
            if self._report is None:
                raise
            self._trouble = error.message
        else:
            self._trouble = ""

    def _look_back(self) -> None:
        assert self._report is not None
        oldest = time.monotonic() - SPAN_S
        for gpu in self._report.gpus:
            known = self._power.setdefault(gpu.uuid, [])
            start_ns = (
                round(known[-1][0] * 1e9) + 1 if known else time.monotonic_ns() - _LOOK_BACK_NS
            )
            try:
                found = self._session.client.timeline(gpu.uuid, "power", start_ns)
            except ZeusIpcError:
                continue  # nothing sampled yet
            known += [(t_ns / 1e9, milliwatts / 1000) for t_ns, milliwatts in found]
            self._power[gpu.uuid] = [point for point in known if point[0] >= oldest]

    def render(self, size: ConsoleDimensions) -> RenderableType:
        """The screen."""
        report = self._report
        assert report is not None
        clock = report.at.strftime("%H:%M:%S")
        parts: list[RenderableType] = [
            Text.assemble(("zeusctl top  ", "bold"), (clock, "dim")),
            Text.from_ansi(headline(report.node)),
        ]
        if self._trouble:
            parts.append(Text(self._trouble, style="bold red"))
        elif report.node.quiesced_s is not None:
            since = duration(report.node.quiesced_s)
            parts.append(Text(f"the driver is let go of, since {since}", style="bold yellow"))
        parts += [Text(""), self._table(report, size.width)]
        total = sum(gpu.power_w or 0.0 for gpu in report.gpus)
        parts += [Text(f"{total:.0f} W of all GPUs shown", style="dim"), Text("")]
        leases = report.leases
        room = max(1, size.height - len(parts) - len(report.gpus) - 3)
        if leases:
            parts.append(_leases(leases[:room]))
            if len(leases) > room:
                parts.append(Text(f"and {len(leases) - room} more: `zeusctl leases`", style="dim"))
        else:
            parts.append(Text("nobody holds anything", style="dim"))
        parts.append(Text("q quits", style="dim"))
        return Group(*parts)

    def _table(self, report: StatusReport, width: int) -> Table:
        table = Table(box=None, padding=(0, 1), expand=False, header_style="bold")
        table.add_column("GPU", justify="right")
        wide, named = width >= 100, width >= 128
        if named:
            table.add_column("NAME")
        table.add_column("POWER", justify="right")
        table.add_column("", no_wrap=True, min_width=BAR if wide else NARROW_BAR)
        table.add_column("LIMIT", justify="right")
        table.add_column("CLOCK", justify="right")
        table.add_column("TEMP", justify="right")
        if wide:
            table.add_column("ENERGY", justify="right")
        room = max(0, width - (114 if named else 90 if wide else 68))
        spark = min(60, room)
        table.add_column(f"LAST {SPAN_S // 60} MIN" if spark >= 10 else "")
        table.add_column("HELD BACK BY", no_wrap=True)
        for gpu in report.gpus:
            table.add_row(*self._row(gpu, named, wide, spark))
        return table

    def _row(self, gpu: Gpu, named: bool, wide: bool, spark: int) -> list[RenderableType]:
        limit = gpu.power_limit_w
        in_force = limit.enforced if limit.enforced is not None else limit.requested
        lowered = in_force is not None and limit.site is not None and in_force < limit.site
        name: list[RenderableType] = [shorten(gpu.name, 24)] if named else []
        counter: list[RenderableType] = []
        if wide:
            counter = ["-" if gpu.energy_j is None else energy(gpu.energy_j)]
        return [
            str(gpu.index),
            *name,
            "-" if gpu.power_w is None else f"{gpu.power_w:.0f} W",
            bar(gpu.power_w, in_force, limit.largest, BAR if wide else NARROW_BAR),
            Text("-" if in_force is None else f"{in_force:g} W", style="yellow" if lowered else ""),
            ("-" if gpu.gpu_clock_mhz is None else str(gpu.gpu_clock_mhz))
            + ("*" if gpu.locked_gpu_clocks_mhz else ""),
            "-" if gpu.temperature_c is None else f"{gpu.temperature_c} C",
            *counter,
            Text(self._line(gpu, spark), style="cyan"),
            Text(gpu.error or ", ".join(gpu.throttle_reasons or ()), style="yellow"),
        ]

    def _line(self, gpu: Gpu, width: int) -> str:
        points = self._power.get(gpu.uuid, [])
        if width < 10 or not points:
            return ""
        end = time.monotonic()
        values = resample(points, end - SPAN_S, end, width)
        highest = gpu.power_limit_w.largest or max(power for _, power in points)
        return sparkline(values, 0.0, highest)


def _leases(leases: Sequence[Lease]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("GPU", "CONTROL", "SET TO", "GOES BACK TO", "SINCE", "HOLDER"):
        table.add_column(name, justify="right" if name == "GPU" else "left")
    for lease in leases:
        style = "red" if lease.restoring else ""
        table.add_row(
            str(lease.gpu),
            lease.control,
            lease.value_text or "not set",
            lease.goes_back_to_text,
            duration(lease.held_s),
            ("not back yet: " if lease.restoring else "") + holder(lease),
            style=style,
        )
    return table

"""The pages over the live view: help, and one GPU with its last hour."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from zeus_common.units import HOUR_S
from zeusctl.columns import TITLE, entry, page
from zeusctl.columns import lines as table_of
from zeusctl.commands.status import process_lines
from zeusctl.entities import CEILING, GPU, LEASE, Gpu, span
from zeusctl.text import resample, sparkline
from zeusctl.top.source import DOMAINS, NodeSource

HELP = """\
 up down PgUp PgDn Home End   move and scroll
 Tab                          GPUs, leases, processes
 Enter                        a GPU, with its last hour
 / F4                         filter by text; Esc shows all
 > < F6                       sort by the next or previous column
 I                            invert the order
 U M P T N                    sort by utilization, memory, power, temperature, number
 Space                        refresh
 h ? F1                       this help
 q F10                        quit

 LIMIT: 200>180 is enforced at 180; yellow is below the site limit, red above it.
 CLOCK*: locked. In the bar | is the limit. HELD BY: job or user of a lease, or a ceiling.
"""
"""The keys: those of htop and nvitop where they have one."""


class Overlay(ModalScreen[None]):
    """A page over the live view; any of these keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,enter,h,f1,question_mark,f10", "app.pop_screen", "close")
    ]

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        """One scrolling page."""
        with VerticalScroll(classes="overlay") as page:
            page.border_title = self._title
            page.border_subtitle = "up, down scroll; Esc closes"
            yield Static(id="warning")
            yield Static(id="page")

    def warn(self, text: str) -> None:
        """Says why the page is not up to date."""
        for line in self.query("#warning").results(Static):  # none before it is composed
            line.update(text)
            line.display = bool(text)

    def show(self, text: str) -> None:
        """Sets its text."""
        self.query_one("#page", Static).update(Text.from_ansi(text))


class HelpScreen(Overlay):
    """Shows the keys."""

    def __init__(self) -> None:
        super().__init__("zeusctl top")

    def on_mount(self) -> None:
        """Fills the page."""
        self.show(HELP)


class GpuScreen(Overlay):
    """One GPU, kept up to date."""

    def __init__(self, source: NodeSource, gpu: Gpu) -> None:
        super().__init__(f"GPU {gpu.index}: {gpu.name}")
        self._source = source
        self._uuid = gpu.uuid

    def on_mount(self) -> None:
        """Starts the updates."""
        self._look()
        self.set_interval(2.0, self._look)

    @work(thread=True, exclusive=True)
    def _look(self) -> None:
        width = max(20, min(120, self.app.size.width - 14 - TITLE))
        lines = [*self._facts(), "", *self._hour(width), "", *self._users()]
        self.app.call_from_thread(self.show, "\n".join(lines))

    def _facts(self) -> Iterable[str]:
        gpus = [gpu for gpu in self._source.report.gpus if gpu.uuid == self._uuid]
        if not gpus:
            yield "it is not there any more"
            return
        yield from page(GPU, gpus[0])
        if gpus[0].error:
            yield gpus[0].error

    def _hour(self, width: int) -> Iterable[str]:
        yield "The last hour"
        end = time.monotonic()
        for domain, title, divisor, unit in DOMAINS:
            points = self._source.last_hour(self._uuid, domain, divisor)
            if points:
                values = [value for _, value in points]
                line = sparkline(resample(points, end - HOUR_S, end, width), 0.0, max(values))
                yield entry(title, line)
                yield entry("", span(min(values), max(values), unit))

    def _users(self) -> Iterable[str]:
        report = self._source.report
        leases = [lease for lease in report.leases if lease.uuid == self._uuid]
        processes = [process for process in report.processes or () if process.uuid == self._uuid]
        width = self.app.size.width - 10
        yield from table_of(LEASE, leases, width) if leases else ["no leases"]
        ceilings = [ceiling for ceiling in report.ceilings if ceiling.uuid == self._uuid]
        yield from table_of(CEILING, ceilings, width) if ceilings else []
        yield ""
        yield from process_lines(processes, width)

"""Queries the node for the live view, on a thread of its own: keys never wait."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from zeus_common.units import HOUR_S, SECOND_NS
from zeus_ipc.errors import ZeusIpcError
from zeusctl.commands.status import problem_text, read
from zeusctl.reports import StatusReport
from zeusctl.top.model import SPAN_S

if TYPE_CHECKING:
    from zeusctl.session import Session

DOMAINS = (
    ("power", "power", 1000, "W"),
    ("power_limit", "limit", 1000, "W"),
    ("gpu_clock", "clock", 1, "MHz"),
    ("temperature", "temperature", 1, "C"),
)
"""Readings of the last hour to show: domain, title, divisor, unit."""

Points = list[tuple[float, float]]


class NodeSource:
    """The node, updated on request.

    Attributes:
        trouble: Why the last query failed; empty: it succeeded.
        power: Power of the last minutes, watts by UUID.
        asked_s: When the query in progress began, CLOCK_MONOTONIC; None: there is none.
    """

    def __init__(self, session: Session, gpus: str) -> None:
        self._session = session
        self._gpus = gpus
        self.trouble = ""
        self.power: dict[str, Points] = {}
        self.asked_s: float | None = None
        self.report: StatusReport = read(session, gpus, processes=True)

    def look(self, with_power: bool) -> None:
        """Queries again. An error is in `trouble`; the last report stays."""
        self.asked_s = time.monotonic()
        try:
            self.report = read(self._session, self._gpus, processes=True)
            if with_power:
                self._look_back()
        except ZeusIpcError as error:
            self.trouble = error.message
        else:
            self.trouble = ""
        finally:
            self.asked_s = None

    def state(self) -> str:
        """Why the figures are not the present ones, or what does not work; empty: all is well."""
        asked_s = self.asked_s
        if not os.path.exists(self._session.socket):
            return "zeusd has stopped: its socket is gone; the figures are the last ones"
        # After this time the view reports that zeusd does not answer.
        if asked_s is not None and time.monotonic() - asked_s > 1.5:
            return f"zeusd has not answered for {time.monotonic() - asked_s:.0f} s"
        return self.trouble or "; ".join(map(problem_text, self.report.node.problems))

    def last_hour(self, uuid: str, domain: str, divisor: int) -> Points:
        """Returns a reading's last hour; empty if nothing is known."""
        start_ns = max(0, time.monotonic_ns() - HOUR_S * SECOND_NS)
        try:
            points = self._session.client.timeline(uuid, domain, start_ns)
        except ZeusIpcError:
            return []
        return [(t_ns / 1e9, value / divisor) for t_ns, value in points]

    def _look_back(self) -> None:
        oldest_s = time.monotonic() - SPAN_S
        for gpu in self.report.gpus:
            known = self.power.get(gpu.uuid, [])
            self.asked_s = time.monotonic()
            start_ns = round(max(oldest_s, known[-1][0] if known else 0.0) * 1e9) + 1
            try:
                points = self._session.client.timeline(gpu.uuid, "power", start_ns)
            except ZeusIpcError:
                continue  # nothing sampled yet
            known = [*known, *((t_ns / 1e9, milliwatts / 1000) for t_ns, milliwatts in points)]
            self.power[gpu.uuid] = [point for point in known if point[0] >= oldest_s]

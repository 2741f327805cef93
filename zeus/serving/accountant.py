"""Keeps an instance's ledger from messages and sensor samples; any of them may be missing.

It has no socket and no thread. One instance is one engine on one GPU, or on several that process
every step together (tensor parallel), whose energies are added. With data parallelism each engine
has its own ledger and GPUs.
"""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from zeus.serving.front_end import WAIT_NS
from zeus.serving.ledger import Ledger
from zeus.serving.prior import Weights
from zeus.serving.rows import RequestEnergy, Settlement, Totals
from zeus.serving.wire import Arrival, EngineStep, Finish, Owner

if TYPE_CHECKING:
    from zeus_ipc.replies import Sample

LAG_NS = 2 * 10**9
"""Delay after which all steps and samples that ended have arrived."""
FRONT_END_LAG_NS = WAIT_NS + LAG_NS
FRONT_END_RULE = 0.08
"""Additional error of the rule with front-end statistics, relative, one sigma."""
PERIOD_NS = 3600 * 10**9
"""A period is settled after this time."""
MOST_KEPT = 100_000
"""Most finished requests whose energy is kept for queries."""
GAP_NS = 10**9
"""Longest time between samples of one GPU; a longer one is a gap."""
NEAR_NS = 5_000_000
"""Steps with a shorter gap form one busy interval."""
MOST_BUSY = 100_000
"""Most busy intervals that are kept."""
_SEQUENCE = re.compile(r"^\d+_")
"""vLLM's prefix of the id of each sequence of a request with several."""
_PROMPT = re.compile(r"-\d+$")
"""vLLM's suffix of the id of each prompt of a completion."""

PHASES = ("prefill", "decode", "shared", "idle")


class Meter:
    """Adds the energies of several GPUs over the sensor updates of the first."""

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = list(gpus)
        self._points: dict[str, deque[tuple[int, float]]] = {gpu: deque() for gpu in gpus}
        self._last: dict[str, Sample] = {}
        self._lead: dict[int, tuple[float, int | None]] = {}
        self.boards_j = dict.fromkeys(gpus, 0.0)
        """Energy of each GPU since its first sample, J, without gaps."""

    def sample(self, one: Sample) -> None:
        """Adds a sample; ignores samples of other GPUs."""
        gpu, t_ns, energy_uj = one.gpu, one.t_ns, one.energy_uj
        if gpu not in self._points:
            return
        last = self._last.get(gpu)
        if last is not None:
            if t_ns <= last.t_ns:
                return
            restarted = one.number <= last.number or energy_uj < last.energy_uj
            if restarted or t_ns - last.t_ns > GAP_NS:
                self._reset()
            else:
                self.boards_j[gpu] += (energy_uj - last.energy_uj) / 1e6
        self._last[gpu] = one
        self._points[gpu].append((t_ns, energy_uj / 1e6))
        if gpu == self._gpus[0]:
            mhz = one.gpu_clock_mhz
            self._lead[t_ns] = math.nan if mhz is None else float(mhz), one.seen_ns

    def updates(self) -> list[tuple[int, int, float, int, int, float]]:
        """Updates that all GPUs cover, each once, as arguments of `Ledger.update`."""
        found = []
        lead = self._points[self._gpus[0]]
        while len(lead) >= 2:
            begin_ns, end_ns = lead[0][0], lead[1][0]
            others = [self._energy(gpu, begin_ns, end_ns) for gpu in self._gpus[1:]]
            if any(one is None for one in others):
                if any(self._lacks(gpu, end_ns) for gpu in self._gpus[1:]):
                    break
                lead.popleft()  # before another GPU's first sample
                continue
            joules = lead[1][1] - lead[0][1] + sum(one for one in others if one is not None)
            clock, seen_ns = self._lead.pop(end_ns)
            first = begin_ns if seen_ns is None else max(begin_ns, end_ns - seen_ns)
            found.append((begin_ns, end_ns, max(0.0, joules), first, end_ns, clock))
            lead.popleft()
            for gpu in self._gpus[1:]:
                points = self._points[gpu]
                while len(points) > 2 and points[1][0] <= end_ns:
                    points.popleft()
        return found

    def _reset(self) -> None:
        for points in self._points.values():
            points.clear()
        self._last.clear()
        self._lead.clear()

    def _lacks(self, gpu: str, until_ns: int) -> bool:
        points = self._points[gpu]
        return not points or points[-1][0] < until_ns

    def _energy(self, gpu: str, begin_ns: int, end_ns: int) -> float | None:
        points = self._points[gpu]
        if not points or points[0][0] > begin_ns or points[-1][0] < end_ns:
            return None
        return _at(points, end_ns) - _at(points, begin_ns)


def _at(points: deque[tuple[int, float]], t_ns: int) -> float:
    """Energy at an instant, between two samples."""
    before = points[0]
    for point in points:
        if point[0] >= t_ns:
            span = point[0] - before[0]
            share = (t_ns - before[0]) / span if span else 1.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return before[1]


class IdleTime:
    """Energy of sensor updates in which no step ran, until a period's idle energy is settled."""

    def __init__(self) -> None:
        self._busy: deque[tuple[int, int]] = deque()
        self._updates: deque[tuple[int, int, float]] = deque()

    def step(self, begin_ns: int, end_ns: int) -> None:
        """Adds a step. Steps must be in the order of their ends; adjacent ones are merged."""
        busy = self._busy
        if busy and begin_ns <= busy[-1][1] + NEAR_NS:
            begin_ns = min(begin_ns, busy.pop()[0])
        busy.append((begin_ns, end_ns))

    def update(self, begin_ns: int, end_ns: int, joules: float) -> None:
        """Adds a sensor update."""
        self._updates.append((begin_ns, end_ns, joules))

    def joules(self, until_ns: int) -> float:
        """Energy of updates without a step that ended before a time, each once."""
        busy, updates, found = self._busy, self._updates, 0.0
        while updates and updates[0][1] <= until_ns:
            begin_ns, end_ns, joules = updates.popleft()
            while busy and busy[0][1] <= begin_ns:
                busy.popleft()
            if not busy or busy[0][0] >= end_ns:
                found += joules
        while len(busy) > MOST_BUSY:  # no update for a long time
            busy.popleft()
        return found


class Accountant:
    """One instance's ledger, and queries on it."""

    def __init__(
        self,
        gpus: Sequence[str],
        *,
        method: str = "regression",
        prior: Weights | None = None,
        front_end: bool = False,
    ) -> None:
        self.gpus = list(gpus)
        self._front_end = front_end
        self.ledger = Ledger(method, prior=prior)
        self.meter = Meter(gpus)
        self._rows: OrderedDict[str, RequestEnergy] = OrderedDict()
        self._tenants: OrderedDict[str, str] = OrderedDict()
        self._traces: OrderedDict[str, str] = OrderedDict()
        self._idle = IdleTime()
        self._number = 0
        self._end_ns = 0
        self._settled_ns: int | None = None
        self.steps_lost = 0
        self.tokens = {"prefill": 0.0, "decode": 0.0}
        self.settlements = 0
        self.newest = Totals()
        """Energy of the newest settled period."""
        self.residual = math.nan
        """Of the newest settled fit, relative."""
        self.uncertainty = math.nan
        """Mean of the newest settled period, relative, one sigma."""
        self.clock_hz = math.nan
        self._provisional = dict.fromkeys(PHASES, 0.0)
        self._final = dict.fromkeys(PHASES, 0.0)
        self._shown = dict.fromkeys(PHASES, 0.0)

    @property
    def phases(self) -> dict[str, float]:
        """Energy by phase, J, which never decreases: settled, plus provisional energy of finished
        requests."""
        for phase in PHASES:
            now_j = self._final[phase] + self._provisional[phase]
            self._shown[phase] = max(self._shown[phase], now_j)
        return dict(self._shown)

    def step(self, step: EngineStep) -> None:
        """Adds a step. If earlier steps are missing, their time is not attributed."""
        lost = step.number - self._number - 1
        if self._number and lost > 0:
            self.steps_lost += lost
            self.ledger.foreign(self._end_ns, step.begin_ns + 1, f"{lost} steps were not received")
        if step.number <= self._number:  # the engine was restarted: its requests have ended
            self.ledger.finish_all()
        self._number = step.number
        self._end_ns = max(self._end_ns, step.end_ns)
        self._idle.step(step.begin_ns, step.end_ns)
        self.ledger.step(*step[2:])  # all but its engine and number
        for prefill, tokens in zip(step.prefill, step.tokens, strict=True):
            self.tokens["prefill" if prefill else "decode"] += tokens

    def finish(self, message: Finish) -> None:
        """Adds the end of a request."""
        self.ledger.finish(message.request, message.tenant or self._tenant(message.request))

    def arrived(self, message: Arrival) -> None:
        """Adds the arrival of a request, with its trace."""
        if message.trace:
            _keep(self._traces, message.request, message.trace)

    def trace(self, request: str) -> str:
        """The `traceparent` of a request, once; empty: it is not traced."""
        return self._traces.pop(request, "")

    def owner(self, message: Owner) -> None:
        """Sets the tenant of a request that has not ended."""
        _keep(self._tenants, message.request, message.tenant)

    def sample(self, one: Sample) -> None:
        """Adds a sample that zeusd published."""
        if one.gpu_clock_mhz is not None:
            self.clock_hz = one.gpu_clock_mhz * 1e6
        self.meter.sample(one)

    def poll(self, now_ns: int) -> list[RequestEnergy]:
        """Does the periodic work.

        Returns:
            Requests whose energy became known or changed: provisional ones, or, when a period was
            settled, its final ones.
        """
        self._take_updates()
        until_ns = now_ns - (FRONT_END_LAG_NS if self._front_end else LAG_NS)
        self._provisional["idle"] += self._idle.joules(until_ns)
        if self._settled_ns is None:
            self._settled_ns = until_ns
        if until_ns - self._settled_ns >= PERIOD_NS:
            self._settled_ns = until_ns
            return self._settle(self.ledger.settle(until_ns))
        rows = self._stated(self.ledger.advance(until_ns))
        _count(self._provisional, rows)
        self._keep(rows)
        return rows

    def close(self) -> list[RequestEnergy]:
        """Settles everything; returns the final rows of all requests."""
        self._take_updates()
        return self._settle(self.ledger.settle())

    def energy(self, request: str) -> RequestEnergy | None:
        """A request's energy; None: it has not finished, or finished too long ago."""
        return self._rows.get(request)

    def _take_updates(self) -> None:
        for update in self.meter.updates():
            self.ledger.update(*update)
            self._idle.update(*update[:3])

    def _tenant(self, request: str) -> str:
        """The tenant of a request; the front end knows it by the id that all its sequences
        share."""
        known = self._tenants
        shared = _SEQUENCE.sub("", request)
        first = _PROMPT.sub("-0", shared)
        return known.get(request) or known.get(shared) or known.get(first, "")

    def _settle(self, done: Settlement) -> list[RequestEnergy]:
        rows = self._stated(done.rows)
        self.settlements += 1
        self.newest = done.totals
        if done.fit is not None:
            self.residual = done.fit.residual
        known = [row for row in rows if not row.refused]
        joules = math.fsum(row.joules for row in known)
        if joules > 0:
            self.uncertainty = (
                math.fsum(math.hypot(row.uncertainty_j, row.rule_uncertainty_j) for row in known)
                / joules
            )
        _count(self._final, rows)
        self._final["idle"] += done.totals.idle_j
        self._provisional = dict.fromkeys(PHASES, 0.0)
        self._keep(rows)
        return rows

    def _stated(self, rows: list[RequestEnergy]) -> list[RequestEnergy]:
        if not self._front_end:
            return rows
        return [
            replace(
                row,
                method=f"{row.method}, front end",
                rule_uncertainty_j=math.hypot(row.rule_uncertainty_j, FRONT_END_RULE * row.joules),
            )
            for row in rows
        ]

    def _keep(self, rows: Sequence[RequestEnergy]) -> None:
        for row in rows:
            self._rows.pop(row.request, None)
            self._rows[row.request] = row
        while len(self._rows) > MOST_KEPT:
            self._rows.popitem(last=False)


def _keep(known: OrderedDict[str, str], request: str, value: str) -> None:
    known[request] = value
    while len(known) > MOST_KEPT:
        known.popitem(last=False)


def _count(sums: dict[str, float], rows: Sequence[RequestEnergy]) -> None:
    for row in rows:
        if not row.refused:
            sums["prefill"] += row.prefill_j
            sums["decode"] += row.decode_j
            sums["shared"] += row.shared_j

"""Answers queries about the past from the sampler's histories.

A query about a window that has just ended waits for the tick that covers its end.
"""

from __future__ import annotations

import logging
import sys
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import TypeAlias

from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import Timeline, WindowEnergies
from zeus_ipc.requests import PAUSE, GetTimeline
from zeusd.core.model import Failure, device_failure
from zeusd.core.outbox import Deadlines
from zeusd.devices.port import DeviceError
from zeusd.energy.columns import GRAINS, Ring
from zeusd.energy.curve import STALL_NS
from zeusd.energy.history import ABSENT, History
from zeusd.runtime.reactor import Alarm, Reactor
from zeusd.runtime.sampler import Sampler
from zeusd.runtime.sources import GpuSource, Source

log = logging.getLogger(__name__)

MAX_READY = 256
"""Look-ups of one user that may wait for their turn."""

TURN_NS = 1_000_000
"""How long queries are answered until other events have their turn."""

HURRY_NS = 500_000
"""Pause between advances of simulated time."""

PATIENCE_NS = 400_000_000
"""How long a query waits for a missing tick, beyond three of the device's update periods."""

MAX_PATIENCE_NS = 3_000_000_000
MIN_TICKS = 2

_until_ns = attrgetter("until_ns")
_OVER = object()

JOINED_NS = 2_000_000
"""Pause between two windows of a query in which the GPU does not become idle: training steps."""

STALE_NS = 2_000_000_000
"""A device without a tick for this long is not assumed to continue as before, nor waited for."""


@dataclass(frozen=True)
class WindowsQuery:
    """Query for the energy of windows: start and end, ns, and what they are, and whether also for
    the time limited, see `GetWindows`."""

    windows: tuple[tuple[int, int, int], ...]
    limited: bool = False

    @property
    def until_ns(self) -> int:
        """The latest end."""
        return max((end_ns for _, end_ns, kind in self.windows if kind != PAUSE), default=0)

    @cached_property
    def pauses(self) -> list[tuple[int, int]]:
        """Spans in which the GPU had nothing to do, in order."""
        return sorted((begin, end) for begin, end, kind in self.windows if kind == PAUSE)

    @cached_property
    def joins(self) -> list[tuple[bool, bool]]:
        """Of each window, whether another one ends where it begins, or begins where it ends."""
        if len(self.windows) == 1:
            return [(False, False)]
        begins = sorted(begin_ns for begin_ns, _, kind in self.windows if kind != PAUSE)
        ends = sorted(end_ns for _, end_ns, kind in self.windows if kind != PAUSE)
        return [
            (_near(ends, begin_ns), _near(begins, end_ns)) for begin_ns, end_ns, _ in self.windows
        ]


_COLUMNS = {
    "power": 2,
    "average_power": 3,
    "memory_power": 4,
    "throttle_reasons": 5,
    "temperature": 6,
    "gpu_clock": 7,
    "memory_clock": 8,
    "power_limit": 9,
}


Answer: TypeAlias = WindowEnergies | Timeline | Failure


@dataclass(slots=True, eq=False)
class LookUp:
    """One query about the past of one or several sources.

    Attributes:
        spent: Called with the processor time of each turn, ns.
        lacking: The sources whose tick has not arrived.
        until_ns: The tick that it waits for, of the source `awaited`.
        wanted: Whether a client still waits for it; if not, `done` is not called.
        results: The results: a message, or a `Failure`.
    """

    names: tuple[str, ...]
    query: WindowsQuery | GetTimeline
    done: Callable[[LookUp], None]
    user: int = -1
    spent: Callable[[int], None] = lambda cpu_ns: None
    wanted: Callable[[], bool] = lambda: True
    results: dict[str, Answer] = field(default_factory=dict)
    lacking: list[str] = field(default_factory=list)
    until_ns: int = 0
    awaited: str = ""


class Historian:
    """Answers look-ups, a millisecond at a time, of users in turn. All methods but `ticked` belong
    to the loop's thread.

    A look-up waits for one source at a time, the one that ticks last, and is answered for all at
    once.
    """

    def __init__(
        self,
        sampler: Sampler,
        reactor: Reactor,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        hurry: Callable[[], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._reactor = reactor
        self._clock_ns = clock_ns
        self._hurry = hurry
        # By source, ordered by the tick that they wait for; with the time after which they are
        # answered without it.
        self._waiting: dict[str, list[LookUp]] = {}
        self._give_up: Deadlines[LookUp] = Deadlines()
        self._alarm = Alarm(reactor, self._end_patience)
        self._ready: dict[int, deque[tuple[LookUp, Iterator[None]]]] = {}
        self._turns: deque[int] = deque()
        self._working = False

    def submit(self, look_up: LookUp) -> None:
        """Answers a query later; `LookUp.done` is called unless it is no longer wanted."""
        if len(self._ready.get(look_up.user, ())) >= MAX_READY:
            failure = Failure(
                ErrorCode.OVERLOADED, "too many queries of energy already wait; try again later"
            )
            look_up.results.update(dict.fromkeys(look_up.names, failure))
            look_up.done(look_up)
            return
        if isinstance(look_up.query, WindowsQuery):
            look_up.until_ns = min(look_up.query.until_ns, self._clock_ns())
        look_up.lacking = [*look_up.names]
        self._begin(look_up)

    def ticked(self, name: str) -> None:
        """Handles a new tick of an awaited source. Called on the sampler's thread."""
        self._reactor.post(lambda: self._ticked(name))

    # --------------------------------------------------------------------------------- internals

    def _begin(self, look_up: LookUp) -> None:
        """Lets a look-up wait for the source that is read last, or answers it."""
        last_ns, awaited, period_ns, lacking = -1, "", 0, []
        now_ns = self._clock_ns()
        for name in look_up.lacking:
            source = self._sampler.find(name)
            if source is None or not (_has(source, look_up) or _silent(source, now_ns)):
                lacking.append(name)
                read_ns = sys.maxsize if source is None else source.next_tick_ns
                if read_ns > last_ns:
                    last_ns, awaited = read_ns, name
        look_up.lacking = lacking
        if not lacking:
            self._conclude(look_up)
            return
        if self._give_up.get(look_up) is None:
            for name in lacking:
                source = self._sampler.find(name)
                this_ns = 100_000_000 if source is None else source.period_ns
                period_ns = max(period_ns, this_ns)
                if source is not None and source.next_read_ns > last_ns:
                    self._sampler.hurry(name)  # it would be read later than that source
            patience_ns = min(3 * period_ns + PATIENCE_NS, MAX_PATIENCE_NS)
            due_ns = self._give_up[look_up] = now_ns + patience_ns
            self._wait_until(due_ns)
        look_up.awaited = awaited
        others = self._waiting.setdefault(awaited, [])
        insort(others, look_up, key=_until_ns)
        if len(others) == 1:
            self._await(awaited, look_up)

    def _await(self, name: str, look_up: LookUp) -> None:
        """Requests the next tick of a source, which may have arrived before the request."""
        self._sampler.hurry(name)
        source = self._sampler.find(name)
        if source is not None and _has(source, look_up):
            self._reactor.call_soon(lambda: self._ticked(name))

    def _ticked(self, name: str) -> None:
        """Answers queries whose last tick has arrived."""
        source, waiting, count = self._sampler.find(name), self._waiting.pop(name, []), 0
        if source is not None and source.history.ticks.end >= MIN_TICKS:
            count = bisect_right(waiting, source.history.ends_ns, key=_until_ns)
        if waiting[count:]:
            self._waiting[name] = waiting[count:]
            self._await(name, waiting[count])
        for look_up in waiting[:count]:
            self._begin(look_up)

    def _wait_until(self, due_ns: int) -> None:
        now_ns = self._clock_ns()
        self._alarm.set(due_ns if self._hurry is None else now_ns + HURRY_NS, now_ns)

    def _end_patience(self) -> None:
        if self._hurry is not None and self._give_up:
            self._hurry()
        for look_up in self._give_up.due(self._clock_ns()):
            self._waiting[look_up.awaited].remove(look_up)
            self._conclude(look_up)
        due_ns = self._give_up.earliest_ns()
        if due_ns is not None:
            self._wait_until(due_ns)

    def _conclude(self, look_up: LookUp) -> None:
        self._give_up.drop(look_up)
        if look_up.user not in self._ready:
            self._ready[look_up.user] = deque()
            self._turns.append(look_up.user)
        self._ready[look_up.user].append((look_up, self._answers(look_up)))
        if not self._working:
            self._go_on()

    def _go_on(self) -> None:
        self._working = bool(self._turns)
        if self._working:
            self._reactor.call_soon(self._work)

    def _work(self) -> None:
        """Answers for a while; then other events have their turn."""
        end_ns = time.monotonic_ns() + TURN_NS
        try:
            while self._turns and time.monotonic_ns() < end_ns:
                self._turn(self._turns.popleft())
        finally:
            self._go_on()

    def _turn(self, user: int) -> None:
        """One turn of a user's oldest look-up."""
        ready = self._ready[user]
        look_up, answers = ready.popleft()
        began_ns = time.thread_time_ns()
        try:
            # Windows, or hundreds of readings, until the next query has its turn.
            if look_up.wanted() and next(islice(answers, 32 - 1, None), _OVER) is not _OVER:
                ready.append((look_up, answers))
        finally:
            look_up.spent(time.thread_time_ns() - began_ns)
            if ready:
                self._turns.append(user)
            else:
                del self._ready[user]

    def _answers(self, look_up: LookUp) -> Iterator[None]:
        for name in look_up.names:
            source = self._sampler.find(name)
            try:
                look_up.results[name] = yield from self._answer(name, source, look_up)
            except Exception as error:  # the client must get a reply
                log.exception("look-up failed", extra={"event": "bug", "gpu": name})
                look_up.results[name] = Failure(
                    ErrorCode.INTERNAL,
                    f"zeusd failed while it looked {name} up ({type(error).__name__}); please "
                    "report it with zeusd's log",
                )
        look_up.done(look_up)

    def _answer(
        self, name: str, source: Source | None, look_up: LookUp
    ) -> Generator[None, None, Answer]:
        query = look_up.query
        history = None if source is None else source.history
        if source is None or history is None or history.ticks.end < MIN_TICKS:
            return _nothing(name, source)
        if isinstance(query, GetTimeline):
            return (yield from _timeline(source, query))
        behind_ns = look_up.until_ns - history.ends_ns
        if behind_ns > STALE_NS or (behind_ns > 0 and source.failure is not None):
            return _nothing(name, source)
        return (yield from _windows(source, history, query))


def _windows(
    source: Source, history: History, query: WindowsQuery
) -> Generator[None, None, WindowEnergies]:
    energies: list[int | None] = []
    uncertainties: list[int] = []
    limited: dict[str, list[int | None]] = {}
    if query.limited:
        limited = {reason: [] for reason, _ in history.limited.window(0, 0)}
    period_ns = source.period_ns
    begins_ns = (history.begins_ns or 0) - period_ns
    curve, aligns = source.curve, source.aligns
    for (begin_ns, end_ns, kind), joins in zip(query.windows, query.joins, strict=True):
        yield
        known = dict(history.limited.window(begin_ns, end_ns)) if limited else {}
        for reason, numbers in limited.items():
            numbers.append(known.get(reason))
        if begin_ns < begins_ns or kind == PAUSE:
            energies.append(None)
            uncertainties.append(0)
            continue
        energy = curve.window(begin_ns, end_ns, bool(kind) and aligns, joins, query.pauses)
        energies.append(energy.energy_uj)
        uncertainties.append(energy.uncertainty_uj)
    return WindowEnergies(
        energy_uj=energies,
        uncertainty_uj=uncertainties,
        limited_ms=limited,
        begins_ns=begins_ns,
        tick_ns=period_ns,
    )


def _near(times: Sequence[int], t_ns: int) -> bool:
    """Whether one of these ascending times is close to another time."""
    place = bisect_left(times, t_ns - JOINED_NS)
    return place < len(times) and times[place] <= t_ns + JOINED_NS


def _has(source: Source, look_up: LookUp) -> bool:
    history, until_ns = source.history, look_up.until_ns
    if history.ends_ns < until_ns or history.ticks.end < MIN_TICKS:
        return False
    if not isinstance(look_up.query, WindowsQuery) or not look_up.query.limited:
        return True
    if not history.limited.ends_ns or history.limited.read_ns >= until_ns:
        return True
    if isinstance(source, GpuSource):
        source.limited_until_ns = max(source.limited_until_ns, until_ns)
    return False


def _silent(source: Source, now_ns: int) -> bool:
    """Whether a source has stopped to tick, so that nobody waits for its next tick."""
    history = source.history
    if history.ticks.end < MIN_TICKS:
        return False
    # Update periods after which a device that cannot be read is not waited for.
    patience_ns = STALE_NS if source.failure is None else 3 * source.period_ns
    return now_ns - history.ends_ns > patience_ns


def _nothing(name: str, source: Source | None) -> Failure:
    if source is not None and isinstance(source.failure, DeviceError):
        return device_failure("reading the energy", name, source.failure)
    if source is not None and isinstance(source.failure, OSError):
        return Failure(ErrorCode.NOT_SUPPORTED, f"{name} cannot be read: {source.failure}")
    if isinstance(source, GpuSource) and source.module_reading is not None:
        return Failure(
            ErrorCode.NOT_SUPPORTED,
            f"{name} reports only the power of its superchip, not of the GPU; a newer "
            "driver reports both, and `zeusctl status` shows the superchip's",
        )
    return Failure(
        ErrorCode.NOT_SUPPORTED,
        f"{name} reports neither energy nor power at the moment; its driver may be stuck or its "
        "sensors may not work, look at `nvidia-smi -q -d POWER`",
    )


def _timeline(source: Source, query: GetTimeline) -> Generator[None, None, Timeline]:
    history = source.history
    times: list[int] = []
    values: list[int] = []
    limit = query.limit + 1
    rings = _rings(history, query.domain.value)
    for position, (ring, value) in enumerate(rings):
        # Use a coarser tier only where the finer one has no rows.
        finer = [one.column(0)[one.start] for one, _ in rings[position + 1 :] if one.end]
        end_ns = min([query.end_ns, *(begin_ns - 1 for begin_ns in finer)])
        rows = history.timeline(value, ring, query.start_ns, end_ns, limit - len(times))
        for seen, (t_ns, number) in enumerate(rows, 1):
            if number is not None:
                times.append(t_ns)
                values.append(number)
            if seen % 100 == 0:
                yield
    more = len(times) == limit
    return Timeline(t_ns=times[: query.limit], values=values[: query.limit], more=more)


def _gap(most_ns: int) -> Callable[[Ring, int], int | None]:
    """The time between a row and the one before it, ms; None: it is at most this long."""

    def of_row(ring: Ring, number: int) -> int | None:
        times = ring.column(0)
        gap_ns = times[number] - times[number - 1] if number else 0
        return gap_ns // 1_000_000 if gap_ns > most_ns else None

    return of_row


def _rings(history: History, domain: str) -> list[tuple[Ring, Callable[[Ring, int], int | None]]]:
    """The tiers that have a domain, coarsest (oldest) first."""
    if domain == "gap":
        most = zip(history.tiers, (period_ns + STALL_NS for period_ns, _ in GRAINS), strict=True)
        tiers = [(ring, _gap(most_ns)) for ring, most_ns in most]
        return [*reversed(tiers), (history.ticks, _gap(STALL_NS))]
    column = _COLUMNS[domain]

    def of_row(ring: Ring, number: int) -> int | None:
        value = ring.column(column)[number]
        return None if value == ABSENT else value

    rings: list[tuple[Ring, Callable[[Ring, int], int | None]]] = [
        (ring, of_row) for ring in reversed(history.tiers)
    ]
    if domain == "power":
        rings.append((history.ticks, lambda _, number: history.power_mw[number]))
    return rings

"""Answers what needs no rule: present state, sensors, clocks, and the past.

None of it passes through the core. Equal readings of a GPU that are asked for at the same time are
one call to its driver, and a state is as good as new for two of its sensors' update periods unless
something was written meanwhile: however many clients ask, a driver is asked a few times a second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

from zeus_ipc.controls import Control
from zeus_ipc.replies import (
    EnergyReading,
    Envelope,
    GpuProcesses,
    GpuState,
    PastResults,
    Refused,
    Results,
)
from zeus_ipc.requests import (
    GetClocks,
    GetEnergy,
    GetPower,
    GetProcesses,
    GetState,
    GetTimeline,
    GetWindows,
    PastRequest,
    ReadRequest,
    Request,
)
from zeus_ipc.wire import PROTOCOL_VERSION, Message
from zeusd.core.core import Core
from zeusd.core.effects import Read, Reading
from zeusd.core.model import Failure
from zeusd.core.pending import error_body, no_answer
from zeusd.core.requests import LATE, MAX_WAITING_REQUESTS, TOO_MANY_WAIT
from zeusd.runtime.historian import LookUp, TimelineQuery, WindowsQuery
from zeusd.runtime.reactor import Alarm, Reactor
from zeusd.runtime.sampling import Sampling

_READINGS: dict[type[Any], Reading] = {
    GetState: Reading.STATE,
    GetEnergy: Reading.ENERGY,
    GetPower: Reading.POWER,
    GetClocks: Reading.CLOCKS,
    GetProcesses: Reading.PROCESSES,
}

STATE_NS = 500_000_000
"""Longest time for which a GPU's state is as good as new."""

PROCESSES_NS = 1_000_000_000
"""How long a list of processes is as good as new: a driver takes milliseconds to make one."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request, and what it still waits for."""

    conn: int
    request_id: int
    deadline_ns: int
    of: Callable[[dict[str, Message | None]], Message]
    results: dict[str, Message | None]
    missing: int
    look_up: LookUp | None = None


@dataclass(slots=True, eq=False)
class _Call:
    """A reading of a GPU that is under way, and who waits for it."""

    uuid: str
    reading: Reading
    askers: list[_Pending] = field(default_factory=list)


class Reads:
    """Answers requests that read. All methods belong to the reactor's thread."""

    def __init__(
        self,
        core: Core,
        reactor: Reactor,
        sampling: Sampling,
        submit: Callable[[Read], None],
        reply: Callable[[int, Envelope], None],
        charge: Callable[[int, int], None] = lambda conn, cpu_ns: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._reactor = reactor
        self._sampling = sampling
        self._submit = submit
        self._reply = reply
        self._charge = charge
        self._clock_ns = clock_ns
        self._tickets = itertools.count(-1, -1)
        self._calls: dict[int, _Call] = {}
        self._joinable: dict[tuple[str, Reading], _Call] = {}
        self._known: dict[tuple[str, Reading], tuple[int, Message]] = {}
        self._pending: dict[_Pending, None] = {}
        self._of_connection: dict[int, set[_Pending]] = {}
        self._alarm = Alarm(reactor, self._expire)

    @staticmethod
    def serves(request: Request) -> TypeGuard[ReadRequest | PastRequest]:
        """Whether this is a request that only reads."""
        return type(request) in _READINGS or isinstance(request, (GetWindows, GetTimeline))

    def request(self, conn: int, request: ReadRequest | PastRequest) -> None:
        """A client asks."""
        if self._core.silent:
            return
        if request.deadline_ns and self._clock_ns() > request.deadline_ns:
            self._refuse(conn, request.id, LATE)
        elif len(self._of_connection.get(conn, ())) >= MAX_WAITING_REQUESTS:
            self._refuse(conn, request.id, TOO_MANY_WAIT)
        elif isinstance(request, GetWindows):
            parts = iter(request.windows)
            windows = WindowsQuery(tuple(zip(parts, parts, parts, strict=True)))
            self._look_up(conn, request, windows)
        elif isinstance(request, GetTimeline):
            domain, limit = request.domain.value, request.limit
            timeline = TimelineQuery(domain, request.start_ns, request.end_ns, limit)
            self._look_up(conn, request, timeline)
        else:
            self._read(conn, request)

    def written(self, uuid: str) -> None:
        """A control of this GPU is being written: what was read before no longer counts."""
        self._known.pop((uuid, Reading.STATE), None)
        self._joinable.pop((uuid, Reading.STATE), None)

    def closed(self, conn: int) -> None:
        """A connection ended: nobody waits for what it asked for."""
        if conn not in self._of_connection:
            return
        for pending in list(self._of_connection[conn]):
            self._forget(pending)
            if pending.look_up is not None:
                pending.look_up.wanted = False
        for call in self._calls.values():
            call.askers = [pending for pending in call.askers if pending.conn != conn]

    def done(self, ticket: int, result: object) -> None:
        """A reading returned."""
        call = self._calls.pop(ticket)
        if self._joinable.get((call.uuid, call.reading)) is call:
            del self._joinable[call.uuid, call.reading]
            if call.reading in (Reading.STATE, Reading.PROCESSES) and isinstance(result, Message):
                self._known[call.uuid, call.reading] = (self._sampling.sample_ns(), result)
        for pending in call.askers:
            self._put(pending, {call.uuid: self._complete(pending, call.uuid, result)})

    # --------------------------------------------------------------------------------- internals

    def _read(self, conn: int, request: ReadRequest) -> None:
        reading = _READINGS[type(request)]
        pending = self._track(conn, request, lambda found: Results(gpus=found), request.gpus)
        node = self._core.node
        for uuid in list(pending.results):
            if uuid not in node.gpus:
                self._put(pending, {uuid: node.unknown(uuid)})
            elif node.quiesced is not None:
                self._put(pending, {uuid: node.quiesced})
            elif (known := self._fresh(uuid, reading)) is not None:
                self._put(pending, {uuid: self._complete(pending, uuid, known)})
            else:
                self._call(uuid, reading, pending)

    def _fresh(self, uuid: str, reading: Reading) -> Message | None:
        """What was read a moment ago, if it still counts."""
        found = self._known.get((uuid, reading))
        if found is None:
            return None
        read_ns, result = found
        lasts_ns = PROCESSES_NS
        if reading is Reading.STATE:
            lasts_ns = min(2 * (self._sampling.period_ns(uuid) or 0), STATE_NS)
        return result if self._sampling.sample_ns() - read_ns < lasts_ns else None

    def _call(self, uuid: str, reading: Reading, pending: _Pending) -> None:
        call = self._joinable.get((uuid, reading))
        if call is not None:
            call.askers.append(pending)
            return
        ticket = next(self._tickets)
        call = self._calls[ticket] = _Call(uuid, reading, [pending])
        self._joinable[uuid, reading] = call
        self._submit(Read(ticket, uuid, reading))

    def _complete(self, pending: _Pending, uuid: str, result: object) -> object:
        """A state with what only the core knows: no driver reads locked clocks back.

        Which process it is concerns its own user and administrators only.
        """
        if isinstance(result, GpuProcesses):
            processes = [
                one
                if self._core.may_know(pending.conn, one.uid)
                else one.model_copy(update=dict.fromkeys(("pid", "command", "job")))
                for one in result.processes
            ]
            return result.model_copy(update={"processes": processes})
        if isinstance(result, EnergyReading):
            return result.model_copy(update={"scope": self._sampling.energy_scope(uuid)})
        if not isinstance(result, GpuState):
            return result
        there = self._core.node.gpus[uuid].machines
        read = result.controls.items()
        controls = {name: value for name, value in read if Control(name) in there}
        held = self._core.node.unreadable(uuid)
        known = {f"locked_{name}_mhz": value or None for name, value in held.items()}
        scope, controls = self._sampling.energy_scope(uuid), {**controls, **held}
        return result.model_copy(update={**known, "energy_scope": scope, "controls": controls})

    def _look_up(
        self, conn: int, request: PastRequest, query: WindowsQuery | TimelineQuery
    ) -> None:
        pending = self._track(
            conn, request, lambda found: PastResults(sources=found), request.sources
        )
        node = self._core.node
        names = []
        for name in list(pending.results):
            if name in node.gpus or name in node.sources:
                names.append(name)
            else:
                self._put(pending, {name: node.unknown(name)})

        def done(look_up: LookUp) -> None:
            self._put(pending, look_up.results)

        if names:
            spent = partial(self._charge, conn)
            pending.look_up = LookUp(tuple(names), query, done, self._core.user(conn), spent)
            self._sampling.look_up(pending.look_up)

    # ----------------------------------------------------------------------------------- replies

    def _track(
        self,
        conn: int,
        request: ReadRequest | PastRequest,
        of: Callable[[dict[str, Message | None]], Message],
        names: Iterable[str],
    ) -> _Pending:
        results: dict[str, Message | None] = dict.fromkeys(names)
        pending = _Pending(conn, request.id, request.deadline_ns, of, results, len(results))
        self._pending[pending] = None
        self._of_connection.setdefault(conn, set()).add(pending)
        if request.deadline_ns:
            self._alarm.set(request.deadline_ns + 1, self._clock_ns())
        return pending

    def _expire(self) -> None:
        now_ns = self._clock_ns()
        for pending in list(self._pending):
            if pending.deadline_ns and now_ns > pending.deadline_ns:
                missing = [name for name, found in pending.results.items() if found is None]
                self._put(pending, {name: no_answer(name) for name in missing})
        left_ns = [pending.deadline_ns for pending in self._pending if pending.deadline_ns]
        if left_ns:
            self._alarm.set(min(left_ns) + 1, now_ns)

    def _put(self, pending: _Pending, found: Mapping[str, object]) -> None:
        if pending not in self._pending:
            return  # it came after the deadline, or after the connection's end
        for name, result in found.items():
            if pending.results[name] is None:
                if isinstance(result, Failure):
                    result = Refused(error=error_body(result, name))
                assert isinstance(result, Message)
                pending.results[name] = result
                pending.missing -= 1
        if pending.missing == 0:
            self._forget(pending)
            result = pending.of(pending.results)
            self._answer(
                pending.conn,
                {"v": PROTOCOL_VERSION, "id": pending.request_id, "result": result},
            )

    def _forget(self, pending: _Pending) -> None:
        del self._pending[pending]
        others = self._of_connection[pending.conn]
        others.discard(pending)
        if not others:
            del self._of_connection[pending.conn]

    def _refuse(self, conn: int, request_id: int, failure: Failure) -> None:
        error = error_body(failure)
        self._answer(conn, {"v": PROTOCOL_VERSION, "id": request_id, "error": error})

    def _answer(self, conn: int, body: Envelope) -> None:
        self._core.add_deferred(conn, body)
        self._reply(conn, body)

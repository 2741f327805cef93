"""Answers requests that need no rule: present state, sensors, clocks, and the past.

They do not pass through the core. Equal concurrent readings of a GPU are one call to its driver,
and a state is reused for two of its sensors' update periods unless something was written
meanwhile: a driver is called a few times a second, however many clients there are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
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
from zeus_ipc.wire import Message
from zeusd.core.core import Core
from zeusd.core.effects import Read, ReadingMade
from zeusd.core.outbox import Deadlines
from zeusd.core.pending import Answer, Pending, envelope
from zeusd.core.requests import LATE, MAX_WAITING_REQUESTS, TOO_MANY_WAIT
from zeusd.runtime.historian import LookUp, WindowsQuery
from zeusd.runtime.reactor import Alarm, Reactor
from zeusd.runtime.sampling import Sampling

_READINGS: dict[type[Any], ReadingMade] = {
    GetState: ReadingMade.STATE,
    GetEnergy: ReadingMade.ENERGY,
    GetPower: ReadingMade.POWER,
    GetClocks: ReadingMade.CLOCKS,
    GetProcesses: ReadingMade.PROCESSES,
}

PROCESSES_NS = 1_000_000_000
"""How long a list of processes is reused: a driver takes milliseconds to make one."""


@dataclass(slots=True, eq=False)
class _PendingRead:
    """A reading of a GPU in progress, and the requests that wait for it."""

    uuid: str
    reading: ReadingMade
    askers: list[Pending] = field(default_factory=list)


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
        self._calls: dict[int, _PendingRead] = {}
        self._joinable: dict[tuple[str, ReadingMade], _PendingRead] = {}
        self._known: dict[tuple[str, ReadingMade], tuple[int, Message]] = {}
        self._deadlines: Deadlines[Pending] = Deadlines()
        self._of_connection: dict[int, set[Pending]] = {}
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
            self._answer(conn, request.id, LATE)
        elif len(self._of_connection.get(conn, ())) >= MAX_WAITING_REQUESTS:
            self._answer(conn, request.id, TOO_MANY_WAIT)
        elif isinstance(request, GetWindows):
            parts = iter(request.windows)
            whole = tuple(zip(parts, parts, parts, strict=True))
            windows = WindowsQuery(whole, request.limited)
            self._look_up(conn, request, windows)
        elif isinstance(request, GetTimeline):
            self._look_up(conn, request, request)
        else:
            self._read(conn, request)

    def written(self, uuid: str) -> None:
        """A control of this GPU is being written: what was read before no longer counts."""
        self._known.pop((uuid, ReadingMade.STATE), None)
        self._joinable.pop((uuid, ReadingMade.STATE), None)

    def closed(self, conn: int) -> None:
        """A connection ended: drops its requests."""
        for pending in self._of_connection.pop(conn, ()):
            pending.cancel()
            self._deadlines.drop(pending)

    def done(self, ticket: int, result: object) -> None:
        """A reading returned."""
        call = self._calls.pop(ticket)
        if self._joinable.get((call.uuid, call.reading)) is call:
            del self._joinable[call.uuid, call.reading]
            if call.reading in (ReadingMade.STATE, ReadingMade.PROCESSES) and isinstance(
                result, Message
            ):
                self._known[call.uuid, call.reading] = (self._sampling.sample_ns(), result)
        for pending in call.askers:
            if pending.waits:
                pending.put(call.uuid, self._complete(pending, call.uuid, result))

    # --------------------------------------------------------------------------------- internals

    def _read(self, conn: int, request: ReadRequest) -> None:
        reading = _READINGS[type(request)]
        node, pending = (
            self._core.node,
            self._track(conn, request, request.gpus, lambda gpus: Results(gpus=gpus)),
        )
        for uuid in pending.names:
            if uuid not in node.gpus:
                pending.put(uuid, node.unknown(uuid))
            elif node.quiesced is not None:
                pending.put(uuid, node.quiesced)
            elif (known := self._fresh(uuid, reading)) is not None:
                pending.put(uuid, self._complete(pending, uuid, known))
            else:
                self._call(uuid, reading, pending)

    def _fresh(self, uuid: str, reading: ReadingMade) -> Message | None:
        """A recent result that may be reused; None: there is none."""
        known = self._known.get((uuid, reading))
        if known is None:
            return None
        read_ns, result = known
        lasts_ns = PROCESSES_NS
        if reading is ReadingMade.STATE:
            # Longest time for which a GPU's state is reused.
            lasts_ns = min(2 * (self._sampling.period_ns(uuid) or 0), 500_000_000)
        return result if self._sampling.sample_ns() - read_ns < lasts_ns else None

    def _call(self, uuid: str, reading: ReadingMade, pending: Pending) -> None:
        call = self._joinable.get((uuid, reading))
        if call is not None:
            call.askers.append(pending)
            return
        ticket = next(self._tickets)
        call = self._calls[ticket] = _PendingRead(uuid, reading, [pending])
        self._joinable[uuid, reading] = call
        self._submit(Read(ticket, uuid, reading))

    def _complete(self, pending: Pending, uuid: str, result: object) -> object:
        """A reading with what only the core knows, such as locked clocks, which no driver reads
        back; without what identifies processes of other users."""
        if isinstance(result, GpuProcesses):
            reader, access = self._core.connection(pending.conn), self._core.node.settings.access
            assert reader is not None
            admin = access.is_admin(reader.peer)
            processes = [
                process
                if admin or process.uid == reader.peer.uid
                else process.model_copy(update=dict.fromkeys(("pid", "command", "job")))
                for process in result.processes
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
        limits = result.power_limit_mw, result.enforced_power_limit_mw
        own = {
            "energy_scope": scope,
            "controls": controls,
            "limited_ms": self._sampling.limited_ms(uuid),
            "limit_author": self._core.node.limit_author(uuid, *limits),
        }
        return result.model_copy(update={**known, **own})

    def _look_up(self, conn: int, request: PastRequest, query: WindowsQuery | GetTimeline) -> None:
        node, pending = (
            self._core.node,
            self._track(
                conn, request, request.sources, lambda sources: PastResults(sources=sources)
            ),
        )
        names = [name for name in pending.names if name in node.gpus or name in node.sources]
        for name in pending.names:
            if name not in names:
                pending.put(name, node.unknown(name))

        def done(look_up: LookUp) -> None:
            for name, result in look_up.results.items():
                pending.put(name, result)

        if names:
            spent = partial(self._charge, conn)
            connection = self._core.connection(conn)
            user = -1 if connection is None else node.owner_of(connection.peer.uid)
            look_up = LookUp(tuple(names), query, done, user, spent, lambda: pending.waits)
            self._sampling.look_up(look_up)

    # ----------------------------------------------------------------------------------- replies

    def _track(
        self,
        conn: int,
        request: ReadRequest | PastRequest,
        names: list[str],
        of: Callable[[dict[str, Message | None]], Message],
    ) -> Pending:
        def over(results: dict[str, Message | None]) -> None:
            self._deadlines.drop(pending)
            others = self._of_connection[conn]
            others.discard(pending)
            if not others:
                del self._of_connection[conn]
            self._answer(conn, request.id, of(results))

        pending = Pending(names, over, conn)
        self._of_connection.setdefault(conn, set()).add(pending)
        if request.deadline_ns:
            self._deadlines[pending] = request.deadline_ns + 1
            self._alarm.set(request.deadline_ns + 1, self._clock_ns())
        return pending

    def _expire(self) -> None:
        now_ns = self._clock_ns()
        for pending in self._deadlines.due(now_ns):
            pending.expire()
        if (due_ns := self._deadlines.earliest_ns()) is not None:
            self._alarm.set(due_ns, now_ns)

    def _answer(self, conn: int, request_id: int, result: Answer) -> None:
        body = envelope(request_id, result)
        if (connection := self._core.connection(conn)) is not None:
            connection.add_deferred(body)
        self._reply(conn, body)

"""Answers questions about the past from the sampler's histories, on a thread of its own.

A question about a window that has just ended waits for the tick that covers its end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zeus_ipc.errors import ErrorCode
from zeusd.core.effects import Read, TimelineQuery, WindowsQuery
from zeusd.core.model import Failure, device_failure
from zeusd.devices.port import DeviceError
from zeusd.energy.columns import Ring
from zeusd.energy.history import ABSENT, History
from zeusd.runtime.sampler import Sampler
from zeusd.runtime.sources import Source

log = logging.getLogger(__name__)

MAX_QUEUED = 1024
PATIENCE_NS = 400_000_000
"""How long a question waits for a tick that does not come, beyond three of the device's ticks."""

MAX_PATIENCE_NS = 3_000_000_000
MIN_TICKS = 2

STALE_NS = 2_000_000_000
"""A device that has shown no tick for so long is not taken to go on as it did."""

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


@dataclass(slots=True)
class _Waiting:
    read: Read
    until_ns: int
    give_up_ns: int


class Historian:
    """Takes `Read`s of the past.

    Args:
        sampler: Whose histories.
        done: Called with the ticket and the result of each.
        clock_ns: CLOCK_MONOTONIC.
        hurry: Called while a question waits for a tick; lets simulated time pass.
    """

    def __init__(
        self,
        sampler: Sampler,
        done: Callable[[int, object], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        hurry: Callable[[], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._done = done
        self._clock_ns = clock_ns
        self._hurry = hurry
        self._queue: queue.SimpleQueue[Read | str | None] = queue.SimpleQueue()
        self._waiting: dict[str, list[_Waiting]] = {}
        self._thread = threading.Thread(target=self._run, name="historian", daemon=True)
        self._thread.start()

    def submit(self, read: Read) -> None:
        """Queues a question; `done` follows in any case."""
        if self._queue.qsize() >= MAX_QUEUED:
            self._done(
                read.ticket,
                Failure(ErrorCode.OVERLOADED, "zeusd has too many look-ups to do; ask again later"),
            )
        else:
            self._queue.put(read)

    def ticked(self, name: str) -> None:
        """A source that somebody waits for has a new tick. Called on the sampler's thread."""
        self._queue.put(name)

    def stop(self) -> None:
        """Ends the thread. Does not wait."""
        self._queue.put(None)

    # --------------------------------------------------------------------------------- internals

    def _run(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=self._timeout_s())
            except queue.Empty:
                self._again(list(self._waiting))
                continue
            if item is None:
                return
            if isinstance(item, str):
                self._again([item])
            else:
                self._begin(item)

    def _timeout_s(self) -> float | None:
        if not self._waiting:
            return None
        if self._hurry is not None:
            self._hurry()
            return 0.0005
        due_ns = min(one.give_up_ns for waiting in self._waiting.values() for one in waiting)
        return max(0.0005, (due_ns - self._clock_ns()) / 1e9)

    def _begin(self, read: Read) -> None:
        source = self._sampler.find(read.gpu)
        period_ns = 100_000_000 if source is None else source.period_ns
        now_ns = self._clock_ns()
        query = read.query
        until_ns = min(query.until_ns, now_ns) if isinstance(query, WindowsQuery) else 0
        patience_ns = min(3 * period_ns + PATIENCE_NS, MAX_PATIENCE_NS)
        waiting = _Waiting(read, until_ns, now_ns + patience_ns)
        self._waiting.setdefault(read.gpu, []).append(waiting)
        self._again([read.gpu])

    def _again(self, names: list[str]) -> None:
        now_ns = self._clock_ns()
        for name in names:
            source = self._sampler.find(name)
            left = []
            for one in self._waiting.get(name, ()):
                if now_ns >= one.give_up_ns or (source is not None and _has(source, one.until_ns)):
                    self._done(one.read.ticket, self._answer(source, one))
                else:
                    left.append(one)
            if left:
                self._waiting[name] = left
                self._sampler.hurry(name)
                # The tick may have come before it was known that somebody waits for it.
                if source is not None and any(_has(source, one.until_ns) for one in left):
                    self._queue.put(name)
            else:
                self._waiting.pop(name, None)

    def _answer(self, source: Source | None, waiting: _Waiting) -> object:
        read = waiting.read
        try:
            if source is None or source.history.ticks.end < MIN_TICKS:
                return _nothing(read.gpu, source)
            if isinstance(read.query, TimelineQuery):
                return _timeline(source, read.query)
            behind_ns = waiting.until_ns - source.history.ends_ns
            if behind_ns > STALE_NS or (behind_ns > 0 and source.failure is not None):
                return _nothing(read.gpu, source)
            assert isinstance(read.query, WindowsQuery)
            return self._windows(source, read.query)
        except Exception as error:  # whoever asked must hear something
            log.exception("look-up failed", extra={"event": "bug", "gpu": read.gpu})
            return Failure(
                ErrorCode.INTERNAL,
                f"zeusd failed while it looked {read.gpu} up ({type(error).__name__}); please "
                "report it with the daemon's log",
            )

    def _windows(self, source: Source, query: WindowsQuery) -> dict[str, Any]:
        energies: list[int | None] = []
        uncertainties: list[int] = []
        begins_ns = (source.history.begins_ns or 0) - source.period_ns
        for begin_ns, end_ns, aligned in query.windows:
            if begin_ns < begins_ns:
                energies.append(None)
                uncertainties.append(0)
                continue
            energy = source.curve.window(begin_ns, end_ns, bool(aligned) and source.aligns)
            energies.append(energy.energy_uj)
            uncertainties.append(energy.uncertainty_uj)
        return {
            "energy_uj": energies,
            "uncertainty_uj": uncertainties,
            "begins_ns": begins_ns,
            "tick_ns": source.period_ns,
        }


def _has(source: Source, until_ns: int) -> bool:
    history = source.history
    return history.ticks.end >= MIN_TICKS and history.ends_ns >= until_ns


def _nothing(name: str, source: Source | None) -> Failure:
    if source is not None and isinstance(source.failure, DeviceError):
        return device_failure("reading the energy", name, source.failure)
    return Failure(
        ErrorCode.NOT_SUPPORTED,
        f"{name} shows neither energy nor power at the moment; its driver may be stuck or its "
        "sensors may not work, look at `nvidia-smi -q -d POWER`",
    )


def _timeline(source: Source, query: TimelineQuery) -> dict[str, Any]:
    history = source.history
    times: list[int] = []
    values: list[int] = []
    limit = query.limit + 1
    rings = _rings(history, query.domain)
    for position, (ring, value) in enumerate(rings):
        # What a finer tier has is not taken from a coarser one.
        finer = [one.column(0)[one.start] for one, _ in rings[position + 1 :] if one.end]
        end_ns = min([query.end_ns, *(begin_ns - 1 for begin_ns in finer)])
        for t_ns, found in history.timeline(
            value, ring, query.start_ns, end_ns, limit - len(times)
        ):
            times.append(t_ns)
            values.append(found)
    more = len(times) == limit
    return {"t_ns": times[: query.limit], "values": values[: query.limit], "more": more}


def _rings(history: History, domain: str) -> list[tuple[Ring, Callable[[Ring, int], int | None]]]:
    """Where a domain is kept, the coarsest (oldest) first."""
    column = _COLUMNS[domain]

    def of_row(ring: Ring, number: int) -> int | None:
        value = ring.column(column)[number]
        return None if value == ABSENT else value

    rings: list[tuple[Ring, Callable[[Ring, int], int | None]]] = [
        (ring, of_row) for ring in reversed(history.tiers)
    ]
    if domain == "power":
        rings.append((history.ticks, lambda ring, number: ring.column(3)[number]))
    return rings

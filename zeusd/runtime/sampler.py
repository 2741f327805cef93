"""Reads the energy of all devices for all clients on one thread.

Each device is read when its sensors are about to change (`zeusd.energy.ticks`). If the driver
blocks a call, the thread is left with it and another thread reads the other devices.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set

from zeusd.devices.port import DeviceError
from zeusd.runtime.sources import Source, TickReading

log = logging.getLogger(__name__)

STUCK_NS = 1_000_000_000

LATE_NS, LATE_PERIODS = 2_000_000_000, 10
"""A source whose newest sample is older than this time and so many update periods is overdue."""


# One thread for all devices, as a reading is one short call and every further thread competes
# with zeusd's loop for the interpreter. But a driver may hold a call for long: `_busy` says which
# source is being read and since when, and a second thread then takes over the others, so that one
# hung GPU costs its own samples only. A thread that is left behind ends when its call returns.
class Sampler:
    """Reads each source when it is due."""

    def __init__(
        self,
        on_tick: Callable[[str], None],
        publish: Callable[[str, TickReading], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._guard = threading.Lock()
        self._streamed: frozenset[str] = frozenset()
        self._on_tick = on_tick
        self._publish = publish
        self._clock_ns = clock_ns
        self._sources: dict[str, Source] = {}
        self._rotation: dict[str, Source] = {}
        self._urgent: set[str] = set()
        self._wake = threading.Lock()
        self._wake.acquire()
        self._wakes_ns = sys.maxsize
        self._generation = 0
        self._busy: tuple[str, int] | None = None
        self._stuck: set[str] = set()
        self._paused: set[str] = set()
        self._added_ns: dict[str, int] = {}
        self._stopped = False
        self._threads: list[threading.Thread] = []

    def add(self, name: str, source: Source) -> None:
        """Starts to sample a source, or resumes after it was found again."""
        with self._guard:
            self._sources[name] = source
            self._added_ns[name] = self._clock_ns()
            self._paused.discard(name)
            self._rotation = {**self._rotation, name: source}
        self._awaken()

    def pause(self, names: Iterable[str], timeout_s: float) -> bool:
        """Stops reading these until they are added again. Their history remains available.

        Returns whether no reading of them is in progress.
        """
        gone = frozenset(names)
        with self._guard:
            self._paused |= gone
            self._rotation = {key: one for key, one in self._rotation.items() if key not in gone}
        end_ns = time.monotonic_ns() + round(timeout_s * 1e9)
        while self.reads(gone):
            if time.monotonic_ns() > end_ns:
                return False
            time.sleep(0.001)
        return True

    def reads(self, names: Set[str]) -> bool:
        """Whether a reading of one of these is in progress."""
        busy = self._busy
        return bool(names & self._stuck) or (busy is not None and busy[0] in names)

    def find(self, name: str) -> Source | None:
        """The source with a name."""
        return self._sources.get(name)

    def names(self) -> Iterator[str]:
        """All sources."""
        return iter(list(self._sources))

    def overdue(self) -> Iterator[tuple[str, int, DeviceError | OSError | None]]:
        """Sources without new samples: the time of the newest one, and why, if that is known."""
        now_ns = self._clock_ns()
        for name in self._sources.keys() - self._paused:
            source, added_ns = self._sources[name], self._added_ns[name]
            ends_ns = source.history.ends_ns or added_ns
            if now_ns - max(ends_ns, added_ns) > LATE_NS + LATE_PERIODS * source.period_ns:
                why = TimeoutError("a call to the driver does not return")
                yield name, ends_ns, why if name in self._stuck else source.failure

    def stream(self, names: frozenset[str]) -> None:
        """Reads exactly these at each tick, and publishes what they show."""
        self._streamed = names
        self._awaken()

    def hurry(self, name: str) -> None:
        """Requests a call of `on_tick` at this source's next tick."""
        self._urgent.add(name)
        source = self._sources.get(name)
        if source is None or source.next_tick_ns < self._wakes_ns:
            self._awaken()

    # ---------------------------------------------------------------------------------- reading

    @property
    def next_ns(self) -> int | None:
        """When to read next; None: there are no sources."""
        wanted = self._urgent | self._streamed
        return min(
            [
                source.next_tick_ns if name in wanted else source.latest_read_ns
                for name, source in self._rotation.items()
            ],
            default=None,
        )

    def run_due(self, now_ns: int) -> None:
        """Reads every source that is due."""
        for name, source in self._rotation.items():
            if self._due(name, source, now_ns):
                self._read(name, source)

    def _due(self, name: str, source: Source, now_ns: int) -> bool:
        if source.next_tick_ns > now_ns:
            return False
        return source.next_read_ns <= now_ns or name in self._urgent or name in self._streamed

    def _read(self, name: str, source: Source) -> None:
        try:
            streamed = name in self._streamed
            awaited = streamed or name in self._urgent
            number = source.history.ticks.end if streamed else 0
            edge = source.read(streamed, awaited)
        except Exception:  # the other devices must be read in any case
            log.exception("sampling failed", extra={"event": "bug", "gpu": name})
            with self._guard:
                self._rotation = {key: one for key, one in self._rotation.items() if key != name}
            return
        # A request may come during the reading, whose tick is then recorded later.
        if name in self._urgent and (edge is not None or not awaited):
            self._urgent.discard(name)
            self._on_tick(name)
        if edge is not None and streamed:
            h = source.history
            for tick in range(number, h.ticks.end):
                t_ns, energy_uj, power_mw = h.t_ns[tick], h.energy_uj[tick], h.power_mw[tick]
                self._publish(name, TickReading(t_ns, energy_uj, power_mw, source.slow, tick + 1))

    # ----------------------------------------------------------------------------------- threads

    def start(self) -> None:
        """Starts to read on its own thread."""
        self._generation += 1
        thread = threading.Thread(
            target=self._run, args=(self._generation,), name="sampler", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def stop(self) -> None:
        """Stops it. Waits briefly."""
        self._stopped = True
        self._awaken()
        for thread in self._threads[-1:]:
            thread.join(timeout=1.0)
        for source in self._sources.values():
            _ = source.history  # which completes it

    def replace_stuck(self) -> None:
        """Abandons a thread that a driver blocks, and continues with another."""
        busy = self._busy
        if busy is None or self._stopped or self._clock_ns() - busy[1] < STUCK_NS:
            return
        name, since_ns = busy
        with self._guard:
            if self._busy != busy:
                return
            before = self._rotation
            self._rotation = {key: one for key, one in before.items() if key != name}
            self._busy = None
            self._stuck.add(name)
            try:
                self.start()
            except RuntimeError:  # no more threads or memory: the next check tries again
                self._generation -= 1
                self._stuck.discard(name)
                self._rotation, self._busy = before, busy
                raise
        log.error(
            "reading %s has taken over %.0f s; zeusd skips it until the driver responds",
            name,
            (self._clock_ns() - since_ns) / 1e9,
            extra={"event": "sampler_stuck", "gpu": name},
        )

    def _run(self, generation: int) -> None:
        clock_ns, wake = self._clock_ns, self._wake
        while not self._stopped:
            self._wakes_ns = sys.maxsize  # a request that comes now may not be considered
            next_ns = self.next_ns
            if next_ns is None:
                wake.acquire()
            else:
                self._wakes_ns = next_ns
                wait_s = (next_ns - clock_ns()) / 1e9
                if wait_s > 0:
                    wake.acquire(timeout=wait_s)
            for name, source in self._rotation.items():
                now_ns = clock_ns()
                if self._due(name, source, now_ns):
                    self._busy = (name, now_ns)
                    if self._rotation.get(name) is source:  # it may have been removed concurrently
                        self._read(name, source)
                    with self._guard:  # it may be given up as stuck at this moment
                        replaced = generation != self._generation
                        if not replaced:
                            self._busy = None
                    if replaced:
                        self._rejoin(name, source)
                        return

    def _awaken(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._wake.release()

    def _rejoin(self, name: str, source: Source) -> None:
        """Ends a thread that the driver blocked: another one reads now."""
        log.warning("reading %s works again", name, extra={"event": "sampler_unstuck", "gpu": name})
        with self._guard:
            self._stuck.discard(name)
            if self._sources.get(name) is source and name not in self._paused:
                self._rotation = {**self._rotation, name: source}
        self._awaken()

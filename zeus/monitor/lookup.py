"""Looks up the energy of ended windows, many at a time.

1. A look-up includes only windows that ended no later than the wanted one, or so long ago that
   their energy exists: it waits for no other's update.
2. A thread looks up what is requested in advance (`available`), and all that nobody has read, as
   zeusd keeps every update for minutes only. Deleted measurements are left out.
3. Only reading an energy waits: for the window's own update, and in all no longer than
   `zeus_ipc.circuit` allows. If there is no answer by then, or no GPU can be read, reads fail at
   once until the thread has received the newest energies in time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeus.exceptions import ZeusArgumentError, ZeusBaseError, ZeusdError, from_ipc
from zeus.monitor.measurement import EndedWindow, Measurement
from zeus.utils.warn import warn
from zeus_ipc.circuit import WAIT_S, bounded, not_before, unanswered
from zeus_ipc.errors import SeveralGpusFailed, ZeusIpcError

if TYPE_CHECKING:
    from zeus_common.receipts import Receipt
    from zeus_ipc.client import Client
    from zeus_ipc.replies import WindowEnergies

log = logging.getLogger(__name__)

BATCH, MAX_PAUSES = 192, 64
"""Maximum number of windows, and of pauses, in one look-up: together they fit into one message."""

BEHIND_S, RETRY_S, PACE_S = 2.0, 0.25, 0.1
"""Interval at which the thread looks for unread windows, at which it retries if there was no
answer, and the shortest pause between two look-ups."""

TICK_NS = 150_000_000
"""A window's energy exists this long after its end: the longest update period, and zeusd's
reading."""

AROUND_NS = 2_000_000_000
"""How far from a window the work around it matters for its uncertainty, at most."""

MAX_PENDING = 100_000
"""Maximum number of windows waiting to be looked up or reported while zeusd is down; beyond it, the
oldest are looked up only when they are read, and reported without their energy."""


@dataclass(slots=True)
class _Read:
    """A thread's wait for an energy, in ns of CLOCK_MONOTONIC."""

    thread: int
    begin_ns: int
    end_ns: int


class WindowLookup:
    """The windows of one monitor that await their energy.

    Attributes:
        wake: Makes the thread look up what was asked for; None: there is no thread yet.
    """

    def __init__(
        self,
        client: Client | None,
        gpus: dict[int, str],
        cpus: Sequence[int],
        drams: Sequence[int],
        strict: bool = False,
        synchronize: Callable[[], object] = lambda: None,
    ) -> None:
        self._synchronize = synchronize
        self.clock_ns: Callable[[], int] = time.monotonic_ns
        self.wake: Callable[[], object] | None = None
        self._client = client
        self._gpus = gpus
        self._cpus = {index: f"cpu:{index}" for index in cpus}
        self._drams = {index: f"dram:{index}" for index in drams}
        self._sources = list(
            dict.fromkeys([*gpus.values(), *self._cpus.values(), *self._drams.values()])
        )
        self._strict = strict
        self._warned = False  # the user, that energies are unknown
        self._logged = False  # that the thread gets no answer
        self._forget()
        _instances.add(self)

    def _forget(self) -> None:
        """Begins without windows and thread: at first, and in a child of fork, whose parent looks
        up the windows that both have.
        """
        self.wake = None
        self._sampled = False
        self._guard = threading.RLock()
        self._looking = threading.Lock()
        self._reporting = threading.RLock()
        self._unread: deque[weakref.ref[Measurement]] = deque(maxlen=MAX_PENDING)
        self._reports: deque[tuple[Measurement, Callable[[Measurement], object]]] = deque()
        self._finishes = False  # at the end of the process
        self._wanted_ns = 0
        self._outage: ZeusBaseError | None = None
        # Number of newest reads of which the thread, begin and end are kept.
        self._reads: deque[_Read] = deque(maxlen=1_000)

    def check(self) -> None:
        """Makes zeusd sample these devices.

        Raises:
            ZeusBaseGPUError: A GPU has no energy or power sensor.
        """
        self._sampled = True
        _, failed = self._ask([], self._sources)
        if failed is not None:
            raise failed

    def begin(self) -> None:
        """A window is about to begin. Without a daemon, a child of fork has no sampler yet: its
        first window waits until there is one. Never raises.
        """
        if not self._sampled:
            with contextlib.suppress(ZeusBaseError):  # the window's energy is read, or not
                self.check()

    def ended(self, key: str, begin_ns: int, end_ns: int, aligned: bool) -> Measurement:
        """Creates the measurement of an ended window, without its energy."""
        measurement = Measurement.__new__(Measurement)
        measurement.time = (end_ns - begin_ns) / 1e9
        measurement._pending = EndedWindow(self, key, begin_ns, end_ns, aligned)
        measurement._window, measurement._limited = (self, begin_ns, end_ns), None
        self._unread.append(weakref.ref(measurement))
        if self.wake is None:
            self._start()
        return measurement

    def when_known(self, measurement: Measurement, then: Callable[[Measurement], object]) -> None:
        """Calls a function on the thread once the energy is known, or known to be unknown, or at
        the end of the process; one after another, in the order of these calls.
        """
        if not self._finishes:
            self._finishes = True
            _at_exit(self.finish)
        self._reports.append((measurement, then))

    def available(self, measurement: Measurement, limited: bool = False) -> bool:
        """Whether its energy is known, or cannot be known; if not, asks the thread for it."""
        pending = measurement._pending
        if pending is not None and not pending.settled:
            pending.limited = pending.limited or limited
            self._wanted_ns = max(self._wanted_ns, pending.end_ns)
            self._awaken()
        return measurement.settled

    def look_up(self, wanted: Measurement) -> None:
        """Looks up a measurement's energy, and that of earlier windows with it.

        Raises:
            ZeusBaseGPUError: It cannot be known, or not at the moment.
        """
        pending = wanted._pending
        if pending is None:
            return
        self._raise_outage()
        recent = pending.end_ns > self.clock_ns() - TICK_NS
        if recent and self._client in _divided and pending.thread == threading.get_ident():
            self._synchronize()  # what it waits from now on is no training: see `between_reads`
        began_ns = self.clock_ns()
        until_ns = max(pending.end_ns, began_ns - TICK_NS)
        with self._guard:
            others = [one for one in self._take(until_ns, BATCH) if one is not wanted]
        # As long as this is a read that has not ended: none takes longer.
        read = _Read(threading.get_ident(), began_ns, began_ns + 1_000_000_000)
        self._reads.append(read)
        try:
            with _waits_for(pending.end_ns):
                self._look_up([wanted, *others])
        finally:
            read.end_ns = self.clock_ns()
            if self._reports:
                self._awaken()  # else what this read made known is reported with the next window
        if pending.error is not None and wanted._pending is not None:
            raise pending.error

    def receipt(self, begin_ns: int, end_ns: int) -> Receipt:
        """Makes the receipt of a window, see `zeus.monitor.receipt`."""
        from zeus_common.evidence import make_receipt

        if self._client is None:
            raise ZeusArgumentError("no GPU was measured, so there is no receipt")
        try:
            return make_receipt(self._client, begin_ns, end_ns, [*self._gpus.values()])
        except ZeusIpcError as error:
            raise from_ipc(error) from error

    def between_reads(self, pending: EndedWindow) -> list[Measurement]:
        """Divides a window that has just ended in this thread by its waits for energies: measures
        what is before, between and after them. The GPU was idle meanwhile. Empty: there are none.
        """
        if self._client is None:
            return []
        _divided.add(self._client)
        begin_ns, end_ns = pending.begin_ns, pending.end_ns
        waits = self._waits(pending.thread, begin_ns, end_ns)
        reads = sorted((b, e) for b, e in waits if begin_ns <= b and e <= end_ns)
        if not reads:
            return []
        begins, ends = [begin_ns, *(e for _, e in reads)], [*(b for b, _ in reads), end_ns]
        spans = [(b, e) for b, e in zip(begins, ends, strict=True) if b < e]
        return [self.ended(pending.key, b, e, aligned=True) for b, e in spans]

    def _waits(self, thread: int, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """When a thread has waited for energies within a span."""
        return [
            (read.begin_ns, read.end_ns)
            for lookup in list(_instances)
            if lookup._client is self._client
            for read in list(lookup._reads)
            if read.thread == thread and read.begin_ns < end_ns and begin_ns < read.end_ns
        ]

    def as_known(self, wanted: Measurement) -> Measurement:
        """Returns a measurement with its energy, or `nan` for unknown energies.

        Raises:
            ZeusBaseGPUError: It cannot be known, and the monitor is strict.
        """
        pending = wanted._pending
        try:
            self.look_up(wanted)
        except ZeusBaseError as error:
            if self._strict:
                raise
            self.warn(error)
            partial = None if pending is None else pending.partial
            return partial or self._measured(wanted, {}, 0)
        self._warned = False
        return wanted

    def limited(self, begin_ns: int, end_ns: int) -> dict[int, dict[str, float]] | None:
        """See `Measurement.limited`."""
        try:
            with bounded():
                gpus = [*dict.fromkeys(self._gpus.values())]
                by_source, _ = self._ask([(begin_ns, end_ns, 0)], gpus, limited=True)
        except ZeusBaseError as error:
            if self._strict:
                raise
            self.warn(error)
            return None
        return self._limited(by_source, 0)

    def _limited(
        self, by_source: dict[str, WindowEnergies], position: int
    ) -> dict[int, dict[str, float]]:
        counted = {
            index: {
                reason: ms / 1000
                for reason, every_ms in by_source[uuid].limited_ms.items()
                if (ms := every_ms[position]) is not None
            }
            for index, uuid in self._gpus.items()
            if uuid in by_source
        }
        return {index: reasons for index, reasons in counted.items() if reasons}

    def warn(self, error: ZeusBaseError) -> None:
        """Warns that energies are unknown, once until they are known again."""
        if not self._warned:
            self._warned = True
            warn(
                "The energy of windows is nan until it can be known; it is looked up again "
                f"when it is read again: {error.message}"
            )

    def look_up_ended(self, until_ns: int, wait_s: float = -1) -> None:
        """Looks up all unread windows that ended by a time.

        Args:
            until_ns: The time, CLOCK_MONOTONIC.
            wait_s: How long to wait for another look-up; -1: until it has ended.

        Raises:
            ZeusBaseGPUError: There is no answer; they remain unread.
        """
        if not self._looking.acquire(timeout=wait_s):
            raise ZeusdError(f"the node's energies were not known within {wait_s:g} s")
        try:
            with self._guard:
                due = self._take(until_ns, MAX_PENDING)
            for first in range(0, len(due), BATCH):
                try:
                    self._look_up(due[first : first + BATCH], counted=True)
                except ZeusBaseError:
                    self._requeue(due[first + BATCH :])
                    raise
        finally:
            self._looking.release()

    def catch_up(self) -> None:
        """Looks up all windows that have ended. Waits as long as reading the newest would.

        Raises:
            ZeusBaseGPUError: There is no answer.
        """
        self._raise_outage()
        now_ns = self.clock_ns()
        with _waits_for(now_ns):
            self.look_up_ended(now_ns, WAIT_S)

    def round(self, until_ns: int) -> None:
        """One round of the thread: looks up what was asked for and what is old, and reports it."""
        outage = self._outage
        try:
            lasts = outage is not None and not self._recovered()
            # Age at which the thread looks up a window that nobody asked for.
            latest_ns = max(self._wanted_ns, self.clock_ns() - 1_000_000_000)
            self.look_up_ended(min(until_ns, latest_ns))
            if not lasts and self._outage is outage:
                self._outage = None
            self._logged = False
        except ZeusBaseError as error:
            if not self._logged:
                self._logged = True
                log.info("windows cannot be looked up at the moment: %s", error.message)
        self._report()

    def finish(self) -> None:
        """Looks up and reports all windows of which a report is due. Never raises."""
        try:
            if self._reports:
                self.catch_up()
        except ZeusBaseError as error:
            log.warning("the energy of the last windows is not known: %s", error.message)
        self._report(final=True)

    @property
    def pause_s(self) -> float:
        """How long the thread sleeps unless it is woken."""
        return BEHIND_S if self._outage is None else RETRY_S

    # --------------------------------------------------------------------------------- internals

    def _start(self) -> None:
        with self._guard:
            if self.wake is None:
                wake = threading.Event()
                thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), wake), name="zeus-windows", daemon=True
                )
                with contextlib.suppress(RuntimeError):  # no more threads, or the process ends
                    thread.start()
                    self.wake = wake.set

    def _awaken(self) -> None:
        if self.wake is None:
            self._start()
        if self.wake is not None:
            self.wake()

    def _raise_outage(self) -> None:
        """Raises the error of a request that got no energies, until the thread has got some."""
        if self._outage is not None:
            self._awaken()
        if self._outage is not None:
            raise self._outage.with_traceback(None)

    def _recovered(self) -> bool:
        """Whether the newest energies come while a reader would wait.

        Raises:
            ZeusBaseGPUError: There is no answer.
        """
        end_ns, began_s = self.clock_ns(), time.monotonic()
        by_source, failed = self._ask([(end_ns - TICK_NS, end_ns, False)], self._sources)
        late = time.monotonic() - began_s > WAIT_S + TICK_NS / 1e9
        return not late and (failed is None or bool(by_source))

    def _take(self, until_ns: int, limit: int) -> list[Measurement]:
        """Removes unread windows that ended by a time, oldest first; the caller has the guard."""
        taken: list[Measurement] = []
        while self._unread and len(taken) < limit:
            measurement = self._unread[0]()
            pending = None if measurement is None else measurement._pending
            if measurement is not None and pending is not None:
                if pending.end_ns > until_ns:
                    break
                taken.append(measurement)
            self._unread.popleft()
        return taken

    def _requeue(self, measurements: Sequence[Measurement]) -> None:
        with self._guard:
            room = MAX_PENDING - len(self._unread)
            self._unread.extendleft(map(weakref.ref, measurements[: -room - 1 : -1]))

    def _look_up(self, batch: list[Measurement], counted: bool = False) -> None:
        """`counted`: may wait for the drivers' counters, too."""
        # Another thread may look one of them up meanwhile.
        pairs = [(one, one._pending) for one in batch]
        waiting = [(one, pending) for one, pending in pairs if pending is not None]
        windows = [(one.begin_ns, one.end_ns, int(one.aligned)) for _, one in waiting]
        windows += self._pauses([one for _, one in waiting])
        try:
            limited = counted and any(one.limited for _, one in waiting)
            by_source, failed = self._ask(windows, self._sources, limited)
        except ZeusBaseError as error:
            if unanswered(error.__cause__):
                self._outage = error
            self._requeue(batch)
            raise
        if failed is not None and not by_source:
            self._outage = failed
        # Age of a window from which on a GPU that cannot be read makes its energy unknown. Before,
        # it is looked up again: after a short failure, the counter includes it.
        patient_ns = self.clock_ns() - 2_000_000_000
        again = []
        for position, (measurement, pending) in enumerate(waiting):
            known = self._measured(measurement, by_source, position)
            if limited:
                measurement._limited = self._limited(by_source, position)
            if not math.isnan(known._sum()):
                measurement._fill(known._gpu, known._cpu, known._dram, known._uncertainty)
                continue
            pending.partial = known
            pending.error = failed or _too_old(pending)
            pending.settled = failed is None or pending.end_ns < patient_ns
            if not pending.settled:
                again.append(measurement)
        self._requeue(again)

    def _pauses(self, windows: list[EndedWindow]) -> list[tuple[int, int, int]]:
        """When the thread of these windows waited around them, and so the GPU had nothing to do,
        where windows are divided by that.
        """
        threads = {window.thread for window in windows}
        if self._client not in _divided or len(threads) != 1:
            return []
        first_ns = min(window.begin_ns for window in windows) - AROUND_NS
        last_ns = max(window.end_ns for window in windows) + AROUND_NS
        waits = self._waits(threads.pop(), first_ns, last_ns)[-MAX_PAUSES:]
        from zeus_ipc.requests import PAUSE  # the client has imported it

        return [(begin_ns, end_ns, PAUSE) for begin_ns, end_ns in waits]

    def _measured(
        self, window: Measurement, by_source: dict[str, WindowEnergies], position: int
    ) -> Measurement:
        """Creates a measurement with the energies that were found, and `nan` for others."""

        def pick(names: dict[int, str]) -> tuple[dict[int, float], dict[int, float]]:
            energies: dict[int, float] = {}
            uncertainties: dict[int, float] = {}
            counted: set[str] = set()
            for index, name in names.items():
                if name in counted:  # another partition of a GPU: count it only once in sums
                    energies[index] = uncertainties[index] = 0.0
                    continue
                counted.add(name)
                energies[index] = uncertainties[index] = math.nan
                energy_uj = by_source[name].energy_uj[position] if name in by_source else None
                if energy_uj is not None:
                    energies[index] = energy_uj / 1e6
                    uncertainties[index] = by_source[name].uncertainty_uj[position] / 1e6
            return energies, uncertainties

        gpu, uncertainty = pick(self._gpus)
        cpu, dram = pick(self._cpus)[0] or None, pick(self._drams)[0] or None
        return Measurement(window.time, gpu, cpu, dram, None, uncertainty)

    def _ask(
        self, windows: list[tuple[int, int, int]], sources: list[str], limited: bool = False
    ) -> tuple[dict[str, WindowEnergies], ZeusBaseError | None]:
        """Returns the energies of the sources that can be read, and the error of the others.

        Raises:
            ZeusBaseGPUError: There is no answer.
        """
        if not sources or self._client is None:
            return {}, None
        try:
            more = {"limited": True} if limited else {}
            return self._client.windows(sources, windows, **more), None
        except ZeusIpcError as error:
            failed = from_ipc(error)
            error.__traceback__ = None  # it would keep the connection while the error is kept
            if unanswered(error):
                raise failed from error
            failed.__cause__ = error
            also = error.errors if isinstance(error, SeveralGpusFailed) else sources
            others = [name for name in sources if name not in also]
            return self._ask(windows, others, limited)[0], failed

    def _report(self, *, final: bool = False) -> None:
        """Reports windows, in order: those that are known, and others with `final` or if too many
        wait.
        """
        with self._reporting:
            while self._reports:
                measurement, then = self._reports[0]
                waits = not final and len(self._reports) <= MAX_PENDING
                if waits and not measurement.settled:
                    return
                self._reports.popleft()
                try:
                    then(measurement)
                except Exception:  # a report must not end the thread
                    log.exception("a window could not be reported")


@contextlib.contextmanager
def _waits_for(end_ns: int) -> Iterator[None]:
    """Limits the wait for a window to its own update, and what `bounded` allows."""
    with bounded(), not_before((end_ns + TICK_NS) / 1e9):
        yield


def _too_old(pending: EndedWindow) -> ZeusdError:
    return ZeusdError(
        f"the energy of the window {pending.key!r} is not known: it began before what zeusd "
        "remembers, or this process if no zeusd runs: that was started or its GPUs were found "
        "later, or it is weeks ago"
    )


def _at_exit(finish: Callable[[], None]) -> None:
    """Calls a function at the end of this process."""
    atexit.register(finish)
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        # It ends without atexit.
        from multiprocessing.util import Finalize

        Finalize(None, finish, exitpriority=0)


_instances: weakref.WeakSet[WindowLookup] = weakref.WeakSet()
_divided: weakref.WeakSet[Client] = weakref.WeakSet()
"""Those of whose windows some are divided by reads."""


def _after_fork_in_child() -> None:
    for lookup in list(_instances):
        lookup._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _run(lookup_ref: weakref.ref[WindowLookup], wake: threading.Event) -> None:
    lookup = lookup_ref()
    while lookup is not None:
        pause_s = lookup.pause_s
        del lookup
        wake.wait(pause_s)
        wake.clear()
        lookup = lookup_ref()
        if lookup is None:
            return
        try:
            lookup.round(lookup.clock_ns())
        except Exception:  # a thread that nobody watches must not end silently
            log.exception("windows could not be looked up")
        del lookup
        time.sleep(PACE_S)
        lookup = lookup_ref()

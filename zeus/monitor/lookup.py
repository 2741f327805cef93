"""Looks up the energy of ended windows, many at a time, in the background. zeusd keeps every update
for minutes only, and coarser rows after that. So a thread looks up the windows that nobody has read
before they are too old, except deleted measurements.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from zeus.exceptions import ZeusBaseError, ZeusdError, from_ipc
from zeus.monitor.measurement import EndedWindow, Measurement
from zeus.utils.warn import warn
from zeus_ipc.circuit import bounded, not_before
from zeus_ipc.errors import DeadlineExceeded, SeveralGpusFailed, ZeusIpcError

if TYPE_CHECKING:
    from zeus.monitor.log import MeasurementLog
    from zeus_ipc.client import Client
    from zeus_ipc.replies import WindowEnergies

log = logging.getLogger(__name__)

BATCH = 256
"""Maximum number of windows in one look-up."""

BEHIND_S = 2.0
"""Interval at which the thread looks for unread windows."""

TICK_NS = 150_000_000
"""A window's energy is available this long after its end: the longest update period, and zeusd's
reading."""

AVAILABLE_NS = 1_000_000_000
"""A window that ended this long ago is looked up without waiting for an update."""

STUCK_S = 30.0
"""If a driver does not answer, readers do not ask again for this long, unless the thread has
succeeded before."""

MAX_PENDING = 100_000
"""Maximum number of windows waiting to be looked up or logged while zeusd is down; beyond it, the
oldest are looked up only when they are read, and logged without their energy."""


class WindowLookup:
    """The windows of one monitor that await their energy.

    Args:
        client: The node; None if there is nothing to measure.
        gpus: UUIDs, by the monitor's index.
        cpus: CPU indices.
        drams: CPU indices whose memory is measured.
        log_file: File for windows once they are known, in the order of their ends.
        strict: Whether access to an unknown energy raises.

    Attributes:
        clock_ns: CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        client: Client | None,
        gpus: dict[int, str],
        cpus: Sequence[int],
        drams: Sequence[int],
        log_file: MeasurementLog | None,
        strict: bool = False,
    ) -> None:
        self.clock_ns: Callable[[], int] = time.monotonic_ns
        self._client = client
        self._gpus = gpus
        self._cpus = list(cpus)
        self._drams = list(drams)
        self._sources = [
            *dict.fromkeys(gpus.values()),
            *(f"cpu:{index}" for index in self._cpus),
            *(f"dram:{index}" for index in self._drams),
        ]
        self._log = log_file
        self._guard = threading.RLock()
        self._unread: deque[weakref.ref[Measurement]] = deque(maxlen=MAX_PENDING)
        self._unlogged: deque[tuple[str, int, Measurement]] = deque()
        self._strict = strict
        self._reported = False  # about windows that cannot be looked up in the background, ...
        self._warned = False  # ... and about those that were read
        self._stuck: tuple[float, ZeusBaseError] | None = None
        _instances.add(self)

    def check(self) -> None:
        """Makes zeusd sample these devices.

        Raises:
            ZeusBaseGPUError: A GPU has no energy or power sensor.
        """
        if self._sources:
            self._ask([])

    def start(self) -> None:
        """Starts the thread."""
        threading.Thread(
            target=_run, args=(weakref.ref(self),), name="zeus-windows", daemon=True
        ).start()

    def ended(self, key: str, begin_ns: int, end_ns: int, aligned: bool) -> Measurement:
        """Creates the measurement of an ended window, without its energy."""
        measurement = Measurement.__new__(Measurement)
        measurement.time = (end_ns - begin_ns) / 1e9
        measurement._pending = EndedWindow(self, key, begin_ns, end_ns, aligned)
        self._unread.append(weakref.ref(measurement))
        if self._log is not None:
            self._unlogged.append((key, begin_ns, measurement))
        return measurement

    def peek(self, key: str, begin_ns: int, end_ns: int) -> Measurement:
        """Creates the measurement of an open window until now."""
        measurement = Measurement.__new__(Measurement)
        measurement.time = (end_ns - begin_ns) / 1e9
        measurement._pending = EndedWindow(self, key, begin_ns, end_ns, False)
        return measurement

    def available(self, measurement: Measurement) -> bool:
        """Whether its energy is known, or should be available."""
        pending = measurement._pending
        return pending is None or self.clock_ns() - pending.end_ns > TICK_NS

    def look_up(self, wanted: Measurement) -> None:
        """Looks up a measurement's energy, and that of others with it.

        Raises:
            ZeusBaseGPUError: It cannot be known, or not at the moment.
        """
        with self._guard:
            if wanted._pending is None:
                return
            self._raise_if_stuck()
            batch = [wanted]
            while self._unread and len(batch) < BATCH:
                other = self._unread.popleft()()
                if other is not None and other is not wanted and other._pending is not None:
                    batch.append(other)
        # Not under the lock: a reader must not wait while the thread waits for zeusd.
        try:
            self._look_up(batch)
        except ZeusBaseError:
            # A GPU or zeusd is gone: each window may be looked up again.
            self._unread.extendleft(weakref.ref(other) for other in reversed(batch[1:]))
            raise
        if wanted._pending is not None:
            raise self._too_old(wanted)

    def as_known(self, wanted: Measurement) -> Measurement:
        """Returns a measurement with its energy, or `nan` for unknown energies.

        Raises:
            ZeusBaseGPUError: It cannot be known, and the monitor is strict.
        """
        try:
            with bounded():
                self.look_up(wanted)
        except ZeusBaseError as error:
            if self._strict:
                raise
            if not self._warned:
                self._warned = True
                warn(
                    "The energy of windows is nan until it can be known; it is looked up again "
                    f"when it is read again: {error.message}"
                )
            return self._in_part(wanted, error)
        self._warned = False
        return wanted

    def look_up_available(self, before_ns: int) -> None:
        """Looks up all windows that ended before a time.

        Raises:
            ZeusBaseGPUError: They cannot be looked up now.
        """
        while True:
            with self._guard:
                batch: list[Measurement] = []
                while self._unread and len(batch) < BATCH:
                    measurement = self._unread[0]()
                    if measurement is not None and measurement._pending is not None:
                        if measurement._pending.end_ns > before_ns:
                            break
                        batch.append(measurement)
                    self._unread.popleft()
            if not batch:
                return
            try:
                self._look_up(batch)
            except ZeusBaseError:
                self._unread.extendleft(weakref.ref(other) for other in reversed(batch))
                raise

    def write_log(self, *, final: bool = False) -> None:
        """Writes the windows whose energy is known; the others as `nan`, with `final` or when too
        many wait.
        """
        if self._log is None:
            return
        with self._guard:
            rows = []
            while self._unlogged:
                waits = self._unlogged[0][2]._pending is not None
                if waits and not final and len(self._unlogged) <= MAX_PENDING:
                    break
                key, begin_ns, measurement = self._unlogged.popleft()
                known = measurement._pending is None
                energy_j = measurement.gpu_energy if known else {}
                rows.append((key, begin_ns / 1e9, measurement.time, energy_j))
            self._log.write(rows)

    def look_up_all(self) -> None:
        """One round of the thread."""
        try:
            self._see_whether_it_is_stuck()
            self.look_up_available(self.clock_ns() - AVAILABLE_NS)
            self._reported = False
        except ZeusBaseError as error:
            if not self._reported:
                self._reported = True
                log.info("windows cannot be looked up at the moment: %s", error.message)
        self.write_log()

    def finish(self) -> None:
        """Looks up all windows to log, and writes them. Never raises."""
        try:
            if self._unlogged:
                self._raise_if_stuck()
                with bounded():
                    self.look_up_available(self.clock_ns())
        except ZeusBaseError as error:
            log.warning("the energy of the last windows is not known: %s", error.message)
        self.write_log(final=True)

    # --------------------------------------------------------------------------------- internals

    def _look_up(self, batch: list[Measurement]) -> None:
        # Another thread may look one of them up meanwhile.
        pairs = [(one, one._pending) for one in batch]
        waiting = [(one, pending) for one, pending in pairs if pending is not None]
        windows = [(pending.begin_ns, pending.end_ns, pending.aligned) for _, pending in waiting]
        last_ns = max((pending.end_ns for _, pending in waiting), default=0)
        with not_before((last_ns + TICK_NS) / 1e9):
            found = self._ask(windows)
        for position, (measurement, _) in enumerate(waiting):
            gpu, uncertainty = self._pick(found, position, self._gpus)
            cpu, _ = self._pick(found, position, {i: f"cpu:{i}" for i in self._cpus})
            dram, _ = self._pick(found, position, {i: f"dram:{i}" for i in self._drams})
            if gpu is None or cpu is None or dram is None:
                continue
            measurement._fill(
                gpu, cpu if self._cpus else None, dram if self._drams else None, uncertainty
            )

    @staticmethod
    def _pick(
        found: dict[str, WindowEnergies], position: int, names: dict[int, str]
    ) -> tuple[dict[int, float] | None, dict[int, float]]:
        energies: dict[int, float] = {}
        uncertainties: dict[int, float] = {}
        counted: set[str] = set()
        for index, name in names.items():
            if name in counted:  # another partition of a GPU: count it only once in sums
                energies[index] = uncertainties[index] = 0.0
                continue
            counted.add(name)
            energy_uj = found[name].energy_uj[position]
            if energy_uj is None:
                return None, {}
            energies[index] = energy_uj / 1e6
            uncertainties[index] = found[name].uncertainty_uj[position] / 1e6
        return energies, uncertainties

    def _in_part(self, wanted: Measurement, error: ZeusBaseError) -> Measurement:
        """Returns a window's known energies if some GPU's is unknown."""
        nan = dict.fromkeys(self._gpus, math.nan)
        cpus = dict.fromkeys(self._cpus, math.nan) or None
        drams = dict.fromkeys(self._drams, math.nan) or None
        found = Measurement(wanted.time, nan, cpus, drams, None, dict(nan))
        cause, pending = error.__cause__, wanted._pending
        failed = cause.errors if isinstance(cause, SeveralGpusFailed) else {}
        others = {index: uuid for index, uuid in self._gpus.items() if uuid not in failed}
        client = self._client
        if not failed or not others or pending is None or client is None:
            return found
        window = (pending.begin_ns, pending.end_ns, pending.aligned)
        with contextlib.suppress(ZeusIpcError), bounded():
            known = client.windows(list(dict.fromkeys(others.values())), [window])
            energies, uncertainties = self._pick(known, 0, others)
            found._gpu.update(energies or {})
            found._uncertainty.update(uncertainties)
        return found

    def _ask(self, windows: list[tuple[int, int, bool]]) -> dict[str, WindowEnergies]:
        if not self._sources or self._client is None:
            return {}
        try:
            found = self._client.windows(self._sources, windows)
        except ZeusIpcError as error:
            raised = from_ipc(error)
            if windows and isinstance(error, DeadlineExceeded):
                # zeusd answers, but a driver does not: nobody waits for that twice.
                self._stuck = time.monotonic() + STUCK_S, raised
            raise raised from error
        return found

    def _raise_if_stuck(self) -> None:
        if self._stuck is not None and time.monotonic() < self._stuck[0]:
            raise self._stuck[1]

    def _see_whether_it_is_stuck(self) -> None:
        """Requests the newest energies and waits for them, which training must not do."""
        if self._stuck is not None:
            end_ns = self.clock_ns() - TICK_NS
            self._ask([(end_ns - TICK_NS, end_ns, False)])
            self._stuck = None

    @staticmethod
    def _too_old(measurement: Measurement) -> ZeusdError:
        pending = measurement._pending
        key = "" if pending is None else f" {pending.key!r}"
        return ZeusdError(
            f"the energy of the window{key} is not known: it began before what zeusd remembers; "
            "zeusd was started or its GPUs were found after that, or it is weeks ago"
        )


_instances: weakref.WeakSet[WindowLookup] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Resets a child of fork: the thread, which may hold the lock, is only in the parent."""
    for lookup in list(_instances):
        lookup._guard = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _run(lookup_ref: weakref.ref[WindowLookup]) -> None:
    while True:
        time.sleep(BEHIND_S)
        lookup = lookup_ref()
        if lookup is None:
            return
        try:
            lookup.look_up_all()
        except Exception:  # a thread that nobody watches must not end silently
            log.exception("windows could not be looked up")
        del lookup

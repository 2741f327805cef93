"""Energy and power of windows as Prometheus metrics, by way of a push gateway.

    with EnergyHistogram([], None, "http://gateway:9091", job="training") as histogram:
        histogram.begin_window("step")
        ...
        histogram.end_window("step")

Beginning and ending a window reads the clock, as in `ZeusMonitor`. Its energy is looked up, and
pushed, by one daemon thread for each metric. If the gateway is down, slow or refuses, one warning
is logged until it works again; training is not affected, and as all metrics are cumulative, the
next push makes up for it. When the process exits normally, or a metric is closed, the last state is
pushed, which may take `CLOSE_S` in all.

Each metric object has a group of its own at the gateway, and each push replaces that group. It is
named by `job`, `instance` (the node's hostname), `rank` (of torch.distributed if it is initialised
when the metric is made, else from RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK or PMI_RANK, else 0) and
`metric` (such as `energy_histogram`; the second of a kind in a process is `energy_histogram_2`). So
nodes, ranks and metrics do not overwrite each other, and the next run of a job replaces this one's
groups instead of adding to them. Processes on one node without a rank need different job names.
Prometheus should scrape the gateway with `honor_labels: true`.

Needs prometheus_client: pip install "zeusd[metrics]".
"""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from zeus._pushgateway import Group, prometheus_client
from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, PowerDomain, PowerMonitor, ZeusMonitor
from zeus.utils.configured import Configured
from zeus_common.outage import Outage
from zeus_common.text import count
from zeus_ipc.errors import ZeusIpcError

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

    from zeus.monitor.energy import MeasurementState

__all__ = ["EnergyCumulativeCounter", "EnergyHistogram", "Metric", "PowerGauge"]

log = logging.getLogger(__name__)

PUSH_EVERY_S = 5.0
"""Interval of pushes of an `EnergyHistogram` while windows end."""

CLOSE_S = 6.0
"""Longest time that closing takes; at the end of the process, that of all metrics together."""

MAX_PENDING = 10_000
"""Maximum number of ended windows waiting for their energy while zeusd is down; beyond it, the
oldest are dropped."""

LABELS = ("window", "index")
KINDS = ("gpu", "cpu", "dram")

# ------------------------------------------------------------------------------------ the metrics


class Metric(Configured, AbstractContextManager["Metric"]):
    """Windows whose energy or power is pushed to a gateway.

    Windows of several names may overlap, and be begun in one thread and ended in another. In a
    child of `fork` an inherited metric does nothing: its windows are its parent's.

    Args:
        gpu_indices: GPUs, as the framework numbers them; None: all it sees.
        cpu_indices: CPU packages, with their memory; None: all that can be measured.
        job: Names the group at the gateway, with the node, the rank and the kind of metric.

    Raises:
        ValueError: An argument is not valid, or an index names no GPU.
        RuntimeError: A requested CPU cannot be measured.
        ZeusBaseError: prometheus_client is not installed, or the GPUs cannot be reached.
    """

    kind: str
    """Names the metric among others of this process."""

    def __init__(
        self,
        gpu_indices: Sequence[int] | None,
        cpu_indices: Sequence[int] | None,
        period_s: float,
        pushgateway_url: str,
        job: str,
    ) -> None:
        if not 0 < period_s < math.inf:
            raise ValueError(
                f"update_period must be a positive number of seconds, not {period_s!r}"
            )
        prometheus = prometheus_client()
        self._monitor = ZeusMonitor(gpu_indices, cpu_indices)
        self.group = Group(prometheus, pushgateway_url, job, self.kind)
        self._period_s = period_s
        self._pid = os.getpid()
        self._closed = False
        self._child_warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeus-metric", daemon=True)

    def begin_window(self, name: str, sync_execution: bool = True) -> None:
        """Opens a window.

        Args:
            name: The label `window`. Each name creates its own series: use few.
            sync_execution: First wait for the GPU work that the framework has launched.

        Raises:
            ValueError: A window of this name is open.
            RuntimeError: This metric was closed.
        """
        if self._usable():
            self._monitor.begin_window(name, sync_execution)

    def end_window(self, name: str, sync_execution: bool = True) -> None:
        """Closes a window. Its energy is pushed with the next update.

        Args:
            sync_execution: First wait for the GPU work that the framework has launched.

        Raises:
            ValueError: No window of this name is open.
            RuntimeError: This metric was closed.
        """
        if self._usable():
            self._end(name, sync_execution)

    def close(self) -> None:
        """Pushes the last state and ends the thread: within `CLOSE_S`. Never raises."""
        if self._ask_to_stop():
            self._await_end(time.monotonic() + CLOSE_S)

    def __exit__(self, *error: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------- internals

    @abstractmethod
    def _ended(self, name: str, measurement: Measurement) -> None:
        """Handles the end of a window. Must take no time."""

    @abstractmethod
    def _update(self, final: bool) -> bool:
        """Brings the series up to date, on the thread. Returns whether any may have changed.
        `final`: this is the last update.
        """

    def _start(self) -> None:
        """Starts the thread; subclasses call it at the end of their constructor."""
        _living.add(self)
        # Registered again, to run before the connection to the GPUs is closed: the last look-ups
        # need it.
        atexit.unregister(close_all)
        atexit.register(close_all)
        self._thread.start()

    def _end(self, name: str, sync_execution: bool) -> None:
        self._ended(name, self._monitor.end_window(name, sync_execution))

    def _usable(self) -> bool:
        if os.getpid() != self._pid:
            if not self._child_warned:
                self._child_warned = True
                log.warning(
                    "the %s of process %d does nothing in its child %d; make one there",
                    type(self).__name__,
                    self._pid,
                    os.getpid(),
                )
            return False
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} was closed; make a new one")
        return True

    def _run(self) -> None:
        changed = final = reported = False
        while not final:
            final = self._stop.wait(self._period_s)
            try:
                changed |= self._update(final)
                if changed:
                    changed = not self.group.push()
            except Exception:  # a thread that nobody watches must not end silently
                if not reported:
                    log.exception("%s could not be updated", type(self).__name__)
                reported = True

    def _ask_to_stop(self) -> bool:
        """Starts to close. Returns whether there is a thread to wait for."""
        _living.discard(self)
        if self._closed or os.getpid() != self._pid:
            return False
        self._closed = True
        self._stop.set()
        return True

    def _await_end(self, deadline_s: float) -> None:
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "the last state of %s was not pushed within %g s; look at the push gateway at %s",
                type(self).__name__,
                CLOSE_S,
                self.group.url,
            )


class _EnergyMetric(Metric):
    """Looks ended windows up and adds their energy. Arguments as for `Metric`."""

    def __init__(
        self,
        cpu_indices: Sequence[int] | None,
        gpu_indices: Sequence[int] | None,
        period_s: float,
        pushgateway_url: str,
        job: str,
    ) -> None:
        super().__init__(gpu_indices, cpu_indices, period_s, pushgateway_url, job)
        self._job = job
        self._lookups = Outage(log)
        self._pending: deque[tuple[str, Measurement]] = deque(maxlen=MAX_PENDING)

    @abstractmethod
    def _add(self, kind: str, name: str, index: str, joules: float) -> None:
        """Adds a device's energy in a window of this name."""

    def _ended(self, name: str, measurement: Measurement) -> None:
        self._pending.append((name, measurement))

    def _update(self, final: bool) -> bool:
        changed = False
        for name, measurement in itertools.chain(self._found(), self._late() if final else ()):
            self._add_all(name, measurement)
            changed = True
        return changed

    def _late(self) -> Iterator[tuple[str, Measurement]]:
        """Waits once for the windows whose energy is not known at the end, longer than training
        may be kept, and yields those that are known then.
        """
        left = [*self._pending]
        end_s = time.monotonic() + CLOSE_S / 2  # the rest is the gateway's
        # The newest first: the others are looked up with it.
        while not all(self._monitor.available(one) for _, one in reversed(left)):
            if time.monotonic() >= end_s:
                break
            time.sleep(0.02)
        known = [(name, one) for name, one in left if one.settled and one.error is None]
        if len(known) < len(left):
            log.warning(
                "the last state of %s lacks the energy of %s: zeusd did not answer in time",
                self._job,
                count(len(left) - len(known), "window"),
            )
        yield from known

    def _add_all(self, name: str, measurement: Measurement) -> None:
        parts = (measurement.gpu_energy, measurement.cpu_energy, measurement.dram_energy)
        for kind, energies in zip(KINDS, parts, strict=True):
            for index, joules in (energies or {}).items():
                self._add(kind, name, str(index), joules)

    def _found(self) -> Iterator[tuple[str, Measurement]]:
        """Yields the ended windows whose energy is known, up to one that may be known later: then
        that is true of those after it, too.
        """
        for _ in range(len(self._pending)):
            name, measurement = self._pending.popleft()
            known = self._look_up(name, measurement)
            if known is None:
                self._pending.appendleft((name, measurement))
                return
            if known:
                yield name, measurement

    def _look_up(self, name: str, measurement: Measurement) -> bool | None:
        """Whether the energy is known; None: it may be, later."""
        try:
            measurement.look_up()
        except ZeusBaseError as error:
            if isinstance(error.__cause__, ZeusIpcError):  # zeusd, or a GPU, is not available
                self._lookups.failed(
                    f"the energy of windows for {self._job} cannot be looked up now: "
                    f"{error.message}"
                )
                return None
            log.warning("a window %r is left out: %s", name, error.message)
            return False
        self._lookups.succeeded()
        return True


class EnergyHistogram(_EnergyMetric):
    """A histogram of the energy of windows: each ended window is one observation.

    `energy_monitor_gpu_energy_joules`, `energy_monitor_cpu_energy_joules` and
    `energy_monitor_dram_energy_joules`: histograms with the labels `window` and `index`. A window
    that is still open at the end of the process is not counted.

    Args:
        cpu_indices: CPU packages, with their memory; None: all that can be measured.
        gpu_indices: GPUs, as the framework numbers them; None: all it sees.
        pushgateway_url: Such as `http://gateway:9091`.
        job: Names the group at the gateway.
        gpu_bucket_range: Upper ends of the buckets for GPUs, joules, ascending.
        cpu_bucket_range: The same for CPU packages.
        dram_bucket_range: The same for their memory.

    Raises:
        ValueError: The buckets are not valid; see also `Metric`.
    """

    kind = "energy_histogram"

    def __init__(
        self,
        cpu_indices: Sequence[int] | None,
        gpu_indices: Sequence[int] | None,
        pushgateway_url: str,
        job: str,
        gpu_bucket_range: Sequence[float] = (50, 100, 200, 500, 1000),
        cpu_bucket_range: Sequence[float] = (10, 50, 100, 500, 1000),
        dram_bucket_range: Sequence[float] = (5, 10, 20, 50, 150),
    ) -> None:
        ranges = zip(KINDS, (gpu_bucket_range, cpu_bucket_range, dram_bucket_range), strict=True)
        buckets = {kind: _buckets(f"{kind}_bucket_range", given) for kind, given in ranges}
        super().__init__(cpu_indices, gpu_indices, PUSH_EVERY_S, pushgateway_url, job)
        self._families: dict[str, Histogram] = {
            kind: self.group.prometheus.Histogram(
                energy_name(kind),
                ENERGY_HELP,
                LABELS,
                buckets=buckets[kind],
                registry=self.group.registry,
            )
            for kind in KINDS
        }
        self._start()

    def _add(self, kind: str, name: str, index: str, joules: float) -> None:
        self._families[kind].labels(name, index).observe(joules)


class EnergyCumulativeCounter(_EnergyMetric):
    """A counter of the energy of all windows of a name, including open ones.

    `energy_monitor_gpu_energy_joules_total`, `energy_monitor_cpu_energy_joules_total` and
    `energy_monitor_dram_energy_joules_total`: counters with the labels `window` and `index`. They
    start at zero in each run, as Prometheus expects of counters.

    Args:
        cpu_indices: CPU packages, with their memory; None: all that can be measured.
        gpu_indices: GPUs, as the framework numbers them; None: all it sees.
        update_period: Seconds between updates.
        pushgateway_url: Such as `http://gateway:9091`.
        job: Names the group at the gateway.
    """

    kind = "energy_counter"

    def __init__(
        self,
        cpu_indices: Sequence[int] | None,
        gpu_indices: Sequence[int] | None,
        update_period: float,
        pushgateway_url: str,
        job: str,
    ) -> None:
        super().__init__(cpu_indices, gpu_indices, update_period, pushgateway_url, job)
        self._guards: dict[str, threading.Lock] = {}
        self._families: dict[str, Counter] = {
            kind: self.group.prometheus.Counter(
                energy_name(kind), ENERGY_HELP, LABELS, registry=self.group.registry
            )
            for kind in KINDS
        }
        self._start()

    def _end(self, name: str, sync_execution: bool) -> None:
        with self._guard(name):
            super()._end(name, sync_execution)

    def _add(self, kind: str, name: str, index: str, joules: float) -> None:
        self._families[kind].labels(name, index).inc(max(0.0, joules))

    def _update(self, final: bool) -> bool:
        changed = False
        # Open windows are looked up for this long, then what is known is pushed.
        end_s = time.monotonic() + 1.0
        for name, state in self._monitor.measurement_states.copy().items():
            if final or time.monotonic() < end_s:
                changed |= self._move_on(name, state, final)
        return super()._update(final) or changed

    def _guard(self, name: str) -> threading.Lock:
        """One for each name: only the thread waits for a window whose energy is pending."""
        return self._guards.setdefault(name, threading.Lock())

    def _move_on(self, name: str, state: MeasurementState, final: bool) -> bool:
        """Counts the energy of an open window so far, and restarts it from there: zeusd need not
        keep history for weeks. `final`: that awaits its energy as an ended window does. Returns
        whether it was counted.
        """
        try:
            piece = self._monitor.estimate(name)
        except ValueError:  # it has ended since
            return False
        known = False if final else self._look_up(name, piece)
        if known is None:
            return False
        with self._guard(name):
            if self._monitor.measurement_states.get(name) is not state:
                return False  # it has ended: its measurement is complete
            state.t_ns += round(piece.time * 1e9)
            state.aligned = False
        if final:
            self._pending.append((name, piece))
        elif known:
            self._add_all(name, piece)
        return known


class PowerGauge(Metric):
    """Power of GPUs while windows are open, as their sensors last measured it.

    `power_monitor_gpu_power_watts`: a gauge with the labels `window` and `index`. An ended window
    keeps its last power for two update periods, so that repeated windows leave no gaps, and the
    last window of a process remains visible; then its series is removed.

    Args:
        gpu_indices: GPUs, as the framework numbers them; None: all it sees.
        update_period: Seconds between updates.
        pushgateway_url: Such as `http://gateway:9091`.
        job: Names the group at the gateway.
    """

    kind = "power_gauge"

    def __init__(
        self,
        gpu_indices: Sequence[int] | None,
        update_period: float,
        pushgateway_url: str,
        job: str,
    ) -> None:
        super().__init__(gpu_indices, [], update_period, pushgateway_url, job)
        self._power = PowerMonitor(
            gpu_indices, cpu_indices=[], power_domains=[PowerDomain.DEVICE_INSTANT]
        )
        self._job = job
        self._readings = Outage(log)
        self._just_ended: deque[tuple[str, float]] = deque(maxlen=MAX_PENDING)
        self._watts: dict[str, tuple[float, dict[int, float]]] = {}
        self._gauge: Gauge = self.group.prometheus.Gauge(
            POWER_NAME,
            POWER_HELP,
            LABELS,
            registry=self.group.registry,
        )
        self._start()

    def _ended(self, name: str, measurement: Measurement) -> None:
        self._just_ended.append((name, time.time()))

    def _update(self, final: bool) -> bool:
        now_s = time.monotonic()
        ended = dict(self._just_ended.popleft() for _ in range(len(self._just_ended)))
        open_now = list(self._monitor.measurement_states.copy())
        known = {name: one for name, one in self._watts.items() if final or one[0] > now_s}
        # Number of update periods for which an ended window keeps its power.
        until_s = now_s + 2 * self._period_s
        for name, end_s in ended.items():
            known[name] = until_s, self._read(end_s)
        if open_now:
            present = self._read(None)
            known.update(dict.fromkeys(open_now, (until_s, present)))
        changed = bool(ended or open_now) or known != self._watts
        self._watts = known
        self._gauge.clear()
        for name, (_, watts) in known.items():
            for index, value in watts.items():
                self._gauge.labels(name, str(index)).set(value)
        return changed

    def _read(self, at_s: float | None) -> dict[int, float]:
        """Returns the watts of each GPU at a time (seconds since the epoch); empty if unknown."""
        try:
            watts = self._power.get_power(at_s)
        except ZeusBaseError as error:
            self._readings.failed(
                f"the power of GPUs for {self._job} is not known now: {error.message}"
            )
            return {}
        self._readings.succeeded()
        return watts or {}


# ----------------------------------------------------------------------------------- arguments

ENERGY_HELP = "Energy of windows, in joules"
POWER_NAME = "power_monitor_gpu_power_watts"
POWER_HELP = "Power of the GPU while the window is open, in watts"


def energy_name(kind: str) -> str:
    """Creates the metric of one of `KINDS`."""
    return f"energy_monitor_{kind}_energy_joules"


def _buckets(name: str, given: Sequence[float]) -> list[float]:
    buckets = list(given)
    positive = all(0 < one < math.inf for one in buckets)
    if not buckets or not positive or any(a >= b for a, b in itertools.pairwise(buckets)):
        raise ValueError(
            f"{name} must be positive numbers of joules, each larger than the one before, such as "
            f"[50, 100, 200], not {buckets}"
        )
    return buckets


# ------------------------------------------------------------------------- the end of the process

_living: weakref.WeakSet[Metric] = weakref.WeakSet()


def close_all() -> None:
    """Closes all metrics concurrently: a gateway that hangs delays the exit only once."""
    stopping = [metric for metric in list(_living) if metric._ask_to_stop()]
    deadline_s = time.monotonic() + CLOSE_S
    for metric in stopping:
        metric._await_end(deadline_s)

"""`ZeusMonitor`: named windows of time and energy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from zeus import _node
from zeus.compat.devices import EmptySoC
from zeus.device.cpu import CPUs, EmptyCPUs, ZeusCPUInitError, get_cpus
from zeus.exceptions import ZeusArgumentError
from zeus.monitor.devices import resolve_cpus, resolve_gpus
from zeus.monitor.log import MeasurementLog
from zeus.monitor.lookup import WindowLookup
from zeus.monitor.measurement import Measurement, as_html, as_text
from zeus.utils.configured import Configured
from zeus.utils.framework import Framework, synchronize

if TYPE_CHECKING:
    from zeus_common.receipts import Receipt


@dataclass(slots=True, eq=False)
class MeasurementState:
    """The beginning of a window.

    Attributes:
        t_ns: CLOCK_MONOTONIC.
        aligned: Whether the framework's GPU work was synchronized.
    """

    t_ns: int
    aligned: bool

    @property
    def time(self) -> float:
        """Monotonic seconds."""
        return self.t_ns / 1e9


class Window(contextlib.ContextDecorator):
    """A window of `ZeusMonitor.window`; its measurement is available once the block has ended."""

    def __init__(self, monitor: ZeusMonitor, key: str, sync_execution: bool) -> None:
        self.key = key
        self._monitor = monitor
        self._sync = sync_execution
        self._begin: MeasurementState | None = None
        self._measurement: Measurement | None = None

    def __enter__(self) -> Window:
        """The block begins."""
        self._monitor._lookup.begin()
        aligned = self._sync and synchronize(self._monitor.sync_with, self._monitor.gpu_indices)
        self._begin = MeasurementState(self._monitor._clock_ns(), aligned)
        self._monitor._progress()
        return self

    def __exit__(self, *error: object) -> None:
        """The block has ended."""
        begin, monitor = self._begin, self._monitor
        assert begin is not None
        aligned = self._sync and synchronize(monitor.sync_with, monitor.gpu_indices)
        self._measurement = monitor._ended(
            self.key, begin.t_ns, monitor._clock_ns(), aligned and begin.aligned
        )

    def _recreate_cm(self) -> Window:
        """Another one for each call of a function that it decorates."""
        return Window(self._monitor, self.key, self._sync)

    @property
    def measurement(self) -> Measurement:
        """The measurement.

        Raises:
            RuntimeError: The block has not ended.
        """
        if self._measurement is None:
            raise RuntimeError(
                f"the window {self.key!r} has no measurement yet; read it after its block, "
                f"`with monitor.window({self.key!r}) as window:`"
            )
        return self._measurement

    @property
    def time(self) -> float:
        """Seconds."""
        return self.measurement.time

    @property
    def gpu_energy(self) -> dict[int, float]:
        """Joules by GPU index."""
        return self.measurement.gpu_energy

    @property
    def total_energy(self) -> float:
        """Joules of all GPUs together."""
        return self.measurement.total_energy

    @property
    def uncertainty(self) -> float:
        """Uncertainty of `total_energy`, joules."""
        return self.measurement.uncertainty

    @property
    def known(self) -> bool:
        """Whether the energy is known; see `Measurement.known`."""
        return self.measurement.known

    def __repr__(self) -> str:
        if self._measurement is None:
            return f"Window({self.key!r}, {'not begun' if self._begin is None else 'open'})"
        return as_text(self._measurement, "Window")

    def _repr_html_(self) -> str:
        return escape(repr(self)) if self._measurement is None else as_html(self._measurement)


class ZeusMonitor(Configured):
    """Measures the time and the energy of named windows.

    A window is two instants: `begin_window` and `end_window` only read the clock. The energy
    between them is looked up on first access, from zeusd's samples; without a zeusd, the same
    sampler runs on a thread of this process. Windows may overlap, nest, and be opened in one thread
    and closed in another.

    Args:
        gpu_indices: GPUs to measure, as the framework numbers them; None: all it sees.
        cpu_indices: CPU packages to measure with their memory; None: all that can be measured; []:
            none.
        approx_instant_energy: Has no effect: windows shorter than the energy counter's update
            period are always measured.
        log_file: CSV file; a line for each window is written some seconds after its end.
        sync_execution_with: Framework whose GPU work a window waits for at both ends.
        strict: Raise `ZeusBaseError` on access to an unknown energy. If false, it is `nan`, and one
            warning says why.

    Raises:
        ValueError: An argument has a wrong type, or an index names no GPU.
        ZeusGPUInitError: The GPUs cannot be reached.
        ZeusBaseGPUError: A GPU has neither an energy counter nor a power sensor.

    Warns if there are no GPUs or a requested CPU cannot be measured, and measures the rest.

    Attributes:
        measurement_states: The open windows by their key.
        soc_is_present, power_monitor: Always False and None, as zeusd measures GPUs without an
            energy counter, too.
    """

    soc_is_present = False
    power_monitor = None

    def __init__(
        self,
        gpu_indices: Sequence[int] | None = None,
        cpu_indices: Sequence[int] | None = None,
        approx_instant_energy: bool = False,
        log_file: str | Path | None = None,
        sync_execution_with: Framework = "torch",
        strict: bool = False,
    ) -> None:
        if sync_execution_with not in ("torch", "jax", "cupy"):
            raise ValueError(
                f"sync_execution_with must be torch, jax or cupy, not {sync_execution_with!r}"
            )
        self.gpus, self.gpu_indices, client = resolve_gpus(gpu_indices)
        cpus = resolve_cpus(cpu_indices, client)
        self.cpu_indices = [cpu.index for cpu in cpus]
        self.approx_instant_energy = approx_instant_energy
        self.sync_with: Framework = sync_execution_with
        self.log_file = None if log_file is None else MeasurementLog(log_file, self.gpu_indices)
        self.measurement_states: dict[str, MeasurementState] = {}
        self._clock_ns: Callable[[], int] = time.monotonic_ns
        self._progress = _node.progress
        self._lookup = WindowLookup(
            client,
            {index: self.gpus[index].uuid for index in self.gpu_indices},
            self.cpu_indices,
            [cpu.index for cpu in cpus if cpu.dram],
            strict,
            partial(synchronize, sync_execution_with, self.gpu_indices),
        )
        self._lookup.check()

    @property
    def cpus(self) -> CPUs:
        """The CPU packages of this node whose energy is measured."""
        try:
            return get_cpus()
        except ZeusCPUInitError:
            return EmptyCPUs()

    @property
    def soc(self) -> EmptySoC:
        """A node without a system-on-chip."""
        return EmptySoC()

    def begin_window(
        self,
        key: str,
        sync_execution: bool = True,
        restart: bool = False,
        sync_cuda: bool | None = None,
    ) -> None:
        """Opens a window.

        Args:
            sync_execution: First wait for the GPU work that the framework has launched.
            restart: Close and reopen it if it is open.
            sync_cuda: `sync_execution`, as ml-energy/zeus named it before 0.10.

        Raises:
            ValueError: A window of this name is open.
        """
        if sync_cuda is not None:
            sync_execution = sync_cuda
        self._lookup.begin()
        aligned = sync_execution and self._synchronize()
        state = MeasurementState(self._clock_ns(), aligned)
        if restart:
            self.measurement_states[key] = state
        elif self.measurement_states.setdefault(key, state) is not state:
            raise ValueError(
                f"Measurement window '{key}' already exists; end it, or give restart=True to begin "
                "it again"
            )
        self._progress()

    def end_window(
        self,
        key: str,
        sync_execution: bool = True,
        cancel: bool = False,
        sync_cuda: bool | None = None,
    ) -> Measurement:
        """Closes a window.

        Args:
            sync_execution: First wait for the GPU work that the framework has launched.
            cancel: Discard it; the measurement is all zero and nothing is logged.

        Raises:
            ValueError: No window of this name is open.
        """
        if cancel:
            self._close(key)
            cpus: dict[int, float] | None = dict.fromkeys(self.cpu_indices, 0.0) or None
            return Measurement(0.0, dict.fromkeys(self.gpu_indices, 0.0), cpus)
        if sync_cuda is not None:
            sync_execution = sync_cuda
        aligned = sync_execution and self._synchronize()
        end_ns = self._clock_ns()
        begin = self._close(key)
        return self._ended(key, begin.t_ns, end_ns, aligned and begin.aligned)

    def estimate(self, key: str) -> Measurement:
        """Returns the measurement of an open window until now; it stays open. Reading its energy
        waits at most one update period.

        Raises:
            ValueError: No window of this name is open.
        """
        begin = self.measurement_states.get(key)
        if begin is None:
            raise ValueError(f"Measurement window '{key}' does not exist")
        return self._lookup.ended(key, begin.t_ns, self._clock_ns(), aligned=False)

    def window(self, key: str, sync_execution: bool = True) -> Window:
        """Measures a block: `with monitor.window("step") as w: ...`, then `w.total_energy`.

        Keys may repeat and nest. Exceptions pass through, after the window has ended.
        """
        return Window(self, key, sync_execution)

    def available(self, measurement: Measurement, *, limited: bool = False) -> bool:
        """Whether a measurement's energy is known, or cannot be known, so that reading it does not
        wait. If not, a thread looks it up, and it is available after an update of the sensors;
        `limited`: with the time limited (`Measurement.limited_so_far`), at most 0.3 s later.
        """
        return self._lookup.available(measurement, limited)

    def when_known(self, measurement: Measurement, then: Callable[[Measurement], object]) -> None:
        """Calls a function on a thread once a measurement's energy is known: within seconds, or
        right after the sensors' next update if `available` has asked for it. At the end of the
        process it is called in any case, after at most one update.

        Args:
            measurement: A window of this monitor.
            then: Receives the measurement; exceptions are logged.
        """
        self._lookup.when_known(measurement, then)

    def between_reads(self, measurement: Measurement) -> list[Measurement]:
        """Divides a window by the times in which its thread did nothing but wait for energies of
        other windows. Returns the measurements of what is left: the cost of the work itself.

        Args:
            measurement: A window that this thread has just ended.
        """
        pending = measurement._pending
        parts = [] if pending is None else pending.lookup.between_reads(pending)
        return parts or [measurement]

    def reset_windows(self) -> None:
        """Discards all open windows."""
        self.measurement_states.clear()

    def flush(self) -> None:
        """Looks up the windows that have ended, and writes them to the log file. Never raises."""
        self._lookup.finish()

    def _synchronize(self) -> bool:
        return synchronize(self.sync_with, self.gpu_indices)

    def _ended(self, key: str, begin_ns: int, end_ns: int, aligned: bool) -> Measurement:
        measurement = self._lookup.ended(key, begin_ns, end_ns, aligned)
        if self.log_file is not None:
            self._lookup.when_known(measurement, partial(self.log_file.write, key, begin_ns / 1e9))
        return measurement

    def _close(self, key: str) -> MeasurementState:
        begin = self.measurement_states.pop(key, None)
        if begin is None:
            raise ValueError(f"Measurement window '{key}' does not exist")
        return begin


def receipt(measurement: Measurement | Window) -> Receipt:
    """Returns what zeusd knows about a window: energy, gaps, limits and who changed them, who used
    the GPUs, and whether anything disturbed them (`valid`, `reasons`); `json_text()` is what
    `zeusctl receipt -o` writes. Waits some seconds for zeusd's energy ledger if the window has just
    ended.

    Raises:
        ZeusArgumentError: It was not measured in this process, or measured no GPU.
        ZeusBaseGPUError: zeusd does not answer, or does not have one of its GPUs now.
    """
    measured = measurement.measurement if isinstance(measurement, Window) else measurement
    if not isinstance(measured, Measurement) or measured._window is None:
        raise ZeusArgumentError("this measurement was not made in this process; use its window's")
    lookup, begin_ns, end_ns = measured._window
    return lookup.receipt(begin_ns, end_ns)

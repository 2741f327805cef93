"""`ZeusMonitor`: named windows of time and energy."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from zeus import _node
from zeus.device import get_gpus
from zeus.exceptions import ZeusBaseError
from zeus.monitor.log import MeasurementLog
from zeus.monitor.source import EnergySource
from zeus.utils.framework import Framework, synchronize

if TYPE_CHECKING:
    from zeus.device import GPUs


@dataclass
class Measurement:
    """What a window took.

    Attributes:
        time: Seconds.
        gpu_energy: Joules by GPU index.
        cpu_energy: Joules by CPU index; None where it was not measured.
        dram_energy: Joules by CPU index; None where it was not measured.
        soc_energy: Always None: no system-on-chip is supported.
    """

    time: float
    gpu_energy: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None
    soc_energy: None = None

    @cached_property
    def total_energy(self) -> float:
        """Joules of all GPUs together."""
        return sum(self.gpu_energy.values())


@dataclass(frozen=True)
class MeasurementState:
    """The beginning of a window: monotonic seconds, and each GPU's energy then, J."""

    time: float
    gpu_energy: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None


@dataclass
class Window:
    """A window of `ZeusMonitor.window`; its figures are there once the block has ended."""

    key: str
    _measurement: Measurement | None = field(default=None, repr=False)
    _error: ZeusBaseError | None = field(default=None, repr=False)

    @property
    def measurement(self) -> Measurement:
        """What the window took.

        Raises:
            RuntimeError: The block has not ended.
            ZeusBaseGPUError: The energy could not be read at one of its ends.
        """
        if self._error is not None:
            raise self._error
        if self._measurement is None:
            raise RuntimeError(
                f"the window {self.key!r} has no measurement yet; read it after its block"
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


class ZeusMonitor:
    """Measures the time and the GPUs' energy of named windows.

    Windows may overlap, nest, and be opened in one thread and closed in another. GPUs are read
    through zeusd where there is one, and in this process where there is none.

    Args:
        gpu_indices: GPUs to measure, as the framework numbers them; None: all it sees.
        cpu_indices: CPUs are not measured yet: None or empty.
        approx_instant_energy: Where a window is so short that the counter did not move, take the
            present power times the window's time instead of zero.
        log_file: CSV file that gets a line for each window.
        sync_execution_with: Framework whose GPU work a window waits for at both ends.

    Raises:
        ValueError: An index names no GPU, or there are none.
        RuntimeError: CPUs were asked for.
        ZeusGPUInitError: The GPUs cannot be reached.
    """

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        approx_instant_energy: bool = False,
        log_file: str | Path | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        if cpu_indices:
            raise RuntimeError(
                "CPU energy cannot be measured by this version; pass cpu_indices=[] to measure "
                "GPUs only"
            )
        if sync_execution_with not in ("torch", "jax", "cupy"):
            raise ValueError(
                f"sync_execution_with must be torch, jax or cupy, not {sync_execution_with!r}"
            )
        self.gpus: GPUs = get_gpus()
        self.gpu_indices = _check_indices(gpu_indices, self.gpus)
        self.cpu_indices: list[int] = []
        self.soc_is_present = False
        self.approx_instant_energy = approx_instant_energy
        self.sync_with: Framework = sync_execution_with
        self.log_file = None if log_file is None else MeasurementLog(log_file, self.gpu_indices)
        self.measurement_states: dict[str, MeasurementState] = {}
        self._source = EnergySource(_node.get_client(), self.gpus, self.gpu_indices)
        self._clock_ns: Callable[[], int] = time.monotonic_ns
        self._guard = threading.Lock()
        self._warned_backwards = False

    def begin_window(self, key: str, sync_execution: bool = True, restart: bool = False) -> None:
        """Opens a window.

        Args:
            key: Its name.
            sync_execution: First wait for the GPU work that the framework has launched.
            restart: Open it anew if it is open.

        Raises:
            ValueError: A window of this name is open.
            ZeusBaseGPUError: The energy cannot be read.
        """
        with self._guard:
            if key in self.measurement_states and not restart:
                raise ValueError(f"Measurement window '{key}' already exists")
        state = self._read(sync_execution)
        _node.progress()
        with self._guard:
            self.measurement_states[key] = state

    def end_window(
        self, key: str, sync_execution: bool = True, cancel: bool = False
    ) -> Measurement:
        """Closes a window.

        Args:
            key: Its name.
            sync_execution: First wait for the GPU work that the framework has launched.
            cancel: Forget it; the measurement is all zero and nothing is logged.

        Raises:
            ValueError: No window of this name is open.
            ZeusBaseGPUError: The energy cannot be read; the window stays open, to be ended again.
        """
        with self._guard:
            if key not in self.measurement_states:
                raise ValueError(f"Measurement window '{key}' does not exist")
            if cancel:
                del self.measurement_states[key]
                return Measurement(0.0, dict.fromkeys(self.gpu_indices, 0.0))
        end = self._read(sync_execution)
        with self._guard:
            begin = self.measurement_states.pop(key, None)
        if begin is None:
            raise ValueError(f"Measurement window '{key}' does not exist")
        return self._finish(key, begin, end)

    @contextlib.contextmanager
    def window(self, key: str, sync_execution: bool = True) -> Iterator[Window]:
        """Measures a block: `with monitor.window("step") as w: ...`, then `w.total_energy`.

        Keys may repeat and nest. What the block raises passes through, with the window ended. If
        the energy cannot be read, the block runs all the same, with a warning, and the window's
        figures raise when they are asked for.
        """
        window = Window(key)
        begin: MeasurementState | None = None
        try:
            begin = self._read(sync_execution)
        except ZeusBaseError as error:
            self._fail(window, error)
        try:
            yield window
        finally:
            if begin is not None:
                try:
                    window._measurement = self._finish(key, begin, self._read(sync_execution))
                except ZeusBaseError as error:
                    self._fail(window, error)

    def reset_windows(self) -> None:
        """Forgets all open windows."""
        with self._guard:
            self.measurement_states.clear()

    # ------------------------------------------------------------------------------ internals

    def _read(self, sync_execution: bool) -> MeasurementState:
        if sync_execution:
            synchronize(self.sync_with, self.gpu_indices)
        energy_j = self._source.energy_j()
        return MeasurementState(self._clock_ns() / 1e9, energy_j)

    def _finish(self, key: str, begin: MeasurementState, end: MeasurementState) -> Measurement:
        measurement = self._difference(begin, end)
        if self.log_file is not None:
            self.log_file.write(key, begin.time, measurement.time, measurement.gpu_energy)
        return measurement

    @staticmethod
    def _fail(window: Window, error: ZeusBaseError) -> None:
        window._error = error
        warnings.warn(
            f"The window {window.key!r} could not be measured: {error.message}", stacklevel=4
        )

    def _difference(self, begin: MeasurementState, end: MeasurementState) -> Measurement:
        seconds = end.time - begin.time
        energy: dict[int, float] = {}
        for index in self.gpu_indices:
            joules = end.gpu_energy[index] - begin.gpu_energy[index]
            if joules < 0:
                joules = end.gpu_energy[index]
                self._warn_backwards(index)
            energy[index] = joules
        if 0.0 in energy.values():
            self._replace_zeros(energy, seconds)
        return Measurement(seconds, energy)

    def _replace_zeros(self, energy: dict[int, float], seconds: float) -> None:
        if not self.approx_instant_energy:
            warnings.warn(
                "The energy consumption of one or more GPUs was measured as zero. The window was "
                "shorter than the energy counter's period; measure several steps together, or pass "
                "approx_instant_energy=True.",
                stacklevel=4,
            )
            return
        power_w = self._source.power_w()
        for index, joules in energy.items():
            if joules == 0.0 and index in power_w:
                energy[index] = power_w[index] * seconds

    def _warn_backwards(self, index: int) -> None:
        if not self._warned_backwards:
            self._warned_backwards = True
            warnings.warn(
                f"The energy counter of GPU {index} went back during a window: its driver was "
                "reloaded. Only the energy since then is counted.",
                stacklevel=5,
            )


def _check_indices(indices: Sequence[int] | None, gpus: GPUs) -> list[int]:
    if indices is None:
        indices = range(len(gpus))
        if not indices:
            _ = gpus[0]  # says why there are none
    for index in indices:
        if not 0 <= index < len(gpus):
            _ = gpus[0]
            raise ValueError(
                f"There is no GPU {index}: this process sees {len(gpus)}, counted from 0 after "
                "CUDA_VISIBLE_DEVICES"
            )
    if len(set(indices)) != len(indices):
        raise ValueError(f"gpu_indices names a GPU twice: {list(indices)}")
    return list(indices)

"""`ReplayZeusMonitor`: windows from the file that another monitor wrote."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path

from zeus.device import GPUs, get_gpus
from zeus.monitor import Measurement, ZeusMonitor
from zeus.monitor.energy import MeasurementState
from zeus.utils.framework import synchronize

_BEFORE_ENERGIES = 3
"""Columns `start_time`, `window_name` and `elapsed_time`."""


class ReplayZeusMonitor(ZeusMonitor):
    """Takes the time and energy of its windows from a file of `ZeusMonitor(log_file=)`.

    Each `end_window` takes the next line, so windows have to end in the file's order. Needs no GPU.

    Raises:
        ValueError: There is no file, or it is another kind of file.
    """

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        approx_instant_energy: bool = False,
        log_file: str | Path | None = None,
        ignore_sync_execution: bool = False,
        match_window_name: bool = True,
    ) -> None:
        if log_file is None:
            raise ValueError("ReplayZeusMonitor needs the file to replay: give log_file")
        with Path(log_file).open(newline="", encoding="utf-8") as file:
            header, *rows = [row for row in csv.reader(file) if row] or [[]]
        if header[:_BEFORE_ENERGIES] != ["start_time", "window_name", "elapsed_time"]:
            raise ValueError(f"{log_file} is not a file of ZeusMonitor(log_file=)")
        columns = [one for one in header[_BEFORE_ENERGIES:] if one]
        if gpu_indices is None:
            gpu_indices = [int(one.removeprefix("gpu").removesuffix("_energy")) for one in columns]
        self.gpu_indices = list(gpu_indices)
        self.nvml_gpu_indices = self.gpu_indices
        self.cpu_indices = []
        self.approx_instant_energy = approx_instant_energy
        self.sync_with = "torch"
        self.ignore_sync_execution = ignore_sync_execution
        self.match_window_name = match_window_name
        self.measurement_states = {}
        self._path = log_file
        self._rows: Iterator[list[str]] = iter(rows)

    def begin_window(
        self,
        key: str,
        sync_execution: bool = True,
        restart: bool = False,
        sync_cuda: bool | None = None,
    ) -> None:
        """Open a window.

        Raises:
            RuntimeError: A window of this name is open, and `restart` is not given.
        """
        if key in self.measurement_states and not restart:
            raise RuntimeError(f"The window {key!r} is open; end it, or give restart=True")
        self._wait(sync_execution if sync_cuda is None else sync_cuda)
        self.measurement_states[key] = MeasurementState(time.monotonic_ns(), sync_execution)

    def end_window(
        self,
        key: str,
        sync_execution: bool = True,
        cancel: bool = False,
        sync_cuda: bool | None = None,
    ) -> Measurement:
        """Close a window.

        Raises:
            RuntimeError: No window of this name is open, the file has no more lines, or its next
                line is of another window or other GPUs.
        """
        if self.measurement_states.pop(key, None) is None:
            raise RuntimeError(f"No window {key!r} is open")
        self._wait(sync_execution if sync_cuda is None else sync_cuda)
        if cancel:
            return Measurement(0.0, dict.fromkeys(self.gpu_indices, 0.0))
        row = next(self._rows, None)
        if row is None:
            raise RuntimeError(f"{self._path} has no line for the window {key!r}: it has ended")
        _, name, seconds, *joules = row
        if self.match_window_name and name != key:
            raise RuntimeError(f"{self._path} has the window {name!r} next, not {key!r}")
        if len(joules) != len(self.gpu_indices):
            raise RuntimeError(
                f"{self._path} has energies of {len(joules)} GPUs for the window {name!r}, not of "
                f"{len(self.gpu_indices)}"
            )
        return Measurement(
            float(seconds), dict(zip(self.gpu_indices, map(float, joules), strict=True))
        )

    def available(self, measurement: Measurement) -> bool:
        """Always true: a line is there at once."""
        return True

    @property
    def gpus(self) -> GPUs:  # type: ignore[override]  # an attribute of the base
        """The GPUs of this process: those of the file may be of another node."""
        return get_gpus()

    @property
    def ongoing_windows(self) -> list[str]:
        """Names of the open windows."""
        return list(self.measurement_states)

    def flush(self) -> None:
        """Nothing is written."""

    def _wait(self, sync_execution: bool) -> None:
        if sync_execution and not self.ignore_sync_execution:
            synchronize(self.sync_with, self.gpu_indices)

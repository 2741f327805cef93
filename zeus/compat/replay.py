"""`ReplayZeusMonitor`: windows from the file that another monitor wrote."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zeus.device import GPUs, get_gpus
from zeus.monitor import Measurement, ZeusMonitor
from zeus.monitor.energy import MeasurementState
from zeus_ipc.overriding import override


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
        if header[:3] != ["start_time", "window_name", "elapsed_time"]:
            raise ValueError(f"{log_file} is not a file of ZeusMonitor(log_file=)")
        there = [int(one.removeprefix("gpu").removesuffix("_energy")) for one in header[3:] if one]
        self.gpu_indices = there if gpu_indices is None else list(gpu_indices)
        self.nvml_gpu_indices = self.gpu_indices
        self.cpu_indices = []
        self.approx_instant_energy = approx_instant_energy
        self.sync_with = "torch"
        self.ignore_sync_execution = ignore_sync_execution
        self.match_window_name = match_window_name
        self.measurement_states = {}
        self._path = log_file
        self._rows = iter(rows)
        self._clock_ns = time.monotonic_ns
        self._progress = lambda: None
        lookup: Any = SimpleNamespace(
            begin=lambda: None, available=lambda measurement, limited: True, finish=lambda: None
        )
        self._lookup = lookup

    @property
    def gpus(self) -> GPUs:  # type: ignore[override]  # an attribute of the base
        """The GPUs of this process: those of the file may be of another node."""
        return get_gpus()

    @property
    def ongoing_windows(self) -> list[str]:
        """Names of the open windows."""
        return list(self.measurement_states)

    @override
    def begin_window(self, *args: Any, **kwargs: Any) -> None:
        """As in `ZeusMonitor`, but a window that is open raises RuntimeError."""
        try:
            super().begin_window(*args, **kwargs)
        except ValueError as error:
            raise RuntimeError(str(error)) from None

    @override
    def _synchronize(self) -> bool:
        return not self.ignore_sync_execution and super()._synchronize()

    @override
    def _close(self, key: str) -> MeasurementState:
        if key not in self.measurement_states:
            raise RuntimeError(f"No window {key!r} is open")
        return super()._close(key)

    @override
    def _ended(self, key: str, begin_ns: int, end_ns: int, aligned: bool) -> Measurement:
        row = next(self._rows, None)
        if row is None:
            raise RuntimeError(f"{self._path} has no line for the window {key!r}: it has ended")
        _, name, seconds, *joules = row
        if (self.match_window_name and name != key) or len(joules) != len(self.gpu_indices):
            raise RuntimeError(
                f"{self._path} has the window {name!r} next, not {key!r}, or not of "
                f"{len(self.gpu_indices)} GPUs"
            )
        energy = dict(zip(self.gpu_indices, map(float, joules), strict=True))
        return Measurement(float(seconds), energy)

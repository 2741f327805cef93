"""The CSV file of windows."""

from __future__ import annotations

import atexit
import csv
import fcntl
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeus.monitor.measurement import Measurement

from zeus.utils.warn import warn

_logs: dict[tuple[int, str], MeasurementLog] = {}
"""The logs of this process by pid, which a fork changes, and file."""


class MeasurementLog:
    """Writes `start_time,window_name,elapsed_time,gpu0_energy,...`: Unix s, name, s, J.

    If another process writes the file, this process's pid is added to the name. An earlier log of
    this process ends, as when a notebook's cell runs again.
    """

    def __init__(self, path: str | Path, gpu_indices: Sequence[int]) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._guard = threading.Lock()
        self._gpu_indices = list(gpu_indices)
        pid = os.getpid()
        name = os.path.realpath(path)
        earlier = _logs.get((pid, name))
        if earlier is not None:
            earlier.close()
            warn(f"{path} is overwritten; the ZeusMonitor that wrote it before stops writing.")
        _logs[pid, name] = self
        file = path.open("a", newline="", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            own = path.with_name(f"{path.stem}.{pid}{path.suffix}")
            warn(f"{path} is written by another process; writing {own}.")
            path, file = own, own.open("w", newline="", encoding="utf-8")
        if path.is_file():  # not /dev/null
            file.truncate(0)
        self.path = path
        self._file = file
        atexit.register(self.close)  # after the monitor has written its last windows
        self._writer = csv.writer(file, lineterminator="\n")
        # The windows' clock is monotonic; the file has wall-clock times.
        self._offset_s = time.time() - time.monotonic()
        header = [f"gpu{index}_energy" for index in self._gpu_indices]
        self._writer.writerow(["start_time", "window_name", "elapsed_time", *header])
        self._file.flush()

    def close(self) -> None:
        """Ends it: nothing more is written."""
        atexit.unregister(self.close)
        with self._guard:
            self._file.close()

    def write(self, key: str, begin_s: float, measurement: Measurement) -> None:
        """Adds a window that began at a monotonic second. An unknown energy is written as `nan`."""
        with self._guard:
            if self._file.closed:
                return
            energies = measurement.so_far
            joules = [energies.get(index, math.nan) for index in self._gpu_indices]
            self._writer.writerow([begin_s + self._offset_s, key, measurement.time, *joules])
            self._file.flush()

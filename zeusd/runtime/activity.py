"""Use of a GPU by each of its processes since the last reading, from the driver.

For a GPU that is not split: the driver's samples of SM use, one per process and period, each with
its own timestamp. For a split GPU (MIG): SM use of each instance times its size if the driver
measures it (GPM: Hopper and later), else only the sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeusd.devices.port import (
    Backend,
    CallOutcome,
    DeviceError,
    GpuProcess,
    Handle,
    MigInstance,
    ProcessUse,
)

PERIOD_NS = 1_000_000_000
"""Longest sample period of a driver. A process whose sample is this much older than the newest one
has been idle since."""

LISTING = 0
"""The ticket of a list of processes that no request waits for."""


class PidUse(NamedTuple):
    """One process's use of a GPU.

    Attributes:
        pid: The process; 0: one that the driver does not list.
        end_ns: End of the measurement, CLOCK_MONOTONIC.
        weight: Weight relative to other processes.
    """

    pid: int
    end_ns: int
    weight: int


@dataclass(frozen=True, slots=True)
class Activity:
    """The use of a GPU by its processes over an interval.

    Attributes:
        uses: Use by process. A process that is not listed used nothing.
        measured: Whether the driver measured the weights; else they are sizes of MIG instances.
    """

    begin_ns: int
    uses: tuple[PidUse, ...]
    measured: bool = True


@dataclass(frozen=True, slots=True)
class Listed:
    """A list of a GPU's processes; None: it could not be read.

    Attributes:
        activity: Their use of the GPU; None: not known, or only one process.
    """

    gpu: str
    t_ns: int
    pids: tuple[int, ...] | None
    activity: Activity | None = None


_WEIGHT = 1000
"""Weights are thousandths: of a percent, or of a slice's percent."""


class ActivityReader:
    """Reads the use of one GPU. Belongs to one thread."""

    def __init__(
        self,
        nvml: Backend,
        gpu: Handle,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        utc_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._monotonic_ns = monotonic_ns
        self._utc_ns = utc_ns
        self._since_ns = monotonic_ns()
        self._refused = 0

    def read(self, processes: Sequence[GpuProcess]) -> Activity | None:
        """Use by these processes since the last call; None: not known, or only one process."""
        split = any(process.gpu_instance is not None for process in processes)
        if len({process.pid for process in processes}) < 2 and not split:
            self._since_ns = self._monotonic_ns()
            return None
        try:
            if split:
                return self._of_instances(processes, self._nvml.mig_instances(self._gpu, True))
            return self._of_processes()
        except DeviceError as error:
            self._since_ns = self._monotonic_ns()
            if error.outcome is CallOutcome.UNSUPPORTED:
                self._refused += 1
            return None

    def _of_processes(self) -> Activity | None:
        # "Not supported" replies after which a call counts as not supported: a single one is not
        # proof.
        if self._refused >= 3:
            return None
        begin_ns = self._since_ns
        offset_ns = self._utc_ns() - self._monotonic_ns()
        samples = self._nvml.process_utilization(self._gpu, (begin_ns + offset_ns) // 1000)
        self._refused = 0
        now_ns = self._monotonic_ns()
        sampled_ns = {sample: min(now_ns, sample.t_us * 1000 - offset_ns) for sample in samples}
        newest_ns = max(
            [t_ns for one, t_ns in sampled_ns.items() if one.sm_percent], default=now_ns
        )
        if newest_ns <= begin_ns:
            return None
        self._since_ns = newest_ns
        uses = _newest(sampled_ns, begin_ns, newest_ns)
        return Activity(begin_ns, uses)

    def _of_instances(
        self, processes: Sequence[GpuProcess], instances: Sequence[MigInstance]
    ) -> Activity | None:
        begin_ns, now_ns = self._since_ns, self._monotonic_ns()
        self._since_ns = now_ns
        used = {instance.gpu_instance: instance.sm_percent for instance in instances}
        # Use all measurements or none: weights of different kinds cannot be compared.
        measured = bool(used) and None not in used.values()
        pids: dict[int, set[int]] = {}
        for process in processes:
            if process.gpu_instance is not None:
                pids.setdefault(process.gpu_instance, set()).add(process.pid)
        slices: dict[int, int] = {}
        for part in instances:
            slices[part.gpu_instance] = slices.get(part.gpu_instance, 0) + part.slices
        uses = []
        for instance, size in slices.items():
            percent = used[instance] if measured else 100.0
            # 0: an instance is used, and the driver lists no process on it.
            there = pids.get(instance, {0} if measured else set())
            if percent:
                weight = round(percent * size * _WEIGHT) // max(1, len(there))
                uses += [PidUse(pid, now_ns, max(1, weight)) for pid in sorted(there)]
        return Activity(begin_ns, tuple(uses), measured) if uses else None


def _newest(samples: dict[ProcessUse, int], begin_ns: int, newest_ns: int) -> tuple[PidUse, ...]:
    """The newest sample of each process that used the GPU, and the time until which it is valid."""
    latest: dict[int, tuple[int, int]] = {}
    for one, t_ns in samples.items():
        if one.sm_percent and t_ns > begin_ns:
            latest[one.pid] = max(latest.get(one.pid, (0, 0)), (t_ns, one.sm_percent))
    return tuple(
        PidUse(pid, newest_ns if newest_ns - t_ns <= PERIOD_NS else t_ns, percent * _WEIGHT)
        for pid, (t_ns, percent) in sorted(latest.items())
    )

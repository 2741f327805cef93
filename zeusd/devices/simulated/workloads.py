"""Workloads of simulated GPUs: measured tables, and the fitted model."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from operator import itemgetter
from typing import Protocol

from zeus_common.tables import records
from zeus_ipc.overriding import override
from zeusd.devices.simulated.models import DEVICES, DeviceModel
from zeusd.devices.simulated.physics import ModelLoad, OperatingPoint, power_w, settle, slowdown

DATASET_SAMPLES = {
    "cifar100": 50_000,
    "imagenet": 1_281_167,
    "librispeech": 281_241,
    "movielens-1m": 994_169,
    "sentiment140": 1_600_000,
    "squad": 88_524,
}
"""Training samples of an epoch, to divide the traces' epochs into steps. The traces do not record
them; these are the data sets' usual training splits."""


class SimulatedWorkload(Protocol):
    """A workload for simulated GPUs, counted in its own units (training steps)."""

    def point(
        self, device: DeviceModel, rank: int, limit_w: float, clock_max_mhz: int | None
    ) -> OperatingPoint:
        """The steady state on a GPU.

        Args:
            device: The product it runs on.
            rank: This GPU's position among the workload's GPUs, from 0.
            limit_w: Power limit in force.
            clock_max_mhz: Highest locked clock, if it is locked.
        """


@dataclass(frozen=True, slots=True)
class ModelWorkload(SimulatedWorkload):
    """A workload of the fitted model."""

    load: ModelLoad

    @override
    def point(
        self, device: DeviceModel, rank: int, limit_w: float, clock_max_mhz: int | None
    ) -> OperatingPoint:
        return settle(device, self.load, limit_w, clock_max_mhz)


@dataclass(frozen=True, slots=True)
class PresetWorkload(SimulatedWorkload):
    """A load for every product: one unit takes 0.1 s at full clock."""

    compute: bool

    @override
    def point(
        self, device: DeviceModel, rank: int, limit_w: float, clock_max_mhz: int | None
    ) -> OperatingPoint:
        k, watts = device.compute_load if self.compute else device.memory_load
        return settle(device, ModelLoad(0.1, k, watts, 1.05), limit_w, clock_max_mhz)


@dataclass(slots=True)
class ScriptedWorkload(SimulatedWorkload):
    """Draws a given power, up to the limit; see `Work.refresh`. One unit takes one second."""

    draw_w: float

    @override
    def point(
        self, device: DeviceModel, rank: int, limit_w: float, clock_max_mhz: int | None
    ) -> OperatingPoint:
        return OperatingPoint(
            1.0, min(self.draw_w, limit_w), device.clocks_mhz[0], self.draw_w > limit_w
        )


@dataclass(frozen=True, slots=True)
class MeasuredTable(SimulatedWorkload):
    """Time and power of a workload by power limit, as measured.

    Attributes:
        name: Name in the catalog.
        device: Key of the GPU it was measured on.
        limits_w: Power limits, ascending.
        unit_s: Seconds per unit (training step) at each.
        power_w: Average power of each GPU (outer) at each limit (inner).
    """

    name: str
    device: str
    limits_w: tuple[float, ...]
    unit_s: tuple[float, ...]
    power_w: tuple[tuple[float, ...], ...]

    @property
    def gpus(self) -> int:
        """How many GPUs it was measured on."""
        return len(self.power_w)

    @override
    def point(
        self, device: DeviceModel, rank: int, limit_w: float, clock_max_mhz: int | None
    ) -> OperatingPoint:
        """The table is interpolated between rows, and constant beyond them.

        The tables have no clocks. The clock is the one at which the model's compute load slows down
        as much as the row does relative to the fastest row. A lock below it slows the work further
        and reduces power, as in the model.
        """
        powers = self.power_w[min(rank, self.gpus - 1)]
        unit_s = _interpolate(self.limits_w, self.unit_s, limit_w)
        watts = _interpolate(self.limits_w, powers, limit_w)
        k, full_w = device.compute_load
        top = device.clocks_mhz[0]
        clock = top
        # Power while busy over average power, about the median of the fits to the tables: a limit
        # below this multiple of a workload's highest draw throttles it.
        capped = limit_w < 1.1 * max(powers)
        if capped:
            slower = max(1.0, unit_s / min(self.unit_s))
            clock = _at_most(device.clocks_mhz, top * k / (slower - 1 + k))
        if clock_max_mhz is not None and clock_max_mhz < clock:
            locked = _at_most(device.clocks_mhz, clock_max_mhz)
            load = ModelLoad(1.0, k, full_w)
            unit_s *= slowdown(k, locked / top) / slowdown(k, clock / top)
            share = (power_w(device, load, locked / top) - device.static_w) / (
                power_w(device, load, clock / top) - device.static_w
            )
            watts -= max(0.0, watts - device.static_w) * (1 - share)
            clock, capped = locked, False
        return OperatingPoint(1 / unit_s, watts, clock, capped)


def _at_most(grid: Sequence[int], mhz: float) -> int:
    """The highest clock of a descending grid that is not above `mhz`, else the lowest."""
    return next((clock for clock in grid if clock <= mhz + 0.5), grid[-1])


def _interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    right = bisect.bisect_right(xs, x)
    left = right - 1
    return ys[left] + (ys[right] - ys[left]) * (x - xs[left]) / (xs[right] - xs[left])


# --------------------------------------------------------------------------------------- catalog


PRESETS = ("model/compute", "model/memory")

_DATA = files("zeusd.devices.simulated") / "data"
_PROFILE_DEVICES = {"A40": "a40", "V100": "v100-pcie"}
_TRACE_DEVICES = {"a40": "a40", "p100": "p100", "rtx6000": "rtx6000", "v100": "v100-pcie"}


@lru_cache(maxsize=1)
def catalog() -> dict[str, MeasuredTable]:
    """All measured workloads by name.

    `nsdi23/GPU/DATASET/NETWORK/OPTIMIZER/BATCH` from the traces, `profiles/PROFILE` from
    recorded profiles. The unit is one training step.
    """
    tables: dict[str, MeasuredTable] = {}
    for gpu, device in _TRACE_DEVICES.items():
        tables.update(_read_trace(gpu, device))
    for profile, rows in itertools.groupby(measured_rows("windows"), key=itemgetter("profile")):
        name = f"profiles/{profile}"
        tables[name] = _read_profile(name, list(rows))
    return tables


def find_workload(name: str, device: DeviceModel) -> SimulatedWorkload:
    """The workload of a name: one of the catalog, `model/compute` or `model/memory`.

    Raises:
        ValueError: No workload has this name, or it was measured on another product.
    """
    if name in PRESETS:
        return PresetWorkload(compute=name == "model/compute")
    table = catalog().get(name)
    if table is None:
        raise ValueError(
            f"no workload {name!r}; there are model/compute, model/memory, and measured ones such "
            "as nsdi23/v100/imagenet/resnet50/adadelta/32 or profiles/V100+resnet50+gpu0"
        )
    if DEVICES[table.device].family != device.family:
        raise ValueError(
            f"the workload {name!r} was measured on {table.device}, not on {device.key}; choose "
            f"one of {device.family} from the catalog, or model/compute or model/memory"
        )
    return table


def _read_trace(gpu: str, device: str) -> dict[str, MeasuredTable]:
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for row in measured_rows(f"summary_power_{gpu}"):
        batch = int(row["batch_size"])
        name = f"nsdi23/{gpu}/{row['dataset']}/{row['network']}/{row['optimizer']}/{batch}"
        steps = math.ceil(DATASET_SAMPLES[row["dataset"]] / batch)
        rows.setdefault(name, []).append(
            (
                float(row["power_limit"]),
                float(row["time_per_epoch"]) / steps,
                float(row["average_power"]),
            )
        )
    tables = {}
    for name, measured in rows.items():
        limits_w, unit_s, watts = zip(*sorted(measured), strict=True)
        tables[name] = MeasuredTable(name, device, limits_w, unit_s, (watts,))
    return tables


def _read_profile(name: str, rows: list[Mapping[str, str]]) -> MeasuredTable:
    measured = sorted(
        (
            float(row["power_limit"]),
            float(row["elapsed_time"]),
            [float(energy_j) for energy_j in row["energy"].split()],
        )
        for row in rows
    )
    # Training steps in one window of the recorded profiles: the optimizer's default.
    return MeasuredTable(
        name=name,
        device=_PROFILE_DEVICES[name.partition("/")[2].partition("+")[0]],
        limits_w=tuple(limit for limit, _, _ in measured),
        unit_s=tuple(seconds / 40 for _, seconds, _ in measured),
        power_w=tuple(
            tuple(energies[gpu] / seconds for _, seconds, energies in measured)
            for gpu in range(len(measured[0][2]))
        ),
    )


def measured_rows(name: str) -> Iterator[Mapping[str, str]]:
    """The rows of a bundled table of measurements, such as `summary_power_a40`."""
    return records(str(_DATA / f"{name}.columns.csv.xz"))

"""Instructions of pipeline-parallel training as work, with measured time and energy at each clock.

Work opened as `Instructions` runs one named instruction after another. If nothing is queued, the
GPU spins in a receive and draws its blocking power at any clock.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from zeus_common.simulation import PROFILE_PREFIX, of_stage, read_profile, split_profile
from zeus_ipc.overriding import override
from zeusd.devices.simulated.models import DeviceModel
from zeusd.devices.simulated.physics import OperatingPoint
from zeusd.devices.simulated.workloads import SimulatedWorkload

PERSEUS_PREFIX = "perseus/"

BLOCKING_W = {"a100": 83.64, "a40": 70.38}
"""Power of a GPU that waits for a message from another, measured with the profiles."""

_DATA = files("zeusd.devices.simulated") / "data" / "perseus"


@dataclass(frozen=True, slots=True)
class InstructionTable(SimulatedWorkload):
    """Time and mean power of one instruction by clock; its unit is one instruction.

    Attributes:
        clocks_mhz: Ascending.
        unit_s: Seconds at each.
        power_w: Mean power at each.
    """

    clocks_mhz: tuple[int, ...]
    unit_s: tuple[float, ...]
    power_w: tuple[float, ...]

    @override
    def point(
        self, device: DeviceModel, rank: int, limit_w: float, clock_max_mhz: int | None
    ) -> OperatingPoint:
        """The tables were measured at the default power limit, and some draw more than that on a
        simulated product. So a limit acts by its share of the default limit.
        """
        ceiling = device.clocks_mhz[0] if clock_max_mhz is None else clock_max_mhz
        allowed_w = limit_w * max(1.0, max(self.power_w) / device.power_limits_w[1]) + 1e-6
        clock = top = next((mhz for mhz in device.clocks_mhz if mhz <= ceiling), 0)
        clock = top = top or device.clocks_mhz[-1]
        seconds, watts = self.at(clock, device)
        if watts > allowed_w:
            for clock in device.clocks_mhz:
                if clock < top:
                    seconds, watts = self.at(clock, device)
                    if watts <= allowed_w:
                        break
        return OperatingPoint(1 / seconds, watts, clock, capped=clock < top or watts > allowed_w)

    def at(self, mhz: int, device: DeviceModel) -> tuple[float, float]:
        """Seconds and watts at a clock: interpolated between rows, and constant above them. Below
        them, time grows in inverse proportion to the clock, and power above static falls with the
        clock.
        """
        clocks = self.clocks_mhz
        if mhz >= clocks[-1]:
            return self.unit_s[-1], self.power_w[-1]
        if mhz < clocks[0]:
            share = mhz / clocks[0]
            static_w = min(device.static_w, self.power_w[0])
            return self.unit_s[0] / share, static_w + (self.power_w[0] - static_w) * share
        right = bisect.bisect_right(clocks, mhz)
        left = right - 1
        share = (mhz - clocks[left]) / (clocks[right] - clocks[left])
        return (
            self.unit_s[left] + (self.unit_s[right] - self.unit_s[left]) * share,
            self.power_w[left] + (self.power_w[right] - self.power_w[left]) * share,
        )


@dataclass(frozen=True, slots=True)
class Instructions:
    """The instructions of one stage.

    Attributes:
        tables: Tables by the instruction's name.
        blocking_w: Power while nothing is queued.
    """

    tables: Mapping[str, InstructionTable]
    blocking_w: float

    def table(self, instruction: str | None) -> InstructionTable:
        """The table of an instruction.

        Raises:
            ValueError: No instruction has this name, or no name was given.
        """
        table = self.tables.get(instruction or "")
        if table is None:
            raise ValueError(
                f"this work has no instruction {instruction!r}; launch one of "
                f"{', '.join(self.tables)}"
            )
        return table


def instructions_of(
    rows: Mapping[str, Sequence[Sequence[float]]], device: DeviceModel, blocking_w: float | None
) -> Instructions:
    """Instructions from rows of MHz, seconds and joules by name.

    Args:
        rows: The measurements.
        device: The GPU that runs them.
        blocking_w: Power while nothing is queued; None: the product's.

    Raises:
        ValueError: The rows are not valid measurements.
    """
    tables = {}
    for name, measured in rows.items():
        by_clock = {int(mhz): (float(time), float(energy)) for mhz, time, energy in measured}
        if not by_clock or not all(
            mhz > 0 and 0 < time < math.inf and 0 < energy < math.inf
            for mhz, (time, energy) in by_clock.items()
        ):
            raise ValueError(f"the instruction {name!r} needs clocks, times and energies above 0")
        clocks = sorted(by_clock)
        tables[name] = InstructionTable(
            tuple(clocks),
            tuple(by_clock[mhz][0] for mhz in clocks),
            tuple(by_clock[mhz][1] / by_clock[mhz][0] for mhz in clocks),
        )
    if not tables:
        raise ValueError("the profile has no instruction of this stage")
    if blocking_w is None:
        blocking_w = BLOCKING_W.get(device.family, device.idle_w[1])
    if not 0 <= blocking_w < math.inf:
        raise ValueError(f"a blocked GPU draws at least 0 W, not {blocking_w}")
    return Instructions(tables, blocking_w)


def find_instructions(name: str, device: DeviceModel) -> Instructions | None:
    """The instructions of a workload's name; None if the name is not one of instructions.

    `perseus/a100/gpt3-175b/stage3` is measured; `profile:FILE.csv#stage=3` is the caller's own.

    Raises:
        ValueError: No instructions have this name, or they were measured on another product.
    """
    if name.startswith(PROFILE_PREFIX):
        path, stage, blocking_w = split_profile(name)
        return instructions_of(of_stage(read_profile(path), stage), device, blocking_w)
    if not name.startswith(PERSEUS_PREFIX):
        return None
    gpu, _, rest = name[len(PERSEUS_PREFIX) :].partition("/")
    model, _, stage_name = rest.partition("/stage")
    stages = _shipped(gpu, model) if model == "gpt3-175b" and gpu in BLOCKING_W else {}
    if not stage_name.isdecimal() or int(stage_name) not in stages:
        raise ValueError(
            f"no workload {name!r}; there are perseus/a100/gpt3-175b/stage0 to stage7, and the "
            "same of a40"
        )
    if device.family != gpu:
        raise ValueError(
            f"the workload {name!r} was measured on {gpu}, not on {device.key}; choose one of "
            f"{device.family}, or simulate {gpu}"
        )
    return instructions_of(stages[int(stage_name)], device, None)


@lru_cache(maxsize=4)
def _shipped(gpu: str, model: str) -> dict[int, dict[str, list[tuple[int, float, float]]]]:
    profile = read_profile(str(_DATA / f"{model}+{gpu}.columns.csv.xz"))
    return {stage: of_stage(profile, stage) for stage in {row.stage for row in profile}}

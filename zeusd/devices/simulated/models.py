"""The GPUs that can be simulated: what their driver reports, and how power depends on the clock.

The figures and their sources are in `models.toml`; the power model is in `physics`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AMD = 0
"""Architecture number of AMD's GPUs, which have none in NVML."""

PASCAL, VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = 4, 5, 6, 7, 8, 9, 10
ARCHITECTURES = {
    "amd": AMD,
    "pascal": PASCAL,
    "volta": VOLTA,
    "turing": TURING,
    "ampere": AMPERE,
    "ada": ADA,
    "hopper": HOPPER,
    "blackwell": BLACKWELL,
}


@dataclass(frozen=True, slots=True)
class SensorModel:
    """How a power sensor samples.

    Attributes:
        tick_ms: Period at which the reading, and the energy counter, change.
        window_ms: Time before a tick over which the reading is averaged.
        quantum_mw: Resolution of the reading.
        average: Whether it also has a mean over one second (POWER_AVERAGE).
        dither: Whether consecutive readings always differ.
        counter_lag_ms: The counter counts everything until so long before its ticks (from, to:
            boards differ), and power is measured when it is read, at most once in a tick's time;
            None: both change at the same ticks, and cover the same part of them.
        samples_ms: The driver keeps the mean power of each such time by itself; None: it does not,
            or it is not known what its samples cover.
    """

    tick_ms: float
    window_ms: float
    quantum_mw: int = 1
    average: bool = False
    dither: bool = True
    counter_lag_ms: tuple[float, float] | None = None
    samples_ms: float | None = None


@dataclass(frozen=True, slots=True)
class SimulatedProfile:
    """A workload power profile.

    Attributes:
        profile: Its number.
        conflicts: Profiles that conflict with it; the one with the lower number is in force.
        limit: It caps the GPU at this share of its largest power limit.
        clock: It also caps the clock at this share of the highest one.
    """

    profile: int
    conflicts: tuple[int, ...] = ()
    limit: float = 1.0
    clock: float = 1.0


@dataclass(frozen=True, slots=True)
class Superchip:
    """The parts of a GPU's module other than the GPU.

    Attributes:
        gpus: How many GPUs a module has.
        rest_w: Power of its CPU, the CPU's memory and the regulators.
        memory_share: The part of the GPU's power that its memory draws.
        counts_module: Whether the GPU's energy counter counts the whole module.
    """

    gpus: int
    rest_w: float
    memory_share: float
    counts_module: bool = False


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """One product.

    Attributes:
        key: Name in a simulation spec.
        name: NVML product name.
        architecture: NVML architecture number.
        memory_mib: Device memory.
        power_limits_w: Smallest, default and largest power limit.
        idle_w: Power without, and with, an open context.
        idle_clock_mhz: Graphics clock when nothing runs.
        clocks_mhz: Graphics clocks at full memory clock, descending.
        memory_clocks_mhz: Descending.
        low_clock_max_mhz: Highest graphics clock at a memory clock of 405 MHz, if it has that one.
        low_clock_min_mhz: Lowest graphics clock there, if it is not the lowest of all.
        sensor: The power sensor.
        energy_counter: Whether it has an energy counter (Volta and newer do).
        gpu_clocks: Whether graphics clocks can be locked.
        memory_clocks: Whether memory clocks can be locked.
        static_w: Power model: power of a busy GPU without dynamic power.
        vmin: Power model: relative voltage below the knee.
        knee: Power model: relative clock of the knee.
        clock_table: Graphics clocks by memory clock, if known one by one.
        has_counter: Whether there is an energy counter; None: as on other GPUs of its architecture.
        limit_step_mw: The driver truncates a power limit to a multiple of this.
        dies: How many GPUs share one power limit, sensor and counter; the first one reports them.
        superchip: The module that it is part of; None: it is on a board of its own.
        profiles: Workload power profiles that it offers.
    """

    key: str
    name: str
    architecture: int
    memory_mib: int
    power_limits_w: tuple[float, float, float]
    idle_w: tuple[float, float]
    idle_clock_mhz: int
    clocks_mhz: tuple[int, ...]
    memory_clocks_mhz: tuple[int, ...]
    sensor: SensorModel
    static_w: float
    vmin: float
    knee: float
    low_clock_max_mhz: int | None = None
    low_clock_min_mhz: int | None = None
    compute_load: tuple[float, float] = (0.8, 300.0)
    memory_load: tuple[float, float] = (0.2, 180.0)
    clock_table: tuple[tuple[int, tuple[int, ...]], ...] = ()
    has_counter: bool | None = None
    limit_step_mw: int = 1
    dies: int = 1
    superchip: Superchip | None = None
    profiles: tuple[SimulatedProfile, ...] = ()

    @property
    def per_card(self) -> int:
        """How many GPUs a card or module has."""
        return self.dies if self.superchip is None else self.superchip.gpus

    @property
    def energy_counter(self) -> bool:
        """Whether nvmlDeviceGetTotalEnergyConsumption, or AMD's counterpart, works."""
        return self.since(VOLTA) if self.has_counter is None else self.has_counter

    @property
    def gpu_clocks(self) -> bool:
        """Whether graphics clocks can be locked."""
        return self.since(VOLTA)

    @property
    def memory_clocks(self) -> bool:
        """Whether memory clocks can be locked: from Ampere on, except Hopper with HBM."""
        return self.since(AMPERE) and self.architecture != HOPPER

    @property
    def persistence(self) -> bool:
        """Whether it has a persistence mode. AMD's settings persist without one."""
        return self.architecture != AMD

    def since(self, architecture: int) -> bool:
        """Whether it has a feature that NVIDIA GPUs have since this architecture. AMD's have
        all."""
        return self.architecture >= architecture or self.architecture == AMD

    def clocks_at(self, memory_mhz: int) -> tuple[int, ...]:
        """Graphics clocks at a memory clock, descending."""
        for mhz, clocks in self.clock_table:
            if mhz == memory_mhz:
                return clocks
        if memory_mhz == 405 and self.low_clock_max_mhz is not None:
            return _grid(self.low_clock_min_mhz or self.clocks_mhz[-1], self.low_clock_max_mhz, 15)
        return self.clocks_mhz

    @property
    def family(self) -> str:
        """The family: tables measured on one of its boards also run on the others."""
        return self.key.partition("-")[0]


def _grid(low: float, high: float, step: float) -> tuple[int, ...]:
    """From the highest down, and the lowest also if the steps miss it."""
    count = int((high - low) / step + 1e-9) + 1
    clocks = tuple(int(high - step * k) for k in range(count))
    return clocks if clocks[-1] == int(low) else (*clocks, int(low))


def _load() -> tuple[dict[str, DeviceModel], dict[str, str]]:
    tables = tomllib.loads(Path(__file__).with_name("models.toml").read_text(encoding="utf-8"))
    given: dict[str, dict[str, Any]] = {}
    for key, table in tables["devices"].items():
        given[key] = {**given.get(table.pop("like", ""), {}), **table, "key": key}
    models = {key: _model(tables["sensors"], **table) for key, table in given.items()}
    return models, tables["aliases"]


def _model(sensors: dict[str, dict[str, Any]], **table: Any) -> DeviceModel:
    table["architecture"] = ARCHITECTURES[table["architecture"]]
    table["clocks_mhz"] = _grid(**table["clocks_mhz"])
    table["sensor"] = SensorModel(**_frozen(sensors[table["sensor"]]))
    if "superchip" in table:
        table["superchip"] = Superchip(**table["superchip"])
    table["profiles"] = tuple(SimulatedProfile(**_frozen(one)) for one in table.get("profiles", ()))
    return DeviceModel(**_frozen(table))


def _frozen(table: dict[str, Any]) -> dict[str, Any]:
    """The table with tuples for lists."""
    return {key: tuple(one) if isinstance(one, list) else one for key, one in table.items()}


DEVICES, ALIASES = _load()
"""All products by key, and short names for the common ones."""

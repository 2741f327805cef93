"""The GPUs that can be simulated: what their driver reports, and how power depends on the clock.

Limits, clocks and memories are as `nvidia-smi` reports them. Sensor periods and windows are those
measured by Yang et al., "Part-time Power Measurements: nvidia-smi's Lack of Attention"
(arXiv:2312.02741). H100 and H200 as measured on one of each (docs/reference/hardware).
The four parameters of the power model are fitted to measured tables for P100,
V100, Quadro RTX 6000, A40 and A100, and plausible for the others; see `physics`. H100's loads are
between those of attention and of matrix products in bfloat16, and that of copies. For AMD's GPUs,
limits and clocks are known; their sensors' update periods are not published, and the power model is
only plausible. For Grace superchips, the idle powers are those that nvidia-smi showed on a GB200
node (GPUs 157 to 172 W, memory 29 to 35 W, modules 452 to 467 W) and, for GH200, the means of a
published measurement (GPU 91 W, module 173 W).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

AMD = 0
"""Architecture number of AMD's GPUs, which have none in NVML."""

PASCAL, VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True, slots=True)
class Sensor:
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
class Profile:
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
    sensor: Sensor
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
    profiles: tuple[Profile, ...] = ()

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


def _grid(low: int, high: int, step: float) -> tuple[int, ...]:
    count = int((high - low) / step + 1e-9) + 1
    return tuple(int(high - step * k) for k in range(count))


_PASCAL_SENSOR = Sensor(20, 10, quantum_mw=400)
_TURING_SENSOR = Sensor(100, 100)
_GA100_SENSOR = Sensor(100, 25)
_GA10X_SENSOR = Sensor(100, 100, average=True)
_COUNTER_SENSOR = Sensor(100, 25, average=True, counter_lag_ms=(4, 12))
_HOPPER_SENSOR = replace(_COUNTER_SENSOR, samples_ms=20)

_AMD_SENSOR = Sensor(1, 1, quantum_mw=1000, dither=False)

_V100 = DeviceModel(
    key="v100-pcie",
    name="Tesla V100-PCIE-16GB",
    architecture=VOLTA,
    memory_mib=16384,
    power_limits_w=(100, 250, 250),
    idle_w=(26, 36),
    idle_clock_mhz=135,
    clocks_mhz=_grid(135, 1380, 7.5),
    memory_clocks_mhz=(877,),
    sensor=_PASCAL_SENSOR,
    static_w=36,
    vmin=0.72,
    knee=0.55,
    compute_load=(0.40, 340),
    memory_load=(0.15, 150),
)
_A100 = DeviceModel(
    key="a100-sxm-80",
    name="NVIDIA A100-SXM4-80GB",
    architecture=AMPERE,
    memory_mib=81920,
    power_limits_w=(100, 400, 400),
    idle_w=(57, 67),
    idle_clock_mhz=210,
    clocks_mhz=_grid(210, 1410, 15),
    memory_clocks_mhz=(1593,),
    sensor=_GA100_SENSOR,
    static_w=55,
    vmin=0.80,
    knee=0.787,
    compute_load=(0.90, 500),
    memory_load=(0.25, 260),
)
_H100 = DeviceModel(
    key="h100-sxm",
    name="NVIDIA H100 80GB HBM3",
    architecture=HOPPER,
    memory_mib=81559,
    power_limits_w=(200, 700, 700),
    idle_w=(75, 130),
    idle_clock_mhz=345,
    clocks_mhz=_grid(345, 1980, 15),
    memory_clocks_mhz=(2619, 1593),
    sensor=_HOPPER_SENSOR,
    static_w=120,
    vmin=0.78,
    knee=0.72,
    compute_load=(0.85, 1100),
    memory_load=(0.25, 570),
)

_PROFILES = (
    Profile(0, (1,)),
    Profile(1, (0,), limit=0.8, clock=0.9),
    Profile(2, (3,), limit=0.95),
    Profile(3, (2,), limit=0.85, clock=0.85),
    Profile(5, limit=0.9),
    Profile(6, (7,), limit=0.75, clock=0.85),
    Profile(7, (6,), limit=0.85),
    Profile(13, limit=0.95),
)
"""Numbers from a published table for GB200. NVIDIA has not published their effects."""

_B200 = DeviceModel(
    key="b200",
    name="NVIDIA B200",
    architecture=BLACKWELL,
    memory_mib=183359,
    power_limits_w=(200, 1000, 1000),
    idle_w=(144, 190),
    idle_clock_mhz=120,
    clocks_mhz=_grid(120, 1965, 15),
    memory_clocks_mhz=(3996,),
    sensor=_COUNTER_SENSOR,
    static_w=150,
    vmin=0.78,
    knee=0.72,
    compute_load=(0.85, 1080),
    memory_load=(0.25, 600),
    profiles=_PROFILES,
)

_MODELS = (
    DeviceModel(
        key="p100",
        name="Tesla P100-PCIE-16GB",
        architecture=PASCAL,
        memory_mib=16384,
        power_limits_w=(125, 250, 250),
        idle_w=(26, 33),
        idle_clock_mhz=405,
        clocks_mhz=tuple(int(1328.90625 - 12.65625 * k) for k in range(63)),
        memory_clocks_mhz=(715,),
        sensor=_PASCAL_SENSOR,
        static_w=33,
        vmin=0.75,
        knee=0.65,
        compute_load=(0.50, 175),
        memory_load=(0.15, 115),
    ),
    _V100,
    replace(
        _V100,
        key="v100-sxm2",
        name="Tesla V100-SXM2-16GB",
        power_limits_w=(150, 300, 300),
        idle_w=(38, 44.5),
        clocks_mhz=_grid(135, 1530, 7.5),
        static_w=45,
        compute_load=(0.40, 400),
    ),
    DeviceModel(
        key="t4",
        name="Tesla T4",
        architecture=TURING,
        memory_mib=15360,
        power_limits_w=(60, 70, 70),
        idle_w=(10, 26.8),
        idle_clock_mhz=300,
        clocks_mhz=_grid(300, 1590, 15),
        memory_clocks_mhz=(5001, 405),
        low_clock_max_mhz=645,
        sensor=_TURING_SENSOR,
        static_w=20,
        vmin=0.70,
        knee=0.60,
        compute_load=(0.60, 95),
        memory_load=(0.20, 55),
    ),
    DeviceModel(
        key="rtx6000",
        name="Quadro RTX 6000",
        architecture=TURING,
        memory_mib=24576,
        power_limits_w=(100, 260, 260),
        idle_w=(16, 55),
        idle_clock_mhz=300,
        clocks_mhz=_grid(300, 2100, 15),
        memory_clocks_mhz=(7001, 810, 405),
        low_clock_max_mhz=645,
        sensor=_TURING_SENSOR,
        static_w=56,
        vmin=0.70,
        knee=0.60,
        compute_load=(0.60, 285),
        memory_load=(0.20, 170),
    ),
    DeviceModel(
        key="a40",
        name="NVIDIA A40",
        architecture=AMPERE,
        memory_mib=46068,
        power_limits_w=(100, 300, 300),
        idle_w=(30.5, 76),
        idle_clock_mhz=210,
        clocks_mhz=_grid(210, 1740, 15),
        memory_clocks_mhz=(7251, 405),
        low_clock_max_mhz=420,
        sensor=_GA10X_SENSOR,
        static_w=73,
        vmin=0.71,
        knee=0.655,
        compute_load=(0.58, 330),
        memory_load=(0.28, 180),
    ),
    _A100,
    replace(
        _A100,
        key="a100-sxm-40",
        name="NVIDIA A100-SXM4-40GB",
        memory_mib=40960,
        memory_clocks_mhz=(1215,),
    ),
    replace(
        _A100,
        key="a100-pcie-40",
        name="NVIDIA A100-PCIE-40GB",
        memory_mib=40960,
        power_limits_w=(150, 250, 250),
        idle_w=(46, 57),
        memory_clocks_mhz=(1215,),
        compute_load=(0.90, 400),
    ),
    replace(
        _A100,
        key="a100-pcie-80",
        name="NVIDIA A100 80GB PCIe",
        power_limits_w=(150, 300, 300),
        idle_w=(55, 65),
        memory_clocks_mhz=(1512,),
        compute_load=(0.90, 430),
    ),
    DeviceModel(
        key="rtx4090",
        name="NVIDIA GeForce RTX 4090",
        architecture=ADA,
        memory_mib=24564,
        power_limits_w=(150, 450, 450),
        idle_w=(27, 50),
        idle_clock_mhz=225,
        clocks_mhz=_grid(225, 3120, 15),
        memory_clocks_mhz=(10501, 10251, 5001, 810, 405),
        low_clock_max_mhz=645,
        low_clock_min_mhz=210,
        sensor=_GA10X_SENSOR,
        static_w=45,
        vmin=0.70,
        knee=0.60,
        compute_load=(0.75, 480),
        memory_load=(0.25, 260),
    ),
    DeviceModel(
        key="l40s",
        name="NVIDIA L40S",
        architecture=ADA,
        memory_mib=46068,
        power_limits_w=(150, 350, 350),
        idle_w=(36, 80),
        idle_clock_mhz=210,
        clocks_mhz=_grid(210, 2520, 15),
        memory_clocks_mhz=(9001, 405),
        low_clock_max_mhz=645,
        sensor=_GA10X_SENSOR,
        static_w=70,
        vmin=0.70,
        knee=0.60,
        compute_load=(0.70, 400),
        memory_load=(0.25, 240),
    ),
    _H100,
    replace(
        _H100,
        key="h100-pcie",
        name="NVIDIA H100 PCIe",
        power_limits_w=(200, 350, 350),
        idle_w=(46, 75),
        idle_clock_mhz=210,
        clocks_mhz=_grid(210, 1755, 15),
        memory_clocks_mhz=(1593,),
        static_w=70,
        compute_load=(0.85, 450),
        memory_load=(0.25, 260),
    ),
    replace(
        _H100,
        key="h200",
        name="NVIDIA H200",
        memory_mib=143771,
        idle_w=(81, 130),
        memory_clocks_mhz=(3201, 2201),
    ),
    replace(
        _H100,
        key="gh200",
        name="NVIDIA GH200 480GB",
        memory_mib=97871,
        power_limits_w=(100, 900, 900),
        idle_w=(91, 120),
        memory_clocks_mhz=(2619,),
        sensor=_COUNTER_SENSOR,
        superchip=Superchip(gpus=1, rest_w=81, memory_share=0.19, counts_module=True),
    ),
    _B200,
    replace(
        _B200,
        key="gb200",
        name="NVIDIA GB200",
        memory_mib=189471,
        power_limits_w=(200, 1200, 1200),
        idle_w=(166, 210),
        static_w=165,
        compute_load=(0.85, 1250),
        memory_load=(0.25, 700),
        superchip=Superchip(gpus=2, rest_w=132, memory_share=0.19),
    ),
    DeviceModel(
        key="mi300x",
        name="AMD Instinct MI300X",
        architecture=AMD,
        memory_mib=196592,
        power_limits_w=(150, 750, 750),
        idle_w=(140, 165),
        idle_clock_mhz=132,
        clocks_mhz=(*range(2100, 132, -25), 132),
        memory_clocks_mhz=(1300, 900),
        sensor=_AMD_SENSOR,
        static_w=170,
        vmin=0.76,
        knee=0.70,
        compute_load=(0.85, 800),
        memory_load=(0.25, 520),
        limit_step_mw=1000,
    ),
    DeviceModel(
        key="mi250x",
        name="AMD Instinct MI250X",
        architecture=AMD,
        memory_mib=65520,
        power_limits_w=(100, 560, 560),
        idle_w=(45, 52),
        idle_clock_mhz=500,
        clocks_mhz=(*range(1700, 500, -25), 500),
        memory_clocks_mhz=(1600, 400),
        sensor=_AMD_SENSOR,
        static_w=60,
        vmin=0.76,
        knee=0.70,
        compute_load=(0.85, 290),
        memory_load=(0.25, 190),
        limit_step_mw=1000,
        dies=2,
    ),
)

DEVICES: dict[str, DeviceModel] = {model.key: model for model in _MODELS}
"""All products by key."""

ALIASES = {"v100": "v100-pcie", "a100": "a100-sxm-80", "h100": "h100-sxm"}
"""Short names for the common ones."""

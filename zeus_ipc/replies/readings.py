"""What is read: states, processes, energies, samples."""

from __future__ import annotations

from zeus_ipc.wire import Message


class GpuState(Message):
    """Result of `state` for one GPU. None: the GPU does not offer the reading."""

    t_ns: int
    """CLOCK_MONOTONIC time at which it was read."""
    power_limit_mw: int | None
    """The limit that software requested."""
    enforced_power_limit_mw: int | None
    """The limit in force: the smallest of software's, the board's and the thermal one."""
    gpu_clock_mhz: int | None
    memory_clock_mhz: int | None
    locked_gpu_clocks_mhz: list[int] | None
    """[min, max] as zeusd last locked them; None: unlocked, as far as zeusd knows. NVML cannot
    tell what others locked."""
    locked_memory_clocks_mhz: list[int] | None
    """The same for the memory clock."""
    persistence_mode: bool | None
    power_mw: int | None
    energy_mj: int | None
    """Since the driver was loaded."""
    temperature_c: int | None
    throttle_reasons: int | None
    """Bits of nvmlClocksEventReasons."""
    utilization_percent: int | None = None
    """Share of the last sample period (0.17 to 1 s) in which a kernel ran."""
    memory_used_mib: int | None = None
    """Memory of the GPU in use, what the driver reserves for itself included."""
    enforced_power_profiles: list[int] | None = None
    """Workload power profiles in force: those requested (see `controls`), less those that lost
    against another one. None: the GPU has none."""
    memory_power_mw: int | None = None
    """The memory's part of the GPU's power, mean of the last second."""
    module_power_mw: int | None = None
    """Power of the superchip that the GPU is part of: its CPU, memory and GPUs. Each of its GPUs
    reports it, so it is no summand: count every module once."""
    energy_scope: str = "gpu"
    """What `energy_mj` counts: `gpu`, `module` (the whole superchip), or `unknown`, until zeusd has
    compared the counter with both powers. Windows and samples are of the GPU in any case."""
    controls: dict[str, list[int] | None] = {}
    """What each control holds, as in the journal (see `Back.value`): as read, or as zeusd last set
    it where it cannot be read. None: it could not be read now."""


class ProcessInfo(Message):
    """A process that has a context on a GPU. None as for `LeaseInfo.pid`, unless said otherwise."""

    pid: int | None
    """As zeusd's pid namespace counts."""
    uid: int | None
    """Its user, shown to everybody; None: it is gone already."""
    command: str | None
    """What it runs, see `LeaseInfo.command`."""
    job: str | None
    """Its job, see `LeaseInfo.job`."""
    memory_mib: int | None
    """Memory of the GPU that it uses; None: the driver does not tell."""
    compute: bool
    """Whether it computes; one that only draws does not."""
    gpu_instance: int | None = None
    """MIG instance that it runs on; None: the whole GPU."""


class MigDevice(Message):
    """A MIG device of a GPU."""

    uuid: str
    """`MIG-...`"""
    gpu_instance: int
    """As in `ProcessInfo`."""
    slices: int
    """Its size: compute slices."""
    of: int
    """Slices of the whole GPU; 0: the driver does not tell."""


class GpuProcesses(Message):
    """Result of `processes` for one GPU."""

    t_ns: int
    """CLOCK_MONOTONIC time at which they were listed: up to a second ago."""
    processes: list[ProcessInfo]
    mig_devices: list[MigDevice] = []
    """Into which the GPU is split (MIG); none: it is not."""


class EnergyReading(Message):
    """Result of `energy` for one GPU."""

    t_ns: int
    """When the counter was read."""
    energy_mj: int
    """Cumulative energy since the driver was loaded. It moves in ticks of 20 to 100 ms."""
    scope: str = "gpu"
    """What it counts, see `GpuState.energy_scope`."""


class PowerReading(Message):
    """Result of `power` for one GPU. None: not offered by this GPU."""

    t_ns: int
    """When the sensors were read."""
    instant_mw: int | None
    """At this moment."""
    average_mw: int | None
    """Mean of the last second."""
    memory_average_mw: int | None
    """The same of the GPU's memory, which is part of the two above."""
    module_mw: int | None = None
    """Of the superchip, see `GpuState.module_power_mw`."""


class WindowEnergies(Message):
    """Result of `windows` for one source."""

    energy_uj: list[int | None]
    """Microjoules of each window, in the order asked for; None: it began before what is kept."""
    uncertainty_uj: list[int]
    """How far off each may be (two standard deviations), gain errors of the sensor aside."""
    begins_ns: int
    """What is kept begins here."""
    tick_ns: int
    """How often the source's sensors change."""


class Timeline(Message):
    """Result of `timeline` for one source."""

    t_ns: list[int]
    """CLOCK_MONOTONIC times, ascending."""
    values: list[int]
    """The reading at each, in the unit of its domain (see `Domain`)."""
    more: bool
    """There are more; ask again from the last time on."""


class Sample(Message):
    """What is published at each tick of a GPU, on the topic that is its UUID.

    None: the GPU does not offer the reading. Clocks, temperature, throttle reasons and limit are up
    to 0.2 s old.
    """

    gpu: str
    """UUID."""
    t_ns: int
    """CLOCK_MONOTONIC time of the tick."""
    number: int
    """Counts the GPU's ticks: a reader that misses one has lost a sample."""
    energy_uj: int
    """Energy from an arbitrary start, as `windows` counts it."""
    power_mw: int
    average_mw: int | None
    memory_mw: int | None
    gpu_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    throttle_reasons: int | None
    power_limit_mw: int | None = None
    """The limit in force."""
    module_mw: int | None = None
    """Power of the superchip, which all its GPUs report; None: it is part of none."""
    lost: int = 0
    """Samples of this GPU before this one that did not reach this reader; set by the client."""


class SupportedClocks(Message):
    """Result of `clocks` for one GPU."""

    memory_mhz: list[int]
    """Descending."""
    gpu_mhz: dict[str, list[int]]
    """Graphics clocks, descending, by memory clock (a decimal string)."""

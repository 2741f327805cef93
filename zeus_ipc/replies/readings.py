"""Replies with readings: states, processes, energies, samples."""

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
    """[min, max] as zeusd last locked them; None: unlocked, as far as zeusd knows. NVML does not
    report clocks that others locked."""
    locked_memory_clocks_mhz: list[int] | None
    """The same for the memory clock."""
    persistence_mode: bool | None
    power_mw: int | None
    energy_mj: int | None
    """Since the driver was loaded."""
    temperature_c: int | None
    throttle_reasons: int | None
    """Bits of nvmlClocksEventReasons."""
    limited_ms: dict[str, int] = {}
    """How long the clocks were limited in the last `limited.RECENT_S`, ms, by reason: heat or
    reliability or sync or board or power (`limited.REASONS`). Empty: the driver does not count it,
    or zeusd began to read it later."""
    limit_author: str | None = None
    """Who set the power limit in force: `BMC` (or the board), `site`, a ceiling's name, or `lease`;
    None: nobody is known."""
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
    reports it: count every module once."""
    energy_scope: str = "gpu"
    """What `energy_mj` counts: `gpu`, `module` (the whole superchip), or `unknown`, until zeusd has
    compared the counter with both powers. Windows and samples are always of the GPU."""
    controls: dict[str, list[int] | None] = {}
    """The value of each control in the journal's form (see `Back.value`): as read, or as zeusd last
    set it if the control cannot be read. None: reading failed."""
    failure: str | None = None
    """Why nothing can be read, as with a GPU that has fallen off the bus; None: something was."""


class ProcessInfo(Message):
    """A process that has a context on a GPU. None as for `LeaseInfo.pid`, unless said otherwise."""

    pid: int | None
    """In zeusd's pid namespace."""
    uid: int | None
    """Its user, visible to everyone; None: the process is gone."""
    command: str | None
    """What it runs, see `LeaseInfo.command`."""
    job: str | None
    """Its job, see `LeaseInfo.job`."""
    memory_mib: int | None
    """Memory of the GPU that it uses; None: the driver does not report it."""
    compute: bool
    """Whether it is a compute process, as opposed to graphics only."""
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
    """Slices of the whole GPU; 0: the driver does not report it."""


class GpuProcesses(Message):
    """Result of `processes` for one GPU."""

    t_ns: int
    """CLOCK_MONOTONIC time at which they were listed: up to a second ago."""
    processes: list[ProcessInfo]
    mig_devices: list[MigDevice] = []
    """MIG devices of the GPU; empty if it is not split."""


class EnergyReading(Message):
    """Result of `energy` for one GPU."""

    t_ns: int
    """When the counter was read."""
    energy_mj: int
    """Cumulative energy since the driver was loaded. It changes every 20 to 100 ms."""
    scope: str = "gpu"
    """See `GpuState.energy_scope`."""


class PowerReading(Message):
    """Result of `power` for one GPU. None: not offered by this GPU."""

    t_ns: int
    """When the sensors were read."""
    instant_mw: int | None
    """Instantaneous power."""
    average_mw: int | None
    """Mean of the last second."""
    memory_average_mw: int | None
    """Mean power of the GPU's memory in the last second, part of the two above."""
    module_mw: int | None = None
    """Power of the superchip, see `GpuState.module_power_mw`."""


class WindowEnergies(Message):
    """Result of `windows` for one source."""

    energy_uj: list[int | None]
    """Microjoules of each window, in the order asked for; None: it began before the history."""
    uncertainty_uj: list[int]
    """Uncertainty of each (two standard deviations), without gain errors of the sensor."""
    limited_ms: dict[str, list[int | None]] = {}
    """If asked for: how long the clocks were limited in each window, ms, by reason
    (`limited.REASONS`); None: not known. Empty: the driver does not count it."""
    begins_ns: int
    """Start of the history."""
    tick_ns: int
    """Update period of the source's sensors."""


class Timeline(Message):
    """Result of `timeline` for one source."""

    t_ns: list[int]
    """CLOCK_MONOTONIC times, ascending."""
    values: list[int]
    """The reading at each, in the unit of its domain (see `Domain`)."""
    more: bool
    """Whether there are more; ask again from the last time on."""


class Sample(Message):
    """A sample, published at each update of a GPU's sensors, with its UUID as the topic.

    None: the GPU does not offer the reading. Clocks, temperature, throttle reasons and limit are up
    to 0.2 s old.
    """

    gpu: str
    """UUID."""
    t_ns: int
    """CLOCK_MONOTONIC time of the tick."""
    number: int
    """Number of the sample: a gap means that samples were lost."""
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
    """Power of the superchip, which all its GPUs report; None: there is none."""
    seen_ns: int | None = None
    """Part at the end of each update that its energy is measured over; None: all of it."""
    lost: int = 0
    """Number of samples of this GPU lost just before this one; set by the client."""


class SupportedClocks(Message):
    """Result of `clocks` for one GPU."""

    memory_mhz: list[int]
    """Descending."""
    gpu_mhz: dict[str, list[int]]
    """Graphics clocks, descending, by memory clock (a decimal string)."""

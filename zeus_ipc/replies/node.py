"""Reply to `hello`: zeusd, and the node's GPUs and CPUs."""

from __future__ import annotations

from zeus_ipc.wire import Message


class GpuSupport(Message):
    """What a GPU is known to support. A set on an unsupported control fails with
    `not_supported`.
    """

    power_limit: bool
    gpu_clocks: bool
    memory_clocks: bool
    persistence_mode: bool
    energy_counter: bool
    """Whether the GPU has an energy counter; if not, zeusd integrates its power."""
    power_instant: bool
    """Whether it reports instantaneous power."""
    power_average: bool
    """Whether it reports the mean power of the last second."""


class CeilingInfo(Message):
    """A named ceiling, see `SetCeiling`."""

    name: str
    control: str
    value: list[int]
    """In the journal's form, see `Back.value`."""
    uid: int
    """Who set it."""
    deadline_ns: int | None
    """CLOCK_MONOTONIC time at which `fallback` applies, unless the machine sleeps; None: never."""
    fallback: list[int] | None
    """The bound from then on; None: no bound."""


class ProfileInfo(Message):
    """A workload power profile that a GPU offers."""

    profile: int
    """nvmlPowerProfileType_t."""
    name: str
    """Such as `max-q`, see `zeus_ipc.controls.PROFILES`."""
    priority: int
    """Of two conflicting profiles, the one with the lower number is enforced."""
    conflicts: list[int] = []
    """Profiles that conflict with it."""


class GpuInfo(Message):
    """The properties of a GPU that stay the same while the driver is loaded."""

    uuid: str
    index: int
    """NVML index on this node: PCI bus order, without CUDA_VISIBLE_DEVICES."""
    pci_address: str
    """`00000000:07:00.0`: domain, bus, device, function."""
    device_file: str = ""
    """Such as `/dev/nvidia3`, whose number is not always the index; empty: unknown."""
    name: str
    vbios: str = ""
    """Version of its firmware; empty: unknown."""
    architecture: int
    """NVML's number: 4 Pascal, 5 Volta, 6 Turing, 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell."""
    memory_mib: int
    """Of the whole GPU."""
    power_limit_min_mw: int | None
    """Smallest and largest limit that the device accepts, and the vendor's default; None:
    unsupported."""
    power_limit_max_mw: int | None
    power_limit_default_mw: int | None
    power_limit_site_mw: int | None
    """The site limit: by default a restore writes it."""
    power_limit_configured: bool = False
    """Whether zeusd.toml has the site limit; if not, it is the value that zeusd found."""
    power_limit_highest_mw: int | None = None
    """The highest value that a client may set: the lowest of the site limit and all ceilings."""
    gpu_clock_range_mhz: list[int] = []
    """The lowest and the highest graphics clock; empty: the driver does not say."""
    memory_clocks_mhz: list[int] = []
    """The memory clocks, descending; empty: the driver does not say."""
    power_limit_enforced: bool = False
    """Whether zeusd lowers any limit above the highest as soon as it sees it, even one set outside
    zeusd."""
    mig_enabled: bool
    """Whether it is split; its parts cannot be measured separately."""
    runtime_indices: list[int] = []
    """HIP's number of it, or of its partitions in order, without visible-device variables. Empty:
    unknown, or not an AMD GPU."""
    supports: GpuSupport
    """The features that it is known to support."""
    controls: list[str] = []
    """Names of the controls it is known to support."""
    persisted: list[str] = []
    """Controls whose target an administrator persisted (see `Persist`)."""
    ceilings: list[CeilingInfo] = []
    """Bounds besides the site's; `power_limit_highest_mw` is the lowest of all."""
    power_profiles: list[ProfileInfo] = []
    """The profiles that `power_profile` accepts."""
    power_domain: list[str] = []
    """UUIDs of the GPUs that share one power limit, power and energy, as the dies of a card. The
    first one reports them; the others' power and energy count as 0. Empty: it shares nothing."""
    module: int | None = None
    """The superchip that it is part of, such as a GB200: source `module:NUMBER`; None: none."""

    @property
    def has_sensor(self) -> bool:
        """Whether it has a sensor of energy or power, which a display card may lack."""
        return self.supports.energy_counter or self.supports.power_instant


class CpuInfo(Message):
    """A CPU package whose energy is measured."""

    index: int
    name: str
    """As powercap names it: `package-0`; or as the firmware labels its meter in hwmon:
    `Grace Power Socket 0`."""
    dram: bool
    """Whether its memory's energy is measured too (`dram:INDEX`)."""


class NodeProblem(Message):
    """What keeps zeusd from working fully."""

    part: str
    """driver: there are no GPUs, or all calls fail. gpu: the driver has one that zeusd cannot use.
    sampling: a device has no new samples. journal: every set is refused. ledger: no energy is
    charged."""
    source: str = ""
    """The device: a GPU's UUID, `cpu:0`; empty: all, or one whose name is not known."""
    code: str
    """Of the driver (`18`) or the system (`ENOSPC`); empty: there is none."""
    cause: str
    """One sentence."""
    since_ns: int
    """CLOCK_MONOTONIC time at which it began."""
    command: str
    """What to run next."""


class NodeInfo(Message):
    """Result of `hello`."""

    protocol: int
    """The version in use on this connection."""
    protocols: list[int]
    """All versions that the daemon supports."""
    daemon_version: str
    driver_version: str | None
    """None if no driver is loaded; the daemon keeps retrying."""
    lease_ttl_ms: int
    """Default TTL of leases."""
    simulated: str | None
    """Socket of the simulated devices, where work is submitted to them; None on real ones."""
    gpus: list[GpuInfo]
    """In the order of their NVML index."""
    cpus: list[CpuInfo] = []
    """CPU packages: sources `cpu:INDEX`."""
    stream: str | None = None
    """Socket on which samples are published; None: there is none."""
    started_ns: int = 0
    """CLOCK_MONOTONIC time at which the daemon started; 0: unknown."""
    quiesced_ns: int | None = None
    """When the driver was closed (see `Quiesce`); None: it is open."""
    findings: list[str] = []
    """Rules of zeusd.toml that have no effect on this node, and why."""
    problems: list[NodeProblem] = []
    """What does not work at present."""

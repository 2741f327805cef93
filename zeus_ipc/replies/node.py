"""What `hello` answers: zeusd, and the node's GPUs and CPUs."""

from __future__ import annotations

from zeus_ipc.wire import Message


class GpuSupport(Message):
    """What a GPU is known to offer. A set on an unsupported control answers `not_supported`."""

    power_limit: bool
    gpu_clocks: bool
    memory_clocks: bool
    persistence_mode: bool
    energy_counter: bool
    """Whether the GPU counts its energy; else zeusd sums its power."""
    power_instant: bool
    """Whether it tells the power of this moment."""
    power_average: bool
    """Whether it tells the mean of the last second."""


class CeilingInfo(Message):
    """A named ceiling, see `SetCeiling`."""

    name: str
    control: str
    value: list[int]
    """As in the journal, see `Back.value`."""
    uid: int
    """Who set it."""
    deadline_ns: int | None
    """CLOCK_MONOTONIC time at which it falls back, unless the machine sleeps; None: never."""
    fallback: list[int] | None
    """The bound from then on; None: there is none."""


class ProfileInfo(Message):
    """A workload power profile that a GPU offers."""

    profile: int
    """nvmlPowerProfileType_t."""
    name: str
    """Such as `max-q`, see `zeus_ipc.controls.PROFILES`."""
    priority: int
    """Of two profiles that conflict, the one with the lower number is enforced."""
    conflicts: list[int] = []
    """Profiles that cannot be enforced beside it."""


class GpuInfo(Message):
    """What does not change about a GPU while the daemon holds it."""

    uuid: str
    index: int
    """NVML index on this node: PCI bus order, without CUDA_VISIBLE_DEVICES."""
    pci_address: str
    """`00000000:07:00.0`: domain, bus, device, function."""
    name: str
    architecture: int
    """NVML's number: 4 Pascal, 5 Volta, 6 Turing, 7 Ampere, 8 Ada, 9 Hopper, 10 Blackwell."""
    memory_mib: int
    """Of the whole GPU."""
    power_limit_min_mw: int | None
    """Smallest and largest limit the device takes, and the vendor's default; None: unsupported."""
    power_limit_max_mw: int | None
    power_limit_default_mw: int | None
    power_limit_site_mw: int | None
    """The highest value that a client may set: the site limit. By default a restore writes it."""
    power_limit_enforced: bool = False
    """Whether zeusd lowers a limit above that as soon as it sees it, also one that others set."""
    mig_enabled: bool
    """Whether it is split; then its parts cannot be measured one by one."""
    runtime_indices: list[int] = []
    """Numbers by which HIP counts it, or its partitions in their order, without visible-device
    variables. Empty: not known, or not AMD's."""
    supports: GpuSupport
    """What it is known to offer."""
    controls: list[str] = []
    """Names of the controls it is known to offer."""
    persisted: list[str] = []
    """Controls whose target an administrator persisted (see `Persist`)."""
    ceilings: list[CeilingInfo] = []
    """Bounds besides the site's, all of which count in `power_limit_site_mw`."""
    power_profiles: list[ProfileInfo] = []
    """What `power_profile` takes."""
    power_domain: list[str] = []
    """UUIDs of the GPUs that share one power limit, power and energy, as the dies of a card. The
    first one has them; the others' power and energy count as 0. Empty: it has its own."""
    module: int | None = None
    """Superchip that it is part of, such as a GB200's: source `module:NUMBER`; None: of none."""


class CpuInfo(Message):
    """A CPU package whose energy is measured."""

    index: int
    name: str
    """As powercap names it: `package-0`; or as the firmware labels its meter in hwmon:
    `Grace Power Socket 0`."""
    dram: bool
    """Whether its memory's energy is measured too (`dram:INDEX`)."""


class NodeInfo(Message):
    """Result of `hello`."""

    protocol: int
    """The version in use on this connection."""
    protocols: list[int]
    """All versions the daemon speaks."""
    daemon_version: str
    driver_version: str | None
    """None while no driver is loaded; the daemon keeps retrying."""
    lease_ttl_ms: int
    """How long a lease lasts without a heartbeat, unless its holder asked for another time."""
    simulated: str | None
    """Socket of the simulated devices, where work is submitted to them; None on real ones."""
    gpus: list[GpuInfo]
    """In the order of their NVML index."""
    cpus: list[CpuInfo] = []
    """CPU packages, as sources `cpu:INDEX`."""
    stream: str | None = None
    """Socket on which samples are published; None: there is none."""
    started_ns: int = 0
    """CLOCK_MONOTONIC time at which the daemon started; 0: it does not say."""
    quiesced_ns: int | None = None
    """Since when the driver is closed (see `Quiesce`); None: it is not."""
    findings: list[str] = []
    """Rules of zeusd.toml that have no effect on this node, and why."""

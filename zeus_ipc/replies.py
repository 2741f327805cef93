"""zeusd's replies: every field with its unit and meaning. See `requests` and `operations`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from zeus_ipc.wire import ControlName, Message

if TYPE_CHECKING:
    from typing_extensions import NotRequired

# ---------------------------------------------------------- errors, and results for several sources


class ErrorBody(Message):
    """What a reply carries under `error`, for the whole request or for one GPU."""

    code: str
    """Stable code, see `zeus_ipc.errors.ErrorCode`."""
    message: str
    """One sentence for a person: what failed, why, and what to do."""
    gpu: str | None = None
    """UUID of the GPU concerned, if any."""
    details: dict[str, Any] = {}
    """Further facts by name. If a device refused: `outcome` (invalid, busy, lost, denied,
    unsupported, transient, unchanged), `device_code` and `device_call`, as its vendor has them."""


class Refused(Message):
    """The result for a GPU, or another source, on which the request failed."""

    error: ErrorBody


class Results(Message):
    """Result of a request for several GPUs: the result for each, or `Refused`."""

    gpus: dict[str, Any]
    """By UUID."""


class PastResults(Message):
    """Result of `windows` and `timeline`: the result for each source, or `Refused`."""

    sources: dict[str, Any]
    """By its name."""


class EmptyResult(Message):
    """Result for one GPU of a request that returns nothing."""


class Deferred(Message):
    """What a reply carries under `deferred` if sets with `block=False` have failed."""

    count: int
    """Number of failures since the last report."""
    last: ErrorBody
    """The newest failure."""


class Envelope(TypedDict):
    """A reply: a result or an error, under the id of its request."""

    v: int
    id: int
    result: NotRequired[Message]
    error: NotRequired[ErrorBody]
    deferred: NotRequired[Deferred]


# ----------------------------------------------------------------------------------------- the node


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


# ----------------------------------------------------------------------------------------- readings


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


# ------------------------------------------------------------------------------ controls and leases


class Applied(Message):
    """Result of a set for one GPU; `Done` if the GPU holds the requested value."""

    applied: list[int] | None = None
    """The GPU's value, as read back: a driver may have rounded it, or moved it into its range. The
    requested value if it cannot be read. In the journal's form, see `Back.value`."""


class Back(Message):
    """Restore target of a control."""

    value: list[int]
    """In the journal's form: [mW], [min MHz, max MHz], [] for unlocked clocks, [0 or 1], [profile,
    ...] ascending."""
    source: str
    """configured: by the site. observed: in force when zeusd first saw it. persisted, fleet,
    job:ID: the ceiling of this name, which is lower. unreadable: the device does not report locked
    clocks, so a restore unlocks them."""


class Acquired(Message):
    """Result of `acquire` for one GPU."""

    back: dict[str, Back]
    """Restore targets by control."""


class Released(Message):
    """Result of `release` and `goodbye`."""

    released: int
    """Number of leases that ended."""


class Restored(Message):
    """Result of `restore` for one GPU."""

    controls: dict[str, str]
    """By control: `ok`; `not_offered`: the driver does not offer it, and zeusd has set nothing;
    `held`: another job holds it, see `Restore.jobs`; `forgotten`, see `Restore.forget`; or why the
    restore is pending."""


class CeilingSet(Message):
    """Result of `set_ceiling` for one GPU."""

    highest: list[int]
    """The highest value that may be set now, in the journal's form, see `Back.value`."""


class HeartbeatResult(Message):
    """Result of `heartbeat`."""

    leases: int
    """Number of leases that the process holds."""
    ttl_ms: int
    """The shortest TTL among them; the site's default if there are none."""
    lost: list[list[str]]
    """[gpu, control] of leases that the process lost and has not acquired or released since."""


class PublishedProfile(Message):
    """The value of power limits to a job, see `PublishProfile`."""

    limits_mw: list[int]
    """Ascending."""
    progress: list[float]
    """Relative speed at each; 1 at the highest limit."""


class LeaseInfo(Message):
    """One lease."""

    gpu: str
    control: ControlName
    pid: int | None
    """The holder; None if it is another user's and the reader is not an administrator."""
    uid: int
    """The holder's user."""
    since_ns: int
    """CLOCK_MONOTONIC time at which it was acquired."""
    value: list[int] | None
    """The GPU's value under it, in the journal's form; None: nothing was set yet."""
    asked: list[int] | None = None
    """The holder's last request, if known."""
    restoring: bool
    """Whether the holder is gone and the restore is pending."""
    back: Back
    """The control's restore target."""
    ttl_ms: int
    """Its TTL."""
    expires_ns: int
    """CLOCK_MONOTONIC time at which it expires without a heartbeat."""
    command: str | None = None
    """What the holder runs: its program, with the script of an interpreter (`python train.py`), or
    the command of `zeusctl set`; None as for `pid`."""
    job: str | None = None
    """The holder's job, as a control group that root owns names it: Slurm's job id, or its SLUID
    from Slurm 26.05 on, or Kubernetes' pod uid; None if it is in none, and as for `pid`."""
    trouble: str | None = None
    """Why the last attempt to restore the control failed."""
    pending_ns: int | None = None
    """CLOCK_MONOTONIC time at which the first attempt failed."""
    profile: PublishedProfile | None = None
    """The profile that the holder has published; None: none."""
    measuring: bool = False
    """Whether the holder is measuring and needs its highest limit."""
    needs_mw: int | None = None
    """The limit below which it misses its latency objective; None: it has none."""


class LeaseList(Message):
    """Result of `leases`."""

    leases: list[LeaseInfo]


# -------------------------------------------------------------------------------- the energy ledger


class UsageSum(Message):
    """Energy of one account in one interval."""

    interval: int
    """Number of the interval, from 0."""
    kind: str
    """job, pod, namespace, user, container or service: the account. idle: nobody held or used the
    GPU. unattributed: the account is unknown; `name` says why. others: the sum of accounts that the
    reader may not see. process: a process on GPUs that nobody held. gpu: a GPU, over all accounts.
    total: all accounts."""
    name: str
    """A job's id, `namespace/pod`, a unit, a container's id, a pid, a GPU's UUID, or a reason."""
    run: str
    """The run of a job; for a process, its start time in clock ticks since boot."""
    uid: int
    """The user; -1: none; lower: a user who was removed."""
    active_uj: int
    """Energy while the GPU worked, microjoules."""
    idle_uj: int
    """Energy while the driver reported the GPU as idle."""
    lower_uj: int
    """Lower bound; the value itself if it is exact."""
    upper_uj: int
    """Upper bound."""
    ns: int
    """GPU time."""
    methods: list[str]
    """allocated, exclusive (exact), weights, utilization, slices, equal, unread (estimates);
    `charging.bounds_of` gives the basis of the bounds."""
    begin_s: int = 0
    """When a job or pod began to hold its first GPU, or a process started, UTC; 0: unknown."""
    end_s: int = 0
    """When it ceased to hold its last; 0: it still holds one, or that is unknown."""
    workload: str = ""
    """Of a process: the job, pod, service or container that it belongs to."""
    first_ms: int = 0
    """By job, pod, account or process: when in the interval it was charged first, UTC; 0: days
    that are kept as a whole."""
    last_ms: int = 0
    """The same for the end of the last charge."""
    limited_ns: dict[str, int] = {}
    """Of a job or pod: GPU time in which clocks were limited, by cause: a reason
    (`limited.REASONS`), or `power:AUTHOR` (see `GpuState.limit_author`)."""


class Usage(Message):
    """Result of `usage`."""

    sums: list[UsageSum]
    """By interval, the largest first."""
    more: bool
    """There are more sums; ask again with an `offset`."""
    metered_uj: list[int]
    """The GPUs' counters for each interval: the sums add up to them if nothing is excluded."""
    begins_s: int | None
    """The first day in the ledger, UTC; None: it is empty."""
    settled_ms: int = 0
    """Time until which all of the GPUs' energy is charged, UTC; 0: nothing is in this boot."""


class Deallocated(Message):
    """Result of `deallocate`."""

    ended: int
    """Number of GPUs that were held."""


class Forgotten(Message):
    """Result of `forget_user`."""

    accounts: int
    """Number of the user's accounts."""


class EstimatedEnergy(Message):
    """The part of an account's energy that one method estimated, microjoules."""

    method: str
    energy_uj: int
    lower_uj: int
    upper_uj: int
    """Bounds; `charging.bounds_of` gives their basis."""


if TYPE_CHECKING:
    # A sum of accounts is made of amounts by name, all numbers, and has none of these.
    Estimates: TypeAlias = Any
else:
    Estimates = list[EstimatedEnergy]


class LedgerTotal(Message):
    """Energy of one account since the ledger began, microjoules; see `UsageSum`."""

    kind: str
    name: str
    uid: int
    active_uj: int
    idle_uj: int
    lower_uj: int
    upper_uj: int
    estimates: Estimates = []
    """The part that is an estimate, by method; empty for a sum of several accounts."""


class GpuTotal(Message):
    """Unused energy of one GPU since the ledger began; microjoules."""

    idle_uj: int = 0
    """Nobody held or used it."""
    held_idle_uj: int = 0
    """Charged to a holder while the driver reported the GPU as idle."""
    unattributed_uj: dict[str, int] = {}
    """Could not be charged, by reason."""


class Held(Message):
    """A GPU that a job or pod holds."""

    gpu: str
    """Its UUID."""
    kind: str = ""
    """job or pod; empty: the reader may not see whose it is, nor the following fields."""
    name: str = ""
    run: str = ""
    uid: int = -1
    """The user; -1: unknown."""
    weight: int = 0
    """Its part beside other holders; 0: all of the GPU."""
    parts: int = 0
    """Number of parts of the GPU; 0: those that are held."""
    since_ns: int = 0
    """CLOCK_MONOTONIC."""


class LedgerState(Message):
    """The energy ledger, as last settled: at most a minute ago."""

    totals: list[LedgerTotal]
    """Users, namespaces, services, idle and unattributed; for a reader who may not see the others,
    their sum."""
    counted_uj: dict[str, int]
    """The increase of each GPU's counter since the ledger began; the totals add up to it."""
    held: list[Held]
    """What jobs and pods hold."""
    damaged: list[str]
    """Damaged files that were set aside."""
    dropped: int
    """Requests that were refused because the queue was full."""
    by_gpu: dict[str, GpuTotal] = {}
    """Unused energy of each GPU, by UUID."""
    workloads: list[LedgerTotal] = []
    """Jobs and pods that hold a GPU or did in the last 5 minutes: their energy so far, all runs
    together. Users see their own."""
    cpu_totals: list[LedgerTotal] = []
    """Like `totals`, for CPU packages: never part of the totals of GPUs."""
    cpu_counted_uj: dict[str, int] = {}
    """Like `counted_uj`, for CPU packages such as `cpu:0`."""


# ----------------------------------------------------------------------------------- administration


class Count(Message):
    """How often something happened, by the values of its labels."""

    labels: dict[str, str]
    count: int


class CallTimes(Message):
    """How long calls of one NVML operation took."""

    operation: str
    """Name in zeusd's NVML interface, such as `set_power_limit`."""
    seconds: float
    """Duration of all calls together."""
    buckets: list[int]
    """Number of calls that took at most each of `CALL_BUCKETS_S`; last, the number of all."""
    errors: dict[str, int]
    """Failures by NVML return code (a decimal string)."""


CALL_BUCKETS_S = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0)


class SourceState(Message):
    """The sampler's newest reading of one device."""

    source: str
    energy_uj: int
    """Energy from an arbitrary start, as `windows` counts it."""
    power_mw: int
    t_ns: int
    """CLOCK_MONOTONIC time of its newest tick."""
    tick_ns: int
    """Update period of its sensors."""
    limited_ns: dict[str, int] = {}
    """How long a GPU's clocks were limited since the driver was loaded, by reason
    (`limited.REASONS`); empty: the driver does not count it."""


class UserLoad(Message):
    """Refused and delayed requests of one user. Counts start with the daemon."""

    uid: int
    """The user; a subordinate uid counts as its owner."""
    connections: int
    """Open connections."""
    limited_ns: int
    """Time that its requests have waited because of the rate limit."""
    limited: bool
    """Whether requests are waiting now."""
    refused: int
    """Connections that were closed on arrival: too many, or too many per second."""
    faults: int
    """Connections that were closed because they broke ZeroMQ's protocol."""
    reason: str = ""
    """Why the last of these was closed."""


class Metrics(Message):
    """Result of `metrics`. Counts start with the daemon."""

    t_ns: int
    """CLOCK_MONOTONIC time of this reply."""
    started_ns: int
    """The same for the daemon's start."""
    changes: list[Count]
    """Sets that were written or failed: `control`, `result` (ok, failed)."""
    restores: list[Count]
    """Leases that ended: `reason`, `result`."""
    restore_failures: list[Count]
    """Failed attempts to restore a control: `control`."""
    outside_changes: list[Count]
    """Values set outside zeusd: `control`, `result` (adopted, kept, overridden, noticed;
    enforced: the board or its BMC moved the limit in force; lost: locked clocks hold no more)."""
    refusals: list[Count]
    """Sets and acquires that were refused: `code`, see `errors.ErrorCode`."""
    lease_expiries: int
    """Leases whose holder's heartbeat stopped."""
    pending: list[list[str]]
    """[gpu, control] of pending restores."""
    connections: int
    """Connected clients."""
    calls: list[CallTimes]
    """By operation."""
    sources: list[SourceState]
    """By device."""
    users: list[UserLoad] = []
    """Users with refused or delayed requests."""
    ledger: LedgerState | None = None
    """The energy ledger; None: there is none."""


class Quiesced(Message):
    """Result of `quiesce`."""

    since_ns: int
    """CLOCK_MONOTONIC time."""
    open: list[str]
    """Device files of the driver that zeusd could not close, if any."""
    pending: list[list[str]]
    """[gpu, control] of restores that failed before; they are retried after `resume`."""


class Permission(Message):
    """What a user may do with one control of one GPU."""

    allowed: bool
    """Whether the user may change it at all."""
    why: str
    """Why not, in one sentence; empty if allowed."""
    ranges: list[list[int]]
    """[smallest, largest] in mW or MHz; a value must lie in one of them; empty: no bound."""


class Policy(Message):
    """Result of `policy`."""

    uid: int
    """The requesting user."""
    admin: bool
    """Whether everything is allowed: other users' leases, `restore`, `persist` and `quiesce`."""
    on_host: bool
    """Whether the requesting process is in zeusd's own pid namespace, and not in a container."""
    gpus: dict[str, dict[str, Permission]]
    """By UUID and control."""


class AuditRecord(Message):
    """One record of the audit log."""

    number: int
    """Number of the record."""
    t_ns: int
    """CLOCK_MONOTONIC time at which it happened."""
    last_ns: int
    """Time of the last of several, see `count`."""
    count: int
    """Successful sets of one control under one lease, one after another, are one record: `old` is
    of the first and `new` of the last. So are equal warnings within ten minutes of each other."""
    event: str
    """ceiling, ceiling_set, ceiling_removed, ceiling_expired, set, restore, restored, persisted,
    lease_ended, lease_expired, restore_failed, restore_forgotten, restore_clamped, outside_change,
    refused, quiesced, resumed, revoked, gpu_found, gpu_lost,
    gpu_returned, driver_changed, restarted: zeusd, at `last_ns`, without records since `t_ns`."""
    warning: bool
    """Whether someone should investigate it."""
    gpu: str | None = None
    control: str | None = None
    uid: int | None = None
    pid: int | None = None
    """None if it is another user's and the reader is not an administrator."""
    command: str | None = None
    """What the process runs, see `LeaseInfo.command`; None as for `pid`."""
    job: str | None = None
    """Its job, see `LeaseInfo.job`; empty if it is in none, None as for `pid`."""
    lease: str | None = None
    """The lease it was made under."""
    old: str | None = None
    """Value before, with its unit."""
    new: str | None = None
    """Value after."""
    reason: str | None = None
    """Why it happened, such as `holder_gone`."""
    result: str | None = None
    """The result, such as `ok`."""


class AuditRecords(Message):
    """Result of `audit`."""

    records: list[AuditRecord]
    """The oldest first."""
    dropped: int
    """Number of older records that are no longer kept."""
    complete_ns: int = 0
    """CLOCK_MONOTONIC time since which no record is missing."""


def prepare() -> None:
    """Builds every message's validator now, not on the thread that first needs it."""
    for one in [*globals().values()]:
        if isinstance(one, type) and issubclass(one, Message):
            one.model_rebuild()

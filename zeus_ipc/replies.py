"""What zeusd answers: every reply, every field, its unit and its meaning.

How they are asked for: `requests`, `operations`.
"""

from __future__ import annotations

from typing import Any

from zeus_ipc.wire import (
    ControlName,
    Message,
)


class ErrorBody(Message):
    """What a reply carries under `error`, for the whole request or for one GPU."""

    code: str
    """Stable code, see `zeus_ipc.errors.ErrorCode`."""
    message: str
    """One sentence for a person: what failed, why, and what to do."""
    gpu: str | None = None
    """UUID of the GPU it is about, if it is about one."""
    details: dict[str, Any] = {}
    """Further facts by name. Where a device refused: `outcome` (invalid, busy, lost, denied,
    unsupported, transient, unchanged), `device_code` and `device_call`, as its vendor has them."""


class Refused(Message):
    """What a reply carries for a GPU, or another source, that the request failed on."""

    error: ErrorBody


class Results(Message):
    """Result of a request for several GPUs: what it comes to on each, or `Refused`."""

    gpus: dict[str, Any]
    """By UUID."""


class PastResults(Message):
    """Result of `windows` and `timeline`: what it comes to for each source, or `Refused`."""

    sources: dict[str, Any]
    """By its name."""


class Done(Message):
    """Result for one GPU of a request that has no other: it was done."""


class Deferred(Message):
    """What a reply carries under `deferred` when sets with `block=False` have failed since."""

    count: int
    """How many have failed since the last report."""
    last: ErrorBody
    """The newest."""


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


class GpuProcesses(Message):
    """Result of `processes` for one GPU."""

    t_ns: int
    """CLOCK_MONOTONIC time at which they were listed: up to a second ago."""
    processes: list[ProcessInfo]


class Applied(Message):
    """Result of a set for one GPU; `Done` where it holds what was asked."""

    applied: list[int] | None = None
    """What the GPU holds now, as read back: a driver may have rounded what was asked, or moved it
    into its range. What was asked, where it cannot be read. As in the journal, see `Back.value`."""


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


class Back(Message):
    """Restore target of a control."""

    value: list[int]
    """As in the journal: [mW], [min MHz, max MHz], [] for unlocked clocks, [0 or 1], [profile, ...]
    ascending."""
    source: str
    """configured: by the site. observed: in force when zeusd first saw it. persisted, fleet,
    job:ID: the ceiling of this name, which is lower. unreadable: the device cannot tell what clocks
    were locked to before, so they are unlocked."""


class Acquired(Message):
    """Result of `acquire` for one GPU."""

    back: dict[str, Back]
    """By control, what it will be restored to."""


class Released(Message):
    """Result of `release` and `goodbye`."""

    released: int
    """How many leases have ended."""


class Restored(Message):
    """Result of `restore` for one GPU."""

    controls: dict[str, str]
    """By control: `ok`; `not_offered`: the driver does not offer it, and zeusd has set nothing; or
    why it could not be restored yet."""


class CeilingSet(Message):
    """Result of `set_ceiling` for one GPU."""

    highest: list[int]
    """The most that may be set now, as in the journal, see `Back.value`."""


class HeartbeatResult(Message):
    """Result of `heartbeat`."""

    leases: int
    """How many leases the process holds."""
    ttl_ms: int
    """The shortest TTL among them; without any, the site's default."""
    lost: list[list[str]]
    """[gpu, control] of leases that the process lost and has not acquired or released since."""


class PowerProfile(Message):
    """What power limits are worth to a job, see `PublishProfile`."""

    limits_mw: list[int]
    """Ascending."""
    progress: list[float]
    """Relative speed at each: 1 is the highest limit's."""


class LeaseInfo(Message):
    """One lease."""

    gpu: str
    control: ControlName
    pid: int | None
    """The holder; None if it is another user's and the reader is no administrator."""
    uid: int
    """The holder's user."""
    since_ns: int
    """CLOCK_MONOTONIC time at which it was taken."""
    value: list[int] | None
    """What the GPU holds under it, as in the journal; None: nothing was set yet."""
    asked: list[int] | None = None
    """What its holder asked for last, where that is known."""
    restoring: bool
    """The holder is gone, and the restore is pending."""
    back: Back
    """The control's restore target."""
    ttl_ms: int
    """How long it lasts without a heartbeat."""
    expires_ns: int
    """CLOCK_MONOTONIC time at which it ends if no heartbeat comes."""
    command: str | None = None
    """What the holder runs: its program, with the script of an interpreter (`python train.py`), or
    what `zeusctl set` runs for it; None as for `pid`."""
    job: str | None = None
    """The holder's job, as a control group that root owns names it: Slurm's job id, or its SLUID
    from Slurm 26.05 on, or Kubernetes' pod uid; None if it is in none, and as for `pid`."""
    trouble: str | None = None
    """Why the last attempt to put the control back failed."""
    profile: PowerProfile | None = None
    """What the holder has published; None: nothing."""
    measuring: bool = False
    """Whether the holder says that it measures and needs its highest limit."""
    needs_mw: int | None = None
    """The limit below which it says that it misses a latency objective; None: it has none."""


class LeaseList(Message):
    """Result of `leases`."""

    leases: list[LeaseInfo]


class UsageSum(Message):
    """Energy of one account in one interval."""

    interval: int
    """Which of the intervals, from 0."""
    kind: str
    """job, pod, namespace, user, container or service: whose it is. idle: nobody held or used the
    GPU. unattributed: it is not known whose it is; `name` says why. others: all that the reader may
    not see one by one. gpu: of a GPU, whosever it is. total: of all accounts."""
    name: str
    """A job's id, `namespace/pod`, a unit, a container's id, a GPU's UUID, or a reason."""
    run: str
    """Which run of a job."""
    uid: int
    """The user; -1: none; below: a user who was forgotten."""
    active_uj: int
    """Energy while the GPU worked, microjoules."""
    idle_uj: int
    """Energy while the driver reported the GPU as idle."""
    lower_uj: int
    """At least this was used: the estimate itself, where it is exact."""
    upper_uj: int
    """At most this was used."""
    ns: int
    """GPU time."""
    methods: list[str]
    """allocated, exclusive (exact), weights, utilization, equal (estimates)."""
    begin_s: int = 0
    """When a job or pod began to hold its first GPU, UTC; 0: not known."""
    end_s: int = 0
    """When it ceased to hold its last; 0: it has not, or that is not known."""


class Usage(Message):
    """Result of `usage`."""

    sums: list[UsageSum]
    """By interval, the largest first."""
    more: bool
    """There are more sums; ask again with an `offset`."""
    metered_uj: list[int]
    """What the GPUs' counters say of each interval: what the sums add up to if nothing is left
    out."""
    begins_s: int | None
    """The day on which the ledger begins, UTC; None: it is empty."""


class Deallocated(Message):
    """Result of `deallocate`."""

    ended: int
    """How many GPUs were held."""


class Forgotten(Message):
    """Result of `forget_user`."""

    accounts: int
    """How many of the user's accounts there were."""


class Quiesced(Message):
    """Result of `quiesce`."""

    since_ns: int
    """CLOCK_MONOTONIC time."""
    open: list[str]
    """Device files of the driver that zeusd could not close, if any."""
    owed: list[list[str]]
    """[gpu, control] of what could not be restored before; it is tried again after `resume`."""


class Permission(Message):
    """What a user may do with one control of one GPU."""

    allowed: bool
    """Whether the user may change it at all."""
    why: str
    """Why not, as one sentence; empty if allowed."""
    ranges: list[list[int]]
    """[smallest, largest] in mW or MHz, any of which a value must lie in; empty: no bound."""


class Policy(Message):
    """Result of `policy`."""

    uid: int
    """The asking user."""
    admin: bool
    """Whether everything is allowed: other users' leases, `restore`, `persist` and `quiesce`."""
    on_host: bool
    """Whether the asking process is in zeusd's own pid namespace, and in no container."""
    gpus: dict[str, dict[str, Permission]]
    """By UUID and control."""


class AuditRecord(Message):
    """One record of the audit log: what happened, to what, by whom."""

    number: int
    """Counts the records."""
    t_ns: int
    """CLOCK_MONOTONIC time at which it happened."""
    last_ns: int
    """The same for the last of several, see `count`."""
    count: int
    """Successful sets of one control under one lease, one after another, are one record: `old` is
    of the first and `new` of the last."""
    event: str
    """ceiling, ceiling_set, ceiling_removed, ceiling_expired, set, restore, restored, persisted,
    lease_ended, lease_expired, restore_failed, restore_clamped, outside_change, refused,
    quiesced, resumed, revoked, gpu_found, gpu_lost,
    gpu_returned, driver_changed."""
    warning: bool
    """Whether someone should look at it."""
    gpu: str | None = None
    control: str | None = None
    uid: int | None = None
    pid: int | None = None
    """None if it is another user's and the reader is no administrator."""
    command: str | None = None
    """What the process runs, see `LeaseInfo.command`; None as for `pid`."""
    job: str | None = None
    """Its job, see `LeaseInfo.job`; empty if it is in none, None as for `pid`."""
    lease: str | None = None
    """Which lease it was under."""
    old: str | None = None
    """Value before, with its unit."""
    new: str | None = None
    """Value after."""
    reason: str | None = None
    """Why it happened, such as `holder_gone`."""
    result: str | None = None
    """What came of it, such as `ok`."""


class AuditTrail(Message):
    """Result of `audit`."""

    records: list[AuditRecord]
    """The oldest first."""
    dropped: int
    """How many records there were before those that are kept."""


class Count(Message):
    """How often something happened, by the values of its labels."""

    labels: dict[str, str]
    count: int


class CallTimes(Message):
    """How long calls of one NVML operation took."""

    operation: str
    """Name in zeusd's NVML interface, such as `set_power_limit`."""
    seconds: float
    """In all."""
    buckets: list[int]
    """How many took at most `CALL_BUCKETS_S`, each; the last: how many there were."""
    errors: dict[str, int]
    """Failures by NVML return code (a decimal string)."""


CALL_BUCKETS_S = (0.0001, 0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0)


class SourceState(Message):
    """What the sampler last saw of one device."""

    source: str
    energy_uj: int
    """Energy from an arbitrary start, as `windows` counts it."""
    power_mw: int
    t_ns: int
    """CLOCK_MONOTONIC time of its newest tick."""
    tick_ns: int
    """How often its sensors change."""


class UserLoad(Message):
    """What the server refused to one user, or made it wait for. Counts begin with the daemon."""

    uid: int
    """The user; a subordinate uid counts as its owner."""
    connections: int
    """Open at present."""
    limited_ns: int
    """For how long its requests have waited because they come too fast."""
    limited: bool
    """Whether they wait at present."""
    refused: int
    """Connections that were closed as they came: too many, or too many a second."""
    faults: int
    """Connections that were closed because they broke ZeroMQ's protocol."""


class LedgerTotal(Message):
    """Energy of one account since the ledger began, microjoules; see `UsageSum`."""

    kind: str
    name: str
    uid: int
    active_uj: int
    idle_uj: int
    lower_uj: int
    upper_uj: int


class LedgerState(Message):
    """The energy ledger, as last settled: at most a minute ago."""

    totals: list[LedgerTotal]
    """Users, namespaces, services, idle and unattributed; the sum of the others for a reader who
    may not see them."""
    counted_uj: dict[str, int]
    """What each GPU's counter has added since the ledger began, which the totals add up to."""
    held: list[str]
    """GPUs that a job or pod holds."""
    trouble: str
    """Why the ledger cannot be used, as one sentence; empty: it can."""
    damaged: list[str]
    """Files that were damaged and set aside."""
    dropped: int
    """Requests that were refused because too many waited."""


class Metrics(Message):
    """Result of `metrics`. Counts begin with the daemon."""

    t_ns: int
    """CLOCK_MONOTONIC time of this answer."""
    started_ns: int
    """The same of the daemon's start."""
    changes: list[Count]
    """Sets that were written or failed: `control`, `result` (ok, failed)."""
    restores: list[Count]
    """Leases that ended: `reason`, `result`."""
    restore_failures: list[Count]
    """Attempts to put a control back that failed: `control`."""
    outside_changes: list[Count]
    """Values that someone else set: `control`, `result` (adopted, kept, overridden, noticed)."""
    refusals: list[Count]
    """Sets and acquires that were refused: `code`, see `errors.ErrorCode`."""
    lease_expiries: int
    """Leases whose holder fell silent."""
    pending: list[list[str]]
    """[gpu, control] of what could not be restored yet."""
    connections: int
    """Clients that are connected."""
    calls: list[CallTimes]
    """By operation."""
    sources: list[SourceState]
    """By device."""
    users: list[UserLoad] = []
    """Users who were refused something, or made to wait."""
    ledger: LedgerState | None = None
    """The energy ledger; None: there is none."""


def prepare() -> None:
    """Builds every message's validator now, and not on whichever thread makes the first one."""
    for one in [*globals().values()]:
        if isinstance(one, type) and issubclass(one, Message):
            one.model_rebuild()

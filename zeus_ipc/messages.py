"""The protocol between a client and zeusd: every message, every field, its unit and its meaning.

One message is one msgpack map. A client sends a `Request`; the daemon answers with one reply that
carries the same `id`: `{"v": 1, "id": 7, "result": {...}}` or `{"v": 1, "id": 7, "error": {...}}`
(see `ErrorBody`). A set with `block=False` gets no reply; what failed of it is counted and told in
the field `deferred` of the next reply on that connection (see `Deferred`).

Units: milliwatts, millijoules, megahertz, degrees Celsius, and nanoseconds of CLOCK_MONOTONIC,
which client and daemon share because they run on one node. A GPU is named by its NVML UUID.
Fields that a reader does not know are ignored. Who is asking is never in a message: the daemon asks
the kernel.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

from zeus_ipc import controls
from zeus_ipc.controls import Control as Control

PROTOCOL_VERSION = 1
"""The version this code speaks. A daemon answers an unknown one by naming those it speaks."""

MAX_REQUEST_BYTES = 16 * 1024
"""Largest request. libzmq drops a connection that sends a longer frame."""

Uuid = Annotated[str, Field(min_length=1, max_length=96)]
"""NVML UUID of a whole GPU, such as `GPU-1f2e...`."""

Gpus = Annotated[list[Uuid], Field(min_length=1, max_length=64)]
"""GPUs that the request is for. Each gets a result of its own."""

MegaHertz = Annotated[int, Field(ge=0, le=controls.MAX_MHZ)]
MilliWatts = Annotated[int, Field(ge=1, le=controls.MAX_MW)]


ControlName = Annotated[Control, Field(strict=False)]
"""A control by its name: strict validation alone would ask for the enum member."""


class _Message(BaseModel):
    # Built when first used: a client that asks for little does not pay for all.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, defer_build=True)


# --------------------------------------------------------------------------------------------
# Requests


class _Request(_Message):
    """What every request carries."""

    v: int = PROTOCOL_VERSION
    """Protocol version."""
    id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    """Chosen by the client; the reply repeats it."""
    deadline_ns: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """CLOCK_MONOTONIC time after which the request must not be applied any more; 0 for none."""
    client: Annotated[str, Field(max_length=32)] = ""
    """Names one client object within its process, so that `goodbye` gives back only its leases.
    It is no identity: leases belong to the process."""


class Hello(_Request):
    """Asks what the daemon is and which GPUs the node has. Result: `NodeInfo`."""

    op: Literal["hello"] = "hello"
    client_version: Annotated[str, Field(max_length=64)] = ""
    """Of what asks; nothing depends on it."""


class GetState(_Request):
    """Reads the present state of GPUs. Result: `{"gpus": {uuid: GpuState | {"error": ...}}}`."""

    op: Literal["state"] = "state"
    gpus: Gpus


class GetEnergy(_Request):
    """Reads the energy counters. Result: `{"gpus": {uuid: EnergyReading | {"error": ...}}}`."""

    op: Literal["energy"] = "energy"
    gpus: Gpus


class GetPower(_Request):
    """Reads the power sensors. Result: `{"gpus": {uuid: PowerReading | {"error": ...}}}`."""

    op: Literal["power"] = "power"
    gpus: Gpus


class GetClocks(_Request):
    """Reads the clocks a GPU can be locked to. Result: `{"gpus": {uuid: SupportedClocks}}`."""

    op: Literal["clocks"] = "clocks"
    gpus: Gpus


class GetProcesses(_Request):
    """Reads which processes use GPUs. Result: `{"gpus": {uuid: GpuProcesses | {"error": ...}}}`.

    A driver is asked once a second at most, however many ask.
    """

    op: Literal["processes"] = "processes"
    gpus: Gpus


Source = Annotated[str, Field(min_length=1, max_length=96)]
"""What draws power: a GPU's UUID, `cpu:0` (a CPU package) or `dram:0` (its memory)."""

Sources = Annotated[list[Source], Field(min_length=1, max_length=64)]
"""Devices that the request is for. Each gets a result of its own."""

NO_END_NS = 2**62
Nanoseconds = Annotated[int, Field(ge=0, le=NO_END_NS)]

MAX_WINDOWS = 256
"""Windows in one request."""

MAX_SAMPLES = 4096
"""Readings in one reply to `timeline`."""

MAX_JOB_NAME = 64
"""Characters of a job's name: the uid of a pod has 36."""

MAX_RECORDS = 200
"""Audit records in one reply: about 100 KB."""

MAX_LOOKUPS = 4096
"""Windows times sources in one request."""


class Domain(str, Enum):
    """What a timeline is of."""

    POWER = "power"
    """POWER_INSTANT, mW."""
    AVERAGE_POWER = "average_power"
    """POWER_AVERAGE: mean of the last second, mW."""
    MEMORY_POWER = "memory_power"
    """Of the GPU's memory, mean of the last second, mW."""
    TEMPERATURE = "temperature"
    """Degrees Celsius."""
    GPU_CLOCK = "gpu_clock"
    """MHz."""
    MEMORY_CLOCK = "memory_clock"
    """MHz."""
    THROTTLE_REASONS = "throttle_reasons"
    """Bits of nvmlClocksEventReasons."""
    POWER_LIMIT = "power_limit"
    """The limit in force, mW."""


class GetWindows(_Request):
    """Energy between pairs of instants. Result: `{"sources": {name: WindowEnergies | error}}`.

    The reply comes when the tick after the last window's end has been seen: at most one tick later.
    """

    op: Literal["windows"] = "windows"
    sources: Sources
    windows: Annotated[list[Nanoseconds], Field(max_length=3 * MAX_WINDOWS)] = []
    """Three numbers for each window: beginning and end (CLOCK_MONOTONIC), and 1 if the GPU had
    nothing to do just before and after except what is measured, as after waiting for it, else 0.
    None at all: asks only whether there is anything to look up."""

    @field_validator("windows")
    @classmethod
    def _whole(cls, windows: list[int]) -> list[int]:
        if len(windows) % 3:
            raise ValueError("windows needs three numbers for each window")
        if any(windows[n] > windows[n + 1] for n in range(0, len(windows), 3)):
            raise ValueError("a window ends before it begins")
        return windows

    @model_validator(mode="after")
    def _bounded(self) -> GetWindows:
        if len(self.windows) // 3 * len(self.sources) > MAX_LOOKUPS:
            raise ValueError(f"more than {MAX_LOOKUPS} windows times sources; ask in parts")
        return self


class GetTimeline(_Request):
    """What a device's sensors have shown. Result: `{"sources": {name: Timeline | error}}`.

    Power is kept at every tick for minutes, and each second for hours; everything else each
    second; all of it every half minute for days.
    """

    op: Literal["timeline"] = "timeline"
    sources: Annotated[list[Source], Field(min_length=1, max_length=1)]
    """Exactly one."""
    domain: Annotated[Domain, Field(strict=False)] = Domain.POWER
    """Which of its readings."""
    start_ns: Nanoseconds = 0
    """Only from this time on."""
    end_ns: Nanoseconds = NO_END_NS
    """Only until this time."""
    limit: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = MAX_SAMPLES
    """At most so many, the oldest first."""


class _SetRequest(_Request):
    """Changes one control of each GPU, taking its lease first if nobody holds it.

    Result: `{"gpus": {uuid: Applied | {"error": ...}}}`.

    After a process has lost a lease (see `Heartbeat`), every set of that control answers
    `lease_expired` until the process acquires or releases it: nothing is re-applied silently.
    """

    gpus: Gpus
    block: bool = True
    """Whether the reply waits for the change. Without, no reply is sent; of several queued for one
    control only the newest is applied."""


class SetControl(_SetRequest):
    """Sets any control, by its name; the requests below are the same for one control each."""

    op: Literal["set"] = "set"
    control: ControlName
    """Which."""
    value: Annotated[list[Annotated[int, Field(ge=0, le=2**62)]], Field(max_length=2)]
    """As in the journal, see `Back.value`."""


class SetPowerLimit(_SetRequest):
    """Sets the power limit."""

    op: Literal["set_power_limit"] = "set_power_limit"
    power_limit_mw: MilliWatts
    """Within the GPU's range, and at most the site's maximum."""


class SetGpuClocks(_SetRequest):
    """Locks the graphics (SM) clock to a range."""

    op: Literal["set_gpu_clocks"] = "set_gpu_clocks"
    min_mhz: MegaHertz
    """The lowest it may run at."""
    max_mhz: MegaHertz
    """The highest."""


class SetMemoryClocks(_SetRequest):
    """Locks the memory clock to a range."""

    op: Literal["set_memory_clocks"] = "set_memory_clocks"
    min_mhz: MegaHertz
    """The lowest it may run at."""
    max_mhz: MegaHertz
    """The highest."""


class SetPersistenceMode(_SetRequest):
    """Turns persistence mode on or off."""

    op: Literal["set_persistence_mode"] = "set_persistence_mode"
    enabled: bool
    """Whether it is to be on."""


class Reset(_SetRequest):
    """Puts one control back to its restore target; the lease stays. Result as for a set."""

    op: Literal["reset"] = "reset"
    control: ControlName
    """Which."""


class Acquire(_Request):
    """Takes leases without changing anything.

    The holder is the process that the kernel says is at the other end of the connection.
    Result: `{"gpus": {uuid: {"back": {control: Back}} | {"error": ...}}}`.
    """

    op: Literal["acquire"] = "acquire"
    gpus: Gpus
    controls: Annotated[list[ControlName], Field(min_length=1, max_length=8)]
    """Of each GPU. All of one GPU's are taken, or none."""
    ttl_ms: Annotated[int, Field(ge=0, le=86_400_000)] = 0
    """How long the lease lasts without a heartbeat, within the site's bounds; 0: the site's
    default."""


class Whose(str, Enum):
    """Whose leases a `release` is about."""

    PROCESS = "process"
    """The asking process's own."""
    USER = "user"
    """Those of the asking user's processes."""
    ALL = "all"
    """Anybody's: for administrators."""


class Release(_Request):
    """Puts controls back to their restore target and gives their leases back.

    Result: `{"released": count}`, sent when the targets are written or their writing has failed
    (a failed one is retried by the daemon). Releasing what is not held is no error.
    """

    op: Literal["release"] = "release"
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Empty: all GPUs."""
    controls: Annotated[list[ControlName], Field(max_length=8)] = []
    """Empty: all controls."""
    whose: Annotated[Whose, Field(strict=False)] = Whose.PROCESS
    """Holders who lose a lease that way are told at their next set."""
    pids: Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(max_length=64)] = []
    """Only of these processes, as zeusd's pid namespace counts; empty: of all."""
    job: Annotated[str, Field(max_length=MAX_JOB_NAME)] = ""
    """Only of this job (see `LeaseInfo.job`); empty: of all."""


class Restore(_Request):
    """Puts controls back to the site's maximum, whoever holds or has set them: for administrators.

    Holders lose their leases and are told so at their next set; what `persist` made the target is
    one no longer, and what somebody set past zeusd is overwritten.
    Result: `{"gpus": {uuid: {"controls": {control: "ok" | why not}} | {"error": ...}}}`.
    """

    op: Literal["restore"] = "restore"
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Empty: all GPUs."""
    controls: Annotated[list[ControlName], Field(max_length=8)] = []
    """Empty: all controls."""


class Persist(_Request):
    """Makes what this process has set the restore target, until a `restore`: for administrators.

    A power limit is then also the most that others may set. The leases end.
    Result: `{"gpus": {uuid: {} | {"error": ...}}}`.
    """

    op: Literal["persist"] = "persist"
    gpus: Gpus
    controls: Annotated[list[ControlName], Field(min_length=1, max_length=8)]
    """Of each GPU."""


CeilingName = Annotated[str, Field(pattern=controls.CEILING_NAME)]
"""`fleet`: of a power budget over many nodes. `persisted`: until a `restore`. `job:ID`: of a job,
as `LeaseInfo.job` names it; it ends with the job's control group. `site` is in zeusd.toml."""


class SetCeiling(_Request):
    """Puts an upper bound on a control, or removes it: for administrators.

    The least of a GPU's ceilings and the site's limit is the most that anybody may set, and what a
    restore writes. Result: `{"gpus": {uuid: {"highest": [mW]} | {"error": ...}}}`, sent when the
    GPU holds no more than that.
    """

    op: Literal["set_ceiling"] = "set_ceiling"
    gpus: Gpus
    name: CeilingName
    """Which ceiling. Another one of the same name is replaced."""
    control: ControlName = Control.POWER_LIMIT
    """On which control; only a power limit takes ceilings."""
    value: (
        Annotated[list[Annotated[int, Field(ge=1, le=controls.MAX_MW)]], Field(max_length=1)] | None
    ) = None
    """The bound, [mW]; None removes the ceiling."""
    ttl_ms: Annotated[int, Field(ge=0, le=30 * 86_400_000)] = 0
    """After this time `fallback` takes its place, unless it is set again before; 0: never. It is
    counted while the machine sleeps, and over restarts of zeusd."""
    fallback: (
        Annotated[list[Annotated[int, Field(ge=1, le=controls.MAX_MW)]], Field(max_length=1)] | None
    ) = None
    """The bound from then on, at most `value`; None: then the ceiling ends."""


class Quiesce(_Request):
    """Puts everything back and lets go of the driver, for a reset: for administrators.

    Until `resume`, requests for GPUs answer `quiesced`. Result: `Quiesced`.
    """

    op: Literal["quiesce"] = "quiesce"


class Resume(_Request):
    """Takes the driver up again and reads every GPU anew: for administrators. Result: `NodeInfo`.

    Without a `quiesce` before, nothing happens.
    """

    op: Literal["resume"] = "resume"


class GetPolicy(_Request):
    """Asks what the asking user may do. Result: `Policy`."""

    op: Literal["policy"] = "policy"


class GetAudit(_Request):
    """Reads the newest records of the audit trail. Result: `AuditTrail`."""

    op: Literal["audit"] = "audit"
    after: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Only records with a higher number."""
    before: Annotated[int, Field(ge=1, le=2**62)] = 2**62
    """Only records with a lower number."""
    limit: Annotated[int, Field(ge=1, le=MAX_RECORDS)] = MAX_RECORDS
    """The newest so many of these."""


class GetMetrics(_Request):
    """Reads what zeusd counts. Result: `Metrics`."""

    op: Literal["metrics"] = "metrics"


AccountName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./+-]{0,319}$")]
"""A job's id, or `namespace/pod`."""

Uid = Annotated[int, Field(ge=-1, le=2**32 - 2)]
"""A user's number; -1: no user."""

NOBODY = -1
"""The uid of what belongs to no user."""

MAX_EDGES = 401
"""Ends of intervals in one request: a year of days."""

MAX_SUMS = 500
"""Sums in one reply to `usage`."""

BUCKET_S = 900
"""Seconds in which energy is summed up in zeusd's ledger; every time zone's days are multiples."""


class Allocate(_Request):
    """Charges what GPUs draw from now on to a job or pod: for administrators.

    A GPU is held whole by one, or in parts by several, who share by weight: an allocation of one
    form ends those of the other, and a whole one ends every other. It also ends with `deallocate`,
    and with the job's control group if it has had one. Asking twice is no error.
    Result: `{"gpus": {uuid: {} | {"error": ...}}}`, sent when it is in the ledger.
    """

    op: Literal["allocate"] = "allocate"
    gpus: Gpus
    kind: Literal["job", "pod"] = "job"
    """What holds them."""
    name: AccountName
    """Slurm's job id, or `namespace/pod`."""
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{0,64}$")] = ""
    """Tells runs of one job apart: a restart count, or the SLUID."""
    uid: Uid = NOBODY
    """The user who is charged; without one, only the job or pod is."""
    weight: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """The part of each GPU beside other holders, such as the number of shards; 0: all of it."""
    control_group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    """What control groups call the job or pod, where that is not its name: a SLUID, a pod's uid."""


class Deallocate(_Request):
    """Ends allocations: for administrators.

    Result: `{"ended": count}`, sent when the energy until then is in the ledger. None is no error.
    """

    op: Literal["deallocate"] = "deallocate"
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Empty: all that it holds."""
    kind: Literal["job", "pod"] = "job"
    """What holds them."""
    name: AccountName
    """As in `allocate`."""
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{0,64}$")] | None = None
    """Only of this run; None: of every run."""


class GetUsage(_Request):
    """Asks who used how much energy. Result: `Usage`.

    Ordinary users see their own sums, those of idle and unattributed energy, and the others as one,
    unless the site lets everybody see everything.
    """

    op: Literal["usage"] = "usage"
    edges: Annotated[
        list[Annotated[int, Field(ge=0, le=2**40)]],
        Field(min_length=2, max_length=MAX_EDGES),
    ]
    """Ends of the intervals to sum over: UTC seconds, ascending, multiples of `BUCKET_S`."""
    by: Literal["user", "job", "pod", "namespace", "account", "gpu", "total"] = "user"
    """What to sum by. What is of another kind is summed by user or namespace; `account`: each job,
    pod, service and user has a sum of its own."""
    uid: Uid | None = None
    """Only of this user."""
    name: Annotated[str, Field(max_length=320)] = ""
    """Only of the job or pod of this name; `by` must ask for its kind."""
    offset: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Leaves out so many sums: a reply has at most `MAX_SUMS`."""

    @field_validator("edges")
    @classmethod
    def _ascending(cls, edges: list[int]) -> list[int]:
        if any(edge % BUCKET_S for edge in edges):
            raise ValueError(f"edges must be multiples of {BUCKET_S} s")
        if any(first >= last for first, last in pairwise(edges)):
            raise ValueError("edges must ascend")
        return edges

    @model_validator(mode="after")
    def _of_its_kind(self) -> GetUsage:
        if self.name and self.by not in ("job", "pod"):
            raise ValueError("a name can be looked for by job or by pod only")
        return self


class ForgetUser(_Request):
    """Puts a random number in a user's place in the ledger: for administrators.

    Sums stay what they are. Result: `{"accounts": count}`.
    """

    op: Literal["forget_user"] = "forget_user"
    uid: Annotated[int, Field(ge=0, le=2**32 - 2)]
    """Who is forgotten."""


class ListLeases(_Request):
    """Lists the node's leases. Result: `{"leases": [LeaseInfo, ...]}`."""

    op: Literal["leases"] = "leases"


class Heartbeat(_Request):
    """Says that the application is alive: all leases of its process begin their TTL anew.

    It must come from the application, not from a library's thread that lives on while the
    application hangs. Result: `HeartbeatResult`.
    """

    op: Literal["heartbeat"] = "heartbeat"


class Goodbye(_Request):
    """Releases what this client object took, as the last thing it does. Result as for `Release`."""

    op: Literal["goodbye"] = "goodbye"


SetRequest = (
    SetControl | SetPowerLimit | SetGpuClocks | SetMemoryClocks | SetPersistenceMode | Reset
)
ReadRequest = GetState | GetEnergy | GetPower | GetClocks | GetProcesses
PastRequest = GetWindows | GetTimeline
AccountingRequest = Allocate | Deallocate | GetUsage | ForgetUser
Request = (
    Hello
    | ReadRequest
    | PastRequest
    | SetRequest
    | Acquire
    | Release
    | Restore
    | Persist
    | SetCeiling
    | AccountingRequest
    | Quiesce
    | Resume
    | GetPolicy
    | GetAudit
    | GetMetrics
    | ListLeases
    | Heartbeat
    | Goodbye
)

request_adapter: TypeAdapter[Request] = TypeAdapter(
    Annotated[Request, Field(discriminator="op")], config=ConfigDict(defer_build=True)
)
"""Validates a decoded map into the request class that its `op` names."""

OPERATIONS: tuple[str, ...] = (
    "hello",
    "state",
    "energy",
    "power",
    "clocks",
    "processes",
    "windows",
    "timeline",
    "set",
    "set_power_limit",
    "set_gpu_clocks",
    "set_memory_clocks",
    "set_persistence_mode",
    "reset",
    "acquire",
    "release",
    "restore",
    "persist",
    "set_ceiling",
    "allocate",
    "deallocate",
    "usage",
    "forget_user",
    "quiesce",
    "resume",
    "policy",
    "audit",
    "metrics",
    "leases",
    "heartbeat",
    "goodbye",
)


# --------------------------------------------------------------------------------------------
# Replies


class ErrorBody(_Message):
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


class Deferred(_Message):
    """What a reply carries under `deferred` when sets with `block=False` have failed since."""

    count: int
    """How many have failed since the last report."""
    last: ErrorBody
    """The newest."""


class GpuSupport(_Message):
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


class CeilingInfo(_Message):
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


class GpuInfo(_Message):
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
    """The most a client may set: the site's maximum. By default a restore goes back to it too."""
    mig_enabled: bool
    """Whether it is split; then its parts cannot be measured one by one."""
    supports: GpuSupport
    """What it is known to offer."""
    controls: list[str] = []
    """Names of the controls it is known to offer."""
    persisted: list[str] = []
    """Controls whose target an administrator persisted (see `Persist`)."""
    ceilings: list[CeilingInfo] = []
    """Bounds besides the site's, all of which count in `power_limit_site_mw`."""


class CpuInfo(_Message):
    """A CPU package whose energy is measured."""

    index: int
    name: str
    """As powercap names it: `package-0`."""
    dram: bool
    """Whether its memory's energy is measured too (`dram:INDEX`)."""


class NodeInfo(_Message):
    """Result of `hello`."""

    protocol: int
    """The version in use on this connection."""
    protocols: list[int]
    """All versions the daemon speaks."""
    daemon_version: str
    driver_version: str | None
    """None while no driver is loaded; the daemon goes on trying."""
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
    """Since when the driver is let go of (see `Quiesce`); None: it is not."""


class GpuState(_Message):
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
    controls: dict[str, list[int] | None] = {}
    """What each control holds, as in the journal (see `Back.value`): as read, or as zeusd last set
    it where it cannot be read. None: it could not be read now."""


class ProcessInfo(_Message):
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


class GpuProcesses(_Message):
    """Result of `processes` for one GPU."""

    t_ns: int
    """CLOCK_MONOTONIC time at which they were listed: up to a second ago."""
    processes: list[ProcessInfo]


class Applied(_Message):
    """Result of a set for one GPU."""

    applied: list[int] | None = None
    """What the GPU holds now, as read back: a driver may have rounded what was asked, or moved it
    into its range. What was asked, where it cannot be read. As in the journal, see `Back.value`."""


class EnergyReading(_Message):
    """Result of `energy` for one GPU."""

    t_ns: int
    """When the counter was read."""
    energy_mj: int
    """Cumulative energy since the driver was loaded. It moves in ticks of 20 to 100 ms."""


class PowerReading(_Message):
    """Result of `power` for one GPU. None: not offered by this GPU."""

    t_ns: int
    """When the sensors were read."""
    instant_mw: int | None
    """At this moment."""
    average_mw: int | None
    """Mean of the last second."""
    memory_average_mw: int | None
    """The same of the GPU's memory."""


class WindowEnergies(_Message):
    """Result of `windows` for one source."""

    energy_uj: list[int | None]
    """Microjoules of each window, in the order asked for; None: it began before what is kept."""
    uncertainty_uj: list[int]
    """How far off each may be (two standard deviations), gain errors of the sensor aside."""
    begins_ns: int
    """What is kept begins here."""
    tick_ns: int
    """How often the source's sensors change."""


class Timeline(_Message):
    """Result of `timeline` for one source."""

    t_ns: list[int]
    """CLOCK_MONOTONIC times, ascending."""
    values: list[int]
    """The reading at each, in the unit of its domain (see `Domain`)."""
    more: bool
    """There are more; ask again from the last time on."""


class Sample(_Message):
    """What is published at each tick of a GPU, on the topic that is its UUID.

    None: the GPU does not offer the reading. Clocks, temperature, throttle reasons and limit are up
    to 0.2 s old.
    """

    gpu: str
    """UUID."""
    t_ns: int
    """CLOCK_MONOTONIC time of the tick."""
    number: int
    """Counts the GPU's ticks: whoever misses one has lost a sample."""
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
    lost: int = 0
    """Samples of this GPU before this one that did not reach this reader; set by the client."""


class SupportedClocks(_Message):
    """Result of `clocks` for one GPU."""

    memory_mhz: list[int]
    """Descending."""
    gpu_mhz: dict[str, list[int]]
    """Graphics clocks, descending, by memory clock (a decimal string)."""


class Back(_Message):
    """What a control goes back to."""

    value: list[int]
    """As in the journal: [mW], [min MHz, max MHz], [] for unlocked clocks, [0 or 1]."""
    source: str
    """configured: by the site. observed: in force when zeusd first saw it. persisted, fleet,
    job:ID: the ceiling of this name, which is lower. unreadable: the device cannot tell what clocks
    were locked to before, so they are unlocked."""


class HeartbeatResult(_Message):
    """Result of `heartbeat`."""

    leases: int
    """How many leases the process holds."""
    ttl_ms: int
    """The shortest TTL among them; without any, the site's default."""
    lost: list[list[str]]
    """[gpu, control] of leases that the process lost and has neither acquired anew nor released."""


class LeaseInfo(_Message):
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
    """The holder is gone, and the control is not back yet."""
    back: Back
    """What the control goes back to."""
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


class LeaseList(_Message):
    """Result of `leases`."""

    leases: list[LeaseInfo]


class UsageSum(_Message):
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


class Usage(_Message):
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


class Quiesced(_Message):
    """Result of `quiesce`."""

    since_ns: int
    """CLOCK_MONOTONIC time."""
    open: list[str]
    """Device files of the driver that zeusd could not close, if any."""
    owed: list[list[str]]
    """[gpu, control] of what could not be put back before; it is tried again after `resume`."""


class Permission(_Message):
    """What a user may do with one control of one GPU."""

    allowed: bool
    """Whether the user may change it at all."""
    why: str
    """Why not, as one sentence; empty if allowed."""
    ranges: list[list[int]]
    """[smallest, largest] in mW or MHz, any of which a value must lie in; empty: no bound."""


class Policy(_Message):
    """Result of `policy`."""

    uid: int
    """The asking user."""
    admin: bool
    """Whether everything is allowed: other users' leases, `restore`, `persist` and `quiesce`."""
    on_host: bool
    """Whether the asking process is in zeusd's own pid namespace, and in no container."""
    gpus: dict[str, dict[str, Permission]]
    """By UUID and control."""


class AuditRecord(_Message):
    """One record of the audit trail: what happened, to what, by whom."""

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
    """Whether somebody should look at it."""
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


class AuditTrail(_Message):
    """Result of `audit`."""

    records: list[AuditRecord]
    """The oldest first."""
    dropped: int
    """How many records there were before those that are kept."""


class Count(_Message):
    """How often something happened, by the values of its labels."""

    labels: dict[str, str]
    count: int


class CallTimes(_Message):
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


class SourceState(_Message):
    """What the sampler last saw of one device."""

    source: str
    energy_uj: int
    """Energy from an arbitrary start, as `windows` counts it."""
    power_mw: int
    t_ns: int
    """CLOCK_MONOTONIC time of its newest tick."""
    tick_ns: int
    """How often its sensors change."""


class UserLoad(_Message):
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


class LedgerTotal(_Message):
    """Energy of one account since the ledger began, microjoules; see `UsageSum`."""

    kind: str
    name: str
    uid: int
    active_uj: int
    idle_uj: int
    lower_uj: int
    upper_uj: int


class LedgerState(_Message):
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


class Metrics(_Message):
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
    """Values that somebody else set: `control`, `result` (adopted, kept, overridden, noticed)."""
    refusals: list[Count]
    """Sets and acquires that were refused: `code`, see `errors.ErrorCode`."""
    lease_expiries: int
    """Leases whose holder fell silent."""
    pending: list[list[str]]
    """[gpu, control] of what could not be put back yet."""
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

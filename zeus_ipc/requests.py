"""What a client may ask zeusd for: every request, every field, its unit and its meaning.

How they travel: `wire`. What is answered: `replies`. Which reply answers which request, and what
each costs: `operations`.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

from zeus_ipc import controls
from zeus_ipc.controls import Control
from zeus_ipc.wire import (
    PROTOCOL_VERSION,
    ControlName,
    Gpus,
    MegaHertz,
    Message,
    MilliWatts,
    Uuid,
)


class _Request(Message):
    """What every request carries."""

    v: int = PROTOCOL_VERSION
    """Protocol version."""
    id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    """Chosen by the client; the reply repeats it."""
    deadline_ns: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """CLOCK_MONOTONIC time after which the request must not be applied any more; 0 for none."""
    client: Annotated[str, Field(max_length=32)] = ""
    """Names one client object within its process, so that `goodbye` releases only its leases.
    It is no identity: leases belong to the process."""


class Hello(_Request):
    """Asks what the daemon is and which GPUs the node has."""

    op: Literal["hello"] = "hello"
    client_version: Annotated[str, Field(max_length=64)] = ""
    """Of what asks; nothing depends on it."""


class GetState(_Request):
    """Reads the present state of GPUs."""

    op: Literal["state"] = "state"
    gpus: Gpus


class GetEnergy(_Request):
    """Reads the energy counters."""

    op: Literal["energy"] = "energy"
    gpus: Gpus


class GetPower(_Request):
    """Reads the power sensors."""

    op: Literal["power"] = "power"
    gpus: Gpus


class GetClocks(_Request):
    """Reads which clocks GPUs offer."""

    op: Literal["clocks"] = "clocks"
    gpus: Gpus


class GetProcesses(_Request):
    """Reads which processes use GPUs.

    A driver is asked once a second at most, however many ask.
    """

    op: Literal["processes"] = "processes"
    gpus: Gpus


Source = Annotated[str, Field(min_length=1, max_length=96)]
"""What draws power: a GPU's UUID, `cpu:0` (a CPU package), `dram:0` (its memory) or `module:0` (a
superchip with all that is on it, which is no summand beside them)."""

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

MAX_PROFILE = 64
"""Power limits of a published profile."""

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
    """Energy between pairs of instants.

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
    """What a device's sensors have shown.

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

    After a process has lost a lease (see `Heartbeat`), every set of that control answers
    `lease_expired` until the process acquires or releases it: nothing is re-applied silently.
    """

    gpus: Gpus
    block: bool = True
    """Whether the reply waits for the change. Without, no reply is sent; of several queued for one
    control only the newest is applied."""
    together: bool = False
    """Whether to take the lease although a control is leased on the GPU that changes the same: a
    power profile beside a power limit or locked clocks. Which of the two counts is undocumented."""


class SetControl(_SetRequest):
    """Sets any control, by its name; the requests below are the same for one control each."""

    op: Literal["set"] = "set"
    control: ControlName
    """Which."""
    value: Annotated[
        list[Annotated[int, Field(ge=0, le=2**62)]], Field(max_length=controls.MOST_MEMBERS)
    ]
    """As in the journal, see `Back.value`."""


class SetPowerLimit(_SetRequest):
    """Sets the power limit."""

    op: Literal["set_power_limit"] = "set_power_limit"
    power_limit_mw: MilliWatts
    """Within the GPU's range, and at most the site limit."""


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
    """Puts one control back to its restore target; the lease stays."""

    op: Literal["reset"] = "reset"
    control: ControlName
    """Which."""


class Acquire(_Request):
    """Takes leases without changing anything.

    The holder is the process that the kernel says is at the other end of the connection.
    """

    op: Literal["acquire"] = "acquire"
    gpus: Gpus
    controls: Annotated[list[ControlName], Field(min_length=1, max_length=8)]
    """Of each GPU. All of one GPU's are taken, or none."""
    ttl_ms: Annotated[int, Field(ge=0, le=86_400_000)] = 0
    """How long the lease lasts without a heartbeat, within the site's bounds; 0: the site's
    default."""
    together: bool = False
    """As for a set."""


class Whose(str, Enum):
    """Whose leases a `release` is about."""

    PROCESS = "process"
    """The asking process's own."""
    USER = "user"
    """Those of the asking user's processes."""
    ALL = "all"
    """Anybody's: for administrators."""


class Release(_Request):
    """Restores controls to their restore target and releases their leases.

    The reply comes when the targets are written or their writing has failed (a failed one is
    retried by the daemon). Releasing what is not held is no error.
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
    """Restores controls to the site limit, also if others hold or set them: administrators.

    Holders lose their leases and are told so at their next set; what `persist` made the target is
    one no longer, and what someone set outside zeusd is overwritten.
    """

    op: Literal["restore"] = "restore"
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Empty: all GPUs."""
    controls: Annotated[list[ControlName], Field(max_length=8)] = []
    """Empty: all controls."""


class Persist(_Request):
    """Makes what this process has set the restore target, until a `restore`: for administrators.

    A power limit is then also the most that others may set. The leases end.
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
    restore writes. The reply comes when the GPU holds no more than that.
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
    until_boot_ns: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """The same as an instant of CLOCK_BOOTTIME, so that a request that is held up raises nothing
    for longer; 0: none. With `ttl_ms` too, the earlier counts. Refused with `deadline_exceeded`
    once it has passed."""
    fallback: (
        Annotated[list[Annotated[int, Field(ge=1, le=controls.MAX_MW)]], Field(max_length=1)] | None
    ) = None
    """The bound from then on, at most `value`; None: then the ceiling ends."""


class PublishProfile(_Request):
    """Says what power limits are worth to the holder of the power limit's lease, and what it needs.

    It ends with the lease, and is shown with it (`LeaseInfo.profile`); a power budget may go by it.
    """

    op: Literal["publish_profile"] = "publish_profile"
    gpus: Gpus
    limits_mw: Annotated[list[MilliWatts], Field(max_length=MAX_PROFILE)] = []
    """Power limits, ascending; none: nothing is known."""
    progress: Annotated[
        list[Annotated[float, Field(gt=0, le=1)]], Field(max_length=MAX_PROFILE)
    ] = []
    """Relative speed at each limit: 1 is the highest limit's."""
    measuring: bool = False
    """Whether the holder measures now, and needs its highest limit for that."""
    needs_mw: MilliWatts | None = None
    """The limit below which it misses a latency objective; None: it has none."""

    @model_validator(mode="after")
    def _matching(self) -> PublishProfile:
        if len(self.limits_mw) != len(self.progress):
            raise ValueError("a profile needs one progress for each limit")
        if any(low >= high for low, high in pairwise(self.limits_mw)):
            raise ValueError("a profile's limits must ascend")
        return self


class Quiesce(_Request):
    """Restores everything and closes the driver, for a reset: for administrators.

    Until `resume`, requests for GPUs answer `quiesced`.
    """

    op: Literal["quiesce"] = "quiesce"


class Resume(_Request):
    """Reopens the driver and reads every GPU again: for administrators.

    Without a `quiesce` before, nothing happens.
    """

    op: Literal["resume"] = "resume"


class GetPolicy(_Request):
    """Asks what the asking user may do."""

    op: Literal["policy"] = "policy"


class GetAudit(_Request):
    """Reads the newest records of the audit log."""

    op: Literal["audit"] = "audit"
    after: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Only records with a higher number."""
    before: Annotated[int, Field(ge=1, le=2**62)] = 2**62
    """Only records with a lower number."""
    limit: Annotated[int, Field(ge=1, le=MAX_RECORDS)] = MAX_RECORDS
    """The newest so many of these."""


class GetMetrics(_Request):
    """Reads what zeusd counts."""

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
    The reply comes when it is in the ledger.
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
    parts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Of how many parts `weight` are, such as the 7 slices of a GPU that is split (MIG); parts that
    nobody holds are charged to nobody. 0: holders share all of it."""
    control_group: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""
    """What control groups call the job or pod, where that is not its name: a SLUID, a pod's uid."""


class Deallocate(_Request):
    """Ends allocations: for administrators.

    The reply comes when the energy until then is in the ledger. None is no error.
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
    """Asks who used how much energy.

    Ordinary users see their own sums, those of idle and unattributed energy, and the others as one,
    unless the site lets everybody see everything.
    """

    op: Literal["usage"] = "usage"
    edges: Annotated[
        list[Annotated[int, Field(ge=0, le=2**40)]],
        Field(min_length=2, max_length=MAX_EDGES),
    ]
    """Ends of the intervals to sum over: UTC seconds, ascending, multiples of `BUCKET_S`."""
    by: Literal["user", "job", "pod", "namespace", "account", "process", "gpu", "total"] = "user"
    """What to sum by. What is of another kind is summed by user or namespace; `account`: each job,
    pod, service and user has a sum of its own. `process`: what is known by process; the rest is
    summed by user."""
    uid: Uid | None = None
    """Only of this user."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Energy of GPUs, or of CPU packages: never of both together."""
    name: Annotated[str, Field(max_length=320)] = ""
    """Only of the job or pod of this name, or of the run with this SLUID; `by` must ask for its
    kind."""
    by_method: bool = False
    """A sum for each method, whose bounds are of one kind."""
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

    Sums stay what they are.
    """

    op: Literal["forget_user"] = "forget_user"
    uid: Annotated[int, Field(ge=0, le=2**32 - 2)]
    """Who is forgotten."""


class ListLeases(_Request):
    """Lists the node's leases."""

    op: Literal["leases"] = "leases"


class Heartbeat(_Request):
    """Says that the application is alive: extends all leases of its process by their TTL.

    It must come from the application, not from a library's thread that lives on while the
    application hangs.
    """

    op: Literal["heartbeat"] = "heartbeat"


class Goodbye(_Request):
    """Releases what this client object took, as the last thing it does."""

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
    | PublishProfile
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

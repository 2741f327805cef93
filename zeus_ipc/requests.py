"""The requests of a client: every field with its unit and meaning. `wire` has the encoding,
`replies` the replies, `operations` the reply and the cost of each request.
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, field_validator, model_validator

from zeus_ipc import controls
from zeus_ipc.controls import Control
from zeus_ipc.wire import PROTOCOL_VERSION, ControlName, Gpus, Message, MilliWatts, Uuid, matching


class _Request(Message):
    """The fields of every request."""

    v: int = PROTOCOL_VERSION
    """Protocol version."""
    id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    """Chosen by the client; the reply repeats it."""
    deadline_ns: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """CLOCK_MONOTONIC time after which the request must not be applied any more; 0 for none."""
    client: Annotated[str, Field(max_length=32)] = ""
    """Identifies one client object within its process, so that `goodbye` releases only its leases.
    Leases still belong to the process."""


class Hello(_Request):
    """Asks for the daemon's version and the node's GPUs."""

    op: Literal["hello"] = "hello"
    client_version: Annotated[str, Field(max_length=64)] = ""
    """The client's version, for information."""


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

    The driver is asked at most once a second, for all clients together.
    """

    op: Literal["processes"] = "processes"
    gpus: Gpus


Source = Annotated[str, Field(min_length=1, max_length=96)]
"""A consumer of power: a GPU's UUID, `cpu:0` (a CPU package), `dram:0` (its memory) or `module:0`
(a whole superchip, which includes its CPU and GPUs)."""

Sources = Annotated[list[Source], Field(min_length=1, max_length=64)]
"""Devices that the request is for, each with a result of its own."""

NO_END_NS = 2**62
Nanoseconds = Annotated[int, Field(ge=0, le=NO_END_NS)]

MAX_WINDOWS = 256
"""Windows in one request."""

MAX_SAMPLES = 4096
"""Readings in one reply to `timeline`."""

MAX_JOB_NAME = 64
"""Characters of a job's name: the uid of a pod has 36."""

MAX_RECORDS = 50
"""Audit records in one reply, so that none keeps the loop for long; `Client.audit` asks on."""

MAX_PROFILE = 64
"""Power limits of a published profile."""

MAX_LOOKUPS = 4096
"""Windows times sources in one request."""


class Domain(str, Enum):
    """The reading of a timeline."""

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
    GAP = "gap"
    """Time without any reading, ms, before one that came late."""


PAUSE = 2
"""What marks a window as a pause, see `GetWindows.windows`."""


class GetWindows(_Request):
    """Energy between pairs of instants.

    The reply comes when the tick after the last window's end has been seen: at most one tick later.
    """

    op: Literal["windows"] = "windows"
    sources: Sources
    windows: Annotated[list[Nanoseconds], Field(max_length=3 * MAX_WINDOWS)] = []
    """Three numbers for each window: beginning and end (CLOCK_MONOTONIC), and 1 if the GPU had no
    other work just before and after, as after a synchronization, else 0. Or 2: a pause, in which
    the GPU had nothing to do, so that the others around it are no less certain for it; its energy
    is null. Empty: checks only whether windows can be computed."""
    limited: bool = False
    """Whether the time in which the clocks were limited is wanted too: the reply comes when the
    driver's counters were read after the last window's end, at most 0.3 s later."""

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
    """Reads a device's history. Power is kept for each update for minutes, and each second for
    hours; everything else each second; all of it every half minute for days.
    """

    op: Literal["timeline"] = "timeline"
    sources: Annotated[list[Source], Field(min_length=1, max_length=1)]
    """Exactly one."""
    domain: Annotated[Domain, Field(strict=False)] = Domain.POWER
    """The reading."""
    start_ns: Nanoseconds = 0
    """Start."""
    end_ns: Nanoseconds = NO_END_NS
    """End."""
    limit: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = MAX_SAMPLES
    """Maximum number of readings, the oldest first."""


class _SetRequest(_Request):
    """Changes one control of each GPU, acquiring its lease first if nobody holds it.

    After a process has lost a lease (see `Heartbeat`), every set of that control answers
    `lease_expired` until the process acquires or releases it: nothing is silently applied again.
    """

    gpus: Gpus
    block: bool = True
    """Whether the reply waits for the change. If false, no reply is sent, and of several queued
    sets of one control only the newest is applied."""
    together: bool = False
    """Whether to acquire the lease even if a conflicting control of the GPU is leased: a power
    profile beside a power limit or locked clocks. Which of the two applies is undocumented."""


class SetControl(_SetRequest):
    """Sets a control."""

    op: Literal["set"] = "set"
    control: ControlName
    """The control."""
    value: Annotated[
        list[Annotated[int, Field(ge=0, le=2**62)]], Field(max_length=controls.MOST_MEMBERS)
    ]
    """In the journal's form, see `Back.value`."""


class Reset(_SetRequest):
    """Restores one control; the lease stays."""

    op: Literal["reset"] = "reset"
    control: ControlName
    """The control."""


class Acquire(_Request):
    """Acquires leases without changing anything. The holder is the process at the other end of the
    connection, according to the kernel.
    """

    op: Literal["acquire"] = "acquire"
    gpus: Gpus
    controls: Annotated[list[ControlName], Field(min_length=1, max_length=8)]
    """The controls of each GPU. All of a GPU's leases are acquired, or none."""
    ttl_ms: Annotated[int, Field(ge=0, le=86_400_000)] = 0
    """The TTL, within the site's bounds; 0: the site's default."""
    together: bool = False
    """As for a set."""


class Whose(str, Enum):
    """The holders whose leases `release` ends."""

    PROCESS = "process"
    """The requesting process."""
    USER = "user"
    """All processes of the requesting user."""
    ALL = "all"
    """Anyone: for administrators."""


class Release(_Request):
    """Restores controls and releases their leases. The reply comes when the restores have succeeded
    or failed (the daemon retries failed ones). Releasing a lease that nobody holds is not an error.
    """

    op: Literal["release"] = "release"
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Empty: all GPUs."""
    controls: Annotated[list[ControlName], Field(max_length=8)] = []
    """Empty: all controls."""
    whose: Annotated[Whose, Field(strict=False)] = Whose.PROCESS
    """Holders who lose a lease get an error at their next set."""
    pids: Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(max_length=64)] = []
    """Only leases of these processes (pids of zeusd's namespace); empty: of all."""
    job: Annotated[str, Field(max_length=MAX_JOB_NAME)] = ""
    """Only leases of this job (see `LeaseInfo.job`); empty: of all."""


class Restore(_Request):
    """Restores controls to the site limit, even if others hold or set them: administrators. Holders
    lose their leases, and get an error at their next set. Persistent values are removed, and values
    set outside zeusd are overwritten.
    """

    op: Literal["restore"] = "restore"
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Empty: all GPUs."""
    controls: Annotated[list[ControlName], Field(max_length=8)] = []
    """Empty: all controls."""
    jobs: Annotated[list[Annotated[str, Field(max_length=MAX_JOB_NAME)]], Field(max_length=4)] = []
    """The names of a job that is about to start: what other jobs hold (`LeaseInfo.job`) is left to
    them. Empty: nothing is."""
    forget: bool = False
    """Instead, give up restoring these GPUs, which zeusd does not find."""


class Persist(_Request):
    """Makes the values that this process has set the restore targets, until a `restore`: for
    administrators. A power limit is then also the highest that others may set. The leases end.
    """

    op: Literal["persist"] = "persist"
    gpus: Gpus
    controls: Annotated[list[ControlName], Field(min_length=1, max_length=8)]
    """The controls of each GPU."""


CeilingName = Annotated[str, matching(controls.CEILING_NAME, "choose fleet, persisted or job:ID")]
"""`fleet`: for a power budget over many nodes. `persisted`: until a `restore`. `job:ID`: for a job,
as `LeaseInfo.job` names it; it ends with the job's control group. `site` is in zeusd.toml."""


class SetCeiling(_Request):
    """Sets or removes a ceiling: for administrators. The lowest of a GPU's ceilings and the site
    limit is the highest value that anyone may set, and the one that a restore writes. The reply
    comes when the GPU's limit is at most that.
    """

    op: Literal["set_ceiling"] = "set_ceiling"
    gpus: Gpus
    name: CeilingName
    """Name of the ceiling. It replaces one of the same name."""
    control: ControlName = Control.POWER_LIMIT
    """The control; only the power limit has ceilings."""
    value: Annotated[list[MilliWatts], Field(max_length=1)] | None = None
    """The bound, [mW]; None removes the ceiling."""
    ttl_ms: Annotated[int, Field(ge=0, le=30 * 86_400_000)] = 0
    """After this time `fallback` replaces it, unless it is set again before; 0: never. The time
    includes sleep and restarts of zeusd."""
    until_boot_ns: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """The same as an instant of CLOCK_BOOTTIME, so that a delayed request does not extend it; 0:
    none. If `ttl_ms` is given too, the earlier one applies. Refused with `deadline_exceeded` once
    it has passed."""
    fallback: Annotated[list[MilliWatts], Field(max_length=1)] | None = None
    """The bound from then on, at most `value`; None: the ceiling ends then."""
    control_group: Annotated[str, Field(max_length=255)] = ""
    """Of a job whose control group has another name than the ceiling: a SLUID."""


class PublishProfile(_Request):
    """Publishes what power limits are worth to the holder of the power limit's lease, and what it
    needs. It ends with the lease, and is shown with it (`LeaseInfo.profile`); a power budget may
    use it.
    """

    op: Literal["publish_profile"] = "publish_profile"
    gpus: Gpus
    limits_mw: Annotated[list[MilliWatts], Field(max_length=MAX_PROFILE)] = []
    """Power limits, ascending; empty: unknown."""
    progress: Annotated[
        list[Annotated[float, Field(gt=0, le=1)]], Field(max_length=MAX_PROFILE)
    ] = []
    """Relative speed at each limit; 1 at the highest."""
    measuring: bool = False
    """Whether the holder is measuring and needs its highest limit for that."""
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

    Does nothing unless the driver is closed.
    """

    op: Literal["resume"] = "resume"


class GetPolicy(_Request):
    """Reads the requesting user's permissions."""

    op: Literal["policy"] = "policy"


class GetAudit(_Request):
    """Reads the newest records of the audit log."""

    op: Literal["audit"] = "audit"
    after: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Only records with a higher number."""
    before: Annotated[int, Field(ge=1, le=2**62)] = 2**62
    """Only records with a lower number."""
    limit: Annotated[int, Field(ge=1, le=MAX_RECORDS)] = MAX_RECORDS
    """Maximum number of records; the newest ones."""


class GetMetrics(_Request):
    """Reads zeusd's metrics."""

    op: Literal["metrics"] = "metrics"


AccountName = Annotated[
    str,
    matching(
        r"[A-Za-z0-9][A-Za-z0-9_./+-]{0,319}",
        "a job or pod is named by up to 320 letters, digits and _ . / + -",
    ),
]
"""A job's id, or `namespace/pod`."""

Run = Annotated[
    str,
    matching(r"[A-Za-z0-9_.:-]{0,64}", "a run is named by up to 64 letters, digits and _ . : -"),
]
"""Distinguishes runs of one job."""

Uid = Annotated[int, Field(ge=-1, le=2**32 - 2)]
"""A user's number; -1: no user."""

NOBODY = -1
"""The uid for no user."""

MAX_EDGES = 401
"""Ends of intervals in one request: a year of days."""

MAX_SUMS = 500
"""Sums in one reply to `usage`."""

BUCKET_S = 900
"""Length of the ledger's intervals in seconds; the days of every time zone are multiples of it."""


class Allocate(_Request):
    """Charges the energy of GPUs to a job or pod from now on: for administrators. A GPU is held by
    one job as a whole, or by several in parts, by weight: an allocation of one form ends those of
    the other, and a whole one ends every other. It also ends with `deallocate`, and with the job's
    control group if it had one. Allocating twice is not an error. The reply comes when the
    allocation is in the ledger.
    """

    op: Literal["allocate"] = "allocate"
    gpus: Gpus
    kind: Literal["job", "pod"] = "job"
    """Kind of the holder."""
    name: AccountName
    """Slurm's job id, or `namespace/pod`: up to 320 letters, digits and `_./+-`."""
    run: Run = ""
    """A restart count or SLUID, to tell runs of one job apart: up to 64 letters, digits, `_.:-`."""
    uid: Uid = NOBODY
    """The user to charge; without one, only the job or pod is charged."""
    weight: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """The part of each GPU beside other holders, such as the number of shards; 0: all of it."""
    parts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Number of parts that `weight` counts, such as 7 slices (MIG); parts that nobody holds are
    charged to nobody. 0: holders share all of it."""
    control_group: Annotated[
        str, matching(r"[A-Za-z0-9_.-]{0,64}", "give the last part of the control group's path")
    ] = ""
    """Name of the job's or pod's control group, if it differs from `name`: a SLUID, a pod's uid, or
    other letters, digits and `_.-`, up to 64."""


class Deallocate(_Request):
    """Ends allocations: for administrators.

    The reply comes when the energy until then is in the ledger. It is not an error if there are
    none.
    """

    op: Literal["deallocate"] = "deallocate"
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Empty: all that it holds."""
    kind: Literal["job", "pod"] = "job"
    """Kind of the holder."""
    name: AccountName
    """As in `allocate`."""
    run: Run | None = None
    """Only of this run; None: of every run."""


class GetUsage(_Request):
    """Reads who used how much energy.

    Ordinary users see their own sums, those of idle and unattributed energy, and everyone else's as
    one sum, unless the site shows everything to everyone.
    """

    op: Literal["usage"] = "usage"
    edges: Annotated[
        list[Annotated[int, Field(ge=0, le=2**40)]],
        Field(min_length=2, max_length=MAX_EDGES),
    ]
    """Ends of the intervals to sum over: UTC seconds, ascending, multiples of `BUCKET_S`."""
    by: Literal["user", "job", "pod", "namespace", "account", "process", "gpu", "total"] = "user"
    """What to sum by. Accounts of other kinds are summed by user or namespace; `account`: each job,
    pod, service and user has a sum of its own. `process`: energy known by process; the rest is
    summed by user."""
    uid: Uid | None = None
    """Only of this user."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Energy of GPUs, or of CPU packages."""
    name: Annotated[str, Field(max_length=320)] = ""
    """Only of the job or pod of this name, or of the run with this SLUID; `by` must be its kind."""
    gpus: Annotated[list[Uuid], Field(max_length=64)] = []
    """Only of these GPUs; empty: of all."""
    by_method: bool = False
    """Whether to return a sum for each method; each has bounds of one basis."""
    offset: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Number of sums to skip: a reply has at most `MAX_SUMS`."""

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
    """Replaces a user by a random number in the ledger: for administrators. Sums do not change."""

    op: Literal["forget_user"] = "forget_user"
    uid: Annotated[int, Field(ge=0, le=2**32 - 2)]
    """The user to remove."""


class ListLeases(_Request):
    """Lists the node's leases."""

    op: Literal["leases"] = "leases"


class Heartbeat(_Request):
    """A sign that the application is alive: extends all leases of its process by their TTL. It must
    come from the application, not from a library's thread that still runs while the application
    hangs.
    """

    op: Literal["heartbeat"] = "heartbeat"
    losses: Annotated[int, Field(ge=0)] | None = None
    """Reply only once the process has another number of `lost` leases than this; None: at once. A
    connection's next request of this kind replaces one that waits."""


class Goodbye(_Request):
    """Releases the leases of this client object, as its last request."""

    op: Literal["goodbye"] = "goodbye"


SetRequest = SetControl | Reset
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
"""Validates a decoded map as the request that its `op` names."""

"""The JSON output of each verb. Once released, fields of a schema are added and never changed.

Units are in the names: watts, joules, megahertz, degrees Celsius, seconds. Times are ISO 8601 with
their zone. None: the GPU does not offer it, or the reader may not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid")


class Report(_Part):
    """The fields that begin every report."""

    NAME: ClassVar[str]

    schema_: str = Field(default="", alias="schema")
    """`zeusctl.NAME/1`."""
    at: datetime
    """When it was made."""

    @classmethod
    def published(cls) -> dict[str, Any]:
        """Its JSON schema, whose `$id` has the version."""
        return {
            "$id": f"zeusctl.{cls.NAME}/1",
            **cls.model_json_schema(mode="serialization"),
        }

    def model_post_init(self, context: object) -> None:
        """The schema is the class's own."""
        object.__setattr__(self, "schema_", f"zeusctl.{self.NAME}/1")


class Problem(_Part):
    """What keeps zeusd from working fully."""

    part: str
    """driver, journal or ledger."""
    code: str
    """Of the driver or the system; empty: there is none."""
    cause: str
    since_s: float
    """How long ago it began."""
    command: str
    """What to run next."""


class Node(_Part):
    """The daemon and its node."""

    socket: str
    daemon_version: str
    protocol: int
    driver_version: str | None
    uptime_s: float
    simulated: bool
    quiesced_s: float | None
    """How long the driver has been closed; None: it is not."""
    gpus: int
    leases: int
    pending_restores: int
    """Controls that could not be restored yet."""
    findings: list[str] = []
    """Rules of zeusd.toml that have no effect on this node, and why."""
    problems: list[Problem] = []
    unusable: list[str] = []
    """A sentence for each GPU that zeusd cannot use."""


class PowerLimit(_Part):
    """Power limits of a GPU, in watts."""

    requested: float | None
    """Requested by software."""
    enforced: float | None
    """In force."""
    site: float | None
    """The site limit: the restore target where no ceiling is lower."""
    highest: float | None
    """The highest value that may be set: the lowest of the site limit and all ceilings."""
    site_enforced: bool = False
    """Whether zeusd lowers any limit above the site limit at once, even one set outside zeusd."""
    smallest: float | None
    largest: float | None
    default: float | None


Value = float | bool | list[float] | list[str]
"""What a control holds, in its unit: a number, [lowest, highest] ([]: unlocked), a switch, or names
of the chosen profiles."""


class Lease(_Part):
    """Who holds a control."""

    gpu: int
    """Its index; -1: zeusd does not find the GPU."""
    uuid: str
    control: str
    value: Value | None
    """The GPU's value under it; None: nothing was set yet."""
    unit: str
    """Of `value`, `asked` and `restore_target`: W, MHz, or empty for a switch."""
    asked: Value | None = None
    """The value its holder requested; a driver may have rounded it or moved it into its range."""
    uid: int
    user: str
    pid: int | None
    command: str | None
    job: str | None
    held_s: float
    expires_in_s: float
    """When it expires if its holder sends no heartbeat until then."""
    restore_target: Value
    restore_target_source: str
    """configured, persisted, observed or unreadable, see the protocol's `Back`."""
    restoring: bool
    """The holder is gone, and the restore is pending."""
    trouble: str | None
    """Why it is pending."""
    pending_s: float | None = None
    """For how long; None: it is not."""


class Ceiling(_Part):
    """A named bound on a GPU's power limit, besides the site limit and a persistent limit."""

    gpu: int
    uuid: str
    name: str
    """fleet, or job:ID of a Slurm job or a pod."""
    control: str
    value: float
    """The highest value that anyone may set."""
    unit: str
    uid: int
    """Who set it."""
    user: str
    expires_in_s: float | None
    """When `then` takes its place; None: never."""
    then: float | None
    """The bound from then on; None: no bound."""


class Held(_Part):
    """The value of a control."""

    control: str
    value: Value | None
    """None: it could not be read."""
    unit: str


class Gpu(_Part):
    """One GPU as it is now."""

    index: int
    uuid: str
    pci_address: str
    name: str
    error: str | None
    """Why it could not be read; then the readings are None."""
    power_limit_w: PowerLimit
    power_w: float | None
    energy_j: float | None
    """Since the driver was loaded."""
    temperature_c: int | None
    gpu_clock_mhz: int | None
    memory_clock_mhz: int | None
    locked_gpu_clocks_mhz: tuple[int, int] | None
    """As zeusd locked them; None: unlocked, as far as zeusd knows."""
    locked_memory_clocks_mhz: tuple[int, int] | None
    persistence_mode: bool | None
    throttle_reasons: list[str] | None
    persisted: list[str]
    """Controls that an administrator set with --persist."""
    controls: list[Held] = []
    """The value of each control."""
    utilization_percent: int | None = None
    """Share of the last sample period in which a kernel ran."""
    memory_used_mib: int | None = None
    memory_total_mib: int | None = None
    enforced_power_profiles: list[str] | None = None
    """Workload power profiles in force; the requested ones are under `controls`."""
    memory_power_w: float | None = None
    """The memory's part of `power_w`."""
    module: int | None = None
    """The superchip that it is part of."""
    power_of: str | None = None
    """UUID of the GPU that has its power limit, power and energy, as the first die of a card."""
    energy_scope: str = "gpu"
    """What `energy_j` counts: gpu, module (the whole superchip), or unknown."""
    leases: int = 0
    """Number of leases on it."""
    processes: int | None = None
    """Number of processes that use it, if they were requested."""


class Module(_Part):
    """A superchip: a CPU, its memory, and GPUs."""

    module: int
    gpus: list[int]
    """Indices of its GPUs."""
    power_w: float | None
    """Of everything on it."""
    gpu_power_w: float | None
    """Its GPUs' part."""


class Process(_Part):
    """A process that uses a GPU. None: the reader may not see it, or the process is gone."""

    gpu: int
    uuid: str
    pid: int | None
    user: str | None
    command: str | None
    job: str | None
    type: str
    """C: compute; G: graphics only."""
    memory_mib: int | None
    """Memory of the GPU that it uses; None: the driver does not report it."""
    gpu_instance: int | None
    """MIG instance; None: the whole GPU."""
    leases: list[str]
    """Its leases on this GPU: `power_limit 200 W`."""


class StatusReport(Report):
    """`zeusctl status`."""

    NAME = "status"

    node: Node
    gpus: list[Gpu]
    leases: list[Lease]
    processes: list[Process] | None = None
    """With --processes only."""
    ceilings: list[Ceiling] = []
    modules: list[Module] = []
    """Superchips, each once."""


class ProcessesReport(Report):
    """`zeusctl processes`."""

    NAME = "processes"

    processes: list[Process]


class LeasesReport(Report):
    """`zeusctl leases`."""

    NAME = "leases"

    leases: list[Lease]
    ceilings: list[Ceiling] = []


class KnownGpu(_Part):
    """The constant properties of a GPU."""

    index: int
    uuid: str
    pci_address: str
    name: str
    architecture: int
    memory_mib: int
    mig_enabled: bool
    runtime_indices: list[int] = []
    """HIP's number of it, or of its partitions; empty: unknown, or not an AMD GPU."""
    controls: list[str]
    """Controls that it offers."""
    power_limit_w: PowerLimit
    power_profiles: list[str] = []
    """Workload power profiles that it offers."""


class GpusReport(Report):
    """`zeusctl gpus`."""

    NAME = "gpus"

    gpus: list[KnownGpu]


class Permitted(_Part):
    """The requesting user's permission for one control."""

    control: str
    allowed: bool
    why: str
    """Why not; empty if allowed."""
    ranges: list[tuple[float, float]]
    """In W or MHz; a value must lie in one of them; empty: no bound."""


class ShowReport(Report):
    """`zeusctl show`."""

    NAME = "show"

    known: KnownGpu
    now: Gpu
    leases: list[Lease]
    you_may: list[Permitted]
    memory_clocks_mhz: list[int]
    gpu_clocks_mhz: list[int]
    """At the highest memory clock."""
    energy_last_hour_j: float | None
    processes: list[Process] = []
    ceilings: list[Ceiling] = []


class Setting(_Part):
    """A value that was set on one GPU."""

    gpu: int
    uuid: str
    control: str
    value: Value
    """The GPU's value now; for a ceiling, the bound."""
    unit: str
    was: Value | None
    asked: Value | None = None
    """The requested value."""


class SetReport(Report):
    """`zeusctl set`, when the values are in force."""

    NAME = "set"

    settings: list[Setting]
    kept: str
    """command: while it runs. process: until Ctrl-C. persisted: until `zeusctl reset`. ceiling: as
    a bound for everyone (--ceiling)."""


class Outcome(_Part):
    """The outcome for one control."""

    gpu: int
    uuid: str
    control: str
    ok: bool
    trouble: str | None
    """Why it is not restored. Beside `ok`: `not_offered`, by the driver; `held`, by another job."""


class ResetReport(Report):
    """`zeusctl reset`."""

    NAME = "reset"

    outcomes: list[Outcome]
    revoked: list[Lease]
    """Leases that others lost as a result."""


class ReleaseReport(Report):
    """`zeusctl release`."""

    NAME = "release"

    released: int


class Measured(_Part):
    """Energy of one source."""

    source: str
    """`gpu:INDEX`, `cpu:INDEX`, `dram:INDEX` or `module:NUMBER`."""
    uuid: str | None
    energy_j: float | None
    """None: nothing could be measured, see `trouble`."""
    uncertainty_j: float | None
    """Two standard deviations."""
    average_power_w: float | None
    trouble: str | None


class MeasureReport(Report):
    """`zeusctl measure`."""

    NAME = "measure"

    command: list[str]
    exit_code: int
    time_s: float
    sources: list[Measured]
    gpu_energy_j: float | None
    """Of all GPUs together."""


class Done(Report):
    """`zeusctl record`, `plot` and `man`: the file written."""

    NAME = "done"

    path: str
    rows: int
    """Samples, points or pages."""


class QuiesceReport(Report):
    """`zeusctl quiesce`."""

    NAME = "quiesce"

    quiesced: bool
    """Whether all device files of the driver are closed."""
    open: list[str]
    pending_restores: list[str]
    """Controls that could not be restored before closing."""


class ResumeReport(Report):
    """`zeusctl resume`."""

    NAME = "resume"

    gpus: list[KnownGpu]


class UsedEnergy(_Part):
    """Energy of one account in one interval, see the protocol's `UsageSum`."""

    since: datetime
    until: datetime
    kind: str
    name: str
    run: str | None
    uid: int | None
    user: str | None
    gpu_hours: float
    energy_j: float
    lower_j: float
    upper_j: float
    active_j: float
    idle_j: float
    """While the driver reported the GPU as idle."""
    basis: list[str]
    """allocated, exclusive, weights, utilization, slices, equal, unread."""
    exact: bool
    bounds: str
    """The basis of lower_j and upper_j: exact, presence or activity; the least certain one if there
    are several."""
    reason: str
    """Why it is an estimate, or unattributed; empty otherwise."""
    begin: datetime | None
    """When a job or pod began to hold its first GPU, or a process started."""
    end: datetime | None
    """When it ceased to hold its last; None: it still holds some."""
    workload: str | None
    """Of a process: the job, pod, service or container that it belongs to."""


class EnergyReport(Report):
    """`zeusctl energy`."""

    NAME = "energy"

    by: str
    sums: list[UsedEnergy]
    metered_j: float | None
    """The GPUs' counters; None: the request excluded something."""
    begins: datetime | None
    """The first day in the ledger; None: it is empty."""


class AllocateReport(Report):
    """`zeusctl allocate`."""

    NAME = "allocate"

    kind: str
    name: str
    gpus: list[int]


class Allocation(_Part):
    """A GPU that a job or pod holds."""

    gpu: int
    """Its index; -1: zeusd does not find the GPU."""
    uuid: str
    kind: str | None
    """job or pod. None: the reader may not see whose it is, nor the following fields."""
    name: str | None
    run: str | None
    user: str | None
    weight: int | None
    """Its part beside other holders; None: all of the GPU."""
    parts: int | None
    """Number of parts of the GPU; None: those that are held."""
    held_s: float | None


class AllocationsReport(Report):
    """`zeusctl allocations`."""

    NAME = "allocations"

    allocations: list[Allocation]


class DeallocateReport(Report):
    """`zeusctl deallocate`."""

    NAME = "deallocate"

    kind: str
    name: str
    ended: int
    """How many GPUs it held."""
    energy: list[UsedEnergy]
    """Its energy, run by run."""


class ForgetReport(Report):
    """`zeusctl forget`."""

    NAME = "forget"

    accounts: int
    """Number of the user's accounts."""


class Check(_Part):
    """One check of `doctor`."""

    name: str
    state: str
    """ok, note (nothing is wrong, but worth knowing) or fault."""
    found: str
    remedy: str
    """What to do; empty if ok."""


class DoctorReport(Report):
    """`zeusctl doctor`."""

    NAME = "doctor"

    healthy: bool
    checks: list[Check]


class Event(_Part):
    """One record of the audit log."""

    number: int
    when: datetime
    until: datetime
    count: int
    event: str
    warning: bool
    gpu: int | None
    uuid: str | None
    control: str | None
    uid: int | None
    user: str | None
    pid: int | None
    """None if it is another user's and the reader is not an administrator; the same for `command`
    and `job`."""
    command: str | None
    job: str | None
    old: str | None
    new: str | None
    reason: str | None
    result: str | None


class AuditReport(Report):
    """`zeusctl audit`."""

    NAME = "audit"

    events: list[Event]
    dropped: int
    """Number of older records that only zeusd's log still has."""


class Failed(Report):
    """The output of a verb that fails with `--json`; the message is on standard error too."""

    NAME = "error"

    code: str
    """As in the protocol, or `usage` or `failed`."""
    message: str
    exit_code: int


REPORTS: dict[str, type[Report]] = {
    kind.NAME: kind
    for kind in (
        StatusReport,
        ProcessesReport,
        LeasesReport,
        GpusReport,
        ShowReport,
        SetReport,
        ResetReport,
        ReleaseReport,
        MeasureReport,
        Done,
        EnergyReport,
        AllocateReport,
        AllocationsReport,
        DeallocateReport,
        ForgetReport,
        QuiesceReport,
        ResumeReport,
        DoctorReport,
        AuditReport,
        Failed,
    )
}
"""Reports by the name in their schema."""


def schemas() -> dict[str, Callable[[], dict[str, Any]]]:
    """The class of each published JSON schema, including those of probe and exercise."""
    from zeusctl.exercise import report as exercise
    from zeusd.energy.probed import report as probe

    found = {name: kind.published for name, kind in REPORTS.items()}
    found["probe"] = partial(_of_dataclass, probe.ProbeReport, probe.SCHEMA)
    found["exercise"] = partial(_of_dataclass, exercise.ExerciseReport, exercise.SCHEMA)
    return found


def _of_dataclass(report: type, name: str) -> dict[str, Any]:
    """The schema of a report, with `$id` and the field `schema`."""
    schema = TypeAdapter(report).json_schema(mode="serialization")
    own = {"schema": {"const": name, "title": "Schema", "type": "string"}}
    return {"$id": name, **schema, "properties": own | schema["properties"]}

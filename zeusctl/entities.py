"""What zeusctl shows, each thing declared once, see `columns`. None: the GPU does not offer it, or
the reader may not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from zeus_common.text import duration, named, number, quantity_text, seconds_since, user_name
from zeus_ipc.controls import SPECS, Control, profile_name
from zeus_ipc.limited import BY_LEASE, REASONS, RECENT_S, cause_text
from zeusctl.columns import Columns, Entity, column, columns_of
from zeusctl.text import reasons, shorten, style

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo, GpuState, NodeInfo, UsageSum

Value = float | bool | list[float] | list[str]
"""What a control holds, in its unit: a number, [lowest, highest] ([]: unlocked), a switch, or names
of the chosen profiles."""


def quantity(control: str, value: Sequence[int] | None) -> Any:
    """Converts a control's value from the protocol's form to its unit."""
    if value is None:
        return None
    spec = SPECS[Control(control)]
    if spec.shape == "switch":
        return bool(value[0])
    if spec.shape == "set":
        return [spec.member(part) for part in value]
    numbers = [part / spec.scale for part in value]
    return numbers if spec.shape == "range" else numbers[0]


def _held(path: str) -> Callable[[Any], Any]:
    """A control's value or bound, from a reply."""
    return lambda one: quantity(one.control, attrgetter(path)(one))


def _set_to(name: str) -> Callable[[Any], str]:
    """The text of a control's value."""
    return lambda one: quantity_text(one.control, getattr(one, name))


def _unit(one: Any) -> str:
    return SPECS[Control(one.control)].unit


def _user(one: Any) -> str | None:
    if one.uid is None or one.uid == -1:
        return None
    return user_name(one.uid) if one.uid >= 0 else f"forgotten {-one.uid % 10_000:04}"


# -------------------------------------------------------------------------------------------- GPUs


class PowerLimits(Entity):
    """Power limits that a GPU accepts, in watts."""

    site: float | None = column(
        "SITE",
        spare=1,
        title="site limit",
        page=lambda gpu: site_text(gpu.power_limit_w),
        name="site_limit_w",
        source="power_limit_site_mw",
        metric="zeusd_gpu_power_limit_watts{kind=site} Power limits: requested by software, "
        "enforced by the board, site limit, and the lowest of it and all ceilings (highest).",
    )
    """The site limit: the restore target where no ceiling is lower."""
    highest: float | None = column(
        name="highest_power_limit_w",
        source="power_limit_highest_mw",
        metric="zeusd_gpu_power_limit_watts{kind=highest}",
    )
    """The highest value that may be set: the lowest of the site limit and all ceilings."""
    site_enforced: bool = column(source="power_limit_enforced")
    """Whether zeusd lowers any limit above the site limit at once, even one set outside zeusd."""
    smallest: float | None = column(
        title="limits it accepts",
        page=lambda gpu: accepted(gpu),
        name="min_power_limit_w",
        source="power_limit_min_mw",
    )
    largest: float | None = column(name="max_power_limit_w", source="power_limit_max_mw")
    default: float | None = column(
        title="vendor's default", name="default_power_limit_w", source="power_limit_default_mw"
    )


class PowerLimit(PowerLimits):
    """Power limits of a GPU, in watts."""

    requested: float | None = column(
        title="limit requested",
        name="power_limit_w",
        metric="zeusd_gpu_power_limit_watts{kind=requested}",
    )
    """Requested by software."""
    enforced: float | None = column(
        title="limit enforced",
        name="enforced_power_limit_w",
        metric="zeusd_gpu_power_limit_watts{kind=enforced}",
    )
    """In force."""

    @property
    def lowered(self) -> bool:
        """Whether what is requested, or in force, is below the site limit."""
        limits = [one for one in (self.requested, self.enforced) if one is not None]
        return self.site is not None and min(limits, default=self.site) < self.site

    @property
    def raised(self) -> bool:
        """Whether more than the site limit was requested, before zeusd started or outside it."""
        return None not in (self.requested, self.site) and (self.requested or 0) > (self.site or 0)


def is_cap_only(limit: PowerLimits) -> bool:
    """Whether a site limit is below the GPU's maximum and applies only to what zeusd sets."""
    lower = limit.site is not None and limit.largest is not None and limit.site < limit.largest
    return lower and not limit.site_enforced


def site_text(limit: PowerLimits) -> str:
    """The site limit, and whether others may exceed it."""
    if limit.site is None:
        return "-"
    state = ", enforced" if limit.site_enforced else ""
    if limit.highest is not None and limit.highest < limit.site:
        state = f"; ceilings allow at most {number(limit.highest, 'W')}"
    return number(limit.site, "W") + (", not enforced" if is_cap_only(limit) else state)


def span(low: float | None, high: float | None, unit: str) -> str:
    """A range with its unit."""
    if low is None or high is None:
        return "-"
    return number(high, unit) if low == high else f"{number(low)} to {number(high, unit)}"


def accepted(gpu: Gpu | KnownGpu) -> str:
    """The power limits that the GPU itself accepts."""
    limit = gpu.power_limit_w
    return span(limit.smallest, limit.largest, "W")


class ControlState(Entity):
    """The value of a control."""

    control: str
    value: Value | None
    """None: it could not be read."""
    unit: str

    def __str__(self) -> str:
        return f"{self.control} {quantity_text(self.control, self.value)}"


def _values(_: GpuInfo, state: GpuState | None) -> list[ControlState]:
    return [
        ControlState(control=name, value=quantity(name, value), unit=SPECS[Control(name)].unit)
        for name, value in (state.controls.items() if state is not None else ())
    ]


def product(gpu: Gpu | KnownGpu) -> str:
    """A GPU's name without its maker's."""
    return shorten(gpu.name.removeprefix("NVIDIA ").removeprefix("AMD Instinct "), 22)


def limit_text(gpu: Gpu) -> str:
    """A GPU's limit and what the board enforces; yellow if it is below the site limit."""
    limit = gpu.power_limit_w
    if limit.requested is None:
        return "-"
    text, enforced = number(limit.requested), limit.enforced
    if enforced is not None and enforced < limit.requested:
        text += f">{number(enforced)}"
    return style(text, fg="yellow") if limit.lowered else text


def _memory(gpu: Gpu) -> str:
    if gpu.memory_used_mib is None or gpu.memory_total_mib is None:
        return "-"
    used, total = gpu.memory_used_mib / 1024, gpu.memory_total_mib / 1024
    return f"{number(used)}/{number(total, 'GiB', 0)}"


def _locked(clocks: Sequence[int] | None) -> str:
    return "" if clocks is None else span(clocks[0], clocks[1], "MHz")


def _requested(gpu: Gpu) -> str:
    """The workload power profiles that are requested; empty: the GPU has none."""
    name = Control.POWER_PROFILE.value
    held = (control.value for control in gpu.controls if control.control == name)
    return next((quantity_text(name, value) for value in held), "")


def _in_force(gpu: Gpu) -> str:
    enforced = gpu.enforced_power_profiles
    text = "-" if enforced is None else ", ".join(enforced) or "none"
    return text if _requested(gpu) else ""


def _clock(mhz: int | None, locked: object) -> str:
    return number(mhz) + ("*" if locked else "")


def _reasons(_: GpuInfo, state: GpuState | None) -> list[str] | None:
    bits = None if state is None else state.throttle_reasons
    return None if bits is None else reasons(bits)


def _enforced(_: GpuInfo, state: GpuState | None) -> list[str] | None:
    profiles = None if state is None else state.enforced_power_profiles
    return None if profiles is None else [profile_name(profile) for profile in profiles]


def throttled_text(gpu: Gpu) -> str:
    """A GPU's throttle reasons: `power limit 37 % (fleet)`, if it was limited by power in this part
    of the last seconds."""
    by, names = "power limit", [*(gpu.throttle_reasons or ())]
    share = 100 * (gpu.limited.power_s or 0) / RECENT_S
    if 0.5 <= share < 99.5:
        names = [by, *(name for name in names if name != by)]
        by += f" {share:.0f} %"
    if gpu.limit_author not in (None, BY_LEASE):  # who has a lease is in the table of leases
        by += f" ({gpu.limit_author})"
    return ", ".join(by if name == "power limit" else name for name in names)


def _limited(reason: str) -> Callable[..., float | None]:
    """How long a GPU's clocks were limited for a reason, from its reply."""

    def read(*replies: Any) -> float | None:
        reply = replies[-1]
        ms = None if reply is None else reply.limited_ms.get(reason)
        ms = ms[0] if isinstance(ms, list) else ms
        return None if ms is None else ms / 1000

    return read


class Limited(Entity):
    """How long a GPU's clocks were limited, by reason. None: the driver does not count it."""

    power_s: float | None = column(name="limited_power_s", source=_limited("power"))
    """By the power limit."""
    heat_s: float | None = column(name="limited_heat_s", source=_limited("heat"))
    board_s: float | None = column(name="limited_board_s", source=_limited("board"))
    """By the board's own limit, or its power brake."""
    sync_s: float | None = column(name="limited_sync_s", source=_limited("sync"))
    """By another GPU of its sync boost group."""
    reliability_s: float | None = column(
        name="limited_reliability_s", source=_limited("reliability")
    )
    """By the limit of its voltage."""

    def text(self, of_s: float) -> str:
        """`power 37 %`: the shares of a time, or `never`."""
        counted = {reason: getattr(self, f"{reason}_s") for reason in REASONS}
        if of_s <= 0 or not any(one is not None for one in counted.values()):
            return "-"
        shares = {reason: 100 * (seconds or 0) / of_s for reason, seconds in counted.items()}
        texts = [f"{name} {share:.0f} %" for name, share in shares.items() if share >= 0.5]
        return ", ".join(texts) or "never"


class Gpu(Entity):
    """One GPU as it is now."""

    index: int = column("GPU", number=True, width=3)
    name: str = column("NAME", text=product, spare=3, width=22)
    uuid: str = column(title="UUID")
    pci_address: str = column(title="PCI address")
    utilization_percent: int | None = column(
        "UTIL",
        title="utilization",
        width=5,
        metric="zeusd_gpu_utilization_ratio Share of time in which a kernel ran.",
    )
    """Share of the last sample period in which a kernel ran."""
    memory_used_mib: int | None = column(
        "MEM USED",
        text=_memory,
        title="memory in use",
        page=_memory,
        width=11,
        metric="zeusd_gpu_memory_used_bytes Memory of the GPU in use.",
    )
    memory_total_mib: int | None = column(source="memory_mib")
    power_w: float | None = column(
        "POWER", title="power", width=6, metric="zeusd_gpu_power_watts Power at this moment."
    )
    power_limit_w: PowerLimit = column(
        "LIMIT", text=limit_text, part=PowerLimit, number=True, width=7
    )
    gpu_clock_mhz: int | None = column(
        "CLOCK",
        title="graphics clock",
        width=5,
        text=lambda one: _clock(one.gpu_clock_mhz, one.locked_gpu_clocks_mhz),
        metric="zeusd_gpu_clock_hertz{clock=gpu} Clocks.",
    )
    memory_clock_mhz: int | None = column(
        "MEMORY",
        text=lambda one: _clock(one.memory_clock_mhz, one.locked_memory_clocks_mhz),
        title="memory clock",
        spare=4,
        width=6,
        metric="zeusd_gpu_clock_hertz{clock=memory}",
    )
    locked_gpu_clocks_mhz: list[int] | None = column(
        title="graphics locked to",
        page=lambda one: _locked(one.locked_gpu_clocks_mhz),
        metric="zeusd_gpu_locked_clock_hertz{clock=gpu,end} Ends of the ranges that zeusd locked "
        "clocks to.",
    )
    """[lowest, highest], as zeusd locked them; None: unlocked, as far as zeusd knows."""
    locked_memory_clocks_mhz: list[int] | None = column(
        title="memory locked to",
        page=lambda one: _locked(one.locked_memory_clocks_mhz),
        metric="zeusd_gpu_locked_clock_hertz{clock=memory,end}",
    )
    temperature_c: int | None = column(
        "TEMP",
        title="temperature",
        width=4,
        metric="zeusd_gpu_temperature_celsius Temperature.",
    )
    memory_power_w: float | None = column(
        metric="zeusd_gpu_memory_power_watts Power of a GPU's memory, which is part of the GPU's."
    )
    """The memory's part of `power_w`."""
    module: int | None
    """The superchip that it is part of."""
    energy_scope: str | None = column(
        metric="zeusd_gpu_energy_scope{scope} What a GPU's energy counter counts: gpu, "
        "module or unknown."
    )
    """What `energy_j` counts: gpu, module (the whole superchip), or unknown."""
    energy_j: float | None = column("ENERGY", title="energy counter", spare=5, width=9)
    """Since the driver was loaded."""
    throttle_reasons: list[str] | None = column(
        "THROTTLED BY",
        text=throttled_text,
        title="throttled by",
        page=lambda one: "-" if one.throttle_reasons is None else throttled_text(one) or "nothing",
        source=_reasons,
        width=19,
    )
    limited: Limited = column(
        part=Limited,
        title=f"limited, last {RECENT_S} s",
        page=lambda one: one.limited.text(RECENT_S),
    )
    """In the last ten seconds."""
    limit_author: str | None = column(
        title="limit set by",
        page=lambda one: one.limit_author or "",
        metric="zeusd_gpu_limit_author{author} Who set a GPU's power limit in force: a ceiling "
        "(persisted, fleet, job:ID), site, lease, or BMC.",
    )
    """Who set the power limit in force: a ceiling (persisted, fleet, job:ID), site, lease, or BMC;
    None: nobody is known."""
    persistence_mode: bool | None = column(title="persistence mode")
    processes: int | None
    """Number of processes that use it, if they were requested."""
    leases: int
    """Number of leases on it."""
    error: str | None
    """Why it could not be read; then the readings are None."""
    persisted: list[str]
    """Controls that an administrator set with --persist."""
    controls: list[ControlState] = column(
        title="profiles requested", page=_requested, source=_values
    )
    """The value of each control."""
    enforced_power_profiles: list[str] | None = column(
        title="profiles enforced",
        page=_in_force,
        source=_enforced,
    )
    """Workload power profiles in force; the requested ones are under `controls`."""
    power_of: str | None = column(
        source=lambda gpu, _: next((one for one in gpu.power_domain[:1] if one != gpu.uuid), None)
    )
    """UUID of the GPU that has its power limit, power and energy, as the first die of a card."""


class KnownGpu(Entity):
    """The constant properties of a GPU."""

    index: int = column("GPU", number=True)
    name: str = column("NAME", text=product)
    uuid: str = column("UUID")
    pci_address: str = column("PCI", spare=3)
    architecture: int
    memory_mib: int = column("MEMORY", spare=2)
    mig_enabled: bool
    runtime_indices: list[int]
    """HIP's number of it, or of its partitions; empty: unknown, or not an AMD GPU."""
    power_limit_w: PowerLimits = column("LIMITS", text=accepted, part=PowerLimits)
    controls: list[str] = column("CONTROLS", spare=4)
    """Controls that it offers."""
    power_profiles: list[str] = column(
        source=lambda gpu: [profile.name for profile in gpu.power_profiles]
    )
    """Workload power profiles that it offers."""


class Module(Entity):
    """A superchip: a CPU, its memory, and GPUs."""

    module: int = column("MODULE", number=True)
    gpus: list[int] = column("GPUS", text=lambda one: ",".join(map(str, one.gpus)))
    """Indices of its GPUs."""
    power_w: float | None = column("POWER")
    """Of everything on it."""
    gpu_power_w: float | None = column("OF GPUS")
    """Its GPUs' part."""
    rest_w: float | None = column("OF THE REST")
    """The part of its CPU and memory."""


# ------------------------------------------------------------------------------- leases, ceilings


def place(one: Any) -> str:
    """Where a lease or an allocation is: its GPU, by UUID if zeusd does not find the GPU."""
    return one.uuid if one.gpu < 0 else str(one.gpu)


PENDING = "pending restore"


def holder(lease: Lease) -> str:
    """Describes the holder of a lease."""
    who = lease.user
    if lease.pid is not None:
        who = f"{lease.command or 'process'} {lease.pid} ({lease.user})"
    return who + (f", job {lease.job}" if lease.job else "")


class Lease(Entity):
    """One control of a GPU, its value, and the process that holds it."""

    gpu: int = column("GPU", text=place, number=True)
    """Its index; -1: zeusd does not find the GPU."""
    uuid: str = column(source="gpu")
    control: str = column("CONTROL", source=lambda one: one.control.value)
    value: Value | None = column("SET TO", text=_set_to("value"), source=_held("value"))
    """The GPU's value under it; None: nothing was set yet."""
    unit: str = column(source=_unit)
    """Of `value`, `asked` and `restore_target`: W, MHz, or empty for a switch."""
    asked: Value | None = column(source=_held("asked"))
    """The value its holder requested; a driver may have rounded it or moved it into its range."""
    restore_target: Value = column(
        "RESTORE TO", text=_set_to("restore_target"), source=_held("back.value"), spare=2
    )
    restore_target_source: str = column(source=lambda one: one.back.source)
    """configured, persisted, observed or unreadable, see the protocol's `Back`."""
    restoring: bool = column(
        "STATE", text=lambda one: style(PENDING, "red") if one.restoring else "held", spare=3
    )
    """The holder is gone, and the restore is pending."""
    held_s: float = column("SINCE", source="since_ns", spare=1)
    expires_in_s: float = column(source="expires_ns")
    """When it expires if its holder sends no heartbeat until then."""
    uid: int
    user: str = column(
        "HOLDER",
        text=lambda one: holder(one) + (f": {one.trouble}" if one.trouble else ""),
        source=_user,
    )
    pid: int | None
    command: str | None
    job: str | None
    trouble: str | None
    """Why it is pending."""
    pending_s: float | None = column(source="pending_ns")
    """For how long; None: it is not."""


def until(one: Ceiling) -> str:
    """When a ceiling ends."""
    if one.expires_in_s is None:
        return "the job ends" if one.name.startswith("job:") else "removed"
    then = "" if one.then is None else f", then {number(one.then, one.unit)}"
    return f"in {duration(one.expires_in_s)}{then}"


class Ceiling(Entity):
    """A named bound on a GPU's power limit, besides the site limit and a persistent limit."""

    gpu: int = column("GPU", number=True)
    uuid: str
    name: str = column("CEILING")
    """fleet, or job:ID of a Slurm job or a pod."""
    control: str
    value: float = column("AT MOST", text=_set_to("value"), source=_held("value"))
    """The highest value that anyone may set."""
    unit: str = column(source=_unit)
    expires_in_s: float | None = column("UNTIL", text=until, source="deadline_ns")
    """When `then` takes its place; None: never."""
    then: float | None = column(source=_held("fallback"))
    """The bound from then on; None: no bound."""
    uid: int
    """Who set it."""
    user: str = column("SET BY", source=_user)


class SetValue(Entity):
    """A value that was set on one GPU."""

    gpu: int
    uuid: str
    control: str
    value: Value
    """The GPU's value now; for a ceiling, the bound."""
    unit: str
    was: Value | None
    asked: Value | None
    """The requested value."""


class Outcome(Entity):
    """The outcome for one control."""

    gpu: int
    uuid: str
    control: str
    ok: bool
    trouble: str | None
    """Why it is not restored. Beside `ok`: `not_offered`, by the driver; `held`, by another job."""


class Permitted(Entity):
    """The requesting user's permission for one control."""

    control: str
    allowed: bool
    why: str
    """Why not; empty if allowed."""
    ranges: list[tuple[float, float]]
    """In W or MHz; a value must lie in one of them; empty: no bound."""


# ------------------------------------------------------------------------ processes, jobs, energy


class Process(Entity):
    """A process that uses a GPU. None: the reader may not see it, or the process is gone."""

    gpu: int = column(
        "GPU",
        text=lambda one: (
            str(one.gpu) + ("" if one.gpu_instance is None else f":{one.gpu_instance}")
        ),
        number=True,
    )
    uuid: str
    pid: int | None = column("PID", number=True)
    user: str | None = column("USER", source=_user)
    memory_mib: int | None = column("MEM")
    """Memory of the GPU that it uses; None: the driver does not report it."""
    type: str = column("TYPE", source=lambda one: "C" if one.compute else "G", spare=1)
    """C: compute; G: graphics only."""
    command: str | None = column("COMMAND", text=lambda one: shorten(one.command or "-", 40))
    job: str | None = column("JOB", text=lambda one: one.job or "")
    gpu_instance: int | None
    """MIG instance; None: the whole GPU."""
    leases: list[str] = column("HOLDS")
    """Its leases on this GPU: `power_limit 200 W`."""


def _part(one: Allocation) -> str:
    return f"{one.weight} of {one.parts or 'those held'}" if one.weight else ""


class Allocation(Entity):
    """A GPU that a job or pod holds."""

    gpu: int = column("GPU", text=place, number=True)
    """Its index; -1: zeusd does not find the GPU."""
    uuid: str = column(source="gpu")
    kind: str | None
    """job or pod. None: the reader may not see whose it is, nor the following fields."""
    name: str | None = column(
        "HELD BY", text=lambda one: "-" if one.name is None else f"{one.kind} {one.name}"
    )
    run: str | None = column("RUN", text=lambda one: one.run or "")
    user: str | None = column("USER", source=_user)
    weight: int | None = column("PART", text=_part, source=lambda one: one.weight or None)
    """Its part beside other holders; None: all of the GPU."""
    parts: int | None = column(source=lambda one: one.parts or None)
    """Number of parts of the GPU; None: those that are held."""
    held_s: float | None = column(
        "SINCE", source=lambda one: round(seconds_since(one.since_ns), 3) if one.kind else None
    )


NOBODYS = ("idle", "unattributed")
"""Kinds of energy that no account used."""


def account_text(one: UsedEnergy) -> str:
    """Names an account."""
    if one.kind in NOBODYS:
        return f"({one.kind}: {one.name})" if one.name else f"({one.kind})"
    if one.kind in ("others", "total"):
        return f"({one.kind})" if one.kind == "others" else "all users"
    if one.kind == "gpu":
        cpu = one.name.replace("cpu:", "CPU ")
        return cpu if one.gpu is None else f"GPU {one.gpu}"
    if one.kind == "user":
        return one.user or "?"
    text = f"{one.kind} {one.name}"
    if one.kind == "process":
        text += f" of {one.workload}" if one.workload else ""
    elif one.run not in (None, "0"):
        text += f" run {one.run}"
    return f"{text} ({one.user})" if one.user else text


def limited_texts(one: UsageSum) -> list[str]:
    """Shares of an account's GPU time in which clocks were limited, the largest first."""
    shares = {name: 100 * ns / max(1, one.ns) for name, ns in one.limited_ns.items()}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return [f"{share:.0f} % {cause_text(name)}" for name, share in ordered if share >= 0.5]


class UsedEnergy(Entity):
    """Energy of one account in one interval, see the protocol's `UsageSum`."""

    since: datetime = column("DAY", text=lambda one: one.since.strftime("%Y-%m-%d"))
    until: datetime
    kind: str
    name: str = column("WHO", text=account_text)
    gpu: int | None
    """Index of the GPU, if the sum is of one that zeusd finds."""
    run: str | None
    uid: int | None = column(source=lambda one: one.uid if one.uid >= 0 else None)
    user: str | None = column(source=_user)
    gpu_hours: float = column(
        "GPU-HOURS",
        text=lambda one: f"{one.gpu_hours:.2f}",
        number=True,
        source=lambda one: one.ns / 3.6e12,
        spare=3,
    )
    energy_j: float = column("ENERGY", source=lambda one: (one.active_uj + one.idle_uj) / 1e6)
    lower_j: float = column("LOWER")
    upper_j: float = column("UPPER")
    bounds: str = column("BOUNDS", spare=1)
    """The basis of lower_j and upper_j: exact, presence or activity; the least certain one if there
    are several."""
    active_j: float = column("ACTIVE", spare=4)
    idle_j: float = column("HELD IDLE", spare=2)
    """While the driver reported the GPU as idle."""
    basis: list[str] = column("BASIS", source="methods")
    """allocated, exclusive, weights, utilization, slices, equal, unread."""
    exact: bool
    reason: str
    """Why it is an estimate, or unattributed; empty otherwise."""
    begin: datetime | None
    """When a job or pod began to hold its first GPU, or a process started."""
    end: datetime | None
    """When it ceased to hold its last; None: it still holds some."""
    workload: str | None
    """Of a process: the job, pod, service or container that it belongs to."""
    limited: list[str] = column(source=limited_texts)
    """Of a job or pod: shares of its GPU time in which clocks were limited: `37 % at the ceiling
    rack1`."""


class RecordedSample(Entity):
    """A sample of a GPU: a row of a recording."""

    time: float | None
    """Seconds since 1970."""
    gpu: int
    uuid: str | None = column(source="gpu")
    power_w: float | None
    average_power_w: float | None = column(source="average_mw")
    memory_power_w: float | None = column(source="memory_mw")
    module_power_w: float | None = column(source="module_mw")
    energy_j: float | None
    """From an arbitrary start."""
    power_limit_w: float | None
    gpu_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    throttle_reasons: int | None
    """Bits of nvmlClocksEventReasons."""
    lost: int | None
    """Samples that were missed just before."""


def _joules(one: Measured) -> str:
    if one.energy_j is None or one.uncertainty_j is None:
        return "-"
    return f"{one.energy_j:.2f} ± {one.uncertainty_j:.2f}"


def _limited_while(one: Measured) -> str:
    if one.limited is None or not one.energy_j or not one.average_power_w:
        return "-"
    return one.limited.text(one.energy_j / one.average_power_w)


class Measured(Entity):
    """Energy of one source."""

    source: str = column("SOURCE")
    """`gpu:INDEX`, `cpu:INDEX`, `dram:INDEX` or `module:NUMBER`."""
    uuid: str | None
    energy_j: float | None = column("ENERGY (J)", text=_joules)
    """None: nothing could be measured, see `trouble`."""
    uncertainty_j: float | None
    """Two standard deviations."""
    average_power_w: float | None = column("AVERAGE (W)")
    limited: Limited | None = column("LIMITED", text=_limited_while)
    """How long the clocks of a GPU were limited meanwhile."""
    trouble: str | None


# ------------------------------------------------------------------------------ zeusd and its log


class Problem(Entity):
    """What keeps zeusd from working fully."""

    part: str
    """driver, gpu, sampling, journal or ledger."""
    source: str
    """The device: a GPU's UUID, `cpu:0`; empty: all, or one whose name is not known."""
    code: str
    """Of the driver or the system; empty: there is none."""
    cause: str
    since_s: float = column(source="since_ns")
    """How long ago it began."""
    command: str
    """What to run next."""


def problems_of(node: NodeInfo) -> list[Problem]:
    """What does not work; causes name GPUs by their index."""
    index = {gpu.uuid: gpu.index for gpu in node.gpus}
    return [Problem.of(problem, cause=named(problem.cause, index)) for problem in node.problems]


class Node(Entity):
    """The daemon and its node."""

    socket: str
    daemon_version: str
    protocol: int
    driver_version: str | None
    uptime_s: float = column(source="started_ns")
    simulated: bool = column(source=lambda node: node.simulated is not None)
    quiesced_s: float | None = column(source="quiesced_ns")
    """How long the driver has been closed; None: it is not."""
    gpus: int = column(source=lambda node: len(node.gpus))
    leases: int
    pending_restores: int
    """Controls that could not be restored yet."""
    findings: list[str]
    """Rules of zeusd.toml that have no effect on this node, and why."""
    problems: list[Problem] = column(source=problems_of)


def _what(event: Event) -> str:
    what = event.event + (f" x{event.count}" if event.count > 1 else "")
    return style(what, fg="yellow") if event.warning else what


def _who(event: Event) -> str:
    if event.pid is None:
        return event.user or ""
    if event.pid == 0:
        return event.command or ""  # zeusd itself
    who = f"{event.command or 'process'} {event.pid} ({event.user})"
    return f"{who}, job {event.job}" if event.job else who


def _change(event: Event) -> str:
    values = " -> ".join(one for one in (event.old, event.new) if one)
    return f"{event.control or ''} {values}".strip()


def _why(event: Event) -> str:
    parts = (_who(event), event.reason, event.result)
    return ", ".join(part for part in parts if part and part != "requested")


class Event(Entity):
    """One record of the audit log."""

    number: int
    when: datetime = column("WHEN", text=lambda event: event.when.strftime("%b %d %H:%M:%S"))
    until: datetime
    event: str = column("WHAT", text=_what)
    count: int
    warning: bool
    gpu: int | None = column(
        "GPU", text=lambda one: str((one.uuid or "") if one.gpu is None else one.gpu)
    )
    uuid: str | None = column(source="gpu")
    control: str | None = column("CHANGE", text=_change)
    old: str | None
    new: str | None
    uid: int | None
    user: str | None = column("WHO, WHY AND RESULT", text=_why, source=_user)
    pid: int | None
    """None if it is another user's and the reader is not an administrator; the same for `command`
    and `job`."""
    command: str | None
    job: str | None
    reason: str | None
    result: str | None


GPU: Columns[Gpu] = columns_of(Gpu)
KNOWN_GPU: Columns[KnownGpu] = columns_of(KnownGpu)
MODULE: Columns[Module] = columns_of(Module)
LEASE: Columns[Lease] = columns_of(Lease)
CEILING: Columns[Ceiling] = columns_of(Ceiling)
MEASURED: Columns[Measured] = columns_of(Measured)
PROCESS: Columns[Process] = columns_of(Process)
ALLOCATION: Columns[Allocation] = columns_of(Allocation)
EVENT: Columns[Event] = columns_of(Event)
USED: Columns[UsedEnergy] = columns_of(UsedEnergy)

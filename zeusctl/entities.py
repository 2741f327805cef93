"""What zeusctl lists, column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from zeusctl.columns import Column, Columns, plain
from zeusctl.text import duration, number, quantity_text, shorten, style

if TYPE_CHECKING:
    from zeusctl.reports import Allocation, Ceiling, Event, Gpu, KnownGpu, Lease, Module, Process


def _limit(name: str) -> Callable[[Any], Any]:
    return attrgetter(f"power_limit_w.{name}")


def _limits() -> Iterable[Column[Any]]:
    for name, field in (("min", "smallest"), ("max", "largest"), ("default", "default")):
        yield Column(f"{name}_power_limit_w", get=_limit(field))


def product(name: str) -> str:
    """A GPU's name without its maker's."""
    return shorten(name.removeprefix("NVIDIA ").removeprefix("AMD Instinct "), 22)


def limit_text(gpu: Gpu) -> str:
    """A GPU's limit and what the board enforces; yellow if it is below the site limit."""
    limit = gpu.power_limit_w
    if limit.requested is None:
        return "-"
    text, enforced = number(limit.requested), limit.enforced
    if enforced is not None and enforced < limit.requested:
        text += f">{number(enforced)}"
    below = (
        limit.site is not None and min(limit.requested, enforced or limit.requested) < limit.site
    )
    return style(text, fg="yellow") if below else text


def _memory(gpu: Gpu) -> str:
    if gpu.memory_used_mib is None or gpu.memory_total_mib is None:
        return "-"
    used, total = gpu.memory_used_mib / 1024, gpu.memory_total_mib / 1024
    return f"{number(used)}/{number(total, 'GiB', 0)}"


def _clock(mhz: int | None, locked: object) -> str:
    return number(mhz) + ("*" if locked else "")


GPU: Columns[Gpu] = (
    Column("index", "GPU", number=True),
    Column("name", "NAME", lambda gpu: product(gpu.name), spare=1),
    *plain("uuid", "pci_address"),
    Column("utilization_percent", "UTIL"),
    Column("memory_used_mib", "MEM USED", _memory),
    *plain("memory_total_mib"),
    Column("power_w", "POWER"),
    Column("power_limit_w", "LIMIT", limit_text, _limit("requested")),
    Column("enforced_power_limit_w", get=_limit("enforced")),
    Column("site_limit_w", "SITE", get=_limit("site")),
    Column("highest_power_limit_w", get=_limit("highest")),
    *_limits(),
    Column(
        "gpu_clock_mhz", "CLOCK", lambda one: _clock(one.gpu_clock_mhz, one.locked_gpu_clocks_mhz)
    ),
    Column(
        "memory_clock_mhz",
        "MEMORY",
        lambda one: _clock(one.memory_clock_mhz, one.locked_memory_clocks_mhz),
        spare=2,
    ),
    *plain("locked_gpu_clocks_mhz", "locked_memory_clocks_mhz"),
    Column("temperature_c", "TEMP"),
    *plain("memory_power_w", "module", "energy_scope"),
    Column("energy_j", "ENERGY", spare=3),
    Column("throttle_reasons", "THROTTLED BY", lambda gpu: ", ".join(gpu.throttle_reasons or ())),
    *plain("persistence_mode", "processes", "leases", "error"),
)
"""A GPU as it is now. `processes` and `leases` are counts."""

KNOWN_GPU: Columns[KnownGpu] = (
    Column("index", "GPU", number=True),
    Column("name", "NAME", lambda gpu: product(gpu.name)),
    Column("uuid", "UUID"),
    Column("pci_address", "PCI", spare=3),
    *plain("architecture"),
    Column("memory_mib", "MEMORY", spare=2),
    *plain("mig_enabled"),
    *_limits(),
    Column("", "LIMITS", lambda gpu: limits_text(gpu)),
    Column(
        "site_limit_w", "SITE", lambda gpu: number(gpu.power_limit_w.site, "W"), _limit("site"), 1
    ),
    Column("controls", "CONTROLS", spare=4),
)
"""A GPU's constant properties."""


def limits_text(gpu: KnownGpu) -> str:
    """The power limits that the GPU itself accepts."""
    limit = gpu.power_limit_w
    if limit.smallest is None:
        return "-"
    return f"{number(limit.smallest)}-{number(limit.largest, 'W')}"


LEASE: Columns[Lease] = (
    Column("", "GPU", lambda one: one.uuid if one.gpu < 0 else str(one.gpu), number=True),
    Column("control", "CONTROL"),
    Column("", "SET TO", lambda one: quantity_text(one.control, one.value)),
    Column("", "RESTORE TO", lambda one: quantity_text(one.control, one.restore_target), spare=2),
    Column("", "STATE", lambda one: style(PENDING, "red") if one.restoring else "held", spare=3),
    Column("", "SINCE", lambda one: duration(one.held_s), spare=1),
    Column("", "HOLDER", lambda one: holder(one) + (f": {one.trouble}" if one.trouble else "")),
)

PENDING = "pending restore"


def holder(lease: Lease) -> str:
    """Describes the holder of a lease."""
    who = lease.user
    if lease.pid is not None:
        who = f"{lease.command or 'process'} {lease.pid} ({lease.user})"
    return who + (f", job {lease.job}" if lease.job else "")


def until(one: Ceiling) -> str:
    """When a ceiling ends."""
    if one.expires_in_s is None:
        return "the job ends" if one.name.startswith("job:") else "removed"
    then = "" if one.then is None else f", then {number(one.then, one.unit)}"
    return f"in {duration(one.expires_in_s)}{then}"


CEILING: Columns[Ceiling] = (
    Column("gpu", "GPU", number=True),
    Column("name", "CEILING"),
    Column("", "AT MOST", lambda one: number(one.value, one.unit)),
    Column("", "UNTIL", until),
    Column("user", "SET BY"),
)


def _place(one: Process) -> str:
    return str(one.gpu) + ("" if one.gpu_instance is None else f":{one.gpu_instance}")


PROCESS: Columns[Process] = (
    Column("gpu", "GPU", _place, number=True),
    *plain("uuid"),
    Column("pid", "PID", number=True),
    Column("user", "USER"),
    Column("memory_mib", "MEM"),
    Column("type", "TYPE", spare=1),
    Column("command", "COMMAND", lambda one: shorten(one.command or "-", 40)),
    Column("job", "JOB", lambda one: one.job or ""),
    *plain("gpu_instance"),
    Column("leases", "HOLDS"),
)
"""A process on a GPU."""

MODULE: Columns[Module] = (
    Column("module", "MODULE", number=True),
    Column("", "GPUS", lambda one: ",".join(map(str, one.gpus))),
    Column("power_w", "POWER"),
    Column("gpu_power_w", "OF GPUS"),
    Column("rest_w", "OF THE REST", get=lambda one: _rest(one)),
)


def _rest(one: Module) -> float | None:
    if one.power_w is None or one.gpu_power_w is None:
        return None
    return one.power_w - one.gpu_power_w


def _part(one: Allocation) -> str:
    return f"{one.weight} of {one.parts or 'those held'}" if one.weight else ""


ALLOCATION: Columns[Allocation] = (
    Column("", "GPU", lambda one: one.uuid if one.gpu < 0 else str(one.gpu), number=True),
    Column("", "HELD BY", lambda one: "-" if one.name is None else f"{one.kind} {one.name}"),
    Column("", "RUN", lambda one: one.run or ""),
    Column("user", "USER"),
    Column("", "PART", _part),
    Column("", "SINCE", lambda one: "-" if one.held_s is None else duration(one.held_s)),
)


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


EVENT: Columns[Event] = (
    Column("", "WHEN", lambda event: event.when.strftime("%b %d %H:%M:%S")),
    Column("", "WHAT", _what),
    Column("", "GPU", lambda one: str((one.uuid or "") if one.gpu is None else one.gpu)),
    Column("", "CHANGE", _change),
    Column("", "WHO, WHY AND RESULT", _why),
)
"""A record of the audit log."""

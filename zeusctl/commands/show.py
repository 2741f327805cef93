"""`zeusctl show`: everything about one GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from zeus_ipc.controls import SPECS, Control
from zeus_ipc.text import energy, number, quantity_text, split
from zeus_ipc.text import memory as memory_text
from zeusctl.arguments import gpus_argument
from zeusctl.columns import Output, output_options
from zeusctl.columns import lines as table_of
from zeusctl.commands.processes import process_lines
from zeusctl.commands.status import read as read_status
from zeusctl.commands.status import site_text
from zeusctl.entities import CEILING, GPU, LEASE, KnownGpu, Permitted, throttled_text
from zeusctl.exits import CommandError, Exit
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import style

if TYPE_CHECKING:
    from zeusctl.reports import ShowReport

_HOUR_NS = 3600 * 10**9


@click.command()
@gpus_argument()
@output_options(GPU)
@common_options
@pass_session
def show(session: Session, gpus: str, output: Output[Any]) -> None:
    """Show one GPU: limits, sensors, processes, leases, rights.

    With --columns or --format csv, print a row as in `zeusctl status`.
    """
    if output.rows:
        output.run(
            lambda: read_status(session, gpus, processes=True), _lines, lambda report: report.gpus
        )
    else:
        output.run(lambda: _read(session, gpus), _lines, lambda report: [])


def _read(session: Session, gpus: str) -> ShowReport:
    from zeus_ipc.errors import ZeusIpcError
    from zeusctl.reports import ShowReport
    from zeusctl.views import ceiling_reports, gpu_reports, lease_reports, process_reports

    session.look_again()
    if gpus == "all" and len(session.node.gpus) > 1:
        raise click.UsageError("name a GPU: zeusctl show 0", click.get_current_context())
    chosen = session.gpus(gpus)
    if len(chosen) > 1:
        raise CommandError(
            "show is about one GPU; name one (`zeusctl status` shows all)", Exit.USAGE, "usage"
        )
    gpu, client = chosen[0], session.client
    memory_mhz: list[int] = []
    gpu_mhz: list[int] = []
    try:
        clocks = client.clocks(gpu.uuid)
        memory_mhz = clocks.memory_mhz
        gpu_mhz = clocks.gpu_mhz.get(str(memory_mhz[0]), []) if memory_mhz else []
    except ZeusIpcError:
        pass  # this GPU does not support it; show everything else
    leases = lease_reports(client, [gpu])
    return ShowReport(
        at=now(),
        known=KnownGpu.of(gpu),
        now=gpu_reports(client, [gpu], leases)[0],
        leases=leases,
        you_may=[
            Permitted(
                control=control,
                allowed=permission.allowed,
                why=session.readable(permission.why),
                ranges=[(low / scale, high / scale) for low, high in permission.ranges],
            )
            for control, permission in client.policy().gpus.get(gpu.uuid, {}).items()
            for scale in (SPECS[Control(control)].scale,)
        ],
        memory_clocks_mhz=memory_mhz,
        gpu_clocks_mhz=gpu_mhz,
        energy_last_hour_j=_last_hour(session, gpu.uuid),
        processes=process_reports(client, [gpu], leases),
        ceilings=ceiling_reports([gpu]),
    )


def _last_hour(session: Session, uuid: str) -> float | None:
    from zeus_ipc.errors import ZeusIpcError

    try:
        known = session.client.windows(uuid)[uuid]
        end_ns = time.monotonic_ns()
        # One tick later than reported: the first moment is an estimate, and may move forward
        # between two requests; the second would then fail because its time is too early.
        begin_ns = max(known.begins_ns + known.tick_ns, end_ns - _HOUR_NS)
        found = session.client.windows(uuid, [(begin_ns, end_ns, False)])[uuid].energy_uj[0]
    except ZeusIpcError:
        return None
    return None if found is None else round(found / 1e6, 3)


def _lines(report: ShowReport) -> Iterator[str]:
    known, state, limit = report.known, report.now, report.now.power_limit_w
    yield style(f"GPU {known.index}: {known.name}", bold=True)
    if state.error is not None:
        yield style(state.error, fg="red")
    memory = memory_text(known.memory_mib)
    yield from _rows(
        ("UUID", known.uuid),
        ("PCI address", known.pci_address),
        ("memory", memory + (f", {split(known.runtime_indices)}" if known.mig_enabled else "")),
        ("memory in use", memory_text(state.memory_used_mib)),
        ("utilization", number(state.utilization_percent, "%")),
        ("power", number(state.power_w, "W")),
        ("limit requested", number(limit.requested, "W")),
        ("limit enforced", number(limit.enforced, "W")),
        ("site limit", site_text(limit)),
        ("limits it accepts", _span(limit.smallest, limit.largest, "W")),
        ("vendor's default", number(limit.default, "W")),
        (
            "graphics clock",
            number(state.gpu_clock_mhz, "MHz") + _locked(state.locked_gpu_clocks_mhz),
        ),
        (
            "memory clock",
            number(state.memory_clock_mhz, "MHz") + _locked(state.locked_memory_clocks_mhz),
        ),
        ("graphics clocks", _clocks(report.gpu_clocks_mhz, Control.GPU_CLOCKS, known)),
        ("memory clocks", _clocks(report.memory_clocks_mhz, Control.MEMORY_CLOCKS, known)),
        ("temperature", number(state.temperature_c, "C")),
        ("throttled by", throttled_text(state) or "nothing"),
        ("persistence mode", {None: "-", True: "on", False: "off"}[state.persistence_mode]),
        *_profiles(report),
        ("energy counter", "-" if state.energy_j is None else energy(state.energy_j)),
        (
            "energy, last hour",
            "-" if report.energy_last_hour_j is None else energy(report.energy_last_hour_j),
        ),
    )
    yield ""
    if report.processes:
        yield from process_lines(report.processes)
        yield ""
    yield "You may change:"
    yield from _rows(*((one.control, _may(one)) for one in report.you_may))
    yield ""
    if report.leases:
        yield from table_of(LEASE, report.leases)
    else:
        yield "Nobody holds a lease on it."
    if report.ceilings:
        yield ""
        yield from table_of(CEILING, report.ceilings)


def _profiles(report: ShowReport) -> Iterator[tuple[str, str]]:
    """Workload power profiles, of GPUs that have some."""
    enforced, name = report.now.enforced_power_profiles, Control.POWER_PROFILE.value
    if not report.known.power_profiles:
        return
    (requested,) = (one.value for one in report.now.controls if one.control == name)
    yield "profiles", ", ".join(report.known.power_profiles)
    yield "profiles requested", "-" if requested is None else quantity_text(name, requested)
    yield "profiles enforced", "-" if enforced is None else ", ".join(enforced) or "none"


def _rows(*pairs: tuple[str, str]) -> Iterator[str]:
    for name, value in pairs:
        yield f"  {name:18} {value}"


def _may(one: Permitted) -> str:
    if not one.allowed:
        return f"no: {one.why}"
    unit = SPECS[Control(one.control)].unit
    return " or ".join(_span(low, high, unit) for low, high in one.ranges) or "yes"


def _span(low: float | None, high: float | None, unit: str) -> str:
    if low is None or high is None:
        return "-"
    return number(high, unit) if low == high else f"{number(low)} to {number(high, unit)}"


def _locked(span: Sequence[int] | None) -> str:
    return "" if span is None else f", locked to {span[0]} to {span[1]} MHz"


def _clocks(mhz: list[int], control: Control, known: KnownGpu) -> str:
    if not mhz:
        return "-"
    text = ", ".join(map(str, sorted(mhz))) + " MHz"
    if len(mhz) > 4:
        text = f"{min(mhz)} to {max(mhz)} MHz in {len(mhz)} steps"
    return text if control.value in known.controls else f"{text}; they cannot be locked"

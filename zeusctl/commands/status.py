"""`zeusctl status` and `leases`: overviews of the node and of its leases."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from zeusctl.columns import GPU_COLUMNS, Output, output_options
from zeusctl.commands.processes import process_lines
from zeusctl.completing import gpus_argument, id_option
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import count, duration, energy, shorten, style, table

if TYPE_CHECKING:
    from zeusctl.reports import Ceiling, Gpu, KnownGpu, Lease, Node, PowerLimit, StatusReport

HEADER = (
    *("GPU", "NAME", "UTIL", "MEM USED", "POWER", "LIMIT", "SITE", "CLOCK", "MEMORY", "TEMP"),
    *("ENERGY", "THROTTLED BY"),
)
COUNTS = {"module": "the whole module", "unknown": "either the GPU or the whole module"}
RIGHT = tuple(range(11))[:1] + tuple(range(2, 11))


@click.command()
@gpus_argument(required=False)
@id_option
@click.option("--processes", "-p", is_flag=True, help="Also list processes.")
@output_options(GPU_COLUMNS)
@common_options
@pass_session
def status(
    session: Session,
    gpus: str,
    processes: bool,
    columns: Sequence[str],
    form: str | None,
    watch: float | None,
) -> None:
    """Show an overview of daemon, GPUs, limits and leases.

    POWER, LIMIT and SITE are in watts, clocks in MHz. LIMIT is the power limit that software
    requested; 200>180 means that the board enforces less. SITE is the site limit, which a restore
    writes. A clock marked with * is locked. On superchips, the power of each module (CPU, memory
    and GPUs) follows; its GPUs' power is part of it.

    \b
    zeusctl status -i 0,1 --columns index,power_w,utilization_percent --format csv --watch 1
    """
    count_them = processes or "processes" in columns or form == "csv"
    output = Output(session.json, columns, form, watch, GPU_COLUMNS)
    output.run(lambda: read(session, gpus, count_them), lines, rows)


@click.command()
@click.option("--mine", is_flag=True, help="Only leases of your own processes.")
@common_options
@pass_session
def leases(session: Session, mine: bool) -> None:
    """List leases and ceilings: holder, age, restore target.

    Only the process's own user and administrators see the process, its program and its job.
    """
    from zeusctl.reports import LeasesReport
    from zeusctl.views import ceiling_reports, lease_reports

    found = lease_reports(session.client, session.node.gpus, others=True)
    if mine:
        found = [lease for lease in found if lease.uid == os.geteuid()]
    ceilings = [] if mine else ceiling_reports(session.node.gpus)
    report = LeasesReport(at=now(), leases=found, ceilings=ceilings)

    def lines() -> list[str]:
        said = lease_lines(found) if found else ["no leases"]
        return [*said, "", *ceiling_lines(ceilings)] if ceilings else said

    session.answer(report, lines)


def read(session: Session, gpus: str, processes: bool = False) -> StatusReport:
    """The node as it is now."""
    from zeusctl.reports import StatusReport
    from zeusctl.views import (
        ceiling_reports,
        lease_reports,
        module_reports,
        node_report,
        process_reports,
        read_states,
        reports_of,
    )

    session.look_again()
    chosen = session.gpus(gpus) if session.node.gpus or gpus != "all" else []
    quiesced = session.node.quiesced_ns is not None
    leases = lease_reports(session.client, session.node.gpus, others=True)
    indices = {gpu.index for gpu in chosen} | ({-1} if gpus == "all" else set())
    states, errors = ({}, {}) if quiesced else read_states(session.client, session.node.gpus)
    modules = {gpu.module for gpu in chosen}
    return StatusReport(
        at=now(),
        node=node_report(session.node, session.socket, leases),
        gpus=[] if quiesced else reports_of(chosen, states, errors),
        leases=[lease for lease in leases if lease.gpu in indices],
        ceilings=ceiling_reports(chosen),
        processes=process_reports(session.client, chosen, leases)
        if processes and not quiesced
        else None,
        modules=[
            one
            for one in module_reports(session.node.gpus, states)
            if not quiesced and one.module in modules
        ],
    )


def rows(report: StatusReport) -> Iterator[dict[str, Any]]:
    """The GPUs by column."""
    for gpu in report.gpus:
        limit = gpu.power_limit_w
        yield {
            **gpu.model_dump(),
            "power_limit_w": limit.requested,
            "enforced_power_limit_w": limit.enforced,
            "site_limit_w": limit.site,
            "min_power_limit_w": limit.smallest,
            "max_power_limit_w": limit.largest,
            "default_power_limit_w": limit.default,
            "processes": sum(one.gpu == gpu.index for one in report.processes or ()),
            "leases": sum(one.gpu == gpu.index for one in report.leases),
        }


def lines(report: StatusReport) -> Iterator[str]:
    """The report for a person."""
    yield headline(report.node)
    for problem in report.node.problems:
        since = duration(problem.since_s)
        text = f"{problem.part}: {problem.cause}, for {since}; run `{problem.command}`"
        yield style(text, fg="red")
    yield from (style(sentence, fg="red") for sentence in report.node.unusable)
    if report.node.quiesced_s is not None:
        since = duration(report.node.quiesced_s)
        text = f"zeusd closed the driver {since} ago; `zeusctl resume` reopens it."
        yield style(text, fg="yellow")
    elif not report.gpus:
        yield "zeusd sees no GPUs; `zeusctl doctor` says why."
    else:
        yield from table(HEADER, [gpu_row(gpu) for gpu in report.gpus], RIGHT)
        yield from module_lines(report)
        for gpu in report.gpus:
            if gpu.error is not None:
                yield style(f"GPU {gpu.index}: {gpu.error}", fg="red")
        for gpu in report.gpus:
            if above_site_limit(gpu.power_limit_w):
                then = "zeusd is lowering it"
                if not gpu.power_limit_w.site_enforced:
                    then = f"which is not enforced; `zeusctl reset {gpu.index}` lowers it"
                yield style(
                    f"GPU {gpu.index}: its limit is above the site limit, {then}", fg="yellow"
                )
        yield from not_enforced(report.gpus)
        indices = {gpu.uuid: f"GPU {gpu.index}" for gpu in report.gpus}
        for gpu in report.gpus:
            if gpu.power_of is not None:
                first = indices.get(gpu.power_of, gpu.power_of)
                yield f"GPU {gpu.index}: {first} has the power limit, power and energy of both"
        for gpu in report.gpus:
            if gpu.persisted:
                what = ", ".join(gpu.persisted)
                yield f"GPU {gpu.index}: persistent {what}; `zeusctl reset {gpu.index}` removes it"
    for finding in report.node.findings:
        yield style(f"zeusd.toml: {finding}", fg="yellow")
    if report.leases:
        yield ""
        yield from lease_lines(report.leases)
    for uuid, since_s in missing_gpus(report.leases).items():
        since = "" if since_s is None else f" for {duration(since_s)}"
        text = (
            f"zeusd has not found {uuid}{since}, and restores it when it is back; if it was removed"
        )
        yield style(f"{text} for good: `sudo zeusctl reset {uuid} --forget`", fg="red")
    if report.ceilings:
        yield ""
        yield from ceiling_lines(report.ceilings)
    if report.processes is not None:
        yield ""
        yield from process_lines(report.processes)


def module_lines(report: StatusReport) -> Iterator[str]:
    """The superchips, and what they draw together."""
    if not report.modules:
        return
    rows = [
        [
            str(one.module),
            ",".join(map(str, one.gpus)),
            _number(one.power_w, 1),
            _number(one.gpu_power_w, 1),
            _difference(one.power_w, one.gpu_power_w),
        ]
        for one in report.modules
    ]
    yield ""
    yield from table(("MODULE", "GPUS", "POWER", "OF GPUS", "OF THE REST"), rows, (0, 2, 3, 4))
    powers = [one.power_w for one in report.modules]
    if len(powers) > 1 and None not in powers:
        yield f"{_number(sum(one or 0 for one in powers), 1)} W in {count(len(powers), 'module')}"
    for gpu in report.gpus:
        if gpu.energy_scope != "gpu":
            yield f"GPU {gpu.index}: its energy counter counts {COUNTS[gpu.energy_scope]}"


def _difference(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else _number(one - other, 1)


def headline(node: Node) -> str:
    """The daemon in one line."""
    driver = f"driver {node.driver_version}" if node.driver_version else "no driver"
    if node.simulated:
        driver = "simulated GPUs"
    text = (
        f"zeusd {node.daemon_version} at {node.socket}, up {duration(node.uptime_s)}, {driver}, "
        f"{count(node.gpus, 'GPU')}, {count(node.leases, 'lease')}"
    )
    if node.pending_restores:
        text += style(f", {count(node.pending_restores, 'pending restore')}", fg="red")
    return text


def above_site_limit(limit: PowerLimit) -> bool:
    """Whether a limit above the site limit was requested before zeusd started, or outside it."""
    return None not in (limit.requested, limit.site) and (limit.requested or 0) > (limit.site or 0)


def is_cap_only(limit: PowerLimit) -> bool:
    """Whether a site limit is below the GPU's maximum and applies only to what zeusd sets."""
    lower = limit.site is not None and limit.largest is not None and limit.site < limit.largest
    return lower and not limit.site_enforced


def not_enforced(gpus: Sequence[Gpu | KnownGpu]) -> Iterator[str]:
    """Returns a line about site limits that are not enforced."""
    found = [str(gpu.index) for gpu in gpus if is_cap_only(gpu.power_limit_w)]
    if found:
        which = f"{'GPU' if len(found) == 1 else 'GPUs'} {', '.join(found)}"
        yield (
            f"Site limit of {which}: not enforced; zeusd sets no more, but leaves what others set "
            "(`enforce = true` in zeusd.toml changes that)."
        )


def site_text(limit: PowerLimit) -> str:
    """The site limit, and whether others may exceed it."""
    if limit.site is None:
        return "-"
    state = ", enforced" if limit.site_enforced else ""
    return f"{limit.site:g} W" + (", not enforced" if is_cap_only(limit) else state)


def gpu_row(gpu: Gpu) -> list[str]:
    """Returns a GPU's row of the table."""
    limit = gpu.power_limit_w
    return [
        str(gpu.index),
        shorten(gpu.name, 24),
        "-" if gpu.utilization_percent is None else f"{gpu.utilization_percent}%",
        _memory(gpu),
        _number(gpu.power_w, 1),
        limit_text(limit.requested, limit.enforced, limit.site),
        _number(limit.site),
        _number(gpu.gpu_clock_mhz) + ("*" if gpu.locked_gpu_clocks_mhz else ""),
        _number(gpu.memory_clock_mhz) + ("*" if gpu.locked_memory_clocks_mhz else ""),
        "-" if gpu.temperature_c is None else f"{gpu.temperature_c} C",
        "-" if gpu.energy_j is None else energy(gpu.energy_j),
        ", ".join(gpu.throttle_reasons or ()),
    ]


def _memory(gpu: Gpu) -> str:
    if gpu.memory_used_mib is None or gpu.memory_total_mib is None:
        return "-"
    return f"{gpu.memory_used_mib / 1024:.1f}/{gpu.memory_total_mib / 1024:.0f} GiB"


def limit_text(requested: float | None, enforced: float | None, site: float | None) -> str:
    """Returns a limit and what the board enforces, in yellow if it is below the site limit."""
    if requested is None:
        return "-"
    text = _number(requested)
    if enforced is not None and enforced < requested:
        text += f">{_number(enforced)}"
    below = site is not None and min(requested, enforced or requested) < site
    return style(text, fg="yellow") if below else text


def missing_gpus(leases: Sequence[Lease]) -> dict[str, float | None]:
    """UUIDs of GPUs that zeusd does not find and has to restore, and for how long."""
    return {one.uuid: one.pending_s for one in leases if one.gpu < 0 and one.restoring}


def lease_lines(leases: Sequence[Lease]) -> list[str]:
    """Leases as a table."""
    from zeusctl.views import holder

    rows = []
    for lease in leases:
        state = "held"
        if lease.restoring:
            state = style("pending restore", fg="red")
        rows.append(
            [
                lease.uuid if lease.gpu < 0 else str(lease.gpu),
                lease.control,
                lease.value_text or "not set",
                lease.restore_target_text,
                state,
                duration(lease.held_s),
                holder(lease) + (f": {lease.trouble}" if lease.trouble else ""),
            ]
        )
    return table(("GPU", "CONTROL", "SET TO", "RESTORE TO", "STATE", "SINCE", "HOLDER"), rows, (0,))


def ceiling_lines(ceilings: Sequence[Ceiling]) -> list[str]:
    """Ceilings as a table."""
    rows = []
    for one in ceilings:
        until = "it is removed"
        if one.name.startswith("job:"):
            until = "the job ends"
        if one.expires_in_s is not None:
            then = "" if one.then is None else f", then {one.then:g} {one.unit}"
            until = f"in {duration(one.expires_in_s)}{then}"
        rows.append(
            [str(one.gpu), one.name, f"{one.value:g} {one.unit}", until, one.user],
        )
    return table(("GPU", "CEILING", "AT MOST", "UNTIL", "SET BY"), rows, (0,))


def _number(value: float | None, digits: int = 0) -> str:
    return (
        "-"
        if value is None
        else f"{value:.{digits}f}".rstrip("0").rstrip(".")
        if digits
        else f"{value:g}"
    )

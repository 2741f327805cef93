"""`zeusctl status`, `leases`, `processes` and `gpus`: what there is on the node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeus_common.checks import read_states
from zeus_common.options import option
from zeus_common.text import count, duration, gpus_text, number
from zeusctl.arguments import gpus_argument, without_effect
from zeusctl.columns import Output, output_options
from zeusctl.columns import lines as table_of
from zeusctl.entities import (
    CEILING,
    GPU,
    KNOWN_GPU,
    LEASE,
    MODULE,
    PROCESS,
    Gpu,
    KnownGpu,
    Node,
    Problem,
    Process,
    is_cap_only,
)
from zeusctl.reports import GpusReport, LeasesReport, ProcessesReport, StatusReport
from zeusctl.session import Session, now, verb
from zeusctl.text import plain, screen_width, style
from zeusctl.views import (
    ceiling_reports,
    lease_reports,
    module_reports,
    process_reports,
    reports_of,
)

COUNTS = {"module": "the whole module", "unknown": "either the GPU or the whole module"}


@verb()
@gpus_argument()
@option("--processes -p", "Also list processes.", bool)
@output_options(GPU)
def status(session: Session, gpus: str, processes: bool, output: Output[Any]) -> None:
    """Show an overview of daemon, GPUs, limits and leases.

    POWER, LIMIT and SITE are in watts, clocks in MHz. LIMIT is the power limit that software
    requested; 200>180 means that the board enforces less. SITE is the site limit, which a restore
    writes. A clock marked with * is locked. "power limit (fleet)" means that the ceiling `fleet`
    throttles the GPU, and not a lease. On superchips, the power of each module (CPU, memory
    and GPUs) follows; its GPUs' power is part of it.

    \b
    zeusctl status -i 0,1 --columns index,power_w,utilization_percent --format csv --watch 1
    """
    if output.rows:
        without_effect("with --columns or --format csv", "--processes")
    count_them = processes or output.shows("processes")
    output.run(lambda: read(session, gpus, count_them), lines, lambda report: report.gpus)


@verb()
@gpus_argument()
@option("--mine", "Only leases of your own processes.", bool)
def leases(session: Session, gpus: str, mine: bool) -> None:
    """List leases and ceilings: holder, age, restore target.

    Only the process's own user and administrators see the process, its program and its job.
    """
    every = lease_reports(session.client, session.node.gpus, others=True)
    wanted = session.uuids(gpus, (lease.uuid for lease in every))
    shown = [lease for lease in every if not wanted or lease.uuid in wanted]
    chosen = [gpu for gpu in session.node.gpus if not wanted or gpu.uuid in wanted]
    if mine:
        shown = [lease for lease in shown if lease.uid == os.geteuid()]
    ceilings = [] if mine else ceiling_reports(chosen)
    report = LeasesReport(at=now(), leases=shown, ceilings=ceilings)

    def lines() -> list[str]:
        said = table_of(LEASE, shown) if shown else ["no leases"]
        return [*said, "", *table_of(CEILING, ceilings)] if ceilings else said

    session.answer(report, lines)


def read(session: Session, gpus: str, processes: bool = False) -> StatusReport:
    """The node as it is now."""
    session.look_again()
    chosen = session.listed(gpus)
    quiesced = session.node.quiesced_ns is not None
    leases = lease_reports(session.client, session.node.gpus, others=True)
    indices = {gpu.index for gpu in chosen} | ({-1} if gpus == "all" else set())
    states, errors = ({}, {}) if quiesced else read_states(session.client, session.node.gpus)
    modules = {gpu.module for gpu in chosen}
    counted = processes and not quiesced
    listed = process_reports(session.client, chosen, leases)[0] if counted else None
    return StatusReport(
        at=now(),
        node=Node.of(
            session.node,
            socket=session.socket,
            leases=sum(not lease.restoring for lease in leases),
            pending_restores=sum(lease.restoring for lease in leases),
        ),
        gpus=[] if quiesced else reports_of(chosen, states, errors, leases, listed),
        leases=[lease for lease in leases if lease.gpu in indices],
        ceilings=ceiling_reports(chosen),
        processes=listed,
        modules=[
            one
            for one in module_reports(session.node.gpus, states)
            if not quiesced and one.module in modules
        ],
    )


def lines(report: StatusReport) -> Iterator[str]:
    """The report for a person."""
    yield headline(report.node)
    yield from (style(problem_text(problem), fg="red") for problem in report.node.problems)
    if report.node.quiesced_s is not None:
        since = duration(report.node.quiesced_s)
        text = f"zeusd closed the driver {since} ago; `zeusctl resume` reopens it."
        yield style(text, fg="yellow")
    elif not report.gpus:
        yield "zeusd sees no GPUs; `zeusctl doctor` says why."
    else:
        yield from table_of(GPU, report.gpus)
        yield from module_lines(report)
        yield from (
            style(f"GPU {gpu.index}: {gpu.error}", fg="red") for gpu in report.gpus if gpu.error
        )
        indices = {gpu.uuid: f"GPU {gpu.index}" for gpu in report.gpus}
        yield from (line for gpu in report.gpus for line in _notes(gpu, indices))
        yield from not_enforced(report.gpus)
    for finding in report.node.findings:
        yield style(f"zeusd.toml: {finding}", fg="yellow")
    if report.leases:
        yield ""
        yield from table_of(LEASE, report.leases)
    for uuid, since_s in missing_gpus(report).items():
        since = "" if since_s is None else f" for {duration(since_s)}"
        text = (
            f"zeusd has not found {uuid}{since}, and restores it when it is back; if it was removed"
        )
        yield style(f"{text} for good: `sudo zeusctl reset {uuid} --forget`", fg="red")
    if report.ceilings:
        yield ""
        yield from table_of(CEILING, report.ceilings)
    if report.processes is not None:
        yield ""
        yield from process_lines(report.processes)


def _notes(gpu: Gpu, names: Mapping[str, str]) -> Iterator[str]:
    """What there is to know of a GPU beside its row."""
    if gpu.power_limit_w.raised:
        then = "zeusd is lowering it"
        if not gpu.power_limit_w.site_enforced:
            then = f"which is not enforced; `zeusctl reset {gpu.index}` lowers it"
        yield style(f"GPU {gpu.index}: its limit is above the site limit, {then}", fg="yellow")
    if gpu.power_of is not None:
        first = names.get(gpu.power_of, gpu.power_of)
        yield f"GPU {gpu.index}: {first} has the power limit, power and energy of both"
    if gpu.persisted:
        what = ", ".join(gpu.persisted)
        yield f"GPU {gpu.index}: persistent {what}; `zeusctl reset {gpu.index}` removes it"


def problem_text(problem: Problem) -> str:
    """What does not work, since when, and what to run."""
    since = duration(problem.since_s)
    return f"{problem.part}: {problem.cause}, for {since}; run `{problem.command}`"


def module_lines(report: StatusReport) -> Iterator[str]:
    """The superchips, and what they draw together."""
    if not report.modules:
        return
    yield ""
    yield from table_of(MODULE, report.modules)
    powers = [module.power_w for module in report.modules]
    if len(powers) > 1 and None not in powers:
        total = number(sum(power or 0 for power in powers), "W")
        yield f"{total} in {count(len(powers), 'module')}"
    for gpu in report.gpus:
        if gpu.energy_scope in COUNTS:
            yield f"GPU {gpu.index}: its energy counter counts {COUNTS[gpu.energy_scope]}"


def headline(node: Node) -> str:
    """The daemon in one line."""
    driver = f"driver {node.driver_version}" if node.driver_version else "no driver"
    if node.simulated:
        driver = "simulated GPUs"
    parts = [f"zeusd {node.daemon_version}: {count(node.gpus, 'GPU')}", count(node.leases, "lease")]
    if node.pending_restores:
        parts.append(style(count(node.pending_restores, "pending restore"), fg="red"))
    parts += [driver, f"up {duration(node.uptime_s)}", f"at {node.socket}"]
    room = screen_width()
    while room and len(plain(", ".join(parts))) > room and len(parts) > 1:
        parts.pop()
    return ", ".join(parts)


def not_enforced(gpus: Sequence[Gpu | KnownGpu]) -> Iterator[str]:
    """Returns a line about site limits that are not enforced."""
    indices = [gpu.index for gpu in gpus if is_cap_only(gpu.power_limit_w)]
    if indices:
        yield (
            f"The site limit of {gpus_text(indices)} is not enforced: zeusd sets nothing above it, "
            "but does not lower what others set (`enforce = true` in zeusd.toml does)."
        )


def missing_gpus(report: StatusReport) -> dict[str, float | None]:
    """UUIDs of GPUs that zeusd does not find, unlike others, and has to restore; for how long."""
    waiting = [lease for lease in report.leases if lease.gpu < 0 and lease.restoring]
    return {one.uuid: one.pending_s for one in waiting if report.node.gpus}


@verb()
@gpus_argument()
@output_options(PROCESS)
def processes(session: Session, gpus: str, output: Output[Any]) -> None:
    """List processes on the GPUs, with user and GPU memory.

    TYPE is C for compute, G for graphics. Only administrators see pids, commands and jobs of other
    users. The list is at most one second old.
    """
    output.run(
        lambda: _read_processes(session, gpus),
        _processes_lines,
        lambda report: report.processes,
    )


def _read_processes(session: Session, gpus: str) -> ProcessesReport:
    session.look_again()
    chosen = session.gpus(gpus)
    leases = lease_reports(session.client, session.node.gpus)
    reports, errors = process_reports(session.client, chosen, leases)
    return ProcessesReport(at=now(), processes=reports, errors=errors)


def _processes_lines(report: ProcessesReport) -> list[str]:
    failed = [style(error, fg="red") for error in report.errors]
    return [*process_lines(report.processes), *failed] if report.processes or not failed else failed


def process_lines(rows: Sequence[Process], width: int | None = None) -> list[str]:
    """Processes as a table."""
    return table_of(PROCESS, rows, width) if rows else ["no process uses these GPUs"]


@verb()
@gpus_argument()
@output_options(KNOWN_GPU)
def gpus(session: Session, gpus: str, output: Output[Any]) -> None:
    """List GPUs: names, UUIDs, and the limits they accept."""
    output.run(lambda: _read_gpus(session, gpus), _gpus_lines, lambda report: report.gpus)


def _read_gpus(session: Session, gpus: str) -> GpusReport:
    session.look_again()
    return GpusReport(at=now(), gpus=[KnownGpu.of(gpu) for gpu in session.listed(gpus)])


def _gpus_lines(report: GpusReport) -> list[str]:
    return [*table_of(KNOWN_GPU, report.gpus), *not_enforced(report.gpus)]

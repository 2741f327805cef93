"""`zeusctl show`: everything about one GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

from zeus_ipc.controls import SPECS, Control
from zeus_ipc.errors import ZeusIpcError
from zeusctl.arguments import gpus_argument
from zeusctl.columns import Output, entry, output_options, page
from zeusctl.columns import lines as table_of
from zeusctl.commands.status import process_lines
from zeusctl.commands.status import read as read_status
from zeusctl.entities import CEILING, GPU, LEASE, KnownGpu, Permitted, span
from zeusctl.exits import USAGE, CommandError
from zeusctl.reports import SHOW, ShowReport
from zeusctl.session import Session, now, verb
from zeusctl.text import style
from zeusctl.views import ceiling_reports, gpu_reports, lease_reports, process_reports


@verb()
@gpus_argument()
@output_options(GPU)
def show(session: Session, gpus: str, output: Output[Any]) -> None:
    """Show one GPU: limits, sensors, processes, leases, rights.

    With --columns or --format csv, print a row as in `zeusctl status`.
    """
    read: Callable[..., Any] = partial(read_status, processes=True) if output.rows else _read
    output.run(lambda: read(session, gpus), _lines, lambda report: report.gpus)


def _read(session: Session, gpus: str) -> ShowReport:
    session.look_again()
    if gpus == "all" and len(session.node.gpus) > 1:
        raise click.UsageError("name a GPU: zeusctl show 0")
    chosen = session.gpus(gpus)
    if len(chosen) > 1:
        raise CommandError("show is about one GPU; name one (`zeusctl status` shows all)", USAGE)
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
        processes=process_reports(client, [gpu], leases)[0],
        ceilings=ceiling_reports([gpu]),
    )


def _last_hour(session: Session, uuid: str) -> float | None:
    try:
        known = session.client.windows(uuid)[uuid]
        end_ns = time.monotonic_ns()
        # One tick later than reported: the first moment is an estimate, and may move forward
        # between two requests; the second would then fail because its time is too early.
        begin_ns = max(known.begins_ns + known.tick_ns, end_ns - (3600 * 10**9))
        energy_uj = session.client.windows(uuid, [(begin_ns, end_ns, False)])[uuid].energy_uj[0]
    except ZeusIpcError:
        return None
    return None if energy_uj is None else round(energy_uj / 1e6, 3)


def _lines(report: ShowReport) -> Iterator[str]:
    yield style(f"GPU {report.known.index}: {report.known.name}", bold=True)
    if report.now.error is not None:
        yield style(report.now.error, fg="red")
    yield from page(GPU, report.now)
    yield from page(SHOW, report)
    yield ""
    if report.processes:
        yield from process_lines(report.processes)
        yield ""
    yield "You may change:"
    yield from (entry(one.control, _may(one)) for one in report.you_may)
    yield ""
    if report.leases:
        yield from table_of(LEASE, report.leases)
    else:
        yield "Nobody holds a lease on it."
    if report.ceilings:
        yield ""
        yield from table_of(CEILING, report.ceilings)


def _may(one: Permitted) -> str:
    if not one.allowed:
        return f"no: {one.why}"
    unit = SPECS[Control(one.control)].unit
    return " or ".join(span(low, high, unit) for low, high in one.ranges) or "yes"

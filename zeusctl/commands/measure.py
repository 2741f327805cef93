"""`zeusctl measure`: the energy of a command."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_ipc.options import FILE
from zeusctl.arguments import CommandVerb, command_argument, gpus_argument
from zeusctl.exits import CommandError, Exit, check_writable, writing
from zeusctl.running import run
from zeusctl.session import TIMEOUT_S, Session, common_options, now, pass_session
from zeusctl.text import style, table

if TYPE_CHECKING:
    from zeusctl.entities import Measured
    from zeusctl.reports import MeasureReport

GONE_S = 0.7
"""How long to wait for a zeusd that may be restarting when the command has ended."""


@click.command(cls=CommandVerb)
@gpus_argument()
@command_argument(required=True)
@click.option(
    "--cpu/--no-cpu", default=True, help="Include CPU, DRAM and module energy where available."
)
@click.option(
    "--best-effort",
    is_flag=True,
    help="Run COMMAND even if nothing can be measured, with a warning.",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    help="Write the result to this file.  [default: standard error]",
)
@common_options
@pass_session
def measure(
    session: Session,
    gpus: str,
    command: tuple[str, ...],
    cpu: bool,
    best_effort: bool,
    output: Path | None,
) -> None:
    """Run a command, and print the energy that the GPUs drew.

    Energy is that of the whole GPU, including other processes. The exit code is the command's. The
    result goes to standard error, because standard output belongs to the command.

    \b
    zeusctl measure -- python train.py --epochs 1
    zeusctl measure 0,1 -o energy.txt -- ./job.sh
    """
    from zeus_ipc.circuit import bounded
    from zeus_ipc.errors import ZeusIpcError

    try:
        if output is not None:
            check_writable(output)
        names = _sources(session, gpus, cpu)
    except (CommandError, ZeusIpcError, OSError) as error:
        message = session.readable(getattr(error, "message", None) or str(error))
        if isinstance(error, OSError):
            message = f"{output}: {error.strerror}"
        if not best_effort:
            code = getattr(error, "code", "failed")
            raise CommandError(message, Exit.NOT_RUN, code) from None
        warning = f"zeusctl: warning: nothing is measured ({message}); running the command anyway"
        click.echo(warning, err=True)
        click.get_current_context().exit(run(command))
    begin_ns = time.monotonic_ns()
    code = run(command)
    end_ns = time.monotonic_ns()
    seconds = (end_ns - begin_ns) / 1e9
    with contextlib.suppress(ZeusIpcError), bounded(GONE_S):
        session.client.heartbeat()
    with bounded(TIMEOUT_S):  # not at all if zeusd did not answer that
        sources = [
            _measured(session, source, name, begin_ns, end_ns) for source, name in names.items()
        ]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    notes = []
    if gpus == "all":
        notes = [
            f"GPU {gpu.index} ({gpu.name}) has no sensor of energy or power, and is not counted"
            for gpu in session.node.gpus
            if gpu.uuid not in names
        ]
        if len(session.node.gpus) > 1 and listed is not None:
            notes.append(
                f"all GPUs are counted, not only CUDA_VISIBLE_DEVICES={listed}; name GPUs before "
                "`--` to count fewer"
            )
    _answer(session, command, code, seconds, sources, output, notes)
    click.get_current_context().exit(code)


def _sources(session: Session, gpus: str, cpu: bool) -> dict[str, str]:
    """The names of what is measured, by source.

    Raises:
        CommandError, ZeusIpcError: Nothing can be measured.
    """
    from zeus_ipc.errors import SeveralGpusFailed

    chosen = session.gpus(gpus)
    if session.node.quiesced_ns is not None:
        message = "zeusd is quiesced and samples nothing; run `zeusctl resume` first"
        raise CommandError(message, Exit.PENDING, "quiesced")
    names = {gpu.uuid: f"gpu:{gpu.index}" for gpu in chosen}
    if cpu:
        for package in session.node.cpus:
            names[f"cpu:{package.index}"] = f"cpu:{package.index}"
            if package.dram:
                names[f"dram:{package.index}"] = f"dram:{package.index}"
        for module in sorted({gpu.module for gpu in chosen if gpu.module is not None}):
            names[f"module:{module}"] = f"module:{module}"
    try:
        session.client.windows(list(names))
    except SeveralGpusFailed as error:
        if len(error.errors) == len(names):
            raise
        for gpu in chosen if gpus == "all" else ():
            if gpu.uuid in error.errors and not gpu.has_sensor:
                del names[gpu.uuid]  # a display card
    return names


def _measured(session: Session, source: str, name: str, begin_ns: int, end_ns: int) -> Measured:
    """Returns one source's energy. An error in one must not hide the others."""
    from zeus_ipc.errors import ZeusIpcError
    from zeusctl.entities import Measured

    energy_j = uncertainty_j = power_w = trouble = None
    try:
        found = session.client.windows(source, [(begin_ns, end_ns, False)])[source]
        microjoules = found.energy_uj[0]
        if microjoules is None:
            trouble = "its history begins after the command did"
        else:
            energy_j = microjoules / 1e6
            uncertainty_j = found.uncertainty_uj[0] / 1e6
            power_w = energy_j / max(1e-9, (end_ns - begin_ns) / 1e9)
    except ZeusIpcError as error:
        trouble = session.readable(error.message)
    return Measured(
        source=name,
        uuid=source if name.startswith("gpu:") else None,
        energy_j=energy_j,
        uncertainty_j=uncertainty_j,
        average_power_w=power_w,
        trouble=trouble,
    )


def _answer(
    session: Session,
    command: Sequence[str],
    code: int,
    seconds: float,
    sources: list[Measured],
    output: Path | None,
    notes: Sequence[str],
) -> None:
    from zeusctl.reports import MeasureReport

    gpus = [one.energy_j for one in sources if one.source.startswith("gpu:")]
    known = [energy for energy in gpus if energy is not None]
    report = MeasureReport(
        at=now(),
        command=list(command),
        exit_code=code,
        time_s=round(seconds, 6),
        sources=sources,
        gpu_energy_j=sum(known) if len(known) == len(gpus) else None,
    )
    if output is None:
        session.answer(report, lambda: _lines(report, notes), err=True)
    else:
        lines = [report.json()] if session.json else _lines(report, notes)
        with writing(output):
            output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _lines(report: MeasureReport, notes: Sequence[str]) -> Iterator[str]:
    yield ""
    yield f"  {' '.join(report.command)}"
    yield ""
    rows = []
    for one in report.sources:
        if one.energy_j is None or one.uncertainty_j is None:
            rows.append([f"  {one.source}", "-", "", "", style(one.trouble or "", fg="red")])
        else:
            rows.append(
                [
                    f"  {one.source}",
                    f"{one.energy_j:.2f}",
                    f"± {one.uncertainty_j:.2f}",
                    f"{one.average_power_w:.2f}",
                    "",
                ]
            )
    yield from table(("  SOURCE", "ENERGY (J)", "", "AVERAGE (W)", ""), rows, (1, 2, 3))
    yield ""
    if report.gpu_energy_j is not None:
        yield f"  all GPUs: {report.gpu_energy_j:.2f} J in {report.time_s:.3f} s"
    else:
        yield f"  {report.time_s:.3f} s"
    yield from (f"  {note}" for note in notes)
    if report.exit_code:
        yield f"  the command ended with code {report.exit_code}"
    yield ""

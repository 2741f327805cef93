"""`zeusctl measure`: the energy of a command."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from zeus_common.checks import each_of
from zeus_common.options import FILE, option
from zeus_ipc.circuit import bounded
from zeus_ipc.errors import ErrorCode, ZeusIpcError
from zeusctl.arguments import CommandVerb, command_argument, gpus_argument
from zeusctl.columns import lines as table_of
from zeusctl.entities import MEASURED, Limited, Measured
from zeusctl.exits import CommandError, check_writable, writing
from zeusctl.reports import MeasureReport
from zeusctl.running import run, without
from zeusctl.session import TIMEOUT_S, Session, now, verb
from zeusctl.text import style


@verb(cls=CommandVerb)
@gpus_argument()
@command_argument(required=True)
@option("--cpu/--no-cpu", "Include CPU, DRAM and module energy where available.", default=True)
@option("--best-effort", "Run COMMAND even if nothing can be measured, with a warning.", bool)
@option("-o --output", "Write the result to this file.  [default: standard error]", FILE)
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
    try:
        if output is not None:
            check_writable(output)
        names = _sources(session, gpus, cpu)
    except (CommandError, ZeusIpcError, OSError) as error:
        without(session, command, "nothing is measured", error, best_effort)
    begin_ns = time.monotonic_ns()
    code = run(command)
    end_ns = time.monotonic_ns()
    # How long to wait for a zeusd that may be restarting when the command has ended.
    with contextlib.suppress(ZeusIpcError), bounded(0.7):
        session.client.heartbeat()
    with bounded(TIMEOUT_S):  # not at all if zeusd did not answer that
        sources = [
            _measured(session, source, name, begin_ns, end_ns) for source, name in names.items()
        ]
    gpu_j = [source.energy_j for source in sources if source.source.startswith("gpu:")]
    known_j = [energy_j for energy_j in gpu_j if energy_j is not None]
    report = MeasureReport(
        at=now(),
        command=list(command),
        exit_code=code,
        time_s=round((end_ns - begin_ns) / 1e9, 6),
        sources=sources,
        gpu_energy_j=sum(known_j) if len(known_j) == len(gpu_j) else None,
    )
    notes = _notes(session, names) if gpus == "all" else []
    if output is None:
        session.answer(report, lambda: _lines(report, notes), err=True)
    else:
        lines = [report.json()] if session.json else _lines(report, notes)
        with writing(output):
            output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    click.get_current_context().exit(code)


def _notes(session: Session, names: Mapping[str, str]) -> list[str]:
    """What is not counted of all GPUs, or is though the command does not see it."""
    notes = [
        f"GPU {gpu.index} ({gpu.name}) has no sensor of energy or power, and is not counted"
        for gpu in session.node.gpus
        if gpu.uuid not in names
    ]
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if len(session.node.gpus) > 1 and listed is not None:
        notes.append(
            f"all GPUs are counted, not only CUDA_VISIBLE_DEVICES={listed}; name GPUs before `--` "
            "to count fewer"
        )
    return notes


def _sources(session: Session, gpus: str, cpu: bool) -> dict[str, str]:
    """The names of what is measured, by source.

    Raises:
        CommandError, ZeusIpcError: Nothing can be measured.
    """
    chosen = session.gpus(gpus)
    if session.node.quiesced_ns is not None:
        message = "zeusd is quiesced and samples nothing; run `zeusctl resume` first"
        raise CommandError(message, ErrorCode.QUIESCED)
    names = {gpu.uuid: f"gpu:{gpu.index}" for gpu in chosen}
    if cpu:
        for package in session.node.cpus:
            names[f"cpu:{package.index}"] = f"cpu:{package.index}"
            if package.dram:
                names[f"dram:{package.index}"] = f"dram:{package.index}"
        for module in sorted({gpu.module for gpu in chosen if gpu.module is not None}):
            names[f"module:{module}"] = f"module:{module}"
    failed: dict[str, Exception] = {**each_of(session.client.windows, list(names))[1]}
    for gpu in chosen if gpus == "all" else ():
        if gpu.uuid in failed and not gpu.has_sensor:
            del names[gpu.uuid]  # a display card
    for problem in session.node.problems:
        if problem.code:  # of the driver: a lost GPU has a past, but no present
            cause = CommandError(f"{session.readable(problem.cause)}; run `{problem.command}`")
            failed.setdefault(problem.source, cause)
    wanted = names.keys() & {gpu.uuid for gpu in chosen} or names.keys()
    if wanted <= failed.keys():
        raise next(failed[one] for one in failed if one in wanted or not wanted)
    return names


def _measured(session: Session, source: str, name: str, begin_ns: int, end_ns: int) -> Measured:
    """Returns one source's energy. An error in one must not hide the others."""
    energy_j = uncertainty_j = limited = trouble = None
    try:
        window = (begin_ns, end_ns, False)
        energies = session.client.windows(source, [window], limited=name.startswith("gpu:"))[source]
        if energies.energy_uj[0] is None:
            trouble = "its history begins after the command did"
        else:
            energy_j, uncertainty_j = energies.energy_uj[0] / 1e6, energies.uncertainty_uj[0] / 1e6
            limited = Limited.of(energies) if energies.limited_ms else None
    except ZeusIpcError as error:
        trouble = session.readable(error.message)
    return Measured(
        source=name,
        uuid=source if name.startswith("gpu:") else None,
        energy_j=energy_j,
        uncertainty_j=uncertainty_j,
        average_power_w=None if energy_j is None else energy_j / max(1, end_ns - begin_ns) * 1e9,
        limited=limited,
        trouble=trouble,
    )


def _lines(report: MeasureReport, notes: Sequence[str]) -> Iterator[str]:
    yield ""
    yield f"  {' '.join(report.command)}"
    yield ""
    yield from (f"  {line}" for line in table_of(MEASURED, report.sources, 0))
    for source in report.sources:
        if source.trouble:
            yield style(f"  {source.source}: {source.trouble}", fg="red")
    yield ""
    if report.gpu_energy_j is not None:
        yield f"  all GPUs: {report.gpu_energy_j:.2f} J in {report.time_s:.3f} s"
    else:
        yield f"  {report.time_s:.3f} s"
    yield from (f"  {note}" for note in notes)
    if report.exit_code:
        yield f"  the command ended with code {report.exit_code}"
    yield ""

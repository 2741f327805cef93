"""`zeusctl plot`: draw history, and the energy and time per power limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zeus_ipc.options import FILE
from zeusctl.arguments import Duration, gpus_argument, without_effect
from zeusctl.exits import CommandError
from zeusctl.session import Session, common_options, now, pass_session
from zeusctl.text import indices

if TYPE_CHECKING:
    from zeusctl.plots import Track


@click.command()
@gpus_argument()
@click.option(
    "-o",
    "--output",
    required=True,
    type=FILE,
    help="Output file: .png, .svg or .pdf.",
)
@click.option(
    "--last", type=Duration(), default="10m", show_default=True, help="Time span: 30s, 10m, 6h, 3d."
)
@click.option(
    "--recording",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw a file that `zeusctl record` wrote, instead of zeusd's history.",
)
@click.option(
    "--profile",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Draw a profile of the power limit optimizer: time and energy per limit.",
)
@common_options
@pass_session
def plot(
    session: Session,
    gpus: str,
    output: Path,
    last: float,
    recording: Path | None,
    profile: Path | None,
) -> None:
    """Draw power, limits and clocks, or energy and time per limit.

    \b
    zeusctl plot -o node.png --last 1h
    zeusctl plot 0,1 -o run.svg --recording run.csv
    zeusctl plot -o tradeoff.png --profile power_limits.json
    """
    from zeusctl import plots

    if output.suffix not in plots.ENDINGS:
        endings = ", ".join(plots.ENDINGS)
        raise click.BadParameter(f"name a file that ends in {endings}", param_hint="-o")
    if recording is not None:
        without_effect("with --recording", "--profile", "--last")
    if profile is not None:
        without_effect("with --profile", "GPUS", "--last")
    from zeus_ipc.tables import distinct
    from zeusctl.reports import Done

    distinct((recording, profile), (output,))
    plots.check_available()
    if profile is not None:
        drawn = plots.draw_profile(_measurements(profile), output)
    else:
        tracks = (
            _from_recording(recording, gpus)
            if recording is not None
            else _from_history(session, gpus, last)
        )
        drawn = plots.draw_tracks(tracks, output)
    session.answer(Done(at=now(), path=str(output), rows=drawn), [f"{drawn} points in {output}"])


def _from_history(session: Session, gpus: str, last_s: float) -> list[Track]:
    from zeusctl.plots import Track

    now_ns, now_s = time.monotonic_ns(), time.time()
    start_ns = max(0, now_ns - round(last_s * 1e9))

    def line(uuid: str, domain: str, factor: float) -> list[tuple[float, float]]:
        found = session.client.timeline(uuid, domain, start_ns)
        return [(now_s - (now_ns - t_ns) / 1e9, value * factor) for t_ns, value in found]

    return [
        Track(
            name=f"GPU {gpu.index}",
            power_w=line(gpu.uuid, "power", 1e-3),
            limit_w=line(gpu.uuid, "power_limit", 1e-3),
            gpu_clock_mhz=line(gpu.uuid, "gpu_clock", 1),
            memory_clock_mhz=line(gpu.uuid, "memory_clock", 1),
        )
        for gpu in session.gpus(gpus)
    ]


def _from_recording(path: Path, gpus: str) -> list[Track]:
    from zeusctl.plots import Track
    from zeusctl.recording import read

    recordings = read(path)
    there = {recording.gpu for recording in recordings}
    wanted = sorted(there) if gpus == "all" else indices(gpus)
    if wanted is None:
        raise CommandError(f"{gpus!r} is no index; name GPUs of a recording as 0,2 or 0-3")
    if not there.issuperset(wanted):
        found = ", ".join(str(index) for index in sorted(there))
        raise CommandError(f"{path} only has samples of GPUs {found}; choose among these")

    def line(columns: dict[str, list[float | None]], name: str) -> list[tuple[float, float]]:
        pairs = zip(columns["time"], columns[name], strict=True)
        return [(t, value) for t, value in pairs if t is not None and value is not None]

    return [
        Track(
            name=f"GPU {recording.gpu}",
            power_w=line(recording.columns, "power_w"),
            limit_w=line(recording.columns, "power_limit_w"),
            gpu_clock_mhz=line(recording.columns, "gpu_clock_mhz"),
            memory_clock_mhz=line(recording.columns, "memory_clock_mhz"),
        )
        for recording in recordings
        if recording.gpu in wanted
    ]


def _measurements(path: Path) -> Sequence[tuple[float, float, float]]:
    """Limit (W), time (s) and energy (J) of each measurement."""
    from zeus.optimizer.power_limit.profile import ProfileError, load

    try:
        found = load(path).measurements
    except ProfileError as error:
        raise CommandError(str(error)) from None
    return sorted((one.power_limit, one.time, one.energy) for one in found)

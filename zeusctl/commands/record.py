"""`zeusctl record` and `plot`: write samples to a file, and draw them."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeus_common.epoch import offset_ns
from zeus_common.options import EXISTING_FILE, FILE, OUTPUT, option
from zeus_common.text import count
from zeusctl import plots
from zeusctl.arguments import Duration, gpus_argument, without_effect
from zeusctl.entities import RecordedSample
from zeusctl.exits import CommandError, writing
from zeusctl.plots import Track
from zeusctl.running import asked_to_end
from zeusctl.session import Session, verb
from zeusctl.text import indices

if TYPE_CHECKING:
    from zeusctl.recording import Writer


@verb()
@gpus_argument()
@option(
    "-o --output",
    "Output file; .parquet selects Parquet.  [default: CSV on standard output]",
    OUTPUT,
)
@option("--format form", "Output format, overriding the file extension.", ("csv", "parquet"))
@option("-d --duration", "Stop after 30s, 10m, 2h.", Duration())
@option("--every", "Write one sample per GPU every 1s, 10s.", Duration())
def record(
    session: Session,
    gpus: str,
    output: Path | None,
    form: str | None,
    duration: float | None,
    every: float | None,
) -> None:
    """Write every sample to CSV or Parquet, until Ctrl-C.

    Power, energy, limit, clocks and temperature: one row per update of a GPU's sensors, 10 to 50 a
    second. `zeusctl plot --recording FILE` draws it.
    """
    from zeusctl.recording import writer_for

    if session.json and output is None:
        raise click.UsageError("--json reports what was written: name a file with -o")
    chosen = session.gpus(gpus)
    index = {gpu.uuid: gpu.index for gpu in chosen}
    # Checked before a file is created: if recording is impossible, no file is left behind.
    with (
        session.client.stream(list(index), buffer=10_000) as stream,
        asked_to_end() as ended,
        writing(output),
        contextlib.closing(writer_for(output, form)) as writer,
    ):
        rows, lost = _copy(stream, writer, index, duration, every, ended)
    if lost:
        click.echo(f"zeusctl: missed {count(lost, 'sample')}; this machine was too busy", err=True)
    if output is not None:
        session.done(output, rows, f"{count(rows, 'sample')} in {output}", err=not session.json)
    click.get_current_context().exit(ended.code)


def _copy(
    stream: Any,
    writer: Writer,
    index: dict[str, int],
    duration_s: float | None,
    every_s: float | None,
    ended: threading.Event,
) -> tuple[int, int]:
    """Write rows from the stream. Return how many, and how many samples were missed."""
    begin_s = flushed_s = time.monotonic()
    next_s = dict.fromkeys(index, 0.0)
    rows = lost = 0
    while not ended.is_set():
        now_s = time.monotonic()
        if duration_s is not None and now_s - begin_s >= duration_s:
            break
        if now_s - flushed_s > 1.0:
            writer.flush()
            flushed_s = now_s
        sample = stream.receive(0.1)
        if sample is None:
            continue
        lost += sample.lost
        if every_s is not None:
            if sample.t_ns / 1e9 < next_s[sample.gpu]:
                continue
            next_s[sample.gpu] = sample.t_ns / 1e9 + every_s
        at_s = round((sample.t_ns + offset_ns()) / 1e9, 6)
        writer.write(vars(RecordedSample.of(sample, time=at_s, gpu=index[sample.gpu])))
        rows += 1
    if not rows:
        raise CommandError("no sample arrived; run `zeusctl doctor`, or record for longer")
    return rows, lost


@verb()
@gpus_argument()
@option("-o --output", "Output file: .png, .svg or .pdf.", FILE, required=True)
@option("--last", "Time span: 30s, 10m, 6h, 3d.", Duration(), "10m")
@option(
    "--recording",
    "Draw a file that `zeusctl record` wrote, instead of zeusd's history.",
    EXISTING_FILE,
)
@option(
    "--profile",
    "Draw a profile of the power limit optimizer: time and energy per limit.",
    EXISTING_FILE,
)
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
    from zeus_common.tables import distinct

    if recording is not None:
        without_effect("with --recording", "--profile", "--last")
    if profile is not None:
        without_effect("with --profile", "GPUS", "--last")
    distinct((recording, profile), (output,))
    plots.check_available(output, "-o")
    if profile is not None:
        drawn = _draw_profile(profile, output)
    else:
        tracks = (
            _from_recording(recording, gpus)
            if recording is not None
            else _from_history(session, gpus, last)
        )
        drawn = plots.draw_tracks(tracks, output)
    session.done(output, drawn, f"{drawn} points in {output}")


_LINES = {"power": "power_w", "power_limit": "power_limit_w"}
_LINES |= {f"{one}_clock": f"{one}_clock_mhz" for one in ("gpu", "memory")}
"""Readings of zeusd's history, and the columns of a recording and fields of `Track` with them."""


def _from_history(session: Session, gpus: str, last_s: float) -> list[Track]:
    now_ns, now_s = time.monotonic_ns(), time.time()
    start_ns = max(0, now_ns - round(last_s * 1e9))

    def line(uuid: str, domain: str) -> list[tuple[float, float]]:
        scale = 1000 if domain.startswith("power") else 1
        points = session.client.timeline(uuid, domain, start_ns)
        return [(now_s - (now_ns - t_ns) / 1e9, value / scale) for t_ns, value in points]

    return [
        Track(f"GPU {gpu.index}", **{name: line(gpu.uuid, of) for of, name in _LINES.items()})
        for gpu in session.gpus(gpus)
    ]


def _from_recording(path: Path, gpus: str) -> list[Track]:
    from zeusctl.recording import read

    recordings = read(path)
    there = {recording.gpu for recording in recordings}
    wanted = sorted(there) if gpus == "all" else indices(gpus)
    if wanted is None:
        raise CommandError(f"{gpus!r} is no index; name GPUs of a recording as 0,2 or 0-3")
    if not there.issuperset(wanted):
        available = ", ".join(str(index) for index in sorted(there))
        raise CommandError(f"{path} only has samples of GPUs {available}; choose among these")

    def line(columns: dict[str, list[float | None]], name: str) -> list[tuple[float, float]]:
        pairs = zip(columns["time"], columns[name], strict=True)
        return [(t, value) for t, value in pairs if t is not None and value is not None]

    return [
        Track(
            f"GPU {recording.gpu}",
            **{name: line(recording.columns, name) for name in _LINES.values()},
        )
        for recording in recordings
        if recording.gpu in wanted
    ]


def _draw_profile(path: Path, output: Path) -> int:
    """Draws a profile's settings. Returns how many there are."""
    from zeus.optimizer.power_limit.profile import ProfileError, ProfileFile
    from zeus.optimizer.power_limit.report import Report

    try:
        profile = ProfileFile(path).load(path)
    except ProfileError as error:
        raise CommandError(str(error)) from None
    estimates = profile.estimates()
    Report(estimates, None, profile.position).draw(output, ", ".join(profile.gpus or [path.name]))
    return len(estimates)

"""`zeusctl plot`: draw history, and the energy and time per power limit."""

from __future__ import annotations

import time
from pathlib import Path

from zeus_ipc.options import EXISTING_FILE, FILE, option
from zeusctl import plots
from zeusctl.arguments import Duration, gpus_argument, without_effect
from zeusctl.exits import CommandError
from zeusctl.plots import Track
from zeusctl.session import Session, verb
from zeusctl.text import indices


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
    from zeus_ipc.tables import distinct

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
        found = session.client.timeline(uuid, domain, start_ns)
        return [(now_s - (now_ns - t_ns) / 1e9, value / scale) for t_ns, value in found]

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
        found = ", ".join(str(index) for index in sorted(there))
        raise CommandError(f"{path} only has samples of GPUs {found}; choose among these")

    def line(columns: dict[str, list[float | None]], name: str) -> list[tuple[float, float]]:
        pairs = zip(columns["time"], columns[name], strict=True)
        return [(t, value) for t, value in pairs if t is not None and value is not None]

    return [
        Track(f"GPU {one.gpu}", **{name: line(one.columns, name) for name in _LINES.values()})
        for one in recordings
        if one.gpu in wanted
    ]


def _draw_profile(path: Path, output: Path) -> int:
    """Draws a profile's settings. Returns how many there are."""
    from zeus.optimizer.power_limit.profile import ProfileError, load
    from zeus.optimizer.power_limit.report import Report

    try:
        found = load(path)
    except ProfileError as error:
        raise CommandError(str(error)) from None
    estimates = found.estimates()
    Report(estimates, None, found.position).draw(output, ", ".join(found.gpus or [path.name]))
    return len(estimates)

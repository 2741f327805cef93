"""`zeusctl record`: write samples to a file, until stopped."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeus_ipc.epoch import offset_ns
from zeus_ipc.options import OUTPUT, option
from zeus_ipc.text import count
from zeusctl.arguments import Duration, gpus_argument
from zeusctl.entities import RecordedSample
from zeusctl.exits import CommandError, writing
from zeusctl.running import asked_to_end
from zeusctl.session import Session, verb

if TYPE_CHECKING:
    from zeusctl.recording import Writer

_FLUSH_S = 1.0


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
        if now_s - flushed_s > _FLUSH_S:
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

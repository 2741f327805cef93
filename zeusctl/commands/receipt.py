"""`zeusctl receipt`: what zeusd knows about an interval, as evidence for a published figure."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import click

from zeus_common.evidence import make_receipt
from zeus_common.options import EXISTING_FILE, FILE, Whole, option
from zeus_common.receipts import Receipt, Subject
from zeus_ipc.requests import BUCKET_S
from zeusctl.arguments import gpus_argument, without_effect
from zeusctl.exits import UNKNOWN_JOB, CommandError, Exit, writing
from zeusctl.receipts import (
    aiperf,
    differences,
    energy_and_power,
    inferencex,
    lengths_note,
    page,
)
from zeusctl.reports import ComparisonReport
from zeusctl.session import Session, now, verb
from zeusctl.usage import instant

WRITERS: dict[str, Callable[[Receipt], str]] = {
    "text": lambda one: "\n".join(page(one)),
    "json": Receipt.json_text,
    "inferencex": lambda one: json.dumps(inferencex(one)),
    "aiperf": lambda one: json.dumps(aiperf(one)),
}


@verb()
@gpus_argument()
@option("--since", "Start: 10m (ago), 2026-11-01T12:00.  [default: that of the job or process]")
@option("--until", "End.  [default: that of the job or process, or now]")
@option("--job", "Only the GPUs of this job; what else used them is named.", metavar="ID")
@option("--pid", "The same for a process.", Whole(1, 2**31 - 1))
@option("--format form", "Output format.", (*WRITERS,), "text")
@option("-o --output", "Write the receipt to this file, as JSON.", FILE)
@option("--compare", "Say whether two receipts are comparable.", EXISTING_FILE, nargs=2)
def receipt(
    session: Session,
    gpus: str,
    since: str | None,
    until: str | None,
    job: str | None,
    pid: int | None,
    form: str,
    output: Path | None,
    compare: tuple[Path, Path] | None,
) -> None:
    """Show what happened on GPUs in an interval of the past, as evidence for a figure.

    Energy with its uncertainty, gaps in the readings, power limits and clocks and who changed
    them, who used the GPUs, restarts of zeusd, driver and VBIOS. The exit code is 1 if the receipt
    is not valid: something else than the job is known to have affected the energy, or part of it
    is not known. You see what zeusd lets you see.

    \b
    zeusctl receipt 0-3 --since 10m
    zeusctl receipt --job 77 -o receipt.json
    zeusctl receipt --compare before.json receipt.json
    """
    if compare:
        others = ("--since", "--until", "--job", "--pid", "--format", "-o", "GPUS")
        without_effect("with --compare", *others)
        _compare(session, *compare)
        return
    if job is not None and pid is not None:
        without_effect("with --job", "--pid")
    if job == "":
        raise click.UsageError("--job is empty; name one, or omit it")
    subject = Subject("job", job) if job else Subject("process", str(pid)) if pid else Subject()
    if since is None and not subject.kind:
        raise click.UsageError("give --since (10m, or 2026-11-01T12:00), --job or --pid")
    uuids = [gpu.uuid for gpu in session.gpus(gpus)]
    this, this_ns = datetime.now(timezone.utc), time.monotonic_ns()
    try:
        own = (None, None) if since else _span(session, subject)
        begin_ns, end_ns = (
            this_ns
            - round((this - instant(one or default or "now", None, this)).total_seconds() * 1e9)
            for one, default in zip((since, until), own, strict=True)
        )
        made = make_receipt(session.client, begin_ns, end_ns, uuids, subject)
    except LookupError as error:
        raise CommandError(str(error), UNKNOWN_JOB) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if output is not None:
        with writing(output):
            output.write_text(made.json_text() + "\n", encoding="utf-8")
    click.echo(WRITERS["json" if session.json else form](made))
    click.get_current_context().exit(Exit.OK if made.valid else Exit.FAILED)


def _span(session: Session, subject: Subject) -> tuple[str, str]:
    """When the newest run of a job, or a process, used GPUs first and last.

    Raises:
        LookupError: The reader sees none.
    """
    end_s = (int(time.time()) // BUCKET_S + 1) * BUCKET_S
    # How far back a history reaches.
    sums = session.client.usage([end_s - 30 * 86_400, end_s], subject.kind).sums
    runs = [used for used in sums if used.kind == subject.kind and subject.is_user(used)]
    if not runs:
        raise LookupError(
            f"the energy ledger has no {' '.join(subject)} of the last 30 days that you may see; "
            "give --since"
        )
    newest = max(runs, key=lambda one: one.first_ms)
    first, last = (
        datetime.fromtimestamp(ms / 1e3, timezone.utc).isoformat()
        for ms in (newest.first_ms, newest.last_ms)
    )
    return first, last


def _compare(session: Session, *paths: Path) -> None:
    first, second = map(_read, paths)
    reasons = [
        "".join(one if one.isprintable() else "?" for one in text)  # of a file of anyone
        for text in differences(first, second)
    ]
    note = lengths_note(first, second)
    lines = [f"not comparable: {reason}" for reason in reasons]
    if not reasons:
        lines = [f"comparable{note and f', but {note}'}", *energy_and_power(first, second)]
    report = ComparisonReport(at=now(), comparable=not reasons, reasons=reasons, note=note)
    session.answer(report, lines)
    click.get_current_context().exit(Exit.FAILED if reasons else Exit.OK)


def _read(path: Path) -> Receipt:
    try:
        stored = Receipt.model_validate_json(path.read_bytes())
        energy_j = -1.0 if stored.energy_j is None else stored.energy_j
        if stored.valid == bool(stored.reasons) or (stored.valid and not 0 <= energy_j < math.inf):
            raise ValueError
        if not 0 < stored.time_s < math.inf:
            raise ValueError
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        message = f"{path} is not a receipt, or not a whole one; write it with zeusctl receipt -o"
        raise CommandError(message) from None
    return stored

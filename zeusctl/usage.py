"""The intervals of local time and the sums that `zeusctl energy` shows."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from zeus_ipc.charging import Bounds, bounds_of, reason_of
from zeus_ipc.text import count
from zeus_ipc.text import energy as energy_text
from zeusctl.columns import Column, columns_of
from zeusctl.columns import lines as table_of
from zeusctl.entities import UsedEnergy
from zeusctl.reports import EnergyReport
from zeusctl.text import parse_duration, screen_width

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import Usage, UsageSum

KWH_J = 3_600_000
KWH_FROM_J = KWH_J / 10
"""Totals below this are shown in joules."""

NOBODYS = ("idle", "unattributed")
WHOLES = ("gpu", "total")
"""Kinds of sums whose total the meters confirm."""


def zone(name: str | None) -> tzinfo | None:
    """Returns a time zone by name; None: the local one.

    Raises:
        ValueError: There is no such zone.
    """
    if name is None:
        return None
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise ValueError(f"{name!r} is not a time zone; write one such as Europe/Paris") from None


def instant(text: str, where: tzinfo | None, now: datetime) -> datetime:
    """Parses a time: `7d` (ago), `2026-11-01`, `2026-11-01T12:00`, or `now`.

    Raises:
        ValueError: It is none of these.
    """
    if text == "now":
        return now
    try:
        try:
            found = datetime.fromisoformat(text)
        except ValueError:
            found = now - timedelta(seconds=parse_duration(text))
        if not 1970 < found.year < 9999:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write 7d, 2026-11-01 or 2026-11-01T12:00"
        ) from None
    return _local(found, where) if found.tzinfo is None else found


def _local(found: datetime, where: tzinfo | None) -> datetime:
    return found.astimezone() if where is None else found.replace(tzinfo=where)


def edges(since: datetime, until: datetime, where: tzinfo | None, daily: bool) -> list[int]:
    """Returns the ends of the intervals between two times: whole buckets, by local day on request.

    Raises:
        ValueError: The second is not after the first, or that is too many days.
    """
    from zeus_ipc.requests import BUCKET_S, MAX_EDGES

    first = int(since.timestamp()) // BUCKET_S * BUCKET_S
    last = -(-int(until.timestamp()) // BUCKET_S) * BUCKET_S
    if last <= first:
        raise ValueError("the end must be after the beginning")
    found = [first]
    if daily:
        day = since.astimezone(where).replace(
            tzinfo=None, hour=0, minute=0, second=0, microsecond=0
        )
        while True:
            day += timedelta(days=1)
            midnight = int(_local(day, where).timestamp()) // BUCKET_S * BUCKET_S
            if midnight >= last:
                break
            if midnight > found[-1]:
                found.append(midnight)
    found.append(last)
    if len(found) > MAX_EDGES:
        raise ValueError(f"that is over {MAX_EDGES - 1} days; ask for fewer")
    return found


def job_sums(client: Client, kind: str, name: str, run: str | None) -> list[UsedEnergy]:
    """Returns the energy of a job or pod so far, run by run."""
    from zeus_ipc.requests import BUCKET_S

    end = (int(time.time()) // BUCKET_S + 1) * BUCKET_S
    usage = client.usage([0, end], kind, name=name)
    sums = [one for one in usage.sums if run in (None, one.run)]
    return [reported(one, [0, end], None) for one in sums]


def reported(one: UsageSum, ends: Sequence[int], where: tzinfo | None) -> UsedEnergy:
    """Converts a sum to the report's form."""

    def at(t_s: int) -> datetime:
        return datetime.fromtimestamp(t_s, timezone.utc).astimezone(where)

    meet = one.lower_uj == one.upper_uj
    kind = Bounds.EXACT if meet and one.kind in WHOLES else bounds_of(one.methods, meet)
    reason = "" if kind is Bounds.EXACT else reason_of(one.methods)
    return UsedEnergy.of(
        one,
        since=at(ends[one.interval]),
        until=at(ends[one.interval + 1]),
        exact=kind is Bounds.EXACT,
        bounds=kind.value,
        reason=one.name if one.kind == "unattributed" else reason,
        begin=at(one.begin_s) if one.begin_s else None,
        end=at(one.end_s) if one.end_s else None,
    )


def tightened(usage: Usage) -> Usage:
    """Tightens the bounds of the sum of all users: they used what the meters counted, less what was
    idle or unattributed; only that part is uncertain.
    """
    sums = []
    for one in usage.sums:
        if one.kind == "total":
            metered_uj = usage.metered_uj[one.interval]
            rest = [
                other
                for other in usage.sums
                if other.interval == one.interval and other.kind in NOBODYS
            ]
            lower_uj = metered_uj - sum(other.upper_uj for other in rest)
            upper_uj = metered_uj - sum(other.lower_uj for other in rest)
            bounds = {
                "lower_uj": max(one.lower_uj, lower_uj),
                "upper_uj": min(one.upper_uj, upper_uj),
            }
            one = one.model_copy(update=bounds)
        sums.append(one)
    return usage.model_copy(update={"sums": sums})


def label(one: UsedEnergy, gpus: dict[str, int]) -> str:
    """Returns the label of a row."""
    if one.kind in NOBODYS:
        return f"({one.kind}: {one.name})" if one.name else f"({one.kind})"
    if one.kind in ("others", "total"):
        return f"({one.kind})" if one.kind == "others" else "all users"
    if one.kind == "gpu":
        if one.name.startswith("cpu:"):
            return f"CPU {one.name[4:]}"
        return f"GPU {gpus[one.name]}" if one.name in gpus else one.name
    if one.kind == "user":
        return one.user or "?"
    text = f"{one.kind} {one.name}"
    if one.kind == "process":
        text += f" of {one.workload}" if one.workload else ""
    elif one.run not in (None, "0"):
        text += f" run {one.run}"
    return f"{text} ({one.user})" if one.user else text


def lines(sums: Sequence[UsedEnergy], gpus: dict[str, int], metered_j: float | None) -> list[str]:
    """Returns the table, with idle and unattributed energy below it, and the sum compared with the
    meters.
    """

    total_j = sum(one.energy_j for one in sums)
    kwh = total_j >= KWH_FROM_J

    def amount(joules: float) -> str:
        return f"{joules / KWH_J:.2f}" if kwh else f"{joules:.1f}"

    unit = "kWh" if kwh else "J"
    days = len({one.since for one in sums}) > 1

    def bounds(one: UsedEnergy) -> str:
        between = f"[{amount(one.lower_j)}, {amount(one.upper_j)}] {one.bounds}"
        return "exact" if one.exact else between

    columns: list[Column[UsedEnergy]] = [
        Column("", "DAY", lambda one: one.since.strftime("%Y-%m-%d")),
        Column("", "WHO", lambda one: label(one, gpus)),
        Column("", "GPU-HOURS", lambda one: f"{one.gpu_hours:.2f}", spare=2, number=True),
        Column("", f"ENERGY {unit}", lambda one: amount(one.energy_j), number=True),
        Column("", "[LOWER, UPPER]", bounds),
        Column("", "ACTIVE", lambda one: amount(one.active_j), spare=3, number=True),
        Column("", "HELD IDLE", lambda one: amount(one.idle_j), spare=1, number=True),
        Column("", "BASIS", lambda one: ", ".join(one.basis) or "-"),
    ]
    found = table_of(
        columns if days else columns[1:], [one for one in sums if days or one.kind not in NOBODYS]
    )
    rest = [
        f"{label(one, gpus)} {amount(one.energy_j)}"
        for one in sums
        if one.kind in NOBODYS and not days
    ]
    estimates = [*dict.fromkeys(method for one in sums for method in one.basis)]
    notes = [f"{one}: {reason_of([one])}" for one in estimates if reason_of([one])]
    rest.append(f"total {amount(total_j)} {unit}")
    if metered_j is not None:
        rest.append(f"GPU counters {amount(metered_j)} {unit}")
    line, room = "   ".join(rest), screen_width()
    return [*found, *notes, *(rest if 0 < room < len(line) else [line])]


def summary_line(kind: str, name: str, ended: int, sums: Iterable[UsedEnergy]) -> str:
    """Returns one line for a job's log."""

    found = [*sums]
    if not found:
        return f"{kind} {name} held no GPU"
    total_j = sum(one.energy_j for one in found)
    idle_j = sum(one.idle_j for one in found)
    hours = sum(one.gpu_hours for one in found)
    bounds = ""
    if not all(one.exact for one in found):
        low, high = sum(one.lower_j for one in found), sum(one.upper_j for one in found)
        by = bounds_of(method for one in found for method in one.basis).value
        bounds = f" (between {energy_text(low)} and {energy_text(high)} by {by})"
    share = f", {100 * idle_j / total_j:.0f} % while idle" if total_j else ""
    return (
        f"{kind} {name}: {energy_text(total_j)}{bounds} in {hours:.2f} GPU-hours{share}; "
        f"{count(ended, 'GPU')} released"
    )


def check(usage: Usage) -> int:
    """Returns the difference between the sums and the meters, in microjoules."""
    return sum(one.active_uj + one.idle_uj for one in usage.sums) - sum(usage.metered_uj)


def _rows(report: EnergyReport) -> list[dict[str, Any]]:
    sums = json.loads(report.json())["sums"]
    return [{**one, "basis": "+".join(one["basis"])} for one in sums]


def csv_lines(report: EnergyReport) -> list[str]:
    """A heading, and one line for each sum."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [one.name for one in columns_of(UsedEnergy)])
    writer.writeheader()
    writer.writerows(_rows(report))
    return text.getvalue().splitlines()


def write_parquet(report: EnergyReport, path: Path) -> None:
    """One row for each sum; times are texts with their offset from UTC."""
    from zeus_ipc.tables import write

    hints = get_type_hints(UsedEnergy)
    names = [one.name for one in columns_of(UsedEnergy)]
    kinds = {
        name: next((one for one in (float, int, bool) if hints[name] in (one, one | None)), str)
        for name in names
    }
    rows = ([row[name] for name in kinds] for row in _rows(report))
    write(path, kinds, rows, is_parquet=True)

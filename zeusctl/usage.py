"""The intervals of local time and the sums that `zeusctl energy` shows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING, Any, NamedTuple

from zeus_common.text import count
from zeus_common.text import energy as energy_text
from zeus_common.units import KWH_J
from zeus_ipc.charging import ChargeBasis, bounds_of, reason_of
from zeusctl.columns import Column, with_headings
from zeusctl.columns import lines as table_of
from zeusctl.entities import NOBODYS, USED, UsedEnergy, account_text
from zeusctl.text import parse_duration, screen_width

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import Usage, UsageSum

OTHERS = "other accounts"
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
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment = now - timedelta(seconds=parse_duration(text))
        if not 1970 < moment.year < 9999:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time; write 7d, 2026-11-01 or 2026-11-01T12:00"
        ) from None
    return _local(moment, where) if moment.tzinfo is None else moment


def _local(moment: datetime, where: tzinfo | None) -> datetime:
    return moment.astimezone() if where is None else moment.replace(tzinfo=where)


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
    instants = [first]
    if daily:
        day = since.astimezone(where).replace(
            tzinfo=None, hour=0, minute=0, second=0, microsecond=0
        )
        while True:
            day += timedelta(days=1)
            midnight = int(_local(day, where).timestamp()) // BUCKET_S * BUCKET_S
            if midnight >= last:
                break
            if midnight > instants[-1]:
                instants.append(midnight)
    instants.append(last)
    if len(instants) > MAX_EDGES:
        raise ValueError(f"that is over {MAX_EDGES - 1} days; ask for fewer")
    return instants


def job_sums(client: Client, kind: str, name: str, run: str | None) -> list[UsedEnergy]:
    """Returns the energy of a job or pod so far, run by run."""
    from zeus_ipc.requests import BUCKET_S

    end = (int(time.time()) // BUCKET_S + 1) * BUCKET_S
    usage = client.usage([0, end], kind, name=name)
    sums = [used for used in usage.sums if run in (None, used.run)]
    return [reported(used, [0, end], None) for used in sums]


def reported(
    one: UsageSum, ends: Sequence[int], where: tzinfo | None, gpus: Mapping[str, int] | None = None
) -> UsedEnergy:
    """Converts a sum to the report's form.

    Args:
        gpus: Index of each GPU, by UUID.
    """

    def at(t_s: int) -> datetime:
        return datetime.fromtimestamp(t_s, timezone.utc).astimezone(where)

    meet = one.lower_uj == one.upper_uj
    kind = ChargeBasis.EXACT if meet and one.kind in WHOLES else bounds_of(one.methods, meet)
    reason = "" if kind is ChargeBasis.EXACT else reason_of(one.methods)
    return UsedEnergy.of(
        one,
        gpu=(gpus or {}).get(one.name) if one.kind == "gpu" else None,
        since=at(ends[one.interval]),
        until=at(ends[one.interval + 1]),
        exact=kind is ChargeBasis.EXACT,
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
    for used in usage.sums:
        if used.kind == "total":
            metered_uj = usage.metered_uj[used.interval]
            rest = [
                other
                for other in usage.sums
                if other.interval == used.interval and other.kind in NOBODYS
            ]
            lower_uj = metered_uj - sum(other.upper_uj for other in rest)
            upper_uj = metered_uj - sum(other.lower_uj for other in rest)
            bounds = {
                "lower_uj": max(used.lower_uj, lower_uj),
                "upper_uj": min(used.upper_uj, upper_uj),
            }
            used = used.model_copy(update=bounds)
        sums.append(used)
    return usage.model_copy(update={"sums": sums})


class Scale(NamedTuple):
    """How to show energies beside each other."""

    unit: str
    joules: float
    """In one unit."""
    digits: int

    @classmethod
    def of(cls, sums: Iterable[UsedEnergy]) -> Scale:
        """The scale for these sums."""
        kwh = sum(used.energy_j for used in sums) >= KWH_J / 10
        return cls("kWh", KWH_J, 2) if kwh else cls("J", 1, 1)

    def text(self, joules: float) -> str:
        """An energy, without the unit."""
        return f"{joules / self.joules:.{self.digits}f}"


def columns_in(scale: Scale) -> list[Column[UsedEnergy]]:
    """The table's columns; what is exact needs no bounds."""

    def scaled(column: Column[UsedEnergy]) -> Column[UsedEnergy]:
        if column.unit != "j":
            return column
        bound = column.name in ("lower_j", "upper_j")
        return replace(
            column,
            heading=column.heading.replace("ENERGY", f"ENERGY {scale.unit}"),
            text=lambda one: "" if bound and one.exact else scale.text(column.value(one)),
        )

    return [*map(scaled, with_headings(USED))]


def lines(sums: Sequence[UsedEnergy], metered_j: float | None) -> list[str]:
    """Returns the table, with idle and unattributed energy below it, and the sum compared with the
    meters.
    """
    scale = Scale.of(sums)
    day, *others = columns_in(scale)
    days = len({used.since for used in sums}) > 1
    accounts = [used for used in sums if days or used.kind not in NOBODYS]
    table = table_of([day, *others] if days else others, accounts) if accounts else []
    nobodys = () if days else [used for used in sums if used.kind in NOBODYS]
    rest = [f"{account_text(used)} {scale.text(used.energy_j)}" for used in nobodys]
    rest.append(f"total {scale.text(sum(used.energy_j for used in sums))} {scale.unit}")
    if metered_j is not None:
        rest.append(f"GPU counters {scale.text(metered_j)} {scale.unit}")
    line, room = "   ".join(rest), screen_width()
    limited = [f"{account_text(used)}: {', '.join(used.limited)}" for used in sums if used.limited]
    return [*table, *estimates(sums), *limited, *(rest if 0 < room < len(line) else [line])]


def estimates(sums: Iterable[UsedEnergy]) -> list[str]:
    """Why sums are estimates: a line for each method."""
    methods = dict.fromkeys(method for used in sums for method in used.basis)
    return [f"{method}: {reason_of([method])}" for method in methods if reason_of([method])]


def by_day(sums: Iterable[UsedEnergy], most: int) -> dict[str, dict[str, float]]:
    """Energy by account and day, J: the largest accounts, the sum of others, and nobody's."""
    accounts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for used in sums:
        name = f"({used.kind})" if used.kind in NOBODYS else account_text(used)
        accounts[name][f"{used.since:%Y-%m-%d}"] += used.energy_j
    nobodys = {f"({kind})": accounts.pop(f"({kind})", {}) for kind in NOBODYS}
    ranked = sorted(accounts, key=lambda name: -sum(accounts[name].values()))
    others: dict[str, float] = defaultdict(float)
    for name in ranked[most:]:
        for day, joules in accounts[name].items():
            others[day] += joules
    shown = {name: accounts[name] for name in ranked[:most]} | {OTHERS: others} | nobodys
    return {name: days for name, days in shown.items() if days}


def summary_line(kind: str, name: str, ended: int, sums: Iterable[UsedEnergy]) -> str:
    """Returns one line for a job's log."""

    used = [*sums]
    if not used:
        return f"{kind} {name} held no GPU"
    total_j = sum(one.energy_j for one in used)
    idle_j = sum(one.idle_j for one in used)
    hours = sum(one.gpu_hours for one in used)
    bounds = ""
    if not all(one.exact for one in used):
        low, high = sum(one.lower_j for one in used), sum(one.upper_j for one in used)
        by = bounds_of(method for one in used for method in one.basis).value
        bounds = f" (between {energy_text(low)} and {energy_text(high)} by {by})"
    share = f", {100 * idle_j / total_j:.0f} % while idle" if total_j else ""
    if len(used) == 1:
        share += "".join(f", {one}" for one in used[0].limited)
    return (
        f"{kind} {name}: {energy_text(total_j)}{bounds} in {hours:.2f} GPU-hours{share}; "
        f"{count(ended, 'GPU')} released"
    )


def check(usage: Usage) -> int:
    """Returns the difference between the sums and the meters, in microjoules."""
    return sum(used.active_uj + used.idle_uj for used in usage.sums) - sum(usage.metered_uj)


def rows(sums: Iterable[UsedEnergy]) -> Iterator[list[Any]]:
    """Rows for a file, in the order of `USED`; times are texts with their offset from UTC."""
    for used in sums:
        yield [_cell(column.value(used)) for column in USED]


def _cell(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return "+".join(value) if isinstance(value, list) else value

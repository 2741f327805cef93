"""Files of a day's energy, one for each node: written on the node, added up anywhere.

A file has a row for each quarter of an hour and account, and one with what the meters say. A
quarter of an hour of a node is taken from one file only, so that adding a file twice, or an
unfinished day and later the whole, changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeus_common import tables
from zeus_ipc.errors import ErrorCode
from zeusctl.entities import NOBODYS
from zeusctl.exits import UNKNOWN_JOB, CommandError

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import Usage

PREFIX = "energy-"
ENDINGS = (".csv", ".parquet")
METERS = "meters"
"""The kind of the row that holds the meters' readings."""

OTHERS = "others"

AMOUNTS = ("active_uj", "idle_uj", "lower_uj", "upper_uj", "ns")

_OWN = {"job": "job", "pod": "pod"}


class Row(NamedTuple):
    """One row of a file. Amounts are as in the protocol's `UsageSum`."""

    node: str
    begin_s: int
    kind: str
    name: str
    run: str
    uid: int
    active_uj: int
    idle_uj: int
    lower_uj: int
    upper_uj: int
    ns: int
    methods: str


def export(
    client: Client,
    node: str,
    folder: Path,
    since: datetime,
    until: datetime,
    ending: str = ".csv",
) -> list[Path]:
    """Writes a file for each UTC day from one time to another. Returns their paths.

    Raises:
        CommandError: This user may not see whose energy it is.
    """
    from zeus_ipc.requests import BUCKET_S

    day = since.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    written = []
    while day < until:
        begin_s = int(day.timestamp())
        edges = [*range(begin_s, begin_s + 86_400 + 1, BUCKET_S)]
        rows = [*_rows(client.usage(edges, "account", by_method=True), node, edges)]
        if any(row.kind == OTHERS for row in rows):
            raise CommandError(
                "only administrators and the groups in [accounting] readers may export everybody's "
                "energy",
                ErrorCode.PERMISSION_DENIED,
            )
        if rows:
            path = folder / f"{PREFIX}{node}-{day:%Y-%m-%d}{ending}"
            tables.write(path, tables.kinds(Row), rows)
            written.append(path)
        day += timedelta(days=1)
    return written


def _rows(usage: Usage, node: str, edges: Sequence[int]) -> Iterator[Row]:
    for used in usage.sums:
        same = {name: getattr(used, name) for name in ("kind", "name", "run", "uid", *AMOUNTS)}
        begin_s, methods = edges[used.interval], "+".join(used.methods)
        yield Row(node=node, begin_s=begin_s, **same, methods=methods)
    for begin_s, uj in zip(edges, usage.metered_uj, strict=False):
        if uj:
            yield Row(node, begin_s, METERS, "", "", -1, uj, 0, uj, uj, 0, "")


def read(folder: Path) -> list[Row]:
    """Returns the rows of all files in a folder and its subfolders, each quarter of an hour of a
    node once.

    Raises:
        CommandError: There is no file, or one that is not such a file.
    """
    files = [path for ending in ENDINGS for path in folder.rglob(f"{PREFIX}*{ending}")]
    paths = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    if not paths:
        raise CommandError(
            f"{folder} has no files {PREFIX}*.csv or .parquet; run `zeusctl energy --export`",
            UNKNOWN_JOB,
        )
    newest: dict[tuple[str, int], tuple[int, list[Row]]] = {}
    for path in paths:
        here: dict[tuple[str, int], list[Row]] = {}
        for row in _parse(path):
            here.setdefault((row.node, row.begin_s), []).append(row)
        for key, rows in here.items():
            metered_uj = sum(row.active_uj for row in rows if row.kind == METERS)
            # If several files have it, use the most complete one, or else the newest.
            if metered_uj >= newest.get(key, (0, []))[0]:
                newest[key] = (metered_uj, rows)
    return [row for _, rows in newest.values() for row in rows]


def _parse(path: Path) -> Iterator[Row]:
    try:
        for _, row in tables.read(path, Row):
            yield row
    except tables.TableError as error:
        raise CommandError(f"{path} is not a file of `zeusctl energy --export` ({error})") from None


def usage_of(
    rows: Sequence[Row],
    edges: Sequence[int],
    by: str,
    uid: int | None = None,
    name: str = "",
    by_method: bool = False,
) -> Usage:
    """Returns the same as `Client.usage`, from files."""
    from zeus_ipc.replies import Usage, UsageSum
    from zeus_ipc.requests import BUCKET_S

    by_account: dict[tuple[int, str, str, str, int, str], list[Row]] = {}
    metered = [0] * (len(edges) - 1)
    for row in rows:
        interval = bisect_right(edges, row.begin_s) - 1
        if not 0 <= interval < len(metered) or row.begin_s + BUCKET_S > edges[interval + 1]:
            continue
        if row.kind == METERS:
            metered[interval] += row.active_uj
            continue
        label = _label(row, by)
        if (uid is None or row.uid == uid) and (not name or _is_named(name, *label[1:3])):
            key = (interval, *label, row.methods if by_method else "")
            by_account.setdefault(key, []).append(row)
    sums = [
        UsageSum.model_validate(
            {
                **dict(zip(("interval", "kind", "name", "run", "uid"), key, strict=False)),
                **{amount: sum(getattr(row, amount) for row in some) for amount in AMOUNTS},
                "methods": sorted({one for row in some for one in row.methods.split("+") if one}),
            }
        )
        for key, some in by_account.items()
    ]
    sums.sort(key=lambda one: (one.interval, -(one.active_uj + one.idle_uj)))
    begins = min((row.begin_s for row in rows), default=None)
    return Usage(sums=sums, more=False, metered_uj=metered, begins_s=begins)


def _label(row: Row, by: str) -> tuple[str, str, str, int]:
    """Returns the account that a row is summed under: its own if asked for, else its parent."""
    own = (row.kind, row.name, row.run, row.uid)
    if row.kind in NOBODYS:
        return (row.kind, "", "", -1) if by == "total" else own
    if by == "total":
        return "total", "", "", -1
    if row.kind == _OWN.get(by):
        return own
    if row.kind == "pod":
        return "namespace", row.name.partition("/")[0], "", -1
    return own if row.uid == -1 else ("user", "", "", row.uid)


def _is_named(wanted: str, name: str, run: str) -> bool:
    """Whether this is a job's name, or the SLUID of its run; other runs have numbers."""
    return wanted == name or (wanted == run and run.startswith("s"))

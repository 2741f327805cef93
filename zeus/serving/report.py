"""Sums of a service's log: joules, joules per token and percentiles, by model, tenant, group or
hour."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from typing import Annotated, Any

from pydantic import Field

from zeus.serving.rows import Joules, Totals
from zeus_common.tables import Nanoseconds, Seconds, read_lines
from zeus_common.text import table as columns

COLUMNS = (
    "requests", "refused", "joules", "idle_j", "j_per_output_token", "mean_j", "p50_j", "p95_j",
    "uncertainty_pct", "method",
)  # fmt: skip


@dataclass(frozen=True)
class LogRow:
    """A request in a log; see `RequestEnergy`."""

    request: str
    joules: Joules | None
    uncertainty_j: Joules | None
    rule_uncertainty_j: Joules | None
    method: str
    end_ns: Nanoseconds
    settled_ns: Nanoseconds
    settled_s: Seconds
    decode_tokens: Annotated[int, Field(ge=0)] = 0
    model: str = ""
    tenant: str = ""
    group: str = ""
    engine: str = ""

    def ended_s(self) -> float:
        """When it ended, s since 1970."""
        return self.settled_s - (self.settled_ns - self.end_ns) / 1e9


@dataclass(frozen=True)
class LogTotals:
    """The end of a period in a log."""

    settled: Totals


@dataclass
class Sums:
    """One group of requests."""

    joules: list[float] = field(default_factory=list)
    refused: int = 0
    output_tokens: int = 0
    variance: float = 0.0
    rule_j: float = 0.0
    idle_j: float = 0.0
    methods: set[str] = field(default_factory=set)

    def add(self, entry: LogRow) -> None:
        """Adds a request."""
        self.methods.add(entry.method)
        if entry.joules is None:
            self.refused += 1
            return
        self.joules.append(entry.joules)
        self.output_tokens += entry.decode_tokens
        self.variance += (entry.uncertainty_j or 0.0) ** 2
        self.rule_j += entry.rule_uncertainty_j or 0.0

    def row(self) -> dict[str, Any]:
        """Its figures, by `COLUMNS`; None: not known."""
        total, count = math.fsum(self.joules), len(self.joules)
        # Errors of sensor and fit average out over requests, but those of the rule may not.
        sigma = math.hypot(self.variance**0.5, self.rule_j)
        parts = (
            quantiles(self.joules * (1 + (count == 1)), n=20, method="inclusive") if count else []
        )
        return {
            "requests": count + self.refused,
            "refused": self.refused,
            "joules": total,
            "idle_j": self.idle_j,
            "j_per_output_token": total / self.output_tokens if self.output_tokens else None,
            "mean_j": total / count if count else None,
            "p50_j": parts[9] if count else None,
            "p95_j": parts[18] if count else None,
            "uncertainty_pct": 100 * sigma / total if total else None,
            "method": " ".join(sorted(self.methods)),
        }


Groups = dict[str, Sums]
"""By model, tenant, group or hour."""


def read(
    paths: Iterable[Path], by: str, idle: str = "exclude", *, join: bool = False
) -> tuple[Groups, Totals]:
    """Sums logs: those of each group of requests, and those of the settled periods.

    Args:
        paths: JSON lines, as a service writes them.
        by: One of `BY`.
        idle: `exclude` leaves idle energy out of the groups, `proportional` adds each period's idle
            energy to its groups by their own energy, `owner` adds it to a group of the owner.
        join: Rows with the same request in different logs are one request, as with separate servers
            for prefill and decode.

    Raises:
        ValueError: A line does not belong to a log, or is in two of them; or there is none.
    """
    paths = list(paths)
    joined = _joined(paths) if join else {}
    counted: set[str] = set()
    groups: Groups = {}
    totals = Totals()
    pending: dict[str, float] = {}
    for _, entry in _entries(paths):
        if isinstance(entry, LogTotals):
            totals.add(entry.settled)
            for name, share in _idle_shares(pending, idle).items():
                groups.setdefault(name, Sums()).idle_j += share * entry.settled.idle_j
            pending = {}
            continue
        whole = joined.get(entry.request)
        name = _group(whole or entry, by)
        pending[name] = pending.get(name, 0.0) + (entry.joules or 0.0)
        if entry.request not in counted:
            groups.setdefault(name, Sums()).add(whole or entry)
            if whole is not None:
                counted.add(entry.request)
    if not groups:
        raise ValueError(f"{', '.join(map(str, paths))} has no settled requests yet")
    return dict(sorted(groups.items())), totals


def _idle_shares(joules: Mapping[str, float], idle: str) -> dict[str, float]:
    """The share of a period's idle energy that each group pays, given its own energy."""
    whole = math.fsum(joules.values())
    if idle == "owner" or (idle == "proportional" and whole <= 0):
        return {"owner": 1.0}
    return {name: own / whole for name, own in joules.items()} if idle == "proportional" else {}


def _entries(paths: Iterable[Path]) -> Iterator[tuple[Path, LogRow | LogTotals]]:
    """Lines of logs; each may be there once only."""
    seen: set[int] = set()
    for path in paths:
        for place, entry in read_lines(path, LogTotals, LogRow):
            if isinstance(entry, LogRow):
                if hash(entry) in seen:
                    raise ValueError(f"{place}: this line was there before; give each log once")
                seen.add(hash(entry))
            yield path, entry


def _joined(paths: Sequence[Path]) -> dict[str, LogRow]:
    """Requests that are in several logs: the sums of their rows."""
    sides: dict[str, dict[Path, LogRow]] = {}
    for path, entry in _entries(paths):
        if isinstance(entry, LogRow):
            sides.setdefault(entry.request, {})[path] = entry
    return {
        request: _sum_of(list(rows.values())) for request, rows in sides.items() if len(rows) > 1
    }


def _sum_of(rows: Sequence[LogRow]) -> LogRow:
    """One row for all parts of a request; if one is refused, so is the sum."""
    refused = any(row.joules is None for row in rows)
    return replace(
        max(rows, key=LogRow.ended_s),
        tenant=next((row.tenant for row in rows if row.tenant), ""),
        group=next((row.group for row in rows if row.group), ""),
        method=" ".join(sorted({row.method for row in rows})),
        decode_tokens=sum(row.decode_tokens for row in rows),
        joules=None if refused else math.fsum(row.joules or 0.0 for row in rows),
        uncertainty_j=math.hypot(*(row.uncertainty_j or 0.0 for row in rows)),
        rule_uncertainty_j=math.fsum(row.rule_uncertainty_j or 0.0 for row in rows),
    )


def table(groups: Groups, totals: Totals, by: str) -> str:
    """For people."""
    head = (by, *COLUMNS)
    rows = [[name, *map(_shown, sums.row().values())] for name, sums in groups.items()]
    lines = [
        columns(head, rows, left=1, last_left=True),
        "",
        f"attributed to requests  {totals.requests_j:14.1f} J",
        f"idle                    {totals.idle_j:14.1f} J",
        f"unattributed            {totals.unattributed_j:14.1f} J",
        f"measured by zeusd       {totals.measured_j:14.1f} J",
    ]
    return "\n".join(lines)


def as_csv(groups: Groups, by: str) -> str:
    """For programs."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((by, *COLUMNS))
    for name, sums in groups.items():
        writer.writerow([name, *("" if one is None else one for one in sums.row().values())])
    return file.getvalue()


def plot(groups: Groups, by: str, path: Path) -> None:
    """Plots joules and joules per output token of each group.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: It cannot write this kind of file.
        OSError: The file cannot be written.
    """
    from zeus.utils.lazy import needed

    figure_of = needed("matplotlib.figure", "a picture", "plot").Figure
    figure = figure_of(figsize=(8, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    names, rows = list(groups), [sums.row() for sums in groups.values()]
    left.barh(names, [row["joules"] for row in rows], label="requests")
    left.barh(
        names,
        [row["idle_j"] for row in rows],
        left=[row["joules"] for row in rows],
        label="idle",
    )
    left.set_xlabel("J")
    figure.legend(loc="outside lower center", ncols=2)
    right.barh(names, [row["j_per_output_token"] or 0.0 for row in rows])
    right.set_xlabel("J per output token")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.set_xlim(0, 1.05 * axes.get_xlim()[1])
    figure.suptitle(f"Attributed energy by {by}")
    figure.savefig(path)


def _group(entry: LogRow, by: str) -> str:
    if by == "hour":
        return time.strftime("%Y-%m-%d %H:00", time.gmtime(entry.ended_s()))
    return str(getattr(entry, by) or "(none)")


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)

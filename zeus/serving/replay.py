"""Attributes the energy of a recorded run: files in, files out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from zeus.serving.columns import StepColumns, Updates, by_end, clipped, no_step
from zeus.serving.files import check_clocks, read_steps, read_tenants, read_updates
from zeus.serving.ledger import Ledger
from zeus.serving.rows import ClosedPeriod, RequestEnergy, Totals, known
from zeus.serving.settlement import idle_energy
from zeus_common.tables import TableError, write

TOKENS_RULE, TOKENS_SENSOR = 0.15, 0.05
"""Errors of a split by tokens, and of one step's energy, relative, one sigma."""

OUT_COLUMNS = (
    "request",
    "joules",
    "prefill_j",
    "decode_j",
    "shared_j",
    "uncertainty_j",
    "rule_uncertainty_j",
    "method",
    "reason",
)

_TEXTS = ("request", "method", "reason")


def replay(
    steps: Path, energy: Path, *, method: str, idle: str, tenants: Path | None = None
) -> tuple[list[RequestEnergy], dict[str, Any]]:
    """Attributes the energy of a run in two files.

    Returns:
        The requests, with idle energy if it is divided among them, and sums.

    Raises:
        ValueError: A file is wrong; the message names it, the line and the fault.
    """
    owners = {} if tenants is None else read_tenants(tenants)
    taken, names = read_steps(steps)
    updates = read_updates(energy)
    check_clocks(taken, updates)
    if tenants is not None and owners.keys().isdisjoint(names):
        raise TableError(
            f"{tenants} names none of the {len(names)} requests of {steps}: it has "
            f"{next(iter(owners), 'no row')!r}, and the steps {names[0]!r}"
        )
    if method == "tokens":
        settled = by_tokens(taken, names, updates)
    else:
        ledger = Ledger()
        ledger.add_updates(updates)
        ledger.add_steps(taken, names)
        settled = ledger.settle()
    rows = [replace(row, tenant=owners.get(row.request, "")) for row in settled.rows]
    totals = settled.totals
    own_j = math.fsum(row.joules for row in rows if not row.refused)
    shared_j = totals.idle_j if idle == "proportional" and own_j > 0 else 0.0
    if shared_j:
        rows = [row if row.refused else _with_idle(row, shared_j / own_j) for row in rows]
    sums: dict[str, Any] = {
        "measured_j": totals.measured_j,
        "requests_j": totals.requests_j + shared_j,
        "idle_j": totals.idle_j - shared_j,
        "unattributed_j": totals.unattributed_j,
        "method": method,
        "idle": {
            "policy": idle,
            "measured_j": totals.idle_j,
            "startup_j": totals.startup_j,
            "dummy_j": totals.dummy_j,
        },
        "requests": {"count": len(rows), "refused": sum(row.refused for row in rows)},
    }
    if tenants is not None:
        sums["tenants"] = _by_tenant(rows, totals.idle_j if idle == "owner" else None)
    return rows, sums


def by_tokens(steps: StepColumns, names: Sequence[str], updates: Updates) -> ClosedPeriod:
    """A baseline for comparison: divides each step's energy by tokens, prefill or decode.

    An update's energy above idle is spread evenly over its time with steps.
    """
    steps = clipped(by_end(steps))
    busy_s = steps.between(steps.length_s, updates.begin_ns, updates.end_ns)
    idle_s = np.maximum(updates.length_s - busy_s, 0.0)
    empty = no_step(idle_s, updates.length_s)
    idle_j = idle_energy(updates.joules, updates.length_s, idle_s, empty)
    busy_j = np.where(empty, 0.0, updates.joules - idle_j)
    power = np.divide(busy_j, busy_s, out=np.zeros(updates.count), where=busy_s > 0)
    edges = np.stack([updates.begin_ns, updates.end_ns], axis=1).ravel()
    base = int(edges[0])
    # Energy above idle until each instant, if it had been drawn at the power of busy time.
    spread = np.stack([0 * power, power * updates.length_s], axis=1).ravel()
    drawn = [
        np.interp(at - base, edges - base, np.cumsum(spread))
        for at in (steps.begin_ns, steps.end_ns)
    ]
    step_j = drawn[1] - drawn[0]
    step = steps.step_of_row
    total = np.bincount(step, steps.tokens, steps.count)[step]
    head = 1.0 / np.diff(steps.first_row)[step]
    row_j = step_j[step] * np.divide(steps.tokens, total, out=head, where=total > 0)
    measured_j, all_j = float(updates.joules.sum()), float(row_j.sum())
    totals = Totals(measured_j=measured_j, idle_j=float(idle_j.sum()))
    first = int(np.argmin(empty)) if not empty.all() else updates.count
    totals.startup_j = float(idle_j[:first].sum())
    scale = (measured_j - totals.idle_j) / all_j if all_j > 0 else 0.0
    if scale > 0:
        totals.requests_j = measured_j - totals.idle_j
    else:
        totals.unattributed_j = measured_j - totals.idle_j
    parts = [
        np.bincount(steps.request, scale * row_j * which, len(names)).tolist()
        for which in (steps.prefill, ~steps.prefill)
    ]
    rows = []
    for name, prefill_j, decode_j in zip(names, *parts, strict=True):
        joules = prefill_j + decode_j
        errors = TOKENS_SENSOR * joules, TOKENS_RULE * joules
        one = RequestEnergy(name, joules, prefill_j, decode_j, 0.0, *errors)
        rows.append(replace(one, reason="") if joules > 0 else one)
    rows = [one.stated("tokens") for one in rows]
    return ClosedPeriod(rows, totals, None)


def _by_tenant(rows: Sequence[RequestEnergy], owner_j: float | None) -> dict[str, dict[str, float]]:
    """Sums of each tenant, by name; requests without a tenant have the empty name."""
    by_tenant: dict[str, dict[str, float]] = {}
    for row in rows:
        one = by_tenant.setdefault(row.tenant, {"requests": 0, "refused": 0, "joules": 0.0})
        one["requests"] += 1
        one["refused"] += row.refused
        one["joules"] += 0.0 if row.refused else row.joules
    if owner_j is not None:
        one = by_tenant.setdefault("owner", {"requests": 0, "refused": 0, "joules": 0.0})
        one["joules"] += owner_j
    return by_tenant


def write_rows(rows: Sequence[RequestEnergy], path: Path) -> None:
    """Writes requests; see `zeus_common.tables.write`."""
    kinds = {name: str if name in _TEXTS else float for name in OUT_COLUMNS}
    write(path, kinds, ([known(getattr(row, name)) for name in OUT_COLUMNS] for row in rows))


def unknown(rows: Sequence[RequestEnergy]) -> str | None:
    """Why no request has a figure; None: one has."""
    reasons = Counter(row.reason for row in rows)
    if reasons[""] or not rows:
        return None
    reason, count = reasons.most_common(1)[0]
    return f"no request has a figure ({count} of {len(rows)}: {reason})"


def _with_idle(row: RequestEnergy, share: float) -> RequestEnergy:
    more = row.joules * share
    return replace(
        row,
        joules=row.joules + more,
        shared_j=row.shared_j + more,
        uncertainty_j=row.uncertainty_j * (1 + share),
        rule_uncertainty_j=row.rule_uncertainty_j * (1 + share),
    )

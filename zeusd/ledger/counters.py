"""Builds the counters of replies, which count since the ledger began."""

from __future__ import annotations

from collections.abc import Iterable

from zeus_ipc.charging import BOUNDS, Bounds
from zeus_ipc.replies import Estimate, GpuTotal, LedgerTotal
from zeusd.energy.accountant import Row
from zeusd.energy.split import Kind
from zeusd.ledger.store import Estimates


def total_of(kind: str, name: str, uid: int, row: Row, parts: Estimates) -> LedgerTotal:
    """The counter of one account.

    Args:
        kind: Kind of the account.
        name: Its name.
        uid: Its user.
        row: Its charge.
        parts: Parts of the charge by method, at least the estimated ones.
    """
    total = LedgerTotal(
        kind=kind,
        name=name,
        uid=uid,
        active_uj=row.active_uj,
        idle_uj=row.idle_uj,
        lower_uj=row.lower_uj,
        upper_uj=row.upper_uj,
    )
    estimates = [
        Estimate(
            method=method.value,
            energy_uj=one.active_uj + one.idle_uj,
            lower_uj=one.lower_uj,
            upper_uj=one.upper_uj,
        )
        for method, one in parts.items()
        if BOUNDS[method] is not Bounds.EXACT
    ]
    return total.model_copy(update={"estimates": estimates}) if estimates else total


def sum_of(rows: Iterable[Row]) -> Row:
    """The sum of rows."""
    found = Row()
    for row in rows:
        found.add_row(row)
    return found


def unused_by_gpu(rows: Iterable[tuple[str, str, str, int, int]]) -> dict[str, GpuTotal]:
    """Energy of each GPU that nobody used.

    Args:
        rows: See `Store.unused`.
    """
    idle: dict[str, int] = {}
    held_idle: dict[str, int] = {}
    unattributed: dict[str, dict[str, int]] = {}
    for uuid, kind, reason, uj, idle_uj in rows:
        reasons = unattributed.setdefault(uuid, {})
        if kind == Kind.IDLE.value:
            idle[uuid] = uj
        elif kind == Kind.UNATTRIBUTED.value:
            reasons[reason] = uj
        else:
            held_idle[uuid] = idle_uj
    return {
        uuid: GpuTotal(
            idle_uj=idle.get(uuid, 0),
            held_idle_uj=held_idle.get(uuid, 0),
            unattributed_uj=reasons,
        )
        for uuid, reasons in unattributed.items()
    }

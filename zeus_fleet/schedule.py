"""Scheduled budgets: events, each with a limit, a start, an end and a ramp. Pure.

Times are seconds since 1970 of the wall clock: an allocator with a wrong clock lowers the limit at
the wrong time. The written budget is never exceeded; that does not depend on this clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from zeus_fleet.messages import Budget, LimitEvent

LEAD_S = 20.0
"""How early a limit is written: unreachable nodes take 15 s to reach their floor."""
STEP_S = 5.0
"""Length of a ramp's steps; the lowest limit within a step applies."""


@dataclass(frozen=True)
class _EventLimit:
    """The limit of one event over time: a ramp down, a constant part, and a ramp up."""

    event: LimitEvent
    standing_mw: int

    @property
    def ramp_s(self) -> float:
        drop = self.standing_mw - self.event.limit_mw
        return drop / self.event.ramp_mw_per_s if self.event.ramp_mw_per_s else 0.0

    def at(self, now_s: float) -> int:
        """The limit, mW."""
        event = self.event
        away_s = max(event.start_s - now_s, now_s - event.end_s, 0.0)
        if away_s == 0:
            return min(event.limit_mw, self.standing_mw)
        if away_s >= self.ramp_s:
            return self.standing_mw
        return min(self.standing_mw, event.limit_mw + int(away_s * event.ramp_mw_per_s))

    def lowest(self, from_s: float, to_s: float) -> int:
        """The lowest limit in an interval; the curve has one minimum."""
        return self.at(min(max(from_s, self.event.start_s), to_s))


def due(budget: Budget, now_s: float) -> Budget:
    """The budget to write now; the same object if it need not change.

    It is lowered early enough to be in force in time, and raised only when allowed. Events that
    have ended, including their ramps, are removed.
    """
    if budget.standing_mw is None:
        return budget
    step_s = now_s - now_s % STEP_S
    standing = budget.standing_mw
    ahead_s = step_s + STEP_S + LEAD_S
    curves = (_EventLimit(event, standing) for event in budget.events)
    limit = min([standing, *(curve.lowest(step_s, ahead_s) for curve in curves)])
    left = tuple(
        event
        for event in budget.events
        if now_s < event.end_s + max(0.0, _EventLimit(event, standing).ramp_s)
    )
    if not left:
        limit = standing
    if left and limit == budget.site.limit_mw and left == budget.events:
        return budget
    return _with(budget, limit, standing if left else None, left)


def scheduled(budget: Budget, events: Iterable[LimitEvent], now_s: float) -> Budget:
    """The budget with these events instead of its own.

    Raises:
        ValueError: An event is not valid, or its limit is below the floors and the reserve.
    """
    kept = tuple(sorted(events, key=lambda event: (event.start_s, event.name)))
    standing = budget.site.limit_mw if budget.standing_mw is None else budget.standing_mw
    for event in kept:
        if event.end_s <= event.start_s:
            raise ValueError(f"{event.name} ends before it begins")
        if event.ramp_mw_per_s < 0:
            raise ValueError(f"{event.name} has a negative ramp; give W per time, above 0")
        _with(budget, event.limit_mw, standing, ())
    if len({event.name for event in kept}) != len(kept):
        raise ValueError("two events have the same name; give each its own")
    return due(_with(budget, budget.site.limit_mw, standing, kept), now_s)


def with_standing(budget: Budget, standing_mw: int, now_s: float) -> Budget:
    """The budget with another limit outside of all events.

    Raises:
        ValueError: It is below the floors and the reserve.
    """
    if budget.standing_mw is None:
        return _with(budget, standing_mw, None, ())
    _with(budget, standing_mw, None, ())
    return due(_with(budget, budget.site.limit_mw, standing_mw, budget.events), now_s)


def _with(
    budget: Budget, limit_mw: int, standing_mw: int | None, events: tuple[LimitEvent, ...]
) -> Budget:
    site = replace(budget.site, limit_mw=limit_mw)
    return Budget(
        (site, *budget.domains[1:]), budget.floors_mw, budget.leaving, standing_mw, events
    )

"""The protocol with one of its rules taken out: schedules or directed tests must notice each."""

from __future__ import annotations

import random

from tests.zeus_fleet.parts import Rules
from zeus_fleet.allocator import Allocator, Policy, Snapshot
from zeus_fleet.messages import Budget, GrantPlan, S, Timing
from zeus_fleet.node import FleetNode

ALL = Rules().compares


class _DeadlineFromReply(FleetNode):
    def _armed_from(self, sent_ns: int, now_ns: int) -> int:
        return now_ns + self.timing.hold_ns


class _WaitsForTheAllocator(FleetNode):
    def _obeyed_mw(self, plan: GrantPlan | None, budget: Budget | None) -> int:
        grant = None if plan is None else plan.grants.get(self.name)
        return self.floor_mw if grant is None else grant.limit_mw


class _ChargesTheGrant(Allocator):
    def _charge(self, node: str, read: Snapshot, silent: bool) -> int:
        floor = read.budget.floors_mw[node]
        if silent or read.plan is None or node not in read.plan.grants:
            return floor
        return read.plan.grants[node].limit_mw


class _ChargesNoHigh(Allocator):
    def _charge(self, node: str, read: Snapshot, silent: bool) -> int:
        if silent or read.plan is None or node not in read.plan.grants:
            return super()._charge(node, read, silent)
        grant, beat = read.plan.grants[node], read.heartbeats.get(node)
        if beat is None or (beat.epoch == grant.epoch and beat.held_mw <= grant.limit_mw):
            return grant.limit_mw
        return max(grant.limit_mw, beat.held_mw)


class _BelievesTheStore(Allocator):
    """Takes a node for silent when the store has dropped its lease, which happens early."""

    def __init__(self, timing: Timing, policy: Policy) -> None:
        super().__init__(timing, policy)
        self._random = random.Random(1)

    def _is_silent(self, node: str, read: Snapshot, now_ns: int) -> bool:
        return super()._is_silent(node, read, now_ns) or self._random.random() < 0.02


class _KeepsGrantsAfterACut(Allocator):
    @staticmethod
    def _base_mw(node: str, read: Snapshot) -> int:
        if read.plan is None or node not in read.plan.grants:
            return read.budget.floors_mw[node]
        return read.plan.grants[node].limit_mw


MUTANTS: dict[str, Rules] = {
    "dead-man in the agent": Rules(dead_man="agent"),
    "charge by the grant": Rules(allocator=_ChargesTheGrant),
    "proof by the store's leases": Rules(allocator=_BelievesTheStore),
    "clock stops in suspend": Rules(clock="monotonic"),
    "time to live instead of a deadline": Rules(deadline="ttl"),
    "no own obedience to cuts": Rules(node=_WaitsForTheAllocator),
    "no fence": Rules(compares=ALL - {"token", "plan"}),
    "no guard time": Rules(node_timing=Timing(guard_ns=0)),
    "reclaim at 0.8 L": Rules(allocator_timing=Timing(lease_ns=12 * S)),
    "no heartbeat compare": Rules(compares=ALL - {"heartbeats"}),
    "no high": Rules(allocator=_ChargesNoHigh),
    "deadline from the reply": Rules(node=_DeadlineFromReply),
    "grants kept after a cut": Rules(allocator=_KeepsGrantsAfterACut),
}
"""From those that schedules notice soon to those that they hardly ever do."""

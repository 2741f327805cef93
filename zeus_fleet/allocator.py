"""The allocators' side of the protocol: grants of power to nodes. No I/O, no clock.

Any number of allocators run, and one leads. A grant is only raised by power that no other node can
still hold. What counts is the most that a node's hardware may hold, not what was granted to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeus_fleet.messages import Budget, Grant, GrantPlan, NodeReport, NodeWork, Timing, obeyed_mw
from zeus_fleet.policies import level, level_by_want

MOST_COMPARED = 100
"""Most nodes that one commit reclaims from: etcd accepts 128 operations in a transaction."""


@dataclass(frozen=True)
class Snapshot:
    """The contents of the store at one revision.

    Attributes:
        token: The leader's token.
        budget: The operator's budget.
        budget_revision: Revision of its last write.
        plan: None: there is none yet.
        plan_revision: Revision of its last write; 0: never written.
        heartbeats: The newest heartbeat of each node.
        works: The reported work of each node.
        unreadable: Nodes that wrote what cannot be read, and why. They count as nodes that wrote
            nothing, and do not affect the others.
    """

    token: int
    budget: Budget
    budget_revision: int
    plan: GrantPlan | None
    plan_revision: int
    heartbeats: Mapping[str, NodeReport]
    works: Mapping[str, tuple[NodeWork, ...]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """Write the plan if, in the same transaction, all these conditions still hold.

    Attributes:
        plan: The new plan.
        token: The leader's token is this.
        plan_revision: The plan was last written in this revision.
        budget_revision: The budget was last written in this revision.
        heartbeats: The newest heartbeat of each of these nodes has this number; None: there is
            none. The nodes are silent and lose a grant, which a heartbeat in between would renew.
    """

    plan: GrantPlan
    token: int
    plan_revision: int
    budget_revision: int
    heartbeats: Mapping[str, int | None]


@dataclass(frozen=True)
class NodeDemand:
    """A policy's view of a node that is alive, mW."""

    floor_mw: int
    wanted_mw: int
    capacity_mw: int
    works: tuple[NodeWork, ...] = ()


Policy = Callable[[Mapping[str, NodeDemand], int], Mapping[str, int]]
"""Shares a sum among nodes: `policy(claims, total_mw)` returns the target of each node.

Targets are clipped to each node's range, and scaled down if a domain's budget is too small.
"""


def by_want(claims: Mapping[str, NodeDemand], total_mw: int) -> Mapping[str, int]:
    """The same level for all nodes, up to each node's demand."""
    rows = claims.values()
    shares = level_by_want(
        total_mw,
        [claim.floor_mw for claim in rows],
        [claim.wanted_mw for claim in rows],
        [claim.capacity_mw for claim in rows],
    )
    return dict(zip(claims, shares, strict=True))


def evenly(claims: Mapping[str, NodeDemand], total_mw: int) -> Mapping[str, int]:
    """The same level for all nodes, regardless of demand."""
    rows = claims.values()
    floors, most = [claim.floor_mw for claim in rows], [claim.capacity_mw for claim in rows]
    return dict(zip(claims, level(total_mw, floors, most), strict=True))


class Allocator:
    """Computes plans while it leads.

    Args:
        timing: The common times.
        policy: Divides the available power.
    """

    def __init__(self, timing: Timing, policy: Policy = by_want) -> None:
        self.timing = timing
        self._policy = policy
        self._token: int | None = None
        self._seen: dict[str, tuple[int, int]] = {}

    def lead(self, token: int) -> None:
        """Handles its election. It has seen no node yet, so it counts none as silent before a full
        lease."""
        self._token = token
        self._seen = {}

    def follow(self) -> None:
        """Handles that it no longer leads, or may not."""
        self._token = None

    def plan(self, read: Snapshot, now_ns: int) -> Commit | None:
        """Decides what to write next.

        Args:
            read: The contents of the store.
            now_ns: When the reply arrived, on a clock that counts during suspend.

        Returns:
            None if it does not lead, or if the plan need not change.
        """
        if self._token is None or read.token != self._token:
            return None
        silent, reclaimed = self._silent(read, now_ns)
        charges = {node: self._charge(node, read, node in silent) for node in read.budget.floors_mw}
        grants = self._granted(read, silent, charges)
        plan = GrantPlan(self._token, dict(read.budget.spare_mw), grants)
        if plan == read.plan:
            return None
        return Commit(
            plan,
            self._token,
            read.plan_revision,
            read.budget_revision,
            {node: _number(read, node) for node in reclaimed},
        )

    # --------------------------------------------------------------------------------- internals

    def _silent(self, read: Snapshot, now_ns: int) -> tuple[set[str], list[str]]:
        """Silent nodes that are at their floor by now, and those among them with a grant to
        reclaim."""
        silent = {node for node in read.budget.floors_mw if self._is_silent(node, read, now_ns)}
        reclaimed = [
            node
            for node in sorted(silent)
            for grant in [_grant(node, read)]
            if max(grant.limit_mw, grant.high_mw) > _floor(node, read)
        ]
        later = reclaimed[MOST_COMPARED:]
        return silent - {*later}, reclaimed[:MOST_COMPARED]

    def _is_silent(self, node: str, read: Snapshot, now_ns: int) -> bool:
        """Whether a node is certainly at its floor: by the time on this clock, not by the store's
        contents."""
        beat = read.heartbeats.get(node)
        number = 0 if beat is None else beat.number
        if node not in self._seen or self._seen[node][0] != number:
            self._seen[node] = (number, now_ns)
        return now_ns - self._seen[node][1] >= self.timing.silence_ns

    def _charge(self, node: str, read: Snapshot, silent: bool) -> int:
        """The most that a node's hardware may hold until the node reads another plan."""
        beat, floor = read.heartbeats.get(node), _floor(node, read)
        if silent:
            return floor + (0 if beat is None else beat.stuck_mw)
        grant = _grant(node, read)
        if _confirmed(beat, grant):
            return max(floor, grant.limit_mw)
        return max(floor, grant.limit_mw, grant.high_mw, 0 if beat is None else beat.held_mw)

    def _granted(
        self, read: Snapshot, silent: set[str], charges: Mapping[str, int]
    ) -> dict[str, Grant]:
        grants: dict[str, Grant] = {}
        raises: dict[str, int] = {}
        targets = self._targets(read, silent, charges)
        for node in sorted(read.budget.floors_mw):
            grant, beat = _grant(node, read), read.heartbeats.get(node)
            confirmed = _confirmed(beat, grant)
            # What the node holds by now if the budget was reduced: more than that is a raise.
            base = self._base_mw(node, read)
            target = targets[node]
            if node in silent:
                limit = high = target
            elif min(target, base) < grant.limit_mw:
                limit, high = min(target, base), charges[node]
            else:
                limit, high = grant.limit_mw, grant.limit_mw if confirmed else grant.high_mw
                if target > limit and confirmed:
                    raises[node] = target - limit
            epoch = grant.epoch
            if limit != grant.limit_mw:
                epoch = 1 + max(epoch, -1 if beat is None else beat.epoch)
            grants[node] = Grant(epoch, limit, high)
        self._hand_out(read.budget, charges, raises, grants)
        return grants

    @staticmethod
    def _base_mw(node: str, read: Snapshot) -> int:
        return obeyed_mw(node, read.plan, read.budget, _floor(node, read))

    @staticmethod
    def _hand_out(
        budget: Budget,
        charges: Mapping[str, int],
        raises: Mapping[str, int],
        grants: dict[str, Grant],
    ) -> None:
        """Raises grants by power that no node can still hold, the nodes furthest below their target
        first."""
        left = {
            domain.name: domain.limit_mw
            - domain.reserve_mw
            - sum(charges[node] for node in domain.nodes)
            for domain in budget.domains
        }
        for node in sorted(raises, key=lambda one: (-raises[one], one)):
            names = [domain.name for domain in budget.domains_of(node)]
            more = min(raises[node], *(left[name] for name in names))
            if more > 0:
                grant = grants[node]
                limit = grant.limit_mw + more
                grants[node] = Grant(grant.epoch + 1, limit, limit)
                for name in names:
                    left[name] -= more

    def _targets(
        self, read: Snapshot, silent: set[str], charges: Mapping[str, int]
    ) -> dict[str, int]:
        """The policy's targets, within every domain's budget."""
        budget = read.budget
        floors = {node: _floor(node, read) for node in budget.floors_mw}
        claims = {
            node: NodeDemand(
                floors[node], beat.wanted_mw, beat.capacity_mw, read.works.get(node, ())
            )
            for node, beat in sorted(read.heartbeats.items())
            if node in floors and node not in silent and node not in budget.leaving
        }
        fixed = sum(
            charges[node] if node in silent else floors[node] for node in {*floors} - {*claims}
        )
        asked = self._policy(claims, budget.site.limit_mw - budget.site.reserve_mw - fixed)
        above = {
            node: min(max(claim.floor_mw, asked[node]), claim.capacity_mw) - claim.floor_mw
            for node, claim in claims.items()
        }
        scaled = dict(above)
        for domain in budget.domains:
            inside = sum(above[node] for node in domain.nodes if node in above)
            floor = sum(floors[node] for node in domain.nodes)
            spare = max(0, domain.limit_mw - domain.reserve_mw - floor)
            if inside > spare:
                for node in domain.nodes & above.keys():
                    scaled[node] = min(scaled[node], above[node] * spare // inside)
        return {node: floor + scaled.get(node, 0) for node, floor in floors.items()}


def _number(read: Snapshot, node: str) -> int | None:
    beat = read.heartbeats.get(node)
    return None if beat is None else beat.number


def _floor(node: str, read: Snapshot) -> int:
    beat = read.heartbeats.get(node)
    return max(read.budget.floors_mw[node], 0 if beat is None else beat.floor_mw)


def _grant(node: str, read: Snapshot) -> Grant:
    floor = _floor(node, read)
    grant = None if read.plan is None else read.plan.grants.get(node)
    if grant is None:
        return Grant(0, floor, floor)
    return Grant(grant.epoch, max(floor, grant.limit_mw), max(floor, grant.high_mw))


def _confirmed(beat: NodeReport | None, grant: Grant) -> bool:
    return beat is not None and beat.epoch == grant.epoch and beat.held_mw <= grant.limit_mw

"""Messages between nodes, allocators and operators. Power in mW, times in ns.

They are in a store with transactions: one `Budget`, one `GrantPlan`, one `NodeReport` per node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeus_fleet.profiles import ProgressProfile

S = 1_000_000_000


@dataclass(frozen=True)
class Timing:
    """Times on which nodes and allocators must agree.

    Attributes:
        lease_ns: A node without a connection for this long is at its floor.
        guard_ns: Time within which a node lowers all its GPUs, including a restart of zeusd.
        drift: Largest relative error of a clock's rate. NTP slews by at most 5e-4.
    """

    lease_ns: int = 15 * S
    guard_ns: int = 2_500_000_000
    drift: float = 1e-3

    @property
    def hold_ns(self) -> int:
        """Time after sending a heartbeat for which a node may keep the granted power."""
        return int(self.lease_ns * (1 - 2 * self.drift)) - self.guard_ns

    @property
    def silence_ns(self) -> int:
        """Time without a new heartbeat after which an allocator knows that a node is at its
        floor."""
        return int(self.lease_ns * (1 + 2 * self.drift)) + 1


@dataclass(frozen=True)
class BudgetDomain:
    """Nodes with an upper bound on the sum of their limits: a site, a row, a rack.

    Attributes:
        name: Unique within a budget.
        limit_mw: The bound.
        nodes: Its nodes.
        reserve_mw: Reserve for GPUs that cannot be lowered: k times maximum minus minimum.
    """

    name: str
    limit_mw: int
    nodes: frozenset[str]
    reserve_mw: int = 0


@dataclass(frozen=True)
class LimitEvent:
    """A temporary lower limit of the site, such as one that a grid operator requests.

    Attributes:
        name: Unique within a budget.
        limit_mw: The limit from start to end.
        start_s: Time at which it is in force everywhere, s since 1970.
        end_s: End of the event, s since 1970.
        ramp_mw_per_s: How fast the limit falls before and rises after; 0: at once.
    """

    name: str
    limit_mw: int
    start_s: float
    end_s: float
    ramp_mw_per_s: int = 0


@dataclass(frozen=True)
class Budget:
    """The operator's power budget.

    Attributes:
        domains: The first is the site, with all nodes. Others may be nested: a rack within a row.
        floors_mw: Sum of the minimum limits of each listed node's GPUs. List a node before it
            boots.
        leaving: Nodes that stay at their floor so that they can be removed.
        standing_mw: The site's limit outside of all events; None: there are none. Nodes only use
            the first domain's limit, which the leading allocator writes.
        events: Present and future events, see `schedule`.

    Raises:
        ValueError: A domain's limit is below its floors and reserve, or the first lacks a node.
    """

    domains: tuple[BudgetDomain, ...]
    floors_mw: Mapping[str, int]
    leaving: frozenset[str] = frozenset()
    standing_mw: int | None = None
    events: tuple[LimitEvent, ...] = ()
    spare_mw: Mapping[str, int] = field(init=False, compare=False)
    """Power that may be granted above the floors, by domain."""

    def __post_init__(self) -> None:
        nodes = frozenset(self.floors_mw)
        for domain in self.domains:
            if strange := domain.nodes - nodes:
                raise ValueError(f"{min(strange)} of {domain.name} needs a floor in [nodes]")
        if missing := nodes - self.site.nodes:
            raise ValueError(
                f"{min(missing)} is not in {self.site.name}; the first domain must name all nodes"
            )
        if len({domain.name for domain in self.domains}) != len(self.domains):
            raise ValueError("two domains have the same name; give each its own")
        spare = {}
        for domain in self.domains:
            floors = sum(self.floors_mw[node] for node in domain.nodes)
            least = floors + domain.reserve_mw
            if domain.limit_mw < least:
                raise ValueError(
                    f"{domain.name}: {domain.limit_mw / 1000:g} W is below the minimum limits of "
                    f"its GPUs ({floors / 1000:g} W) and the reserve ({domain.reserve_mw / 1000:g} "
                    f"W); allow {least / 1000:g} W or remove nodes"
                )
            spare[domain.name] = domain.limit_mw - least
        object.__setattr__(self, "spare_mw", spare)

    @property
    def site(self) -> BudgetDomain:
        """The domain of all nodes."""
        return self.domains[0]

    def domains_of(self, node: str) -> list[BudgetDomain]:
        """The domains that contain a node."""
        return [domain for domain in self.domains if node in domain.nodes]


@dataclass(frozen=True)
class Grant:
    """The grant of one node.

    Attributes:
        epoch: Number that increases with each change. A heartbeat confirms it.
        limit_mw: Bound on the sum of the node's limits.
        high_mw: The largest of the grants that the node may still apply.
    """

    epoch: int
    limit_mw: int
    high_mw: int


@dataclass(frozen=True)
class GrantPlan:
    """All grants; only the leading allocator writes it.

    Attributes:
        token: Token of the leader that wrote it.
        spare_mw: `Budget.spare_mw` of its budget. Grants exceed the floors by at most that in each
            domain.
        grants: Grants by node. A node without a grant holds its floor.
    """

    token: int
    spare_mw: Mapping[str, int]
    grants: Mapping[str, Grant]


@dataclass(frozen=True)
class NodeReport:
    """The report of a node.

    Attributes:
        number: Number that increases with each heartbeat, even across restarts of the agent.
        epoch: Epoch of the newest grant that it knows; -1: none.
        held_mw: Highest sum of limits that its GPUs may have, from what it has read.
        floor_mw: Sum of its GPUs' minimum limits.
        capacity_mw: Sum of its GPUs' maximum limits.
        wanted_mw: Its demand.
        stuck_mw: Power above the minimum of GPUs that cannot be lowered.
        drawn_mw: Power that its GPUs draw.
    """

    number: int
    epoch: int
    held_mw: int
    floor_mw: int
    capacity_mw: int
    wanted_mw: int
    stuck_mw: int = 0
    drawn_mw: int = 0


@dataclass(frozen=True)
class NodeWork:
    """The GPUs of one node that work for the same job.

    Attributes:
        job: Name of the job, which is the same on all its nodes.
        kind: Product name of the GPUs.
        gpus: Their positions on the node.
        min_mw: Minimum limit of each.
        max_mw: Highest useful limit of each: its maximum, or the job's own limit.
        profile: The job's progress by limit; None: not known.
        measuring: Whether it is measuring now and needs its highest limit.
        needs_mw: The limit below which it misses a latency objective; None: it has none.
    """

    job: str
    kind: str
    gpus: tuple[int, ...]
    min_mw: int
    max_mw: int
    profile: ProgressProfile | None = None
    measuring: bool = False
    needs_mw: int | None = None


@dataclass(frozen=True)
class StoreAnswer:
    """The store's contents for a node, at one revision.

    Attributes:
        plan: None: there is none yet.
        budget: None: there is none yet.
        limits_mw: The best division of the node's grant, by the positions of its GPUs; those that
            are left out get their demand. It affects progress only.
    """

    plan: GrantPlan | None
    budget: Budget | None
    limits_mw: Mapping[int, int] = field(default_factory=dict)


def obeyed_mw(node: str, plan: GrantPlan | None, budget: Budget | None, floor_mw: int) -> int:
    """The power that a node may hold under a plan and the budget of the same instant.

    If the budget was reduced since the plan was made, nodes apply it at once, without an allocator:
    the power above the floor shrinks in the same ratio as the spare power of each of the node's
    domains.

    Args:
        node: Its name.
        plan: None: there is none yet.
        budget: None: there is none yet.
        floor_mw: Sum of its GPUs' minimum limits.
    """
    if plan is None or budget is None or node not in plan.grants or node not in budget.floors_mw:
        return floor_mw
    above = granted = max(0, plan.grants[node].limit_mw - floor_mw)
    for domain in budget.domains_of(node):
        before, now = plan.spare_mw.get(domain.name, 0), budget.spare_mw[domain.name]
        if domain.name not in plan.spare_mw:
            above = 0
        elif now < before:
            above = min(above, granted * now // before)
    return floor_mw + above

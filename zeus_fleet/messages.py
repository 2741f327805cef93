"""What nodes, allocators and operators tell each other. Power in mW, times in ns.

All of it lies in a store with transactions: one `Budget`, one `Plan`, one `Heartbeat` per node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeus_fleet.profiles import Profile

S = 1_000_000_000


@dataclass(frozen=True)
class Timing:
    """Times on which nodes and allocators must agree.

    Attributes:
        lease_ns: A node that reaches nobody for this long is at its floor.
        guard_ns: Within it, a node lowers all its GPUs, a restart of zeusd included.
        drift: Largest relative error of a clock's rate. NTP slews by at most 5e-4.
    """

    lease_ns: int = 15 * S
    guard_ns: int = 2_500_000_000
    drift: float = 1e-3

    @property
    def hold_ns(self) -> int:
        """How long after sending a heartbeat a node may keep what the answer grants."""
        return int(self.lease_ns * (1 - 2 * self.drift)) - self.guard_ns

    @property
    def silence_ns(self) -> int:
        """How long an allocator has not seen a new heartbeat of a node that is at its floor."""
        return int(self.lease_ns * (1 + 2 * self.drift)) + 1


@dataclass(frozen=True)
class Domain:
    """Nodes whose limits have an upper bound in sum: a site, a row, a rack.

    Attributes:
        name: Unique within a budget.
        limit_mw: The bound.
        nodes: Its nodes.
        reserve_mw: Kept free for GPUs that cannot be lowered: k times maximum less minimum.
    """

    name: str
    limit_mw: int
    nodes: frozenset[str]
    reserve_mw: int = 0


@dataclass(frozen=True)
class Event:
    """A lower limit of the site for some time, such as an operator of the grid asks for.

    Attributes:
        name: Unique within a budget.
        limit_mw: The limit from start to end.
        start_s: When it is in force everywhere, s since 1970.
        end_s: Until when.
        ramp_mw_per_s: How fast the limit falls before and rises after; 0: at once.
    """

    name: str
    limit_mw: int
    start_s: float
    end_s: float
    ramp_mw_per_s: int = 0


@dataclass(frozen=True)
class Budget:
    """What the operator allows.

    Attributes:
        domains: The first is the site, with all nodes. Others may be nested: a rack within a row.
        floors_mw: Of each listed node, the sum of its GPUs' minimum limits. A node is listed before
            it boots.
        leaving: Nodes that are to stay at their floor, so that they can be removed.
        standing_mw: The site's limit outside of all events; None: there are none. Nodes go by the
            first domain's limit alone, which the leading allocator writes.
        events: What is to come, see `schedule`.

    Raises:
        ValueError: A domain's limit is below its floors and reserve, or the first lacks a node.
    """

    domains: tuple[Domain, ...]
    floors_mw: Mapping[str, int]
    leaving: frozenset[str] = frozenset()
    standing_mw: int | None = None
    events: tuple[Event, ...] = ()
    spare_mw: Mapping[str, int] = field(init=False, compare=False)
    """By domain: what may be handed out above the floors."""

    def __post_init__(self) -> None:
        nodes = frozenset(self.floors_mw)
        for domain in self.domains:
            if strange := domain.nodes - nodes:
                raise ValueError(f"{domain.name} has {min(strange)}, which has no floor; list it")
        if missing := nodes - self.site.nodes:
            raise ValueError(f"{min(missing)} is not in {self.site.name}; the first has all nodes")
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
    def site(self) -> Domain:
        """The domain of all nodes."""
        return self.domains[0]

    def domains_of(self, node: str) -> list[Domain]:
        """The domains that a node is in."""
        return [domain for domain in self.domains if node in domain.nodes]


@dataclass(frozen=True)
class Grant:
    """What one node may hold.

    Attributes:
        epoch: Grows with each change. A heartbeat confirms it.
        limit_mw: Bound on the sum of the node's limits.
        high_mw: The largest of the grants that the node may still apply.
    """

    epoch: int
    limit_mw: int
    high_mw: int


@dataclass(frozen=True)
class Plan:
    """All grants; written by the leading allocator alone.

    Attributes:
        token: Of the leader that wrote it.
        spare_mw: `Budget.spare_mw` of the budget that it was made for. Grants exceed the floors by
            no more than that in any domain.
        grants: By node. A node without a grant holds its floor.
    """

    token: int
    spare_mw: Mapping[str, int]
    grants: Mapping[str, Grant]


@dataclass(frozen=True)
class Heartbeat:
    """What a node says of itself.

    Attributes:
        number: Grows with each, also over restarts of the agent.
        epoch: Of the newest grant that it knows; -1: none.
        held_mw: The most that its GPUs may hold by what it has read, in sum.
        floor_mw: Sum of its GPUs' minimum limits.
        capacity_mw: Sum of its GPUs' maximum limits.
        wanted_mw: What it has use for.
        stuck_mw: How far GPUs that do not go down are above their minimum.
        drawn_mw: What its GPUs draw.
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
class Work:
    """GPUs of one node that compute for the same job.

    Attributes:
        job: Names the job; the same on all nodes that it runs on.
        kind: Product name of the GPUs.
        gpus: Their positions on the node.
        min_mw: Least limit of each.
        max_mw: The most that each has use for: its maximum, or what the job itself asks for.
        profile: What a limit is worth to the job; None: nobody knows.
        measuring: It measures now, and needs its highest limit for that.
        needs_mw: The limit below which it misses a latency objective; None: it has none.
    """

    job: str
    kind: str
    gpus: tuple[int, ...]
    min_mw: int
    max_mw: int
    profile: Profile | None = None
    measuring: bool = False
    needs_mw: int | None = None


@dataclass(frozen=True)
class Answer:
    """What the store has for a node, all of one revision.

    Attributes:
        plan: None: there is none yet.
        budget: None: there is none yet.
        limits_mw: How the node's grant is best divided, by the positions of its GPUs; those that
            are left out get what they want. Nothing depends on it but progress.
    """

    plan: Plan | None
    budget: Budget | None
    limits_mw: Mapping[int, int] = field(default_factory=dict)


def obeyed_mw(node: str, plan: Plan | None, budget: Budget | None, floor_mw: int) -> int:
    """What a node may hold by a plan and the budget of the same instant.

    A budget that was cut since the plan was made is obeyed at once, without an allocator: what is
    above the floor shrinks as the spare watts of each of the node's domains did.

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

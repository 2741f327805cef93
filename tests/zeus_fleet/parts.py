"""The parts of a simulated site, and the rules that it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zeus_fleet.allocator import Allocator, Commit, Policy, Snapshot
from zeus_fleet.messages import Budget, GrantPlan, NodeReport, Timing
from zeus_fleet.node import FleetCeilings, FleetNode, GpuRange

GPU = GpuRange(100_000, 300_000)
GPUS = 2
FLOOR_MW = GPUS * GPU.min_mw
RESERVE_MW = GPU.max_mw - GPU.min_mw
TIMING = Timing()
LOWERING_S = 1.5
RESTART_S = 1.0
"""With the lowering, as long as the guard time."""


class Violation(AssertionError):
    """A sum of limits in hardware was above its bound."""


@dataclass(frozen=True)
class Rules:
    """The shipped rules, or those of a mutant."""

    node: Callable[..., FleetNode] = FleetNode
    allocator: Callable[[Timing, Policy], Allocator] = Allocator
    node_timing: Timing = TIMING
    allocator_timing: Timing = TIMING
    compares: frozenset[str] = frozenset({"token", "plan", "budget", "heartbeats"})
    dead_man: str = "zeusd"
    deadline: str = "absolute"
    clock: str = "boottime"


SHIPPED = Rules()


@dataclass
class Machine:
    """A node: hardware, zeusd and agent."""

    name: str
    rate: float
    offset_ns: int
    hardware: list[int] = field(default_factory=lambda: [GPU.min_mw] * GPUS)
    # zeusd
    ceilings: list[int] = field(default_factory=lambda: [GPU.min_mw] * GPUS)
    deadline_ns: int = 0
    stuck: int | None = None
    down_until: float = 0.0
    down_again: float = 0.0
    # agent
    core: FleetNode | None = None
    incarnation: int = 0
    cut_off: int = 0
    frozen_until: float = 0.0
    # the machine
    asleep_until: float = 0.0
    slept: float = 0.0
    excused_until: float = 0.0

    def commanded(self, command: FleetCeilings, ttl_ns: int, now_ns: int, rules: Rules) -> None:
        """zeusd has new ceilings, which may raise at once; lowering takes time.

        Args:
            command: What the agent asks for.
            ttl_ns: How long until the deadline when the agent decided; only a mutant counts it.
            now_ns: On the node's clock.
            rules: What is shipped, or a mutant.
        """
        self.deadline_ns = now_ns + ttl_ns if rules.deadline == "ttl" else command.deadline_ns
        expired = now_ns >= self.deadline_ns and rules.dead_man == "zeusd"
        self.ceilings = [GPU.min_mw] * GPUS if expired else list(command.limits_mw)
        self.hardware = [*map(max, self.hardware, self.ceilings)]

    def expire(self, now_ns: int) -> bool:
        """zeusd's deadline: whether it has passed, and all ceilings are the minimum."""
        if now_ns < self.deadline_ns:
            return False
        self.ceilings = [GPU.min_mw] * GPUS
        return True

    def lower(self) -> None:
        """The GPUs follow their ceilings, but for one that is stuck."""
        for index, ceiling in enumerate(self.ceilings):
            if index != self.stuck:
                self.hardware[index] = min(self.hardware[index], ceiling)


class FakeStore:
    """The store's keys and transactions.

    Args:
        rules: Which comparisons a commit makes.
        budget: The first one.
    """

    def __init__(self, rules: Rules, budget: Budget) -> None:
        self.rules = rules
        self.token = 0
        self.budget, self.budget_revision = budget, 1
        self.plan: GrantPlan | None = None
        self.plan_revision = 0
        self.heartbeats: dict[str, NodeReport] = {}

    def snapshot(self) -> Snapshot:
        """The allocator's view of the store."""
        return Snapshot(
            self.token,
            self.budget,
            self.budget_revision,
            self.plan,
            self.plan_revision,
            dict(self.heartbeats),
        )

    def commit(self, commit: Commit | None) -> bool:
        """Writes a plan if its compared keys are unchanged."""
        if commit is None:
            return False
        numbers = {
            name: beat.number if (beat := self.heartbeats.get(name)) else None
            for name in commit.heartbeats
        }
        same = {
            "token": commit.token == self.token,
            "plan": commit.plan_revision == self.plan_revision,
            "budget": commit.budget_revision == self.budget_revision,
            "heartbeats": commit.heartbeats == numbers,
        }
        if not all(same[what] for what in self.rules.compares):
            return False
        self.plan, self.plan_revision = commit.plan, self.plan_revision + 1
        return True

    def write_budget(self, budget: Budget) -> None:
        """The operator writes another budget."""
        self.budget, self.budget_revision = budget, self.budget_revision + 1

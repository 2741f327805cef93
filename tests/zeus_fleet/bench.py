"""Two nodes and a store, played by hand."""

from __future__ import annotations

from collections.abc import Mapping

from tests.zeus_fleet.parts import Rules
from zeus_fleet.allocator import Allocator, Claim, Commit, Policy, Snapshot, by_want
from zeus_fleet.messages import Budget, Domain, Heartbeat, Plan, S, Timing
from zeus_fleet.node import Ceilings, Gpu

GPUS = (Gpu(100_000, 300_000), Gpu(100_000, 300_000))
FLOOR, MOST = 200_000, 600_000
DRIFT = Timing().drift
NAMES = ("a", "b")

Answer = tuple[int, Plan | None, Budget]


def budget(limit_w: int, names: tuple[str, ...] = NAMES, reserve_w: int = 0) -> Budget:
    site = Domain("site", limit_w * 1000, frozenset(names), reserve_w * 1000)
    return Budget((site,), dict.fromkeys(names, FLOOR))


def all_to(name: str) -> Policy:
    """A policy with one favourite."""

    def share(claims: Mapping[str, Claim], total_mw: int) -> Mapping[str, int]:
        others = sum(claim.floor_mw for one, claim in claims.items() if one != name)
        return {
            one: total_mw - others if one == name else claim.floor_mw
            for one, claim in claims.items()
        }

    return share


class Bench:
    """Two nodes whose zeusd obeys at once, a store, and a clock that is moved by hand.

    Args:
        rules: What runs.
        limit_w: The budget.
    """

    def __init__(self, rules: Rules, limit_w: int) -> None:
        self.rules = rules
        self.now = 0.0
        self.budget, self.budget_revision = budget(limit_w), 1
        self.plan: Plan | None = None
        self.plan_revision = 0
        self.token = 0
        self.heartbeats: dict[str, Heartbeat] = {}
        self.hardware = {name: [100_000, 100_000] for name in NAMES}
        # The slowest node and the fastest allocator that the drift allows.
        self.nodes = {
            name: rules.node(name, GPUS, [100_000, 100_000], rules.node_timing) for name in NAMES
        }

    def node_ns(self) -> int:
        return int(self.now * (1 - DRIFT) * S)

    def allocator_ns(self) -> int:
        return int(self.now * (1 + DRIFT) * S)

    @property
    def held_w(self) -> int:
        return sum(map(sum, self.hardware.values())) // 1000

    def leader(self, policy: Policy = by_want) -> Allocator:
        """A newly elected allocator."""
        self.token += 1
        allocator = self.rules.allocator(self.rules.allocator_timing, policy)
        allocator.lead(self.token)
        return allocator

    def read(self) -> Snapshot:
        return Snapshot(
            self.token,
            self.budget,
            self.budget_revision,
            self.plan,
            self.plan_revision,
            dict(self.heartbeats),
        )

    def commit(self, commit: Commit | None) -> bool:
        """Writes a plan if what it compares still holds."""
        if commit is None:
            return False
        same = {
            "token": commit.token == self.token,
            "plan": commit.plan_revision == self.plan_revision,
            "budget": commit.budget_revision == self.budget_revision,
            "heartbeats": all(
                self.heartbeats[name].number == number for name, number in commit.heartbeats.items()
            ),
        }
        if not all(same[what] for what in self.rules.compares):
            return False
        self.plan, self.plan_revision = commit.plan, self.plan_revision + 1
        return True

    def cut(self, limit_w: int) -> None:
        """The operator writes another budget."""
        self.budget, self.budget_revision = budget(limit_w), self.budget_revision + 1

    def beat(self, name: str) -> Answer:
        """A heartbeat reaches the store; the answer is on its way."""
        beat = self.nodes[name].heartbeat(self.node_ns())
        self.heartbeats[name] = beat
        return beat.number, self.plan, self.budget

    def deliver(self, name: str, answer: Answer) -> None:
        self.carry_out(name, self.nodes[name].answered(*answer, self.node_ns()))

    def carry_out(self, name: str, command: Ceilings | None) -> None:
        while command is not None:
            self.hardware[name] = [*command.limits_mw]
            command = self.nodes[name].applied(command.limits_mw, self.node_ns())

    def round(self, allocator: Allocator, names: tuple[str, ...] = NAMES) -> None:
        """Heartbeats and a plan, without any delay."""
        for name in names:
            self.deliver(name, self.beat(name))
        self.commit(allocator.plan(self.read(), self.allocator_ns()))

    def settle(self, allocator: Allocator, names: tuple[str, ...] = NAMES) -> None:
        """Until all is handed out."""
        for _ in range(4):
            self.now += 1
            self.round(allocator, names)
        for name in names:
            self.deliver(name, self.beat(name))

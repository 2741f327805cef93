"""Two nodes and a store, controlled by a test."""

from __future__ import annotations

from collections.abc import Mapping

from tests.zeus_fleet.parts import GPU, FakeStore, Machine, Rules
from zeus_fleet.allocator import Allocator, NodeDemand, Policy, by_want
from zeus_fleet.messages import Budget, BudgetDomain, GrantPlan, S, Timing
from zeus_fleet.node import FleetCeilings

GPUS = (GPU, GPU)
FLOOR, MOST = 200_000, 600_000
DRIFT = Timing().drift
NAMES = ("a", "b")

Answer = tuple[int, GrantPlan | None, Budget]


def budget(limit_w: int, names: tuple[str, ...] = NAMES, reserve_w: int = 0) -> Budget:
    site = BudgetDomain("site", limit_w * 1000, frozenset(names), reserve_w * 1000)
    return Budget((site,), dict.fromkeys(names, FLOOR))


def all_to(name: str) -> Policy:
    """A policy with one favourite."""

    def share(claims: Mapping[str, NodeDemand], total_mw: int) -> Mapping[str, int]:
        others = sum(claim.floor_mw for one, claim in claims.items() if one != name)
        return {
            one: total_mw - others if one == name else claim.floor_mw
            for one, claim in claims.items()
        }

    return share


class Bench(FakeStore):
    """Two nodes whose zeusd obeys at once, a store, and a clock that a test advances.

    Args:
        rules: What runs.
        limit_w: The budget.
    """

    def __init__(self, rules: Rules, limit_w: int) -> None:
        super().__init__(rules, budget(limit_w))
        self.now = 0.0
        self.most_w = 0
        """The most that was held right after a command."""
        # The slowest node and the fastest allocator that the drift allows.
        self.machines = {name: Machine(name, 1 - DRIFT, 0) for name in NAMES}
        self.nodes = {
            name: rules.node(name, GPUS, [100_000, 100_000], rules.node_timing) for name in NAMES
        }

    def node_ns(self, name: str) -> int:
        machine = self.machines[name]
        slept = machine.slept if self.rules.clock == "monotonic" else 0.0
        return int((self.now - slept) * machine.rate * S)

    def allocator_ns(self) -> int:
        return int(self.now * (1 + DRIFT) * S)

    @property
    def hardware(self) -> dict[str, list[int]]:
        return {name: machine.hardware for name, machine in self.machines.items()}

    @property
    def held_w(self) -> int:
        return sum(map(sum, self.hardware.values())) // 1000

    def leader(self, policy: Policy = by_want) -> Allocator:
        """A newly elected allocator, which divides as the bench's policy says."""
        self.token += 1
        self.policy = policy
        allocator = self.rules.allocator(
            self.rules.allocator_timing, lambda claims, total_mw: self.policy(claims, total_mw)
        )
        allocator.lead(self.token)
        return allocator

    def cut(self, limit_w: int) -> None:
        """The operator writes a smaller budget."""
        self.write_budget(budget(limit_w))

    def beat(self, name: str) -> Answer:
        """A heartbeat reaches the store; the answer is on its way."""
        beat = self.nodes[name].heartbeat(self.node_ns(name))
        self.heartbeats[name] = beat
        return beat.number, self.plan, self.budget

    def deliver(self, name: str, answer: Answer) -> None:
        """The answer arrives, and all that follows from it is done."""
        self.carry_out(name, self.nodes[name].answered(*answer, self.node_ns(name)))

    def carry_out(
        self, name: str, command: FleetCeilings | None, ttl_ns: int | None = None
    ) -> None:
        """zeusd gets a command, which the agent decided on now or `ttl_ns` before its deadline."""
        while command is not None:
            now_ns, machine = self.node_ns(name), self.machines[name]
            ttl_ns = command.deadline_ns - now_ns if ttl_ns is None else ttl_ns
            machine.commanded(command, ttl_ns, now_ns, self.rules)
            self.most_w = max(self.most_w, self.held_w)
            machine.lower()
            holds = [*map(max, machine.hardware, machine.ceilings)]
            command, ttl_ns = self.nodes[name].applied(holds, now_ns), None

    def pass_by(self, seconds: float, allocator: Allocator, names: tuple[str, ...]) -> None:
        """Time passes; only these nodes send heartbeats. zeusd keeps deadlines where it runs."""
        for _ in range(int(seconds)):
            self.now += 1
            for name, machine in self.machines.items():
                if self.now >= machine.asleep_until and machine.expire(self.node_ns(name)):
                    machine.lower()
            self.round(allocator, names)

    def round(self, allocator: Allocator, names: tuple[str, ...] = NAMES) -> None:
        """Heartbeats and a plan, without any delay."""
        for name in names:
            self.deliver(name, self.beat(name))
        self.commit(allocator.plan(self.snapshot(), self.allocator_ns()))

    def settle(self, allocator: Allocator, names: tuple[str, ...] = NAMES) -> None:
        """Until all is handed out."""
        for _ in range(4):
            self.now += 1
            self.round(allocator, names)
        for name in names:
            self.deliver(name, self.beat(name))

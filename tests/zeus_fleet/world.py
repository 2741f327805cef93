"""A simulated site: nodes with zeusd and agent, two allocators, a store, and faults at random.

Agents and allocators run the shipped core. Time is in seconds of the world; clocks of nodes and
allocators run at their own rates. After each change of a limit in hardware the sums are checked.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.zeus_fleet.parts import (
    FLOOR_MW,
    GPU,
    GPUS,
    LOWERING_S,
    RESERVE_MW,
    RESTART_S,
    SHIPPED,
    TIMING,
    FakeStore,
    Machine,
    Rules,
    Violation,
)
from zeus_fleet.allocator import Allocator, Snapshot, by_want, evenly
from zeus_fleet.messages import Budget, BudgetDomain, GrantPlan, NodeReport, S
from zeus_fleet.node import FleetCeilings, FleetNode


class World(FakeStore):
    """One random schedule.

    Args:
        seed: The same gives the same.
        rules: What runs in it.
        nodes: How many.
        seconds: How long.
        faults_s: Mean time between faults.
    """

    def __init__(
        self,
        seed: int,
        rules: Rules = SHIPPED,
        *,
        nodes: int = 4,
        seconds: float = 60.0,
        faults_s: float = 3.0,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.seconds = seconds
        self.used_mw = self.allowed_mw = 0
        self.raises = 0
        self._faults_s = faults_s
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        names = [f"n{index}" for index in range(nodes)]
        drift = TIMING.drift
        self.machines = {
            name: Machine(
                name, 1 + self.random.uniform(-drift, drift), self.random.randrange(10**15)
            )
            for name in names
        }
        self._rack = frozenset(names[: nodes // 2 + 1])
        super().__init__(rules, self._some_budget(high=True))
        self._allowed: list[tuple[float, Budget]] = []
        self.allocators = [
            Shell(self, rules.allocator(rules.allocator_timing, policy))
            for policy in (by_want, evenly)
        ]

    # ------------------------------------------------------------------------------------- events

    def at(self, delay: float, event: Callable[..., None], *arguments: Any) -> None:
        """Something happens after this many seconds."""
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, event, arguments))

    def run(self) -> None:
        """Runs it.

        Raises:
            Violation: A sum was exceeded.
        """
        for machine in self.machines.values():
            self._boot(machine)
        for shell in self.allocators:
            self.at(self.random.uniform(0, 1), shell.loop)
        self.at(2.0, self._fault)
        while self._events:
            when, _, event, arguments = heapq.heappop(self._events)
            if when > self.seconds:
                break
            self.now = when
            event(*arguments)

    def clock_ns(self, machine: Machine) -> int:
        """The clock that a node's programs read."""
        elapsed = self.now - (machine.slept if self.rules.clock == "monotonic" else 0.0)
        return machine.offset_ns + int(elapsed * machine.rate * S)

    def check(self, why: str) -> None:
        """The limits in hardware are within each domain's bound less its reserve.

        The reserve is for what stuck GPUs hold above their ceilings, and for nothing else.

        Raises:
            Violation: They are not.
        """
        self._allowed = [one for one in self._allowed if one[0] > self.now]
        for index, domain in enumerate(self.budget.domains):
            older = (budget.domains[index].limit_mw for _, budget in self._allowed)
            bound = max(domain.limit_mw, *older, 0) - domain.reserve_mw
            held = sum(self._counted(self.machines[name]) for name in domain.nodes)
            if held > bound:
                raise Violation(
                    f"{why} at {self.now:.2f} s: {domain.name} holds {held / 1000:g} W of "
                    f"{bound / 1000:g} W"
                )

    def _counted(self, machine: Machine) -> int:
        held, stuck = sum(machine.hardware), machine.stuck
        if self.now < machine.excused_until:
            # A machine that sleeps draws nothing, and until zeusd has lowered it is the exception
            # that a booting node is.
            return min(held, FLOOR_MW)
        return held - max(0, 0 if stuck is None else self._excess(machine, stuck))

    @staticmethod
    def _excess(machine: Machine, stuck: int) -> int:
        return machine.hardware[stuck] - machine.ceilings[stuck]

    # -------------------------------------------------------------------------------------- zeusd

    def _command(
        self, machine: Machine, incarnation: int, command: FleetCeilings, ttl_ns: int
    ) -> None:
        """zeusd gets a command of an agent."""
        if self._later(machine, self._command, incarnation, command, ttl_ns):
            return
        if self.now < machine.down_until:
            self.at(0.5, self._failed, machine, incarnation)
            return
        now_ns = self.clock_ns(machine)
        before = sum(machine.hardware)
        machine.commanded(command, ttl_ns, now_ns, self.rules)
        self.raises += sum(machine.ceilings) > before
        self.check("raise")
        left = (machine.deadline_ns - now_ns) / S / machine.rate
        self.at(max(0.0, left) + 1e-6, self._expire, machine)
        self.at(self.random.uniform(0.05, LOWERING_S), self._lowered, machine, incarnation)

    def _lowered(self, machine: Machine, incarnation: int | None = None) -> None:
        if self._later(machine, self._lowered, incarnation):
            return
        if self.now < machine.down_until:
            if incarnation is not None:
                self._failed(machine, incarnation)
            return
        machine.lower()
        if incarnation is not None:
            holds = [*map(max, machine.hardware, machine.ceilings)]
            self.at(0.001, self._applied, machine, incarnation, holds)

    def _expire(self, machine: Machine) -> None:
        """The deadline has passed unless it was extended."""
        if self._later(machine, self._expire):
            return
        if self.now < machine.down_until:  # it was restarted, and lowers before it listens
            self.at(machine.down_until - self.now, self._expire, machine)
            return
        alive = machine.core is not None and self.now >= machine.frozen_until
        if self.rules.dead_man == "agent" and not alive:
            return
        if machine.expire(self.clock_ns(machine)):
            self.at(self.random.uniform(0.05, LOWERING_S), self._lowered, machine)

    def _later(self, machine: Machine, event: Callable[..., None], *arguments: Any) -> bool:
        """Whether the machine sleeps: then it happens when it wakes."""
        if self.now >= machine.asleep_until:
            return False
        self.at(machine.asleep_until - self.now, event, machine, *arguments)
        return True

    # -------------------------------------------------------------------------------------- agent

    def _boot(self, machine: Machine) -> None:
        """An agent starts, with the state of zeusd and of the store."""
        if self._later(machine, self._boot):
            return
        beat = self.heartbeats.get(machine.name)
        now_ns = self.clock_ns(machine)
        machine.incarnation += 1
        machine.core = self.rules.node(
            machine.name,
            (GPU,) * GPUS,
            [*map(max, machine.hardware, machine.ceilings)],
            self.rules.node_timing,
            deadline_ns=now_ns + self.rules.node_timing.hold_ns if machine.deadline_ns else 0,
            number=0 if beat is None else beat.number + 16,  # some may be in flight
        )
        self._act(machine, machine.core.tick(now_ns))
        self.at(self.random.uniform(0, 1), self._beat, machine, machine.incarnation)

    def _agent(
        self, machine: Machine, incarnation: int, event: Callable[..., None], *arguments: Any
    ) -> FleetNode | None:
        """The agent, if this one still runs; while it is stopped, the event waits."""
        if machine.core is None or machine.incarnation != incarnation:
            return None
        stopped_until = max(machine.frozen_until, machine.asleep_until)
        if self.now < stopped_until:
            self.at(stopped_until - self.now, event, machine, incarnation, *arguments)
            return None
        return machine.core

    def _act(self, machine: Machine, command: FleetCeilings | None) -> None:
        if command is not None:
            ttl_ns = command.deadline_ns - self.clock_ns(machine)
            stopped = self.random.uniform(5, 25) if self.random.random() < 0.01 else 0.0
            self.at(stopped, self._send, machine, machine.incarnation, command, ttl_ns)

    def _send(
        self, machine: Machine, incarnation: int, command: FleetCeilings, ttl_ns: int
    ) -> None:
        if self._agent(machine, incarnation, self._send, command, ttl_ns) is not None:
            delay = self.random.uniform(0.001, 0.3)
            self.at(delay, self._command, machine, incarnation, command, ttl_ns)

    def _applied(self, machine: Machine, incarnation: int, holds: list[int]) -> None:
        core = self._agent(machine, incarnation, self._applied, holds)
        if core is not None:
            self._act(machine, core.applied(holds, self.clock_ns(machine)))

    def _failed(self, machine: Machine, incarnation: int) -> None:
        core = self._agent(machine, incarnation, self._failed)
        if core is not None:
            core.failed()

    def _beat(self, machine: Machine, incarnation: int) -> None:
        core = self._agent(machine, incarnation, self._beat)
        if core is None:
            return
        self.at(self.random.uniform(0.3, 1.5), self._beat, machine, incarnation)
        now_ns = self.clock_ns(machine)
        if self.random.random() < 0.06:
            wants = [self.random.choice((100_000, 170_000, 300_000)) for _ in range(GPUS)]
            self._act(machine, core.wants(wants, now_ns))
        self._act(machine, core.tick(now_ns))
        beat = core.heartbeat(now_ns)
        if not machine.cut_off:
            self.at(self._delay(), self._store_beat, machine, incarnation, beat)

    def _store_beat(self, machine: Machine, incarnation: int, beat: NodeReport) -> None:
        """The store's transaction of a heartbeat: plan and budget are of the same revision."""
        known = self.heartbeats.get(machine.name)
        if machine.cut_off or (known is not None and known.number >= beat.number):
            return
        self.heartbeats[machine.name] = beat
        self.at(
            self._delay(),
            self._answer,
            machine,
            incarnation,
            beat.number,
            self.plan,
            self.budget,
        )

    def _answer(
        self,
        machine: Machine,
        incarnation: int,
        number: int,
        plan: GrantPlan | None,
        budget: Budget,
    ) -> None:
        core = self._agent(machine, incarnation, self._answer, number, plan, budget)
        if core is not None and not machine.cut_off:
            advised = {gpu: self.random.randrange(90_000, 320_000) for gpu in range(GPUS)}
            limits = advised if self.random.random() < 0.2 else None
            self._act(machine, core.answered(number, plan, budget, self.clock_ns(machine), limits))

    def _delay(self) -> float:
        if self.random.random() < 0.75:
            return 0.003
        return self.random.choice((0.002, 0.05, 0.4, 3.0, 7.0))

    # -------------------------------------------------------------------------------------- store

    def set_budget(self, budget: Budget) -> None:
        """The operator writes a budget: a cut holds everywhere within a lease."""
        lease_s = TIMING.silence_ns / S
        self._allowed.append((self.now + lease_s, self.budget))
        self.write_budget(budget)
        self.at(lease_s + 1e-3, self.check, "budget cut")

    def _some_budget(self, high: bool = False) -> Budget:
        names = sorted(self.machines)
        most = len(names) * GPUS * GPU.max_mw
        least = len(names) * FLOOR_MW + RESERVE_MW
        limit = int(most * self.random.uniform(0.6 if high else 0.45, 0.9))
        rack = len(self._rack) * FLOOR_MW + RESERVE_MW
        rack_limit = rack + int((limit - least) * self.random.uniform(0.3, 1.2))
        site = BudgetDomain("site", limit, frozenset(names), RESERVE_MW)
        inner = BudgetDomain("rack", rack_limit, self._rack, RESERVE_MW)
        return Budget((site, inner), dict.fromkeys(names, FLOOR_MW))

    # ------------------------------------------------------------------------------------- faults

    def _fault(self) -> None:
        self.at(self.random.uniform(0, 2 * self._faults_s), self._fault)
        machine = self.random.choice([*self.machines.values()])
        kinds = (
            (24, self._partition),
            (16, self._kill_agent),
            (8, self._freeze_agent),
            (8, self._restart_zeusd),
            (5, self._suspend),
            (6, self._stick),
            (14, self._partition_allocator),
            (9, self._depose),
            (10, self._new_budget),
        )
        (chosen,) = self.random.choices([one for _, one in kinds], [share for share, _ in kinds])
        chosen(machine)

    def _partition(self, machine: Machine) -> None:
        machine.cut_off += 1
        longest = self.random.choice((3, 25, 60))
        self.at(self.random.uniform(1, longest), self._heal, machine)

    def _heal(self, machine: Machine) -> None:
        machine.cut_off -= 1

    def _kill_agent(self, machine: Machine) -> None:
        if machine.core is not None:
            machine.core = None
            self.at(self.random.uniform(0.5, 60), self._boot, machine)

    def _freeze_agent(self, machine: Machine) -> None:
        machine.frozen_until = max(machine.frozen_until, self.now + self.random.uniform(0.5, 40))

    def _restart_zeusd(self, machine: Machine) -> None:
        if self.now >= machine.down_again and self.now >= machine.asleep_until:
            machine.down_until = self.now + self.random.uniform(0.1, RESTART_S)
            machine.down_again = machine.down_until + 10
            self.at(machine.down_until - self.now, self._lowered, machine)

    def _suspend(self, machine: Machine) -> None:
        if self.now >= machine.excused_until and self.now >= machine.down_until:
            length = self.random.uniform(3, 60)
            machine.asleep_until = self.now + length
            machine.slept += length
            machine.excused_until = machine.asleep_until + LOWERING_S + RESTART_S
            self.at(length + LOWERING_S + RESTART_S + 1e-3, self.check, "woken")

    def _stick(self, machine: Machine) -> None:
        if all(one.stuck is None for one in self.machines.values()):
            machine.stuck = self.random.randrange(GPUS)
            self.at(self.random.uniform(5, 60), self._unstick, machine)

    def _unstick(self, machine: Machine) -> None:
        index, machine.stuck = machine.stuck, None
        assert index is not None
        machine.hardware[index] = min(machine.hardware[index], machine.ceilings[index])

    def _partition_allocator(self, _: Machine) -> None:
        shell = self.random.choice(self.allocators)
        shell.cut_off += 1
        self.at(self.random.uniform(0.5, 40), shell.heal)

    def _depose(self, _: Machine) -> None:
        self.random.choice(self.allocators).core.follow()

    def _new_budget(self, _: Machine) -> None:
        self.set_budget(self._some_budget())


class Shell:
    """Around an allocator: reads, plans, commits."""

    def __init__(self, world: World, core: Allocator) -> None:
        self.world = world
        self.core = core
        self.token = -1
        self.cut_off = 0
        drift = TIMING.drift
        self._rate = 1 + world.random.uniform(-drift, drift)

    def heal(self) -> None:
        """A partition ends."""
        self.cut_off -= 1

    def loop(self) -> None:
        """Reads now and again; is elected now and then."""
        world = self.world
        world.at(world.random.uniform(0.5, 2.5), self.loop)
        world.used_mw += sum(sum(machine.hardware) for machine in world.machines.values())
        world.allowed_mw += world.budget.site.limit_mw
        if self.cut_off:
            return
        if self.token != world.token and world.random.random() < 0.4:
            world.token += 1
            self.token = world.token
            self.core.lead(self.token)
        delay = world.random.choice((0.003, 0.003, 0.003, 0.4, 2.0))
        world.at(delay, self._plan, world.snapshot())

    def _plan(self, read: Snapshot) -> None:
        if self.cut_off:
            return
        if "token" not in self.world.rules.compares:  # such a leader does not look
            read = replace(read, token=self.token)
        commit = self.core.plan(read, self._now_ns())
        if commit is not None:
            world = self.world
            world.at(world.random.choice((0.001, 0.005, 0.4, 3.0)), world.commit, commit)

    def _now_ns(self) -> int:
        return int(self.world.now * self._rate * S)

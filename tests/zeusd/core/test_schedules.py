"""For any events in any order: no GPU stays throttled, and no running process loses a lease."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests import seeds
from tests.zeusd.core.checked import CONTROLS, GPUS, ODD_DRIVERS, Program
from tests.zeusd.core.model import FAULTS, POLICIES, Model
from tests.zeusd.core.schedules import run_schedule
from tests.zeusd.core.world import Odd
from zeus_ipc.controls import Control
from zeusd.core.policy import SitePolicy

SCHEDULES = int(os.environ.get("ZEUSD_TEST_SCHEDULES", seeds.tries(1000)))

numbers = st.integers(0, 7)
gpus = st.sampled_from(GPUS)
controls = st.sampled_from(CONTROLS)


class Node(RuleBasedStateMachine):
    """Hypothesis chooses the events, and finds the shortest failing history."""

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: SitePolicy) -> None:
        self.model = Model(policy)
        self.model.start_program()
        self.model.start_program(admin=True)

    def program(self, which: int) -> Program:
        return self.model.programs[which % len(self.model.programs)]

    @precondition(lambda self: len(self.model.programs) < 6)
    @rule()
    def start_program(self) -> None:
        self.model.start_program()

    @rule(who=numbers, gpu=gpus, control=controls, choice=numbers, block=st.booleans())
    def set(self, who: int, gpu: str, control: Control, choice: int, block: bool) -> None:
        self.model.set(self.program(who), gpu, control, choice, block)

    @rule(
        who=numbers,
        gpu=gpus,
        some=st.lists(controls, min_size=1, max_size=3),
        ttl_ms=st.sampled_from((0, 2_000, 60_000)),
    )
    def acquire(self, who: int, gpu: str, some: list[Control], ttl_ms: int) -> None:
        names = [one.value for one in some]
        self.model.request(
            self.program(who),
            "acquire",
            gpus=[gpu],
            controls=names,
            ttl_ms=ttl_ms,
        )

    @rule(who=numbers, gpu=gpus, control=controls)
    def reset(self, who: int, gpu: str, control: Control) -> None:
        name = control.value
        self.model.request(self.program(who), "reset", gpus=[gpu], control=name)

    @rule(who=numbers, op=st.sampled_from(("release", "goodbye", "heartbeat")))
    def release(self, who: int, op: str) -> None:
        self.model.request(self.program(who), op)

    @rule(who=numbers)
    def kill(self, who: int) -> None:
        program = self.model.programs[who % len(self.model.programs)]
        if program.alive:
            self.model.kill(program.process)

    @rule(who=numbers, stopped=st.booleans())
    def hang(self, who: int, stopped: bool) -> None:
        self.model.hang(self.program(who), stopped)

    @rule(seconds=st.sampled_from((0.1, 1.0, 6.0, 16.0, 70.0)))
    def pass_time(self, seconds: float) -> None:
        self.model.pass_time(seconds)

    @rule(which=numbers)
    def device_step(self, which: int) -> None:
        self.model.device_step(which)

    @rule(gpu=gpus, choice=numbers)
    def outside(self, gpu: str, choice: int) -> None:
        self.model.outside(gpu, choice)

    @rule(gpu=gpus, control=st.one_of(st.none(), controls), code=st.sampled_from(FAULTS))
    def fault(self, gpu: str, control: Control | None, code: int) -> None:
        self.model.faults[(gpu, control)] = code

    @rule(gpu=gpus, odd=st.sampled_from(ODD_DRIVERS))
    def misbehave(self, gpu: str, odd: Odd) -> None:
        self.model.misbehave(gpu, odd)

    @rule(gpu=gpus, some=st.frozensets(controls, min_size=1))
    def hide(self, gpu: str, some: frozenset[Control]) -> None:
        self.model.hide_controls(gpu, some)

    @rule()
    def look_again(self) -> None:
        self.model.hidden.clear()
        self.model.look_again()

    @rule(gpu=gpus, choice=numbers, ttl_ms=st.sampled_from((0, 500, 5_000, 30_000)))
    def ceiling(self, gpu: str, choice: int, ttl_ms: int) -> None:
        self.model.ceiling(self.model.programs[1], gpu, choice, ttl_ms)

    @rule()
    def jobs_end(self) -> None:
        self.model.jobs_end()

    @rule()
    def look_around(self) -> None:
        self.model.look_around()

    @rule(broken=st.booleans())
    def journal(self, broken: bool) -> None:
        self.model.journal_broken = broken

    @rule()
    def heal(self) -> None:
        self.model.faults.clear()
        self.model.behave()

    @precondition(lambda self: self.model.up)
    @rule(lost=numbers)
    def crash(self, lost: int) -> None:
        self.model.crash(lost)

    @precondition(lambda self: self.model.up)
    @rule(effects=st.integers(0, 8))
    def crash_in_the_middle(self, effects: int) -> None:
        self.model.crash_in = effects

    @precondition(lambda self: not self.model.up)
    @rule()
    def start_zeusd(self) -> None:
        self.model.start_zeusd()

    @precondition(lambda self: not self.model.up)
    @rule()
    def reload_driver(self) -> None:
        self.model.reload_driver()

    @rule(restore=st.booleans())
    def stop_zeusd(self, restore: bool) -> None:
        self.model.stop_zeusd(restore)

    @rule(gpu=gpus)
    def revoke(self, gpu: str) -> None:
        self.model.revoke(self.model.programs[1], gpu)

    @rule(policy=st.sampled_from(POLICIES))
    def reconfigure(self, policy: SitePolicy) -> None:
        self.model.reconfigure(policy)

    @invariant()
    def holds(self) -> None:
        self.model.check()

    def teardown(self) -> None:
        self.model.settle()
        self.model.finish()


Node.TestCase.settings = settings(
    max_examples=seeds.tries(120),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
test_whatever_hypothesis_thinks_of = Node.TestCase


def test_random_schedules() -> None:
    first = seeds.fresh()
    print(f"schedules {first} to {first + SCHEDULES - 1}; see benchmarks/chaos.py --seed")
    for seed in range(first, first + SCHEDULES):
        try:
            run_schedule(seed)
        except Exception as error:
            raise AssertionError(
                f"schedule {seed} (python benchmarks/chaos.py --seed {seed}): {error}"
            ) from error

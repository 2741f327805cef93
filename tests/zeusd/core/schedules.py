"""Random schedules of what can happen to a node: the same seed, the same schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.zeusd.core.checked import CONTROLS, GPUS, ODD_DRIVERS, Program
from tests.zeusd.core.model import FAULTS, POLICIES, Model
from zeus_ipc.controls import Control


@dataclass
class Event:
    """Whom and what an event may be about."""

    model: Model
    rng: random.Random
    program: Program
    gpu: str
    control: Control

    @property
    def admin(self) -> Program:
        return self.model.programs[1]

    def device(self) -> None:
        for _ in range(self.rng.randrange(1, 6)):
            self.model.device_step(self.rng.randrange(8))

    def acquire(self) -> None:
        controls = [one.value for one in self.rng.sample(CONTROLS, self.rng.randrange(1, 4))]
        more = {"ttl_ms": self.rng.choice((0, 0, 2_000, 60_000)), "together": self.chance(0.7)}
        self.model.request(self.program, "acquire", gpus=[self.gpu], controls=controls, **more)

    def release(self) -> None:
        self.model.request(self.program, "release", gpus=[self.gpu] if self.chance(0.5) else [])

    def outside(self) -> None:
        self.model.outside(self.gpu, self.rng.randrange(5))
        self.model.request_outside(self.gpu, self.rng.randrange(3))

    def fault(self) -> None:
        code = self.rng.choice(FAULTS)
        self.model.faults[self.gpu, self.rng.choice((self.control, None))] = code
        self.model.reads_fail = self.chance(0.3)

    def hide(self) -> None:
        hidden = self.rng.sample(CONTROLS, self.rng.randrange(1, 5))
        self.model.hidden[self.gpu] = frozenset(hidden)

    def ceiling(self) -> None:
        ttl_ms = self.rng.choice((0, 0, 500, 5_000, 30_000))
        self.model.ceiling(self.admin, self.gpu, self.rng.randrange(10), ttl_ms)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share


EVENTS: tuple[tuple[int, Callable[[Event], object]], ...] = (
    (14, lambda e: e.model.set(e.program, e.gpu, e.control, e.rng.randrange(5), e.chance(0.7))),
    (14, Event.device),
    (5, lambda e: e.model.pass_time(e.rng.choice((0.1, 1.0, 6.0, 16.0, 70.0)))),
    (3, Event.acquire),
    (3, Event.release),
    (1, lambda e: e.model.request(e.program, "goodbye")),
    (1, lambda e: e.model.request(e.program, "reset", gpus=[e.gpu], control=e.control.value)),
    (4, lambda e: e.model.kill(e.program.process)),
    (3, lambda e: e.model.hang(e.program, True)),
    (3, lambda e: e.model.hang(e.program, False)),
    (3, lambda e: e.model.compute(e.program, True)),
    (3, lambda e: e.model.compute(e.program, False)),
    (3, lambda e: len(e.model.programs) < 6 and e.model.start_program()),
    (3, Event.outside),
    (3, Event.fault),
    (3, lambda e: e.model.misbehave(e.gpu, e.rng.choice(ODD_DRIVERS))),
    (1, Event.hide),
    (2, lambda e: e.model.look_again()),
    (3, lambda e: e.model.heal()),
    (1, lambda e: setattr(e.model, "journal_broken", True)),
    (3, lambda e: e.model.up and e.model.crash(e.rng.randrange(4))),
    (3, lambda e: setattr(e.model, "crash_in", e.rng.randrange(6))),
    (6, lambda e: e.model.start_zeusd()),
    (1, lambda e: e.model.stop_zeusd(restore=True)),
    (1, lambda e: e.model.stop_zeusd(restore=False)),
    (1, lambda e: e.model.revoke(e.admin, e.gpu)),
    (2, lambda e: e.model.restore(e.admin, e.gpu, e.control)),
    (2, lambda e: e.model.persist(e.admin, e.gpu, e.control)),
    (4, Event.ceiling),
    (1, lambda e: e.model.jobs_end()),
    (3, lambda e: e.model.look_around()),
    (1, lambda e: e.model.quiesce(e.admin)),
    (2, lambda e: e.model.request(e.admin, "resume")),
    (1, lambda e: e.model.reload_driver()),
    (1, lambda e: e.model.reconfigure(e.rng.choice(POLICIES))),
)
"""What can happen, and how often."""


def run_schedule(seed: int | random.Random) -> Model:
    """One schedule from start to end, checked throughout.

    Raises:
        AssertionError: Something was not as it must be.
    """
    rng = random.Random(seed) if isinstance(seed, int) else seed
    model = Model(rng.choice(POLICIES))
    model.start_program()
    model.start_program(admin=True)
    weights, happenings = zip(*EVENTS, strict=True)
    for happens in rng.choices(happenings, weights, k=30):
        program = rng.choice(model.programs)
        happens(Event(model, rng, program, rng.choice(GPUS), rng.choice(CONTROLS)))
        model.check()
    model.settle()
    model.finish()
    return model

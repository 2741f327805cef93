"""Random schedules of what can happen to a node: the same seed, the same schedule."""

from __future__ import annotations

import random

from tests.zeusd.core.checked import CONTROLS, GPUS, ODD_DRIVERS
from tests.zeusd.core.model import FAULTS, POLICIES, Model

WEIGHTS = {
    "set": 14,
    "device": 14,
    "time": 5,
    "acquire": 3,
    "release": 3,
    "goodbye": 1,
    "reset": 1,
    "kill": 4,
    "hang": 3,
    "resume": 3,
    "compute": 3,
    "computed": 3,
    "start_program": 3,
    "outside": 3,
    "fault": 3,
    "odd_driver": 3,
    "hide": 1,
    "look_again": 2,
    "heal": 3,
    "journal": 1,
    "crash": 3,
    "crash_soon": 3,
    "start_zeusd": 6,
    "stop": 1,
    "restart": 1,
    "revoke": 1,
    "restore": 2,
    "persist": 2,
    "ceiling": 4,
    "jobs_end": 1,
    "look_around": 3,
    "quiesce": 1,
    "take_up": 2,
    "driver": 1,
    "reload": 1,
}


def run_schedule(seed: int, steps: int = 30) -> Model:
    """One schedule from start to end, checked throughout.

    Raises:
        AssertionError: Something was not as it must be.
    """
    rng = random.Random(seed)
    model = Model(rng.choice(POLICIES))
    model.start_program()
    model.start_program(admin=True)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for name in rng.choices(names, weights, k=steps):
        _step(model, name, rng)
        model.check()
    model.settle()
    model.finish()
    return model


def _step(model: Model, name: str, rng: random.Random) -> None:
    program = rng.choice(model.programs)
    gpu, control = rng.choice(GPUS), rng.choice(CONTROLS)
    if name == "set":
        model.set(program, gpu, control, rng.randrange(5), block=rng.random() < 0.7)
    elif name == "device":
        for _ in range(rng.randrange(1, 6)):
            model.device_step(rng.randrange(8))
    elif name == "time":
        model.pass_time(rng.choice((0.1, 1.0, 6.0, 16.0, 70.0)))
    elif name == "acquire":
        controls = [one.value for one in rng.sample(CONTROLS, rng.randrange(1, 4))]
        ttl_ms = rng.choice((0, 0, 2_000, 60_000))
        together = rng.random() < 0.7
        model.request(
            program, "acquire", gpus=[gpu], controls=controls, ttl_ms=ttl_ms, together=together
        )
    elif name == "release":
        model.request(program, "release", gpus=[gpu] if rng.random() < 0.5 else [])
    elif name == "goodbye":
        model.request(program, "goodbye")
    elif name == "reset":
        model.request(program, "reset", gpus=[gpu], control=control.value)
    elif name == "kill":
        if program.alive:
            model.kill(program.process)
    elif name in ("hang", "resume"):
        model.hang(program, name == "hang")
    elif name in ("compute", "computed"):
        model.compute(program, name == "compute")
    elif name == "start_program":
        if len(model.programs) < 6:
            model.start_program()
    elif name == "outside":
        model.outside(gpu, rng.randrange(5))
        model.request_outside(gpu, rng.randrange(3))
    elif name == "fault":
        model.faults[(gpu, rng.choice((control, None)))] = rng.choice(FAULTS)
        model.reads_fail = rng.random() < 0.3
    elif name == "odd_driver":
        model.misbehave(gpu, rng.choice(ODD_DRIVERS))
    elif name == "hide":
        model.hide_controls(gpu, frozenset(rng.sample(CONTROLS, rng.randrange(1, 5))))
    elif name == "look_again":
        model.hidden.clear()
        model.look_again()
    elif name == "heal":
        model.faults.clear()
        model.behave()
        model.reads_fail = False
        model.journal_broken = False
    elif name == "journal":
        model.journal_broken = True
    elif name == "crash":
        if model.up:
            model.crash(rng.randrange(4))
    elif name == "crash_soon":
        model.crash_in = rng.randrange(6)
    elif name == "start_zeusd":
        model.start_zeusd()
    elif name in ("stop", "restart"):
        model.stop_zeusd(restore=name == "stop")
    elif name == "revoke":
        model.revoke(model.programs[1], gpu)
    elif name == "restore":
        model.restore(model.programs[1], gpu, control)
    elif name == "persist":
        model.persist(model.programs[1], gpu, control)
    elif name == "ceiling":
        ttl_ms = rng.choice((0, 0, 500, 5_000, 30_000))
        model.ceiling(model.programs[1], gpu, rng.randrange(10), ttl_ms)
    elif name == "jobs_end":
        model.jobs_end()
    elif name == "look_around":
        model.look_around()
    elif name == "quiesce":
        model.quiesce(model.programs[1])
    elif name == "take_up":
        model.request(model.programs[1], "resume")
    elif name == "driver":
        if not model.up:
            model.reload_driver()
    elif name == "reload":
        model.reconfigure(rng.choice(POLICIES))

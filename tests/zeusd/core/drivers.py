"""Random drivers in virtual time: what a write did is seldom clear, and nothing may be left wrong.

Four GPUs, each with a driver of its own: it rounds, applies values late and out of order, and for a
while fails each call with any code, does what it says it did not do, ignores setters, and returns
old values. Meanwhile processes set, release and die, ceilings move, GPUs are lost, the site's
configuration is read again, and zeusd and the helper are killed and started. Then errors stop and
everybody dies: each limit must be at the target that the site's rules and the ceilings give.

`benchmarks/chaos.py --drivers` runs any number of rounds; the same seed gives the same round.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.zeusd.core.world import UUIDS, World
from zeus_ipc.controls import SPECS, Control, ControlValue
from zeusd import restore
from zeusd.core.access import Access, AllowRule
from zeusd.core.effects import Effect, Read, ReadingMade, WatchProcess, Write
from zeusd.core.lifecycle import Phase
from zeusd.core.model import Failure, ProcessIdentity, device_failure
from zeusd.core.policy import GpuRule, LeaseTerms, SitePolicy
from zeusd.devices.nvml.codes import nvml_error
from zeusd.devices.port import DeviceError
from zeusd.restore_journal import OwnerlessJournal
from zeusd.restore_rule import Device, Unknown, WriteRefused, near, read_settled
from zeusd.runtime.workers import write_checked

MS, S = 1_000_000, 1_000_000_000
INITIAL_MW, LOWEST_MW = 300_000, 100_000
LIMIT, CLOCKS = Control.POWER_LIMIT, Control.GPU_CLOCKS

REFUSALS = (2, 3, 4, 13, 25)
CODES = (*REFUSALS, 1, 6, 7, 9, 10, 15, 16, 17, 18, 19, 20, 999)
"""NVML's codes. A setter that returns one of the first has done nothing; after the others it may
have worked."""

FAILS, IGNORES, STALE = 0.05, 0.05, 0.2
"""How often a call fails, a setter is ignored, and one reading after a write is old."""

HOLDS_S = 30
"""How long errors last."""

ADMINS = 600
ACCESS = Access(
    rules=(AllowRule(everyone=True, controls=frozenset(Control)),),
    admin_gids=frozenset({ADMINS}),
)
POLICIES = (
    SitePolicy(),
    SitePolicy(outside_change="override"),
    SitePolicy(rules=(GpuRule("*", {Control.POWER_LIMIT: (280_000,)}, enforce=True),)),
    SitePolicy(rules=(GpuRule("*", {Control.POWER_LIMIT: (250_000,)}, enforce=True),)),
)


class Killed(Exception):
    """The process that made the call was killed."""


@dataclass
class RandomGpu:
    """A GPU and its driver.

    Attributes:
        late_ns: The longest time after which a value takes effect.
        rounding_mw: Values are rounded to a multiple of this ...
        up: ... upwards.
        errors_until_ns: Errors stop then.
        lost_until_ns: It does not answer until then.
        dies_ns: The caller is killed then.
    """

    rng: random.Random
    late_ns: int
    rounding_mw: int
    up: bool
    errors_until_ns: int
    lost_until_ns: int = 0
    dies_ns: int | None = None
    now_ns: int = 0
    values: dict[Control, ControlValue] = field(
        default_factory=lambda: {LIMIT: (INITIAL_MW,), CLOCKS: ()}
    )
    before: ControlValue = (INITIAL_MW,)
    stale: bool = False
    effects: list[tuple[int, Control, ControlValue]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now_ns += round(seconds * S)
        self._lives()

    def _lives(self) -> None:
        if self.dies_ns is not None and self.now_ns >= self.dies_ns:
            raise Killed

    def apply(self) -> None:
        """What is due takes effect."""
        self.effects.sort(key=lambda effect: effect[0])
        while self.effects and self.effects[0][0] <= self.now_ns:
            _, control, value = self.effects.pop(0)
            if control is LIMIT:
                self.before = self.values[LIMIT]
            self.values[control] = value

    def _call(self, name: str, takes_ms: float) -> int | None:
        """A call begins. Returns the code with which it fails, if it does."""
        self._lives()
        self.now_ns += round(takes_ms * MS)
        self.apply()
        if self.now_ns < self.lost_until_ns:
            raise nvml_error(15, name)
        failing = self.now_ns < self.errors_until_ns and self.rng.random() < FAILS
        return self.rng.choice(CODES) if failing else None

    def _happens(self, chance: float) -> bool:
        return self.now_ns < self.errors_until_ns and self.rng.random() < chance

    def read(self, control: Control) -> ControlValue:
        """The getter."""
        code = self._call("get", 0.2)
        if code is not None:
            raise nvml_error(code, "get")
        self._lives()
        if self.stale and self._happens(0.5):
            self.stale = False
            return self.before
        return self.values[control]

    def range(self) -> tuple[int, int]:
        """The range of the power limit."""
        code = self._call("range", 0.2)
        if code is not None:
            raise nvml_error(code, "range")
        return LOWEST_MW, INITIAL_MW

    def write(self, control: Control, value: ControlValue) -> None:
        """The setter."""
        code = self._call("set", self.rng.choice((0.1, 2, 12)))
        if control is LIMIT and not LOWEST_MW <= value[0] <= INITIAL_MW:
            raise nvml_error(2, "set")
        works = code is None or (code not in REFUSALS and self.rng.random() < 0.5)
        self.stale |= control is LIMIT and self._happens(STALE)
        if works and not (code is None and control is LIMIT and self._happens(IGNORES)):
            delay_ns = self.rng.randrange(self.late_ns + 1)
            if control is CLOCKS:  # nobody can read whether a later call has overtaken this one
                last = [at for at, one, _ in self.effects if one is CLOCKS]
                delay_ns = max(delay_ns, max(last, default=0) - self.now_ns)
            made = value if control is CLOCKS else (self._rounded(value[0]),)
            self.effects.append((self.now_ns + delay_ns, control, made))
            self.apply()
        if code is not None:
            raise nvml_error(code, "set")
        self._lives()

    def _rounded(self, limit_mw: int) -> int:
        step = self.rounding_mw
        return -(-limit_mw // step) * step if self.up else limit_mw // step * step


class _Journal(OwnerlessJournal):
    """The journal of a world, for the helper."""

    def __init__(self, world: DriverWorld) -> None:
        super().__init__(Path(), "boot", world.journal, lambda line: None)
        self._world = world

    def _put(self, changes: dict[str, dict[str, Any] | None]) -> None:
        for key, entry in changes.items():
            if entry is None:
                self._world.journal.pop(key)
            else:
                self._world.journal[key] = entry


class HelperDriver:
    """The driver, as the helper calls it."""

    def __init__(self, gpus: dict[str, RandomGpu]) -> None:
        self._gpus = gpus

    def handle(self, uuid: str) -> RandomGpu:
        return self._gpus[uuid]

    def read_control(self, gpu: RandomGpu, control: Control) -> ControlValue:
        return gpu.read(control)

    def write_control(self, gpu: RandomGpu, control: Control, value: ControlValue) -> None:
        gpu.write(control, value)

    def control_range(self, gpu: RandomGpu, control: Control) -> tuple[int, int]:
        return gpu.range()

    def shutdown(self) -> None:
        """Nothing is open."""


class DriverWorld(World):
    """Random drivers, workers that take time, and a zeusd that is killed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.up = True
        self._life = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._queues: dict[str, list[Read | Write]] = {uuid: [] for uuid in UUIDS}
        self._busy: set[str] = set()
        self.alive: dict[int, ProcessIdentity] = {}
        self._next = 10
        self._flush_due = False
        rng = self.rng
        self.gpus = {
            uuid: RandomGpu(
                rng,
                rng.choice((0, 0, 20 * MS, 400 * MS, 2 * S)),
                rng.choice((1, 1, 1000, 5000)),
                rng.random() < 0.5,
                (1 + HOLDS_S) * S,
            )
            for uuid in UUIDS
        }
        self.devices = {
            (uuid, control): Device(
                lambda gpu=gpu, control=control: gpu.read(control),
                lambda value, gpu=gpu, control=control: gpu.write(control, value),
                gpu.sleep,
                SPECS[control].rounding,
            )
            for uuid, gpu in self.gpus.items()
            for control in (LIMIT, CLOCKS)
        }
        terms = LeaseTerms(*[10_000 * S] * 4)
        super().__init__(rng.choice(POLICIES), (INITIAL_MW,) * len(UUIDS), ACCESS, terms)
        self.hold = True
        self.connect(1, groups=frozenset({ADMINS}))

    # ---------------------------------------------------------------------------------- the clock

    def at(self, t_ns: int, action: Callable[[], None]) -> None:
        """Does something at a time."""
        heapq.heappush(self._heap, (max(t_ns, self.now_ns), next(self._order), action))

    def run_until(self, end_ns: int) -> None:
        """Time passes."""
        while True:
            due_ns = self.core.next_deadline_ns() if self.up else None
            next_ns = self._heap[0][0] if self._heap else None
            times = [one for one in (due_ns, next_ns) if one is not None]
            if not times or min(times) > end_ns:
                break
            if next_ns is not None and next_ns <= min(times):
                self.now_ns = max(self.now_ns, next_ns)
                heapq.heappop(self._heap)[2]()
            else:
                self.now_ns = max(self.now_ns + 1, min(times))
                self.apply(self.core.tick(self.now_ns))
        self.now_ns = max(self.now_ns, end_ns)

    # -------------------------------------------------------------------------------- the runtime

    def apply(self, effects: list[Effect]) -> None:
        super().apply(effects)
        for effect in effects:
            if isinstance(effect, WatchProcess) and effect.process not in self.alive.values():
                self._watched_dead(effect.process)
        if self.newest and not self._flush_due:
            self._flush_due = True
            self.at(self.now_ns + 10 * MS, self._flush)

    def _watched_dead(self, process: ProcessIdentity) -> None:
        life = self._life
        self.at(self.now_ns, lambda: self._gone(process, life))

    def _gone(self, process: ProcessIdentity, life: int) -> None:
        if self.up and life == self._life:
            self.apply(self.core.process_gone(self.now_ns, process))

    def _flush(self) -> None:
        self._flush_due = False
        self.keep_newest()

    def _submit(self, call: Read | Write) -> None:
        if not isinstance(call, Write) and call.reading not in (
            ReadingMade.CONTROL,
            ReadingMade.LIMITS,
        ):
            super().reach(call)
            return
        self._queues[call.gpu].append(call)
        self._next_call(call.gpu)

    def _next_call(self, uuid: str) -> None:
        if uuid in self._busy or not self._queues[uuid]:
            return
        self._busy.add(uuid)
        call, gpu, life = self._queues[uuid].pop(0), self.gpus[uuid], self._life
        gpu.now_ns = self.now_ns
        try:
            result = self._perform(call, gpu)
        except Killed:
            return
        self.at(gpu.now_ns, lambda: self._done(uuid, call, result, life))

    def _done(self, uuid: str, call: Read | Write, result: object, life: int) -> None:
        if life != self._life:
            return
        self._busy.discard(uuid)
        self.apply(self.core.device_done(self.now_ns, call.ticket, result))
        self._next_call(uuid)

    def _perform(self, call: Read | Write, gpu: RandomGpu) -> object:
        control = call.control or LIMIT
        try:
            if isinstance(call, Read):
                if call.reading is ReadingMade.LIMITS:
                    return gpu.range()
                return read_settled(lambda: gpu.read(control))
        except DeviceError as error:
            return device_failure("reading", call.gpu, error)
        outcome = write_checked(call, self.devices[call.gpu, control], gpu.range)
        if isinstance(outcome, (WriteRefused, Unknown)) and isinstance(
            outcome.trouble, DeviceError
        ):
            failure: Failure = device_failure("setting", call.gpu, outcome.trouble)
            return type(outcome)(failure, *_rest(outcome))
        return outcome

    # ------------------------------------------------------------------------------- what happens

    def process(self) -> int:
        """A connection of a process that runs; a new one, at times."""
        if not self.alive or (len(self.alive) < 5 and self.rng.random() < 0.3):
            self._next += 1
            self.alive[self._next] = ProcessIdentity(self._next, 77)
            if self.up:
                self.connect(self._next)
        return self.rng.choice([*self.alive])

    def kill_process(self, conn: int) -> None:
        """A process dies."""
        process = self.alive.pop(conn)
        if self.up and process in self.watched:
            self._gone(process, self._life)

    def kill_zeusd(self) -> None:
        """zeusd dies, and with it every call that has not begun."""
        self.up = False
        self._life += 1
        for gpu in self.gpus.values():
            gpu.dies_ns = None
        for queue in self._queues.values():
            queue.clear()
        self._busy.clear()
        self.newest.clear()
        if self.rng.random() < 0.2:
            for conn in [*self.alive]:
                self.kill_process(conn)
        if not self.alive and self.rng.random() < 0.5:
            self.help()
        self.at(self.now_ns + self.rng.randrange(1, 1500) * MS, self.start_zeusd)

    def start_zeusd(self) -> None:
        """The next zeusd starts."""
        if self.up:
            return
        self.up = True
        for uuid, gpu in self.gpus.items():
            gpu.now_ns = self.now_ns
            gpu.apply()
            self.values[uuid, LIMIT] = gpu.values[LIMIT]
        self.start_core(set(self.alive.values()))
        self.connect(1, groups=frozenset({ADMINS}))
        for conn in self.alive:
            self.connect(conn)

    def help(self) -> None:
        """The helper runs, when no zeusd does and nobody holds anything."""
        journal, driver = _Journal(self), HelperDriver(self.gpus)
        found, _ = journal.pending(True, False)
        journal.announce(found)
        ends_ns = self.now_ns
        for gpu in self.gpus.values():
            gpu.now_ns = self.now_ns
        for one in found:
            gpu = self.gpus[one.entry["gpu"]]
            control = Control(one.entry["control"])
            called = restore.RestoredControl(driver, gpu, control, gpu.sleep)
            result = restore.carry_out(restore.plan_of(one.entry), called, journal.settle_s)
            if not result.pending:
                ours = result.kind in ("already_back", "restored")
                journal.settle(one, result.in_force if ours else None)
            ends_ns = max(ends_ns, gpu.now_ns)
        self.now_ns = ends_ns

    def step(self) -> None:
        """Something happens."""
        rng = self.rng
        names = ("set", "release", "die", "zeusd", "ceiling", "reload", "lost", "clocks", "both")
        name = rng.choices(names, (12, 4, 5, 2, 4, 1, 1, 3, 2))[0]
        uuid = rng.choice(UUIDS)
        if name == "die" and self.alive:
            self.kill_process(rng.choice([*self.alive]))
        elif name == "lost":
            self.gpus[uuid].lost_until_ns = self.now_ns + rng.randrange(1, 3000) * MS
        elif not self.up:
            return
        elif name in ("set", "both"):
            self._set(uuid)
            if name == "both":  # while it is written
                conn, when_ns = rng.choice([*self.alive]), self.now_ns + rng.randrange(1500 * MS)
                self._die_at(when_ns)
                if rng.random() < 0.5:
                    self.at(when_ns, lambda: conn in self.alive and self.kill_process(conn))
        elif name == "clocks":
            low = rng.randrange(300, 900)
            self.ask(self.process(), "set", gpus=[uuid], control="gpu_clocks", value=[low, 900])
        elif name == "release" and self.alive:
            self.ask(self.process(), "release")
        elif name == "zeusd":
            self._die_at(self.now_ns)
        elif name == "ceiling":
            value = rng.choice((None, [150_000], [187_300], [240_000]))
            ends = {"ttl_ms": rng.randrange(100, 9000), "fallback": rng.choice((None, [150_000]))}
            ceiling = {"name": rng.choice(("fleet", "job:7")), "value": value}
            more = ends if value == [240_000] else {}
            self.ask(1, "set_ceiling", gpus=[uuid], **ceiling, **more)
        elif name == "reload":
            self.reload(rng.choice(POLICIES))

    def _set(self, uuid: str) -> None:
        watts = self.rng.choice((120, 153.5, 187, 200, 228.4, 250, 300))
        self.ask(
            self.process(), "set", gpus=[uuid], control="power_limit", value=[round(watts * 1000)]
        )

    def _die_at(self, when_ns: int) -> None:
        """zeusd is killed then, or after the calls that have begun: they have been made up to their
        ends, and a dead process makes none."""
        when_ns = max([when_ns, *(self.gpus[uuid].now_ns for uuid in self._busy)])
        life = self._life
        for gpu in self.gpus.values():
            if gpu.dies_ns is not None:
                return  # it dies already
            gpu.dies_ns = when_ns
        self.at(when_ns, lambda: life == self._life and self.kill_zeusd())

    def wrong(self) -> list[str]:
        """What is left wrong when everybody is gone."""
        found = []
        for uuid, gpu in self.gpus.items():
            gpu.now_ns = self.now_ns
            gpu.apply()
            control = self.machine(uuid, LIMIT)
            site = self.settings.site.rules
            wanted = min(
                [INITIAL_MW, *(rule.targets.get(LIMIT, (INITIAL_MW,))[0] for rule in site)]
            )
            wanted = min([wanted, *(one.value[0] for one in control.ceilings.values())])
            value = gpu.values[LIMIT]
            phases = {control.phase, self.machine(uuid, CLOCKS).phase}
            if phases != {Phase.FREE}:
                found.append(f"{uuid} is never restored ({control.trouble})")
            elif not near(value, (wanted,), 5000):
                found.append(f"{uuid} is left at {value[0] / 1000:g} W, not {wanted / 1000:g} W")
            elif value[0] > wanted and control.ceilings:
                found.append(f"{uuid} is left above its ceiling")
            if gpu.values[CLOCKS] != ():
                found.append(f"the clocks of {uuid} stay locked to {gpu.values[CLOCKS]}")
        left = [key for key in self.journal if key.startswith(("pending/", "loss/"))]
        return found + [f"{key} stays in the journal" for key in left]


def _rest(outcome: WriteRefused | Unknown) -> tuple[Any, ...]:
    """The fields of an outcome behind its trouble."""
    if isinstance(outcome, WriteRefused):
        return outcome.found, outcome.invalid
    return (outcome.holds,)


def run_round(seed: int) -> DriverWorld:
    """One round from start to end.

    Raises:
        AssertionError: Something is left wrong.
    """
    world = DriverWorld(seed)
    end_ns = world.now_ns + HOLDS_S * S
    t_ns = world.now_ns
    while t_ns < end_ns:
        t_ns += round(world.rng.expovariate(2.5) * S)
        world.run_until(min(t_ns, end_ns))
        world.step()
    world.run_until(world.now_ns + 3 * S)
    world.start_zeusd()
    for conn in [*world.alive]:
        world.kill_process(conn)
    world.run_until(world.now_ns + 90 * S)
    wrong = world.wrong()
    assert not wrong, "; ".join(wrong)
    return world

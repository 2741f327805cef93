"""A node with any events at any time.

The model is the environment of a core: processes that run, hang and die, devices with queues and
faults, a journal, outside changes. Tests and `benchmarks/chaos.py` choose the events; the model
performs them, and `checked.Checked` checks what must be true.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.zeusd.core.checked import CONTROLS, FOREIGN, GPUS, Checked, Program
from tests.zeusd.core.world import Odd
from zeus_ipc.controls import Control, ControlValue
from zeusd.core.access import Access, AllowRule
from zeusd.core.effects import Effect, Read, WatchProcess, Write
from zeusd.core.entries import PENDING, RESTING, PendingRestore, key_of
from zeusd.core.lifecycle import Phase
from zeusd.core.model import ProcessIdentity
from zeusd.core.policy import CoreSettings, GpuRule, LeaseTerms, SitePolicy

ADMINS = 600
TTL_S = 15.0
BUSY_S = 120.0
ACCESS = Access(
    rules=(AllowRule(everyone=True, controls=frozenset(Control)),),
    admin_gids=frozenset({ADMINS}),
)
POLICIES = (
    SitePolicy(),
    SitePolicy(restore_power="device-max"),
    SitePolicy(restore_power="device-default"),
    SitePolicy(outside_change="override"),
    SitePolicy(
        rules=(GpuRule("*", {Control.POWER_LIMIT: (220_000,), Control.GPU_CLOCKS: (300, 1200)}),)
    ),
    SitePolicy(
        rules=(
            GpuRule(
                "*",
                {Control.POWER_LIMIT: (210_000,), Control.GPU_CLOCKS: (300, 1500)},
                enforce=True,
            ),
        )
    ),
)
DEFAULTS: dict[Control, ControlValue] = {
    Control.POWER_LIMIT: (280_000,),
    Control.PERSISTENCE_MODE: (0,),
    Control.GPU_CLOCKS: (),
    Control.MEMORY_CLOCKS: (),
    Control.POWER_PROFILE: (),
}
FAULTS = (15, 10, 4, 999, 2, 3, 16)
"""GPU_IS_LOST, TIMEOUT, NO_PERMISSION, UNKNOWN, INVALID_ARGUMENT, NOT_SUPPORTED, RESET_REQUIRED."""


class CrashError(Exception):
    """zeusd was killed in the middle of carrying out effects."""


def _is_busy(program: Program) -> bool:
    """Whether a process sends heartbeats or computes; nothing else happens as time passes."""
    return program.alive and not program.stopped and (program.beats or program.computing)


class Model(Checked):
    """The checked world, with everything that can happen to it as a method."""

    def __init__(self, policy: SitePolicy | None = None) -> None:
        self.crash_in: int | None = None
        self._gone: list[ProcessIdentity] = []
        self._next_conn = 100
        self._next_pid = 1000
        super().__init__(policy, ACCESS)
        self.hold = True
        self._drain()

    # --------------------------------------------------------------------------- what can happen

    def start_program(self, admin: bool = False) -> Program:
        """A process starts and connects."""
        self._next_pid += 1
        groups = frozenset({ADMINS}) if admin else frozenset({7})
        program = Program(
            ProcessIdentity(self._next_pid, 77), 1000 + len(self.programs) % 2, groups, 0
        )
        self.programs.append(program)
        self._reconnect(program)
        return program

    def request(self, program: Program, op: str, **arguments: object) -> None:
        """A process requests something; a stopped one, or one in C code, cannot."""
        if program.alive and not program.stopped and not program.computing and self.up:
            if program.conn == 0:
                self._reconnect(program)
            if op not in ("release", "heartbeat"):
                program.wants = program.beats = True
            if self.up:
                self._guarded(lambda: self.ask(program.conn, op, **arguments))
            if op == "release" and not arguments.get("gpus") and self.up:
                program.wants = False  # the request is done, or will be

    def set(
        self, program: Program, gpu: str, control: Control, choice: int, block: bool = True
    ) -> None:
        """A process sets one control."""
        step = choice % 5
        low = 300 + 100 * step
        value = {
            Control.POWER_LIMIT: [120_000 + 30_000 * step],
            Control.PERSISTENCE_MODE: [step % 2],
            Control.POWER_PROFILE: ([], [1], [1, 2], [2, 3], [4])[step],
        }.get(control, [low, low + 200 * step])
        more = {"together": choice < 4} if control is Control.POWER_PROFILE else {}
        asked = {"gpus": [gpu], "control": control.value, "value": value, "block": block}
        self.request(program, "set", **asked, **more)

    def kill(self, process: ProcessIdentity) -> None:
        """A process dies."""
        program = next(one for one in self.programs if one.process == process)
        was_alive, program.alive = program.alive, False
        if was_alive and self.up and process in self.watched:
            self._guarded(lambda: self.apply(self.core.process_gone(self.now_ns, process)))

    def hang(self, program: Program, stopped: bool) -> None:
        """SIGSTOP and SIGCONT."""
        program.stopped = stopped
        (self.stopped.add if stopped else self.stopped.discard)(program.process)
        if stopped:
            program.blameless = False

    def compute(self, program: Program, busy: bool) -> None:
        """Its Python waits for C code: it computes, and sends no heartbeat."""
        program.computing = busy
        self.cpu_share[program.process] = 1.0 if busy else 0.0

    def pass_time(self, seconds: float) -> None:
        """Time passes; processes that run send heartbeats."""
        while seconds > 0:
            step = min(seconds, TTL_S / 5) if any(map(_is_busy, self.programs)) else seconds
            due_ns = self.core.next_deadline_ns()
            if due_ns is not None and self.up:
                self.woken_for(due_ns)
                step = min(step, max(0.001, (due_ns - self.now_ns) / 1e9))
            seconds -= step
            self.now_ns += int(step * 1e9) + 1
            if not self.up:
                continue
            self.keep_newest()
            for program in self.programs:
                if program.computing:
                    program.silent_s += step
                    if program.silent_s > BUSY_S - TTL_S / 5:
                        program.blameless = False
                else:
                    program.silent_s = 0.0
                    if program.beats:
                        self.request(program, "heartbeat")
            if self.up:
                self._guarded(lambda: self.apply(self.core.tick(self.now_ns)))

    def device_step(self, which: int) -> None:
        """The oldest call of one GPU returns."""
        if self.up and self.held:
            gpu = self.held[which % len(self.held)].gpu
            call = next(call for call in self.held if call.gpu == gpu)
            self.held.remove(call)
            self._guarded(lambda: self.reach(call))

    def outside(self, gpu: str, choice: int) -> None:
        """Someone runs nvidia-smi -pl."""
        key = (gpu, Control.POWER_LIMIT)
        value = (110_000 + 35_000 * (choice % 5),)
        if self.values[key] != value:
            self.values[key] = value
            self.ours.discard(key)

    def request_outside(self, gpu: str, choice: int) -> None:
        """Someone runs nvidia-smi power-profiles: requests a profile, or clears it."""
        key, profile = (gpu, Control.POWER_PROFILE), FOREIGN[choice % len(FOREIGN)]
        self.values[key] = tuple(sorted({*self.values[key]} ^ {profile}))

    def misbehave(self, gpu: str, odd: Odd) -> None:
        """From now on the driver does not write exactly the requested values on one GPU."""
        self.behave()
        if gpu not in self.odd:
            self.odd[gpu] = replace(odd, stale=[])

    def behave(self) -> None:
        """Drivers do what they are told again. One that moves values into its range keeps doing so
        while nobody knows what became of a write: a driver changes its range with a reload only."""
        doubts = any(entry.get("doubts") for entry in self.journal.values())
        for gpu, odd in list(self.odd.items()):
            if odd.clamp_mw is None or (self.up and not doubts):
                del self.odd[gpu]

    def heal(self) -> None:
        """Nothing fails any more; what can be seen of a GPU is seen when zeusd looks again."""
        self.faults.clear()
        self.behave()
        self.reads_fail = False
        self.journal_broken = False

    def look_again(self) -> None:
        """zeusd reads its GPUs again, all of whose controls can be accessed."""
        self.hidden.clear()
        if self.up and self.driver_open:
            self._guarded(self.find_gpus)

    def crash(self, lost_calls: int) -> None:
        """zeusd is killed now. A call that a worker had begun may still reach its device."""
        begun: dict[str, Read | Write] = {}
        for call in self.held:
            begun.setdefault(call.gpu, call)
        for number, call in enumerate(begun.values()):
            if lost_calls >> number & 1 and isinstance(call, Write):
                self._write_device(call)
        self.held.clear()
        self._gone.clear()
        self._seen.clear()
        self.up = False
        for program in self.programs:
            program.conn = 0

    def start_zeusd(self) -> None:
        """A new zeusd, on the same devices and the same journal."""
        if self.up:
            return
        self.up = True
        self.crash_in = None
        self._forget_resting()
        alive = {program.process for program in self.programs if program.alive}
        for entry in self.journal.values():
            # A zeusd that dies again and again waits for a heartbeat less and less long.
            if entry.get("recoveries", 0) >= 3:
                for program in self.programs:
                    program.blameless &= program.process.pid != entry["holder"][0]
        self._guarded(lambda: self.start_core(alive))

    def stop_zeusd(self, restore: bool) -> None:
        """An orderly stop, followed by a crash if it takes too long."""
        if not self.up:
            return
        self._guarded(lambda: self.apply(self.core.stop(self.now_ns, restore)))
        if restore:
            for program in self.programs:
                program.blameless = False
        for _ in range(40):
            if not self.up:
                break
            if self.held:
                self.device_step(0)
            elif self.core.restoring:
                self.pass_time(1)  # what failed before the faults were over is tried again
            else:
                break
        broken = self.faults or self.odd or self.journal_broken or self.hidden
        if self.up and not (self.held or broken):
            assert not self.core.restoring, "zeusd stops, and something is not back"
        if self.up:
            self.keep_newest()
        self.crash(0)

    def reload_driver(self) -> None:
        """While zeusd is down: all settings are lost, and a new load has a new name."""
        if self.up:
            return
        self.driver = f"driver-{int(self.driver.split('-')[1]) + 1}"
        for gpu in GPUS:
            for control, value in DEFAULTS.items():
                self.values[(gpu, control)] = value
                self.ours.discard((gpu, control))
        for program in self.programs:
            program.blameless = False

    def reconfigure(self, policy: SitePolicy) -> None:
        """The operator changes zeusd.toml and reloads, or it counts from the next start."""
        self.settings = CoreSettings(policy, ACCESS, LeaseTerms())
        self._seen.clear()
        self._forget_resting()
        if self.up:
            self._guarded(lambda: self.apply(self.core.reconfigure(self.now_ns, self.settings)))

    def revoke(self, program: Program, gpu: str) -> None:
        """An administrator ends everybody's leases on a GPU."""
        for other in self.programs:
            other.blameless = False
        self.request(program, "release", gpus=[gpu], whose="all")

    def restore(self, program: Program, gpu: str, control: Control) -> None:
        """An administrator wants the site limit in force."""
        for other in self.programs:
            other.blameless = False
        self.request(program, "restore", gpus=[gpu], controls=[control.value])

    def persist(self, program: Program, gpu: str, control: Control) -> None:
        """An administrator makes what he has set the target."""
        program.blameless = False
        self.request(program, "persist", gpus=[gpu], controls=[control.value])

    def ceiling(self, program: Program, gpu: str, choice: int, ttl_ms: int = 0) -> None:
        """An administrator bounds the power limit, for some time or for good, or no longer."""
        for other in self.programs:
            other.blameless = False
        value = (None, [140_000], [190_000], [240_000], [290_000])[choice % 5]
        fallback = [value[0] - 20_000] if value is not None and ttl_ms else None
        self.request(
            program,
            "set_ceiling",
            gpus=[gpu],
            name=("fleet", "job:7")[choice % 2],
            value=value,
            ttl_ms=ttl_ms,
            fallback=fallback,
        )

    def jobs_end(self) -> None:
        """zeusd sees that no job has a control group any more."""
        if self.up:
            self._guarded(lambda: self.apply(self.core.jobs_present(self.now_ns, set())))

    def look_around(self) -> None:
        """zeusd reads the controls that nobody holds."""
        if self.up:
            self._guarded(lambda: self.apply(self.core.look_around(self.now_ns)))

    def quiesce(self, program: Program) -> None:
        """An administrator makes zeusd close the driver."""
        for other in self.programs:
            other.blameless = False
        self.request(program, "quiesce")

    # -------------------------------------------------------------------------------- the end

    def settle(self) -> None:
        """Nothing fails any more, and enough time passes."""
        self.faults.clear()
        self.hidden.clear()
        self.reads_fail = False
        self.journal_broken = False
        self.crash_in = None
        self.start_zeusd()
        self._drain()
        for gpu, odd in self.odd.items():
            limit = gpu, Control.POWER_LIMIT
            entry = self.journal.get(key_of(PENDING, *limit))
            if odd.clamp_mw is None or entry is None:
                continue
            if self._made_of(PendingRestore.from_json(entry), self.values[limit]):
                # Its range changes without a reload, so the result of the write is unknown.
                self.ours.discard(limit)
        self.odd.clear()
        self.look_again()
        self._drain()
        for program in self.programs:
            self.compute(program, False)
        if self.core.node.quiesced_ns is not None:
            self.request(self.start_program(admin=True), "resume")
        # First the longest lease ends; then what follows from that is tried again where it failed.
        for seconds in (70, 16, 16, 16):
            self._drain()
            self.pass_time(seconds)
            self._drain()
        for gpu in GPUS:
            for control in CONTROLS:
                self.check_settled(gpu, control)
        self.check()

    def finish(self) -> None:
        """Everybody is gone: nothing may be left."""
        for program in self.programs:
            if program.alive:
                self.kill(program.process)
        self.settle()
        for gpu in GPUS:
            for control in CONTROLS:
                machine = self.machine(gpu, control)
                assert machine.phase is Phase.FREE, f"{control.value} of {gpu} is never restored"
        left = [key for key in self.journal if key.startswith(("pending/", "loss/"))]
        resting = {key for key in self.journal if key.startswith(RESTING)}
        for gpu in GPUS:
            machine = self.machine(gpu, Control.POWER_LIMIT)
            elsewhere = machine.bounds.resting not in (None, machine.target)
            assert machine.bounds.active or not elsewhere, (
                f"{gpu} is left at {machine.bounds.resting}"
            )
            assert (machine.bounds.resting is None) == (
                key_of(RESTING, gpu, Control.POWER_LIMIT) not in resting
            )
        assert left == [], f"the journal keeps what nobody owes: {left}"
        assert self.watched == {}, "someone is watched forever"

    def _forget_resting(self) -> None:
        """A control at rest stays as it is when a reload sets another target."""
        for gpu, control in list(self.ours):
            key = key_of(PENDING, gpu, control)
            entry = self.late.get(key) if key in self.late else self.journal.get(key)
            values, target = ([], []) if entry is None else (entry["values"], entry["target"])
            # The first write, of a lease or of an administrator's reset, may fail and change
            # nothing: it rests as before then.
            first = bool(values) and values[0] == target == [*self.values[gpu, control]]
            if not values or first:
                self.ours.discard((gpu, control))

    # --------------------------------------------------------------------------------- internals

    def apply(self, effects: list[Effect]) -> None:
        """Carries out effects one by one; zeusd may be killed between any two."""
        self.keep_late()
        for effect in effects:
            self._maybe_crash()
            if isinstance(effect, Write) and self.announce(effect):
                self._maybe_crash()  # between the journal's entry and the device, too
            super().apply([effect])
            if isinstance(effect, WatchProcess) and not self._lives(effect.process):
                self._gone.append(effect.process)

    def _lives(self, process: ProcessIdentity) -> bool:
        return any(one.process == process and one.alive for one in self.programs)

    def _maybe_crash(self) -> None:
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                self.crash_in = None
                raise CrashError

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
            while self._gone:
                # The runtime reports at once when the core asks it to watch a dead process.
                self.apply(self.core.process_gone(self.now_ns, self._gone.pop()))
        except CrashError:
            self.crash(0)

    def _reconnect(self, program: Program) -> None:
        if self.up:
            self._next_conn += 1
            program.conn = self._next_conn
            self._guarded(
                lambda: self.connect(program.conn, program.process.pid, program.uid, program.groups)
            )

    def _drain(self) -> None:
        for _ in range(10_000):
            if not self.held:
                return
            self.device_step(0)
        raise AssertionError("device calls never end")

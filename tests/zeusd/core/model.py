"""A node with any events at any time, and the invariants that must hold.

The model is the environment of a core: processes that run, hang and die, devices with queues and
faults, a journal, outside changes. Tests and `benchmarks/chaos.py` choose the events; the model
performs them, and checks the invariants.

At any time, a value that zeusd wrote is in force only if the journal lists it, or if it is the
restore target; and a process that sends heartbeats keeps its leases. Finally, when nothing fails
any more, every control without a running holder is at its restore target, or at a value that
someone else chose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tests.zeusd.core.world import GPU0, GPU1, Odd, World
from zeus_ipc.controls import READABLE, SPECS, Control, ControlValue
from zeus_ipc.errors import ErrorCode
from zeusd.core.access import Access, AllowRule
from zeusd.core.effects import Effect, Read, Reading, Watch, Write
from zeusd.core.lifecycle import Phase
from zeusd.core.model import Applied, PendingRestore, Process, pending_key
from zeusd.core.policy import GpuRule, LeaseTerms, Settings, SitePolicy
from zeusd.restore_rule import merged, near

GPUS = (GPU0, GPU1)
CONTROLS = tuple(Control)
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
    SitePolicy(rules=(GpuRule("*", power_limit_mw=220_000, gpu_clocks_mhz=(300, 1200)),)),
    SitePolicy(
        rules=(GpuRule("*", power_limit_mw=210_000, gpu_clocks_mhz=(300, 1500), enforce=True),)
    ),
)
DEFAULTS: dict[Control, ControlValue] = {
    Control.POWER_LIMIT: (280_000,),
    Control.PERSISTENCE_MODE: (0,),
    Control.GPU_CLOCKS: (),
    Control.MEMORY_CLOCKS: (),
    Control.POWER_PROFILE: (),
}
FOREIGN = (7, 8, 9)
"""Profiles that others request; processes ask for lower ones."""
FAULTS = (15, 10, 4, 999, 2, 3, 16)
"""GPU_IS_LOST, TIMEOUT, NO_PERMISSION, UNKNOWN, INVALID_ARGUMENT, NOT_SUPPORTED, RESET_REQUIRED."""

ODD_DRIVERS = (
    Odd(round_to_mw=1000),
    Odd(round_to_mw=4000),
    Odd(round_to_mw=4000, round_up=True),
    Odd(clamp_mw=(130_000, 250_000)),
    Odd(ignores=True),
    Odd(stale_reads=1),
    Odd(stale_reads=1, round_to_mw=1000),
)


class CrashError(Exception):
    """zeusd was killed in the middle of carrying out effects."""


@dataclass
class Program:
    """A process of some user."""

    process: Process
    uid: int
    groups: frozenset[int]
    conn: int
    alive: bool = True
    stopped: bool = False
    blameless: bool = True
    """It never hung, and nobody took anything from it: it must not lose a lease."""
    computing: bool = False
    silent_s: float = 0.0
    """It sends no heartbeat because it computes, for so long already."""
    wants: bool = False
    """It has made a request since it last released everything."""
    beats: bool = False
    """It has made a request, so its client sends heartbeats."""


def _is_busy(program: Program) -> bool:
    """Whether a process sends heartbeats, or computes; else nothing comes of it as time passes."""
    return program.alive and not program.stopped and (program.beats or program.computing)


class Model(World):
    """The world, with everything that can happen to it as a method, and the checks."""

    def __init__(self, policy: SitePolicy | None = None) -> None:
        self.programs: list[Program] = []
        self.crash_in: int | None = None
        self.ours: set[tuple[str, Control]] = set()
        self.targets: dict[tuple[str, Control], set[ControlValue]] = defaultdict(set)
        self.up = True
        self._allowed: dict[int, ControlValue] = {}
        self._gone: list[Process] = []
        self._seen: dict[tuple[str, Control], ControlValue | None] = {}
        self._next_conn = 100
        self._next_pid = 1000
        super().__init__(policy, (300_000, 250_000), ACCESS, LeaseTerms())
        self.hold = True
        self._drain()

    # --------------------------------------------------------------------------- what can happen

    def start_program(self, admin: bool = False) -> Program:
        """A process starts and connects."""
        self._next_pid += 1
        groups = frozenset({ADMINS}) if admin else frozenset({7})
        program = Program(Process(self._next_pid, 77), 1000 + len(self.programs) % 2, groups, 0)
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
            self._guarded(lambda: self.ask(program.conn, op, **arguments))
            if op == "release" and not arguments.get("gpus") and self.up:
                program.wants = False  # the request is done, or will be

    def set(
        self, program: Program, gpu: str, control: Control, choice: int, block: bool = True
    ) -> None:
        """A process sets one control."""
        step = choice % 5
        if control is Control.POWER_LIMIT:
            self.request(
                program,
                "set_power_limit",
                gpus=[gpu],
                power_limit_mw=120_000 + 30_000 * step,
                block=block,
            )
        elif control is Control.PERSISTENCE_MODE:
            self.request(
                program, "set_persistence_mode", gpus=[gpu], enabled=bool(step % 2), block=block
            )
        elif control is Control.POWER_PROFILE:
            wanted = ([], [1], [1, 2], [2, 3], [4])[step]
            self.request(
                program,
                "set",
                gpus=[gpu],
                control=control.value,
                value=wanted,
                block=block,
                together=choice < 4,
            )
        else:
            op = "set_gpu_clocks" if control is Control.GPU_CLOCKS else "set_memory_clocks"
            low = 300 + 100 * step
            self.request(
                program, op, gpus=[gpu], min_mhz=low, max_mhz=low + 200 * step, block=block
            )

    def kill(self, process: Process) -> None:
        """A process dies."""
        program = next(one for one in self.programs if one.process == process)
        program.alive = False
        if self.up and process in self.watched:
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
            self._guarded(lambda: self._device(call))

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
        doubts = any(entry.get("doubt") for entry in self.journal.values())
        for gpu, odd in list(self.odd.items()):
            if odd.clamp_mw is None or (self.up and not doubts):
                del self.odd[gpu]

    def hide_controls(self, gpu: str, controls: frozenset[Control]) -> None:
        """The driver fails whenever these controls of a GPU are accessed."""
        self.hidden[gpu] = controls

    def look_again(self) -> None:
        """zeusd reads its GPUs again."""
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
                    program.blameless &= program.process.pid != entry["pid"]
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
            elif self.core.putting_back:
                self.pass_time(1)  # what failed before the faults were over is tried again
            else:
                break
        broken = self.faults or self.odd or self.journal_broken or self.hidden
        if self.up and not (self.held or broken):
            assert not self.core.putting_back, "zeusd stops, and something is not back"
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
        self.settings = Settings(policy, ACCESS, LeaseTerms())
        self._seen.clear()
        self._forget_resting()
        if self.up:
            self._guarded(lambda: self.apply(self.core.reconfigure(self.now_ns, self.settings)))

    def revoke(self, program: Program, gpu: str) -> None:
        """An administrator ends everybody's leases on a GPU."""
        for other in self.programs:
            other.blameless = False
        self.request(program, "release", gpus=[gpu], whose="all")

    def put_back(self, program: Program, gpu: str, control: Control) -> None:
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

    # ------------------------------------------------------------------------ what must be true

    def check(self) -> None:
        """What must be true at every moment."""
        known = self.up and all(
            len(gpu.machines) == len(CONTROLS) for gpu in self.core.node.gpus.values()
        )
        known = known and len(self.core.node.gpus) == len(GPUS)
        if known:
            for gpu in GPUS:
                for control in CONTROLS:
                    self.targets[(gpu, control)].add(self.machine(gpu, control).target)
        for key in self.ours:
            gpu, control = key
            value = self.values[key]
            entry = self.journal.get(pending_key(gpu, control))
            key_of_rest = f"resting/{gpu}/{control.value}"
            rest = self.late.get(key_of_rest) or self.journal.get(key_of_rest, {})
            resting = tuple(rest.get("value", ()))
            if entry is not None:
                restore = PendingRestore.from_json(entry)
                # Of what cannot be read it is enough that it may be anything.
                newest_lost = self._newest_lost(gpu, control)
                listed = (*restore.values, restore.target, *self.targets[key], resting)
                anything = newest_lost and restore.values
                known_values = {_own(control, one) for one in listed}
                in_list = _own(control, value) in known_values
                assert in_list or anything or self._made_of(restore, value), (
                    f"{control.value} of {gpu} holds {value}, which the journal does not list"
                )
            elif known:
                machine = self.machine(gpu, control)
                late = pending_key(gpu, control) in self.late
                trouble = machine.trouble
                unwritten = trouble is not None and trouble.code == ErrorCode.JOURNAL_FAILED
                free = machine.phase is Phase.FREE or {*machine._values} <= {resting}
                assert free or late or unwritten, f"{control.value} of {gpu} has no record"
        if known:
            self._check_losses()

    @staticmethod
    def _made_of(restore: PendingRestore, value: ControlValue) -> bool:
        """Whether a driver may have turned a written, unconfirmed value into this one.

        The target is listed without being in doubt: what is made of it is where it belongs.
        """
        return any(
            _may_become(asked, value, restore.control)
            for asked in (*restore.doubts, restore.target)
        )

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
            entry = self.journal.get(pending_key(*limit))
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
                self._check_settled(gpu, control)
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
        left = [key for key in self.journal if key.startswith(("debt/", "lost/"))]
        resting = {key for key in self.journal if key.startswith("resting/")}
        for gpu in GPUS:
            machine = self.machine(gpu, Control.POWER_LIMIT)
            elsewhere = machine._resting not in (None, machine.target)
            assert machine.bounded or not elsewhere, f"{gpu} is left at {machine._resting}"
            assert (machine._resting is None) == (f"resting/{gpu}/power_limit" not in resting)
        assert left == [], f"the journal keeps what nobody owes: {left}"
        assert self.watched == {}, "someone is watched forever"

    def _check_settled(self, gpu: str, control: Control) -> None:
        machine, key = self.machine(gpu, control), (gpu, control)
        value = self.values[key]
        if control is Control.POWER_PROFILE and machine.phase is Phase.FREE:
            assert _own(control, value) == (), f"{gpu} is left with the profiles {value}"
            return
        if machine.phase is Phase.FREE:
            readable = SPECS[control].readable
            rests = value == machine.target or (readable and value == machine._resting)
            rests = rests or _may_become(machine.target, value, control)
            assert rests or key not in self.ours, (
                f"{control.value} of {gpu} is left at {value} instead of {machine.target}"
            )
            assert pending_key(gpu, control) not in self.journal
            if control is Control.POWER_LIMIT and machine.ceilings and key in self.ours:
                # A device that cannot go as low rests as low as it can.
                allowed = max(machine.highest(), machine._resting or ())
                assert value <= allowed, f"{gpu} rests at {value}, above its ceiling"
            return
        assert machine.phase is Phase.HELD, "all faults are gone, and it is still not restored"
        assert machine.lease is not None
        holder = machine.lease.holder
        program = next(one for one in self.programs if one.process == holder)
        assert program.alive, f"{control.value} of {gpu} is held by the dead"
        assert not program.stopped, f"{control.value} of {gpu} is held by who hangs"
        if pending_key(gpu, control) not in self.lost:
            assert program.wants, f"{control.value} of {gpu} is held by who has released it"
        assert pending_key(gpu, control) in self.journal or not machine._values
        if control is Control.POWER_LIMIT and key in self.ours:
            allowed = machine.ceilings.lowest(value, machine.lease.over), machine.value
            # A device that cannot go as low stays as low as it can, also under a new lease.
            lowest = (self.lowest_mw.get(gpu),)
            assert value in (*allowed, lowest), f"{gpu} holds {value}, above its ceiling"
        newest_lost = self._newest_lost(gpu, control)
        if key in self.ours and machine.value is not None and not newest_lost:
            # After a crash the newest one may have been only intended, or be a rounded value.
            listed = {_own(control, one) for one in (*machine._values, machine.target)}
            assert _own(control, value) in listed or self._made_of(
                machine._pending_restore(), value
            )

    def _newest_lost(self, gpu: str, control: Control) -> bool:
        """Whether the journal may lack the newest value of a control that cannot be read."""
        missing = self.outdated | self.lost | self.behind
        return control not in READABLE and pending_key(gpu, control) in missing

    def _forget_resting(self) -> None:
        """A control at rest stays as it is when a reload sets another target."""
        for gpu, control in list(self.ours):
            key = pending_key(gpu, control)
            entry = self.late.get(key) if key in self.late else self.journal.get(key)
            values, target = ([], []) if entry is None else (entry["values"], entry["target"])
            # The first write, of a lease or of an administrator's reset, may fail and change
            # nothing: it rests as before then.
            first = bool(values) and values[0] == target == [*self.values[gpu, control]]
            if not values or first:
                self.ours.discard((gpu, control))

    def _check_losses(self) -> None:
        for program in self.programs:
            if program.blameless and program.alive:
                for gpu in GPUS:
                    for control in CONTROLS:
                        assert not self.machine(gpu, control).lost_by(program.process), (
                            f"{program.process} lost {control.value} of {gpu} although it lives"
                        )

    # --------------------------------------------------------------------------------- internals

    def apply(self, effects: list[Effect]) -> None:
        """Carries out effects one by one; zeusd may be killed between any two."""
        self.keep_late()
        for effect in effects:
            self._maybe_crash()
            if isinstance(effect, Write) and self.announce(effect):
                self._maybe_crash()  # between the journal's entry and the device, too
            super().apply([effect])
            if isinstance(effect, Watch) and not self._lives(effect.process):
                self._gone.append(effect.process)

    def _lives(self, process: Process) -> bool:
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

    def _device(self, call: Read | Write) -> None:
        key: Any = (call.gpu, call.control)
        if isinstance(call, Read):
            if call.reading is Reading.CONTROL:
                assert call.control is not None
                self._seen.pop(key, None)
                machine = self.machine(call.gpu, call.control)
                if machine.phase is Phase.RESTORING:
                    known = (*machine._values, machine.target)
                    ours = self.values[key] in known or self._made_of(
                        machine._pending_restore(), self.values[key]
                    )
                    self._seen[key] = None if ours else self.values[key]
        elif call.control in READABLE and call.value == call.restore.target:
            self._check_not_clobbered(call)
        super()._device(call)

    def _check_not_clobbered(self, write: Write) -> None:
        """A restore overwrites zeusd's own values, and not outside changes that it noticed."""
        seen = self._seen.pop((write.gpu, write.control), None)
        asked = write.restore.overwrite != "ours"
        keeps = self.settings.site.outside_change == "keep" and not asked
        assert seen is None or not keeps, (
            f"{write.control.value} of {write.gpu}: {seen}, which someone else set, is overwritten"
        )

    def _submit(self, call: Read | Write) -> None:
        """The value that a ceiling allows is decided when the call begins; it may change later."""
        if isinstance(call, Write) and call.control is Control.POWER_LIMIT:
            machine = self.machine(call.gpu, call.control)
            over = "" if machine.lease is None else machine.lease.over
            self._allowed[call.ticket] = machine.highest(over)
        super()._submit(call)

    def _check_not_raised(self, write: Write) -> None:
        """No event raises a limit above the least of the ceilings."""
        highest = self._allowed.get(write.ticket)
        if highest is not None:
            lowest = (self.range_of(write.gpu)[0],)  # of a device that goes no lower
            assert write.value <= highest or write.value == lowest, (
                f"{write.gpu} is set to {write.value}, above its ceiling {highest}"
            )

    def _carry_out(self, call: Write, code: int | None) -> object:
        """Nor does a driver that rounds; one that clamps or ignores can only be reported."""
        result = super()._carry_out(call, code)
        highest = self._allowed.pop(call.ticket, None)
        odd = self.odd.get(call.gpu)
        obeys = odd is None or (odd.clamp_mw is None and not odd.ignores)
        if isinstance(result, Applied) and highest is not None and obeys:
            holds = self.values[(call.gpu, call.control)]
            assert holds <= highest, f"{call.gpu} holds {holds}, above its ceiling {highest}"
        return result

    def _write_device(self, write: Write) -> None:
        """The device's side of a write whose caller is gone."""
        key = (write.gpu, write.control)
        merges = SPECS[write.control].merges
        if not merges and self._changed(write):
            return
        if self.faults.get(key) is None and self._takes(write):
            if SPECS[write.control].merges:
                earlier = write.expected or (() if write.before is None else (write.before,))
                write = replace(write, value=merged(self.values[key], earlier, write.value))
            self._apply(write)

    def _apply(self, call: Write) -> None:
        """A rounded value counts as zeusd's own."""
        before = self.values[(call.gpu, call.control)]
        super()._apply(call)
        if call.control is Control.POWER_PROFILE:
            after = self.values[(call.gpu, call.control)]
            assert {*before} & {*FOREIGN} == {*after} & {*FOREIGN}, (
                f"what others request on {call.gpu} is {before}, and zeusd makes it {after}"
            )
        # An outside write of the same value is as if nobody had written it.
        if call.control not in READABLE or self.values[(call.gpu, call.control)] != before:
            self.ours.add((call.gpu, call.control))

    def wrote(self, write: Write) -> None:
        """A write has reached its device."""
        self._check_not_raised(write)

    def _reconnect(self, program: Program) -> None:
        self._next_conn += 1
        program.conn = self._next_conn
        if self.up:
            self._guarded(
                lambda: self.connect(program.conn, program.process.pid, program.uid, program.groups)
            )

    def _drain(self) -> None:
        for _ in range(10_000):
            if not self.held:
                return
            self.device_step(0)
        raise AssertionError("device calls never end")


def _own(control: Control, value: ControlValue) -> ControlValue:
    """A value without the requests of others."""
    if control is not Control.POWER_PROFILE:
        return value
    return tuple(one for one in value if one not in FOREIGN)


def _may_become(asked: ControlValue | None, value: ControlValue, control: Control) -> bool:
    """Whether some driver turns the requested value into this one."""
    if not asked or control is not Control.POWER_LIMIT:
        return asked == value
    clamps = [odd.clamp_mw for odd in ODD_DRIVERS if odd.clamp_mw is not None]
    clamped = [(min(max(asked[0], low), high),) for low, high in clamps]
    return near(asked, value, SPECS[control].rounding) or value in clamped

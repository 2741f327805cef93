"""What must be true of a node, whatever happens: the checks of `model.Model`.

At any time, a value that zeusd wrote is in force only if the journal lists it, or if it is the
restore target; nothing is written above a ceiling; no outside change that was noticed is
overwritten; and a process that sends heartbeats keeps its leases. Finally, when nothing fails any
more, every control without a running holder is at its restore target, or at a value that someone
else chose.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from tests.zeusd.core.world import GPU0, GPU1, Odd, World
from zeus_ipc.controls import SPECS, Control, ControlValue
from zeus_ipc.errors import ErrorCode
from zeusd.core.access import Access
from zeusd.core.effects import Read, ReadingMade, Write
from zeusd.core.entries import PENDING, RESTING, PendingRestore, key_of
from zeusd.core.lifecycle import Phase
from zeusd.core.model import ProcessIdentity
from zeusd.core.policy import LeaseTerms, SitePolicy
from zeusd.restore_rule import Holds, WriteResult, merged, near

GPUS = (GPU0, GPU1)
CONTROLS = tuple(Control)
FOREIGN = (7, 8, 9)
"""Profiles that others request; processes ask for lower ones."""

ODD_DRIVERS = (
    Odd(round_to_mw=1000),
    Odd(round_to_mw=4000),
    Odd(round_to_mw=4000, round_up=True),
    Odd(clamp_mw=(130_000, 250_000)),
    Odd(ignores=True),
    Odd(stale_reads=1),
    Odd(stale_reads=1, round_to_mw=1000),
)


@dataclass
class Program:
    """A process of some user."""

    process: ProcessIdentity
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


class Checked(World):
    """The world, with checks of every device call and of all states.

    Attributes:
        programs: The processes.
        up: Whether zeusd runs.
        ours: Controls whose value zeusd wrote last.
        targets: What each control was to be restored to so far.
        written: The target at the newest write.
    """

    def __init__(self, policy: SitePolicy | None, access: Access) -> None:
        self.programs: list[Program] = []
        self.up = True
        self.ours: set[tuple[str, Control]] = set()
        self.targets: dict[tuple[str, Control], set[ControlValue]] = defaultdict(set)
        self.written: dict[tuple[str, Control], ControlValue] = {}
        self._allowed: dict[int, ControlValue] = {}
        self._seen: dict[tuple[str, Control], ControlValue | None] = {}
        super().__init__(policy, (300_000, 250_000), access, LeaseTerms())

    def check(self) -> None:
        """What must be true at every moment."""
        known = self.up and all(
            len(gpu.machines) == len(CONTROLS) for gpu in self.core.node.gpus.values()
        )
        known = known and len(self.core.node.gpus) == len(GPUS)
        if self.up:
            for machine in self.core.node.machines():
                self.targets[(machine.gpu, machine.control)].add(machine.target)
        for key in self.ours:
            gpu, control = key
            value = self.values[key]
            entry = self.journal.get(key_of(PENDING, gpu, control))
            key_of_rest = key_of(RESTING, gpu, control)
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
                made = any(
                    self._made_of(replace(restore, target=one), value)
                    for one in (restore.target, self.written.get(key, restore.target))
                )
                assert in_list or anything or made, (
                    f"{control.value} of {gpu} holds {value}, which the journal does not list"
                )
            elif known:
                machine = self.machine(gpu, control)
                late = key_of(PENDING, gpu, control) in self.late
                trouble = machine.trouble
                unwritten = trouble is not None and trouble.code == ErrorCode.JOURNAL_FAILED
                free = machine.phase is Phase.FREE or {*machine.values.values} <= {resting}
                assert free or late or unwritten, f"{control.value} of {gpu} has no record"
        if known:
            self._check_losses()

    def check_settled(self, gpu: str, control: Control) -> None:
        machine, key = self.machine(gpu, control), (gpu, control)
        value = self.values[key]
        if control is Control.POWER_PROFILE and machine.phase is Phase.FREE:
            assert _own(control, value) == (), f"{gpu} is left with the profiles {value}"
            return
        if machine.phase is Phase.FREE:
            readable = SPECS[control].readable
            rests = value == machine.target or (readable and value == machine.bounds.resting)
            rests = rests or _may_become(machine.target, value, control)
            assert rests or key not in self.ours, (
                f"{control.value} of {gpu} is left at {value} instead of {machine.target}"
            )
            assert key_of(PENDING, gpu, control) not in self.journal
            if control is Control.POWER_LIMIT and machine.ceilings and key in self.ours:
                # A device that cannot go as low rests as low as it can.
                allowed = max(machine.bounds.highest(), machine.bounds.resting or ())
                assert value <= allowed, f"{gpu} rests at {value}, above its ceiling"
            return
        assert machine.phase is Phase.HELD, "all faults are gone, and it is still not restored"
        assert machine.lease is not None
        holder = machine.lease.holder
        program = next(one for one in self.programs if one.process == holder)
        assert program.alive, f"{control.value} of {gpu} is held by the dead"
        assert not program.stopped, f"{control.value} of {gpu} is held by who hangs"
        if key_of(PENDING, gpu, control) not in self.lost:
            assert program.wants, f"{control.value} of {gpu} is held by who has released it"
        assert key_of(PENDING, gpu, control) in self.journal or not machine.values.values
        if control is Control.POWER_LIMIT and key in self.ours:
            newest = machine.values.newest
            allowed = machine.ceilings.lowest(value, machine.lease.over), newest
            # A device that cannot go as low stays as low as it can, also under a new lease.
            lowest = (self.lowest_mw.get(gpu),)
            assert value in (*allowed, lowest), f"{gpu} holds {value}, above its ceiling"
        newest_lost = self._newest_lost(gpu, control)
        if key in self.ours and machine.values.newest is not None and not newest_lost:
            # After a crash the newest one may have been only intended, or be a rounded value.
            listed = {_own(control, one) for one in (*machine.values.values, machine.target)}
            assert _own(control, value) in listed or self._made_of(machine.pending_restore(), value)

    def _check_losses(self) -> None:
        for program in self.programs:
            if program.blameless and program.alive:
                for gpu in GPUS:
                    for control in CONTROLS:
                        assert not self.machine(gpu, control).holding.lost_by(program.process), (
                            f"{program.process} lost {control.value} of {gpu} although it lives"
                        )

    def _newest_lost(self, gpu: str, control: Control) -> bool:
        """Whether the journal may lack the newest value of a control that cannot be read."""
        missing = self.outdated | self.lost | self.behind
        return not SPECS[control].readable and key_of(PENDING, gpu, control) in missing

    @staticmethod
    def _made_of(restore: PendingRestore, value: ControlValue) -> bool:
        """Whether a driver may have turned a written, unconfirmed value into this one.

        Where a driver rounds up, zeusd writes the next lower value, and that write may be the one
        whose outcome is not known. The target is listed without being in doubt: what is made of it
        is where it belongs.
        """
        step = SPECS[restore.control].rounding
        lower = (tuple(part - step for part in asked) for asked in restore.doubts)
        return any(
            _may_become(asked, value, restore.control)
            for asked in (*restore.doubts, *lower, restore.target)
        )

    # ------------------------------------------------------------------------------ device calls

    def reach(self, call: Read | Write) -> None:
        key: Any = (call.gpu, call.control)
        if isinstance(call, Read):
            if call.reading is ReadingMade.CONTROL:
                assert call.control is not None
                self._seen.pop(key, None)
                machine = self.machine(call.gpu, call.control)
                if machine.phase is Phase.RESTORING:
                    known = (*machine.values.values, machine.target)
                    ours = self.values[key] in known or self._made_of(
                        machine.pending_restore(), self.values[key]
                    )
                    self._seen[key] = None if ours else self.values[key]
        elif SPECS[call.control].readable and call.value == call.restore.target:
            self._check_not_clobbered(call)
        super().reach(call)

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
        if isinstance(call, Write):
            key = call.gpu, call.control
            self.written[key] = call.restore.target
            self.targets[key].add(call.restore.target)
        if isinstance(call, Write) and call.control is Control.POWER_LIMIT:
            machine = self.machine(call.gpu, call.control)
            over = "" if machine.lease is None else machine.lease.over
            self._allowed[call.ticket] = machine.bounds.highest(over)
        super()._submit(call)

    def _check_not_raised(self, write: Write) -> None:
        """No event raises a limit above the least of the ceilings."""
        highest = self._allowed.get(write.ticket)
        if highest is not None:
            lowest = (self.range_of(write.gpu)[0],)  # of a device that goes no lower
            assert write.value <= highest or write.value == lowest, (
                f"{write.gpu} is set to {write.value}, above its ceiling {highest}"
            )

    def _carry_out(self, call: Write, code: int | None) -> WriteResult:
        """Nor does a driver that rounds; one that clamps or ignores can only be reported."""
        before = self.values[(call.gpu, call.control)]
        result = super()._carry_out(call, code)
        highest = self._allowed.pop(call.ticket, None)
        odd = self.odd.get(call.gpu)
        obeys = odd is None or (odd.clamp_mw is None and not odd.ignores)
        if isinstance(result, Holds) and highest is not None and obeys:
            holds = self.values[(call.gpu, call.control)]
            # What is set outside between zeusd's reading and its write is seen at the next look.
            unseen = call.before not in (None, before) and holds == before
            assert holds <= highest or unseen, (
                f"{call.gpu} holds {holds}, above its ceiling {highest}"
            )
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
            self.take(write)

    def take(self, call: Write) -> None:
        """A rounded value counts as zeusd's own."""
        before = self.values[(call.gpu, call.control)]
        super().take(call)
        if call.control is Control.POWER_PROFILE:
            after = self.values[(call.gpu, call.control)]
            assert {*before} & {*FOREIGN} == {*after} & {*FOREIGN}, (
                f"what others request on {call.gpu} is {before}, and zeusd makes it {after}"
            )
        # An outside write of the same value is as if nobody had written it.
        if not SPECS[call.control].readable or self.values[(call.gpu, call.control)] != before:
            self.ours.add((call.gpu, call.control))

    def wrote(self, write: Write) -> None:
        """A write has reached its device."""
        self._check_not_raised(write)


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

"""The restore rule: what a write did, what to compare and write, and when a restore has succeeded.

The daemon and `zeusd restore`, which runs when no daemon can, share it: pure, and standard library
only. `restore_steps` yields device operations and receives their results, so the daemon can drive
it from its event loop and the helper with one call after another.

A write has one of three outcomes: `WriteRefused`, `Holds` or `Unknown`. Only a refusal proves that
nothing changed. A write whose effect was never seen may still take effect until the driver's bound
has passed (`SETTLE_S`); until then a restore writes, looks again, and is not over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from zeus_ipc.controls import ControlSpec
from zeusd.devices.port import DeviceError

Value = tuple[int, ...]

OURS, HIGHER, ALL = "ours", "higher", "all"
"""What a restore overwrites: zeusd's own values; also any higher value; any value."""

SETTLE_S = 5.0
"""How long after a write a driver may apply it, unless the site says otherwise."""


@dataclass(frozen=True, slots=True)
class WriteRefused:
    """Nothing was written: the setter itself refused, or was never called.

    Attributes:
        trouble: Why; None: because of `found`.
        found: A value that zeusd did not write, and that was not to be overwritten.
        invalid: Whether the device does not accept the value.
    """

    trouble: Any
    found: Value | None = None
    invalid: bool = False


@dataclass(frozen=True, slots=True)
class Holds:
    """The write took effect: this was read back twice. Of a control that cannot be read, it is what
    the driver accepted.

    Attributes:
        late: What the write may still bring, as the value was in force before; or values close to
            it. While there are some, the value is not settled.
    """

    value: Value
    late: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Unknown:
    """What the write did, or may still do, is not known; also of a reading that failed.

    Attributes:
        trouble: The error; None: the driver reported success, and the value has not changed yet.
        holds: The newest reading, if there was one.
    """

    trouble: Any
    holds: Value | None = None


WriteResult: TypeAlias = WriteRefused | Holds | Unknown


@dataclass(frozen=True)
class RestorePlan:
    """The input of a restore.

    Attributes:
        target: The value that it should have.
        values: Values that zeusd may have left in force, newest last; empty: none.
        doubts: Those of `values` whose write was never confirmed: the device may have rounded one
            or moved it into its range.
        unsettled: Whether an earlier write may still take effect.
        confirmed: Whether the last write, of the newest value, was.
        overwrite: OURS, HIGHER or ALL.
    """

    spec: ControlSpec
    target: Value
    values: tuple[Value, ...]
    doubts: tuple[Value, ...] = ()
    unsettled: bool = False
    confirmed: bool = False
    overwrite: str = OURS


@dataclass(frozen=True)
class ReadControl:
    """Read the control; send the value, or `Unknown`."""


@dataclass(frozen=True)
class WriteControl:
    """Write this value and read it back; send the outcome.

    Attributes:
        found: The value just before, if known.
        expected: Write only if the control has one of these; empty: in any case.
        sure: Whether readings must be as far apart as the longest settling seen, as for a restore.
    """

    value: Value
    found: Value | None = None
    expected: tuple[Value, ...] = ()
    sure: bool = True


@dataclass(frozen=True)
class Range:
    """Read the smallest and largest value that the device accepts; send both, or `Unknown`."""


Step: TypeAlias = ReadControl | WriteControl | Range


@dataclass(frozen=True)
class Result:
    """The result of a restore.

    Attributes:
        kind: `untouched`, if nothing was ever written; `already_back`, if the target was in force;
            `changed_outside`, if someone else chose the value found, and it stays; `restored`;
            `settling`: look again when no earlier write can take effect; `failed`: try again.
        target: The value written last; not the target if the device refused that.
        holds: The control's value now, if known.
        found: Its value before, if known.
        foreign: Whether someone else had set that value.
        wrote: Whether a write was tried.
        refused: Whether it failed, and certainly changed nothing.
        trouble: Why it failed; None: the driver accepted the write, and the value did not change.
    """

    kind: str
    target: Value
    holds: Value | None = None
    found: Value | None = None
    foreign: bool = False
    trouble: Any = None
    wrote: bool = False
    refused: bool = False

    @property
    def in_force(self) -> Value:
        """The control's value now, as far as known."""
        return self.target if self.holds is None else self.holds

    @property
    def pending(self) -> bool:
        """Whether the restore has to be tried again."""
        return self.kind in ("failed", "settling")


# ------------------------------------------------------------------------------- what a driver does


def near(one: Value, other: Value, rounding: int) -> bool:
    """Whether a driver may have rounded one value to the other."""
    return one == other or (
        len(one) == len(other)
        and all(abs(a - b) < rounding for a, b in zip(one, other, strict=True))
    )


def is_rounded(current: Value, doubts: Iterable[Value], rounding: int) -> bool:
    """Whether this value may result from a write that was never confirmed: rounded, also after a
    lower one was written instead (`Device._write_lower`)."""
    return any(
        near(one, current, rounding)
        for doubt in doubts
        for one in (doubt, tuple(part - rounding for part in doubt))
    )


def is_moved(current: Value, doubts: Iterable[Value], ends: tuple[int, int]) -> bool:
    """The same for a driver that moves values to the nearer end of its range."""
    low, high = ends
    return any(current == tuple(min(max(part, low), high) for part in doubt) for doubt in doubts)


def read_settled(read: Callable[[], Value]) -> Value:
    """Reads a control twice, because a driver may return an older value once."""
    before, holds = None, read()
    for _ in range(4):
        if holds == before:
            break
        before, holds = holds, read()
    return holds


# ---------------------------------------------------------------------------------------- writing

PAUSES_S = (0.0, 0.0, 0.002, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4)
"""Pauses before each reading back, a second in all."""

ROUNDED_UP_TRIES = 5
"""Steps into which the driver's rounding is divided: 1 W of 5 W."""


@dataclass
class Device:
    """One control of one GPU, as its driver was seen to behave.

    Attributes:
        sleep: Sleeps for some seconds.
        rounding: The driver may round by less than this.
        settling_s: The longest time that a write was seen to take.
        rounded: A value that it seemed to round to the one before, and that one.
        lower: A value that it rounded up too far, and the lower one that was written instead.
    """

    read: Callable[[], Value]
    write: Callable[[Value], object]
    sleep: Callable[[float], object]
    rounding: int = 0
    settling_s: float = 0.0
    rounded: tuple[Value, Value] | None = None
    lower: tuple[Value, Value] | None = None

    def attempt(self, value: Value) -> WriteRefused | Unknown | None:
        """Calls the setter. None: it reported success."""
        try:
            self.write(value)
        except DeviceError as error:
            return refusal(error) if error.refused else Unknown(error)
        return None

    def write_verified(
        self, asked: Value, before: Value, sure: bool = False, others: bool = False
    ) -> WriteResult:
        """Writes a value and reads it back until the effect is clear.

        If the driver rounds up, writes lower values until the result is not above `asked`, which
        may be a ceiling. What it holds already is not written again.
        """
        if self.lower is not None and self.lower[0] == asked:
            asked = self.lower[1]
        if not others and (asked == before or self.rounded == (asked, before)):
            return Holds(before)  # a write would prove nothing, and could take effect later
        failed = self.attempt(asked)
        if failed is not None:
            return failed
        outcome = self._read_back(asked, before, sure, others)
        if asked == before and isinstance(outcome, Holds):
            return Holds(outcome.value, (asked,))
        above = outcome.value if isinstance(outcome, Holds) else asked
        if above <= asked or not near(asked, above, self.rounding):
            return outcome
        return self._write_lower(asked, above, before, sure, others)

    def _write_lower(
        self, asked: Value, above: Value, before: Value, sure: bool, others: bool
    ) -> WriteResult:
        """The driver rounds up. If `above` was there before, it may also be late: then a second has
        passed, and the largest step is taken."""
        late = [asked, above] if above == before else []
        for steps in range(ROUNDED_UP_TRIES if late else 1, ROUNDED_UP_TRIES + 1):
            less = tuple(part - steps * self.rounding // ROUNDED_UP_TRIES for part in above)
            if less >= asked:
                continue
            failed = self.attempt(less)
            if isinstance(failed, WriteRefused) and failed.invalid:
                continue  # too little for it
            if failed is not None:
                return Unknown(failed.trouble, above)
            outcome = self._read_back(less, above, sure, others)
            if isinstance(outcome, Unknown):
                return outcome
            if outcome.value != less:
                late.append(less)  # it rounds to that, or another write has taken effect so far
            if outcome.value <= asked:
                self.lower = asked, less
                return Holds(outcome.value, tuple(late))
        return Holds(above)

    def write_merged(
        self, wanted: Value, before: Sequence[Value], sure: bool = False
    ) -> WriteResult:
        """Changes zeusd's part of a set. Arguments as for `merged` and `write_verified`. The value
        of the outcome is zeusd's part, without what others have added."""
        try:
            current = read_settled(self.read)
        except DeviceError as error:
            return refusal(error)
        asked = merged(current, before, wanted)
        outcome: WriteResult = Holds(current)
        if asked != current:
            outcome = self.write_verified(asked, current, sure)
        if not isinstance(outcome, Holds):
            return outcome
        ours = set(wanted).union(*before)
        return Holds(tuple(part for part in outcome.value if part in ours))

    def _read_back(self, asked: Value, before: Value, sure: bool, others: bool) -> Holds | Unknown:
        """The control's value after a write, as soon as it is clear.

        A reading that fails proves nothing. Nor does another value than the requested one while an
        earlier write may still take effect (`others`).
        """
        last: Value | None = None
        trouble: DeviceError | None = None
        waited_s = 0.0
        for pause_s in PAUSES_S:
            waited_s += pause_s
            try:
                if pause_s:
                    self.sleep(pause_s)
                holds = self.read()
                if holds == asked:
                    if holds != before:
                        self.settling_s = max(self.settling_s, waited_s)
                    if sure and self.settling_s:
                        self.sleep(self.settling_s)
                    holds = self.read()  # the first one may have been an older value
                    if holds == asked:
                        return Holds(holds)
            except DeviceError as error:
                trouble, last = error, None
                continue
            if holds == last and holds != before and not others:
                return Holds(holds)
            trouble, last = None, holds
        if last is not None and near(asked, last, self.rounding) and not others:
            # Or it is late, and may still round to another value.
            self.rounded = (asked, last) if last <= asked else None
            return Holds(last, (asked, last))
        return Unknown(trouble, last)


def refusal(error: DeviceError) -> WriteRefused:
    """Nothing was written because of this error."""
    return WriteRefused(error, invalid=error.invalid)


def merged(current: Value, before: Iterable[Value], wanted: Value) -> Value:
    """The new set after zeusd changes its part of it, including concurrent changes by others. A
    member of all sets in `before` that is not in `found` was removed by others and stays out."""
    earlier = [set(value) for value in before]
    everything: set[int] = set().union(*earlier)
    leaves = everything - set(wanted)
    comes = {part for part in wanted if not earlier or any(part not in one for one in earlier)}
    return tuple(sorted((set(current) - leaves) | comes))


# -------------------------------------------------------------------------------------- restoring


def restore_steps(plan: RestorePlan) -> Generator[Step, Any, Result]:
    """The restore of one control, step by step."""
    spec, target, current, foreign = plan.spec, plan.target, None, False
    if not plan.values and plan.overwrite == OURS:
        return Result("untouched", target)
    added = set().union(*plan.values) - set(target) if spec.merges else set()
    if spec.readable:
        current = yield ReadControl()
        if isinstance(current, Unknown):
            return Result("failed", target, trouble=current.trouble, refused=True)
        if spec.merges:
            target = tuple(part for part in current if part not in added)
        foreign = current != target and not spec.merges and not (yield from _is_ours(plan, current))
        if foreign and not _overwrites(plan, current):
            kind = "settling" if plan.unsettled else "changed_outside"
            return Result(kind, target, current, current, foreign)
        if current == target and not plan.unsettled:
            return Result("already_back", target, current, current)
        written = plan.confirmed and plan.values[-1:] == (target,)
        if current == target and (written or spec.merges):
            return Result("settling", target, current, current)
    outcome = yield WriteControl(target, current)
    if isinstance(outcome, WriteRefused) and outcome.invalid:
        nearest = yield from _nearest(plan)
        if nearest is not None and nearest != target:
            target = nearest
            outcome = yield WriteControl(target, current)
    if isinstance(outcome, Holds) and added.isdisjoint(outcome.value):
        late = plan.unsettled or any(value != target for value in outcome.late)
        kind = "settling" if late else "restored"
        return Result(kind, target, outcome.value, current, foreign, wrote=True)
    holds = None
    if not isinstance(outcome, WriteRefused):
        holds = outcome.value if isinstance(outcome, Holds) else outcome.holds
    trouble = None if isinstance(outcome, Holds) else outcome.trouble
    refused = isinstance(outcome, WriteRefused)
    return Result("failed", target, holds, current, foreign, trouble, True, refused)


def _is_ours(plan: RestorePlan, current: Value) -> Generator[Step, Any, bool]:
    if current in plan.values:
        return True
    if is_rounded(current, plan.doubts, plan.spec.rounding):
        return True
    if not plan.doubts or plan.spec.refused_target != "nearest":
        return False
    ends = yield Range()
    return not isinstance(ends, Unknown) and is_moved(current, plan.doubts, ends)


def _overwrites(plan: RestorePlan, current: Value) -> bool:
    return plan.overwrite == ALL or (plan.overwrite == HIGHER and current > plan.target)


def _nearest(plan: RestorePlan) -> Generator[Step, Any, Value | None]:
    """The value to write instead of a refused target; None: not known."""
    if plan.spec.refused_target == "unlock":
        return ()
    if plan.spec.refused_target != "nearest":
        return None
    ends = yield Range()
    if isinstance(ends, Unknown):
        return None
    low, high = ends
    return tuple(min(max(part, low), high) for part in plan.target)

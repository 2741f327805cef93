"""The restore rule: what to compare, what to write, and when a restore has succeeded.

The daemon and `zeusd restore`, which runs when no daemon can, share it: pure, and standard library
only. `restore_steps` yields device operations and receives their results, so the daemon can drive
it from its event loop and the helper with one call after another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Value = tuple[int, ...]

OURS, HIGHER, ALL = "ours", "higher", "all"
"""What a restore overwrites: zeusd's own values; also any higher value; any value."""


@dataclass(frozen=True)
class Plan:
    """The input of a restore.

    Attributes:
        target: The value that the control should have.
        values: Values that zeusd may have left in force; empty: none.
        doubts: Those of `values` whose write was never confirmed: the device may have rounded one
            or moved it into its range. None: all were confirmed.
        readable: Whether the control can be read.
        rounding: The driver may round by less than this.
        refused_target: What to do if the device does not accept the target: `nearest`, `unlock` or
            `retry`.
        overwrite: OURS, HIGHER or ALL.
        merges: Whether other programs share the control: then the target is their choice, and the
            restore removes only what zeusd added to it.
    """

    target: Value
    values: tuple[Value, ...]
    doubts: tuple[Value, ...] = ()
    readable: bool = True
    rounding: int = 0
    refused_target: str = "retry"
    overwrite: str = OURS
    merges: bool = False


@dataclass(frozen=True)
class ReadControl:
    """Read the control; send the value, or `Failed`."""


@dataclass(frozen=True)
class WriteControl:
    """Write this value and read it back; send the control's value, or `Failed`."""

    value: Value
    found: Value | None
    """The value just before, if known."""


@dataclass(frozen=True)
class Range:
    """Read the smallest and largest value that the device accepts; send both, or `Failed`."""


@dataclass(frozen=True)
class Failed:
    """A step did not succeed.

    Attributes:
        trouble: The caller's report of the failure.
        invalid: Whether the device does not accept the value.
    """

    trouble: Any
    invalid: bool = False


Step = ReadControl | WriteControl | Range


@dataclass(frozen=True)
class Result:
    """The result of a restore.

    Attributes:
        kind: untouched: nothing was ever written. already_back: the target was in force.
            changed_outside: someone else chose the value found, and it stays. restored. failed:
            try again.
        holds: The control's value now, if known.
        found: Its value before, if known.
        foreign: Whether someone else had set that value.
        target: The value written last; not the target if the device refused that.
        trouble: Why it failed.
        kept: Whether it failed because the driver reported success but the value did not change.
    """

    kind: str
    target: Value
    holds: Value | None = None
    found: Value | None = None
    foreign: bool = False
    trouble: Any = None
    kept: bool = False

    @property
    def in_force(self) -> Value:
        """The control's value now, if known."""
        return self.target if self.holds is None else self.holds

    @property
    def pending(self) -> bool:
        """Whether the restore has to be tried again."""
        return self.kind == "failed"


def near(one: Value, other: Value, rounding: int) -> bool:
    """Whether a driver may have rounded one value to the other."""
    return one == other or (
        len(one) == len(other)
        and all(abs(a - b) < rounding for a, b in zip(one, other, strict=True))
    )


def took_effect(asked: Value, holds: Value, before: Value | None, rounding: int) -> bool:
    """Whether a write had an effect that a driver may have: rounded or moved, but not ignored."""
    return near(asked, holds, rounding) or (before is not None and holds != before)


def is_rounded(found: Value, doubts: Sequence[Value], rounding: int) -> bool:
    """Whether this value may result from a write that was never confirmed."""
    return any(near(doubt, found, rounding) for doubt in doubts)


def is_moved(found: Value, doubts: Sequence[Value], ends: tuple[int, int]) -> bool:
    """The same for a driver that moves values to the nearer end of its range."""
    low, high = ends
    return any(found == tuple(min(max(part, low), high) for part in doubt) for doubt in doubts)


PAUSES_S = (0.0, 0.0, 0.002, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4)
"""Pauses before each reading back: a driver may take half a second to apply a value."""


def read_settled(read: Callable[[], Value]) -> Value:
    """Reads a control twice, because a driver may return an older value once."""
    before, holds = None, read()
    for _ in range(4):
        if holds == before:
            break
        before, holds = holds, read()
    return holds


def write_verified(
    write: Callable[[Value], object],
    read: Callable[[], Value],
    asked: Value,
    before: Value,
    sleep: Callable[[float], object],
    rounding: int = 0,
) -> Value:
    """Writes a value and reads it back until the effect is clear.

    If the driver rounds up, writes lower values until the result is not above `asked`, which may be
    a ceiling.

    Args:
        write: Writes a value.
        read: Reads the control.
        asked: The requested value.
        before: The control's value before.
        sleep: Sleeps for some seconds.
        rounding: The driver may round by less than this.

    Returns:
        The control's value: `before`, if the driver ignored the write for a second.
    """
    write(asked)
    holds = _settled_at(read, asked, before, sleep)
    if holds <= asked or not near(asked, holds, rounding):
        return holds
    above = holds
    # If the value is unchanged, either it rounds to that or the write was ignored: wait a second.
    first = ROUNDED_UP_TRIES if holds == before else 1
    for steps in range(first, ROUNDED_UP_TRIES + 1):
        less = tuple(part - steps * rounding // ROUNDED_UP_TRIES for part in above)
        if less < asked:
            try:
                write(less)
            except Exception:  # noqa: BLE001 - too little for it: what it holds is known
                break
            holds = _settled_at(read, less, holds, sleep)
            if holds <= asked:
                break
    return holds


def merged(found: Value, before: Iterable[Value], wanted: Value) -> Value:
    """The new set after zeusd changes its part of it, including concurrent changes by others.

    Args:
        found: The present set.
        before: Sets that zeusd may have left in force. A member of all of these that is not in
            `found` was removed by others and stays out.
        wanted: zeusd's new part.
    """
    earlier = [set(value) for value in before]
    everything: set[int] = set().union(*earlier)
    leaves = everything - set(wanted)
    comes = {part for part in wanted if not earlier or any(part not in one for one in earlier)}
    return tuple(sorted((set(found) - leaves) | comes))


def write_merged(
    write: Callable[[Value], object],
    read: Callable[[], Value],
    wanted: Value,
    before: Sequence[Value],
    sleep: Callable[[float], object],
) -> Value:
    """Changes zeusd's part of a set. Arguments as for `merged` and `write_verified`.

    Returns:
        Zeusd's part of the set, without what others have added.
    """
    found = read_settled(read)
    asked = merged(found, before, wanted)
    holds = found if asked == found else write_verified(write, read, asked, found, sleep)
    ours = set(wanted).union(*before)
    return tuple(part for part in holds if part in ours)


ROUNDED_UP_TRIES = 5
"""Steps into which the driver's rounding is divided: 1 W of 5 W."""


def _settled_at(
    read: Callable[[], Value], asked: Value, before: Value, sleep: Callable[[float], object]
) -> Value:
    """The control's value after a write, as soon as it is clear."""
    last = None
    for pause_s in PAUSES_S:
        if pause_s:
            sleep(pause_s)
        holds = read()
        if holds == asked or (holds == last and holds != before):
            break
        last = holds
    return holds


def restore_steps(plan: Plan) -> Generator[Step, Any, Result]:
    """The restore of one control, step by step."""
    target, found, foreign = plan.target, None, False
    added = set().union(*plan.values) - set(target) if plan.merges else set()
    if not plan.values and plan.overwrite == OURS:
        return Result("untouched", target)
    if plan.readable:
        found = yield ReadControl()
        if isinstance(found, Failed):
            return Result("failed", target, trouble=found.trouble)
        if plan.merges:
            target = tuple(part for part in found if part not in added)
        if found == target:
            return Result("already_back", target, holds=found, found=found)
        foreign = not plan.merges and not (yield from _is_ours(plan, found))
        if foreign and not _overwrites(plan, found):
            return Result("changed_outside", target, holds=found, found=found, foreign=True)
    holds = yield WriteControl(target, found)
    if isinstance(holds, Failed) and holds.invalid:
        nearest = yield from _nearest(plan)
        if nearest is not None and nearest != target:
            target = nearest
            holds = yield WriteControl(target, found)
    if isinstance(holds, Failed):
        return Result("failed", target, found=found, foreign=foreign, trouble=holds.trouble)
    if plan.merges:
        took = added.isdisjoint(holds)  # including concurrent choices of others
    else:
        took = not plan.readable or took_effect(target, holds, found, plan.rounding)
    if not took:
        return Result("failed", target, holds, found, foreign, kept=True)
    return Result("restored", target, holds, found, foreign)


def _is_ours(plan: Plan, found: Value) -> Generator[Step, Any, bool]:
    if found in plan.values:
        return True
    if is_rounded(found, plan.doubts, plan.rounding):
        return True
    if not plan.doubts or plan.refused_target != "nearest":
        return False
    ends = yield Range()
    return not isinstance(ends, Failed) and is_moved(found, plan.doubts, ends)


def _overwrites(plan: Plan, found: Value) -> bool:
    return plan.overwrite == ALL or (plan.overwrite == HIGHER and found > plan.target)


def _nearest(plan: Plan) -> Generator[Step, Any, Value | None]:
    """The value to write instead of a refused target; None: not known."""
    if plan.refused_target == "unlock":
        return ()
    if plan.refused_target != "nearest":
        return None
    ends = yield Range()
    if isinstance(ends, Failed):
        return None
    low, high = ends
    return tuple(min(max(part, low), high) for part in plan.target)

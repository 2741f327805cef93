"""How a control is restored: what is compared, what is written, and when that has succeeded.

One rule for the daemon and for `zeusd restore`, which runs when no daemon can: pure, and standard
library only. `restore_steps` yields what to do with the device and is sent what came of it, so the
daemon drives it from its event loop and the helper one call after another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Value = tuple[int, ...]

OURS, HIGHER, ALL = "ours", "higher", "all"
"""What a restore overwrites: what zeusd wrote; also any higher value; whatever is found."""


@dataclass(frozen=True)
class Plan:
    """A restore, before it begins.

    Attributes:
        target: What the control should hold.
        values: What zeusd may have left in force; empty: nothing.
        doubts: Those of these whose write was never confirmed: the device may hold one rounded or
            moved into its range. None: all were confirmed.
        readable: Whether the device can say what it holds.
        rounding: A driver may round by less than this.
        refused_target: What follows when the device does not take the target: `nearest`, `unlock`
            or `retry`.
        overwrite: OURS, HIGHER or ALL.
        merges: Whether others choose beside zeusd: then the target is what they had chosen, and the
            restore takes away what zeusd has added to it, and nothing else.
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
class Look:
    """Read what the control holds; send it, or `Failed`."""


@dataclass(frozen=True)
class Put:
    """Write this value and read it back; send what the control then holds, or `Failed`."""

    value: Value
    found: Value | None
    """What it held just before, where that is known."""


@dataclass(frozen=True)
class Range:
    """Read the smallest and largest value that the device takes; send both, or `Failed`."""


@dataclass(frozen=True)
class Failed:
    """A step did not succeed.

    Attributes:
        trouble: What the caller reports of it.
        invalid: Whether the device does not take the value.
    """

    trouble: Any
    invalid: bool = False


Step = Look | Put | Range


@dataclass(frozen=True)
class Result:
    """What came of a restore.

    Attributes:
        kind: untouched: nothing was ever written. already_back: the target was in force.
            changed_outside: someone else chose the value found, and it stays. restored. failed:
            try again.
        holds: What the control holds now, where that is known.
        found: What it held before, where that is known.
        foreign: Whether someone else had chosen that.
        target: The value written last: another one where the device refused the target.
        trouble: Why it failed.
        kept: Whether it failed because the driver answered OK and the control did not move.
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
        """What the control holds now, as far as that is known."""
        return self.target if self.holds is None else self.holds

    @property
    def pending(self) -> bool:
        """Whether the restore has to be tried again."""
        return self.kind == "failed"


def near(one: Value, other: Value, rounding: int) -> bool:
    """Whether a driver may have made one value of the other by rounding it."""
    return one == other or (
        len(one) == len(other)
        and all(abs(a - b) < rounding for a, b in zip(one, other, strict=True))
    )


def took_effect(asked: Value, holds: Value, before: Value | None, rounding: int) -> bool:
    """Whether a write did what a driver may make of it: rounded or moved, but not ignored."""
    return near(asked, holds, rounding) or (before is not None and holds != before)


def is_rounded(found: Value, doubts: Sequence[Value], rounding: int) -> bool:
    """Whether a driver may have made this of a value whose write was never confirmed."""
    return any(near(doubt, found, rounding) for doubt in doubts)


def is_moved(found: Value, doubts: Sequence[Value], ends: tuple[int, int]) -> bool:
    """The same for a driver that moves what it is told into its range, to the nearer end."""
    low, high = ends
    return any(found == tuple(min(max(part, low), high) for part in doubt) for doubt in doubts)


PAUSES_S = (0.0, 0.0, 0.002, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4)
"""Pauses before each reading back: a driver may take half a second to follow."""


def read_settled(read: Callable[[], Value]) -> Value:
    """What a control holds, read twice: a driver may show an older value once."""
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
    """Writes a value and reads it back until it is clear what the device made of it.

    A driver that rounds up is asked for less until what it holds is not above what was asked: that
    may be a ceiling.

    Args:
        write: Writes a value.
        read: Reads the control.
        asked: What is wanted.
        before: What the control held.
        sleep: Lets seconds pass.
        rounding: The driver may round by less than this.

    Returns:
        What the control holds: `before`, if the driver has ignored the write for a second.
    """
    write(asked)
    holds = _settled_at(read, asked, before, sleep)
    if holds <= asked or not near(asked, holds, rounding):
        return holds
    above = holds
    # What it held before may be what it rounds to, or the write was ignored: that takes a second.
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
    """What a set becomes when zeusd changes its part of it, whatever others do meanwhile.

    Args:
        found: What it holds.
        before: What zeusd may have left in it; what all of these have, others may have taken away.
        wanted: What zeusd wants instead.
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
        What of the set zeusd has a say in: what others have added is left out.
    """
    found = read_settled(read)
    asked = merged(found, before, wanted)
    holds = found if asked == found else write_verified(write, read, asked, found, sleep)
    ours = set(wanted).union(*before)
    return tuple(part for part in holds if part in ours)


ROUNDED_UP_TRIES = 5
"""Into so many steps the driver's rounding is parted: whole watts of 5 W."""


def _settled_at(
    read: Callable[[], Value], asked: Value, before: Value, sleep: Callable[[float], object]
) -> Value:
    """What the control holds after a write, as soon as that is clear."""
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
        found = yield Look()
        if isinstance(found, Failed):
            return Result("failed", target, trouble=found.trouble)
        if plan.merges:
            target = tuple(part for part in found if part not in added)
        if found == target:
            return Result("already_back", target, holds=found, found=found)
        foreign = not plan.merges and not (yield from _is_ours(plan, found))
        if foreign and not _overwrites(plan, found):
            return Result("changed_outside", target, holds=found, found=found, foreign=True)
    holds = yield Put(target, found)
    if isinstance(holds, Failed) and holds.invalid:
        nearest = yield from _nearest(plan)
        if nearest is not None and nearest != target:
            target = nearest
            holds = yield Put(target, found)
    if isinstance(holds, Failed):
        return Result("failed", target, found=found, foreign=foreign, trouble=holds.trouble)
    if plan.merges:
        took = added.isdisjoint(holds)  # whatever others have chosen meanwhile
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
    """What the device takes instead of a target that it refuses; None: nothing is known."""
    if plan.refused_target == "unlock":
        return ()
    if plan.refused_target != "nearest":
        return None
    ends = yield Range()
    if isinstance(ends, Failed):
        return None
    low, high = ends
    return tuple(min(max(part, low), high) for part in plan.target)

"""The journal's records of one control: whether one record covers another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeus_ipc.controls import Control
from zeusd.core.entries import LISTED, PendingRestore
from zeusd.core.model import ProcessIdentity
from zeusd.restore import plan_of

GPU = "GPU-0e8a1b2c-3d4e-5f60-7182-93a4b5c6d7e8"


def pending(control: Control, *values: tuple[int, ...]) -> PendingRestore:
    target = (250_000,) if control is Control.POWER_LIMIT else ()
    return PendingRestore(
        GPU,
        control,
        ProcessIdentity(4711, 987_654),
        1000,
        "client",
        1,
        15_000_000_000,
        target,
        values,
    )


def of(restore: PendingRestore, *values: tuple[int, ...]) -> PendingRestore:
    return replace(restore, values=values)


LIMIT = pending(Control.POWER_LIMIT, (250_000,), (150_000,))
CLOCKS = pending(Control.GPU_CLOCKS, (), (600, 900))


@pytest.mark.parametrize(
    ("values", "covered"),
    [
        ([(150_000,), (250_000,)], True),
        ([(150_000,)], True),
        ([], True),
        ([(150_000,), (151_000,)], False),
    ],
)
def test_a_value_that_may_be_in_force_is_durable_first(
    values: list[tuple[int, ...]], covered: bool
) -> None:
    assert LIMIT.covers(of(LIMIT, *values)) is covered
    assert LIMIT.covers(replace(of(LIMIT, *values), ending="released")) is covered


def test_the_target_needs_no_record_of_its_own() -> None:
    assert of(LIMIT, (150_000,)).covers(of(LIMIT, (150_000,), (250_000,)))


def test_an_unreadable_control_may_hold_any_value_once_it_was_changed() -> None:
    other = of(CLOCKS, (600, 900), (700, 700))
    assert CLOCKS.covers(other)
    assert not of(CLOCKS).covers(other), "it was only acquired"
    assert other.following(CLOCKS) == other


@pytest.mark.parametrize(
    "durable",
    [
        replace(LIMIT, target=(240_000,)),
        replace(LIMIT, holder=ProcessIdentity(1, 987_654)),
        replace(LIMIT, holder=ProcessIdentity(4711, 1)),
        replace(LIMIT, overwrite="all"),
        replace(LIMIT, ending="released"),
    ],
)
def test_another_restore_is_not_the_same(durable: PendingRestore) -> None:
    assert not durable.covers(LIMIT)
    if not durable.ending:
        assert of(LIMIT, (120_000,)).following(durable) == of(LIMIT, (120_000,))


def test_earlier_doubts_need_a_record_and_reach_daemon_and_helper() -> None:
    newest = replace(LIMIT, doubts=((150_000,),))
    both = replace(LIMIT, doubts=((120_000,), (150_000,)))
    assert both.covers(newest)
    assert not newest.covers(both)
    assert PendingRestore.from_json(both.to_json()) == both
    assert plan_of(both.to_json()).doubts == both.doubts


def test_a_value_that_a_lease_sets_again_needs_no_sync() -> None:
    first = replace(of(LIMIT, (150_000,)), doubts=((150_000,),))
    second = replace(of(LIMIT, (150_000,), (200_000,)), doubts=((200_000,),))
    assert not first.covers(second)
    durable = second.following(first)
    assert durable.values == durable.doubts == ((150_000,), (200_000,))
    again = replace(of(LIMIT, (200_000,), (150_000,)), doubts=((150_000,),))
    assert durable.covers(again)
    newest = again.following(durable)
    assert newest.values == newest.doubts == ((200_000,), (150_000,)), "the newest is the last"


def test_a_restore_needs_no_record_of_its_own_target() -> None:
    """A full disk, or another configuration, prevents no restore."""
    held = replace(of(LIMIT, (250_000,), (150_000,)), doubts=((150_000,),))
    other = (220_000,)
    back = replace(held, target=other, values=(*held.values, other), ending="holder_gone")
    assert held.leads_to(back)
    assert not held.covers(back), "it is recorded where that is possible"
    assert not held.leads_to(replace(back, ending="")), "that is a set"
    assert not held.leads_to(replace(back, values=(*back.values, (1,)))), "nobody wrote that"


def test_a_long_list_starts_again() -> None:
    durable = LIMIT
    for number in range(1, 4 * LISTED):
        durable = of(LIMIT, (150_000,), (150_000 + number,)).following(durable)
        assert len(durable.values) <= LISTED
        assert durable.values[-1] == (150_000 + number,)
        assert (150_000,) in durable.values
    assert len(durable.values) > 2


def test_of_what_others_choose_too_each_change_has_its_record() -> None:
    profiles = pending(Control.POWER_PROFILE, (1,), (1, 8))
    assert not profiles.covers(of(profiles, (1,)))
    assert of(profiles, (1,)).following(profiles) == of(profiles, (1,))

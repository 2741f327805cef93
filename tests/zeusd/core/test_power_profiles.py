"""The leased set: what a lease adds to the requests of others, and what it clears."""

from __future__ import annotations

from typing import Any

import pytest

from tests.zeusd.core.world import GPU0, World
from zeus_ipc.controls import SPECS, Control
from zeusd.restore_rule import (
    Holds,
    ReadControl,
    RestorePlan,
    Unknown,
    WriteControl,
    merged,
    restore_steps,
)

ALICE, BOB = 1, 2
PROFILE = Control.POWER_PROFILE
MINE = (GPU0, PROFILE)


def ask(world: World, *profiles: int, conn: int = ALICE, **more: Any) -> dict[str, Any]:
    return world.result(conn, "set", control="power_profile", value=list(profiles), **more)


def test_a_lease_adds_to_what_others_request_and_clears_only_its_own(world: World) -> None:
    world.values[MINE] = (8,)
    assert ask(world, 3, 1) == {"applied": [1, 3, 8]}
    world.values[MINE] = (1, 3, 9)  # someone clears 8 and requests 9
    assert ask(world, 2) == {}
    assert world.values[MINE] == (2, 9)
    world.call(ALICE, "release")
    assert world.values[MINE] == (9,)
    assert world.events("restore_clamped") == []


def test_a_profile_that_others_clear_during_a_set_stays_cleared(world: World) -> None:
    world.values[MINE] = (7, 9)
    world.hold = True
    number = world.ask(ALICE, "set", gpus=[GPU0], control="power_profile", value=[])
    world.run_next()  # the value in force is read
    world.values[MINE] = (9,)
    world.hold = False
    world.run_next()
    assert world.outcome(ALICE, number) == {"applied": [9]}
    ask(world, 1)
    assert world.values[MINE] == (1, 9)
    world.call(ALICE, "release")
    assert world.values[MINE] == (9,)


def test_a_reset_requests_no_profile_that_others_have_cleared_meanwhile(world: World) -> None:
    world.values[MINE] = (8,)
    ask(world)
    world.call(ALICE, "release")
    assert world.machine(GPU0, PROFILE).target == (8,)
    world.values[MINE] = ()
    world.call(ALICE, "reset", gpus=[GPU0], control="power_profile")
    assert world.values[MINE] == ()


def test_profiles_requested_before_the_lease_are_requested_after_it(world: World) -> None:
    world.values[MINE] = (1, 8)
    ask(world, 1, 2)
    assert world.values[MINE] == (1, 2, 8)
    world.call(ALICE, "release")
    assert world.values[MINE] == (1, 8)
    ask(world)
    assert world.values[MINE] == (1, 8)
    world.call(ALICE, "release")
    assert world.values[MINE] == (1, 8)


def test_after_a_crash_only_the_leases_own_profiles_are_cleared(world: World) -> None:
    world.values[MINE] = (8,)
    ask(world, 1)
    world.values[MINE] = (1, 8, 9)
    world.restart()
    assert world.values[MINE] == (8, 9)
    assert world.machine(GPU0, PROFILE).target == (8, 9)


def test_an_administrators_restore_clears_no_profile_of_others(world: World) -> None:
    ask(world, 1)
    world.values[MINE] = (1, 9)
    world.connect(3, uid=0)
    world.call(3, "restore", controls=["power_profile"])
    assert world.values[MINE] == (9,)
    error = world.result(3, "persist", controls=["power_profile"])["error"]
    assert error["code"] == "not_supported"
    assert "nvidia-smi power-profiles" in error["message"]


def test_a_profile_that_the_gpu_lacks_is_refused_by_name(world: World) -> None:
    error = ask(world, 1, 14)["error"]
    assert error["code"] == "out_of_range"
    assert "no workload power profile mig; it has max-p, max-q, compute" in error["message"]
    assert world.writes == []


@pytest.mark.parametrize("first", ["power_profile", "power_limit", "gpu_clocks", "memory_clocks"])
def test_profiles_and_limits_are_leased_together_only_if_that_is_asked(
    world: World, first: str
) -> None:
    second = "power_profile" if first != "power_profile" else "power_limit"
    world.call(ALICE, "acquire", gpus=[GPU0], controls=[first])
    for conn in (ALICE, BOB):
        error = world.result(conn, "acquire", controls=[second])["error"]
        assert error["code"] == "lease_held"
        assert f"beside {first}, which is leased" in error["message"]
    assert "back" in world.result(BOB, "acquire", controls=[second], together=True)
    world.call(BOB, "release")
    assert world.set_power(ALICE, 200, together=True) == {} or first != "power_limit"
    world.call(ALICE, "acquire", gpus=[GPU0], controls=["persistence_mode"])
    assert len(world.call(ALICE, "leases")["result"]["leases"]) >= 2


@pytest.mark.parametrize(
    ("found", "before", "wanted", "becomes"),
    [
        ((), [()], (1,), (1,)),
        ((8,), [(8,)], (1, 8), (1, 8)),
        ((1, 8, 9), [(1, 8)], (2, 8), (2, 8, 9)),
        ((9,), [(1, 8)], (1, 8), (9,)),  # others took them away, and they are not wanted again
        ((), [(8,), (1, 8)], (1, 8), (1,)),  # whether 1 was added is in doubt
        ((4, 5), [], (4,), (4, 5)),
    ],
)
def test_a_set_is_changed_by_what_zeusd_wants_otherwise(
    found: tuple[int, ...],
    before: list[tuple[int, ...]],
    wanted: tuple[int, ...],
    becomes: tuple[int, ...],
) -> None:
    assert merged(found, before, wanted) == becomes


@pytest.mark.parametrize(
    ("found", "becomes", "kind"),
    [
        ((1, 9), Holds(()), "restored"),
        ((1, 9), Holds((7,)), "restored"),
        ((1, 9), Holds((1,)), "failed"),
        ((1, 9), Holds((1, 7)), "failed"),
        ((1, 9), Unknown("busy"), "failed"),
        ((9,), None, "already_back"),
    ],
)
def test_a_restore_is_complete_when_the_added_profiles_are_cleared(
    found: tuple[int, ...], becomes: Holds | Unknown | None, kind: str
) -> None:
    """Others choose profiles while it is written, with a driver that may ignore it."""
    steps = restore_steps(RestorePlan(SPECS[PROFILE], target=(8,), values=((8,), (1, 8))))
    assert next(steps) == ReadControl()
    with pytest.raises(StopIteration) as stopped:
        if becomes is not None:
            assert steps.send(found) == WriteControl((9,), (1, 9))
        steps.send(found if becomes is None else becomes)
    assert stopped.value.value.kind == kind
    assert stopped.value.value.pending is (kind == "failed")


def test_profiles_are_read_and_written_by_name() -> None:
    spec = SPECS[PROFILE]
    assert spec.parse("LLM_Training, max-q,7") == (1, 7)
    assert spec.parse("none") == ()
    assert spec.text((1, 7, 99)) == "max-q, llm-training, profile-99"
    assert spec.parse(spec.text((1, 7, 99))) == (1, 7, 99)
    assert spec.text(()) == "none"
    for wrong in ("max", "1.5", "300", ""):
        with pytest.raises(ValueError, match="write names such as max-q"):
            spec.parse(wrong)
    assert spec.fault(tuple(range(33))) is not None
    assert spec.fault((255,)) is not None

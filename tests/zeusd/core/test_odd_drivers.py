"""Drivers that round, clamp, ignore, or return old values; and GPUs that fail during a probe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.zeusd.core.world import CLOCKS, GPU0, POWER, Odd, World, site
from zeus_ipc.controls import Control
from zeusd.restore_rule import SETTLE_S


@pytest.mark.parametrize(
    ("odd", "asked_mw", "holds_mw"),
    [
        (Odd(round_to_mw=1000), 150_500, 150_000),
        (Odd(round_to_mw=5000), 153_000, 150_000),
        (Odd(round_to_mw=1000, round_up=True), 150_500, 150_000),
        (Odd(round_to_mw=5000, round_up=True), 153_000, 150_000),
        (Odd(clamp_mw=(180_000, 300_000)), 120_000, 180_000),
        (Odd(stale_reads=1), 150_000, 150_000),
        (Odd(stale_reads=1, round_to_mw=1000), 150_500, 150_000),
    ],
)
def test_a_rounded_value_counts_as_zeusds_own(
    world: World, odd: Odd, asked_mw: int, holds_mw: int
) -> None:
    world.odd[GPU0] = odd
    told = {} if holds_mw == asked_mw else {"applied": [holds_mw]}
    assert world.result(1, "set", control="power_limit", value=[asked_mw]) == told
    (lease,) = world.call(1, "leases")["result"]["leases"]
    assert (lease["value"], lease["asked"]) == ([holds_mw], [asked_mw])
    assert list(world.values[POWER]) in world.journal[f"pending/{GPU0}/power_limit"]["values"]
    world.die(1)
    assert world.limit_w() == 300
    world.advance(SETTLE_S + 1)  # what was tried in vain may come late
    assert world.limit_w() == 300
    assert world.events("outside_change") == []
    assert not world.journaled("pending")


@pytest.mark.parametrize(
    "odd", [Odd(round_to_mw=1000), Odd(round_to_mw=5000), Odd(clamp_mw=(180_000, 300_000))]
)
def test_a_crash_before_a_rounded_value_was_read_back_does_not_strand_it(
    world: World, odd: Odd
) -> None:
    world.odd[GPU0] = odd
    world.hold = True
    world.ask(1, "set", gpus=[GPU0], control="power_limit", value=[153_500])
    world.run_next()
    assert world.held[0].control is Control.POWER_LIMIT
    world.take(world.held[0])
    assert world.values[POWER] != (153_500,)
    world.hold = False
    world.restart()
    assert world.limit_w() == 300


@pytest.mark.parametrize(
    ("odd", "asked_mw", "made_mw"),
    [
        (Odd(clamp_mw=(130_000, 250_000)), 120_000, 130_000),
        (Odd(round_to_mw=4000), 150_000, 148_000),
    ],
)
@pytest.mark.parametrize("again", ["is made", "is killed before", "fails"])
def test_a_rounded_unconfirmed_write_counts_as_zeusds_own_for_the_next_zeusd(
    world: World, odd: Odd, asked_mw: int, made_mw: int, again: str
) -> None:
    """zeusd is killed before it has read the value back, and the holder sets another."""
    world.set_power(1, 250)
    world.hold = True
    world.ask(1, "set", gpus=[GPU0], control="power_limit", value=[asked_mw])
    world.values[POWER] = (made_mw,)
    world.odd[GPU0] = odd
    world.restart(1)
    if again == "is killed before":  # the second one has reached the device
        world.ask_power(1, 200)
        world.restart(1)
    world.hold = False
    if again == "fails":
        world.faults[POWER] = 999
        assert world.set_power(1, 200)["error"]["code"] == "device_error"
        world.faults.clear()
    elif again == "is made":
        assert world.set_power(1, 200) == {}
        assert world.limit_w() == 200
    world.die(1)
    assert world.limit_w() == (250 if odd.clamp_mw else 300)
    assert not world.events("outside_change")


def test_a_rounded_target_counts_as_zeusds_own_after_the_site_limit_changed() -> None:
    """zeusd is killed during a restore, and its configuration is another when it starts again."""
    world = World(site(250))
    world.set_power(1, 150)
    world.odd[GPU0] = Odd(round_to_mw=4000)
    world.hold = True
    world.die(1)
    world.run_next()
    world.take(world.held[0])
    assert world.limit_w() == 248
    world.hold = False
    world.settings = replace(world.settings, site=site(220))
    world.restart()
    assert world.limit_w() == 220


def test_a_set_that_the_driver_ignores_is_an_error(world: World) -> None:
    world.odd[GPU0] = Odd(ignores=True)
    error = world.set_power(1, 150)["error"]
    assert error["code"] == "unchanged"
    assert error["details"] == {"outcome": "unchanged", "holds": [300_000]}
    assert "still holds 300 W" in error["message"]
    world.odd.clear()
    world.values[POWER] = (150_000,)  # it follows after all, much later
    world.die(1)
    assert world.limit_w() == 300


def test_a_restore_that_the_driver_ignores_is_pending_and_tried_again(world: World) -> None:
    world.set_power(1, 150)
    world.odd[GPU0] = Odd(ignores=True)
    world.die(1)
    assert world.limit_w() == 150
    (lease,) = world.call(1, "leases")["result"]["leases"]
    assert lease["restoring"] is True
    assert "still holds 150 W" in lease["trouble"]
    assert world.events("restore_failed")
    world.advance(60)
    world.odd.clear()
    world.advance(5)
    assert world.limit_w() == 300
    assert not world.journaled("pending")


@pytest.mark.parametrize("code", [3, 4, 10, 15, 16, 999])
def test_a_control_that_fails_during_a_probe_is_still_restored(world: World, code: int) -> None:
    world.set_power(1, 150)
    world.lock_clocks(1, 300, 900)
    world.hidden[GPU0] = frozenset(Control)
    world.faults[(GPU0, None)] = code
    world.reads_fail = True
    world.restart()
    assert len(world.core.unrestored) == 2, "it stays listed"
    world.advance(30)
    world.faults.clear()
    world.reads_fail = False
    world.advance(5)
    assert world.limit_w() == 300
    assert world.values[CLOCKS] == ()
    assert world.core.unrestored == []


def test_a_control_that_is_found_later_is_offered_from_then_on(world: World) -> None:
    world.hidden[GPU0] = frozenset({Control.POWER_LIMIT})
    world.restart()
    assert world.set_power(1, 200)["error"]["code"] == "not_supported"
    world.hidden.clear()
    world.find_gpus()
    assert world.set_power(1, 200) == {}


def test_a_restore_pending_on_a_missing_gpu_is_named_when_zeusd_stops(world: World) -> None:
    world.set_power(1, 150)
    world.limits_mw = ()
    world.restart(1)
    (lease,) = world.call(2, "leases")["result"]["leases"]
    assert (lease["gpu"], lease["value"], lease["back"]["value"]) == (GPU0, [150_000], [300_000])
    assert not lease["restoring"]
    world.restart()
    (lease,) = world.call(2, "leases")["result"]["leases"]
    assert lease["restoring"]
    assert "does not find this GPU" in lease["trouble"]
    world.restart(1)
    world.apply(world.core.stop(world.now_ns))
    assert world.core.unrestored == [(GPU0, Control.POWER_LIMIT)]
    assert not world.core.restoring, "there is nothing to wait for"
    world.restart(1)  # it is missing still
    world.limits_mw = (300_000, 300_000)
    world.restart(1)
    assert world.limit_w() == 300, "the stop is finished by the next start"

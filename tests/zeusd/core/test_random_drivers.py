"""Whatever drivers do to a write, nothing is left wrong once errors stop."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from tests import seeds
from tests.zeusd.core.drivers import HelperDriver, RandomGpu, run_round
from tests.zeusd.core.world import GPU0, POWER, UUIDS, Odd, World, site
from zeus_ipc.controls import Control
from zeusd import restore
from zeusd.core.policy import SitePolicy
from zeusd.devices.nvml.codes import nvml_error
from zeusd.devices.port import DeviceError
from zeusd.restore_rule import SETTLE_S, Device, Holds, Unknown, WriteRefused

ROUNDS = int(os.environ.get("ZEUSD_TEST_ROUNDS", seeds.tries(40)))


def test_random_drivers_leave_nothing_wrong() -> None:
    first = seeds.fresh()
    print(f"rounds {first} to {first + ROUNDS - 1}; see benchmarks/chaos.py --drivers --seed")
    for seed in range(first, first + ROUNDS):
        try:
            run_round(seed)
        except Exception as error:
            raise AssertionError(
                f"round {seed} (python benchmarks/chaos.py --drivers --seed {seed}): {error}"
            ) from error


@pytest.mark.parametrize("code", [2, 3, 4, 10, 13, 15, 25, 999])
@pytest.mark.parametrize("failing", [1, 99])
def test_a_failed_reading_back_does_not_lose_the_restore(
    world: World, code: int, failing: int
) -> None:
    """The getter's error says nothing about the setter, which has worked."""
    world.read_backs = [code] * failing
    answer = world.set_power(1, 200)
    assert ("error" in answer) == (failing > 1)
    assert world.limit_w() == 200
    world.read_backs.clear()
    (lease,) = world.call(1, "leases")["result"]["leases"]
    assert lease["value"] == [200_000]
    assert world.set_power(1, 150) == {}, "it is nobody else's value"
    world.die(1)
    assert world.limit_w() == 300
    world.advance(SETTLE_S + 1)
    assert not world.journaled("pending")
    assert not world.events("outside_change")


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("late_s", [0.1, 4.0])
def test_a_write_that_takes_effect_after_its_lease_has_ended_is_restored(
    world: World, killed: bool, late_s: float
) -> None:
    """The control is at its target when the lease ends, and is not to stay there."""
    world.odd[GPU0] = Odd(ignores=True)  # so far
    assert world.set_power(1, 200)["error"]["code"] == "unchanged"
    world.odd.clear()
    if killed:
        world.restart()
    else:
        world.die(1)
    assert world.limit_w() == 300
    world.advance(late_s)
    world.values[POWER] = (200_000,)
    world.ask_power(2, 250)
    assert world.limit_w() == 200, "no outside change is reported"
    world.advance(SETTLE_S)
    assert world.limit_w() == 250, "the next user's limit"
    world.die(2)
    world.advance(SETTLE_S + 1)
    assert world.limit_w() == 300
    assert not world.events("outside_change")


def test_the_bound_of_late_drivers_is_a_setting(world: World) -> None:
    world.reload(SitePolicy(settle_s=60.0))
    world.odd[GPU0] = Odd(ignores=True)
    world.set_power(1, 200)
    world.odd.clear()
    world.die(1)
    world.advance(50)
    assert world.journaled("pending")
    world.values[POWER] = (200_000,)
    world.advance(20)
    assert world.limit_w() == 300
    assert not world.journaled("pending")


def test_writes_that_no_driver_confirms_do_not_fill_the_journal(world: World) -> None:
    world.faults[POWER] = 999
    for watts in range(101, 290):
        assert "error" in world.set_power(1, watts)
    entry = world.journal[f"pending/{GPU0}/power_limit"]
    assert len(entry["values"]) < 70
    assert "confirmed none of 64" in world.set_power(1, 290)["error"]["message"]
    world.faults.clear()
    assert world.set_power(1, 120) == {}, "one of those"
    assert world.set_power(1, 290)["error"]["code"] == "device_busy"
    world.advance(SETTLE_S)
    assert world.set_power(1, 121) == {}
    assert world.set_power(1, 290) == {}, "all others are settled"
    world.die(1)
    assert world.limit_w() == 300


class Driver:
    """A power limit: what it makes of each write, in turn."""

    def __init__(self, *steps: DeviceError | int | None) -> None:
        self.holds = (250,)
        self.reads: list[int] = []
        self._steps = [*steps]

    def write(self, value: tuple[int, ...]) -> None:
        step = self._steps.pop(0) if self._steps else None
        if isinstance(step, DeviceError):
            self.holds = self.holds if step.refused else value
            raise step
        if step is not None:
            self.holds = (step,)

    def read(self) -> tuple[int, ...]:
        return (self.reads.pop(0),) if self.reads else self.holds

    def device(self, rounding: int = 5) -> Device:
        return Device(self.read, self.write, lambda seconds: None, rounding)


@pytest.mark.parametrize("code", [10, 15, 16, 999])
def test_a_lower_write_that_works_and_returns_an_error_is_not_known(code: int) -> None:
    """The driver rounds 150 up to 152; of the next write nobody knows."""
    driver = Driver(152, nvml_error(code, "set"))
    outcome = driver.device().write_verified((150,), (250,))
    assert isinstance(outcome, Unknown)
    refusing = Driver(152, *[nvml_error(2, "set")] * 5)
    assert refusing.device().write_verified((150,), (250,)) == Holds((152,))
    assert isinstance(
        Driver(nvml_error(2, "set")).device().write_verified((150,), (250,)), WriteRefused
    )


def test_one_old_reading_does_not_confirm_a_write_that_was_ignored() -> None:
    driver = Driver()
    driver.holds, driver.reads = (150,), [250]
    assert driver.device().write_verified((250,), (150,)) == Unknown(None, (150,))


def test_readings_of_a_restore_are_as_far_apart_as_the_longest_settling() -> None:
    slept: list[float] = []
    driver = Driver(200, 250)
    device = driver.device()
    device.sleep = slept.append
    driver.reads = [250, 250, 250, 250, 200, 200]
    assert device.write_verified((200,), (250,)) == Holds((200,))
    assert device.settling_s > 0
    slept.clear()
    assert device.write_verified((250,), (200,), sure=True) == Holds((250,))
    assert slept == [device.settling_s]


def test_what_the_last_zeusd_asked_of_the_driver_may_still_be_rounded(world: World) -> None:
    """It was killed while it restored, and may have given the driver less to round up."""
    world.set_power(1, 200)
    world.hold = True
    world.die(1)
    world.core.device_done(world.now_ns, world.held.pop(0).ticket, (200_000,))
    world.journal["pending/GPU-0000/power_limit"] |= {"doubts": [[300_000]]}
    world.values[POWER], world.hold = (300_000,), False
    world.restart()
    world.advance(1)
    world.values[POWER] = (298_500,)
    world.advance(SETTLE_S + 1)
    assert world.limit_w() == 300
    assert not world.journaled("pending")


def test_a_lower_value_that_was_rounded_down_is_zeusds(world: World) -> None:
    """A late driver looks like one that rounds up, and is given up to 5 W less."""
    world.read_backs = [999] * 99
    assert "error" in world.set_power(1, 187)
    world.read_backs.clear()
    world.values[POWER] = (182_000,)
    assert world.set_power(1, 150) == {}
    assert not world.events("outside_change")


def test_a_gpu_that_was_reset_is_brought_under_the_sites_limit_with_the_restore() -> None:
    world = World(site(250, enforce=True))
    world.set_power(1, 200)
    world.values[POWER] = (300_000,)
    world.die(1)
    assert world.limit_w() == 250


@pytest.mark.parametrize(
    "end",
    [
        lambda world: world.call(1, "quiesce"),
        lambda world: world.call(1, "goodbye"),
        lambda world: world.die(1),
    ],
    ids=["quiesced", "said goodbye", "killed"],
)
def test_all_of_a_gpus_controls_are_restored_in_one_order(end: Callable[[World], object]) -> None:
    world = World(limits_mw=(300_000,) * 4)
    world.connect(1, groups=frozenset({0}), uid=0)
    for gpu in UUIDS:
        world.set_power(1, 200, gpu)
        world.lock_clocks(1, 300, 900, gpu=gpu)
    world.writes.clear()
    end(world)
    order = [Control.GPU_CLOCKS, Control.POWER_LIMIT]
    assert [control for _, control, _ in world.writes] == order * 4


def test_the_helper_leaves_a_value_of_others_alone_also_while_a_write_is_in_doubt() -> None:
    gpu = RandomGpu(random.Random(0), 0, 1, False, 0, values={Control.POWER_LIMIT: (200_000,)})
    driver = HelperDriver({GPU0: gpu})
    entry = {"control": "power_limit", "target": [300_000], "values": [[300_000], [150_000]]}
    plan = restore.plan_of(entry | {"doubts": [[150_000]]})
    called = restore.RestoredControl(driver, gpu, Control.POWER_LIMIT, gpu.sleep)
    assert restore.carry_out(plan, called, SETTLE_S).kind == "changed_outside"
    assert gpu.values[Control.POWER_LIMIT] == (200_000,)

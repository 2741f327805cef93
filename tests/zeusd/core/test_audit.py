"""Who did it, and what else an administrator wants to find in the audit log."""

from __future__ import annotations

from tests.zeusd.core.test_administration import ADMIN, ALICE, POWER, make_world
from tests.zeusd.core.world import GPU0, World


def test_a_revoked_lease_names_who_revoked_it() -> None:
    world = make_world()
    world.set_power(ALICE, 200)
    world.call(ADMIN, "release", whose="all")
    (record,) = world.events("revoked")
    assert (record["uid"], record["pid"]) == (1001, 101)
    assert record["reason"] == "the lease of process 102 of user 1002"


def test_an_outside_change_on_an_idle_gpu_is_recorded_once() -> None:
    world = make_world()
    world.look_around()
    assert world.events("outside_change") == []
    world.values[POWER] = (150_000,)
    for _ in range(3):
        world.look_around()
    (record,) = world.events("outside_change")
    assert (record["old"], record["new"], record["result"]) == ("300 W", "150 W", "noticed")
    world.values[POWER] = (160_000,)
    world.look_around()
    assert len(world.events("outside_change")) == 2


def test_zeusds_own_write_is_not_an_outside_change() -> None:
    world = make_world()
    world.set_power(ALICE, 200)
    world.look_around()
    world.call(ALICE, "release")
    world.look_around()
    world.call(ADMIN, "set_ceiling", gpus=[GPU0], name="fleet", value=[250_000])
    world.look_around()
    assert world.events("outside_change") == []


def test_a_lost_gpu_is_one_record() -> None:
    world = make_world()
    world.faults[POWER] = 15
    for _ in range(3):
        world.set_power(ALICE, 200)
    (record,) = world.events("gpu_lost")
    assert record["gpu"] == GPU0
    assert world.events("gpu_returned") == []
    world.faults.clear()
    world.find_gpus()
    assert [record["gpu"] for record in world.events("gpu_returned")] == [GPU0]
    world.faults[POWER] = 15
    world.set_power(ALICE, 200)
    assert len(world.events("gpu_lost")) == 2


def test_a_gpu_that_answers_again_has_returned() -> None:
    """Without a scan for GPUs; and not while it answers only some calls."""
    world = make_world()
    world.reads_fail = True
    world.faults[POWER] = 15
    world.set_power(ALICE, 200)
    for _ in range(3):
        world.look_around()
    assert world.events("gpu_returned") == [], "its persistence mode can be read"
    world.faults.clear()
    for _ in range(3):
        world.look_around()
    assert len(world.events("gpu_returned")) == len(world.events("gpu_lost")) == 1


def test_a_restart_is_no_record_for_each_gpu() -> None:
    world = World(limits_mw=(300_000, 300_000))
    assert len(world.events("gpu_found")) == 2
    world.notes.clear()
    world.start_core(alive=set())
    assert world.events("gpu_found") == []
    world.driver = "driver-2"
    world.start_core(alive=set())
    assert len(world.events("gpu_found")) == 2

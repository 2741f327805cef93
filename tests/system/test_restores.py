"""Which value a restore writes, when, and what delays it."""

from __future__ import annotations

import contextlib
import signal

import pytest

from tests.support import (
    ending,
    wait_for,
)
from tests.system.sites import LIMIT, QUICK_LEASES, SET_LIMIT, Site
from zeus_ipc import errors


def test_the_initial_value_is_what_was_found_and_no_lease_redefines_it(site: Site) -> None:
    site.double.set_outside(0, 220_000)
    with site.daemon.client() as client:
        uuid = site.double.uuid(0)
        for watts in (200, 180, 150):
            client.set_power_limit(uuid, watts * 1000)
            client.release()
            assert site.limits()[0] == 220_000
        client.set_power_limit(uuid, 200_000)
        client.set_power_limit(uuid, 150_000)
    wait_for(lambda: site.limits()[0] == 220_000, "the cap to be back")


@pytest.mark.parametrize("code", [15, 10, 4])
def test_a_gpu_that_cannot_be_restored_delays_no_other_and_is_retried(code: int) -> None:
    with contextlib.ExitStack() as stack:
        site = Site(stack, 8, "")
        with ending(site.holder()) as holder:
            site.double.inject(3, SET_LIMIT, code)
            holder.kill()
            others = [LIMIT] * 3 + [150_000] + [LIMIT] * 4
            wait_for(lambda: site.limits() == others, "the other seven to be back")
            with site.daemon.client() as client:
                wait_for(lambda: site.daemon.records("restore_failed"), "the failure to be told")
                wait_for(lambda: len(client.leases()) == 1, "the other seven leases to end")
                (lease,) = client.leases()
                assert (lease.gpu, lease.restoring) == (site.double.uuid(3), True)
                with pytest.raises(errors.RestorePending):
                    client.set_power_limit(site.double.uuid(3), 200_000)
                client.set_power_limit(site.double.uuid(4), 200_000)
                client.release()
            site.double.clear_faults()
            wait_for(site.restored, "the last one to be back")


def test_a_hanging_gpu_delays_no_other_and_no_expiry() -> None:
    with contextlib.ExitStack() as stack:
        site = Site(stack, 4, QUICK_LEASES)
        with ending(site.holder()) as holder:
            site.double.inject(0, "*", delay_ms=60_000)
            holder.send_signal(signal.SIGSTOP)  # its leases expire while GPU 0 is stuck
            others = [150_000, LIMIT, LIMIT, LIMIT]
            wait_for(lambda: site.limits() == others, "the other three to be back")
            with site.daemon.client() as client:
                client.set_power_limit(site.double.uuid(1), 200_000)
                client.release()
            site.double.clear_faults()
            wait_for(site.restored, "the stuck one to be back")


def test_the_requested_limit_is_restored_and_not_the_enforced_one() -> None:
    """A board may enforce less than software requested; that is not the site's limit."""
    with contextlib.ExitStack() as stack:
        site = Site(stack, 1, "")
        site.double.misbehave(0, board_limit_mw=180_000)
        with site.daemon.client() as client:
            uuid = site.double.uuid(0)
            state = client.state(uuid)[uuid]
            assert (state.power_limit_mw, state.enforced_power_limit_mw) == (LIMIT, 180_000)
            client.set_power_limit(uuid, 150_000)
        wait_for(site.restored, "the requested limit to be back")


def test_limits_that_a_driver_update_lowered_become_the_nearest(site: Site) -> None:
    with ending(site.holder()) as holder:
        site.double.set_limits(0, 100_000, 220_000)
        holder.kill()
        wait_for(lambda: site.limits() == [220_000, LIMIT], "the nearest legal limit")
        wait_for(lambda: site.daemon.records("restore_clamped"), "the record")


def test_gpus_are_identified_by_uuid_and_not_by_index(site: Site) -> None:
    with ending(site.holder()) as holder:
        site.daemon.kill()
        first, second = site.double.node.gpus[0], site.double.node.gpus[1]
        first.uuid, second.uuid = second.uuid, first.uuid  # as after a change of slots
        first.limit_mw = 140_000
        holder.kill()
        site.daemon.start_again()
        # 140 W is not what zeusd wrote to the GPU that is now first: someone else did.
        wait_for(lambda: site.limits() == [140_000, LIMIT], "the other one to be back")
        site.daemon.wait_until_serving(2)
        assert site.limits() == [140_000, LIMIT]


def test_an_outside_change_stays_and_clocks_are_restored(site: Site) -> None:
    with site.daemon.client() as client:
        uuid = site.double.uuid(0)
        client.set_power_limit(uuid, 150_000)
        answer = client.acquire(uuid, ["gpu_clocks"])
        assert answer[uuid]["gpu_clocks"].source == "unreadable"
        client.set_gpu_clocks(uuid, 600, 900)
        site.double.set_outside(0, 180_000)
    wait_for(lambda: not site.double.node.gpus[0].lock_max, "the clocks to be unlocked")
    wait_for(lambda: site.daemon.records("outside_change"), "the record")
    assert site.limits()[0] == 180_000


def test_clocks_are_restored_before_and_persistence_mode_after_the_power_limit(site: Site) -> None:
    """The order is fixed: without persistence mode, a driver may forget pending restores."""
    with site.daemon.client() as client:
        uuid = site.double.uuid(0)
        client.set_persistence_mode(uuid, True)
        client.set_power_limit(uuid, 150_000)
        client.set_gpu_clocks(uuid, 600, 900)
        before = len(site.double.calls())
        client.release()
        symbols = [call.symbol for call in site.double.calls()[before:]]
    assert symbols == ["nvmlDeviceResetGpuLockedClocks", SET_LIMIT, "nvmlDeviceSetPersistenceMode"]

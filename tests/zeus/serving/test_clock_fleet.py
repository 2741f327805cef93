"""The power that a serving instance needs of a budget: how it is found, and that zeusd shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from tests.support import RunningDaemon, running_daemon, wait_for
from zeus.serving import ClockControl
from zeus.serving.clock_fleet import MARGIN, MORE, Needs, needed_w
from zeus_ipc import Client


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", gpus=2) as running:
        yield running


def test_a_need_is_what_is_drawn_and_a_margin_unless_a_limit_cuts_it_off() -> None:
    assert needed_w([]) == 0
    assert needed_w([(100.0, 200.0), (140.0, 200.0)]) == pytest.approx(140 * MARGIN)
    assert needed_w([(199.0, 200.0)]) == pytest.approx(199 * MORE)


def test_a_need_that_is_granted_does_not_grow() -> None:
    """Under any limit, it settles above what the GPU would draw without one."""
    for wish in (90.0, 180.0, 240.0):
        need, limit = Needs([], 1.0), 100.0
        for second in range(60):
            need.seen(float(second), 0.0, needed_w([(min(wish, limit), limit)]))
            limit = min(250.0, max(100.0, need.power_w))
        assert limit > wish
        settled = limit
        for second in range(60, 2000):
            need.seen(float(second), 0.0, needed_w([(min(wish, limit), limit)]))
            limit = min(250.0, max(100.0, need.power_w))
            assert wish < limit <= settled


def published(client: Client) -> set[int | None]:
    return {one.needs_mw for one in client.leases() if one.control == "power_limit"}


def test_an_instance_publishes_what_it_needs_where_there_is_a_budget(
    daemon: RunningDaemon,
) -> None:
    with daemon.client() as client:
        gpus = [gpu.uuid for gpu in client.node().gpus]
        control = ClockControl(gpus, 0.5, 0.025, path=daemon.socket)
        try:
            wait_for(lambda: not math.isnan(control.status().needed_w), "a reading")
            assert published(client) == set(), "nothing without a ceiling of the fleet"
            client.set_ceiling(gpus, "fleet", 200_000)
            # The lease is there a moment before the need is.
            wait_for(lambda: published(client) - {None}, "the need to be published", 30.0)
            (needs,) = published(client)
            assert needs is not None
            assert 20_000 < needs < 200_000
        finally:
            control.close()
        wait_for(lambda: published(client) == set(), "the leases to be released")
        client.set_ceiling(gpus, "fleet", None)

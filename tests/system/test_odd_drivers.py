"""Drivers that round, clamp, ignore, come late or show old values, behind the real nvidia-ml-py."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    RunningDaemon,
    configuration,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from zeus_ipc.errors import ValueUnchanged

LIMIT = 250_000

HOLDER = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1])
gpu = client.node().gpus[0].uuid
print(client.set(gpu, "power_limit", [int(sys.argv[2])])[gpu][0], flush=True)
sys.stdin.readline()
"""

BUSY = """
import collections, itertools, sys, time
from zeus_ipc import Client
client = Client(sys.argv[1])
gpu = client.node().gpus[0].uuid
client.acquire(gpu, ["power_limit"], ttl_s=2.5)
client.set_power_limit(gpu, 150_000)
print("set", flush=True)
# One call into C until 5.5 s have passed: no other thread of this Python runs meanwhile.
now, end = iter(time.monotonic, None), time.monotonic() + 5.5
collections.deque(itertools.takewhile(end.__gt__, now), 0)
client.set_power_limit(gpu, 160_000)
print("over", flush=True)
sys.stdin.readline()
"""


@dataclass
class Site:
    daemon: RunningDaemon
    double: NvmlDouble
    directory: Path

    def journal(self) -> str:
        return Path(self.daemon.state_dir, "journal").read_text()


@pytest.fixture
def site() -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(public_directory())
        double = NvmlDouble(directory, [{}], privilege=0 if os.getuid() == 0 else 1)
        daemon = stack.enter_context(
            running_daemon(
                *("--nvml-library", double.library, "--socket-mode", "0666"),
                *configuration(directory, "[lease]\nttl_s = 1.0\n[daemon]\nstop_timeout_s = 2\n"),
                gpus=1,
                env=double.env,
                directory=directory,
            )
        )
        yield Site(daemon, double, directory)


@pytest.mark.parametrize(
    ("quirks", "asked_mw", "holds_mw"),
    [
        ({"round_mw": 1000}, 150_500, 150_000),
        ({"round_mw": 5000}, 153_000, 150_000),
        ({"clamp_min_mw": 180_000, "clamp_max_mw": 250_000}, 120_000, 180_000),
        ({"delay_ms": 500}, 150_000, 150_000),
        ({"stale_after_set": 1}, 150_000, 150_000),
        ({"stale_after_set": 1, "round_mw": 1000, "delay_ms": 100}, 150_500, 150_000),
    ],
)
def test_the_value_on_the_gpu_counts(
    site: Site, quirks: dict[str, int], asked_mw: int, holds_mw: int
) -> None:
    site.double.misbehave(0, **quirks)
    holder = script(HOLDER, site.daemon.socket, str(asked_mw))
    try:
        assert holder.stdout.readline() == f"{holds_mw}\n"
        assert str(holds_mw) in site.journal()
        with site.daemon.client() as client:
            (lease,) = client.leases()
            assert (lease.value, lease.asked) == ([holds_mw], [asked_mw])
    finally:
        holder.kill()
        holder.wait()
    wait_for(lambda: site.double.limit_mw(0) == LIMIT, "the limit to be restored")
    with site.daemon.client() as client:
        wait_for(lambda: not client.leases(), "the restore to be confirmed")
    assert not site.daemon.records("outside_change")


def test_a_driver_that_ignores_writes_is_reported_and_retried(site: Site) -> None:
    holder = script(HOLDER, site.daemon.socket, "150000")
    assert holder.stdout.readline() == "150000\n"
    site.double.misbehave(0, ignored_sets=-1)
    holder.kill()
    holder.wait()
    with site.daemon.client() as client:

        def trouble() -> str:
            return next((one.trouble or "" for one in client.leases()), "")

        wait_for(lambda: "still holds 150 W" in trouble(), "a restore that is not believed")
        site.double.misbehave(0, ignored_sets=0)
        wait_for(lambda: site.double.limit_mw(0) == LIMIT, "the restore to be tried again")


def test_a_set_that_is_ignored_is_an_error(site: Site) -> None:
    site.double.misbehave(0, ignored_sets=-1)
    with site.daemon.client() as client, pytest.raises(ValueUnchanged, match="still holds 250 W"):
        client.set_power_limit(client.node().gpus[0].uuid, 150_000)


def test_a_stop_that_cannot_restore_names_what_and_fails(site: Site) -> None:
    holder = script(HOLDER, site.daemon.socket, "150000")
    try:
        assert holder.stdout.readline() == "150000\n"
        site.double.misbehave(0, ignored_sets=-1)
        assert site.daemon.stop() == 1
        (record,) = site.daemon.records("restore_abandoned")
        assert record["control"] == "power_limit"
    finally:
        holder.kill()
        holder.wait()


def test_a_stop_waits_until_no_write_can_take_effect_any_more(site: Site) -> None:
    """For longer than its timeout: nobody restores what takes effect after the end."""
    site.double.misbehave(0, ignored_sets=1)
    with site.daemon.client() as client, pytest.raises(ValueUnchanged):
        client.set_power_limit(client.node().gpus[0].uuid, 150_000)
    assert site.daemon.stop() == 0
    assert not site.daemon.records("restore_abandoned")


@pytest.mark.parametrize("late_ms", [0, 300])
@pytest.mark.parametrize("code", [3, 13])
def test_a_getter_that_fails_once_after_a_set_loses_no_restore(
    site: Site, code: int, late_ms: int
) -> None:
    """The setter has worked, at once or late, and the holder is killed then."""
    double, setter = site.double, "nvmlDeviceSetPowerManagementLimit"
    double.misbehave(0, delay_ms=late_ms)
    double.inject(0, setter, count=1, delay_ms=400)
    holder = script(HOLDER, site.daemon.socket, "200000")
    wait_for(lambda: double.node.faults[0].count == 0, "the setter to be called")
    double.inject(0, "nvmlDeviceGetPowerManagementLimit", code, count=1)
    wait_for(lambda: double.limit_mw(0) == 200_000, "the set")
    holder.kill()
    holder.wait()
    wait_for(lambda: double.limit_mw(0) == LIMIT, "the restore")


@pytest.mark.parametrize("code", [3, 4, 10, 15, 16, 999])
def test_transient_errors_prevent_no_restore(site: Site, code: int) -> None:
    """In every call, from the start of zeusd on; then they end."""
    holder = script(HOLDER, site.daemon.socket, "150000")
    assert holder.stdout.readline() == "150000\n"
    site.daemon.kill()
    holder.kill()
    holder.wait()
    site.double.inject(0, "*", code)
    site.daemon.start_again()
    time.sleep(2.0)  # some readings of the GPU, and some attempts, meet the errors
    assert site.double.limit_mw(0) == 150_000
    site.double.clear_faults()
    wait_for(lambda: site.double.limit_mw(0) == LIMIT, "the restore")


def test_a_holder_whose_python_waits_for_c_code_keeps_its_lease(site: Site) -> None:
    """For longer than its TTL. zeusd looks at it twice in the last fifth of that."""
    holder = script(BUSY, site.daemon.socket)
    try:
        assert holder.stdout.readline() == "set\n"
        assert holder.stdout.readline() == "over\n"
        assert site.double.limit_mw(0) == 160_000
        assert not site.daemon.records("lease_expired")
    finally:
        holder.kill()
        holder.wait()

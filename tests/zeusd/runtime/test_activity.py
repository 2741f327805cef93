"""The use of a shared GPU by its processes, as a simulated driver measures it."""

from __future__ import annotations

import time

import pytest

from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import MigInstance
from zeusd.devices.simulated.node import SimulatedBackend
from zeusd.devices.simulated.tenants import SAMPLE_US, Tenant
from zeusd.runtime.activity import PERIOD_NS, Activity, ActivityReader


class Node:
    """A node with work on its first GPU, and a clock that is set by hand."""

    def __init__(self, spec: str) -> None:
        self.backend = SimulatedBackend(spec, clock_ns=lambda: time.monotonic_ns())
        self.backend.init()
        self.backend.open_work([0], "model/compute").launch(1e6)
        self.ahead_ns = 0
        self.reader = ActivityReader(self.backend, 0, self.now_ns, lambda: time.time_ns())

    def now_ns(self) -> int:
        return time.monotonic_ns() + self.ahead_ns

    def read(self) -> Activity | None:
        return self.reader.read(self.backend.processes(0))


def weights(found: Activity | None) -> dict[int, int]:
    return {one.pid: one.weight for one in found.uses}


def later(node: Node, monkeypatch: pytest.MonkeyPatch, ns: int) -> None:
    """Time passes, for the driver as well."""
    node.ahead_ns += ns
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + ns)


def test_each_process_counts_from_the_last_sample_to_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before_ns = time.monotonic_ns()
    node = Node("1xv100-pcie")
    begun_ns = time.monotonic_ns()
    node.backend.share(0, [Tenant(11, 60), Tenant(12, 20), Tenant(13, 0)])
    later(node, monkeypatch, PERIOD_NS)
    first = node.read()
    assert weights(first) == {11: 60_000, 12: 20_000}
    assert before_ns <= first.begin_ns <= begun_ns
    assert first.measured
    (end_ns,) = {one.end_ns for one in first.uses}
    assert node.now_ns() - end_ns >= 0
    later(node, monkeypatch, PERIOD_NS)
    second = node.read()
    assert second.begin_ns == end_ns  # nothing twice, nothing left out


def test_a_sample_that_is_older_than_a_period_says_that_its_process_was_idle_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node("1xv100-pcie")
    node.backend.share(0, [Tenant(11, 60), Tenant(12, 20)])
    later(node, monkeypatch, 5 * PERIOD_NS)
    real = node.backend.process_utilization

    def aged(gpu: object, since_us: int) -> object:
        return [
            one._replace(t_us=one.t_us - 3_000_000) if one.pid == 12 else one
            for one in real(gpu, since_us)
        ]

    monkeypatch.setattr(node.backend, "process_utilization", aged)
    found = node.read()
    newest, old = found.uses
    assert newest.end_ns - old.end_ns >= 3 * PERIOD_NS - SAMPLE_US * 1000


def test_one_process_alone_is_not_measured_and_its_time_not_another_ones_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node("1xv100-pcie")
    node.backend.share(0, [Tenant(11, 60)])
    later(node, monkeypatch, PERIOD_NS)
    before_ns = node.now_ns()
    assert node.read() is None
    node.backend.share(0, [Tenant(11, 60), Tenant(12, 20)])
    later(node, monkeypatch, PERIOD_NS)
    found = node.read()
    assert found.begin_ns >= before_ns


def test_a_driver_that_measures_no_use_is_not_asked_forever() -> None:
    node = Node("1xv100-pcie")
    node.backend.share(0, [Tenant(11, 60), Tenant(12, 20)])
    node.backend.inject(0, "process_utilization", Return.NOT_SUPPORTED)
    for _ in range(5):
        assert node.read() is None
    node.backend.clear_faults()
    assert node.read() is None


def test_instances_count_by_use_and_size() -> None:
    node = Node("1xh100-sxm:mig=1g+3g+3g")
    node.backend.share(0, [Tenant(11, 90, 1), Tenant(12, 20, 2), Tenant(13, 10, 2)])
    found = node.read()
    assert weights(found) == {11: 90_000, 12: 45_000, 13: 45_000}
    assert found.measured


def test_an_instance_that_works_without_a_listed_process_is_not_the_neighbours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node("1xh100-sxm:mig=1g+3g")
    node.backend.share(0, [Tenant(11, 90, 1)])
    instances = node.backend.mig_instances(0, True)
    busy = [instances[0], instances[1]._replace(sm_percent=10.0)]
    monkeypatch.setattr(node.backend, "mig_instances", lambda gpu, measure: busy)
    assert weights(node.read()) == {11: 90_000, 0: 30_000}


def test_instances_before_hopper_count_by_size() -> None:
    node = Node("1xa100-sxm-80:mig=1g+2g")
    node.backend.share(0, [Tenant(11, 90, 1), Tenant(12, 0, 2)])
    found = node.read()
    assert not found.measured
    assert weights(found) == {11: 100_000, 12: 200_000}


def test_an_instance_that_is_new_makes_the_interval_unmeasured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Node("1xh100-sxm:mig=1g+2g")
    node.backend.share(0, [Tenant(11, 90, 1), Tenant(12, 5, 2)])
    old, new = node.backend.mig_instances(0, True)
    fresh: list[MigInstance] = [old, new._replace(sm_percent=None)]
    monkeypatch.setattr(node.backend, "mig_instances", lambda gpu, measure: fresh)
    found = node.read()
    assert not found.measured
    assert weights(found) == {11: 100_000, 12: 200_000}

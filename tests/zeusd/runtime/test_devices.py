"""GPUs are probed until each control is known."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from tests.support import TIMEOUT_S, wait_for
from zeus_ipc.controls import Control
from zeusd.devices.simulated import SimulatedBackend
from zeusd.runtime import driver
from zeusd.runtime.devices import UNSUPPORTED_AFTER, DeviceFinder, Found, Inspector

CALLS = ("power_limits", "power_limit_mw", "persistence_mode", "architecture")


@pytest.fixture
def nvml() -> SimulatedBackend:
    nvml = SimulatedBackend("1xa100")
    nvml.init()
    return nvml


@pytest.mark.parametrize("code", [3, 4, 10, 15, 16, 999])
@pytest.mark.parametrize("call", CALLS)
def test_an_error_while_a_gpu_is_inspected_is_not_final(
    nvml: SimulatedBackend, call: str, code: int
) -> None:
    nvml.inject(0, call, code, count=2)
    inspector = Inspector(nvml, 0)
    for _ in range(3):
        inspector.look()
    assert inspector.settled
    (facts, _handle) = Inspector(nvml, 0).look() or (None, None)
    assert set(facts.info.controls) == {one.value for one in Control} - {"power_profile"}


def test_each_change_of_a_gpus_controls_is_reported_once(nvml: SimulatedBackend) -> None:
    nvml.inject(0, "power_limits", 999, count=1)
    inspector = Inspector(nvml, 0)
    first = inspector.look()
    assert "power_limit" not in first[0].info.controls
    second = inspector.look()
    assert "power_limit" in second[0].info.controls
    assert second[0].info.power_limit_max_mw == 400_000
    assert inspector.look() is None


def test_a_control_that_is_never_offered_is_known_after_some_attempts() -> None:
    nvml = SimulatedBackend("1xp100")
    nvml.init()
    nvml.inject(0, "persistence_mode", 3)
    inspector = Inspector(nvml, 0)
    for number in range(UNSUPPORTED_AFTER):
        assert not inspector.settled, number
        inspector.look()
    assert inspector.settled
    found = Inspector(nvml, 0).look()
    assert found[0].info.controls == ["power_limit"]
    assert (found[0].info.power_limit_min_mw, found[0].info.power_limit_max_mw) == (
        125_000,
        250_000,
    )


@pytest.fixture
def started() -> Iterator[list[DeviceFinder]]:
    finders: list[DeviceFinder] = []
    yield finders
    for finder in finders:
        finder.stop()


def test_a_gpu_that_appears_after_the_driver_is_found(
    started: list[DeviceFinder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given to a virtual machine, or its driver is still at it."""
    nvml = SimulatedBackend("1xa100")
    found: queue.Queue[Found] = queue.Queue()
    with monkeypatch.context() as absent:
        absent.setattr(nvml, "device_count", lambda: 0)
        finder = DeviceFinder(nvml, found.put, lambda: "driver", retry_s=0.01)
        started.append(finder)
        finder.start()
        assert finder.first_attempt_over.wait(TIMEOUT_S)
        assert "has no GPU" in str(finder.error)
    assert len(found.get(timeout=TIMEOUT_S).gpus) == 1
    wait_for(lambda: finder.error is None, "the trouble to be over")


def test_the_finder_looks_again_until_everything_is_known(started: list[DeviceFinder]) -> None:
    nvml = SimulatedBackend("1xa100")
    nvml.inject(0, "power_limits", 999, count=3)
    found: list[Found] = []
    known = threading.Event()

    def on_found(one: Found) -> None:
        found.append(one)
        if "power_limit" in one.gpus[0][0].info.controls:
            known.set()

    finder = DeviceFinder(nvml, on_found, lambda: "driver", retry_s=0.01)
    started.append(finder)
    finder.start()
    assert known.wait(TIMEOUT_S)
    assert "power_limit" not in found[0].gpus[0][0].info.controls


def test_a_driver_that_lists_a_single_clock_bounds_nothing(
    nvml: SimulatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clocks() -> list[int]:
        facts, _ = Inspector(nvml, 0).look() or (None, None)
        return facts.info.gpu_clock_range_mhz

    low, high = clocks()
    assert low < high
    monkeypatch.setattr(nvml, "supported_gpu_clocks", lambda gpu, mhz: [high])
    assert clocks() == []


def test_open_device_files_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "DEVICE_FILES", ("/dev/full",))
    assert driver.open_device_files() == ()
    with open("/dev/full") as one, open("/dev/full"):
        assert driver.open_device_files() == (os.readlink(f"/proc/self/fd/{one.fileno()}"),)

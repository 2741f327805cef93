"""The AMD backend on the C stand-in for libamd_smi: its differences from other vendors."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fake_amdsmi.double import (
    AUTO,
    GRAPHICS,
    MANUAL,
    MAX,
    MEMORY,
    MI250X,
    MI250X_SECOND,
    MIN,
    NEVER,
    VERSIONS,
    AmdSmiDouble,
)
from tests.support import TIMEOUT_S, wait_for
from tests.zeusd.devices.opening import failure, news
from zeus_ipc.controls import UNLOCKED, Control
from zeusd.devices.amd.backend import AmdBackend
from zeusd.devices.amd.codes import Status, amd_error
from zeusd.devices.amd.library import Library
from zeusd.devices.port import CallOutcome, DeviceError, Handle, PowerLimitRange, after_a_write
from zeusd.runtime.devices import Inspector, inspect_gpu

Opener = Callable[..., tuple[AmdBackend, AmdSmiDouble, Handle]]


def set_limit(value: int) -> tuple[str, tuple[int, int, int]]:
    return "set_power_cap", (value * 1_000_000, 0, 0)


def clock(domain: int, end: int, mhz: int) -> tuple[str, tuple[int, int, int]]:
    return "set_gpu_clk_limit", (domain, end, mhz)


UNLOCK = ("set_gpu_perf_level", (AUTO, 0, 0))


# ----------------------------------------------------------------------------------- the library


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: f"{version[0]}.{version[1]}")
def test_every_version_of_the_library_is_read_by_its_own_layout(
    open_amd: Opener, version: tuple[int, int]
) -> None:
    amd, double, gpu = open_amd({"power_form": 3, "pid_count": 1, "activity": 63}, version=version)
    double.node.gpus[0].pids[0] = 4321
    double.node.gpus[0].violations = 0b00010
    sensors = amd.sensors(gpu)
    assert (sensors.power_instant_mw, sensors.power_average_mw) == (140_000, 140_000)
    assert amd.power_limits(gpu) == PowerLimitRange(150_000, 750_000, 750_000)
    assert [(one.pid, one.memory_bytes) for one in amd.processes(gpu)] == [(4321, 1 << 30)]
    assert amd.utilization_percent(gpu) == 63
    assert amd.name(gpu) == "AMD Instinct MI300X"
    if version == (24, 6):
        assert failure(amd.throttle_reasons, gpu).outcome is CallOutcome.UNSUPPORTED
    else:
        assert amd.throttle_reasons(gpu) == 0x4


@pytest.mark.parametrize("version", [(25, 5), (26, 2)], ids=["25.5", "26.2"])
def test_calls_overlap_only_where_the_library_can(
    open_amd: Opener, version: tuple[int, int]
) -> None:
    amd, double, _ = open_amd({"power_w": 100}, {"power_w": 300}, version=version)
    double.node.call_us = 500
    together = threading.Barrier(4, timeout=TIMEOUT_S)

    def read(number: int) -> set[int | None]:
        together.wait()
        gpu = amd.device_handle(number % 2)
        return {amd.sensors(gpu).power_instant_mw for _ in range(10)}

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, range(4)))
    assert found == [{100_000}, {300_000}, {100_000}, {300_000}]
    assert double.node.overlaps == 0  # counted where they do harm


def test_the_library_is_initialised_once(open_amd: Opener) -> None:
    amd, double, gpu = open_amd()
    amd.init()
    assert double.node.inits == 1
    amd.shutdown()
    assert amd.power_limit_mw(gpu) == 750_000
    amd.shutdown()
    assert failure(amd.power_limit_mw, gpu).outcome is CallOutcome.TRANSIENT
    amd.init()  # for the fixture to undo
    assert failure(amd.power_limit_mw, gpu).outcome is CallOutcome.INVALID  # a handle of before


def test_an_initialization_that_hangs_is_abandoned_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = AmdSmiDouble(tmp_path)
    for name, value in double.env.items():
        monkeypatch.setenv(name, value)
    double.node.init_ms = 300
    amd = AmdBackend(double.library, str(double.sysfs), init_s=0.02)
    for _ in range(3):
        error = failure(amd.init)
        assert error.outcome is CallOutcome.BUSY
        assert "has not returned for 0.02 s" in str(error)

    def initialized() -> bool:
        with contextlib.suppress(DeviceError):
            amd.init()
            return True
        return False

    wait_for(initialized, "the one that hung to return")
    assert double.node.inits == 1
    amd.shutdown()


def test_a_missing_library_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "module/amdgpu").mkdir(parents=True)
    error = failure(AmdBackend("/nowhere/libamd_smi.so", str(tmp_path)).init)
    assert "cannot load /nowhere/libamd_smi.so" in str(error)
    error = failure(AmdBackend("/nowhere/libamd_smi.so", "/nowhere").init)
    assert "the amdgpu driver is not loaded" in str(error)


def test_a_library_of_a_version_that_is_not_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    double = AmdSmiDouble(tmp_path)
    monkeypatch.setattr("zeusd.devices.amd.library.layouts_of", lambda major: None)
    assert "is version 26.2, and zeusd knows versions 24 to 27" in str(
        failure(Library, double.library)
    )


# ----------------------------------------------------------------------------------- identity


def test_a_gpu_is_named_by_its_unique_id_and_counted_by_its_address(open_amd: Opener) -> None:
    amd, _, first = open_amd({"bdf": 0x1_0000_4500}, {"unique_id": None}, {})
    second = amd.device_handle(1)
    assert amd.uuid(amd.device_handle(1)) == "GPU-5a00000000000002"
    assert amd.uuid(first) == "GPU-AMD-00000000:15:00.0"
    assert amd.pci_address(second) == "00000000:25:00.0"
    assert amd.pci_address(amd.device_handle(2)) == "00010000:45:00.0"
    assert amd.memory_mib(second) == 196_608
    assert amd.memory_used_mib(second) == 1024
    assert amd.driver_version() == "6.12.12"


def test_dies_that_share_a_unique_id_are_distinguished(open_amd: Opener) -> None:
    amd, _, _ = open_amd({"unique_id": "5a"}, {"unique_id": "5a"})
    assert [amd.uuid(amd.device_handle(index)) for index in range(2)] == [
        "GPU-000000000000005a",
        "GPU-000000000000005a-00000000:15:00.0",
    ]


def test_a_partitioned_gpu_is_one_device(open_amd: Opener) -> None:
    amd, double, gpu = open_amd({"partitions": 8, "pid_count": 2}, {})
    double.node.gpus[0].pids[:2] = 11, 12
    assert amd.device_count() == 2
    assert amd.mig_enabled(gpu) is True
    assert amd.mig_enabled(amd.device_handle(1)) is False
    assert amd.sensors(gpu).power_instant_mw == 140_000  # of the first partition only
    amd.set_power_limit(gpu, 500_000)
    assert amd.power_limit_mw(gpu) == 500_000
    listed = [(one.pid, one.memory_bytes) for one in amd.processes(gpu)]
    assert listed == [(11, 8 << 30), (12, 8 << 30)]


def test_gpus_and_partitions_are_numbered_as_hip_counts_them(open_amd: Opener) -> None:
    """In the order of the kernel's nodes, which need not be that of PCI addresses."""
    four = {"partitions": 4, "kfd_node": 20}
    amd, double, gpu = open_amd(four, {"kfd_node": 9}, {"partitions": 2, "kfd_node": 11})
    handles = [amd.device_handle(index) for index in range(3)]
    assert [amd.runtime_indices(one) for one in handles] == [[3, 4, 5, 6], [0], [1, 2]]
    facts, _ = inspect_gpu(amd, 2)
    assert (facts.info.mig_enabled, facts.info.runtime_indices) == (True, [1, 2])
    double.lose(1)
    assert amd.runtime_indices(gpu) == [3, 4, 5, 6]


def test_two_partitions_of_one_number_are_not_numbered(open_amd: Opener) -> None:
    amd, _, gpu = open_amd({"kfd_node": 9}, {"kfd_node": 9})
    assert failure(amd.runtime_indices, gpu).outcome is CallOutcome.TRANSIENT


def test_numbers_that_another_gpus_loss_hides_do_not_make_this_one_lost(open_amd: Opener) -> None:
    amd, double, gpu = open_amd({}, {})
    double.lose(1)
    assert failure(amd.runtime_indices, gpu).outcome is not CallOutcome.LOST


def test_a_library_without_these_numbers_leaves_them_unknown(open_amd: Opener) -> None:
    amd, _, gpu = open_amd({"partitions": 8}, version=(24, 6))
    assert failure(amd.runtime_indices, gpu).outcome is CallOutcome.UNSUPPORTED
    assert inspect_gpu(amd, 0)[0].info.runtime_indices == []


def test_the_second_die_of_an_mi250_has_neither_cap_nor_energy(open_amd: Opener) -> None:
    amd, _, first = open_amd(MI250X, MI250X_SECOND)
    second = amd.device_handle(1)
    assert amd.power_limits(first) == PowerLimitRange(100_000, 560_000, 560_000)
    assert amd.sensors(first).power_instant_mw == 140_000  # it has an average only
    assert amd.sensors(second)[1:6] == (None,) * 5
    inspector = Inspector(amd, 1)
    for _ in range(4):
        inspector.look()
    assert inspector.settled
    facts, _ = inspect_gpu(amd, 0)
    assert facts.info.controls == ["power_limit", "gpu_clocks", "memory_clocks"]
    error = failure(amd.power_limits, second)
    assert error.outcome is CallOutcome.UNSUPPORTED
    assert "first die" in str(error)
    uuids = [amd.uuid(gpu) for gpu in (first, second)]
    assert facts.info.power_domain == uuids


def test_dies_are_paired_by_their_place_on_the_bus_and_the_one_with_the_cap_is_first(
    open_amd: Opener,
) -> None:
    amd, _, _ = open_amd(MI250X, MI250X_SECOND, {}, MI250X_SECOND, MI250X)
    gpus = [amd.device_handle(index) for index in range(5)]
    assert [amd.power_domain(gpu) for gpu in gpus] == [[0, 1], [0, 1], [], [4, 3], [4, 3]]


# ----------------------------------------------------------------------------------- power cap


def test_a_cap_is_whole_watts_and_never_zero(open_amd: Opener) -> None:
    amd, double, gpu = open_amd()
    amd.set_power_limit(gpu, 400_999)
    assert amd.power_limit_mw(gpu) == amd.enforced_power_limit_mw(gpu) == 400_000
    for refused_mw in (0, 999, 149_000, 751_000):
        assert failure(amd.set_power_limit, gpu, refused_mw).outcome is CallOutcome.INVALID
    assert double.written() == [set_limit(400)]


def test_a_virtualisation_host_has_its_caps_in_watts(open_amd: Opener) -> None:
    amd, double, gpu = open_amd({"cap_in_watts": 1})
    assert amd.power_limits(gpu) == PowerLimitRange(150_000, 750_000, 750_000)
    amd.set_power_limit(gpu, 300_000)
    assert double.node.gpus[0].cap_uw == 300_000_000


def test_a_guest_with_all_ones_has_no_cap(open_amd: Opener) -> None:
    amd, _, gpu = open_amd({"cap_max_uw": -1})
    assert failure(amd.power_limits, gpu).outcome is CallOutcome.UNSUPPORTED


@pytest.mark.parametrize("cap_uw", [0, -1])
def test_a_cap_that_was_not_read_is_no_cap_of_zero(open_amd: Opener, cap_uw: int) -> None:
    """The library reports success if any of its reads worked. A cap of 0 W found at start would
    become the restore target."""
    amd, double, gpu = open_amd({"cap_uw": cap_uw})
    inspector = Inspector(amd, 0)
    facts = news(inspector)
    assert Control.POWER_LIMIT not in facts.values
    assert "power_limit" not in facts.info.controls
    double.node.gpus[0].cap_uw = 750_000_000
    facts = news(inspector)
    assert facts.values[Control.POWER_LIMIT] == (750_000,)
    assert amd.power_limit_mw(gpu) == 750_000


def test_a_refused_cap_is_distinguished_from_a_gpu_in_reset(open_amd: Opener) -> None:
    amd, double, gpu = open_amd({"refuse": 1})
    error = failure(amd.set_power_limit, gpu, 400_000)
    assert (error.outcome, error.code) == (CallOutcome.TRANSIENT, 2)
    assert "the driver refused the value" in str(error)
    double.inject(0, "set_power_cap", 2, 1)
    double.inject(0, "get_power_cap_info", 0, 1)
    double.inject(0, "get_power_cap_info", 2, 1)
    error = failure(amd.set_power_limit, gpu, 400_000)
    assert error.outcome is CallOutcome.BUSY
    assert "in reset or suspended" in str(error)
    amd.set_power_limit(gpu, 400_000)
    assert amd.power_limit_mw(gpu) == 400_000


def test_not_supported_once_is_no_fact_about_a_gpu(open_amd: Opener) -> None:
    amd, double, _ = open_amd({"resetting": 1})
    inspector = Inspector(amd, 0)
    facts = news(inspector)
    assert facts.info.controls == []
    inspector.look()
    double.node.gpus[0].resetting = 0
    facts = news(inspector)
    assert facts.info.controls == ["power_limit", "gpu_clocks", "memory_clocks"]
    assert facts.info.power_limit_max_mw == 750_000


def test_only_root_may_set(open_amd: Opener) -> None:
    amd, double, gpu = open_amd(privilege=NEVER)
    assert "only for root" in str(failure(amd.write_control, gpu, Control.GPU_CLOCKS, (500, 900)))
    assert double.node.gpus[0].level == AUTO


def test_a_gpu_that_is_not_found_and_still_on_the_bus_is_not_lost(open_amd: Opener) -> None:
    amd, double, gpu = open_amd()
    double.inject(0, "get_clock_info", 31, 1)
    assert failure(amd.gpu_clock_mhz, gpu).outcome is CallOutcome.TRANSIENT


# ----------------------------------------------------------------------------------- clocks


def test_a_single_frequency_is_the_narrowest_range(open_amd: Opener) -> None:
    amd, double, gpu = open_amd()
    amd.write_control(gpu, Control.GPU_CLOCKS, (1500, 1500))
    assert double.written() == [clock(GRAPHICS, MAX, 1500), clock(GRAPHICS, MIN, 1499)]


@pytest.mark.parametrize(
    ("now", "wanted", "first"),
    [
        ((500, 900), (1200, 1500), MAX),
        ((1200, 1500), (500, 900), MIN),
        ((500, 1500), (900, 1200), MAX),
        ((900, 1200), (500, 900), MIN),
    ],
)
def test_no_order_of_the_two_halves_crosses(
    open_amd: Opener, now: tuple[int, int], wanted: tuple[int, int], first: int
) -> None:
    amd, double, gpu = open_amd({"sclk_low": now[0], "sclk_high": now[1], "level": MANUAL})
    amd.write_control(gpu, Control.GPU_CLOCKS, wanted)
    assert [call.status for call in double.calls()] == [0, 0]
    assert double.calls()[0].arguments[1] == first
    assert (double.node.gpus[0].sclk_low, double.node.gpus[0].sclk_high) == wanted


def test_a_range_is_moved_into_the_gpus_own(open_amd: Opener) -> None:
    amd, double, gpu = open_amd()
    for wanted, taken in (
        ((0, 900), (132, 900)),
        ((3000, 3000), (2099, 2100)),
        ((1, 2), (132, 133)),
    ):
        amd.write_control(gpu, Control.GPU_CLOCKS, wanted)
        assert (double.node.gpus[0].sclk_low, double.node.gpus[0].sclk_high) == taken


def test_memory_has_a_highest_clock_only(open_amd: Opener) -> None:
    amd, double, gpu = open_amd()
    amd.write_control(gpu, Control.MEMORY_CLOCKS, (1100, 1100))
    assert double.written() == [clock(MEMORY, MAX, 1100)]
    assert amd.memory_clock_mhz(gpu) == 1100


def test_unlocking_one_domain_keeps_the_others_limits(open_amd: Opener) -> None:
    amd, double, gpu = open_amd()
    amd.write_control(gpu, Control.GPU_CLOCKS, (500, 900))
    amd.write_control(gpu, Control.MEMORY_CLOCKS, (900, 1000))
    before = len(double.calls())
    amd.write_control(gpu, Control.GPU_CLOCKS, UNLOCKED)
    assert double.written()[before:] == [UNLOCK, clock(MEMORY, MAX, 1000)]
    amd.write_control(gpu, Control.GPU_CLOCKS, (500, 900))
    before = len(double.calls())
    amd.write_control(gpu, Control.MEMORY_CLOCKS, UNLOCKED)
    assert double.written()[before:] == [
        UNLOCK,
        clock(GRAPHICS, MAX, 900),
        clock(GRAPHICS, MIN, 500),
    ]
    amd.write_control(gpu, Control.GPU_CLOCKS, UNLOCKED)
    state = double.node.gpus[0]
    assert (state.sclk_low, state.sclk_high, state.mclk_high) == (132, 2100, 1300)
    assert state.level == AUTO


def test_a_power_profile_is_one_preset_and_outlives_the_unlocking_of_clocks(
    open_amd: Opener,
) -> None:
    amd, double, gpu = open_amd({"presets": 0x2E})
    offered = [one.profile for one in amd.power_profiles(gpu)]
    assert offered == [241, 242, 243, 245]
    state = double.node.gpus[0]
    amd.write_control(gpu, Control.POWER_PROFILE, (243,))
    amd.write_control(gpu, Control.GPU_CLOCKS, (500, 900))
    amd.write_control(gpu, Control.GPU_CLOCKS, UNLOCKED)
    assert amd.read_control(gpu, Control.POWER_PROFILE) == (243,)
    assert amd.enforced_power_profiles(gpu) == (243,)
    amd.write_control(gpu, Control.GPU_CLOCKS, (500, 900))
    amd.write_control(gpu, Control.POWER_PROFILE, ())
    assert (state.sclk_high, state.preset) == (900, 0), "clocks stay locked"
    amd.write_control(gpu, Control.GPU_CLOCKS, UNLOCKED)
    assert state.level == AUTO
    for value in ((241, 243), (244,), (1,)):
        error = failure(amd.write_control, gpu, Control.POWER_PROFILE, value)
        assert (error.outcome, error.refused) == (CallOutcome.INVALID, True)
    state.preset = 1  # someone's own parameters, or one that zeusd does not know
    assert amd.read_control(gpu, Control.POWER_PROFILE) == (240,)
    state.preset = 1 << 40
    assert amd.read_control(gpu, Control.POWER_PROFILE) == ()
    double.inject(0, "get_gpu_power_profile_presets", 43)
    amd.write_control(gpu, Control.GPU_CLOCKS, (500, 900))
    amd.write_control(gpu, Control.GPU_CLOCKS, UNLOCKED)
    assert state.level == AUTO, "clocks are unlocked also where presets cannot be read"


@pytest.mark.parametrize(
    ("refused", "kept"),
    [("set_gpu_power_profile", (0, 900)), ("set_gpu_clk_limit", (8, 1300)), ("", (8, 900))],
)
def test_unlocking_loses_no_more_than_what_the_driver_refuses(
    open_amd: Opener, refused: str, kept: tuple[int, int]
) -> None:
    amd, double, gpu = open_amd({"presets": 8})
    for control, value in (
        (Control.POWER_PROFILE, (243,)),
        (Control.GPU_CLOCKS, (500, 900)),
        (Control.MEMORY_CLOCKS, (900, 900)),
    ):
        amd.write_control(gpu, control, value)
    state = double.node.gpus[0]
    with contextlib.ExitStack() as failing:
        if refused:
            double.inject(0, refused, 43)
            failing.enter_context(pytest.raises(DeviceError))
        amd.write_control(gpu, Control.GPU_CLOCKS, UNLOCKED)
    assert (state.preset, state.mclk_high, state.sclk_high) == (*kept, 2100)


def test_a_refused_power_profile_does_not_leave_the_clocks_pinned(open_amd: Opener) -> None:
    amd, double, gpu = open_amd({"presets": 8, "refuse": 1})
    error = failure(amd.write_control, gpu, Control.POWER_PROFILE, (243,))
    assert (error.outcome, error.refused) == (CallOutcome.TRANSIENT, False)
    assert (double.node.gpus[0].level, double.node.gpus[0].preset) == (AUTO, 0)
    amd.write_control(gpu, Control.POWER_PROFILE, (243,))
    assert double.node.gpus[0].preset == 8


def test_a_refused_clock_does_not_leave_the_clocks_pinned(open_amd: Opener) -> None:
    amd, double, gpu = open_amd({"refuse": 1})
    error = failure(amd.write_control, gpu, Control.GPU_CLOCKS, (500, 900))
    assert error.outcome is CallOutcome.TRANSIENT
    assert "the driver refused 900 MHz" in str(error)
    assert double.node.gpus[0].level == AUTO


def test_clocks_are_a_range_with_steps_to_choose_from(open_amd: Opener) -> None:
    amd, _, gpu = open_amd()
    assert amd.supported_memory_clocks(gpu) == [1300, 900]
    steps = amd.supported_gpu_clocks(gpu, 1300)
    assert (steps[0], steps[1], steps[-1]) == (2100, 2075, 132)


# ----------------------------------------------------------------------------------- readings


@pytest.mark.parametrize("scale", [1, 1000], ids=["degrees", "millidegrees"])
def test_the_unit_of_temperatures_is_detected(open_amd: Opener, scale: int) -> None:
    amd, double, gpu = open_amd({"temperature_scale": scale})
    assert amd.temperature_c(gpu) == 45
    double.node.gpus[0].temperature_c = 2112
    assert failure(amd.temperature_c, gpu).outcome is CallOutcome.TRANSIENT
    double.node.gpus[0].temperature_c = 101
    assert amd.temperature_c(gpu) == 101


@pytest.mark.parametrize(
    ("violations", "reasons"),
    [(0b00001, 0x8), (0b00010, 0x4), (0b00100, 0x40), (0b01010, 0x44), (0b10000, 0x40), (0, 0)],
)
def test_violations_become_throttle_reasons(
    open_amd: Opener, violations: int, reasons: int
) -> None:
    amd, _, gpu = open_amd({"violations": violations})
    assert amd.throttle_reasons(gpu) == reasons


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_samples_in_violation_become_the_time_limited(
    open_amd: Opener, version: tuple[int, int]
) -> None:
    amd, double, gpu = open_amd({"counts_violations": 1}, {}, version=version, clock_ns=10**12)
    state = double.node.gpus[0]
    began_ns = time.monotonic_ns()
    first = amd.sensors(gpu).limited_ns
    assert first == (0, 0, None, None, None)
    double.node.clock_ns += 2_000_000_000  # the firmware's samples, one each millisecond
    state.acc_power, state.acc_hbm, state.acc_vr, state.acc_prochot = 500, 1_000, 800, 100
    amd.sensors(gpu)
    passed_ns = time.monotonic_ns() - began_ns
    power_ns, heat_ns, *others = amd.sensors(gpu).limited_ns
    assert 0 < power_ns <= passed_ns // 4 + 1
    assert heat_ns == pytest.approx(2 * power_ns, abs=2)  # not the sum: they coincide
    assert others == [None] * 3
    assert amd.sensors(gpu, averages=False).limited_ns == ()
    state.acc_power = state.acc_hbm = state.acc_vr = state.acc_prochot = 0  # loaded again
    double.node.clock_ns += 1_000_000
    assert amd.sensors(gpu).limited_ns == (power_ns, heat_ns, None, None, None)
    assert amd.sensors(amd.device_handle(1)).limited_ns == ()


def test_readings_that_the_driver_fills_with_ones_are_absent(open_amd: Opener) -> None:
    amd, _, gpu = open_amd(
        {"power_form": 0, "energy_absent": 1, "activity": 0xFFFF, "no_violations": 1}
    )
    assert amd.sensors(gpu)[1:6] == (None,) * 5
    for call in (amd.utilization_percent, amd.throttle_reasons):
        assert failure(call, gpu).outcome is CallOutcome.UNSUPPORTED


def test_a_power_that_no_gpu_draws_is_none(open_amd: Opener) -> None:
    amd, _, gpu = open_amd({"power_w": 0xFFFE})
    assert amd.sensors(gpu)[2:6] == (None,) * 4


def test_energy_is_counted_in_the_firmwares_unit(
    open_amd: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    amd, double, gpu = open_amd(clock_ns=10**12)
    clock = SimpleNamespace(monotonic_ns=itertools.count(0, 10).__next__)
    monkeypatch.setattr("zeusd.devices.amd.backend.time", clock)
    read = amd.sensors(gpu, averages=False)
    assert (read.t_ns, read.took_ns) == (5, 10), "in the middle of the call"
    start = amd.sensors(gpu).energy_mj
    double.node.clock_ns += 1000 * 10**9
    end = amd.sensors(gpu).energy_mj
    assert end - start == pytest.approx(140_000_000, rel=1e-6)  # the library's unit: 0.27 % more


def test_more_processes_than_expected_are_all_listed(open_amd: Opener) -> None:
    amd, double, gpu = open_amd({"pid_count": 200})
    double.node.gpus[0].pids[:200] = range(1000, 1200)
    assert [one.pid for one in amd.processes(gpu)] == list(range(1000, 1200))
    double.inject(0, "get_gpu_process_list", 43)
    assert failure(amd.processes, gpu).outcome is CallOutcome.TRANSIENT, "not an empty list"


def test_what_fails_after_a_write_is_no_refusal() -> None:
    """Such as reading back after one of two halves of a range was set."""
    before = amd_error(Status.NOT_SUPPORTED, "get")
    assert before.refused
    with pytest.raises(DeviceError) as caught, after_a_write():
        raise amd_error(Status.NOT_SUPPORTED, "get")
    assert not caught.value.refused
    assert not caught.value.invalid

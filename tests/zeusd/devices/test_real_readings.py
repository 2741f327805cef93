"""Energy and power as NVML has them: counters, fields, and GPUs and drivers that lack some."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from tests.fake_nvml.double import NvmlDouble
from tests.support import wait_for
from tests.zeusd.devices.opening import Opener, code_of
from zeusd.devices.nvml.backend import NvmlBackend
from zeusd.devices.nvml.codes import Return
from zeusd.runtime.workers import read_state

FIELDS = [
    *((number, scope) for number in (83, 185, 186) for scope in (0, 1, 2)),
    *((number, 0) for number in (74, 75, 76, 77, 79, 190, 192, 252, 253, 270, 271)),
]


def asked(nvml: NvmlBackend, double: NvmlDouble) -> list[tuple[int, int]]:
    """The fields that the next reading asks the first GPU for, by number and scope."""
    double.clear_faults()
    for number, scope in FIELDS:
        double.inject(0, f"field.{number}.{scope}", count=1)
    nvml.sensors(nvml.device_handle(0))
    counts = [fault.count for fault in double.node.faults[: len(FIELDS)]]
    return [field for field, left in zip(FIELDS, counts, strict=True) if not left]


def test_the_counter_moves_by_whole_ticks_and_as_much_as_was_drawn(open_nvml: Opener) -> None:
    nvml, _ = open_nvml({"tick_ms": 20, "load_mw": 400_000})
    gpu = nvml.device_handle(0)
    tick_mj = 250_000 * 20 // 1000  # held down by the limit
    seen = [nvml.sensors(gpu)]

    def several_ticks() -> bool:
        seen.append(nvml.sensors(gpu))
        return len({reading.energy_mj for reading in seen}) > 5

    wait_for(several_ticks, "the counter to move")
    counts = sorted({reading.energy_mj for reading in seen if reading.energy_mj is not None})
    assert len(counts) > 5
    for before, after in itertools.pairwise(counts):
        ticks = round((after - before) / tick_mj)
        assert ticks >= 1
        assert after - before == ticks * tick_mj
    powers = {reading.power_instant_mw for reading in seen}
    assert len(powers) > 1  # no meter stands still
    assert all(power == pytest.approx(250_000, abs=10) for power in powers)


def test_less_is_counted_from_the_moment_of_a_lower_limit_on(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"tick_ms": 1, "load_mw": 250_000})
    gpu = nvml.device_handle(0)
    gpus = double.node.gpus
    wait_for(lambda: (nvml.sensors(gpu).energy_mj or 0) > 10_000, "ten joules")
    before_ns = time.monotonic_ns()
    double.set_outside(0, 100_000)
    assert gpus[0].updated_ns > before_ns - 1_000
    assert gpus[0].energy_nj * 1e3 / (gpus[0].updated_ns - gpus[0].start_ns) == 250_000
    start_ns, start_nj = gpus[0].updated_ns, gpus[0].energy_nj
    wait_for(lambda: (nvml.sensors(gpu).energy_mj or 0) > start_nj / 1e6 + 5_000, "five joules")
    drawn_mw = (gpus[0].energy_nj - start_nj) * 1e3 / (gpus[0].updated_ns - start_ns)
    assert drawn_mw == 100_000
    assert nvml.power_limit_mw(gpu) == 100_000
    assert nvml.throttle_reasons(gpu) == 4
    double.set_load(0, 60_000)
    assert nvml.throttle_reasons(gpu) == 0
    assert double.calls() == []


@pytest.mark.parametrize(("driver", "slowdown"), [("595.58.03", True), ("570.86.10", False)])
def test_the_driver_counts_the_time_limited(
    open_nvml: Opener, monkeypatch: pytest.MonkeyPatch, driver: str, slowdown: bool
) -> None:
    monkeypatch.setattr(NvmlBackend, "driver_version", lambda self: driver)
    nvml, double = open_nvml({"counts_limited": 1, "load_mw": 250_000, "has_average": 1})
    gpu, state = nvml.device_handle(0), double.node.gpus[0]
    assert nvml.sensors(gpu).limited_ns == (0, 0, 0, 0, 0)
    double.set_outside(0, 150_000)
    state.limited_heat_ns, state.limited_slowdown_ns, state.limited_brake_ns = 5, 7, 11
    state.limited_board_ns, state.limited_sync_ns, state.limited_reliability_ns = 13, 17, 19
    wait_for(lambda: (nvml.sensors(gpu).limited_ns[0] or 0) > 20_000_000, "the limit to take time")
    before_ns = time.monotonic_ns()
    power_ns, *others = nvml.sensors(gpu).limited_ns
    # Earlier drivers have other fields where the new ones are: they are not asked.
    assert others == ([12, 24, 17, 19] if slowdown else [5, 13, 17, 19])
    double.set_load(0, 100_000)
    limited_ns = nvml.sensors(gpu).limited_ns[0]
    assert 0 <= limited_ns - power_ns <= time.monotonic_ns() - before_ns
    assert nvml.sensors(gpu).limited_ns[0] == limited_ns
    assert nvml.sensors(gpu, averages=False).limited_ns == ()


def test_a_limit_of_the_bmc_is_in_force_although_nobody_requested_it(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"counts_limited": 1})
    double.node.gpus[0].bmc_limit_mw = 180_000
    sensors = nvml.sensors(nvml.device_handle(0))
    assert (sensors.requested_limit_mw, sensors.current_limit_mw) == (250_000, 180_000)
    state = read_state(nvml, nvml.device_handle(0))
    assert (state.power_limit_mw, state.enforced_power_limit_mw) == (250_000, 180_000)


@pytest.mark.parametrize(
    ("gpu", "faults", "energy", "average", "fields"),
    [
        ({}, {}, True, False, [(83, 0), (186, 0)]),
        ({"has_energy": 0}, {}, False, False, [(186, 0)]),
        (
            {"has_average": 1, "memory_power_mw": 41_000},
            {},
            *(True, True),
            [(83, 0), (185, 0), (185, 2), (186, 0)],
        ),
        # a driver older than the field
        ({"has_energy": 0}, dict.fromkeys((185, 186), Return.INVALID_ARGUMENT), False, False, []),
        ({}, {186: Return.NOT_SUPPORTED}, True, False, [(83, 0)]),
    ],
    ids=["no counter of limits", "no energy", "no module", "no field", "energy alone"],
)
def test_fields_that_a_gpu_lacks_are_none_and_soon_no_longer_asked_for(
    open_nvml: Opener,
    gpu: dict[str, int],
    faults: dict[int, int],
    energy: bool,
    average: bool,
    fields: list[tuple[int, int]],
) -> None:
    nvml, double = open_nvml(gpu)
    handle = nvml.device_handle(0)
    for (field, code), scope in itertools.product(faults.items(), (0, 1)):
        double.inject(0, f"field.{field}.{scope}", code)
    for _ in range(10):
        sensors = nvml.sensors(handle)
        assert (sensors.energy_mj is not None) == energy
        assert (sensors.power_average_mw is not None) == average
        # NVML: success, with zero
        assert sensors.memory_power_average_mw == gpu.get("memory_power_mw")
        assert sensors.power_instant_mw == pytest.approx(220_000, abs=10)
        assert (sensors.module_power_mw, sensors.limited_ns) == (None, ())
    assert nvml.module(handle) is None
    assert asked(nvml, double) == fields


@pytest.mark.parametrize("fields", [True, False])
def test_values_that_are_not_available_are_none(open_nvml: Opener, fields: bool) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    if not fields:
        double.inject(0, "nvmlDeviceGetFieldValues", Return.FUNCTION_NOT_FOUND)
    for mw in (0xFFFFFFFF, 0x7FFFFFFF, 65_535_000):
        double.node.gpus[0].power_stuck_mw = mw  # NVML_VALUE_NOT_AVAILABLE is the first
        assert nvml.sensors(gpu).energy_mj is not None
        assert nvml.sensors(gpu)[2:6] == (None,) * 4
    double.node.gpus[0].power_stuck_mw = 0
    assert nvml.sensors(gpu).power_instant_mw == pytest.approx(220_000, abs=10)
    double.node.gpus[0].counter_stuck_mj = -1
    assert nvml.sensors(gpu).energy_mj is None


def test_failures_never_lose_a_field(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.inject(0, "field.83.0", Return.UNKNOWN)
    for _ in range(10):
        assert nvml.sensors(gpu).energy_mj is None
    double.clear_faults()
    assert nvml.sensors(gpu).energy_mj is not None


def test_a_reading_in_which_every_field_failed_is_an_error(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    for field in (83, 185, 186):
        for scope in (0, 1, 2):
            double.inject(0, f"field.{field}.{scope}", Return.TIMEOUT)
    assert code_of(nvml.sensors, nvml.device_handle(0)) == Return.TIMEOUT


def test_a_gpu_lost_in_one_field_is_lost(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    double.inject(0, "field.186.0", Return.GPU_IS_LOST)
    assert code_of(nvml.sensors, nvml.device_handle(0)) == Return.GPU_IS_LOST


def test_missing_features_are_probed_again_after_a_driver_reload(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"has_energy": 0})
    gpu = nvml.device_handle(0)
    for _ in range(5):
        assert nvml.sensors(gpu).energy_mj is None
    nvml.shutdown()
    double.node.gpus[0].has_energy = 1
    nvml.init()
    assert nvml.sensors(nvml.device_handle(0)).energy_mj is not None


def test_a_field_that_fails_now_and_then_is_not_given_up(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    assert nvml.sensors(gpu).energy_mj is not None
    double.node.gpus[0].has_energy = 0  # polled too fast, say
    for _ in range(10):
        assert nvml.sensors(gpu).energy_mj is None
    double.node.gpus[0].has_energy = 1
    assert nvml.sensors(gpu).energy_mj is not None


def test_the_power_of_a_module_is_never_given_as_the_gpus(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"name": "NVIDIA GH200 480GB", "module_only": 1, "has_average": 1})
    gpu = nvml.device_handle(0)
    for _ in range(5):
        sensors = nvml.sensors(gpu)
        assert sensors.power_instant_mw is None
        assert sensors.power_average_mw is None
        assert sensors.module_power_mw == pytest.approx(220_000, abs=10)
    assert asked(nvml, double) == [(83, 0), (186, 1)]


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA GH200 480GB"])
def test_a_driver_that_ignores_scopes_does_not_make_a_superchip(
    open_nvml: Opener, name: str
) -> None:
    """Every scope reads as the GPU's own, so there is no power of a module or of the memory."""
    nvml, double = open_nvml({"name": name, "ignores_scope": 1, "has_average": 1})
    gpu = nvml.device_handle(0)
    for _ in range(10):
        sensors = nvml.sensors(gpu)
        assert (sensors.module_power_mw, sensors.memory_power_average_mw) == (None, None)
        assert sensors.energy_mj is not None
        assert sensors.power_instant_mw == pytest.approx(220_000, abs=10)
    assert {scope for _, scope in asked(nvml, double)} == {0}


def test_gpus_of_a_superchip_are_paired_by_their_numa_node(
    open_nvml: Opener, tmp_path: Path
) -> None:
    chip = {"name": "NVIDIA GB200", "module_mw": 467_200}
    gpus = (chip, chip, chip | {"module_mw": 459_800}, {})
    nvml, double = open_nvml(*gpus, sysfs=str(tmp_path))
    for index, node in enumerate((0, 0, 1, 1)):
        device = tmp_path / "bus/pci/devices" / f"0000:{7 + index:02x}:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    gpus = [nvml.device_handle(index) for index in range(4)]
    assert [nvml.module(gpu) for gpu in gpus] == [0, 0, 1, None]
    sensors = nvml.sensors(gpus[0])
    assert sensors.module_power_mw == 467_200
    assert sensors.power_instant_mw == pytest.approx(220_000, abs=10)
    double.node.gpus[2].module_mw = 0  # success with zero is no reading
    (tmp_path / "bus/pci/devices/0000:07:00.0/numa_node").write_text("-1\n")
    assert [nvml.module(gpu) for gpu in gpus] == [None, 0, None, None]


def test_a_driver_without_field_values_is_asked_call_by_call(open_nvml: Opener) -> None:
    nvml, double = open_nvml()
    gpu = nvml.device_handle(0)
    double.inject(0, "nvmlDeviceGetFieldValues", Return.FUNCTION_NOT_FOUND, count=1)
    for _ in range(2):
        sensors = nvml.sensors(gpu)
        assert sensors.energy_mj is not None
        assert sensors.power_instant_mw is not None
    double.inject(0, "nvmlDeviceGetFieldValues", count=1)
    nvml.sensors(gpu)
    assert double.node.faults[1].count == 1  # it was not called


def test_field_values_that_fail_now_and_then_are_not_given_up(open_nvml: Opener) -> None:
    nvml, double = open_nvml({"memory_power_mw": 41_000})
    gpu = nvml.device_handle(0)
    assert nvml.sensors(gpu).memory_power_average_mw == 41_000
    double.inject(0, "nvmlDeviceGetFieldValues", Return.NOT_SUPPORTED)
    for _ in range(5):
        sensors = nvml.sensors(gpu)
        assert sensors.energy_mj is not None
        assert sensors.memory_power_average_mw is None
    double.clear_faults()
    assert nvml.sensors(gpu).memory_power_average_mw == 41_000

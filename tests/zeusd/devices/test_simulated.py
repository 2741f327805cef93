"""The simulated node, compared with known properties of real ones."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests import seeds
from tests.zeusd.devices.opening import code_of, simulated
from zeusd.devices.nvml.codes import Return
from zeusd.devices.simulated import SimulatedBackend
from zeusd.devices.simulated.models import DEVICES
from zeusd.devices.simulated.physics import ModelLoad, Relaxation, power_w, settle, slowdown
from zeusd.devices.simulated.spec import parse_spec
from zeusd.devices.simulated.workloads import MeasuredTable, ModelWorkload, catalog

POWER_CAP = 0x4


# ------------------------------------------------------------------------------------------ specs


def test_specs_name_gpus_in_order_with_stable_identities() -> None:
    gpus = parse_spec("2xv100,a40:setter_ms=0:seed=3")
    assert [gpu.model.key for gpu in gpus] == ["v100-pcie", "v100-pcie", "a40"]
    assert [gpu.setter_ms for gpu in gpus] == [12.0, 12.0, 0.0]
    assert len({gpu.uuid for gpu in gpus}) == 3
    assert [gpu.uuid for gpu in gpus] == [
        gpu.uuid for gpu in parse_spec("2xv100,a40:setter_ms=0:seed=3")
    ]
    assert [gpu.pci_address for gpu in gpus] == sorted(gpu.pci_address for gpu in gpus)


@pytest.mark.parametrize(
    "spec", ["", "4x", "gtx1080", "0xv100", "65xv100", "v100:x=1", "v100:seed=a"]
)
def test_an_invalid_spec_is_reported_with_valid_ones(spec: str) -> None:
    with pytest.raises(ValueError, match="cannot simulate"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("key", "count", "first", "last"),
    [
        ("p100", 63, (1328, 1316), 544),
        ("v100-pcie", 167, (1380, 1372), 135),
        ("v100-sxm2", 187, (1530, 1522), 135),
        ("t4", 87, (1590, 1575), 300),
        ("rtx6000", 121, (2100, 2085), 300),
        ("a40", 103, (1740, 1725), 210),
        ("a100-sxm-80", 81, (1410, 1395), 210),
        ("h100-sxm", 110, (1980, 1965), 345),
        ("h200", 110, (1980, 1965), 345),
        ("b200", 124, (1965, 1950), 120),
    ],
)
def test_clock_lists_are_the_devices_own(
    key: str, count: int, first: tuple[int, int], last: int
) -> None:
    nvml, _ = simulated(key)
    gpu = nvml.device_handle(0)
    clocks = nvml.supported_gpu_clocks(gpu, nvml.supported_memory_clocks(gpu)[0])
    assert (len(clocks), tuple(clocks[:2]), clocks[-1]) == (count, first, last)
    assert clocks == sorted(clocks, reverse=True)


def test_slow_memory_has_a_short_list_of_clocks() -> None:
    nvml, _ = simulated("a40")
    gpu = nvml.device_handle(0)
    assert nvml.supported_memory_clocks(gpu) == [7251, 405]
    assert nvml.supported_gpu_clocks(gpu, 405)[0] == 420
    assert len(nvml.supported_gpu_clocks(gpu, 405)) == 15
    assert code_of(nvml.supported_gpu_clocks, gpu, 1000) == Return.NOT_FOUND


# -------------------------------------------------------------------------------- what is offered


@pytest.mark.parametrize("key", sorted(DEVICES))
def test_each_device_offers_what_its_architecture_does(key: str) -> None:
    nvml, _ = simulated(f"{DEVICES[key].per_card}x{key}:setter_ms=0")
    gpu = nvml.device_handle(0)
    sensors = nvml.sensors(gpu)
    assert (sensors.energy_mj is None) == (key == "p100")
    no_average = key in ("p100", "v100-pcie", "v100-sxm2", "t4", "rtx6000") or "a100" in key
    no_average |= key.startswith("mi")
    assert (sensors.power_average_mw is None) == no_average
    assert sensors.power_instant_mw is not None
    if key == "p100":
        assert code_of(nvml.set_gpu_clocks, gpu, 600, 900) == Return.NOT_SUPPORTED
    else:
        nvml.set_gpu_clocks(gpu, 600, 900)
    if not DEVICES[key].memory_clocks:
        assert code_of(nvml.set_memory_clocks, gpu, 405, 405) == Return.NOT_SUPPORTED


# --------------------------------------------------------------------------------------- settings


def test_a_setter_takes_about_twelve_milliseconds() -> None:
    nvml, clock = simulated("v100")
    start_ns = clock()
    for _ in range(200):
        nvml.set_power_limit(nvml.device_handle(0), 200_000)
    assert (clock() - start_ns) / 200 == pytest.approx(12e6, rel=0.1)


def test_locked_clocks_snap_to_the_grid_and_slow_the_work() -> None:
    nvml, clock = simulated("a100-sxm-80:setter_ms=0")
    gpu = nvml.device_handle(0)
    work = nvml.open_work([0], "model/compute")

    def unit_s() -> float:
        work.run(10)  # beyond the transition
        start_ns = clock()
        work.run(100)
        return (clock() - start_ns) / 1e9 / 100

    nvml.set_gpu_clocks(gpu, 210, 1001)
    locked_s = unit_s()
    work.launch(1000)
    assert nvml.gpu_clock_mhz(gpu) == 1005
    assert nvml.throttle_reasons(gpu) & 0x2
    work.wait()
    nvml.reset_gpu_clocks(gpu)
    free_s = unit_s()
    load = ModelLoad(0.1, *DEVICES["a100-sxm-80"].compute_load, 1.05)
    expected = (
        settle(DEVICES["a100-sxm-80"], load, 400, None).rate * 0.1 * slowdown(load.k, 1005 / 1410)
    )
    assert locked_s / free_s == pytest.approx(expected, rel=1e-3)


def test_the_board_can_enforce_less_than_software_requested() -> None:
    nvml, _ = simulated("h100-sxm")
    gpu = nvml.device_handle(0)
    nvml.set_board_limit(0, 500_000)
    assert nvml.power_limit_mw(gpu) == 700_000
    assert nvml.enforced_power_limit_mw(gpu) == 500_000


def test_capping_shows_in_the_throttle_reasons() -> None:
    nvml, _ = simulated("v100:setter_ms=0")
    gpu = nvml.device_handle(0)
    assert nvml.throttle_reasons(gpu) == 0x1
    work = nvml.open_work([0], "model/compute")
    work.launch(1000)
    nvml.set_power_limit(gpu, 150_000)
    assert nvml.throttle_reasons(gpu) & 0x4
    memory_bound, _ = simulated("v100")
    work = memory_bound.open_work([0], "model/memory")
    work.launch(1000)
    assert memory_bound.throttle_reasons(0) == 0


# ---------------------------------------------------------------------------------------- sensors


def test_a_counter_can_see_more_than_the_power_reading() -> None:
    for option, seen in (("", False), (":counts_all", True)):
        nvml, clock = simulated(f"a100-sxm-80:setter_ms=0{option}")
        clock.sleep(5)
        first_mj, first_j = nvml.sensors(0).energy_mj, nvml.true_energy_j(0)
        work = nvml.open_work([0], "model/compute")
        before_mj = nvml.sensors(0).energy_mj
        while nvml.sensors(0).energy_mj == before_mj:
            clock.sleep(0.001)
        clock.sleep(0.004)
        work.run(0.1)  # 10 ms, right after a tick: long before the next reading's 25 ms
        work.close()
        clock.sleep(1)
        energy_mj = nvml.sensors(0).energy_mj
        true_j = nvml.true_energy_j(0) - first_j
        assert (abs((energy_mj - first_mj) / 1000 - true_j) < 1.0) == seen
    with pytest.raises(ValueError, match="counts_all"):
        simulated("a100:counts_nothing")


@pytest.mark.parametrize(
    ("key", "tick_ms"), [("v100-pcie", 20), ("a100-sxm-80", 100), ("a40", 100)]
)
def test_power_and_counter_move_together_at_the_tick_and_never_stand_still(
    key: str, tick_ms: int
) -> None:
    nvml, clock = simulated(key)
    nvml.open_work([0], "model/memory").launch(1e6)
    gpu = nvml.device_handle(0)
    changes_ns: list[int] = []
    last = nvml.sensors(gpu)
    for _ in range(4000):
        clock.sleep(0.001)
        now = nvml.sensors(gpu)
        assert (now.energy_mj != last.energy_mj) == (now.power_instant_mw != last.power_instant_mw)
        assert now.energy_mj >= last.energy_mj
        if now.energy_mj != last.energy_mj:
            changes_ns.append(clock())
        last = now
    gaps_ms = {round((b - a) / 1e6) for a, b in itertools.pairwise(changes_ns)}
    assert gaps_ms == {tick_ms}


def test_the_counter_is_unbiased_for_any_reading_pattern() -> None:
    seed = seeds.fresh()
    chance = random.Random(seed)
    nvml, clock = simulated(f"a100-sxm-80:seed={seed}:setter_ms=0")
    gpu = nvml.device_handle(0)
    work = nvml.open_work([0], "model/compute")
    start_mj, start_j = nvml.sensors(gpu).energy_mj, nvml.true_energy_j(0)
    for _ in range(300):
        work.launch(chance.uniform(1, 200))
        nvml.set_power_limit(gpu, chance.randrange(150_000, 400_001, 1000))
        clock.sleep(chance.choice([0.05, 3.0, 100.0]))
    end_mj = nvml.sensors(gpu).energy_mj
    truth_j = nvml.true_energy_j(0) - start_j
    assert (end_mj - start_mj) / 1000 == pytest.approx(truth_j, rel=0.005)


def test_the_sensors_gain_differs_between_boards_when_asked() -> None:
    nvml, clock = simulated("8xa100-sxm-80:gain_sigma=0.03")
    before = [nvml.sensors(index).energy_mj for index in range(8)]
    truth_j = [nvml.true_energy_j(index) for index in range(8)]
    clock.sleep(1000)
    gains = [
        (nvml.sensors(index).energy_mj - before[index])
        / 1000
        / (nvml.true_energy_j(index) - truth_j[index])
        for index in range(8)
    ]
    assert len({round(gain, 4) for gain in gains}) == 8
    assert all(0.88 < gain < 1.12 for gain in gains)


def test_the_average_lags_by_a_second_where_it_is_offered() -> None:
    nvml, clock = simulated("a40:setter_ms=0")
    clock.sleep(5)
    gpu = nvml.device_handle(0)
    nvml.open_work([0], "model/memory").launch(1e6)
    clock.sleep(0.5)
    half = nvml.sensors(gpu)
    assert half.power_average_mw < 0.8 * half.power_instant_mw
    clock.sleep(1.0)
    full = nvml.sensors(gpu)
    assert full.power_average_mw == pytest.approx(full.power_instant_mw, rel=0.01)


@pytest.mark.parametrize("key", ["a40", "h100-sxm", "gb200"])
def test_the_average_is_right_from_the_first_reading_on(key: str) -> None:
    nvml, clock = simulated(f"{DEVICES[key].per_card}x{key}:setter_ms=0")
    gpu = nvml.device_handle(0)
    for _ in range(3):
        found = nvml.sensors(gpu)
        assert found.power_average_mw == pytest.approx(found.power_instant_mw, rel=0.05)
        clock.sleep(0.1)


def test_the_state_survives_a_year_without_a_reading_and_stays_small() -> None:
    nvml, clock = simulated("v100")
    nvml.open_work([0], "model/memory")
    before = nvml.sensors(0).energy_mj
    clock.sleep(365 * 86400)
    after = nvml.sensors(0).energy_mj
    assert (after - before) / 1000 == pytest.approx(36 * 365 * 86400, rel=0.001)


# ------------------------------------------------------------------------------------------- model


def test_the_exponential_moves_and_integrates_exactly() -> None:
    move = Relaxation(1.0, 300.0, 100.0, 0.04)
    steps = 200_000
    numeric = sum(move.value(1.0 + 0.2 * (i + 0.5) / steps) for i in range(steps)) * 0.2 / steps
    assert move.integral(1.2) == pytest.approx(numeric, rel=1e-8)
    assert move.integral(move.when(15.0)) == pytest.approx(15.0, rel=1e-9)


@pytest.mark.parametrize("key", sorted(DEVICES))
def test_a_lower_limit_never_speeds_up_and_is_kept(key: str) -> None:
    device = DEVICES[key]
    low, _, high = device.power_limits_w
    load = ModelLoad(0.1, *device.compute_load, 1.05)
    last_rate = 0.0
    for watts in range(int(low), int(high) + 1, 10):
        point = settle(device, load, watts, None)
        assert point.rate >= last_rate
        last_rate = point.rate
        x = point.clock_mhz / device.clocks_mhz[0]
        if point.clock_mhz > device.clocks_mhz[-1]:
            assert power_w(device, load, x, burst=True) <= watts


def test_energy_has_a_minimum_inside_the_range_of_clocks() -> None:
    """Power limits are worth choosing: neither end of the range is best."""
    device = DEVICES["a100-sxm-80"]
    load = ModelLoad(1.0, 0.88, 460, 1.0)
    energy_j = {
        mhz: power_w(device, load, mhz / 1410) * slowdown(load.k, mhz / 1410)
        for mhz in device.clocks_mhz
        if mhz >= 855
    }
    best = min(energy_j, key=lambda mhz: energy_j[mhz])
    assert 1005 <= best <= 1155  # measured: 1065 to 1080 MHz
    assert 0.68 < energy_j[best] / energy_j[1410] < 0.80  # measured: 26 % less


def test_settling_after_a_limit_takes_about_a_hundred_milliseconds() -> None:
    nvml, clock = simulated("v100-sxm2:setter_ms=0")
    nvml.open_work([0], "model/compute").launch(1e6)
    clock.sleep(1)
    nvml.set_power_limit(0, 200_000)
    clock.sleep(0.02)
    early = nvml.sensors(0).power_instant_mw
    clock.sleep(0.2)
    settled = nvml.sensors(0).power_instant_mw
    assert early > 1.05 * settled


# -------------------------------------------------------------------------------- measured tables


@pytest.mark.parametrize("name", sorted(catalog()))
def test_a_measured_table_is_replayed_within_one_percent(name: str) -> None:
    """Seconds per step by the clock, watts by the counter, on all GPUs, at every limit."""
    table = catalog()[name]
    gpus = list(range(table.gpus))
    nvml, clock = simulated(f"{table.gpus}x{table.device}:setter_ms=0")
    work = nvml.open_work(gpus, name)
    for row, limit_w in enumerate(table.limits_w):
        for gpu in gpus:
            nvml.set_power_limit(gpu, round(limit_w * 1000))
        work.run(2.0 / table.unit_s[row])
        steps = max(1, round(60.0 / table.unit_s[row]))
        start_ns, before = clock(), [_energy_j(nvml, gpu) for gpu in gpus]
        for _ in range(10):
            work.launch(steps / 10)
        work.wait()
        elapsed_s = (clock() - start_ns) / 1e9
        assert elapsed_s / steps == pytest.approx(table.unit_s[row], rel=0.01)
        for gpu in gpus:
            watts = (_energy_j(nvml, gpu) - before[gpu]) / elapsed_s
            assert watts == pytest.approx(table.power_w[gpu][row], rel=0.01)


def _energy_j(nvml: SimulatedBackend, gpu: int) -> float:
    energy_mj = nvml.sensors(gpu).energy_mj
    return nvml.true_energy_j(gpu) if energy_mj is None else energy_mj / 1000


def test_between_the_rows_a_table_is_interpolated() -> None:
    table = MeasuredTable("x", "v100-pcie", (100, 200), (0.4, 0.2), ((90.0, 170.0),))
    point = table.point(DEVICES["v100-pcie"], 0, 150, None)
    assert 1 / point.rate == pytest.approx(0.3)
    assert point.power_w == pytest.approx(130)
    assert 1 / table.point(DEVICES["v100-pcie"], 0, 250, None).rate == pytest.approx(0.2)


def test_work_on_several_gpus_goes_at_the_pace_of_the_slowest() -> None:
    nvml, clock = simulated("2xv100:setter_ms=0")
    work = nvml.open_work([0, 1], ModelWorkload(ModelLoad(0.1, 0.4, 200.0)))
    nvml.set_power_limit(1, 120_000)
    work.run(10)
    start_ns = clock()
    work.run(100)
    rate = 100 / ((clock() - start_ns) / 1e9)
    device = DEVICES["v100-pcie"]
    assert rate == pytest.approx(settle(device, ModelLoad(0.1, 0.4, 200.0), 120, None).rate)


# ------------------------------------------------------------------------------------------ faults


def test_work_shows_as_a_process_with_memory_and_utilization() -> None:
    backend, _ = simulated("2xv100")
    idle_mib = backend.memory_used_mib(0)
    assert backend.processes(0) == []
    assert backend.utilization_percent(0) == 0
    work = backend.open_work([0], "model/compute", pid=4242)
    assert backend.utilization_percent(0) == 0
    work.launch(1.0)
    assert backend.utilization_percent(0) == 100
    (process,) = backend.processes(0)
    assert (process.pid, process.compute) == (4242, True)
    assert backend.memory_used_mib(0) - idle_mib == (process.memory_bytes or 0) >> 20 > 0
    assert backend.processes(1) == []
    work.close()
    assert backend.processes(0) == []
    assert backend.memory_used_mib(0) == idle_mib


def test_faults_come_as_often_as_asked_for() -> None:
    nvml, clock = simulated("v100:setter_ms=0")
    nvml.inject(0, "set_power_limit", Return.UNKNOWN, count=2)
    nvml.inject(0, "power_limit_mw", latency_s=2.0, count=1)
    for _ in range(2):
        assert code_of(nvml.set_power_limit, 0, 200_000) == Return.UNKNOWN
    assert nvml.power_limit_mw(0) == 250_000
    assert clock() >= 3_000_000_000
    nvml.set_power_limit(0, 200_000)
    assert nvml.power_limit_mw(0) == 200_000


def test_without_a_driver_and_before_init_and_after_a_reload() -> None:
    nvml = SimulatedBackend("v100:setter_ms=0")
    assert code_of(nvml.device_count) == Return.UNINITIALIZED
    nvml.remove_driver()
    assert code_of(nvml.init) == Return.DRIVER_NOT_LOADED
    nvml.clear_faults()
    nvml.init()
    nvml.set_power_limit(0, 200_000)
    nvml.reload_driver()
    assert nvml.power_limit_mw(0) == 250_000
    nvml.shutdown()
    assert code_of(nvml.shutdown) == Return.UNINITIALIZED


def test_a_shrunken_maximum_takes_the_limit_with_it() -> None:
    nvml, _ = simulated("v100")
    nvml.shrink_maximum(0, 220_000)
    assert nvml.power_limits(0).max_mw == 220_000
    assert nvml.power_limit_mw(0) == 220_000
    assert code_of(nvml.set_power_limit, 0, 230_000) == Return.INVALID_ARGUMENT


def test_instructions_that_cannot_run_are_refused() -> None:
    nvml, _ = simulated("v100")
    with pytest.raises(ValueError, match="no workload"):
        nvml.open_work([0], "doom")
    with pytest.raises(ValueError, match="no simulated GPU 7"):
        nvml.open_work([7], "model/memory")
    work = nvml.open_work([0], "model/memory")
    with pytest.raises(ValueError, match="already runs"):
        nvml.open_work([0], "model/memory")
    work.close()
    nvml.open_work([0], "model/memory")


# ------------------------------------------------------------------------------ the fitted figures


@pytest.mark.parametrize(
    ("limit_w", "seconds", "joules"),
    [
        (300, 10.7, 2993),
        (250, 11.1, 2742),
        (200, 12.0, 2371),
        (175, 13.2, 2278),
        (150, 17.6, 2616),
        (125, 26.6, 3300),
        (100, 45.7, 4750),
    ],
)
def test_the_model_gives_the_fitted_figures_of_bert_on_an_a40(
    limit_w: float, seconds: float, joules: float
) -> None:
    """The fit's parameters are known rounded, hence the tolerance."""
    a40 = DEVICES["a40"]
    grid = tuple(mhz for mhz in a40.clocks_mhz if mhz >= 0.15 * a40.clocks_mhz[0])
    fitted = replace(a40, static_w=76, vmin=0.765, knee=0.778, clocks_mhz=grid)
    point = settle(fitted, ModelLoad(10.7, 0.59, 76 + 204, 1.02), limit_w, None)
    assert 1 / point.rate == pytest.approx(seconds, rel=0.03)
    assert point.power_w / point.rate == pytest.approx(joules, rel=0.03)


@pytest.mark.parametrize(
    ("mhz", "seconds", "joules"),
    [(1410, 0.0502, 23.48), (1200, 0.0563, 19.54), (1080, 0.0621, 17.55), (855, 0.0776, 18.17)],
)
def test_the_model_gives_the_fitted_figures_of_a_clock_sweep_on_an_a100(
    mhz: int, seconds: float, joules: float
) -> None:
    """One forward stage of a language model; above 0.963 of the top clock its power was capped."""
    fitted = replace(DEVICES["a100-sxm-80"], static_w=40, vmin=0.81, knee=0.785)
    load = ModelLoad(0.04847, 0.93, 40 + 472)
    point = settle(fitted, load, math.inf, min(mhz, int(0.963 * 1410)))
    assert 1 / point.rate == pytest.approx(seconds, rel=0.015)
    assert point.power_w / point.rate == pytest.approx(joules, rel=0.015)


# -------------------------------------------------------------------------------- capping and pace


def test_a_table_is_called_capped_only_where_the_limit_holds_it_back() -> None:
    nvml, _ = simulated("v100:setter_ms=0")
    work = nvml.open_work([0], "nsdi23/v100/movielens-1m/ncf/adam/1024")  # draws 38 W
    work.launch(1e9)
    nvml.set_power_limit(0, 100_000)
    assert not nvml.throttle_reasons(0) & POWER_CAP
    assert nvml.gpu_clock_mhz(0) == 1380
    work.close()
    nvml.open_work([0], "profiles/V100+resnet50+gpu0").launch(1e9)
    assert nvml.throttle_reasons(0) & POWER_CAP
    assert nvml.gpu_clock_mhz(0) < 700
    nvml.set_gpu_clocks(0, 135, 200)
    assert not nvml.throttle_reasons(0) & POWER_CAP


def test_a_gpu_that_waits_for_a_slower_one_draws_less() -> None:
    nvml, clock = simulated("2xv100:setter_ms=0")
    nvml.open_work([0, 1], "model/compute").launch(1e9)
    clock.sleep(1)
    together_mw = nvml.sensors(0).power_instant_mw
    nvml.set_power_limit(1, 100_000)
    clock.sleep(1)
    waiting_mw = nvml.sensors(0).power_instant_mw
    assert 36_000 < waiting_mw < 0.7 * together_mw


def test_a_limit_settles_over_steps_as_it_does_over_one_stretch() -> None:
    def watts(stepwise: bool) -> list[float]:
        nvml, clock = simulated("v100:setter_ms=0")
        work = nvml.open_work([0], "model/compute")
        work.launch(10)
        clock.sleep(0.5)
        if stepwise:
            work.wait()
        nvml.set_power_limit(0, 100_000)
        means = []
        for _ in range(5):
            start_ns, start_j = clock(), nvml.true_energy_j(0)
            if stepwise:
                work.run(0.05)
            else:
                clock.sleep(0.010)
            means.append((nvml.true_energy_j(0) - start_j) / (clock() - start_ns) * 1e9)
        return means

    for means in (watts(stepwise=False), watts(stepwise=True)):
        assert means == sorted(means, reverse=True)
        assert means[0] > means[-1] + 30


def test_a_low_memory_clock_bounds_the_graphics_clock() -> None:
    nvml, _ = simulated("a40:setter_ms=0")
    nvml.open_work([0], "model/compute").launch(1e9)
    nvml.set_memory_clocks(0, 405, 405)
    assert nvml.gpu_clock_mhz(0) <= max(nvml.supported_gpu_clocks(0, 405)) == 420
    nvml.reset_memory_clocks(0)
    assert nvml.gpu_clock_mhz(0) > 420


def test_presets_suit_each_gpu_and_tables_only_their_own() -> None:
    nvml, clock = simulated("rtx4090,t4:setter_ms=0")
    nvml.open_work([0, 1], "model/compute").launch(1e9)
    clock.sleep(1)
    power_mw = nvml.sensors(1).power_instant_mw
    assert power_mw < 70_500
    other, _ = simulated("a40")
    with pytest.raises(ValueError, match="measured on v100-pcie"):
        other.open_work([0], "profiles/V100+resnet50+gpu0")
    simulated("v100-sxm2")[0].open_work([0], "profiles/V100+resnet50+gpu0")


def test_short_clock_lists_and_addresses_of_many_gpus() -> None:
    assert len(DEVICES["rtx4090"].clocks_at(405)) == 30
    addresses = [gpu.pci_address for gpu in parse_spec("64xv100")]
    assert addresses == sorted(set(addresses))
    assert {len(address) for address in addresses} == {16}


# --------------------------------------------------------------------------- lifetimes and faults


def test_settings_last_while_a_client_or_persistence_holds_the_gpu() -> None:
    def limit_after_reopening(prepare: Callable[[SimulatedBackend], object]) -> int:
        nvml, _ = simulated("v100:setter_ms=0")
        nvml.set_power_limit(0, 150_000)
        prepare(nvml)
        nvml.shutdown()
        nvml.init()
        return nvml.power_limit_mw(0)

    assert limit_after_reopening(lambda nvml: None) == 250_000
    assert limit_after_reopening(lambda nvml: nvml.set_persistence_mode(0, True)) == 150_000
    assert limit_after_reopening(lambda nvml: nvml.open_work([0], "model/memory")) == 150_000
    assert limit_after_reopening(lambda nvml: nvml.init()) == 150_000


@pytest.mark.parametrize("seed", range(8))
def test_the_counter_starts_over_when_the_driver_is_loaded_again(seed: int) -> None:
    nvml, _ = simulated(f"v100:seed={seed}")
    before_mj = nvml.sensors(0).energy_mj
    nvml.reload_driver()
    assert nvml.sensors(0).energy_mj == 0
    assert before_mj


def test_calls_about_the_node_can_fail_too() -> None:
    nvml, _ = simulated("v100")
    for call, method in (("init", nvml.init), ("device_count", nvml.device_count)):
        nvml.inject(None, call, Return.UNKNOWN, count=1)
        assert code_of(method) == Return.UNKNOWN
        method()
    nvml.inject(0, "device_handle", Return.RESET_REQUIRED, count=1)
    assert code_of(nvml.device_handle, 0) == Return.RESET_REQUIRED
    nvml.lose(0)
    assert code_of(nvml.device_handle, 0) == Return.GPU_IS_LOST
    with pytest.raises(ValueError, match="not a call that can fail"):
        nvml.inject(0, "set_the_limit", Return.UNKNOWN)
    with pytest.raises(ValueError, match="no simulated GPU 1"):
        nvml.inject(1, "set_power_limit", Return.UNKNOWN)


def test_steps_on_eight_gpus_take_exactly_their_time() -> None:
    nvml, clock = simulated("8xv100:setter_ms=0")
    work = nvml.open_work(list(range(8)), "profiles/V100+resnet50+gpu0")
    work.run(1)
    start_ns = clock()
    for _ in range(200):
        work.run(1)
    table = catalog()["profiles/V100+resnet50+gpu0"]
    assert (clock() - start_ns) / 200e9 == pytest.approx(table.unit_s[-1], rel=1e-6)

"""Simulated AMD nodes."""

from __future__ import annotations

import pytest

from tests.zeusd.devices.opening import code_of, news, simulated
from zeus_ipc.controls import Control
from zeusd.devices.nvml.codes import Return
from zeusd.devices.simulated import SimulatedBackend, VirtualClock
from zeusd.devices.simulated.spec import parse_spec
from zeusd.runtime.devices import Inspector


def watts(backend: SimulatedBackend, clock: VirtualClock, gpus: tuple[int, ...]) -> float:
    """Mean true power of these GPUs over the next two seconds."""
    before_j = sum(backend.true_energy_j(gpu) for gpu in gpus)
    clock.sleep(2.0)
    return (sum(backend.true_energy_j(gpu) for gpu in gpus) - before_j) / 2


def test_settings_of_a_mi300x_outlive_their_clients() -> None:
    backend, _ = simulated("mi300x:setter_ms=0")
    backend.set_power_limit(backend.device_handle(0), 400_999)  # it takes whole watts
    backend.shutdown()
    backend.init()
    assert backend.power_limit_mw(backend.device_handle(0)) == 400_000


def test_a_cap_slows_a_mi300x_and_lowers_its_power() -> None:
    backend, clock = simulated("mi300x:setter_ms=0")
    gpu = backend.device_handle(0)
    work = backend.open_work([0], "model/compute")
    work.launch(1e6)
    clock.sleep(1.0)
    free_w = watts(backend, clock, (0,))
    assert backend.throttle_reasons(gpu) == 4  # its full load is above 750 W
    backend.set_power_limit(gpu, 400_000)
    clock.sleep(1.0)
    assert watts(backend, clock, (0,)) <= 400 < free_w <= 750
    backend.write_control(gpu, Control.GPU_CLOCKS, (1000, 1000))
    clock.sleep(1.0)
    assert backend.gpu_clock_mhz(gpu) == 1000


def test_dies_of_a_mi250x_share_limit_power_and_energy() -> None:
    backend, clock = simulated("4xmi250x:setter_ms=0")
    first, second = backend.device_handle(0), backend.device_handle(1)
    assert [spec.die for spec in backend.specs] == [0, 1, 0, 1]
    assert backend.sensors(second)[1:6] == (None,) * 5
    for call in (backend.power_limits, backend.power_limit_mw):
        assert code_of(call, second) == Return.NOT_SUPPORTED
    backend.open_work([1], "model/compute").launch(1e6)  # on the second die only
    clock.sleep(1.0)
    before_mj = backend.sensors(first).energy_mj
    both_w = watts(backend, clock, (0, 1))
    after_mj = backend.sensors(first).energy_mj
    assert (after_mj - before_mj) / 2000 == pytest.approx(both_w, rel=0.01)
    alone_w = watts(backend, clock, (1,))
    backend.set_power_limit(first, 300_000)
    clock.sleep(1.0)
    assert watts(backend, clock, (1,)) <= 150 < alone_w
    assert backend.sensors(backend.device_handle(2)).power_instant_mw == 90_000  # another card


def test_half_a_card_cannot_be_simulated() -> None:
    with pytest.raises(ValueError, match="a card of AMD Instinct MI250X is 2 GPUs; name 4xmi250x"):
        parse_spec("3xmi250x")


def test_a_mixed_node_has_what_each_of_its_products_has() -> None:
    backend, clock = simulated("a100,mi300x,2xmi250x,2xgb200,gh200:setter_ms=0")
    clocks = ["gpu_clocks", "memory_clocks"]
    controls = [
        ["power_limit", *clocks, "persistence_mode"],
        ["power_limit", *clocks],
        ["power_limit", *clocks],
        clocks,
        ["power_limit", *clocks, "persistence_mode", "power_profile"],
        ["power_limit", *clocks, "persistence_mode", "power_profile"],
        ["power_limit", "gpu_clocks", "persistence_mode"],
    ]
    infos = []
    for index, wanted in enumerate(controls):
        info, gpu = news(Inspector(backend, index)).info, backend.device_handle(index)
        assert info.controls == wanted
        infos.append(info)
        if "power_limit" in info.controls:
            limits = backend.power_limits(gpu)
            backend.write_control(gpu, Control.POWER_LIMIT, (limits.min_mw,))
    assert [info.module for info in infos] == [None, None, None, None, 0, 0, 1]
    assert [info.architecture for info in infos] == [7, 0, 0, 0, 10, 10, 9]
    assert len({info.uuid for info in infos}) == len({info.pci_address for info in infos}) == 7
    backend.open_work([0, 1, 4], "model/compute").launch(1e6)
    clock.sleep(2.0)
    for index in (0, 1, 4):
        gpu = backend.device_handle(index)
        power_mw = backend.sensors(gpu).power_instant_mw
        assert 0.5 * backend.power_limits(gpu).min_mw < power_mw
        assert backend.throttle_reasons(gpu) & 4


def test_a_profile_caps_power_and_clock_as_long_as_it_is_requested() -> None:
    backend, clock = simulated("2xgb200:setter_ms=0")
    gpu = backend.device_handle(0)
    backend.open_work([0], "model/compute").launch(1e6)
    clock.sleep(1.0)
    free_w = watts(backend, clock, (0,))
    backend.write_control(gpu, Control.POWER_PROFILE, (1,))
    clock.sleep(1.0)
    capped_w = watts(backend, clock, (0,))
    assert capped_w < 0.9 * free_w
    assert backend.gpu_clock_mhz(gpu) <= 0.9 * backend.supported_gpu_clocks(gpu, 3996)[0]
    backend.write_control(gpu, Control.POWER_PROFILE, (0, 1))  # max-p wins
    assert backend.enforced_power_profiles(gpu) == (0,)
    clock.sleep(1.0)
    assert watts(backend, clock, (0,)) == pytest.approx(free_w, rel=0.01)

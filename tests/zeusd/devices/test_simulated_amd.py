"""Simulated AMD nodes."""

from __future__ import annotations

import pytest

from zeus_ipc.controls import Control
from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import DeviceError, PowerLimitRange
from zeusd.devices.simulated import SimulatedBackend, VirtualClock
from zeusd.devices.simulated.spec import parse_spec
from zeusd.runtime.devices import Inspector


def node(spec: str) -> tuple[SimulatedBackend, VirtualClock]:
    clock = VirtualClock()
    backend = SimulatedBackend(spec, clock_ns=clock, sleep=clock.sleep)
    backend.init()
    return backend, clock


def watts(backend: SimulatedBackend, clock: VirtualClock, gpus: tuple[int, ...]) -> float:
    """Mean true power of these GPUs over the next two seconds."""
    before_j = sum(backend.true_energy_j(gpu) for gpu in gpus)
    clock.sleep(2.0)
    return (sum(backend.true_energy_j(gpu) for gpu in gpus) - before_j) / 2


def test_a_mi300x_has_whole_watts_no_persistence_mode_and_names_of_its_own() -> None:
    backend, _ = node("2xmi300x:setter_ms=0")
    gpu = backend.device_handle(0)
    uuids = [backend.uuid(backend.device_handle(index)) for index in range(2)]
    assert len(set(uuids)) == 2
    assert all(len(uuid) == len("GPU-0123456789abcdef") for uuid in uuids)
    assert backend.power_limits(gpu) == PowerLimitRange(150_000, 750_000, 750_000)
    backend.set_power_limit(gpu, 400_999)
    assert backend.power_limit_mw(gpu) == 400_000
    facts, _ = Inspector(backend, 0).look() or (None, None)
    assert facts is not None
    assert facts.info.controls == ["power_limit", "gpu_clocks", "memory_clocks"]
    assert facts.info.architecture == 0
    assert backend.sensors(gpu).power_instant_mw == 140_000


def test_settings_of_a_mi300x_outlive_their_clients() -> None:
    backend, _ = node("mi300x:setter_ms=0")
    backend.set_power_limit(backend.device_handle(0), 400_000)
    backend.shutdown()
    backend.init()
    assert backend.power_limit_mw(backend.device_handle(0)) == 400_000


def test_a_cap_slows_a_mi300x_and_lowers_its_power() -> None:
    backend, clock = node("mi300x:setter_ms=0")
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
    backend, clock = node("4xmi250x:setter_ms=0")
    first, second = backend.device_handle(0), backend.device_handle(1)
    assert [spec.die for spec in backend.specs] == [0, 1, 0, 1]
    assert backend.sensors(second)[1:6] == (None,) * 5
    for call in (backend.power_limits, backend.power_limit_mw):
        with pytest.raises(DeviceError) as caught:
            call(second)
        assert caught.value.code == Return.NOT_SUPPORTED
    backend.open_work([1], "model/compute").launch(1e6)  # on the second die only
    clock.sleep(1.0)
    before_mj = backend.sensors(first).energy_mj
    both_w = watts(backend, clock, (0, 1))
    after_mj = backend.sensors(first).energy_mj
    assert before_mj is not None
    assert after_mj is not None
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
    backend, clock = node("a100,mi300x,2xmi250x,2xgb200,gh200:setter_ms=0")
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
        inspector = Inspector(backend, index)
        facts, gpu = inspector.look() or (None, None)
        for _ in range(3):
            inspector.look()
        assert facts is not None
        assert facts.info.controls == wanted
        infos.append(facts.info)
        if "power_limit" in facts.info.controls:
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
        assert power_mw is not None
        assert 0.5 * backend.power_limits(gpu).min_mw < power_mw
        assert backend.throttle_reasons(gpu) & 4


def test_a_profile_caps_power_and_clock_as_long_as_it_is_requested() -> None:
    backend, clock = node("2xgb200:setter_ms=0")
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

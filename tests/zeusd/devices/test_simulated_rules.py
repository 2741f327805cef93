"""Details of a faithful node: bits, lifetimes, rates, and hostile neighbors."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.support import TIMEOUT_S
from zeus_common.simulation import SimulatedNode
from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import DeviceError
from zeusd.devices.simulated import DeviceServer, SimulatedBackend, VirtualClock
from zeusd.devices.simulated.models import DEVICES
from zeusd.devices.simulated.physics import ModelLoad, settle
from zeusd.devices.simulated.spec import parse_spec
from zeusd.devices.simulated.workloads import catalog

POWER_CAP = 0x4


def node(spec: str) -> tuple[SimulatedBackend, VirtualClock]:
    clock = VirtualClock()
    nvml = SimulatedBackend(spec, clock_ns=clock, sleep=clock.sleep)
    nvml.init()
    return nvml, clock


def code_of(call: Callable[..., object], *args: object) -> int:
    with pytest.raises(DeviceError) as caught:
        call(*args)
    return caught.value.code


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
    nvml, _ = node("v100:setter_ms=0")
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
    nvml, clock = node("2xv100:setter_ms=0")
    nvml.open_work([0, 1], "model/compute").launch(1e9)
    clock.sleep(1)
    together_mw = nvml.sensors(0).power_instant_mw
    nvml.set_power_limit(1, 100_000)
    clock.sleep(1)
    waiting_mw = nvml.sensors(0).power_instant_mw
    assert together_mw is not None
    assert waiting_mw is not None
    assert 36_000 < waiting_mw < 0.7 * together_mw


def test_a_limit_settles_over_steps_as_it_does_over_one_stretch() -> None:
    def watts(stepwise: bool) -> list[float]:
        nvml, clock = node("v100:setter_ms=0")
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
    nvml, _ = node("a40:setter_ms=0")
    nvml.open_work([0], "model/compute").launch(1e9)
    nvml.set_memory_clocks(0, 405, 405)
    assert nvml.gpu_clock_mhz(0) <= max(nvml.supported_gpu_clocks(0, 405)) == 420
    nvml.reset_memory_clocks(0)
    assert nvml.gpu_clock_mhz(0) > 420


def test_presets_suit_each_gpu_and_tables_only_their_own() -> None:
    nvml, clock = node("rtx4090,t4:setter_ms=0")
    nvml.open_work([0, 1], "model/compute").launch(1e9)
    clock.sleep(1)
    power_mw = nvml.sensors(1).power_instant_mw
    assert power_mw is not None
    assert power_mw < 70_500
    other, _ = node("a40")
    with pytest.raises(ValueError, match="measured on v100-pcie"):
        other.open_work([0], "profiles/V100+resnet50+gpu0")
    node("v100-sxm2")[0].open_work([0], "profiles/V100+resnet50+gpu0")


def test_short_clock_lists_and_addresses_of_many_gpus() -> None:
    assert len(DEVICES["rtx4090"].clocks_at(405)) == 30
    addresses = [gpu.pci_address for gpu in parse_spec("64xv100")]
    assert addresses == sorted(set(addresses))
    assert {len(address) for address in addresses} == {16}


# --------------------------------------------------------------------------- lifetimes and faults


def test_settings_last_while_a_client_or_persistence_holds_the_gpu() -> None:
    def limit_after_reopening(prepare: Callable[[SimulatedBackend], object]) -> int:
        nvml, _ = node("v100:setter_ms=0")
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
    nvml, _ = node(f"v100:seed={seed}")
    before_mj = nvml.sensors(0).energy_mj
    nvml.reload_driver()
    assert nvml.sensors(0).energy_mj == 0
    assert before_mj


def test_calls_about_the_node_can_fail_too() -> None:
    nvml, _ = node("v100")
    for call, method in (("init", nvml.init), ("device_count", nvml.device_count)):
        nvml.inject(None, call, Return.UNKNOWN, count=1)
        assert code_of(method) == Return.UNKNOWN
        method()
    nvml.inject(0, "device_handle", Return.RESET_REQUIRED, count=1)
    assert code_of(nvml.device_handle, 0) == Return.RESET_REQUIRED
    with pytest.raises(ValueError, match="not a call that can fail"):
        nvml.inject(0, "set_the_limit", Return.UNKNOWN)
    with pytest.raises(ValueError, match="no simulated GPU 1"):
        nvml.inject(1, "set_power_limit", Return.UNKNOWN)


# ------------------------------------------------------------------------------- the device socket


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[str]:
    nvml = SimulatedBackend("v100:setter_ms=0")
    nvml.init()
    server = DeviceServer(nvml, str(tmp_path / "devices"))
    server.start()
    yield str(tmp_path / "devices")
    server.stop()


@pytest.mark.parametrize(
    "message",
    [
        {"op": "truth", "gpu": 99},
        {"op": "truth", "gpu": -1},
        {"op": "truth", "gpu": math.inf},
        {"op": "outside", "gpu": 99, "power_limit_mw": 200_000},
        {"op": "outside", "gpu": 0, "power_limit_mw": -5},
        {"op": "fault", "gpu": 0, "call": "sensors", "latency_s": math.nan},
        {"op": "fault", "gpu": 0, "call": "nothing"},
        {"op": "open", "gpus": 7, "workload": None},
        {"op": ["truth"]},
    ],
    ids=str,
)
def test_a_senseless_message_is_refused_and_the_devices_continue(
    devices: str, message: dict[str, Any]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hostile:
        hostile.settimeout(TIMEOUT_S)
        hostile.connect(devices)
        hostile.send(msgpack.packb(message))
        assert "error" in msgpack.unpackb(hostile.recv(4096))
    admin = SimulatedNode(devices)
    assert admin.true_energy_j(0) > 0
    admin.close()


def test_a_path_in_use_is_not_taken_and_a_dead_one_is(devices: str) -> None:
    nvml = SimulatedBackend("v100")
    with pytest.raises(ValueError, match="is in use"):
        DeviceServer(nvml, devices).start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(f"{devices}.dead")
    server = DeviceServer(nvml, f"{devices}.dead")
    server.start()
    server.stop()
    assert not os.path.exists(f"{devices}.dead")


_OUT_OF_DESCRIPTORS = """
import os, resource, socket, sys, time
from zeusd.devices.simulated import DeviceServer, SimulatedBackend
DeviceServer(SimulatedBackend("v100"), sys.argv[1]).start()
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
taken = max(int(name) for name in os.listdir("/proc/self/fd"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 1, hard))
filling = []
try:
    while True:
        filling.append(os.dup(0))
except OSError:
    pass
client.connect(sys.argv[1])
time.sleep(0.2)  # the server meets the connection without a descriptor to take it
for fd in filling:
    os.close(fd)
client.settimeout(20)
client.send(bytes([0x81, 0xA2]) + b"op" + bytes([0xA1]) + b"x")
print(len(client.recv(4096)) > 0, flush=True)
os._exit(0)  # without finalising an interpreter that other threads still use
"""


def test_a_client_that_came_without_a_descriptor_to_spare_is_served_later(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _OUT_OF_DESCRIPTORS, str(tmp_path / "devices")],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    assert done.stdout.strip() == "True"


def test_steps_on_eight_gpus_take_exactly_their_time() -> None:
    """A thousand steps take exactly their time, on the virtual clock."""
    nvml, clock = node("8xv100:setter_ms=0")
    work = nvml.open_work(list(range(8)), "profiles/V100+resnet50+gpu0")
    work.run(1)
    start_ns = clock()
    for _ in range(1000):
        work.run(1)
    table = catalog()["profiles/V100+resnet50+gpu0"]
    assert (clock() - start_ns) / 1e12 == pytest.approx(table.unit_s[-1], rel=1e-6)

"""Work, faults and truth across process boundaries."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from tests import seeds
from tests.support import TIMEOUT_S, ending, script, wait_for
from tests.zeusd.devices.test_instructions import SHORT
from zeus_common import simulation
from zeus_common.simulation import SimulatedNode, SimulatedWork, _DeviceSocket
from zeus_common.tables import TableError
from zeus_ipc.errors import DaemonUnavailable, RequestRejected
from zeusd.devices.port import DeviceError
from zeusd.devices.simulated import DeviceServer, SimulatedBackend
from zeusd.devices.simulated.workloads import catalog

FAST = "nsdi23/v100/cifar100/shufflenetv2/adadelta/1024"


@contextlib.contextmanager
def serving(spec: str, path: str) -> Iterator[tuple[SimulatedBackend, str]]:
    nvml = SimulatedBackend(spec)
    nvml.init()
    server = DeviceServer(nvml, path)
    server.start()
    yield nvml, path
    server.stop()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[SimulatedBackend, str]]:
    with serving("2xv100:setter_ms=0", str(tmp_path / "devices")) as served:
        yield served


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[tuple[SimulatedBackend, str]]:
    with serving("a100:setter_ms=0", str(tmp_path / "devices")) as served:
        yield served


def test_work_draws_power_and_takes_the_time_of_the_table(
    node: tuple[SimulatedBackend, str],
) -> None:
    nvml, path = node
    with SimulatedWork(path, [nvml.uuid(0)], FAST) as work:
        work.run(1)
        start = time.monotonic()
        work.launch(3)
        work.synchronize()
        elapsed_s = time.monotonic() - start
    expected_s = 3 * catalog()[FAST].unit_s[-1]
    assert elapsed_s >= expected_s * 0.99
    wait_for(lambda: nvml.gpu_clock_mhz(0) == 135, "the GPU to fall idle")


def test_some_work_may_stay_queued(node: tuple[SimulatedBackend, str]) -> None:
    nvml, path = node
    with SimulatedWork(path, [nvml.uuid(0)], "model/compute") as work:
        work.launch(1000)
        work.launch(1)
        work.synchronize(queued=1001)
        assert nvml.throttle_reasons(0) != 0x1
        assert nvml.gpu_clock_mhz(0) > 135
        work.synchronize(queued=1000.9)
    with SimulatedWork(path, [nvml.uuid(0)], FAST) as work:
        for _ in range(3):
            start = time.monotonic()
            work.launch(1)
            work.synchronize(queued=1)
        work.synchronize()
        two_s = time.monotonic() - start
    assert two_s >= 0.99 * catalog()[FAST].unit_s[-1]  # the queue was still to be processed


def test_it_sleeps_until_work_ends_and_looks_again_as_limits_may_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns, slept = 10**9, []
    # Units done, and when the rest will be, ns from now on: unknown, late, soon, and over.
    looks = iter([(0, None), (1, 10**9), (2, 20_000_000), (3, 40_000_000), (3.5, -1)])

    def ask(op: str, **_: object) -> dict[str, Any]:
        if op != "status":
            return {}
        done, left_ns = next(looks)
        return {"done": done, "ends_ns": None if left_ns is None else now_ns + left_ns}

    devices = SimpleNamespace(ask=ask, close=lambda: None)
    monkeypatch.setattr(simulation, "_DeviceSocket", lambda path: devices)
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns, sleep=slept.append)
    monkeypatch.setattr(simulation, "time", clock)
    with SimulatedWork("", ["GPU-1"], FAST) as work:
        work.launch(3)
        work.launch()
        work.synchronize()
        assert slept == pytest.approx([0.05, 0.05, 0.02, 0.04])
        looks = iter([(0, 40_000_000), (3, 10**9)])
        work.synchronize(queued=1)
        assert slept[4:] == pytest.approx([0.03])
        looks = iter([(4, 10_000_000), (5, None)])
        work.run()
        assert slept[5:] == pytest.approx([0.01])


def test_the_work_of_a_killed_process_ends(node: tuple[SimulatedBackend, str]) -> None:
    nvml, path = node
    source = (
        "import sys; from zeus_common.simulation import SimulatedWork\n"
        "work = SimulatedWork(sys.argv[1], [sys.argv[2]], 'model/compute')\n"
        "work.launch(1e6); print('busy', flush=True); sys.stdin.read()"
    )
    with ending(script(source, path, nvml.uuid(0))) as worker:
        assert worker.stdout.readline() == "busy\n"
        assert nvml.throttle_reasons(0) != 0x1
    wait_for(lambda: nvml.throttle_reasons(0) == 0x1, "the GPU to fall idle")
    SimulatedWork(path, [nvml.uuid(0)], "model/compute").close()


def test_refusals_are_errors_and_the_connection_continues(
    node: tuple[SimulatedBackend, str],
) -> None:
    nvml, path = node
    with pytest.raises(RequestRejected, match="no workload"):
        SimulatedWork(path, [nvml.uuid(0)], "doom")
    with SimulatedWork(path, [nvml.uuid(1)], "model/memory") as work:
        with pytest.raises(RequestRejected, match="positive"):
            work.launch(-1)
        work.run(0.1)
    with pytest.raises(DaemonUnavailable, match="is zeusd still"):
        SimulatedWork(path + ".none", [nvml.uuid(1)], "model/memory")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path + ".ends")
        server.listen()
        admin = SimulatedNode(path + ".ends")
        with server.accept()[0] as ending:
            ending.shutdown(socket.SHUT_WR)
            with pytest.raises(DaemonUnavailable, match="are gone; zeusd was stopped"):
                admin.clear_faults()
            admin.close()
            assert len(ending.recv(4096)) > 0
            assert ending.recv(4096) == b""


def test_garbage_harms_no_other_client(node: tuple[SimulatedBackend, str]) -> None:
    seed = seeds.fresh()
    chance = random.Random(seed)
    nvml, path = node
    for _ in range(100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hostile:
            hostile.connect(path)
            for _ in range(chance.randrange(4)):
                hostile.send(chance.randbytes(chance.randrange(1, 5000)))
    with SimulatedWork(path, [nvml.uuid(0)], "model/memory") as work:
        work.run(0.1)


def test_faults_and_truth_from_outside(node: tuple[SimulatedBackend, str]) -> None:
    nvml, path = node
    admin = SimulatedNode(path)
    admin.inject(0, "set_power_limit", 15, count=1)
    with pytest.raises(DeviceError):
        nvml.set_power_limit(0, 200_000)
    nvml.set_power_limit(0, 200_000)
    admin.inject(0, "power_limit_mw", latency_s=0.05)
    admin.set_outside(0, 150_000)
    begun_s = time.monotonic()
    assert nvml.power_limit_mw(0) == 150_000
    assert time.monotonic() - begun_s >= 0.05
    admin.misbehave(0, clamp_mw=(100_000, 180_500), round_to_mw=1000)
    admin.set_board_limit(0, 120_000)
    nvml.set_power_limit(0, 250_000)
    assert (nvml.power_limit_mw(0), nvml.enforced_power_limit_mw(0)) == (180_000, 120_000)
    admin.clear_faults()
    admin.set_board_limit(0, None)
    nvml.set_power_limit(0, 250_000)
    assert (nvml.power_limit_mw(0), nvml.enforced_power_limit_mw(0)) == (250_000, 250_000)
    before_j = admin.true_energy_j(1)
    wait_for(lambda: admin.true_energy_j(1) > before_j, "energy to be drawn")
    admin.close()


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
    node: tuple[SimulatedBackend, str], message: dict[str, Any]
) -> None:
    _, path = node
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hostile:
        hostile.settimeout(TIMEOUT_S)
        hostile.connect(path)
        hostile.send(msgpack.packb(message))
        assert "error" in msgpack.unpackb(hostile.recv(4096))
    admin = SimulatedNode(path)
    assert admin.true_energy_j(0) > 0
    admin.close()


def test_a_path_in_use_is_not_taken_and_a_dead_one_is(node: tuple[SimulatedBackend, str]) -> None:
    nvml, path = node
    with pytest.raises(ValueError, match="is in use"):
        DeviceServer(nvml, path).start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(f"{path}.dead")
    with serving("v100", f"{path}.dead"):
        pass
    assert not os.path.exists(f"{path}.dead")


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


def test_instructions_run_through_the_device_socket(
    pipeline: tuple[SimulatedBackend, str], tmp_path: Path
) -> None:
    nvml, path = pipeline
    profile = tmp_path / "own.csv"
    profile.write_text(SHORT)
    with SimulatedWork(path, [nvml.uuid(0)], f"profile:{profile}#stage=2&blocking_w=99") as work:
        with pytest.raises(RequestRejected, match="launch one of forward, backward"):
            work.launch(1)
        before_j = nvml.true_energy_j(0)
        for _ in range(4):
            work.launch(1, "forward")
            work.launch(instruction="backward")
        work.synchronize()
        assert nvml.true_energy_j(0) - before_j >= 4 * 9.5 * 0.99
        wait_for(lambda: nvml.sensors(0).power_instant_mw // 1000 in (98, 99), "the GPU to wait")
        assert nvml.throttle_reasons(0) == 0
    wait_for(lambda: nvml.throttle_reasons(0) == 1, "the GPU to fall idle")
    with SimulatedWork(path, [nvml.uuid(0)], "perseus/a100/gpt3-175b/stage3") as work:
        work.run(1, instruction="forward")
    with pytest.raises(TableError, match="cannot be read: No such file"):
        SimulatedWork(path, [nvml.uuid(0)], f"profile:{profile}.none#stage=2")


def test_a_large_profile_fits_into_one_message(
    pipeline: tuple[SimulatedBackend, str], tmp_path: Path
) -> None:
    nvml, path = pipeline
    profile = tmp_path / "large.csv"
    chance = random.Random(1)
    lines = ["stage,instruction,frequency,time,energy"]
    for name in ("forward", "backward"):
        lines += [
            f"0,{name},{mhz},{chance.uniform(0.01, 0.1)},{chance.uniform(1, 9)}"
            for mhz in range(210, 1740, 15)
        ]
    profile.write_text("\n".join(lines))
    with SimulatedWork(path, [nvml.uuid(0)], f"profile:{profile}#stage=0") as work:
        work.run(1, "backward")


@pytest.mark.parametrize(
    "instructions",
    [
        3,
        "forward",
        [],
        {},
        {"forward": []},
        {"forward": [1, 2]},
        {"forward": [1, 0.0, 1.0]},
        {"forward": ["a", "b", "c"]},
        {"forward": 3},
        {"forward": [1410, float("nan"), 1.0]},
    ],
)
def test_garbage_instructions_are_refused(
    pipeline: tuple[SimulatedBackend, str], instructions: object
) -> None:
    nvml, path = pipeline
    devices = _DeviceSocket(path)
    ask = {"gpus": [nvml.uuid(0)], "workload": "profile:x#stage=0"}
    with pytest.raises(RequestRejected):
        devices.ask("open", **ask, instructions=instructions)
    with pytest.raises(RequestRejected, match="the client reads a profile"):
        devices.ask("open", **ask)
    devices.ask("open", **ask | {"workload": "model/compute"})
    devices.close()

"""Work, faults and truth across process boundaries."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import seeds
from tests.support import script, wait_for
from zeus_common.simulation import SimulatedNode, SimulatedWork
from zeus_ipc.errors import DaemonUnavailable, RequestRejected
from zeusd.devices.port import DeviceError
from zeusd.devices.simulated import DeviceServer, SimulatedBackend

FAST = "nsdi23/v100/cifar100/shufflenetv2/adadelta/1024"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[SimulatedBackend, str]]:
    nvml = SimulatedBackend("2xv100:setter_ms=0")
    nvml.init()
    server = DeviceServer(nvml, str(tmp_path / "devices"))
    server.start()
    yield nvml, str(tmp_path / "devices")
    server.stop()


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
    from zeusd.devices.simulated.workloads import catalog

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
    from zeusd.devices.simulated.workloads import catalog

    assert two_s >= 0.99 * catalog()[FAST].unit_s[-1]  # the queue was still to be processed


def test_the_work_of_a_killed_process_ends(node: tuple[SimulatedBackend, str]) -> None:
    nvml, path = node
    worker = script(
        "import sys; from zeus_common.simulation import SimulatedWork\n"
        "work = SimulatedWork(sys.argv[1], [sys.argv[2]], 'model/compute')\n"
        "work.launch(1e6); print('busy', flush=True); sys.stdin.read()",
        path,
        nvml.uuid(0),
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    assert nvml.throttle_reasons(0) != 0x1
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
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
    admin.set_outside(0, 150_000)
    assert nvml.power_limit_mw(0) == 150_000
    before_j = admin.true_energy_j(1)
    wait_for(lambda: admin.true_energy_j(1) > before_j, "energy to be drawn")
    admin.close()

"""How the engine keeps the journal: by an engine in this process, on simulated GPUs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import open_descriptors, wait_for
from zeus_ipc.client import Client
from zeus_ipc.controls import Control
from zeus_ipc.errors import RequestRejected
from zeusd import embed
from zeusd.devices.metered import MeteredBackend
from zeusd.devices.port import DeviceError
from zeusd.devices.simulated import SimulatedBackend
from zeusd.devices.vendors import Options
from zeusd.identity import EMBEDDED_PREFIX, boot_id
from zeusd.nodes import OpenedNode, open_node
from zeusd.records import Entry, replay
from zeusd.runtime import engine
from zeusd.runtime.engine import Engine


class Disk:
    """Counts syncs, and returns the journal's content."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.syncs = 0
        self._directory = directory
        self._sync = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self)

    def __call__(self, fd: int) -> None:
        self.syncs += 1
        self._sync(fd)

    def entries(self) -> dict[str, Entry]:
        (path,) = (path for path in self._directory.glob(f"{EMBEDDED_PREFIX}*") if not path.suffix)
        return replay(path.read_bytes(), boot_id()).entries


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "state", monkeypatch)


@pytest.fixture
def charged() -> list[tuple[int, int]]:
    """Connections, and processor time of the loop that was spent for them later."""
    return []


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, charged: list[tuple[int, int]]) -> list[Engine]:
    """Those that were made for a client."""
    found: list[Engine] = []

    def noted(**options: Any) -> Engine:
        found.append(Engine(**options, charge=lambda *spent: charged.append(spent)))
        return found[-1]

    monkeypatch.setattr(embed, "Engine", noted)
    return found


@pytest.fixture
def client(tmp_path: Path, disk: Disk, engines: list[Engine]) -> Iterator[Client]:
    node = open_node(Options(), "2xv100-pcie:setter_ms=0", str(tmp_path / "devices"))
    try:
        with embed.connect(node, state_dir=str(tmp_path / "state")) as client:
            yield client
    finally:
        node.close()


def test_a_closed_client_of_an_embedded_engine_leaves_no_descriptor_open(tmp_path: Path) -> None:
    node = open_node(Options(), "2xv100-pcie:setter_ms=0", str(tmp_path / "devices"))
    with contextlib.closing(node):
        before = open_descriptors("anon_inode")
        with embed.connect(node, state_dir=str(tmp_path / "state")) as client:
            client.set_power_limit(client.node().gpus[0].uuid, 200_000)
            assert open_descriptors("anon_inode") > before
        wait_for(lambda: open_descriptors("anon_inode") == before, "all to be closed")


def test_clocks_that_cannot_be_read_are_synced_once_for_each_lease(
    client: Client, disk: Disk
) -> None:
    gpu = client.node().gpus[0].uuid
    client.set_gpu_clocks(gpu, 600, 600)
    before = disk.syncs
    for mhz in range(601, 651):
        client.set_gpu_clocks(gpu, mhz, mhz)
    assert disk.syncs == before
    key = f"pending/{gpu}/gpu_clocks"
    wait_for(lambda: [650, 650] in disk.entries()[key]["values"], "the newest in the file")
    assert disk.syncs == before
    client.release()
    client.set_gpu_clocks(gpu, 700, 700)
    assert disk.syncs > before, "another lease"


def test_a_limit_that_no_record_names_is_synced_before_it_is_written(
    client: Client, disk: Disk
) -> None:
    gpu = client.node().gpus[0].uuid
    client.set_power_limit(gpu, 150_000)
    for milliwatts in (160_000, 170_000, 180_000):
        before = disk.syncs
        client.set_power_limit(gpu, milliwatts)
        assert disk.syncs == before + 1
        assert [milliwatts] in disk.entries()[f"pending/{gpu}/power_limit"]["values"]


def test_a_limit_that_a_lease_sets_again_is_not_synced_again(client: Client, disk: Disk) -> None:
    gpu = client.node().gpus[0].uuid
    for milliwatts in (150_000, 160_000):
        client.set_power_limit(gpu, milliwatts)
    before = disk.syncs
    for _ in range(20):
        client.set_power_limit(gpu, 150_000)
        client.set_power_limit(gpu, 160_000)
    client.set_power_limit(gpu, 150_000)
    assert disk.syncs == before
    key = f"pending/{gpu}/power_limit"
    wait_for(lambda: disk.entries()[key]["values"] == [[150_000]], "only the newest is in force")
    assert disk.entries()[key]["doubts"] == [], "and is confirmed"
    assert disk.syncs == before
    client.set_power_limit(gpu, 160_000)
    assert disk.syncs == before
    wait_for(lambda: disk.entries()[key]["values"] == [[160_000]], "the newest in the file")
    client.release()
    client.set_power_limit(gpu, 150_000)
    assert disk.syncs > before, "another lease"


def test_changes_of_one_request_on_several_gpus_are_synced_once(client: Client, disk: Disk) -> None:
    gpus = [gpu.uuid for gpu in client.node().gpus]
    before = disk.syncs
    client.set_gpu_clocks(gpus, 600, 900)
    assert disk.syncs == before + 1
    assert {f"pending/{gpu}/gpu_clocks" for gpu in gpus} <= {*disk.entries()}


def test_what_metrics_cost_is_charged_to_who_asks(
    client: Client, charged: list[tuple[int, int]]
) -> None:
    client.state([gpu.uuid for gpu in client.node().gpus])
    assert charged == []
    client.metrics()
    ((_, spent_ns),) = charged
    assert spent_ns > 0


def test_an_engine_in_this_process_takes_what_a_daemon_takes(client: Client) -> None:
    gpu = client.node().gpus[0].uuid
    client.set_power_limit(gpu, np.int64(150_000))
    assert client.state([gpu])[gpu].power_limit_mw == 150_000
    for block in (True, False):
        with pytest.raises(RequestRejected, match=r"value\.0: Input should be a valid int"):
            client.set_power_limit(gpu, 150_000.5, block=block)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(RequestRejected, match=r"value\.0: Input should be a valid int"):
            client.set_persistence_mode(gpu, "yes", block=block)  # type: ignore[arg-type]  # wrong on purpose


def test_failures_with_a_pause_between_them_are_not_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call may fail long after another did, as the first of an exit: it is tried again."""
    now_ns = [0]
    monkeypatch.setattr("zeusd.devices.metered.time.monotonic_ns", lambda: now_ns[0])
    nvml = SimulatedBackend("v100-pcie:setter_ms=0", clock_ns=lambda: 0)
    nvml.inject(0, "power_limit_mw", 999)
    nvml.init()
    metered = MeteredBackend(nvml)
    since_ns: list[int] = []
    for now_ns[0] in (0, 10**9, 3 * 10**9, 600 * 10**9, 601 * 10**9):
        with pytest.raises(DeviceError):
            metered.read_control(0, Control.POWER_LIMIT)
        since_ns.append(metered.steadily_ns)
    assert since_ns == [0, 0, 0, 600 * 10**9, 600 * 10**9]
    assert metered.failing[0] == 0


@pytest.mark.parametrize(
    ("calls", "code", "waits"),
    [
        (["set_power_limit"], 15, False),
        (["sensors", "power_limit_mw", "set_power_limit"], 999, False),
        (["set_power_limit"], 999, True),
    ],
    ids=["lost", "all calls fail", "may succeed later"],
)
def test_an_exit_does_not_wait_for_a_driver_that_is_gone(
    tmp_path: Path,
    disk: Disk,
    engines: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    calls: list[str],
    code: int,
    waits: bool,
) -> None:
    monkeypatch.setattr(embed, "_STOP_S", 3600.0)
    monkeypatch.setattr(engine, "GONE_S", 0.0)
    nvml = SimulatedBackend("v100-pcie:setter_ms=0")
    client = embed.connect(OpenedNode(nvml, None, lambda: None), state_dir=str(tmp_path / "state"))
    gpu = client.node().gpus[0].uuid
    client.windows(gpu)  # its sensors are read from now on
    client.set_power_limit(gpu, 150_000)
    for call in calls:
        nvml.inject(0, call, code)
    wait_for(lambda: "sensors" not in calls or engines[0]._nvml.failing, "all calls to fail")
    closing = threading.Thread(target=client.close)
    closing.start()
    key = f"pending/{gpu}/power_limit"
    if waits:
        describe = engines[0]._nvml.describe
        wait_for(lambda: any(str(code) in one.errors for one in describe()), "an attempt")
        nvml.clear_faults()
    wait_for(lambda: not closing.is_alive(), "the exit")
    if waits:
        nvml.init()
        assert nvml.power_limit_mw(0) == 250_000
    else:
        assert [150_000] in disk.entries()[key]["values"], "for the next engine"
        nvml.clear_faults()
        node = OpenedNode(nvml, None, lambda: None)
        with embed.connect(node, state_dir=str(tmp_path / "state")) as client:
            wait_for(lambda: client.state(gpu)[gpu].power_limit_mw == 250_000, "the restore")

"""The daemon as its users meet it, over its real socket."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.support import (
    ALL_MAY,
    TIMEOUT_S,
    RunningDaemon,
    as_nobody,
    configuration,
    ended,
    forked,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from zeus_common.simulation import SimulatedNode
from zeus_ipc import Client, errors
from zeus_ipc.controls import Control
from zeus_ipc.errors import DaemonUnavailable
from zeus_ipc.replies import GpuInfo

SPEC = "2xv100-pcie:setter_ms=0"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", SPEC, gpus=2) as running:
        yield running


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with daemon.client() as client:
        yield client


def limit_w(daemon: RunningDaemon, uuid: str) -> float:
    with daemon.client() as client:
        limit_mw = client.state(uuid)[uuid].power_limit_mw
    assert limit_mw is not None
    return limit_mw / 1000


def test_hello_tells_what_the_node_has(client: Client) -> None:
    node = client.node()
    assert node.protocol == 1
    assert [gpu.index for gpu in node.gpus] == [0, 1]
    gpu = node.gpus[0]
    assert gpu.name.startswith("Tesla V100-PCIE")
    assert (gpu.power_limit_min_mw, gpu.power_limit_max_mw) == (100_000, 250_000)
    assert gpu.power_limit_site_mw == 250_000
    assert gpu.uuid.startswith("GPU-")
    assert gpu.pci_address.count(":") == 2


def test_every_operation_of_the_protocol(daemon: RunningDaemon, client: Client) -> None:
    first, second = (gpu.uuid for gpu in client.node().gpus)
    client.set_power_limit([first, second], 200_000)
    client.set_gpu_clocks(first, 900, 1200)
    client.set_persistence_mode(first, True)
    state = client.state([first, second])
    assert state[first].power_limit_mw == state[second].power_limit_mw == 200_000
    assert state[first].locked_gpu_clocks_mhz == [900, 1200]
    assert state[first].persistence_mode is True
    with pytest.raises(errors.NotSupported):
        client.set_memory_clocks(first, 877, 877)
    assert client.clocks(first).memory_mhz == [877]
    assert client.energy([first])[first].energy_mj > 0
    assert client.power(first)[first].instant_mw is not None
    assert {(one.gpu, one.control) for one in client.leases()} == {
        (first, Control.POWER_LIMIT),
        (second, Control.POWER_LIMIT),
        (first, Control.GPU_CLOCKS),
        (first, Control.PERSISTENCE_MODE),
    }
    client.reset(first, "power_limit")
    assert client.state(first)[first].power_limit_mw == 250_000
    assert client.heartbeat() == 4
    assert client.release(second) == 1
    assert limit_w(daemon, second) == 250
    assert client.release() == 3
    assert client.leases() == []
    client.acquire([first], ["power_limit"])
    assert client.heartbeat() == 1
    assert client.release([first], [Control.POWER_LIMIT]) == 1


def test_closing_the_client_releases_its_leases(daemon: RunningDaemon) -> None:
    with daemon.client() as client:
        uuid = client.node().gpus[0].uuid
        client.set_power_limit(uuid, 150_000)
        assert limit_w(daemon, uuid) == 150
    assert limit_w(daemon, uuid) == 250


def test_errors_are_raised_as_their_own_classes(client: Client) -> None:
    uuid = client.node().gpus[0].uuid
    with pytest.raises(errors.OutOfRange, match="100 to 250 W"):
        client.set_power_limit(uuid, 251_000)
    with pytest.raises(errors.UnknownGpu):
        client.state("GPU-none")
    with pytest.raises(errors.SeveralGpusFailed) as caught:
        client.set_power_limit([uuid, "GPU-none"], 200_000)
    assert set(caught.value.errors) == {"GPU-none"}
    with pytest.raises(errors.RequestRejected, match="gpus"):
        client.state([])
    number: Any = 200_000
    with pytest.raises(errors.RequestRejected, match=r"power_limit is a list .* not 200000"):
        client.set(uuid, "power_limit", number)
    with pytest.raises(errors.RequestRejected, match="controls are a list, not 'power_limit'"):
        client.acquire(uuid, "power_limit")
    with pytest.raises(errors.RequestRejected, match="GPUs are a UUID or a list of UUIDs, not 2"):
        client.state(number)
    client.release()


def test_the_second_process_learns_who_holds_the_lease(
    daemon: RunningDaemon, client: Client
) -> None:
    uuid = client.node().gpus[0].uuid
    holder = script(
        "import sys; from zeus_ipc import Client\n"
        "client = Client(sys.argv[1]); client.set_power_limit(sys.argv[2], 200_000)\n"
        "print('set', flush=True); sys.stdin.read()",
        daemon.socket,
        uuid,
    )
    assert holder.stdout.readline() == "set\n"
    with pytest.raises(
        errors.LeaseHeld, match=rf"process {holder.pid} \(\w+\S*\) of user {os.getuid()}"
    ):
        client.set_power_limit(uuid, 150_000)
    holder.stdin.close()
    holder.wait()
    wait_for(lambda: limit_w(daemon, uuid) == 250, "the limit to be back")
    client.set_power_limit(uuid, 150_000)
    client.release()


def test_sets_sent_without_waiting_are_applied_and_their_failures_told_later(
    daemon: RunningDaemon, client: Client
) -> None:
    uuid = client.node().gpus[0].uuid
    client.set_power_limit(uuid, 180_000, block=False)
    wait_for(lambda: limit_w(daemon, uuid) == 180, "the set to be applied")
    client.set_power_limit(uuid, 999_000, block=False)
    client.set_power_limit(uuid, 999_000, block=False)
    with pytest.raises(errors.DeferredSetFailed) as caught:
        wait_for(client.heartbeat, "never: the failures come with this or an earlier answer")
        client.heartbeat()
    assert caught.value.count >= 1
    assert isinstance(caught.value.last, errors.OutOfRange)
    client.release()


@pytest.mark.parametrize("value", ["180000", -1, 180_000.5, float("nan")])
def test_invalid_sets_sent_without_waiting_are_failures_as_well(
    client: Client, value: object
) -> None:
    uuid = client.node().gpus[0].uuid
    client.set_power_limit(uuid, value, block=False)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(errors.DeferredSetFailed, match=r"value\.0: ") as caught:
        # The first reply after the set has it: this one, or that to the client's own thread.
        wait_for(lambda: client.heartbeat() < 0, "never: a call raises")
    assert (caught.value.count, type(caught.value.last)) == (1, errors.RequestRejected)
    client.heartbeat()


def test_threads_may_share_a_client(client: Client) -> None:
    uuids = [gpu.uuid for gpu in client.node().gpus]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(50):
                uuid = uuids[number % 2]
                assert list(client.energy(uuid)) == [uuid]
                client.set_power_limit(uuid, 200_000, block=number % 3 == 0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    client.release()


def test_a_forked_child_has_a_connection_and_leases_of_its_own(
    daemon: RunningDaemon, client: Client
) -> None:
    first, second = (gpu.uuid for gpu in client.node().gpus)
    client.set_power_limit(first, 200_000)

    def child() -> None:
        with pytest.raises(errors.LeaseHeld):
            client.set_power_limit(first, 150_000)
        client.set_power_limit(second, 150_000)
        assert len(client.leases()) == 2

    assert ended(forked(child)) == 0
    wait_for(lambda: limit_w(daemon, second) == 250, "the child's lease to end with it")
    assert limit_w(daemon, first) == 200
    client.set_power_limit(first, 210_000)
    client.release()


def test_a_child_that_closes_the_inherited_client_ends_nothing(
    daemon: RunningDaemon, client: Client
) -> None:
    uuid = client.node().gpus[0].uuid
    client.set_power_limit(uuid, 200_000)
    assert ended(forked(client.close)) == 0
    assert limit_w(daemon, uuid) == 200
    assert client.heartbeat() == 1
    client.release()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\xc1garbage", "bad_request"),
        (msgpack.packb([1, 2]), "bad_request"),
        (msgpack.packb({"v": 1, "op": "hello"}), "bad_request"),
        (msgpack.packb({"v": 9, "id": 5, "op": "hello"}), "unsupported_version"),
        (msgpack.packb({"v": 1, "id": 5, "op": "format_disk"}), "unknown_operation"),
        (msgpack.packb({"v": 1, "id": 5, "op": "energy", "gpus": "all"}), "bad_request"),
        (
            msgpack.packb(
                {
                    "v": 1,
                    "id": 5,
                    "op": "set",
                    "gpus": ["x"],
                    "control": "power_limit",
                    "value": [True],
                }
            ),
            "bad_request",
        ),
        (msgpack.packb({"v": 1, "id": 5, "op": "energy", "gpus": ["x"] * 65}), "bad_request"),
    ],
)
def test_an_invalid_request_gets_an_error(daemon: RunningDaemon, message: bytes, code: str) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
        dealer.connect(f"ipc://{daemon.socket}")
        dealer.send(message)
        reply = msgpack.unpackb(dealer.recv())
    context.term()
    assert reply["error"]["code"] == code
    if code == "unsupported_version":
        assert reply["error"]["details"]["protocols"] == [1]
    if code == "unknown_operation":
        assert "set" in reply["error"]["details"]["operations"]


def test_unknown_fields_are_ignored(daemon: RunningDaemon) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
        dealer.connect(f"ipc://{daemon.socket}")
        dealer.send(msgpack.packb({"v": 1, "id": 5, "op": "heartbeat", "from_the_future": [1]}))
        assert msgpack.unpackb(dealer.recv())["result"]["leases"] == 0
    context.term()


def test_an_absent_daemon_a_stale_socket_and_a_refused_user_are_distinguished(
    tmp_path: Path,
) -> None:
    with pytest.raises(errors.DaemonUnavailable, match="no such socket; start zeusd"):
        Client(tmp_path / "none").node()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "stale"))
    with pytest.raises(
        errors.DaemonUnavailable, match="its old socket is still there; start zeusd"
    ):
        Client(tmp_path / "stale").node()
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path):
        with pytest.raises(errors.DaemonUnavailable, match=f"{path} is not a socket; name"):
            Client(path).node()


@pytest.mark.needs("two users")
@pytest.mark.parametrize(
    ("mode", "remedy"),
    [("0600", "for the right to use it"), ("0660", "to add you to the group daemon, then log in")],
)
def test_a_user_who_may_not_connect_learns_what_to_do(mode: str, remedy: str) -> None:
    options = ("--socket-mode", mode, "--socket-group", "daemon")
    with running_daemon("--simulate", SPEC, *options) as private:

        def as_another() -> None:
            os.setgid(65534)
            os.setuid(65534)
            with pytest.raises(errors.AccessRefused, match=re.escape(remedy)):
                Client(private.socket).node()

        assert ended(forked(as_another)) == 0


def test_a_client_that_gets_no_answer_gives_up_in_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        with pytest.raises(errors.RequestTimeout, match=r"did not answer within 0\.2 s"):
            Client(tmp_path / "s", timeout_s=0.2).node()


def test_a_closed_client_raises_an_error(daemon: RunningDaemon) -> None:
    client = daemon.client()
    client.node()
    client.close()
    client.close()
    with pytest.raises(errors.DaemonUnavailable, match="was closed"):
        client.node()


def test_a_client_survives_a_restart_of_the_daemon() -> None:
    with running_daemon("--simulate", SPEC, gpus=2) as daemon, daemon.client() as client:
        uuid = client.node().gpus[0].uuid
        client.set_power_limit(uuid, 200_000)
        assert daemon.stop() == 0
        daemon.start_again()
        wait_for(lambda: os.path.exists(daemon.socket), "the socket")
        wait_for(lambda: client.node().gpus, "the GPUs")
        assert client.node().gpus[0].uuid == uuid
        assert client.leases() == []
        with pytest.raises(errors.LeaseExpired, match="zeusd was stopped"):
            client.set_power_limit(uuid, 210_000)
        client.acquire(uuid, ["power_limit"])
        client.set_power_limit(uuid, 210_000)


def test_a_killed_daemon_keeps_live_leases_and_restores_what_dead_holders_set() -> None:
    with running_daemon("--simulate", SPEC, gpus=2) as daemon, daemon.client() as client:
        first, second = (gpu.uuid for gpu in client.node().gpus)
        client.set_power_limit(first, 200_000)
        other = script(
            "import sys; from zeus_ipc import Client\n"
            "client = Client(sys.argv[1]); client.set_power_limit(sys.argv[2], 150_000)\n"
            "print('set', flush=True); sys.stdin.read()",
            daemon.socket,
            second,
        )
        other.stdout.readline()
        daemon.kill()
        other.kill()
        other.wait()
        daemon.start_again()
        daemon.wait_until_serving(2)
        wait_for(lambda: daemon.records("lease_ended"), "the dead holder's lease to end")
        (lease,) = client.leases()
        assert (lease.gpu, lease.pid) == (first, os.getpid())
        assert lease.value == [200_000]
        client.set_power_limit(first, 180_000)


def test_without_a_driver_it_serves_no_gpus_and_keeps_trying() -> None:
    with public_directory() as directory:
        library = directory / "libnvidia-ml.so.1"
        with running_daemon("--nvml-library", str(library), directory=directory) as daemon:
            with daemon.client() as client:
                node = client.node()
            assert node.gpus == []
            assert node.driver_version is None
            record = wait_for(lambda: daemon.records("no_driver"), "a record")[0]
            assert record["device_code"] == 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_restores_everything_and_ends_with_zero(number: int) -> None:
    with running_daemon("--simulate", SPEC, gpus=2) as daemon, daemon.client() as client:
        uuid = client.node().gpus[0].uuid
        client.set_power_limit(uuid, 150_000)
        daemon.process.send_signal(number)
        assert daemon.process.wait(TIMEOUT_S) == 0
        restores = daemon.records("restore")
        assert [(one["new"], one["result"]) for one in restores] == [("250 W", "ok")]
        assert not os.path.exists(daemon.socket)


def test_a_stop_retries_a_restore_that_fails_at_first() -> None:
    with running_daemon("--simulate", SPEC, gpus=2) as daemon, daemon.client() as client:
        node = client.node()
        assert node.simulated is not None
        uuid = node.gpus[0].uuid
        client.set_power_limit(uuid, 150_000)
        SimulatedNode(node.simulated).inject(0, "set_power_limit", 999, count=1)
        assert daemon.stop() == 0
        assert [one["result"] == "ok" for one in daemon.records("restore")] == [False, True]
        assert not daemon.records("restore_abandoned")


def _gpus(client: Client) -> list[GpuInfo]:
    """None as long as nobody listens at the socket."""
    try:
        return client.node().gpus
    except DaemonUnavailable:
        return []


def test_an_ordinary_user_may_run_it_on_a_simulated_node(daemon: RunningDaemon) -> None:
    with public_directory() as directory:
        if os.getuid() == 0:
            os.chown(directory, 65534, 65534)
        command = [sys.executable, "-m", "zeusd", "serve", "--socket", str(directory / "s")]
        command += ["--state-dir", str(directory / "state"), "--simulate", SPEC]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **as_nobody())
        try:
            client = Client(directory / "s")
            wait_for(lambda: os.path.exists(directory / "s"), "the socket")
            uuid = wait_for(lambda: _gpus(client), "GPUs")[0].uuid
            client.set_power_limit(uuid, 200_000)
            assert client.state(uuid)[uuid].power_limit_mw == 200_000
            client.close()
        finally:
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0


def test_each_reload_names_what_needs_a_restart(tmp_path: Path) -> None:
    options = ("--simulate", "1xv100:setter_ms=0", *configuration(tmp_path))
    with running_daemon(*options) as daemon:
        sections: list[list[str]] = []
        for reload, text in enumerate(
            (
                "[daemon]\nstop_timeout_s = 3\n[accounting]\nvisibility = 'all'\n",
                "[energy]\ncpu = false\n",
                "[energy]\ncpu = false\n[daemon]\nsocket_mode = '0600'\n",
                ALL_MAY,
            ),
            1,
        ):
            before = len(daemon.records("reload_partial"))
            configuration(tmp_path, text)
            daemon.process.send_signal(signal.SIGHUP)
            daemon.wait_for_records("reloaded", reload)
            named = daemon.records("reload_partial")[before:]
            sections.append(sorted(one["section"] for one in named))
    # The last is what the daemon began with.
    assert sections == [[], ["energy"], ["daemon", "energy"], []]

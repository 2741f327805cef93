"""The front may die at any time, of anything: it costs a reconnect and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.support import NOBODY, RunningDaemon, as_nobody, running_daemon, script, wait_for
from zeus_ipc import Client
from zeusd.front.shaper import MAX_WAITING

SPEC = "2xv100-pcie:setter_ms=0"
FIRST_ROUTING_ID = 0x6B8B4567
"""What glibc's rand() gives first after srand(1), which is where libzmq's ids begin."""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(
        "--simulate", SPEC, "--socket-mode", "0666", "--front-seed", "1", gpus=2
    ) as running:
        yield running


@pytest.fixture
def held(daemon: RunningDaemon) -> Iterator[tuple[Client, str]]:
    """A client that holds a lease, which must outlive every attack."""
    with daemon.client() as client:
        uuid = client.node().gpus[0].uuid
        client.set_power_limit(uuid, 200_000)
        yield client, uuid


def assert_nothing_else_happened(
    daemon: RunningDaemon, held: tuple[Client, str], dead_front: int
) -> None:
    """The front was replaced; leases, limits and the daemon are what they were."""
    client, uuid = held
    wait_for(lambda: daemon.front_pid() != dead_front, "another front")
    assert client.state(uuid)[uuid].power_limit_mw == 200_000
    (lease,) = client.leases()
    assert (lease.gpu, lease.pid, lease.restoring) == (uuid, os.getpid(), False)
    client.set_power_limit(uuid, 190_000)
    client.set_power_limit(uuid, 200_000)
    assert daemon.records("restore") == []
    assert daemon.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_a_killed_front(daemon: RunningDaemon, held: tuple[Client, str], number: int) -> None:
    front = daemon.front_pid()
    os.kill(front, number)
    assert_nothing_else_happened(daemon, held, front)


def test_the_front_dies_five_times_in_a_row(
    daemon: RunningDaemon, held: tuple[Client, str]
) -> None:
    for _ in range(5):
        front = daemon.front_pid()
        os.kill(front, signal.SIGKILL)
        assert_nothing_else_happened(daemon, held, front)


def test_a_request_under_way_when_the_front_dies_is_answered_by_the_next(
    daemon: RunningDaemon, held: tuple[Client, str]
) -> None:
    client, uuid = held
    front = daemon.front_pid()
    os.kill(front, signal.SIGSTOP)
    # The stopped front has the request in its queue when it dies: only a resend is answered.
    killer = script(f"import os, time; time.sleep(0.3); os.kill({front}, 9)")
    assert client.state(uuid)[uuid].power_limit_mw == 200_000
    killer.wait()
    assert_nothing_else_happened(daemon, held, front)


def test_predicted_routing_ids_abort_libzmq_and_nothing_else(
    daemon: RunningDaemon, held: tuple[Client, str]
) -> None:
    """The attack of libzmq's assertion on duplicate ids, helped by a known seed."""
    front = daemon.front_pid()
    context = zmq.Context()
    sockets = []
    for offset in range(40):
        attacker = context.socket(zmq.DEALER)
        attacker.setsockopt(zmq.LINGER, 0)
        attacker.routing_id = b"\0" + struct.pack(">I", FIRST_ROUTING_ID + 2 + offset)
        attacker.connect(f"ipc://{daemon.socket}")
        sockets.append(attacker)
    for _ in range(60):
        ordinary = context.socket(zmq.DEALER)
        ordinary.setsockopt(zmq.LINGER, 0)
        ordinary.connect(f"ipc://{daemon.socket}")
        sockets.append(ordinary)
    wait_for(lambda: daemon.front_pid() != front, "the front to be aborted by the attack")
    context.destroy(linger=0)
    assert_nothing_else_happened(daemon, held, front)


def test_running_out_of_descriptors(tmp_path: Path) -> None:
    config = tmp_path / "zeusd.toml"
    config.write_text("[front]\nmax_files = 64\n")
    with running_daemon("--simulate", SPEC, "--config", str(config), gpus=2) as daemon:
        with daemon.client() as client:
            uuid = client.node().gpus[0].uuid
            client.set_power_limit(uuid, 200_000)
            front = daemon.front_pid()
            with contextlib.ExitStack() as stack:
                for _ in range(100):
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.setblocking(False)
                    with contextlib.suppress(OSError):
                        connection.connect(daemon.socket)
                wait_for(lambda: daemon.front_pid() != front, "the front to run out")
            assert_nothing_else_happened(daemon, (client, uuid), front)


def _zmtp_handshake(path: str) -> socket.socket:
    """A raw ZMTP 3 client: what libzmq would never send, it can."""
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(10)
    stream.connect(path)
    stream.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    greeting = b""
    while len(greeting) < 64:
        part = stream.recv(64 - len(greeting))
        if not part:
            raise ConnectionError("closed during the handshake")
        greeting += part
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    stream.sendall(b"\x04" + bytes([len(ready)]) + ready)
    header = stream.recv(2)
    stream.recv(header[1])
    return stream


def test_a_message_without_end_is_cut_off_by_the_memory_limit(tmp_path: Path) -> None:
    config = tmp_path / "zeusd.toml"
    config.write_text("[front]\nmemory_mib = 192\n")
    with running_daemon("--simulate", SPEC, "--config", str(config), gpus=2) as daemon:
        with daemon.client() as client:
            uuid = client.node().gpus[0].uuid
            client.set_power_limit(uuid, 200_000)
            front = daemon.front_pid()
            bomb = (b"\x01\x01x") * 100_000  # frames of one byte, each promising another
            with _zmtp_handshake(daemon.socket) as stream, contextlib.suppress(OSError):
                for _ in range(2_000):
                    stream.sendall(bomb)
                    if daemon.front_pid() != front:
                        break
            wait_for(lambda: daemon.front_pid() != front, "the front to hit its limit")
            assert_nothing_else_happened(daemon, (client, uuid), front)


def test_a_multipart_message_ends_only_its_own_connection(
    daemon: RunningDaemon, held: tuple[Client, str]
) -> None:
    client, uuid = held
    front = daemon.front_pid()
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{daemon.socket}")
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.send_multipart([b"x"] * 50)
        assert monitor.recv_multipart()
        dealer.disable_monitor()
    context.destroy(linger=0)
    assert client.state(uuid)[uuid].power_limit_mw == 200_000
    assert daemon.front_pid() == front


def test_who_chooses_a_routing_id_is_shown_the_door(daemon: RunningDaemon) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.routing_id = b"mine"
        dealer.connect(f"ipc://{daemon.socket}")
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        monitor.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.send(b"anything")
        assert monitor.recv_multipart()
        dealer.disable_monitor()
    context.destroy(linger=0)


def test_connections_of_one_user_are_bounded(tmp_path: Path) -> None:
    config = tmp_path / "zeusd.toml"
    config.write_text("[front]\nmax_connections_per_user = 20\n")
    with running_daemon("--simulate", SPEC, "--config", str(config), gpus=2) as daemon:
        with daemon.client() as client, contextlib.ExitStack() as stack:
            client.node()
            alive: list[socket.socket] = []
            for _ in range(30):
                with contextlib.suppress(OSError, IndexError):
                    alive.append(stack.enter_context(_zmtp_handshake(daemon.socket)))

            def only_the_allowed_are_left() -> bool:
                alive[:] = [stream for stream in alive if not _has_ended(stream)]
                return len(alive) <= 19

            wait_for(only_the_allowed_are_left, "the connections over the limit to be closed")
            assert len(alive) >= 18  # the client has one, and the probe before it had one
            assert len(client.node().gpus) == 2


FLOODER = """
import sys, msgpack, zmq
context = zmq.Context()
dealer = context.socket(zmq.DEALER)
dealer.setsockopt(zmq.RCVTIMEO, 30_000)
dealer.connect("ipc://" + sys.argv[1])
monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
def beat(number):
    dealer.send(msgpack.packb({"v": 1, "id": number, "op": "heartbeat"}))
for number in range(int(sys.argv[2])):  # somewhat more than may wait
    beat(number)
while b"overloaded" not in dealer.recv():
    pass
print("refused", flush=True)
while not monitor.getsockopt(zmq.EVENTS) & zmq.POLLIN:
    beat(1)
print("cut off", flush=True)
"""


@pytest.mark.needs("two users")
def test_requests_of_one_user_are_bounded(tmp_path: Path) -> None:
    config = tmp_path / "zeusd.toml"
    config.write_text("[front]\nrequests_per_second = 200\n")
    options = ("--simulate", SPEC, "--config", str(config), "--socket-mode", "0666")
    with running_daemon(*options, gpus=2) as daemon, daemon.client() as client:
        front = daemon.front_pid()
        flooder = script(FLOODER, daemon.socket, str(MAX_WAITING + 60), **as_nobody())
        assert flooder.stdout is not None
        assert flooder.stdout.readline() == "refused\n", "first it is told"
        assert flooder.stdout.readline() == "cut off\n", "then it is cut off"
        flooder.wait()
        assert wait_for(lambda: daemon.records("flood"), "the record")[0]["uid"] == NOBODY
        assert len(client.node().gpus) == 2, "another user notices nothing"
        assert daemon.front_pid() == front


def test_a_front_that_stands_still_is_replaced(
    daemon: RunningDaemon, held: tuple[Client, str]
) -> None:
    front = daemon.front_pid()
    os.kill(front, signal.SIGSTOP)
    assert_nothing_else_happened(daemon, held, front)
    assert daemon.records("front_stuck")


def _has_ended(stream: socket.socket) -> bool:
    stream.setblocking(False)
    try:
        return stream.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.needs("root")
def test_the_front_has_no_privileges(daemon: RunningDaemon) -> None:
    status = dict(
        line.split(":", 1)
        for line in Path(f"/proc/{daemon.front_pid()}/status").read_text().splitlines()
    )
    assert "0" not in status["Uid"].split()
    assert "0" not in status["Gid"].split()
    assert status["Groups"].split() == []
    for capability in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
        assert int(status[capability], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"


def test_the_front_does_not_outlive_the_daemon(daemon: RunningDaemon) -> None:
    front = daemon.front_pid()
    os.kill(front, signal.SIGSTOP)
    daemon.kill()
    wait_for(lambda: not Path(f"/proc/{front}").exists(), "the front to die")

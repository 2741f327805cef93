"""The server on real sockets, with libzmq and with raw bytes at the other end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.support import TIMEOUT_S, wait_for
from tests.zmtp_peer import command, exactly, frame, has_ended, hello, message, shaken
from zeus_ipc.replies import ErrorBody, UserLoad
from zeus_ipc.requests import Request
from zeusd.core.model import Peer
from zeusd.runtime.reactor import Reactor
from zeusd.runtime.sources import TickReading
from zeusd.server import acceptor, descriptors
from zeusd.server import server as server_module
from zeusd.server.connection import ClientConnection, Sent
from zeusd.server.fairness import Limits
from zeusd.server.server import MAX_AFTER_EXIT, MAX_WAITING_BYTES, Server
from zeusd.server.zmtp import ZmtpState


class Echo:
    """Answers each request with its operation, or with as much as is wanted."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.peers: dict[int, Peer] = {}
        self.asked: list[str] = []
        self.closed: list[int] = []
        self.payload = b""
        self.cpu_s = 0.0
        self.dead: set[int] = set()

    def peer_opened(self, peer: Peer, pidfd: int) -> None:
        os.close(pidfd)
        self.peers[peer.conn] = peer

    def peer_closed(self, conn: int) -> None:
        self.closed.append(conn)

    def request(self, conn: int, request: Request) -> None:
        self.asked.append(request.op)
        if request.op == "hello":
            raise RuntimeError("a bug that this request shows")
        end_s = time.thread_time() + self.cpu_s
        while time.thread_time() < end_s:
            pass
        self._server.reply(conn, {"id": request.id, "op": request.op, "x": self.payload})

    def invalid(self, conn: int, error: ErrorBody) -> None:
        self.asked.append(error.code)

    def has_exited(self, conn: int) -> bool:
        return conn in self.dead


class Running:
    """A server, its application, and the thread that both run on."""

    def __init__(self, directory: Path, limits: Limits, maximum: int) -> None:
        self.path = str(directory / "z")
        self.reactor = Reactor()
        self.server = Server(self.reactor, limits, maximum)
        self.echo = Echo(self.server)
        self.streamed: list[frozenset[str]] = []
        self.server.attach(self.echo, self.streamed.append)
        self._listening = [_listening(self.path), _listening(self.path + ".stream")]
        self.server.start(*self._listening)
        self._thread = threading.Thread(target=lambda: self.reactor.run(lambda: None, _nothing))
        self._thread.start()

    def on_loop(self, call: Any) -> Any:
        """The result of a call that is made on the loop's thread."""
        done, found = threading.Event(), []

        def run() -> None:
            found.append(call())
            done.set()

        self.reactor.post(run)
        assert done.wait(TIMEOUT_S)
        return found[0]

    def users(self) -> list[UserLoad]:
        found: list[UserLoad] = self.on_loop(self.server.describe)
        return found

    def close(self) -> None:
        self.on_loop(self.server.stop)
        self.reactor.stop()
        self._thread.join(TIMEOUT_S)
        for listening in self._listening:
            listening.close()
        self.reactor.close()


def _nothing() -> None:
    pass


def _listening(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    descriptors.refuse(listening)
    listening.listen(128)
    listening.setblocking(False)
    return listening


@contextlib.contextmanager
def serving(
    directory: Path, limits: Limits | None = None, maximum: int = 1000
) -> Iterator[Running]:
    running = Running(directory, limits or Limits(), maximum)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path) as found:
        yield found


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def ask(number: int, op: str = "heartbeat") -> bytes:
    return msgpack.packb({"v": 1, "id": number, "op": op})


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], path: str, kind: int = zmq.DEALER
) -> zmq.Socket[bytes]:
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
    made.setsockopt(zmq.RECONNECT_IVL, 10)
    made.connect(f"ipc://{path}")
    return made


# ------------------------------------------------------------------------------------ with libzmq


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_a_libzmq_client_gets_answers(running: Running, context: Any, kind: int) -> None:
    peer = dealer(context, running.path, kind)
    for number in range(1, 100):
        peer.send(ask(number))
        assert msgpack.unpackb(peer.recv()) == {"id": number, "op": "heartbeat", "x": b""}
    (found,) = running.echo.peers.values()
    assert (found.process.pid, found.uid) == (os.getpid(), os.getuid())


def test_a_named_dealer_and_one_with_heartbeats_of_libzmqs_own(
    running: Running, context: Any
) -> None:
    """Identity is metadata that nothing depends on; PINGs are answered."""
    peers = []
    for _ in range(2):
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
        peer.routing_id = b"the same"
        peer.setsockopt(zmq.HEARTBEAT_IVL, 20)
        peer.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * TIMEOUT_S))
        peer.connect(f"ipc://{running.path}")
        peers.append(peer)
    for number in range(5):
        for peer in peers:
            peer.send(ask(number))
            assert msgpack.unpackb(peer.recv())["id"] == number
        time.sleep(0.05)  # some of libzmq's heartbeats pass
    assert len(running.echo.peers) == 2
    assert running.echo.closed == []


def test_replies_larger_than_the_kernels_buffer_arrive_whole(
    running: Running, context: Any
) -> None:
    running.echo.payload = os.urandom(900_000)
    peer = dealer(context, running.path)
    for number in range(3):
        peer.send(ask(number))
    for number in range(3):
        assert msgpack.unpackb(peer.recv())["x"] == running.echo.payload, number


def test_a_client_is_served_again_after_the_servers_restart(
    running: Running, context: Any, tmp_path: Path
) -> None:
    peer = dealer(context, str(tmp_path / "second" / "z"))
    (tmp_path / "second").mkdir()
    for number in range(2):
        with serving(tmp_path / "second"):
            peer.send(ask(number))
            assert msgpack.unpackb(peer.recv())["id"] == number
        for path in (tmp_path / "second").iterdir():
            path.unlink()


def subscriber(context: Any, path: str, *topics: bytes) -> Any:
    made = context.socket(zmq.SUB)
    made.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
    for topic in topics:
        made.subscribe(topic)
    made.connect(f"ipc://{path}.stream")
    return made


def publish(running: Running, name: str, number: int) -> None:
    sample = TickReading(1, 2, 3, None, number)
    running.on_loop(lambda: running.server.publish(name, sample))


def test_samples_reach_only_subscribers(
    running: Running, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server_module, "describe_sample", lambda name, sample: {"g": name, "n": sample.number}
    )
    first = subscriber(context, running.path, b"GPU-1")
    second = subscriber(context, running.path, b"GPU-1", b"GPU-1", b"GPU-2")
    names = frozenset({"GPU-1", "GPU-2"})
    wait_for(lambda: running.streamed and running.streamed[-1] == names, "both subscriptions")
    publish(running, "GPU-2", 1)
    publish(running, "GPU-1", 2)
    assert msgpack.unpackb(first.recv_multipart()[1]) == {"g": "GPU-1", "n": 2}
    assert [msgpack.unpackb(second.recv_multipart()[1])["n"] for _ in range(2)] == [1, 2]
    second.unsubscribe(b"GPU-1")  # one of two subscriptions: libzmq reports only the last
    second.unsubscribe(b"GPU-2")
    wait_for(lambda: running.streamed[-1] == {"GPU-1"}, "the cancellation")
    first.close()
    second.unsubscribe(b"GPU-1")
    wait_for(lambda: running.streamed[-1] == frozenset(), "nothing to be streamed any more")


# --------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "attack",
    [
        hello() + frame(b"x", 1) * 1000,
        hello() + (frame(b"x", 1) * 5000 + frame(b"x")) * 3,
        hello() + frame(b"z" * (10 << 20))[:100_000],
        os.urandom(4000).replace(b"\xff", b"\xfe"),
        hello(b"ROUTER"),
        hello() + command(b"PING", b""),
    ],
    ids=["endless parts", "5,001 parts", "10 MiB", "garbage", "wrong type", "short PING"],
)
def test_an_attacker_is_disconnected_and_logged_once_and_others_are_unaffected(
    running: Running, context: Any, attack: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    honest = dealer(context, running.path)
    for round_ in range(3):
        with socket.socket(socket.AF_UNIX) as attacker:
            attacker.connect(running.path)
            attacker.settimeout(TIMEOUT_S)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                attacker.sendall(attack)
            wait_for(lambda stream=attacker: has_ended(stream), "the attacker to be closed")
        honest.send(ask(round_))
        assert msgpack.unpackb(honest.recv())["id"] == round_
    wait_for(lambda: running.users()[0].faults == 3, "three faults")
    wait_for(lambda: caplog.records, "the record")
    assert [record.event for record in caplog.records] == ["protocol_error"]
    assert "broke a rule of the protocol" in caplog.text


def test_messages_before_the_end_still_count(running: Running) -> None:
    """Sets without a reply, and a goodbye, of a program that ends at once."""
    with shaken(running.path) as stream:
        stream.sendall(b"".join(frame(ask(number)) for number in range(60)))
    wait_for(lambda: len(running.echo.asked) == 60, "all of them")
    wait_for(lambda: running.echo.closed, "the connection's end")


def test_what_a_dead_process_has_sent_is_dropped_but_for_its_last_words(
    running: Running,
) -> None:
    """A flood must not go on for as long as its sender's buffers last."""
    running.echo.payload = bytes(MAX_WAITING_BYTES // 2)  # so that it waits for its reader
    with shaken(running.path) as stream:
        stream.sendall(b"".join(frame(ask(number)) for number in range(1000)))
        wait_for(lambda: running.echo.asked, "the first requests")
        running.on_loop(lambda: running.echo.dead.update(running.echo.peers))
        before = len(running.echo.asked)
    wait_for(lambda: running.echo.closed, "the connection's end")
    assert len(running.echo.asked) - before <= 2 * MAX_AFTER_EXIT


def test_a_request_counts_by_the_time_that_it_takes(tmp_path: Path) -> None:
    with serving(tmp_path, Limits(requests_per_second=500.0)) as running:
        with shaken(running.path) as stream:
            for number in range(10):
                stream.sendall(frame(ask(number)))
                message(stream)
            assert running.users() == []
            running.echo.cpu_s = 0.02  # they come faster than the limit allows
            while not any(user.limited_ns > 100_000_000 for user in running.users()):
                stream.sendall(frame(ask(0)))
                message(stream)
            running.echo.cpu_s = 0.0
            stream.sendall(frame(ask(0)))
            message(stream)
            limited_ns = running.users()[0].limited_ns
            running.on_loop(lambda: running.server.charge(min(running.echo.peers), 40_000_000))
            stream.sendall(frame(ask(0)))
            message(stream)
            assert running.users()[0].limited_ns > limited_ns + 100_000_000


def test_a_client_that_does_not_read_is_not_read_until_it_does(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    running.echo.payload = bytes(100_000)
    with shaken(running.path) as stream:
        stream.sendall(b"".join(frame(ask(number)) for number in range(50)))
        wait_for(lambda: "does not read what it asked for" in caplog.text, "the report")
        assert len(running.echo.asked) < 10
        for number in range(50):
            assert msgpack.unpackb(message(stream))["id"] == number


def test_messages_that_wait_arrive_whole_however_slowly_they_are_read() -> None:
    ours, theirs = socket.socketpair()
    sender: Any = ClientConnection(0, ours, None, 0, None, 0, False)  # type: ignore[arg-type]  # no reactor
    messages = [os.urandom(3_000 * number) for number in range(60)]
    with ours, theirs:
        for data in messages:
            sent = sender.send(data)
        assert (sent, sender.waiting > 0) == (Sent.WAITING, True)
        read = b""
        while sender.flush() is Sent.WAITING:  # also when nothing was read since
            assert sender.flush() is Sent.WAITING
            read += theirs.recv(50_000)
        assert sender.waiting == 0
        ours.shutdown(socket.SHUT_WR)
        while data := theirs.recv(50_000):
            read += data
        theirs.close()
        assert [sender.send(b"x"), sender.send(b"y")] == [Sent.GONE, Sent.ALL], "it needs no more"
    assert read == b"".join(messages)


def test_a_client_with_too_many_pending_replies_is_disconnected(running: Running) -> None:
    running.echo.payload = bytes(2 << 20)
    with shaken(running.path) as stream:
        stream.sendall(frame(ask(1)))
        wait_for(lambda: running.users() and running.users()[0].faults, "the fault")
        wait_for(lambda: has_ended(stream), "the end")


def test_a_slow_subscriber_loses_samples_and_nobody_else_does(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server_module, "describe_sample", lambda name, sample: {"n": sample.number, "x": "y" * 900}
    )
    with shaken(running.path + ".stream", b"SUB") as slow:
        slow.sendall(command(b"SUBSCRIBE", b"GPU-1"))
        wait_for(lambda: running.streamed, "the subscription")
        for number in range(2000):
            publish(running, "GPU-1", number)
        got = []
        slow.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while True:
                assert message(slow) == b"GPU-1"
                got.append(msgpack.unpackb(message(slow))["n"])
    assert got == list(range(len(got)))
    assert 10 < len(got) < 1000, "about 64 KiB, and what the kernel takes"


def test_too_many_topics_end_the_connection_that_asks_for_them(running: Running) -> None:
    with shaken(running.path + ".stream", b"SUB") as stream:
        with contextlib.suppress(OSError):
            for number in range(300):
                stream.sendall(command(b"SUBSCRIBE", b"%d" % number))
        wait_for(lambda: has_ended(stream), "the end")
    wait_for(lambda: running.streamed[-1] == frozenset(), "its topics to be forgotten")


def test_connections_of_one_user_and_of_all_are_bounded(tmp_path: Path) -> None:
    for limits, maximum in ((Limits(connections=10, accepts_per_second=1e6), 1000), (Limits(), 10)):
        directory = tmp_path / str(maximum)
        directory.mkdir()
        with serving(directory, limits, maximum) as running, contextlib.ExitStack() as stack:
            kept = []
            for _ in range(20):
                with contextlib.suppress(OSError):
                    kept.append(stack.enter_context(shaken(running.path)))
            assert len(kept) == 10
            assert running.users()[0].refused == 10
            kept.pop().close()
            wait_for(lambda: running.users()[0].connections == 9, "room for another")
            assert stack.enter_context(shaken(running.path))


def test_a_handshake_that_does_not_end_is_ended(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = (socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX))
    with two[0], two[1], shaken(running.path) as honest:
        monkeypatch.setattr(server_module, "HANDSHAKE_NS", 50_000_000)
        for slow in two:
            slow.connect(running.path)
            with contextlib.suppress(OSError):  # ended already, where this process was slow
                slow.sendall(hello()[:70])
        wait_for(lambda: all(has_ended(slow) for slow in two), "the end")
        honest.sendall(frame(ask(1)))
        assert msgpack.unpackb(message(honest))["id"] == 1


def test_a_handshake_that_zeusd_has_not_read_is_not_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user over the rate is read late; connections made meanwhile must not suffer."""
    with serving(tmp_path, Limits(requests_per_second=100.0)) as running:
        with shaken(running.path) as flood, contextlib.ExitStack() as stack:
            flood.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    flood.send(frame(ask(1)) * 50)
            wait_for(lambda: running.users(), "the rate to be reached")
            server = running.server

            def all_wait() -> bool:
                return server._acceptor.open == 5 and all(
                    one.queued or one.engine.state is ZmtpState.TRAFFIC for one in server._young
                )

            late = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
            for stream in late:
                stream.settimeout(TIMEOUT_S)
                stream.connect(running.path)
                stream.sendall(hello() + frame(ask(2)))
            wait_for(lambda: running.on_loop(all_wait), "zeusd to know that there is something")
            monkeypatch.setattr(server_module, "HANDSHAKE_NS", 1_000_000)
            for stream in late:
                exactly(stream, 64)
                message(stream)  # READY
                assert msgpack.unpackb(message(stream))["id"] == 2
        assert running.users()[0].faults == 0


def test_a_client_that_sends_too_fast_is_read_later_and_never_closed(
    tmp_path: Path, context: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with serving(tmp_path, Limits(requests_per_second=200.0)) as running:
        peer = dealer(context, running.path)
        for number in range(500):
            peer.send(ask(number))
        for number in range(500):
            assert msgpack.unpackb(peer.recv())["id"] == number
        (user,) = running.users()
        assert (user.faults, user.refused) == (0, 0)
        assert user.limited_ns > 500_000_000
        wait_for(lambda: "sends over 200 requests a second" in caplog.text, "the record")


def test_a_bug_costs_one_connection(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    with shaken(running.path) as honest, shaken(running.path) as victim:
        victim.sendall(frame(ask(1, "hello")))
        wait_for(lambda: has_ended(victim), "the end")
        honest.sendall(frame(ask(1)))
        assert msgpack.unpackb(message(honest))["id"] == 1
    assert "please report" in caplog.text
    assert len(running.echo.asked) == 2


# ------------------------------------------------------------------------- descriptors in messages


def lingering() -> tuple[socket.socket, socket.socket]:
    """A TCP socket whose last close takes 20 s, and its peer, which does not read."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        sender = socket.create_connection(listening.getsockname())
        peer, _ = listening.accept()
    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 20))
    sender.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sender.send(bytes(1 << 20))
    return sender, peer


@pytest.mark.parametrize("kernel", ["present", "without SO_PASSRIGHTS"])
def test_descriptors_in_a_message_stop_nothing(
    tmp_path: Path, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "present":
        monkeypatch.setattr(descriptors, "refuse", lambda listening: None)
        monkeypatch.setattr(acceptor.descriptors, "may_carry", lambda stream: True)
    descriptors.Closer.prepare()
    arrived = False
    with serving(tmp_path) as running, shaken(running.path) as honest:
        for with_handshake in (False, True):
            sender, peer = lingering()
            with peer, contextlib.ExitStack() as stack:
                if with_handshake:
                    attacker = stack.enter_context(shaken(running.path))
                else:
                    attacker = stack.enter_context(socket.socket(socket.AF_UNIX))
                    attacker.connect(running.path)
                try:
                    socket.send_fds(attacker, [hello()[:20]], [sender.fileno()])
                    arrived = True
                except PermissionError:  # the kernel refuses: so much the better
                    at_once = struct.pack("ii", 1, 0)
                    sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                sender.close()  # the last reference is in the message now
                for number in range(20):
                    honest.sendall(frame(ask(number)))
                    assert msgpack.unpackb(message(honest))["id"] == number
                attacker.close()
                honest.sendall(frame(ask(99)))
                assert msgpack.unpackb(message(honest))["id"] == 99
        wait_for(
            lambda: all(user.connections == 1 for user in running.users()),
            "the attackers' connections to be closed, however long their descriptors linger",
        )
        told = {user.reason for user in running.users() if user.faults}
        assert told == (
            {"broke a rule of the protocol (descriptors in a message)"} if arrived else set()
        )


def test_a_client_sees_the_end_before_its_descriptors_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(TIMEOUT_S)
        closer = descriptors.Closer(lambda token: None)
        closer.close(ours)
        assert theirs.recv(1) == b""
        closer.close(theirs)
    assert len(started) == 2, "one waits while the other closes"


def test_reading_by_peeking_loses_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(BlockingIOError):
            descriptors.receive_guarded(ours, 100)
        theirs.sendall(b"a" * 150)
        assert descriptors.receive_guarded(ours, 100) == b"a" * 100
        with open("/dev/null") as null:
            socket.send_fds(theirs, [b"b"], [null.fileno()])
        with pytest.raises(descriptors.DescriptorsSent):
            descriptors.receive_guarded(ours, 100)
        theirs.close()

"""The client's connection: what libzmq's own ROUTER makes of it, and bad peers."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tests.support import TIMEOUT_S, ended, forked, known, wait_for
from tests.zmtp_peer import GREETING, command, exactly, frame, hello, message, ready
from zeus_ipc import Client, prepared, socket_transport, subscription
from zeus_ipc.codec import decode_request, encode
from zeus_ipc.errors import DaemonUnavailable, RequestRejected, RequestTimeout
from zeus_ipc.prepared import PreparedClocks
from zeus_ipc.socket_transport import SocketTransport
from zeus_ipc.subscription import ZmqSubscription
from zeus_ipc.zmtp import PING, ProtocolError, Replies

GPU = "GPU-1"
Talk = Callable[[socket.socket], None]


def shake(stream: socket.socket) -> None:
    """The ROUTER's part of the handshake, after the peer's."""
    assert exactly(stream, len(hello())) == hello()
    stream.sendall(GREETING + ready(b"ROUTER"))


def next_request(stream: socket.socket) -> dict[str, Any]:
    return decode_request(message(stream))


def answer(stream: socket.socket, request: dict[str, Any], **result: Any) -> None:
    stream.sendall(frame(encode({"id": request["id"], "result": result})))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "socket")


@contextlib.contextmanager
def listening(path: str) -> Iterator[Callable[[Talk], threading.Thread]]:
    """Lets each connection that comes be talked to by a thread. One that says nothing, such as that
    of `diagnose`, is passed over."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(path)
        server.listen()
        server.settimeout(TIMEOUT_S)
        failures: list[BaseException] = []
        threads: list[threading.Thread] = []

        def one(talk: Talk) -> None:
            try:
                while True:
                    stream, _ = server.accept()
                    with stream:
                        stream.settimeout(TIMEOUT_S)
                        if stream.recv(1, socket.MSG_PEEK):
                            talk(stream)
                            return
            except BaseException as error:
                failures.append(error)

        def serve(talk: Talk) -> threading.Thread:
            thread = threading.Thread(target=one, args=(talk,), daemon=True)
            threads.append(thread)
            thread.start()
            return thread

        yield serve
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert failures == []


@contextlib.contextmanager
def transport_to(path: str) -> Iterator[SocketTransport]:
    transport = SocketTransport(path)
    try:
        yield transport
    finally:
        transport.close()


# ------------------------------------------------------------------------------- with a good peer


def test_a_router_of_libzmq_takes_it_for_a_dealer(path: str) -> None:
    bound = threading.Event()

    def serve() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.RCVTIMEO, int(1000 * TIMEOUT_S))
            router.bind(f"ipc://{path}")
            bound.set()
            for _ in range(3):
                peer, data = router.recv_multipart()
                request = decode_request(data)
                if request["op"] != "quiet":
                    result = {"long": "x" * 60_000, "op": request["op"]}
                    router.send_multipart([peer, encode({"id": request["id"], "result": result})])

    server = threading.Thread(target=serve)
    server.start()
    assert bound.wait(TIMEOUT_S)
    with transport_to(path) as transport:
        assert transport.request({"op": "first"}, 20.0)["result"]["op"] == "first"
        transport.send({"op": "quiet"}, 20.0)
        reply = transport.request({"op": "last", "names": ["y" * 200] * 20}, 20.0)
        assert reply["result"]["op"] == "last"
    server.join()


def test_threads_wait_for_their_replies_independently(path: str) -> None:
    """Each request has a connection of its own; those that are left are closed, all but a few."""
    threads, most = 8, socket_transport.MAX_IDLE
    requests: list[tuple[socket.socket, dict[str, Any]]] = []
    ended: list[socket.socket] = []

    def one(stream: socket.socket) -> None:
        shake(stream)
        requests.append((stream, next_request(stream)))
        assert stream.recv(1) == b""
        ended.append(stream)

    with listening(path) as serve, transport_to(path) as transport:
        for _ in range(threads):
            serve(one)
        with ThreadPoolExecutor(threads) as pool:
            asked = [
                pool.submit(transport.request, {"op": f"op {n}"}, 20.0) for n in range(threads)
            ]
            wait_for(lambda: len(requests) == threads, "all requests to come")
            for stream, request in requests[::-1]:
                answer(stream, request, op=request["op"])
            replies = [future.result()["result"]["op"] for future in asked]
        assert replies == [f"op {n}" for n in range(threads)]
        wait_for(lambda: len(ended) == threads - most, "the surplus to be closed")


def test_idle_connections_are_closed_but_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_transport, "IDLE_NS", 0)
    both = threading.Barrier(2)

    def one(stream: socket.socket) -> None:
        shake(stream)
        request = next_request(stream)
        both.wait(TIMEOUT_S)
        answer(stream, request)
        while stream.recv(4096):
            pass

    with listening(path) as serve, transport_to(path) as transport:
        serving = [serve(one) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            for asked in [pool.submit(transport.request, {"op": "state"}, 20.0) for _ in range(2)]:
                asked.result()
        wait_for(lambda: sum(thread.is_alive() for thread in serving) == 1, "one to be closed")


def test_a_forgotten_connection_is_closed_without_a_warning(path: str) -> None:
    def one(stream: socket.socket) -> None:
        shake(stream)
        answer(stream, next_request(stream))
        assert stream.recv(1) == b""

    gc.collect()  # what other tests have forgotten
    with listening(path) as serve, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        serve(one)
        SocketTransport(path).request({"op": "state"}, 20.0)
        gc.collect()
    assert [one.message for one in warned if one.category is ResourceWarning] == []


def test_a_request_ends_in_time_however_short_its_waits_for_zeusd_are(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python waits forever for some queues, if it may wait for a microsecond."""
    monkeypatch.setattr(socket_transport, "RETRY_NS", 10_000)
    transport = SocketTransport(path)
    transport.used = True  # zeusd answered, and does not now
    with pytest.raises(DaemonUnavailable):
        transport.request({"op": "state"}, 0.5)


def test_threads_take_turns_where_zeusd_allows_one_connection(path: str) -> None:
    threads, asked = 4, 200
    begun: list[int] = []

    def serve() -> None:
        open_ = 0
        with contextlib.suppress(OSError):
            while True:
                stream, _ = server.accept()
                open_ += 1
                if open_ > 1:
                    stream.close()
                else:
                    pool.submit(one, stream)

    def one(stream: socket.socket) -> None:
        with stream, contextlib.suppress(ConnectionError):
            shake(stream)
            request = next_request(stream)
            wait_for(lambda: len(begun) == threads, "all to ask")
            while True:
                answer(stream, request)
                request = next_request(stream)

    def ask() -> int:
        begun.append(threading.get_ident())
        for number in range(asked):
            assert "result" in transport.request({"op": "state"}, 20.0)
            if not ended:
                most[threading.get_ident()] = number
        ended.append(threading.get_ident())
        return asked

    ended: list[int] = []
    most: dict[int, int] = {}
    with (
        ThreadPoolExecutor(threads + 2) as pool,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server,
        transport_to(path) as transport,
    ):
        server.bind(path)
        server.listen()
        accepting = pool.submit(serve)
        for asking in [pool.submit(ask) for _ in range(threads)]:
            assert asking.result() == asked
        server.shutdown(socket.SHUT_RDWR)
        accepting.result()
        transport.close()
    assert min(most.values()) > asked // 20, f"one waited while others asked again: {most}"


def test_a_connection_that_comes_when_one_begins_to_wait_is_not_lost(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where zeusd allows no other, all later requests would wait for it in vain."""
    only: Any = SimpleNamespace(used_ns=0, close=lambda: None)
    with transport_to(path) as transport:
        used = iter([only])
        monkeypatch.setattr(
            transport, "_open", lambda until_ns: [transport._put(one) for one in used][1:] or None
        )
        for _ in range(2):
            until_ns = time.monotonic_ns() + 2_000_000_000
            assert transport._take(until_ns, 2.0) is only
            transport._put(only)


def test_a_late_reply_is_not_taken_for_that_of_the_next_request(path: str) -> None:
    late = threading.Event()

    def slow(stream: socket.socket) -> None:
        shake(stream)
        first = next_request(stream)
        late.wait(TIMEOUT_S)
        answer(stream, first, op="late")
        answer(stream, next_request(stream), op="next")

    with listening(path) as serve, transport_to(path) as transport:
        serve(slow)
        with pytest.raises(RequestTimeout):
            transport.request({"op": "first"}, 0.05)
        late.set()
        assert transport.request({"op": "next"}, 20.0)["result"]["op"] == "next"


def test_no_request_overtakes_what_was_sent_before(path: str) -> None:
    """zeusd may read connections in any order."""
    order: list[str] = []

    def line(stream: socket.socket) -> None:
        shake(stream)
        answer(stream, next_request(stream))
        order.extend(next_request(stream)["op"] for _ in range(2))
        assert exactly(stream, len(PING)) == PING
        time.sleep(0.05)  # a request that does not wait would come now
        order.append("read")
        stream.sendall(command(b"PONG", b""))

    def other(stream: socket.socket) -> None:
        shake(stream)
        for _ in range(2):
            request = next_request(stream)
            order.append(request["op"])
            answer(stream, request)

    with listening(path) as serve, transport_to(path) as transport:
        serve(line)
        transport.request({"op": "hello"}, 20.0)
        serve(other)
        for op in ("set 1", "set 2"):
            transport.send({"op": op}, 20.0)
        for op in ("release", "state"):  # the second has nothing to wait for
            transport.request({"op": op}, 20.0)
    assert order == ["set 1", "set 2", "read", "release", "state"]


def test_a_request_whose_connection_is_lost_is_sent_again(path: str) -> None:
    seen: list[dict[str, Any]] = []

    def hang_up(stream: socket.socket) -> None:
        shake(stream)
        seen.append(next_request(stream))

    def reply(stream: socket.socket) -> None:
        shake(stream)
        seen.append(next_request(stream))
        answer(stream, seen[-1], done=True)

    with listening(path) as serve, transport_to(path) as transport:
        first = serve(hang_up)
        second = threading.Thread(target=lambda: (first.join(), serve(reply)))
        second.start()
        assert transport.request({"op": "state"}, 20.0)["result"] == {"done": True}
        second.join()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("waits", ["for a reply", "for its sends to be read"])
def test_a_signal_handler_may_ask_while_its_thread_waits(path: str, waits: str) -> None:
    asked, asked_inside = threading.Event(), threading.Event()

    def interrupted(stream: socket.socket) -> None:
        shake(stream)
        if waits == "for a reply":
            outer = next_request(stream)
        else:
            assert next_request(stream)["op"] == "quiet"
            assert exactly(stream, len(PING)) == PING
        asked.set()
        assert asked_inside.wait(TIMEOUT_S)
        if waits == "for a reply":
            answer(stream, outer, op="outer")
        else:
            stream.sendall(command(b"PONG", b""))

    def handler(stream: socket.socket) -> None:
        shake(stream)
        answer(stream, next_request(stream), op="inner")
        asked_inside.set()
        if waits != "for a reply":  # the outer request, which may take this connection
            answer(stream, next_request(stream), op="outer")

    with listening(path) as serve, transport_to(path) as transport:
        serve(interrupted)
        got: list[str] = []

        def ask(*_: object) -> None:
            got.append(transport.request({"op": "inner"}, 20.0)["result"]["op"])

        if waits != "for a reply":
            transport.send({"op": "quiet"}, 20.0)
        before = signal.signal(signal.SIGUSR1, ask)
        main = known(threading.main_thread().ident)

        def interrupt() -> None:
            asked.wait(TIMEOUT_S)
            serve(handler)
            signal.pthread_kill(main, signal.SIGUSR1)

        threading.Thread(target=interrupt).start()
        try:
            got.append(transport.request({"op": "outer"}, 20.0)["result"]["op"])
        finally:
            signal.signal(signal.SIGUSR1, before)
    assert got == ["inner", "outer"]


def test_a_child_of_fork_has_its_own_connections(path: str) -> None:
    with listening(path) as serve, transport_to(path) as transport:
        seen: list[str] = []

        def line(stream: socket.socket) -> None:
            shake(stream)
            answer(stream, next_request(stream))
            seen.append(next_request(stream)["op"])
            assert exactly(stream, len(PING)) == PING
            stream.sendall(command(b"PONG", b""))
            assert stream.recv(1) == b""  # no copy of it is open in the child

        def one(stream: socket.socket) -> None:
            shake(stream)
            request = next_request(stream)
            seen.append(request["op"])
            answer(stream, request)
            assert stream.recv(1) == b""

        of_parent = [serve(line)]
        transport.request({"op": "before"}, 20.0)
        clocks = PreparedClocks(Client(transport=transport), GPU)
        clocks.prepare({900: 900})
        clocks.renew()
        assert clocks.lock(900)
        of_child = serve(one)

        def lock() -> None:
            with pytest.raises(DaemonUnavailable):
                clocks.lock(900)
            transport.request({"op": "child"}, 20.0)

        assert ended(forked(lock)) == 0
        of_child.join()
        of_parent.append(serve(one))
        transport.request({"op": "after"}, 20.0)
        transport.close()
        for thread in of_parent:
            thread.join()
        assert sorted(seen) == ["after", "child", "set"]


# ------------------------------------------------------------------------------------ clocks


@contextlib.contextmanager
def clocks_of(path: str) -> Iterator[PreparedClocks]:
    with transport_to(path) as transport:
        yield PreparedClocks(Client(transport=transport, heartbeat=False), GPU)


def test_clocks_never_wait_for_room_and_continue_when_there_is_some(path: str) -> None:
    full, seen = threading.Event(), []

    def slow(stream: socket.socket) -> None:
        shake(stream)
        full.wait(TIMEOUT_S)
        while not seen or seen[-1]["value"] != [1200, 1200]:
            seen.append(next_request(stream))

    with listening(path) as serve, clocks_of(path) as clocks:
        serve(slow)
        clocks.prepare({900: 900, 1200: 1200})
        assert not clocks.lock(900), "it has no connection yet"
        clocks.renew()
        sent = 0
        while clocks.lock(900):
            sent += 1
            assert sent < 10_000
        assert not clocks.lock(1200)
        full.set()
        wait_for(lambda: clocks.lock(1200), "room for the next clock")
    assert [one["value"][0] for one in seen] == [900] * sent + [1200]
    assert all(one["op"] == "set" and one["block"] is False for one in seen)


def test_clocks_find_a_daemon_that_was_started_again(path: str) -> None:
    got = threading.Event()

    def one(stream: socket.socket) -> None:
        shake(stream)
        assert next_request(stream)["value"] == [900, 900]
        got.set()

    with contextlib.ExitStack() as stack:
        with listening(path) as serve:
            serve(one)
            clocks = stack.enter_context(clocks_of(path))
            clocks.prepare({1: 900})
            clocks.renew()
            assert clocks.lock(1)
            assert got.wait(TIMEOUT_S)
        os.unlink(path)
        wait_for(lambda: not clocks.lock(1), "the loss to be noticed")
        assert not clocks.lock(1)
        got.clear()
        with listening(path) as serve:
            serve(one)
            clocks.renew()
            assert clocks.lock(1)
            assert got.wait(TIMEOUT_S)
    with pytest.raises(DaemonUnavailable, match="closed"):
        clocks.lock(1)


def test_a_prepared_clock_has_the_deadline_of_the_last_renewal(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[int] = []

    def two(stream: socket.socket) -> None:
        shake(stream)
        deadlines.extend(next_request(stream)["deadline_ns"] for _ in range(3))

    with listening(path) as serve, clocks_of(path) as clocks:
        serve(two)
        clocks.prepare({900: 900})
        clocks.renew()
        assert clocks.lock(900)
        assert clocks.lock(900)
        monkeypatch.setattr(prepared, "VALID_NS", prepared.VALID_NS + 10**9)
        clocks.renew()
        assert clocks.lock(900)
        wait_for(lambda: len(deadlines) == 3, "all to arrive")
    assert deadlines[0] == deadlines[1] <= deadlines[2] - 10**9


# ------------------------------------------------------------------------------- with a bad peer


def test_nobody_listens(path: str) -> None:
    with transport_to(path) as transport, pytest.raises(DaemonUnavailable, match="no such socket"):
        transport.request({"op": "state"}, 1.0)


def test_a_peer_that_does_not_answer_is_waited_for_as_long_as_asked(path: str) -> None:
    released = threading.Event()

    def silent(stream: socket.socket) -> None:
        shake(stream)
        released.wait(TIMEOUT_S)

    with listening(path) as serve, transport_to(path) as transport:
        serve(silent)
        with pytest.raises(RequestTimeout):
            transport.request({"op": "state"}, 0.05)
        released.set()


@contextlib.contextmanager
def full(path: str) -> Iterator[socket.socket]:
    """A listener whose backlog is full, with a connection that nobody has accepted."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ahead,
    ):
        server.bind(path)
        server.listen(0)
        server.settimeout(TIMEOUT_S)
        ahead.connect(path)
        yield server


def answer_one(server: socket.socket) -> None:
    """Makes room, and answers the first connection that asks."""
    server.accept()[0].close()
    while True:
        stream, _ = server.accept()
        with stream:
            stream.settimeout(TIMEOUT_S)
            if stream.recv(1, socket.MSG_PEEK):
                shake(stream)
                answer(stream, next_request(stream), done=True)
                return


def test_a_full_backlog_is_waited_for(path: str) -> None:
    with full(path) as server, transport_to(path) as transport, ThreadPoolExecutor(1) as pool:
        with pytest.raises(RequestTimeout):
            transport.request({"op": "state"}, 0.05)
        asking = pool.submit(transport.request, {"op": "state"}, 20.0)
        answer_one(server)
        assert asking.result(TIMEOUT_S)["result"] == {"done": True}


def test_an_interrupted_connect_is_tried_again(path: str) -> None:
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    here = threading.get_ident()
    interrupting = threading.Timer(0.2, lambda: signal.pthread_kill(here, signal.SIGUSR1))
    with full(path) as server, transport_to(path) as transport, ThreadPoolExecutor(1) as pool:
        try:
            with pytest.raises(KeyboardInterrupt):
                interrupting.start()  # while the connect waits for room
                transport.request({"op": "state"}, 20.0)
        finally:
            signal.signal(signal.SIGUSR1, before)
        answering = pool.submit(answer_one, server)
        assert transport.request({"op": "state"}, 20.0)["result"] == {"done": True}
        answering.result(TIMEOUT_S)


def test_a_process_without_descriptors_gets_an_error_and_keeps_running(path: str) -> None:
    """libzmq would end it."""
    child = f"""
import os, resource
from zeus_ipc import Client
from zeus_ipc.errors import DaemonUnavailable
most = 64
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
taken = []
try:
    while True:
        taken.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for room in range(8):
    client = Client({path!r})
    try:
        client.node()
    except DaemonUnavailable as error:
        print(error)
    client.close()
    os.close(taken.pop())
"""
    ended = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert len(said) == 8
    assert "Too many open files" in said[0]
    assert "no such socket" in said[-1]


def test_a_request_that_is_too_long_is_not_sent(path: str) -> None:
    """zeusd would close the connection, and the client would send it again and again."""
    transport = SocketTransport(path)  # nobody listens
    request = {"v": 1, "op": "state", "gpus": ["GPU-1" * 4000]}
    for send in (transport.request, transport.send):
        with pytest.raises(RequestRejected, match=r"200\d\d bytes, and zeusd accepts 16384"):
            send(request, 10.0)


def test_closing_ends_waiting_requests(path: str) -> None:
    asked = threading.Event()

    def silent(stream: socket.socket) -> None:
        shake(stream)
        next_request(stream)
        asked.set()
        assert stream.recv(1) == b""

    with listening(path) as serve, transport_to(path) as transport:
        serve(silent)
        threading.Thread(target=lambda: (asked.wait(TIMEOUT_S), transport.close())).start()
        with pytest.raises(DaemonUnavailable, match="closed"):
            transport.request({"op": "state"}, 20.0)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        GREETING[:10] + b"\x01" + GREETING[11:],
        GREETING.replace(b"NULL", b"OPEN"),
        GREETING + ready(b"ROUTER") + frame(b"", 1),
        GREETING + command(b"ERROR", b"\x00"),
        GREETING + ready(b"ROUTER") + b"\x02" + (2**40).to_bytes(8, "big"),
        GREETING + ready(b"ROUTER") + frame(b"no map"),
    ],
)
def test_another_server_than_zeusd_is_named(path: str, said: bytes) -> None:
    def talk(stream: socket.socket) -> None:
        exactly(stream, len(hello()))
        stream.sendall(said)
        while stream.recv(4096):
            pass

    with listening(path) as serve, transport_to(path) as transport:
        serve(talk)
        with pytest.raises(DaemonUnavailable, match="not zeusd"):
            transport.request({"op": "state"}, 20.0)


def test_replies_are_found_however_the_bytes_are_cut() -> None:
    bodies = [b"a", b"", b"b" * 255, b"c" * 256, b"d" * 70_000]
    said = GREETING + ready(b"ROUTER") + b"".join(map(frame, bodies))
    said += command(b"PING", b"\0\0") + frame(b"last")
    for size in (1, 7, 63, 64, 65, 4096, len(said)):
        replies, found = Replies(), []
        for at in range(0, len(said), size):
            found += replies.receive(said[at : at + size])
        assert found == [*bodies, b"last"]
    with pytest.raises(ProtocolError):
        Replies().receive(b"\0")


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, math.inf])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=f"timeout_s must .* not {timeout_s}"):
        Client("/nowhere", timeout_s=timeout_s)
    with pytest.raises(ValueError, match=f"stall_timeout_s must .* not {timeout_s}"):
        Client("/nowhere", stall_timeout_s=timeout_s)


def test_samples_come_until_what_publishes_has_ended(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zmq.Context() as context:
        with context.socket(zmq.XPUB) as publisher:
            publisher.bind(f"ipc://{path}")
            samples = ZmqSubscription(path, ["GPU-1"], 10)
            assert publisher.poll(int(1000 * TIMEOUT_S))
            assert publisher.recv() == b"\x01GPU-1"
            for topic, number in ((b"GPU-2", 1), (b"GPU-1", 2)):
                publisher.send_multipart([topic, encode({"number": number})])
            assert samples.receive(TIMEOUT_S) == {"number": 2}
            assert samples.receive(0) is None
            publisher.send_multipart([b"GPU-1", b"\xc1"])
            with pytest.raises(DaemonUnavailable, match="what publishes is not zeusd"):
                samples.receive(TIMEOUT_S)
    later = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + 6 * 10**9)
    assert samples.receive(0) is None
    monkeypatch.setattr(subscription, "time", later)
    with pytest.raises(DaemonUnavailable, match="no zeusd listens"):
        samples.receive(0)
    samples.close()
    with pytest.raises(DaemonUnavailable, match="this stream was closed"):
        samples.receive(0)

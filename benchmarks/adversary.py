"""Attacks zeusd as a user without permissions: one process, one attack.

    python benchmarks/adversary.py ATTACK SOCKET GPU [GPU ...]

`attack.py` starts it as another user. It speaks ZMTP through plain sockets, because libzmq refuses
to send most of this, and runs until it is killed. It reopens each connection that zeusd closes at
once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

import msgpack

MORE = 0x01
LONG = 0x02
COMMAND = 0x04
CHUNK = 64 * 1024
"""Bytes offered to a connection at a time."""
SUBUIDS = range(100_000, 100_158)
"""Users of the range that /etc/subuid gives to one user by default."""


@dataclass(frozen=True)
class Target:
    """The targets: the request socket, the stream, and the node's GPUs."""

    path: str
    gpus: list[str]

    @property
    def stream(self) -> str:
        return self.path + ".stream"


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: Its name in the table.
        run: The attack itself; it does not return.
        breaks_protocol: Whether it sends what no correct client sends, so that zeusd must close
            its connections and log its user.
        may_set: Whether its user may change GPUs.
        as_root: Whether it needs root to become several users.
    """

    name: str
    run: Callable[[Target], None]
    breaks_protocol: bool = False
    may_set: bool = False
    as_root: bool = False


# ------------------------------------------------------------------------------------------- ZMTP


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame: flags, size, body."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes([len(name)]) + name + body, COMMAND)


def handshake(kind: bytes = b"DEALER") -> bytes:
    """Greeting of ZMTP 3.1 with NULL security, and READY."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    socket_type = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return greeting + command(b"READY", socket_type)


def request(op: str, **arguments: object) -> bytes:
    """A request of zeusd's protocol as one frame."""
    return frame(msgpack.packb({"v": 1, "id": 1, "op": op, **arguments}))


def connected(path: str, first: bytes = b"") -> socket.socket:
    """A non-blocking connection that has sent `first`."""
    one = socket.socket(socket.AF_UNIX)
    one.setblocking(False)
    try:
        one.connect(path)
        if first:
            one.send(first)
    except OSError:
        one.close()
        raise
    return one


@dataclass
class Flood:
    """Connections that each send `data` repeatedly, as fast as zeusd reads.

    Attributes:
        path: The socket.
        count: Number of simultaneous connections.
        data: Sent after `first`; empty: nothing.
        first: Sent when a connection opens.
        reads: Whether it reads replies.
        rate: How often `data` is sent per second, over all connections; None: as often as possible.
        users: The user of each; None: this process's user.
    """

    path: str
    count: int
    data: bytes = b""
    first: bytes = field(default_factory=handshake)
    reads: bool = True
    rate: float | None = None
    users: Iterator[int] | None = None

    def run(self) -> None:
        """Attacks until the process is killed."""
        self._open: dict[int, tuple[socket.socket, int]] = {}
        self._poll = select.epoll()
        began, sent = time.monotonic(), 0
        while True:
            self._open_missing()
            for fd, events in self._poll.poll(0.005 if self.rate else 0.05, 256):
                if not self._serve(fd, events):
                    self._open.pop(fd)[0].close()
            if self.rate is not None:
                due = int((time.monotonic() - began) * self.rate) - sent
                for one, _ in list(self._open.values())[:due]:
                    with contextlib.suppress(OSError):
                        one.send(self.data)
                sent += max(0, due)

    def _open_missing(self) -> None:
        interest = select.EPOLLIN if self.reads else 0
        if self.data and self.rate is None:
            interest |= select.EPOLLOUT
        for _ in range(min(50, self.count - len(self._open))):
            try:
                if self.users is not None:
                    os.seteuid(0)
                    os.seteuid(next(self.users))
                one = connected(self.path, self.first)
            except OSError:
                return  # the backlog is full, or there are no descriptors left: later
            self._open[one.fileno()] = (one, 0)
            self._poll.register(one, interest)

    def _serve(self, fd: int, events: int) -> bool:
        """Reads and sends; returns whether the connection is still there."""
        one, position = self._open[fd]
        try:
            if events & select.EPOLLIN and not one.recv(CHUNK):
                return False
            if events & (select.EPOLLHUP | select.EPOLLERR):
                return False
            if events & select.EPOLLOUT:
                position += one.send(self.data[position : position + CHUNK])
                self._open[fd] = (one, position % len(self.data))
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True


# ---------------------------------------------------------------------------------------- attacks


def busy_loop(_: Target) -> None:
    while True:
        pass


def endless_more(count: int) -> Callable[[Target], None]:
    """Frames of a message that never ends."""
    return lambda target: Flood(target.path, count, frame(b"", MORE) * 32_768).run()


def many_parts(target: Target) -> None:
    message = frame(b"x", MORE) * 5_000 + frame(b"x")
    Flood(target.path, 10, message).run()


def subscribe_and_cancel(target: Target) -> None:
    """Topics that exist, in both forms of the protocol."""
    topics = [uuid.encode() for uuid in target.gpus]
    commands = b"".join(command(b"SUBSCRIBE", one) + command(b"CANCEL", one) for one in topics)
    messages = b"".join(frame(b"\x01" + one) + frame(b"\x00" + one) for one in topics)
    Flood(target.stream, 16, (commands + messages) * 500, handshake(b"SUB")).run()


def nonsense_topics(target: Target) -> None:
    data = b"".join(command(b"SUBSCRIBE", os.urandom(12)) for _ in range(3_000))
    Flood(target.stream, 4, data, handshake(b"SUB")).run()


def churn(target: Target) -> None:
    """Connects, asks, and leaves, as fast as one process can."""
    first = handshake() + request("heartbeat")
    while True:
        with contextlib.suppress(OSError):
            connected(target.path, first).close()


def slow_handshakes(target: Target) -> None:
    """The first ten bytes of a greeting, and nothing after them."""
    Flood(target.path, 1_000, first=handshake()[:10]).run()


def large_frames(target: Target) -> None:
    Flood(target.path, 10, frame(bytes(10 << 20))).run()


def garbage(target: Target) -> None:
    """Random bytes instead of a greeting."""
    Flood(target.path, 50, os.urandom(CHUNK), first=b"").run()


def garbage_requests(target: Target) -> None:
    """Frames as they should be, with random bytes in them."""
    Flood(target.path, 16, b"".join(frame(os.urandom(200)) for _ in range(200))).run()


def never_reads(target: Target) -> None:
    data = request("state", gpus=target.gpus) * 300
    Flood(target.path, 16, data, reads=False).run()


def reads(rate: float | None) -> Callable[[Target], None]:
    """Valid reads of all GPUs."""

    def run(target: Target) -> None:
        one = request("state", gpus=target.gpus)
        Flood(target.path, 16, one if rate else one * 200, rate=rate).run()

    return run


def look_ups(target: Target) -> None:
    """Valid requests for the energy of many windows of all GPUs."""
    now_ns = time.monotonic_ns()
    windows = [now_ns - 2_000_000_000, now_ns - 1_000_000_000, 0] * (256 // len(target.gpus))
    Flood(target.path, 16, request("windows", sources=target.gpus, windows=windows) * 50).run()


def heartbeats(target: Target) -> None:
    Flood(target.path, 16, request("heartbeat") * 1_000).run()


def pings(target: Target) -> None:
    Flood(target.path, 16, command(b"PING", b"\0\0" + b"c" * 16) * 1_000).run()


def acquire_and_release(target: Target) -> None:
    """A permitted user, on the last GPU: each pair is journalled twice."""
    mine = {"gpus": target.gpus[-1:], "controls": ["power_limit"]}
    pair = request("acquire", **mine) + request("release", **mine)
    Flood(target.path, 1, pair, rate=750).run()


def idle_connections(target: Target) -> None:
    Flood(target.path, 10_000).run()


def many_users(target: Target) -> None:
    """Each of 158 subordinate users floods zeusd: this multiplies limits that count only by uid."""
    data = request("state", gpus=target.gpus) * 100
    Flood(target.path, 4 * len(SUBUIDS), data, users=cycle(SUBUIDS)).run()


def silent_subscribers(target: Target) -> None:
    """Subscribe to everything and never read."""
    topics = b"".join(command(b"SUBSCRIBE", uuid.encode()) for uuid in target.gpus)
    Flood(target.stream, 100, first=handshake(b"SUB") + topics, reads=False).run()


def lingering(seconds: int) -> tuple[socket.socket, socket.socket]:
    """A TCP socket that sleeps when its last reference is dropped, since its data is unsent.

    Returns:
        The socket, and its peer, which must stay open and never read.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        one = socket.create_connection(listener.getsockname())
        peer, _ = listener.accept()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(bytes(CHUNK))
    return one, peer


def descriptors(target: Target) -> None:
    """Descriptors in messages: a process that drops them sleeps for as long as the sender chose."""
    peers: deque[socket.socket] = deque(maxlen=2_000)
    while True:
        pairs = [lingering(5) for _ in range(10)]
        peers.extend(peer for _, peer in pairs)
        sent = [one for one, _ in pairs]
        try:
            with connected(target.path, handshake()) as one:
                socket.send_fds(one, [request("heartbeat")], [each.fileno() for each in sent])
                time.sleep(0.05)
        except OSError:  # refused by the kernel on behalf of zeusd: the last reference is ours
            at_once = struct.pack("ii", 1, 0)
            for each in sent:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            time.sleep(0.01)
        for each in sent:
            each.close()


def audits(target: Target) -> None:
    """Valid requests for the audit log."""
    Flood(target.path, 16, request("audit") * 200).run()


def usages(target: Target) -> None:
    """Valid queries of the ledger, over years and by job."""
    edges = [0, (int(time.time()) // 900 + 1) * 900]
    Flood(target.path, 16, request("usage", edges=edges, by="job") * 200).run()


def nested(target: Target) -> None:
    """Requests with a field that is nested nearly as deep as MessagePack allows."""
    bodies = [
        b"\x83\xa1v\x01\xa2id\x07\xa2op" + b"\x91" * depth + b"\xc0" for depth in range(980, 1023)
    ]
    Flood(target.path, 16, b"".join(map(frame, bodies))).run()


def dead_flooders(target: Target) -> None:
    """Processes that fill their sockets with costly requests, and exit at once."""
    data = handshake() + request("audit") * 10_000
    while True:
        pid = os.fork()
        if pid == 0:
            held: list[socket.socket] = []
            with contextlib.suppress(OSError):
                held.extend(connected(target.path, data) for _ in range(16))
            os._exit(0)
        os.waitpid(pid, 0)
        time.sleep(0.1)


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("a busy loop", busy_loop),
        Attack("endless MORE, 1 connection", endless_more(1), breaks_protocol=True),
        Attack("endless MORE, 100 connections", endless_more(100), breaks_protocol=True),
        Attack("5,001 parts, 10 connections", many_parts, breaks_protocol=True),
        Attack("subscribe and cancel", subscribe_and_cancel),
        Attack("nonsense topics", nonsense_topics),
        Attack("connection churn", churn),
        Attack("1,000 slow handshakes", slow_handshakes, breaks_protocol=True),
        Attack("frames of 10 MiB", large_frames, breaks_protocol=True),
        Attack("garbage", garbage, breaks_protocol=True),
        Attack("garbage in frames", garbage_requests),
        Attack("never reads", never_reads),
        Attack("480 reads/s", reads(480)),
        Attack("reads without end", reads(None)),
        Attack("look-ups without end", look_ups),
        Attack("heartbeats without end", heartbeats),
        Attack("PINGs without end", pings),
        Attack("1,500 acquire/release a second", acquire_and_release, may_set=True),
        Attack("10,000 idle connections", idle_connections),
        Attack("audit log without end", audits),
        Attack("usage without end", usages),
        Attack("requests nested 1,000 deep", nested),
        Attack("flooders that die at once", dead_flooders),
        Attack("158 subuids", many_users, as_root=True),
        Attack("100 subscribers that never read", silent_subscribers),
        Attack("lingering descriptors", descriptors),
    )
}


def main() -> None:
    """Attacks until killed."""
    name, path, *gpus = sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print("ready", flush=True)
    ATTACKS[name].run(Target(path, gpus))


if __name__ == "__main__":
    main()

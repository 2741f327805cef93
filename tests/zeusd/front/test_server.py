"""The front's own rules, with libzmq's part played by hand."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from zeusd.front.server import Front
from zeusd.runtime import link


class Frame:
    """A message as libzmq hands it over: with what it noted of the connection it came on."""

    def __init__(self, address: str, fd: int) -> None:
        self._properties = {"Peer-Address": address, zmq.SRCFD: fd, "Identity": ""}

    def get(self, name: object) -> object:
        return self._properties[name]


@pytest.fixture
def front(tmp_path: Path) -> Iterator[tuple[Front, link.Receiver, socket.socket]]:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        ring_end, front_end = link.pair()
        stack.enter_context(ring_end)
        front = Front(listening.detach(), front_end)
        stack.callback(front.close)
        client, server = socket.socketpair(socket.AF_UNIX)
        stack.enter_context(client)
        stack.enter_context(server)
        yield front, link.Receiver(ring_end), server


def test_a_connection_that_cannot_be_looked_at_for_want_of_descriptors_ends(
    front: tuple[Front, link.Receiver, socket.socket],
) -> None:
    """Whose request nobody could answer is not left waiting: its client connects and asks again."""
    server, *_ = front
    client, ours = socket.socketpair(socket.AF_UNIX)
    raw = ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("3i", raw)
    frame = Frame(f"localhost:{uid}:{gid}:{pid}", ours.fileno())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with client, ours:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert server._identify(b"other", frame) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.settimeout(10)
        assert client.recv(1) == b""
        assert os.fstat(ours.fileno()), "the descriptor is libzmq's to close"


def test_a_message_counts_for_the_connection_it_came_on_and_for_no_other(
    front: tuple[Front, link.Receiver, socket.socket],
) -> None:
    """A descriptor may have become another peer's between a message and its being read."""
    server, receiver, stream = front
    raw = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, gid = struct.unpack("3i", raw)
    for address in (f"localhost:{uid}:{gid}:{pid + 1}", f"localhost:{uid + 1}:{gid}:{pid}", ""):
        assert server._identify(b"other", Frame(address, stream.fileno())) is None
        with pytest.raises(BlockingIOError):
            receiver.receive()
    true = Frame(f"localhost:{uid}:{gid}:{pid}", stream.fileno())
    connection = server._identify(b"true", true)
    assert connection is not None
    assert connection.uid == os.getuid()
    message = receiver.receive()
    assert message is not None
    assert message[0] == link.OPEN
    assert message[3] is not None
    os.close(message[3])

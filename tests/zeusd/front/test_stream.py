"""Who is subscribed to what, with a real subscriber."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from zeusd.front.admission import Admission
from zeusd.front.stream import Stream


def test_who_comes_in_the_middle_of_a_look_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted after the look at who is there, and subscribed before the one at who wants what."""
    path = str(tmp_path / "s")
    told: list[list[str]] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.socket(socket.AF_UNIX) as listening, context.socket(zmq.SUB) as subscriber:
        listening.bind(path)
        listening.listen()
        listening.setblocking(False)
        stream = Stream(context, listening.fileno(), Admission(8), told.append)
        stream.offer(["GPU-x"])
        subscriber.subscribe(b"GPU-x")

        @contextlib.contextmanager
        def meanwhile() -> Iterator[None]:
            subscriber.connect(f"ipc://{path}")
            assert stream._socket.poll(10_000), "the subscription has come"
            yield

        monkeypatch.setattr(stream._guard, "watching", meanwhile)
        stream.serve()
        assert told == [["GPU-x"]]
        stream.publish(b"GPU-x", b"sample")
        assert subscriber.poll(10_000)
        stream.close()
    context.destroy(linger=0)

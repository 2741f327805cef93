"""Samples from a daemon, over libzmq."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq

from zeus_ipc.codec import decode_reply
from zeus_ipc.diagnosis import diagnose
from zeus_ipc.errors import DaemonUnavailable
from zeus_ipc.overriding import override
from zeus_ipc.parsing import Malformed
from zeus_ipc.transport import Subscription


class ZmqSubscription(Subscription):
    """Samples from a daemon's XPUB socket. It survives the daemon's restarts.

    Args:
        path: The socket.
        names: Topics.
        buffer: See `Transport.subscribe`.
    """

    def __init__(self, path: str, names: Sequence[str], buffer: int) -> None:
        diagnose(path)
        self._path = path
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._sub = self._context.socket(zmq.SUB)
        # Short, since each attempt is a chance where others connect without end and fill the queue.
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, buffer),
            (zmq.RECONNECT_IVL, 10),
            (zmq.RECONNECT_IVL_MAX, 40),
        ):
            self._sub.setsockopt(option, value)
        for name in names:
            self._sub.setsockopt(zmq.SUBSCRIBE, name.encode())
        self._sub.connect(f"ipc://{path}")
        self._heard_ns = time.monotonic_ns()

    @override
    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            if not self._sub.poll(max(0, round(timeout_s * 1000))):
                # A daemon that publishes nothing for this long is looked for.
                if time.monotonic_ns() - self._heard_ns > 5_000_000_000:
                    diagnose(self._path)
                return None
            _, payload = self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.ZMQError:
            raise DaemonUnavailable("this stream was closed; open a new one") from None
        self._heard_ns = time.monotonic_ns()
        try:
            return decode_reply(payload)
        except Malformed as error:
            raise DaemonUnavailable(
                f"what publishes is not zeusd ({error}); check the socket's path"
            ) from None

    @override
    def close(self) -> None:
        self._context.destroy(linger=0)

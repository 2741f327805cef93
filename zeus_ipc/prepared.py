"""Clock changes that are sent repeatedly, encoded once: for loops in which microseconds count."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from zeus_ipc.client import Client
from zeus_ipc.codec import encode
from zeus_ipc.connection import WITHOUT_WAITING, Connection
from zeus_ipc.controls import Control
from zeus_ipc.operations import HEARTBEAT, SET
from zeus_ipc.socket_transport import SocketTransport
from zeus_ipc.zmtp import frame

VALID_NS = 5_000_000_000
"""zeusd drops a set that it reads later than this after `PreparedClocks.renew`: newer ones have
followed."""


def sibling(client: Client, stall_timeout_s: float | None = None) -> Client:
    """Creates a client of the same node with its own connection, heartbeats and failed sets. If the
    node's engine is in this process, the client shares it.
    """
    transport = client._transport
    if isinstance(transport, SocketTransport):
        return Client(transport.path, stall_timeout_s=stall_timeout_s)
    return Client(transport=transport, heartbeat=False)


def close_sibling(client: Client) -> None:
    """Closes a client that `sibling` created; a shared engine keeps running. Never raises."""
    if isinstance(client._transport, SocketTransport):
        client.close()


def holds(client: Client, gpu: str, control: str) -> bool:
    """Whether this process still holds a lease that it acquired; also a heartbeat.

    Raises:
        DeferredSetFailed: A set that nobody waited for has failed since the last call.
        ZeusIpcError: zeusd does not answer.
    """
    return [gpu, control] not in client._ask(HEARTBEAT).lost


class PreparedClocks:
    """Locks one GPU's graphics clock without waiting. Needs a lease from `Client.acquire`. If a set
    fails, a later call of the client that waits raises `DeferredSetFailed`.

    Args:
        client: A `sibling`. Its connection is used.
        gpu: UUID.
    """

    def __init__(self, client: Client, gpu: str) -> None:
        self._client = client
        self._gpu = gpu
        self._guard = threading.Lock()
        self._clocks: dict[int, int] = {}
        self._frames: dict[int, bytes] = {}
        transport = client._transport
        self._transport = transport if isinstance(transport, SocketTransport) else None
        self._line: Connection | None = None

    def prepare(self, clocks: Mapping[int, int]) -> None:
        """Encodes the requests.

        Args:
            clocks: The clock, MHz, for each argument of `lock`.
        """
        with self._guard:
            self._clocks.update(clocks)
            self._encode()

    def renew(self) -> None:
        """Sets a new deadline for all prepared requests, and connects again after a loss of the
        connection. Call it before the first `lock`, and then more often than `VALID_NS`.

        Raises:
            DaemonUnavailable: zeusd cannot be reached, or the client was closed.
        """
        if self._transport is not None:
            timeout_s = self._client._timeout_s
            until_ns = time.monotonic_ns() + int(timeout_s * 1e9)
            self._line = self._transport.line(until_ns, timeout_s)
        with self._guard:
            self._encode()

    def lock(self, clock: int) -> bool:
        """Locks the clock with one system call. This is the cost per instruction, with cold
        processor caches; so it does nothing else.

        Args:
            clock: As in `prepare`.

        Returns:
            Whether it was sent; if not, nothing can be sent at the moment.

        Raises:
            KeyError: The clock was not prepared.
            ZeusIpcError: The client was closed, or this is a child of fork.
        """
        line = self._line
        if self._transport is None:
            mhz = self._clocks[clock]
            self._client.set_gpu_clocks(self._gpu, mhz, mhz, block=False)
            return True
        if line is None:
            return False
        try:
            line.push(self._frames[clock], WITHOUT_WAITING)
        except BlockingIOError:
            return False
        except OSError:
            self._transport.lost(line)
            self._line = None
            return False
        line.sent += 1
        return True

    def _encode(self) -> None:
        if self._transport is not None:
            self._frames = {clock: self._frame(mhz) for clock, mhz in self._clocks.items()}

    def _frame(self, mhz: int) -> bytes:
        what = {"gpus": [self._gpu], "block": False, "control": Control.GPU_CLOCKS.value}
        message = self._client._message(SET, {**what, "value": [mhz, mhz]})
        message.update(id=0, deadline_ns=time.monotonic_ns() + VALID_NS)
        return frame(encode(message))

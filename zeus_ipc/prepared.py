"""Sets of clocks that are sent again and again, encoded once: for loops that count microseconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from zeus_ipc.client import Client
from zeus_ipc.codec import encode
from zeus_ipc.connection import WITHOUT_WAITING
from zeus_ipc.operations import HEARTBEAT, SET_GPU_CLOCKS
from zeus_ipc.transport import SocketTransport
from zeus_ipc.zmtp import frame

VALID_NS = 5_000_000_000
"""A set that zeusd comes to later than this after `PreparedClocks.renew` is not applied any more:
others have followed."""


def sibling(client: Client, stall_timeout_s: float | None = None) -> Client:
    """A client of the same node with a connection, heartbeats and failed sets of its own.

    Where the node is in this process there is one engine, and the client shares it.
    """
    transport = client._transport
    if isinstance(transport, SocketTransport):
        return Client(transport.path, stall_timeout_s=stall_timeout_s)
    return Client(transport=transport, heartbeat=False)


def close_sibling(client: Client) -> None:
    """Ends what `sibling` made; an engine that it shares goes on. Never raises."""
    if isinstance(client._transport, SocketTransport):
        client.close()


def holds(client: Client, gpu: str, control: str) -> bool:
    """Whether this process still holds a lease that it took; also a heartbeat.

    Raises:
        DeferredSetFailed: A set that nobody waited for has failed since the last call.
        ZeusIpcError: zeusd cannot be asked.
    """
    return [gpu, control] not in client._ask(HEARTBEAT).lost


class PreparedClocks:
    """Locks one GPU's graphics clock without waiting for anything.

    What is sent this way takes a lease only if `Client.acquire` took it before. A failure is raised
    as `DeferredSetFailed` by a later call of the client that waits.

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
        self._line = transport.connection() if isinstance(transport, SocketTransport) else None

    def prepare(self, clocks: Mapping[int, int]) -> None:
        """Encodes what locks the clock.

        Args:
            clocks: What `lock` is called with, and the clock that this means, MHz.
        """
        with self._guard:
            self._clocks.update(clocks)
            self._encode()

    def renew(self) -> None:
        """Gives all that was prepared another deadline. Call it more often than `VALID_NS`."""
        with self._guard:
            self._encode()

    def lock(self, clock: int) -> bool:
        """Locks the clock: one system call. What is called here is what an instruction costs, after
        a pause in which its code has left the processor's caches; so it does no more than that.

        Args:
            clock: As in `prepare`.

        Returns:
            Whether it was sent; if not, nothing can be sent at the moment.

        Raises:
            KeyError: This clock was not prepared.
            ZeusIpcError: The client was closed, or this is a child of fork.
        """
        line = self._line
        if line is None:
            mhz = self._clocks[clock]
            self._client.set_gpu_clocks(self._gpu, mhz, mhz, block=False)
            return True
        push = line.push
        try:
            push(self._frames[clock], WITHOUT_WAITING)
        except BlockingIOError:
            return False
        except OSError:
            line.lost(push)
            return False
        return True

    def _encode(self) -> None:
        if self._line is not None:
            self._frames = {clock: self._frame(mhz) for clock, mhz in self._clocks.items()}

    def _frame(self, mhz: int) -> bytes:
        message = self._client._message(SET_GPU_CLOCKS, {"gpus": [self._gpu], "block": False})
        deadline_ns = time.monotonic_ns() + VALID_NS
        message.update(min_mhz=mhz, max_mhz=mhz, id=0, deadline_ns=deadline_ns)
        return frame(encode(message))

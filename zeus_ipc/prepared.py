"""Sets of clocks that are sent again and again, encoded once: for loops that count microseconds."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import partial

import zmq

from zeus_ipc.client import Client
from zeus_ipc.codec import encode
from zeus_ipc.errors import DaemonUnavailable
from zeus_ipc.transport import ZmqTransport

VALID_NS = 2_000_000_000
"""A set that zeusd comes to later than this is not applied any more: others have followed."""

_NO_DEADLINE = 2**62  # as long as any deadline, encoded
_DEADLINE = struct.Struct(">Q")


def sibling(client: Client, stall_timeout_s: float | None = None) -> Client:
    """A client of the same node with a connection, heartbeats and failed sets of its own.

    Where the node is in this process there is one engine, and the client shares it.
    """
    transport = client._transport
    if isinstance(transport, ZmqTransport):
        return Client(transport._path, stall_timeout_s=stall_timeout_s)
    return Client(transport=transport, heartbeat=False)


def let_go(client: Client) -> None:
    """Ends what `sibling` made; an engine that it shares goes on. Never raises."""
    if isinstance(client._transport, ZmqTransport):
        client.close()


def holds(client: Client, gpu: str, control: str) -> bool:
    """Whether this process still holds a lease that it took; also a heartbeat.

    Raises:
        DeferredSetFailed: A set that nobody waited for has failed since the last call.
        ZeusIpcError: zeusd cannot be asked.
    """
    answer = client._ask("heartbeat")
    return [gpu, control] not in [list(lost) for lost in answer["lost"]]


class PreparedClocks:
    """Locks one GPU's graphics clock without waiting for anything.

    What is sent this way takes a lease only if `Client.acquire` took it before. A failure is raised
    as `DeferredSetFailed` by a later call of the client that waits.

    Args:
        client: Its connection is used.
        gpu: UUID.
    """

    def __init__(self, client: Client, gpu: str) -> None:
        self._client = client
        self._gpu = gpu
        transport = client._transport
        self._zmq = transport if isinstance(transport, ZmqTransport) else None

    def prepare(self, mhz: int) -> Callable[[], bool]:
        """Encodes what locks the clock to this, and returns what sends it.

        The call returns False where nothing can be sent at the moment. It raises ZeusIpcError where
        there is no connection, and none can be made.
        """
        transport = self._zmq
        if transport is None:
            return partial(self._through_client, mhz)
        message = self._client._message("set_gpu_clocks", {"gpus": [self._gpu], "block": False})
        message.update(min_mhz=mhz, max_mhz=mhz, id=0, deadline_ns=_NO_DEADLINE)
        data = bytearray(encode(message))
        at = data.index(_DEADLINE.pack(_NO_DEADLINE))
        connection = transport._connection or transport._connect()
        lock, send, patch = connection.lock, connection.dealer.send, _DEADLINE.pack_into
        now_ns, nowait = time.monotonic_ns, zmq.NOBLOCK

        def lock_clock() -> bool:
            if transport._connection is not connection:  # closed, or a child of fork
                raise DaemonUnavailable("this connection was closed; make a new client")
            try:
                with lock:
                    patch(data, at, now_ns() + VALID_NS)
                    send(data, nowait)
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                raise DaemonUnavailable(f"the connection was closed ({error})") from None
            return True

        return lock_clock

    def _through_client(self, mhz: int) -> bool:
        self._client.set_gpu_clocks(self._gpu, mhz, mhz, block=False)
        return True

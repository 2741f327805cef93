"""Receives messages of recorders in engines: a socket and its connections."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable

from zeus.serving.wire import DEFAULT_SOCKET, MOST_BYTES, EngineStep, Message, Unpacker
from zeus_common.processes import UnixListener
from zeus_ipc.errors import RequestRejected

log = logging.getLogger(__name__)

MOST_ENGINES = 64
"""Most processes that may be connected."""
MOST_AT_ONCE = 10_000
"""Packets read from one of them before the next one's turn: more than its buffer holds."""


class Receiver:
    """Listens for engines.

    It does not wait for messages: each one would wake the waiting thread, at the expense of the
    engine. Sleep, and then `receive` all messages that arrived.

    Args:
        path: Socket to listen on; replaces one that was left behind.
        take: Called with each message; returns whether it was for this receiver.

    Attributes:
        rejected: Messages that were invalid or for another receiver.

    Raises:
        OSError: The socket cannot be listened on, or another process does.
        ValueError: The path is not absolute: engines have other working directories.
    """

    def __init__(self, path: str, take: Callable[[Message], bool]) -> None:
        if not path.startswith("/"):
            raise ValueError(
                f"{path!r} is not the absolute path of a socket, such as {DEFAULT_SOCKET}"
            )
        self._take = take
        self.rejected = 0
        self._warned: set[str] = set()
        self._senders: dict[str, socket.socket] = {}
        self._engines: dict[socket.socket, Unpacker] = {}
        try:
            self._listener = UnixListener(path, socket.SOCK_SEQPACKET, 0o660, MOST_ENGINES)
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), path) from None
        log.info("waiting for steps of an engine on %s", path)

    def receive(self) -> None:
        """Handles all messages that arrived."""
        with contextlib.suppress(BlockingIOError):
            while len(self._engines) < MOST_ENGINES:
                connection, _ = self._listener.socket.accept()
                connection.setblocking(False)
                self._engines[connection] = Unpacker()
                log.info("an engine's process is connected")
        for connection, unpack in list(self._engines.items()):
            if not self._drained(connection, unpack):
                connection.close()
                del self._engines[connection]
                self._senders = {n: one for n, one in self._senders.items() if one != connection}

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()
        for one in self._engines:
            one.close()

    def _drained(self, connection: socket.socket, unpack: Unpacker) -> bool:
        """Handles the messages of one engine; returns whether it is still connected."""
        for _ in range(MOST_AT_ONCE):
            try:
                data = connection.recv(MOST_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            try:
                messages = unpack(data)
            except RequestRejected as error:
                self._reject(error.message)
                continue
            for message in messages:
                fault = self._fault(message, connection)
                if fault:
                    self._reject(fault)
                else:
                    self.rejected += not self._take(message)
        return True

    def _reject(self, fault: str) -> None:
        self.rejected += 1
        if fault not in self._warned and len(self._warned) < MOST_ENGINES:
            self._warned.add(fault)
            log.warning("%s", fault)

    def _fault(self, message: Message, connection: socket.socket) -> str:
        """Why a step would spoil the others; empty: it would not."""
        if not isinstance(message, EngineStep):
            return ""
        if message.end_ns > time.monotonic_ns():
            return (
                "steps that end in the future are ignored; their times must be of CLOCK_MONOTONIC "
                "(time.monotonic_ns)"
            )
        if len(self._senders) < MOST_ENGINES:
            self._senders.setdefault(message.engine, connection)
        if self._senders.get(message.engine, connection) is connection:
            return ""
        return (
            f"steps of a second engine {message.engine!r} are ignored; give each engine its own "
            "socket (ZEUS_SERVING_SOCKET)"
        )

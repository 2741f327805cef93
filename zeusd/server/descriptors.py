"""Prevents descriptors that a peer sends from blocking the loop.

A process that drops the last reference to a lingering TCP socket sleeps in the kernel for as long
as its sender chose, and a message on a Unix socket may carry such sockets (SCM_RIGHTS). From Linux
6.16 on a socket can refuse them (SO_PASSRIGHTS). Before that, zeusd finds them by peeking, so that
reading never drops one, and closes connections that may hold some on a separate thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable

SO_PASSRIGHTS = 83


class DescriptorsSent(Exception):
    """The peer sent descriptors."""


def refuse(listening: socket.socket) -> None:
    """Makes new connections refuse descriptors, if the kernel supports it."""
    try:
        listening.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
    except OSError:
        return


def may_carry(connection: socket.socket) -> bool:
    """Whether the peer can send descriptors on a connection."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS) != 0
    except OSError:
        return True


def receive_guarded(connection: socket.socket, size: int) -> bytes:
    """Like `recv` without waiting, for a connection that may carry descriptors.

    Raises:
        BlockingIOError: There is no data.
        DescriptorsSent: The data come with descriptors, and are left unread.
    """
    flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
    data, _, received, _ = connection.recvmsg(size, 0, flags)
    if received & socket.MSG_CTRUNC:
        raise DescriptorsSent
    # Reads the same bytes: later ones come after them.
    return connection.recv(len(data), socket.MSG_DONTWAIT) if data else data


class Closer:
    """Closes connections on a separate thread, so that only this thread sleeps in a close.

    Signals end such a sleep, one for each descriptor. `prepare` sets their handler.
    """

    def __init__(self, closed: Callable[[object], None]) -> None:
        self._closed = closed
        self._queue: queue.Queue[tuple[socket.socket, object] | None] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._active = threading.Event()
        self._count = 0
        self._stopped = False

    @staticmethod
    def prepare() -> None:
        """Makes the signal interrupt calls instead of being ignored. Only on the main thread."""
        signal.signal(signal.SIGURG, lambda *_: None)

    @property
    def backlog(self) -> int:
        """Number of connections that wait to be closed."""
        return self._queue.qsize()

    def close(self, connection: socket.socket, token: object = None) -> None:
        """Queues a connection to be closed. Its peer sees the end at once."""
        if not self._threads:
            for run in (self._run, self._watch):
                thread = threading.Thread(target=run, name="closer", daemon=True)
                self._threads.append(thread)
                thread.start()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        self._queue.put((connection, token))

    def stop(self) -> None:
        """Stops the threads after closing what was queued before. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            connection, token = item
            self._active.set()
            with contextlib.suppress(OSError):  # interrupted: it is closed anyway
                os.close(connection.detach())
            self._active.clear()
            self._count += 1
            self._closed(token)
        self._stopped = True
        self._active.set()

    def _watch(self) -> None:
        closing = self._threads[0].ident
        assert closing is not None
        while not self._stopped:
            self._active.wait()
            count = self._count
            # A close that takes longer is sleeping; a signal ends the wait for one descriptor.
            time.sleep(0.02)
            while self._count == count and self._active.is_set() and not self._stopped:
                signal.pthread_kill(closing, signal.SIGURG)
                time.sleep(0.0005)

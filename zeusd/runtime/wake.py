"""Wakes a waiting thread."""

from __future__ import annotations

import os
import threading


class Wake:
    """An eventfd(2) that any thread may signal and one thread waits for.

    Unlike Python's locks and queues it releases the interpreter lock while it wakes. If both
    threads share a core, the woken one would otherwise only wait for that lock.

    Args:
        flags: Additional flags of eventfd, such as `os.EFD_SEMAPHORE`.

    Attributes:
        fd: The descriptor, to wait for; -1: closed.
    """

    def __init__(self, flags: int = 0) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | flags)
        self._open = threading.RLock()  # a signal handler may interrupt a signal of its own thread

    def signal(self) -> None:
        """Wakes the thread. Safe from signal handlers; does nothing after `close`."""
        # By then its number must not belong to another file.
        with self._open:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def wait(self) -> None:
        """Waits for a signal and consumes all signals, or one with EFD_SEMAPHORE."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        """Closes the descriptor. No thread may be waiting."""
        with self._open:
            fd, self.fd = self.fd, -1
        os.close(fd)

"""Wakes a thread that waits."""

from __future__ import annotations

import os
import threading


class Wake:
    """An eventfd(2) that any thread may signal, and one waits for.

    Unlike a lock or a queue of Python's it releases the interpreter while it wakes: on a core
    that both share, who is woken would otherwise only wait for the interpreter.

    Args:
        flags: More of eventfd's, such as `os.EFD_SEMAPHORE`.

    Attributes:
        fd: The descriptor, to wait for; -1: closed.
    """

    def __init__(self, flags: int = 0) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | flags)
        self._open = threading.RLock()  # a signal handler may signal while its thread does

    def signal(self) -> None:
        """Wakes. Also safe from signal handlers, and after `close`, when it does nothing."""
        # Its number must not be another file's by then.
        with self._open:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def wait(self) -> None:
        """Waits for a signal and takes it: all there are, or one with EFD_SEMAPHORE."""
        os.eventfd_read(self.fd)

    def close(self) -> None:
        """Frees the descriptor. Nobody may wait by then."""
        with self._open:
            fd, self.fd = self.fd, -1
        os.close(fd)

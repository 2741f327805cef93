"""Watches this process's memory while libzmq reads what it cannot be kept from reading."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

LOOK_S = 0.002
GROWTH_BYTES = 16 * 1024 * 1024
"""So much more memory at once is a flood."""

_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemoryGuard:
    """Calls for help when memory grows during a call that does not return.

    Args:
        on_growth: Called on the guard's thread, as often as memory grows by `GROWTH_BYTES`.
    """

    def __init__(self, on_growth: Callable[[], None]) -> None:
        self._on_growth = on_growth
        self._active = threading.Event()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        threading.Thread(target=self._run, name="memory-guard", daemon=True).start()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches for as long as the block takes. Calls in it must let go of the GIL."""
        self._active.set()
        try:
            yield
        finally:
            self._active.clear()

    def _run(self) -> None:
        while True:
            self._active.wait()
            before = self._resident()
            while self._active.is_set():
                time.sleep(LOOK_S)
                now = self._resident()
                if now - before > GROWTH_BYTES:
                    before = now
                    self._on_growth()

    def _resident(self) -> int:
        return int(os.pread(self._statm, 128, 0).split()[1]) * _PAGE

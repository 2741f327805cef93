"""The thread that sends heartbeats to zeusd. It is a plain Python thread on purpose: if the process
is stopped, or C code keeps the GIL, it stops like the application, and the leases expire. A
library's I/O thread would keep answering.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import HeartbeatResult

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a heartbeat that did not reach zeusd."""


class HeartbeatThread:
    """Sends heartbeats once there is a lease, five within each TTL.

    Args:
        beat: Sends one and returns `replies.HeartbeatResult`; a bound method, kept weakly, so that
            the thread ends when its client is deleted.
        stall_timeout_s: Stops if `progress` was not called for this long; None: never.

    Attributes:
        lost: How often this process lost leases, as zeusd says: they expired, were revoked, or
            ended when it was stopped. Fewer leases than before are no sign: any thread and any
            client of the process may have released them.
    """

    def __init__(self, beat: Callable[[], HeartbeatResult], stall_timeout_s: float | None) -> None:
        self._beat = weakref.WeakMethod(beat)
        self._stall_timeout_s = stall_timeout_s
        self._progress_at = time.monotonic()
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._pid: int | None = None
        self._reported: set[tuple[str, str]] = set()
        self.lost = 0

    def start(self) -> None:
        """Starts, unless it already runs in this process."""
        pid = os.getpid()
        if self._pid == pid:
            return
        with self._guard:
            if self._pid == pid:
                return
            self._pid = pid
            self._stop = threading.Event()
            self._progress_at = time.monotonic()
            threading.Thread(
                target=self._run, args=(self._stop,), name="zeus-heartbeat", daemon=True
            ).start()

    def stop(self) -> None:
        """Stops the thread."""
        self._stop.set()

    def progress(self) -> None:
        """Notes progress of the application."""
        self._progress_at = time.monotonic()

    def after_fork(self) -> None:
        """Resets a child of fork: the thread is only in its parent."""
        self._guard = threading.Lock()
        self._pid = None

    def _run(self, stop: threading.Event) -> None:
        pause_s = 0.0
        while not stop.wait(pause_s):
            limit_s = self._stall_timeout_s
            if limit_s is not None and time.monotonic() - self._progress_at > limit_s:
                pause_s = min(RETRY_S, limit_s / 3)
                continue
            beat = self._beat()
            if beat is None:
                return
            try:
                result = beat()
                pause_s = max(0.05, result.ttl_ms / 5000)
                self._tell_lost({(gpu, control) for gpu, control in result.lost})
            except ZeusIpcError as error:
                log.debug("heartbeat failed: %s", error)
                pause_s = RETRY_S
            del beat

    def _tell_lost(self, lost: set[tuple[str, str]]) -> None:
        unreported = lost - self._reported
        self.lost += bool(unreported)
        for gpu, control in unreported:
            log.warning(
                "this process lost its lease on %s of %s, and zeusd restores the control; "
                "acquire it again to set it (`zeusctl audit` says why)",
                control,
                gpu,
            )
        self._reported = lost

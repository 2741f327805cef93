"""zeusd's event loop, and what wakes a waiting thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

log = logging.getLogger(__name__)

Callback: TypeAlias = Callable[[], None]


class Wake:
    """An eventfd(2) that any thread may signal and one thread waits for.

    Unlike Python's locks and queues it releases the interpreter lock while it wakes. If both
    threads share a core, the woken one would otherwise only wait for that lock.

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


# Not asyncio: nothing here awaits. Callbacks run to their end, in an order that `server.fairness`
# decides by what it reads; a stream of asyncio reads what a client sends before anyone has decided.
# Of the loop itself, readers and timers would be left, which are these few functions.
class Reactor:
    """Waits for file descriptors, calls posted by other threads, and timers."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callback] = deque()
        self._posted: deque[Callback] = deque()
        self._waiting = False
        self._timers: list[tuple[int, int, Callback]] = []
        self._timer_numbers = itertools.count()
        self._wake = Wake()
        # Each signal is reported once, whether it is read or not, and needs no handler.
        self._epoll.register(self._wake.fd, select.EPOLLIN | select.EPOLLET)
        self._running = False

    def add(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Calls `callback` with epoll's events for `fd` until it is removed."""
        self._epoll.register(fd, events)
        self._handlers[fd] = callback

    def modify(self, fd: int, events: int) -> None:
        """Changes the events of a descriptor that was added; ignored if it was removed."""
        if fd in self._handlers:
            with contextlib.suppress(OSError):
                self._epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        """Removes `fd`. Call it before closing the descriptor."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def add_reader(self, fd: int, callback: Callback) -> None:
        """Calls `callback` whenever `fd` is readable until it is removed."""
        self.add(fd, select.EPOLLIN, lambda _: callback())

    def call_soon(self, callback: Callback) -> None:
        """Calls `callback` once all events pending now were handled. Only from the loop's
        thread."""
        self._soon.append(callback)

    def post(self, callback: Callback) -> None:
        """Makes the loop call `callback`. Safe from any thread and from signal handlers."""
        self._posted.append(callback)
        if self._waiting:
            self._wake.signal()

    def call_later(self, delay_s: float, callback: Callback) -> None:
        """Calls `callback` once, after `delay_s`. Only from the loop's thread."""
        self._call_at(self._clock_ns() + int(delay_s * 1e9), callback)

    def _call_at(self, due_ns: int, callback: Callback) -> None:
        heapq.heappush(self._timers, (due_ns, next(self._timer_numbers), callback))

    def every(self, period_s: float, callback: Callback) -> None:
        """Calls `callback` now, and again at each multiple of the period, so that what has the same
        period wakes the loop once. Only from the loop's thread."""
        period_ns = round(period_s * 1e9)

        def again() -> None:
            try:
                callback()
            finally:  # also after a failure, which the loop reports
                self._call_at((self._clock_ns() // period_ns + 1) * period_ns, again)

        again()

    def stop(self) -> None:
        """Ends `run` after the present iteration. Safe from any thread."""
        self.post(self._stop)

    def _stop(self) -> None:
        self._running = False

    def run(self, next_deadline_ns: Callable[[], int | None], on_time: Callback) -> None:
        """Runs the loop until `stop`."""
        self._running = True
        handlers, timers, soon, posted = self._handlers, self._timers, self._soon, self._posted
        while self._running:
            deadline_ns = next_deadline_ns()
            if timers and (deadline_ns is None or timers[0][0] < deadline_ns):
                deadline_ns = timers[0][0]
            timeout_s = -1.0
            if deadline_ns is not None:
                # Longest wait that epoll is asked for: it refuses months.
                timeout_s = min(max(0.0, (deadline_ns - self._clock_ns()) / 1e9), 86_400.0)
            self._waiting = True  # first, so that later posts wake the loop
            events = self._epoll.poll(0.0 if soon or posted else timeout_s)
            self._waiting = False
            for fd, mask in events:
                handler = handlers.get(fd)
                if handler is not None:
                    _guarded(handler, mask)
            # Calls that they post run in the next iteration; results from other threads are
            # awaited.
            for calls in (posted, soon, posted):
                for _ in range(len(calls)):
                    _guarded(calls.popleft())
            if deadline_ns is not None and (now_ns := self._clock_ns()) >= deadline_ns:
                while timers and timers[0][0] <= now_ns:
                    _guarded(heapq.heappop(timers)[2])
                _guarded(on_time)

    def close(self) -> None:
        """Frees the loop's own descriptors."""
        self._epoll.close()
        self._wake.close()


class Alarm:
    """Calls back once, at the earliest of the times that it is set to."""

    def __init__(self, reactor: Reactor, callback: Callback) -> None:
        self._reactor = reactor
        self._callback = callback
        self._due_ns = sys.maxsize

    def set(self, due_ns: int, now_ns: int) -> None:
        """Only from the loop's thread."""
        if due_ns < self._due_ns:
            self._due_ns = due_ns
            self._reactor.call_later((due_ns - now_ns) / 1e9, self._ring)

    def _ring(self) -> None:
        self._due_ns = sys.maxsize
        self._callback()


def _guarded(callback: Callable[..., None], *args: int) -> None:
    """Handles one event. A failure must not affect other clients."""
    try:
        callback(*args)
    except Exception:  # any bug: logged with its traceback
        log.exception("an event could not be handled; please report this", extra={"event": "bug"})

"""Bounds the total time that a program waits for a daemon that does not answer. Training may wait a
moment for its daemon once, but not at every step. A circuit opens when a reply does not arrive;
from then on calls within `bounded` fail at once, while a thread polls until the daemon answers
again. If a daemon answers late, for example because a driver hangs, the same total applies: all
bounded calls draw on one budget. Waiting for a value that does not exist yet, such as the energy
until a moment ago, is not a delay of the daemon.

    with bounded():
        client.set_power_limit(...)   # at most WAIT_S, or at once while the circuit is open
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from zeus_ipc.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    ErrorCode,
    RequestTimeout,
    SeveralGpusFailed,
    ZeusIpcError,
)

R = TypeVar("R")

log = logging.getLogger(__name__)

WAIT_S = 0.3
"""Total time that bounded calls wait for replies; a transport may take a tenth of a second more.
"""
PROMPT_S = 0.05
"""A call that takes no longer than this is always allowed, and draws nothing from the budget."""
REFILL_S = 30.0
"""The budget is full again after this time, or when the circuit closes."""
PROBE_S = 0.25
"""Pause between attempts to reach a daemon that does not answer."""

_limit_s: contextvars.ContextVar[float | None] = contextvars.ContextVar("limit_s", default=None)
_not_before_s: contextvars.ContextVar[float] = contextvars.ContextVar("not_before_s", default=0.0)
_UNANSWERED = (ErrorCode.SHUTTING_DOWN, ErrorCode.QUIESCED, ErrorCode.OVERLOADED)


@contextlib.contextmanager
def bounded(wait_s: float = WAIT_S) -> Iterator[None]:
    """Limits how long this thread's calls within it wait for a daemon, all calls of a client
    together.

    Args:
        wait_s: Seconds.
    """
    token = _limit_s.set(wait_s)
    try:
        yield
    finally:
        _limit_s.reset(token)


@contextlib.contextmanager
def not_before(time_s: float) -> Iterator[None]:
    """Declares that values requested within it do not exist before this time: waiting for it is not
    a delay.

    Args:
        time_s: Seconds of CLOCK_MONOTONIC.
    """
    token = _not_before_s.set(time_s)
    try:
        yield
    finally:
        _not_before_s.reset(token)


def unanswered(error: BaseException | None) -> bool:
    """Whether an error is transient: the daemon or a driver did not answer, or cannot at the
    moment, and the same request may succeed later.
    """
    if isinstance(error, SeveralGpusFailed):
        return any(map(unanswered, error.errors.values()))
    if isinstance(error, (DaemonUnavailable, RequestTimeout, DeadlineExceeded)):
        return True
    return isinstance(error, ZeusIpcError) and error.code in _UNANSWERED


class Circuit:
    """Closed while a daemon answers, open while it does not.

    Args:
        probe: Makes a request and waits for the reply without a bound; a bound method, kept weakly.
    """

    def __init__(self, probe: Callable[[], object]) -> None:
        self._probe = weakref.WeakMethod(probe)
        self._guard = threading.Lock()
        self._reason: str | None = None
        self._waited_s, self._waited_at = 0.0, 0.0  # drawn from the budget, and when

    @property
    def open(self) -> bool:
        """Whether the circuit is open: the daemon does not answer."""
        return self._reason is not None

    def call(
        self, send: Callable[[dict[str, Any], float], R], message: dict[str, Any], timeout_s: float
    ) -> R:
        """Calls `send` with the message and the seconds that it may wait.

        Raises:
            DaemonUnavailable: The call is bounded, and the circuit is open.
            ZeusIpcError: What `send` raises.
        """
        limit_s = _limit_s.get()
        began = time.monotonic()
        early_s = max(0.0, _not_before_s.get() - began)
        if limit_s is not None:
            left_s = limit_s - self._drawn_s(began)
            timeout_s = min(timeout_s, max(left_s, PROMPT_S + early_s))
            if self._reason is not None:
                raise DaemonUnavailable(self._reason)
        try:
            reply = send(message, timeout_s)
        except (DaemonUnavailable, RequestTimeout) as error:
            self._opened(error)
            raise
        if self._reason is not None:
            self._reason, self._waited_s = None, 0.0
        elif limit_s is not None:
            self._draw(began + early_s, time.monotonic())
        return reply

    def _drawn_s(self, now_s: float) -> float:
        """How much of the budget is used."""
        return self._waited_s * max(0.0, 1 - (now_s - self._waited_at) / REFILL_S)

    def _draw(self, began: float, ended: float) -> None:
        if ended - began > PROMPT_S:
            self._waited_s = self._drawn_s(ended) + ended - began
            self._waited_at = ended

    def after_fork(self) -> None:
        """Resets a child of fork: the thread is only in its parent."""
        self._guard = threading.Lock()
        self._reason = None

    def _opened(self, error: ZeusIpcError) -> None:
        with self._guard:
            was_open, self._reason = self.open, error.message
        if not was_open:
            with contextlib.suppress(RuntimeError):  # no more threads, or the process ends
                threading.Thread(target=self._ask, name="zeus-circuit", daemon=True).start()

    def _ask(self) -> None:
        while self.open and (probe := self._probe()) is not None:
            try:
                probe()
            except ZeusIpcError as error:
                log.debug("zeusd does not answer: %s", error)
            del probe  # nor keep its error while this sleeps: the thread ends with the client
            time.sleep(PROBE_S)

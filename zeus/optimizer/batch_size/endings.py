"""Detects how this process ends: an uncaught error, a signal, an exit; and classifies why."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from zeus.optimizer.batch_size.common import Reason

# Names, not classes: a module that is not imported cannot have raised it.
_OUT_OF_MEMORY = frozenset(
    {"OutOfMemoryError", "ResourceExhaustedError"}
)  # torch, CuPy; TensorFlow
_SAYS_SO = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda_error_out_of_memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "resource_exhausted: out of memory",  # JAX
)
_INTERRUPTED = (KeyboardInterrupt, GeneratorExit)


def reason_of(error: BaseException | None) -> Reason:
    """Classifies a run's end."""
    if error is None or isinstance(error, _INTERRUPTED):
        return "cancelled"
    if isinstance(error, SystemExit):
        return "failed" if error.code else "cancelled"
    return "oom" if any(map(_out_of_memory, _chain(error))) else "failed"


def _out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return bool(names & _OUT_OF_MEMORY) or any(words in text for words in _SAYS_SO)


def says_out_of_memory(text: str) -> bool:
    """Whether the end of a script's log says that it ran out of GPU memory."""
    lower = text.lower()
    return any(words in lower for words in (*_SAYS_SO, *(name.lower() for name in _OUT_OF_MEMORY)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that kill a process without a handler before anything can run."""


class Endings:
    """Calls back when this process ends.

    A signal that would kill the process still does, after the call. If the program has a handler,
    it is called, and an exit that follows is not a failure.
    """

    def __init__(self, on_end: Callable[[Reason], None]) -> None:
        self._on_end = on_end
        self._pid = os.getpid()
        self._watching = True
        self._before: dict[int, Any] = {}
        self._old_error = _uncaught()
        self.signalled = False
        atexit.register(self._at_exit)
        if threading.current_thread() is not threading.main_thread():
            return  # only there may handlers be set
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before == signal.SIG_DFL or callable(before):
                self._before[number] = before
                signal.signal(number, self._handle)

    def stop(self) -> None:
        """Stops watching."""
        self._watching = False
        atexit.unregister(self._at_exit)
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:  # no one has set another since
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signalled = True
        before = self._before[number]
        if callable(before):
            before(number, frame)
            return
        self._call("cancelled")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _at_exit(self) -> None:
        error = _uncaught()
        new = error is not None and error is not self._old_error
        self._call(reason_of(error) if new and not self.signalled else "cancelled")

    def _call(self, reason: Reason) -> None:
        if self._watching and os.getpid() == self._pid:
            self._watching = False
            self._on_end(reason)


def _uncaught() -> BaseException | None:
    """Returns the error that ends this process, as left by the interpreter."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None

"""How long each iteration's own instructions took, without ever waiting for the GPU."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

MOST_OPEN = 64
"""Iterations whose end the GPU has not reached; of more, the oldest are forgotten."""


def cuda_in_use() -> Any:
    """`torch.cuda` where this process has initialised it, else None. Costs a microsecond."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda


class IterationTimes:
    """From the begin of an iteration's first instruction to the end of its last.

    On a GPU that torch uses, events on the current stream are recorded and read when they have
    happened; otherwise the monotonic clock counts.
    """

    def __init__(self) -> None:
        self._begin: Any = None
        self._end: Any = None
        self._iteration = -1
        self._spare: list[Any] = []
        self._open: deque[tuple[int, Any, Any]] = deque()

    def begin(self, iteration: int) -> None:
        """The first instruction begins."""
        self._iteration = iteration
        self._end = None
        self._begin = self._stamp(self._begin)

    def end(self) -> None:
        """What may be the last instruction has ended."""
        if self._begin is not None:
            self._end = self._stamp(self._end)

    def close(self) -> None:
        """The iteration is over; one without a last instruction does not count."""
        if self._begin is not None and self._end is not None:
            self._open.append((self._iteration, self._begin, self._end))
            self._begin = self._end = None
            if len(self._open) > MOST_OPEN:
                _, *oldest = self._open.popleft()
                self._spare += [stamp for stamp in oldest if not isinstance(stamp, int)]

    def collect(self) -> list[tuple[int, float]]:
        """Iterations and seconds that are known by now, each once."""
        known: list[tuple[int, float]] = []
        while self._open:
            iteration, begin, end = self._open[0]
            if isinstance(begin, int) or isinstance(end, int):
                if isinstance(begin, int) and isinstance(end, int):
                    known.append((iteration, (end - begin) / 1e9))
            elif not end.query():
                break
            else:
                known.append((iteration, begin.elapsed_time(end) / 1000))
                self._spare += [begin, end]  # recorded again, not made again
            self._open.popleft()
        return known

    def _stamp(self, used: Any) -> Any:
        cuda = cuda_in_use()
        if cuda is None:
            return time.monotonic_ns()
        if used is None or isinstance(used, int):
            used = self._spare.pop() if self._spare else cuda.Event(enable_timing=True)
        used.record()
        return used

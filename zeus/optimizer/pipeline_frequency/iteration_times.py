"""Measures times of iterations and their instructions without waiting for the GPU."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, NamedTuple

from zeus.optimizer.pipeline_frequency.profile import Setting

MOST_OPEN = 64
"""Most iterations whose end the GPU has not reached; the oldest are dropped."""

EVERY = 8
"""Instructions are timed in one of this many iterations."""


def cuda_in_use() -> Any:
    """`torch.cuda` if this process has initialised it, else None. Takes a microsecond."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda


class Least(NamedTuple):
    """The shortest time of a kind of instruction under one setting in an iteration.

    Attributes:
        setting: MHz or a name; 0: any.
    """

    iteration: int
    name: str
    setting: Setting
    seconds: float


class _Iteration(NamedTuple):
    """An iteration with stamps of its begin and end, and its instructions if they were timed: name,
    setting and stamps.
    """

    number: int
    begin: Any
    end: Any
    steps: list[tuple[str, Setting, Any, Any]]


class IterationTimes:
    """Measures iterations from the start of the first instruction to the end of the last, and in
    some of them the shortest time of each kind of instruction: of one that did not wait for another
    stage.

    A stamp is an event on the current stream if torch uses a GPU, else a monotonic time.

    Attributes:
        timed: Whether `begin_instruction` and `end_instruction` need to be called.
    """

    def __init__(self) -> None:
        self.timed = False
        self._iteration = -1
        self._begin: Any = None
        self._end: Any = None
        self._running: tuple[str, Setting, Any] | None = None
        self._steps: list[tuple[str, Setting, Any, Any]] = []
        self._open: deque[_Iteration] = deque()
        self._spare: list[Any] = []

    def begin(self, iteration: int) -> None:
        """The first instruction begins."""
        self._iteration, self._running, self._steps = iteration, None, []
        self.timed = iteration % EVERY == EVERY - 1
        self._end = None
        self._begin = self._stamp(self._begin)

    def begin_instruction(self, name: str, setting: Setting) -> None:
        """An instruction begins."""
        if self.timed:
            self._running = name, setting, self._stamp()

    def end_instruction(self) -> None:
        """Handles its end, or its launch."""
        if self._running is not None:
            self._steps.append((*self._running, self._stamp()))
            self._running = None

    def end(self) -> None:
        """Handles the end of what may be the last instruction."""
        if self._begin is not None:
            self._end = self._stamp(self._end)

    def close(self) -> None:
        """Ends the iteration; one without a last instruction does not count."""
        self.timed = False
        if self._begin is not None and self._end is not None:
            self._open.append(_Iteration(self._iteration, self._begin, self._end, self._steps))
            self._begin = self._end = None
            if len(self._open) > MOST_OPEN:
                self._free(self._open.popleft())

    def collect(self) -> tuple[list[tuple[int, float]], list[Least]]:
        """Iterations with seconds, and times of instructions, that are known by now; each once."""
        known: list[tuple[int, float]] = []
        reports: list[Least] = []
        while self._open:
            one = self._open[0]
            ends = [one.end, *(step[-1] for step in one.steps[-1:])]
            if not all(isinstance(end, int) or end.query() for end in ends):
                break
            seconds = _seconds(one.begin, one.end)
            if seconds is not None:
                known.append((one.number, seconds))
            least: dict[tuple[str, Setting], float] = {}
            for name, setting, begin, end in one.steps:
                seconds = _seconds(begin, end)
                if seconds is not None and seconds < least.get((name, setting), float("inf")):
                    least[name, setting] = seconds
            reports += [Least(one.number, *kind, seconds) for kind, seconds in least.items()]
            self._free(self._open.popleft())
        return known, reports

    def _stamp(self, used: Any = None) -> Any:
        """A stamp of now, or of when the stream reaches this point."""
        cuda = cuda_in_use()
        if cuda is None:
            return time.monotonic_ns()
        if used is None or isinstance(used, int):
            used = self._spare.pop() if self._spare else cuda.Event(enable_timing=True)
        used.record()
        return used

    def _free(self, one: _Iteration) -> None:
        """Events are recorded again instead of created."""
        stamps = [one.begin, one.end, *(at for step in one.steps for at in step[2:])]
        self._spare += [stamp for stamp in stamps if not isinstance(stamp, int)]


def _seconds(begin: Any, end: Any) -> float | None:
    """Time between two stamps; None if they are of different kinds."""
    if isinstance(begin, int) and isinstance(end, int):
        return (end - begin) / 1e9
    if isinstance(begin, int) or isinstance(end, int):
        return None
    return float(begin.elapsed_time(end)) / 1000

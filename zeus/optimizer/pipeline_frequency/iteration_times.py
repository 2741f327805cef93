"""Measures times of iterations and their instructions without waiting for the GPU."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, NamedTuple

from zeus.optimizer.pipeline_frequency.plans import Setting

MOST_OPEN = 64
"""Most iterations whose end the GPU has not reached; the oldest are dropped."""

EVERY = 8
"""Instructions are timed in one of this many iterations."""

MOST_TIMED = 4


def cuda_in_use() -> Any:
    """`torch.cuda` if this process has initialised it, else None. Takes a microsecond."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return torch.cuda


class _Stamps:
    """Creates stamps: events on the current stream if torch uses a GPU, else monotonic times."""

    def __init__(self) -> None:
        self._spare: list[Any] = []

    def take(self, used: Any = None) -> Any:
        """A stamp of now, or of when the stream reaches this point."""
        cuda = cuda_in_use()
        if cuda is None:
            return time.monotonic_ns()
        if used is None or isinstance(used, int):
            used = self._spare.pop() if self._spare else cuda.Event(enable_timing=True)
        used.record()
        return used

    def spare(self, *stamps: Any) -> None:
        """Returns stamps for reuse: events are recorded again instead of created."""
        self._spare += [stamp for stamp in stamps if not isinstance(stamp, int)]

    @staticmethod
    def reached(stamp: Any) -> bool:
        """Whether the stream has reached a stamp."""
        return isinstance(stamp, int) or bool(stamp.query())

    @staticmethod
    def seconds(begin: Any, end: Any) -> float | None:
        """Time between two stamps; None if they are of different kinds."""
        if isinstance(begin, int) and isinstance(end, int):
            return (end - begin) / 1e9
        if isinstance(begin, int) or isinstance(end, int):
            return None
        return float(begin.elapsed_time(end)) / 1000


class IterationTimes:
    """Measures iterations from the start of the first instruction to the end of the last."""

    def __init__(self) -> None:
        self._stamps = _Stamps()
        self._begin: Any = None
        self._end: Any = None
        self._iteration = -1
        self._open: deque[tuple[int, Any, Any]] = deque()

    def begin(self, iteration: int) -> None:
        """The first instruction begins."""
        self._iteration = iteration
        self._end = None
        self._begin = self._stamps.take(self._begin)

    def end(self) -> None:
        """Handles the end of what may be the last instruction."""
        if self._begin is not None:
            self._end = self._stamps.take(self._end)

    def close(self) -> None:
        """Ends the iteration; one without a last instruction does not count."""
        if self._begin is not None and self._end is not None:
            self._open.append((self._iteration, self._begin, self._end))
            self._begin = self._end = None
            if len(self._open) > MOST_OPEN:
                _, *oldest = self._open.popleft()
                self._stamps.spare(*oldest)

    def collect(self) -> list[tuple[int, float]]:
        """Iterations and seconds that are known by now; each once."""
        known: list[tuple[int, float]] = []
        while self._open:
            iteration, begin, end = self._open[0]
            if not self._stamps.reached(end):
                break
            seconds = self._stamps.seconds(begin, end)
            if seconds is not None:
                known.append((iteration, seconds))
            self._stamps.spare(begin, end)
            self._open.popleft()
        return known


class Least(NamedTuple):
    """The shortest time of a kind of instruction under one setting in an iteration.

    Attributes:
        setting: MHz or a name; 0: any.
    """

    iteration: int
    name: str
    setting: Setting
    seconds: float


class InstructionTimes:
    """Measures the shortest time of each kind of instruction in some iterations.

    The shortest one is from an instruction that did not wait for another stage.

    Attributes:
        steps: Steps of an iteration that is timed; None: `begin` and `end` need not be called.
    """

    def __init__(self) -> None:
        self._stamps = _Stamps()
        self._iteration = -1
        self.steps: list[tuple[str, Setting, Any, Any]] | None = None
        self._running: tuple[str, Setting, Any] | None = None
        self._open: deque[tuple[int, list[tuple[str, Setting, Any, Any]]]] = deque()

    def begin_iteration(self, iteration: int) -> None:
        """The first instruction of an iteration is about to begin."""
        self._iteration = iteration
        self._running = None
        self.steps = [] if iteration % EVERY == EVERY - 1 else None

    def begin(self, name: str, setting: Setting) -> None:
        """An instruction begins."""
        if self.steps is not None:
            self._running = (name, setting, self._stamps.take())

    def end(self) -> None:
        """Handles its end, or its launch."""
        if self.steps is not None and self._running is not None:
            self.steps.append((*self._running, self._stamps.take()))
            self._running = None

    def close(self) -> None:
        """Ends the iteration."""
        if self.steps:
            self._open.append((self._iteration, self.steps))
            if len(self._open) > MOST_TIMED:
                self._free(self._open.popleft()[1])
        self.steps = self._running = None

    def collect(self) -> list[Least]:
        """Times that are known by now; each once."""
        known: list[Least] = []
        while self._open:
            iteration, steps = self._open[0]
            if not self._stamps.reached(steps[-1][3]):
                break
            least: dict[tuple[str, Setting], float] = {}
            for name, setting, begin, end in steps:
                seconds = self._stamps.seconds(begin, end)
                if seconds is not None and seconds < least.get((name, setting), float("inf")):
                    least[name, setting] = seconds
            known += [Least(iteration, *kind, seconds) for kind, seconds in least.items()]
            self._free(steps)
            self._open.popleft()
        return known

    def _free(self, steps: list[tuple[str, Setting, Any, Any]]) -> None:
        for *_, begin, end in steps:
            self._stamps.spare(begin, end)

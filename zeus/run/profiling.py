"""Which power limit is measured when, and which is best.

Pure: a profiler is told that an iteration begins, and says what to do before it. It knows no GPU,
no clock and no file. Changes happen where iterations begin:

    NOT_PROFILING  a limit is left to measure, and fits before the epoch ends
                                             -> WARMING_UP at it
    WARMING_UP     iterations used up        -> PROFILING at the same limit, window opened
    PROFILING      iterations used up        -> NOT_PROFILING, window closed
    WARMING_UP, PROFILING   the epoch ends, an evaluation begins
                                             -> NOT_PROFILING; the same limit is begun again

So no window holds anything but training, and what one epoch has no room for goes on in the next.

Source: You, Chung, Chowdhury, "Zeus", NSDI 2023, section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

NOT_PROFILING: Final = "NOT_PROFILING"
WARMING_UP: Final = "WARMING_UP"
PROFILING: Final = "PROFILING"
State = Literal["NOT_PROFILING", "WARMING_UP", "PROFILING"]


@dataclass(frozen=True)
class Reading:
    """What training does at a power limit.

    Attributes:
        power: Mean power of all GPUs together, W.
        throughput: Iterations a second.
    """

    power: float
    throughput: float


@dataclass(frozen=True)
class Hold:
    """Set this power limit, mW."""

    power_limit_mw: int


@dataclass(frozen=True)
class Open:
    """Begin to measure at this power limit, mW."""

    power_limit_mw: int


@dataclass(frozen=True)
class Close:
    """What was measured counts: so many iterations at this power limit, mW."""

    power_limit_mw: int
    iterations: int


@dataclass(frozen=True)
class Drop:
    """What was measured at this power limit, mW, does not count."""

    power_limit_mw: int


Action = Hold | Open | Close | Drop


class Profiler:
    """Measures each limit once, from the highest down.

    Args:
        limits_mw: The limits, descending.
        warmup: Iterations that are not measured after a change.
        measure: Iterations that are measured.
        known: What an earlier run has measured.

    Attributes:
        state: See above.
        readings: What is known.
    """

    def __init__(
        self,
        limits_mw: Sequence[int],
        warmup: int,
        measure: int,
        known: Mapping[int, Reading] | None = None,
    ) -> None:
        self.limits_mw = list(limits_mw)
        self.readings: dict[int, Reading] = dict(known or {})
        self.state: State = NOT_PROFILING
        self._asked = (warmup, measure)
        self._window: tuple[int, int] | None = (warmup, measure)
        self._closed: set[int] = set()
        self._without: set[int] = set()
        self._limit = self._held = self.limits_mw[0]
        self._left = 0
        self._begun = 0
        self._iterations: int | None = None
        self._over = False

    @property
    def active(self) -> bool:
        """Whether a limit is left to run."""
        return not self._over and self._next is not None

    @property
    def complete(self) -> bool:
        """Whether all that could be measured is known."""
        return self._next is None and self._closed <= self.readings.keys() and bool(self.readings)

    def begin_epoch(self, iterations: int | None) -> bool:
        """An epoch of training begins.

        Args:
            iterations: How many it will have; None: nobody knows.

        Returns:
            False: they are too few to measure anything.
        """
        self._begun, self._iterations = 0, iterations
        self._window = fitted(*self._asked, iterations)
        return self._window is not None

    def begin_iteration(self) -> list[Action]:
        """What to do before the next iteration, in this order."""
        actions: list[Action] = []
        if self._over:
            return actions
        if self.state == WARMING_UP and self._left == 0:
            self._open(actions)
        elif self.state == PROFILING and self._left == 0:
            self._close(actions)
        limit = self._next
        if self.state == NOT_PROFILING and limit is not None:
            if self._fits:
                self._limit = limit
                self._hold(limit, actions)
                self.state, self._left = WARMING_UP, self._warmup_and_measure[0]
                if self._left == 0:
                    self._open(actions)
            else:
                self._hold(self.limits_mw[0], actions)
        self._left -= 1
        self._begun += 1
        return actions

    def interrupt(self) -> list[Action]:
        """Something that is no iteration begins: the epoch has ended, or an evaluation begins."""
        actions: list[Action] = []
        if self.state == PROFILING and self._left == 0:
            self._close(actions)
        elif self.state == PROFILING:
            actions.append(Drop(self._limit))
        self.state = NOT_PROFILING
        if self.active:
            self._hold(self.limits_mw[0], actions)
        return actions

    def measured(self, power_limit_mw: int, reading: Reading) -> None:
        """What a window that was closed has measured."""
        self.readings[power_limit_mw] = reading

    def refused(self, power_limit_mw: int) -> None:
        """The GPUs do not take this limit: it is left out."""
        self._without.add(power_limit_mw)
        self.state = NOT_PROFILING
        self._held = 0

    def give_up(self) -> None:
        """Nothing more can be measured."""
        self._over = True
        self.state = NOT_PROFILING

    # --------------------------------------------------------------------------------- internals

    @property
    def _next(self) -> int | None:
        """The next limit to measure."""
        done = self.readings.keys() | self._closed | self._without
        return next((limit for limit in self.limits_mw if limit not in done), None)

    @property
    def _warmup_and_measure(self) -> tuple[int, int]:
        return self._window or self._asked

    @property
    def _fits(self) -> bool:
        if self._window is None:
            return False
        return self._iterations is None or self._begun + sum(self._window) < self._iterations

    def _open(self, actions: list[Action]) -> None:
        self.state, self._left = PROFILING, self._warmup_and_measure[1]
        actions.append(Open(self._limit))

    def _close(self, actions: list[Action]) -> None:
        self.state = NOT_PROFILING
        self._closed.add(self._limit)
        actions.append(Close(self._limit, self._warmup_and_measure[1]))

    def _hold(self, power_limit_mw: int, actions: list[Action]) -> None:
        if self._held != power_limit_mw:
            self._held = power_limit_mw
            actions.append(Hold(power_limit_mw))


def fitted(warmup: int, measure: int, iterations: int | None) -> tuple[int, int] | None:
    """Iterations to warm up and to measure, fewer where an epoch is too short for them.

    Both shrink by the same factor, and one iteration of each is kept. None: not even that fits.
    """
    if iterations is None or warmup + measure < iterations:
        return warmup, measure
    factor = (iterations - 1) / (warmup + measure)
    shorter = max(min(warmup, 1), int(warmup * factor)), max(1, int(measure * factor))
    return shorter if sum(shorter) < iterations else None


def best_limit(readings: Mapping[int, Reading], eta_knob: float, max_power: float) -> int:
    """The limit, mW, at which an iteration costs least; of equals the highest.

    Args:
        readings: What is known, by limit.
        eta_knob: 1 counts energy only, 0 time only.
        max_power: The highest limits of all GPUs together, W.

    Raises:
        ValueError: Nothing is known.
    """

    def cost(limit: int) -> float:
        one = readings[limit]
        return (eta_knob * one.power + (1 - eta_knob) * max_power) / one.throughput

    return min(sorted(readings, reverse=True), key=cost)

"""Pairs the begin of an engine's steps with their ends, first in, first out.

Engines that schedule ahead begin a step before the one before has ended. A probe never
raises into the engine: one that fails logs one warning and stops.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_AHEAD = 64
"""Steps that may be under way; beyond, ends were missed and the oldest are forgotten."""


class InFlight(Generic[T]):
    """Steps under way.

    Args:
        clock_ns: CLOCK_MONOTONIC.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._steps: deque[tuple[int, T]] = deque(maxlen=MOST_AHEAD)

    def __len__(self) -> int:
        return len(self._steps)

    def now_ns(self) -> int:
        """The time."""
        return self._clock_ns()

    def begin(self, begin_ns: int, what: T) -> None:
        """A step began."""
        self._steps.append((begin_ns, what))

    def under_way(self) -> Iterator[T]:
        """What the steps under way are."""
        return (what for _, what in self._steps)

    def end(self) -> tuple[int, int, T] | None:
        """The oldest step ended: its begin, its end and what it is; None: none was begun."""
        if not self._steps:
            return None
        begin_ns, what = self._steps.popleft()
        return begin_ns, self._clock_ns(), what


class Silent:
    """Runs a probe's code such that it can do no harm.

    Args:
        name: What the probe is of, for the one warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.failed = False

    def __call__(self, work: Callable[..., None], *arguments: object) -> None:
        """Runs `work`, unless it failed before."""
        if self.failed:
            return
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - never raise into the engine
            self.failed = True
            log.warning(
                "the energy probe of %s stops, the engine continues: %s: %s",
                self._name,
                type(error).__name__,
                error,
            )

"""Pairs the starts of an engine's steps with their ends, first in, first out.

Engines that schedule ahead start a step before the previous one has ended. A probe never raises
into the engine: after a failure it logs one warning and stops.
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
"""Most steps in flight; with more, ends were missed, and the oldest are dropped."""


class InFlight(Generic[T]):
    """Steps in flight."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._steps: deque[tuple[int, T]] = deque(maxlen=MOST_AHEAD)

    def __len__(self) -> int:
        return len(self._steps)

    def now_ns(self) -> int:
        """The time."""
        return self._clock_ns()

    def begin(self, begin_ns: int, what: T) -> None:
        """Adds a step that started."""
        self._steps.append((begin_ns, what))

    def under_way(self) -> Iterator[T]:
        """The data of the steps in flight."""
        return (what for _, what in self._steps)

    def end(self) -> tuple[int, int, T] | None:
        """Removes the oldest step, which ended; returns its start, end and data; None: none is in
        flight."""
        if not self._steps:
            return None
        begin_ns, what = self._steps.popleft()
        return begin_ns, self._clock_ns(), what


class Silent:
    """Runs a probe's code without harm to the engine."""

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

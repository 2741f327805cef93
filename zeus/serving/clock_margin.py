"""Adapts the margin between predictions and an objective to the requests' latencies, and limits how
often clocks change; pure."""

from __future__ import annotations

from collections import deque

NEAR = 0.9
"""A request above this share of its objective is a near miss."""

LOWEST, HIGHEST, FIRST = 0.5, 1.0, 0.7
"""Range of the margin."""

RISE, NEAR_FALL, MISS_FALL = 3e-4, 0.015, 0.06
"""Changes of the margin by a request, a near miss and a miss. So the margin is stable with one near
miss in 50 requests, or one miss in 200: misses often occur in clusters."""


class Margin:
    """The share of one objective that a prediction may use."""

    def __init__(self, objective_s: float) -> None:
        self._objective_s = objective_s
        self.value = FIRST

    def finished(self, seen_s: float, ours: float) -> None:
        """One request."""
        if seen_s > NEAR * self._objective_s:
            fall = MISS_FALL if seen_s > self._objective_s else NEAR_FALL
            self.value = max(LOWEST, self.value - fall * ours)
        else:
            self.value = min(HIGHEST, self.value + RISE)


class Lost:
    """Whether the objectives cannot be met at any clock: a large share of requests misses them."""

    ENTER, LEAVE = 0.3, 0.15
    MEMORY = 40.0

    def __init__(self) -> None:
        self.share = 0.0
        self.now = False

    def finished(self, violated: bool) -> None:
        """One request."""
        self.share += (violated - self.share) / self.MEMORY
        self.now = self.share > (self.LEAVE if self.now else self.ENTER)


WINDOW_S = 60.0


class RateBound:
    """A limit of changes in any minute, with one reserved to reach the highest clock.

    A minute is one of elapsed time: time that goes back elapses nothing, and makes room for no
    further change.
    """

    def __init__(self, highest_mhz: int, per_minute: int = 200) -> None:
        if per_minute < 2:
            raise ValueError(f"per_minute must be at least 2, not {per_minute}")
        self._highest = highest_mhz
        self._most = per_minute
        self._now_s: float | None = None
        self._elapsed_s = 0.0
        self._changes: deque[float] = deque()

    def allowed(self, now_s: float, present_mhz: int, wanted_mhz: int) -> int:
        """The clock to set now: the wanted one, the highest, or the present one. If it is not the
        present one, it counts as a change."""
        if self._now_s is not None and now_s > self._now_s:
            self._elapsed_s += now_s - self._now_s
        self._now_s = now_s
        changes = self._changes
        while changes and changes[0] <= self._elapsed_s - WINDOW_S:
            changes.popleft()
        left = self._most - len(changes)
        if left < 2 and wanted_mhz != self._highest:
            wanted_mhz = self._highest if left and wanted_mhz > present_mhz else present_mhz
        if not left or wanted_mhz == present_mhz:
            return present_mhz
        changes.append(self._elapsed_s)
        return wanted_mhz

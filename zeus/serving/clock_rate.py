"""Limits how often clocks change; pure."""

from __future__ import annotations

from collections import deque

WINDOW_S = 60.0


class RateBound:
    """A limit of changes in any minute, with one reserved to reach the highest clock.

    Args:
        highest_mhz: The highest clock.
        per_minute: Most changes; at least 2.
    """

    def __init__(self, highest_mhz: int, per_minute: int = 200) -> None:
        if per_minute < 2:
            raise ValueError(f"per_minute must be at least 2, not {per_minute}")
        self._highest = highest_mhz
        self._most = per_minute
        self._times: deque[float] = deque()

    def allowed(self, now_s: float, present_mhz: int, wanted_mhz: int) -> int:
        """The clock to set now: the wanted one, the highest, or the present one."""
        times = self._times
        if times and now_s < times[-1]:
            times.clear()  # another time base: start over
        while times and times[0] <= now_s - WINDOW_S:
            times.popleft()
        if wanted_mhz == present_mhz:
            return present_mhz
        left = self._most - len(times)
        if left >= 2 or (left == 1 and wanted_mhz == self._highest):
            return wanted_mhz
        if left == 1 and wanted_mhz > present_mhz:
            return self._highest
        return present_mhz

    def changed(self, now_s: float) -> None:
        """Records a change."""
        self._times.append(now_s)

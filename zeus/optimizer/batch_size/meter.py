"""Time and energy of a run: the sum of the monitor's windows, one for each epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from zeus.policy.recurrence import Used

if TYPE_CHECKING:
    from zeus.monitor import Measurement, ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

_numbers = itertools.count()


class RunMeter:
    """Measures a run, epoch by epoch. Time between two windows does not count: then this process
    waits for the server, not for its GPUs.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        power_limits: Callable[[], GlobalPowerLimitOptimizer | None],
        before: Used = Used(),  # noqa: B008 - it is frozen
    ) -> None:
        self._monitor = monitor
        self._power_limits = power_limits
        self._key = f"__BatchSizeOptimizer_{next(_numbers)}"
        self._before = before
        self._time, self._energy = before.time, before.energy
        self._unread: list[Measurement] = []

    def begin(self) -> None:
        """Opens the window of an epoch.

        Raises:
            ZeusBaseError: It cannot be measured.
        """
        self._monitor.begin_window(self._key, restart=True)

    def end(self) -> None:
        """Closes it. The energy will be known later.

        Raises:
            ZeusBaseError: It cannot be measured.
            ValueError: The monitor's windows were closed elsewhere.
        """
        self._unread.append(self._monitor.end_window(self._key))

    def assume(self, power_w: float, seconds: float) -> None:
        """Estimates the unknown energy of windows from this power.

        Args:
            seconds: How long the last window was, s, if not even that was measured.
        """
        times = [one.time for one in self._unread] or [seconds]
        self._unread.clear()
        self._time += sum(times)
        self._energy += power_w * sum(times)

    def drop(self) -> None:
        """Closes it, if it is open, and discards it."""
        if self._key in self._monitor.measurement_states:
            self._monitor.end_window(self._key, cancel=True)

    def used(self) -> Used:
        """Returns the totals of all closed windows. Waits at most for a sensor's next update.

        Raises:
            ZeusBaseError: The energy of one is unknown now; you may retry.
        """
        while self._unread:
            self._unread[0].look_up()
            self._energy += self._unread[0].total_energy
            self._time += self._unread.pop(0).time
        time_s, energy_j = self._searched()
        return Used(
            self._time,
            self._energy,
            min(self._time, self._before.overhead_time + time_s),
            min(self._energy, self._before.overhead_energy + energy_j),
        )

    def _searched(self) -> tuple[float, float]:
        """Returns the extra time, s, and energy, J, of the search's steps, compared with the chosen
        limit."""
        plo = self._power_limits()
        if plo is None or plo.disabled:
            return 0.0, 0.0
        report = plo.report()
        measured = sum(one.steps for one in report.estimates)
        if report.chosen is None or not measured:  # no steps: the choice came from a file
            return 0.0, 0.0
        # Steps while clocks settled ran at the same limits, about in proportion.
        share = report.steps / measured
        time_s = sum(one.steps * (one.time_s - report.chosen.time_s) for one in report.estimates)
        energy_j = sum(
            one.steps * (one.energy_j - report.chosen.energy_j) for one in report.estimates
        )
        return max(0.0, share * time_s), max(0.0, share * energy_j)

"""What a run has used: the monitor's windows, one an epoch, added up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

from zeus.policy.stopping import Used, Using
from zeus_ipc.circuit import bounded

if TYPE_CHECKING:
    from zeus.monitor import Measurement, ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

_numbers = itertools.count()


class Meter:
    """Measures a run, epoch by epoch. What happens between two windows does not count: there this
    process waits for the server, and not for its GPUs.

    Args:
        monitor: Of all GPUs that count.
        power_limits: Gives what searches a power limit meanwhile, if something does.
        before: What the run has used before.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        power_limits: Callable[[], GlobalPowerLimitOptimizer | None],
        before: Using = Used(),  # noqa: B008 - it is frozen
    ) -> None:
        self._monitor = monitor
        self._power_limits = power_limits
        self._key = f"__BatchSizeOptimizer_{next(_numbers)}"
        self._before = before
        self._time, self._energy = before.time, before.energy
        self._unread: list[Measurement] = []

    @property
    def running(self) -> bool:
        """Whether a window is open."""
        return self._key in self._monitor.measurement_states

    def begin(self) -> None:
        """Opens the window of an epoch.

        Raises:
            ZeusBaseError: It cannot be measured.
        """
        self._monitor.begin_window(self._key, restart=True)

    def end(self) -> None:
        """Closes it. The energy is known later.

        Raises:
            ZeusBaseError: It cannot be measured.
            ValueError: Someone closed the monitor's windows.
        """
        self._unread.append(self._monitor.end_window(self._key))

    def assume(self, power_w: float, seconds: float) -> None:
        """Takes the energy of windows that is not known for that of this power.

        Args:
            power_w: The power, W.
            seconds: How long the last window was, s, if not even that was measured.
        """
        times = [one.time for one in self._unread] or [seconds]
        self._unread.clear()
        self._time += sum(times)
        self._energy += power_w * sum(times)

    def drop(self) -> None:
        """Closes it, if it is open, and forgets it."""
        if self.running:
            self._monitor.end_window(self._key, cancel=True)

    def used(self) -> Used:
        """What was used in all windows that were closed. Waits at most for a sensor's next tick.

        Raises:
            ZeusBaseError: The energy of one is not known now; it may be asked for again.
        """
        while self._unread:
            with bounded():
                self._unread[0].look_up()
            self._energy += self._unread[0].total_energy
            self._time += self._unread.pop(0).time
        time_s, energy_j, limits = self._searched()
        return Used(
            self._time,
            self._energy,
            min(self._time, self._before.overhead_time + time_s),
            min(self._energy, self._before.overhead_energy + energy_j),
            limits,
        )

    def _searched(self) -> tuple[float, float, tuple[tuple[float, float], ...]]:
        """How much more time and energy the steps of the search took than as many at the chosen
        limit; and the limits."""
        plo = self._power_limits()
        if plo is None or plo.disabled:
            return 0.0, 0.0, ()
        report = plo.report()
        measured = sum(one.steps for one in report.estimates)
        if report.chosen is None:
            return 0.0, 0.0, ()
        limits = tuple((one.energy_j, one.time_s) for one in report.estimates)
        if not measured:
            return 0.0, 0.0, limits
        # Steps that waited for clocks to settle ran at the same limits, about in proportion. Where
        # the choice came from a file there were none.
        share = report.steps / measured
        time_s = sum(one.steps * (one.time_s - report.chosen.time_s) for one in report.estimates)
        energy_j = sum(
            one.steps * (one.energy_j - report.chosen.energy_j) for one in report.estimates
        )
        return max(0.0, share * time_s), max(0.0, share * energy_j), limits

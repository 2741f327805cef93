"""Time and energy of a run: the sum of the monitor's windows, one for each epoch."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from zeus.exceptions import ZeusBaseError
from zeus.policy.recurrence import Used

if TYPE_CHECKING:
    from zeus.monitor import Measurement, ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

log = logging.getLogger(__name__)
_numbers = itertools.count()


class RunMeter:
    """Measures a run, epoch by epoch. Time between two windows does not count: then this process
    waits for the server, not for its GPUs.

    Never raises. For the time whose energy is unknown, the mean power of the rest is assumed, or
    the highest if nothing is known; what becomes known later replaces that.

    Args:
        power_limits: Returns the run's search for a power limit, if it has one.
        highest_w: The highest limits of its GPUs together, W.
        say: Called with a sentence for the user, once if energy is not known yet, and once if it
            never will be.
        before: What the run used in processes before.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        power_limits: Callable[[], GlobalPowerLimitOptimizer | None],
        highest_w: float,
        say: Callable[[str], None],
        before: Used = Used(),  # noqa: B008 - it is frozen
    ) -> None:
        self._monitor = monitor
        self._power_limits = power_limits
        self._highest_w = highest_w
        self._say = say
        self._key = f"__BatchSizeOptimizer_{next(_numbers)}"
        self._before = before
        self._time, self._energy = before.time, before.energy
        self._unread: list[Measurement] = []
        self._lost_s = 0.0  # of windows that were not measured, and will not be
        self._began = time.monotonic()
        self._said: set[str] = set()

    @property
    def known(self) -> bool:
        """Whether the energy of all windows is known."""
        return not self._unread and not self._lost_s

    @property
    def searching(self) -> bool:
        """Whether a power limit is searched for."""
        plo = self._power_limits()
        if plo is None:
            return False
        from zeus.optimizer.power_limit.states import Done  # its package is imported by now

        return not isinstance(plo.state, Done)

    def begin(self) -> None:
        """Opens the window of an epoch."""
        self._began = time.monotonic()
        try:
            self._monitor.begin_window(self._key, restart=True)
        except Exception as error:  # noqa: BLE001 - training must go on
            self._tell("an epoch cannot be measured", error)  # as its end will find

    def end(self) -> Used:
        """Closes it. Returns the totals of all windows. Waits at most for a sensor's next
        update."""
        try:
            self._unread.append(self._monitor.end_window(self._key))
        except Exception as error:  # noqa: BLE001 - training must go on
            self._lost_s += max(1e-6, time.monotonic() - self._began)
            self._tell("an epoch cannot be measured", error)
        unread, self._unread, why = self._unread, [], None
        for one in unread:  # one that stays unknown does not hide those after it
            try:
                one.look_up()
                energy_j = one.total_energy
                if math.isnan(energy_j):
                    raise ValueError("that of a GPU is unknown")
            except Exception as error:  # noqa: BLE001 - training must go on
                self._unread.append(one)
                why = error
            else:
                self._energy += energy_j
                self._time += one.time
        if why is not None:
            self._tell("the energy of an epoch is not known yet", why)
        unknown_s = self._lost_s + sum(one.time for one in self._unread)
        time_s, energy_j = self._time + unknown_s, self._energy + self._assumed_w * unknown_s
        search_s, search_j = self._searched()
        return Used(
            time_s,
            energy_j,
            min(time_s, self._before.overhead_time + search_s),
            min(energy_j, self._before.overhead_energy + search_j),
        )

    def drop(self) -> None:
        """Closes it, if it is open, and discards it."""
        if self._key in self._monitor.measurement_states:
            self._monitor.end_window(self._key, cancel=True)

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

    @property
    def _assumed_w(self) -> float:
        return self._energy / self._time if self._time > 0 else self._highest_w

    def _tell(self, what: str, error: Exception) -> None:
        log.info("%s", what, exc_info=error)
        if what in self._said:
            return
        self._said.add(what)
        why, more = str(error), ""
        if isinstance(error, ZeusBaseError):
            why = error.message
        elif not isinstance(error, ValueError):  # which means that its window was closed elsewhere
            why, more = f"{type(error).__name__}: {error}", ". Please report this"
        assumed = f"{self._assumed_w:.0f} W are assumed for that time"
        self._say(f"{what} ({why.rstrip('.')}), and {assumed}{more}")

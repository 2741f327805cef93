"""Energy of single steps from the updates, for the method `tokens`, which has no fit.

An update's energy above idle is spread evenly over its time with steps, and a step's energy is
split among its requests by tokens.
"""

from __future__ import annotations

import numpy as np

from zeus.serving.columns import Floats, StepColumns, Updates

RULE_ERROR = 0.15
"""Error of a split by tokens, relative, one sigma."""
SENSOR_ERROR = 0.05
"""Error of one step's energy, relative, one sigma."""

_KEPT = 20_000


class Spread:
    """Keeps the energy of busy time on an axis of busy seconds, on which steps are contiguous."""

    def __init__(self) -> None:
        self._axis_s = np.zeros(1)
        self._axis_j = np.zeros(1)
        self._steps_s = 0.0
        self._idle_w: Floats = np.zeros(0)

    def see(self, updates: Updates, idle_s: Floats) -> Floats:
        """Adds updates; returns the idle energy of each, J."""
        length_s = updates.length_s
        empty = idle_s > 0.999 * length_s
        self._idle_w = np.concatenate([self._idle_w, (updates.joules / length_s)[empty]])[-_KEPT:]
        idle_w = float(np.median(self._idle_w)) if self._idle_w.size else 0.0
        busy_s = np.where(empty, 0.0, length_s - idle_s)
        # In an update with steps, the power of idle time is at most the update's mean power.
        part_w = np.minimum(idle_w, updates.joules / length_s)
        idle_j = np.where(empty, updates.joules, part_w * idle_s)
        axis_s = self._axis_s[-1] + np.cumsum(busy_s)
        axis_j = self._axis_j[-1] + np.cumsum(updates.joules - idle_j)
        self._axis_s = np.concatenate([self._axis_s, axis_s])[-_KEPT - updates.count :]
        self._axis_j = np.concatenate([self._axis_j, axis_j])[-_KEPT - updates.count :]
        return idle_j

    def steps(self, covered_s: Floats) -> Floats:
        """Energy of steps, J, given the seconds of each that updates cover."""
        ends = self._steps_s + np.cumsum(covered_s)
        begins = ends - covered_s
        if ends.size:
            self._steps_s = float(ends[-1])
        found: Floats = np.interp(ends, self._axis_s, self._axis_j)
        return found - np.interp(begins, self._axis_s, self._axis_j)


def row_shares(steps: StepColumns) -> Floats:
    """Each row's share of its step's tokens, from 0 to 1."""
    step = steps.step_of_row
    total = np.bincount(step, steps.tokens, steps.count)[step]
    head = 1.0 / np.diff(steps.first_row)[step]
    return np.divide(steps.tokens, total, out=head, where=total > 0)

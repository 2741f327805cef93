"""Energy costs of steps from earlier fits, by clock; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from zeus.serving.columns import Floats
from zeus.serving.digest import LEVEL_WIDTH, Condensed
from zeus.serving.features import NAMES
from zeus.serving.fit import Fit

Weights = Mapping[float, Sequence[float]]
"""Cost of each feature, J per unit, by clock in MHz; 0: the clock is unknown."""


class WeightPrior:
    """Weights of earlier fits, used as a prior."""

    def __init__(self, weights: Weights) -> None:
        self._by_clock = {
            float(mhz): np.asarray(row, float)
            for mhz, row in weights.items()
            if len(row) == len(NAMES) + 1
        }

    @property
    def weights(self) -> Weights:
        """The prior for a next ledger."""
        return {mhz: row.tolist() for mhz, row in self._by_clock.items()}

    def of(self, what: Condensed) -> Floats | None:
        """Weights of the nearest clock for each clock level of a period; None: there are none."""
        known = self._by_clock
        if not known:
            return None
        mean = np.mean(list(known.values()), axis=0)
        return np.stack(
            [
                mean if mhz == 0 else known[min(known, key=lambda one: abs(one - mhz))]
                for mhz in _clocks(what)
            ]
        )

    def learn(self, what: Condensed, fit: Fit) -> None:
        """Adds the last valid weights at each clock at which steps ran."""
        seen = what.observed
        busy = seen.busy
        group = fit.group(seen.center_s[busy], seen.level[busy])
        last = len(fit.weights) - fit.levels
        for level, mhz in enumerate(_clocks(what)):
            if (group == last + level).any():
                for near in [one for one in self._by_clock if _same(one, mhz)]:
                    del self._by_clock[near]
                self._by_clock[mhz] = fit.weights[last + level]


def _clocks(what: Condensed) -> list[float]:
    """Clock of each level, MHz; 0: unknown."""
    known = [0.0 if math.isnan(mhz) else mhz for mhz in what.clocks_mhz]
    return known + [0.0] * (what.levels - len(known))


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= LEVEL_WIDTH * max(one, other)

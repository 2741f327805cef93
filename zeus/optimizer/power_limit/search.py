"""Which limit to measure next, for how many steps, and when enough is known.

Pure: a search is told what was run and what it took, and says what to run next. It knows no
monitor, no clock and no other process.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from zeus.optimizer.power_limit.estimates import Curve, Estimate, Estimates, Sample

SearchName = Literal["adaptive", "exhaustive"]
Costs = Callable[[Curve], "list[float] | None"]
"""The cost of each limit under a curve, in the limits' order; None: it cannot be said."""

TOLERANCE = 0.002
"""The adaptive search ends when its choice is expected to cost at most this share too much, ..."""
EXTEND = 0.007
"""... and may take twice its steps while it is expected to cost more than this."""
STRIDE = 0.6
"""The next limit is at least this share of the lowest that was tried: low ones may cost much."""
GOOD_ENOUGH = 0.005
"""A limit's time is known well enough, as a fraction, where the selector names no costs."""
CURVES = 64
"""Random curves that a decision is made of."""
SETTLE_S = 0.5
"""Clocks and power have followed a new limit after this: max(3 sensor ticks, 300 ms) and more."""


@dataclass(frozen=True)
class Trial:
    """What to run next: a limit, unmeasured steps if it is a new one, measured steps."""

    power_limit_mw: int
    warmup_steps: int
    steps: int


class Search(ABC):
    """Measures limits until it knows enough.

    Args:
        limits_mw: The limits, descending.
        warmup_steps: Unmeasured steps after a change of the limit.
        profile_steps: Measured steps at each limit, at most or always.
    """

    def __init__(self, limits_mw: Sequence[int], warmup_steps: int, profile_steps: int) -> None:
        self.limits_mw = list(limits_mw)
        self.warmup_steps = warmup_steps
        self.profile_steps = profile_steps
        self.samples: list[Sample] = []
        self.settled = False
        self.position = 0  # where it begins: steps that an earlier run has spent
        self._run: Counter[int] = Counter()

    def ran(self, power_limit_mw: int, steps: int) -> None:
        """Steps have been run and measured; their sample comes later."""
        self._run[power_limit_mw] += steps

    def add(self, sample: Sample) -> None:
        """What steps that were run took."""
        self.samples.append(sample)

    def lost(self, power_limit_mw: int, steps: int) -> None:
        """The sample of steps that were run will not come."""
        self._run[power_limit_mw] -= steps

    def settle(self) -> None:
        """What is known is enough."""
        self.settled = True

    @property
    def pending(self) -> bool:
        """Whether samples of what was run are still to come."""
        return sum(self._run.values()) > sum(one.steps for one in self.samples)

    def resume(self, samples: Sequence[Sample], position: int = 0) -> None:
        """Takes over what an earlier run of the same job measured, until a position."""
        self.position = position
        for sample in samples:
            if sample.power_limit_mw not in self.limits_mw:
                continue
            self.ran(sample.power_limit_mw, sample.steps)
            self.add(sample)

    def without(self, power_limit_mw: int) -> None:
        """A limit cannot be set: it is not tried again, and not chosen."""
        self.limits_mw.remove(power_limit_mw)

    @abstractmethod
    def next(self, current_mw: int, position: int) -> Trial | None:
        """What to run next; None: enough is known, or will be when the last samples come.

        Args:
            current_mw: The limit that is set.
            position: Training steps since the search began.
        """

    @abstractmethod
    def estimates(self, position: int) -> list[Estimate]:
        """Of the limits that were measured, descending."""


class Exhaustive(Search):
    """Every limit, from the highest down, for `profile_steps` each; what was measured counts."""

    def next(self, current_mw: int, position: int) -> Trial | None:
        """See `Search`."""
        if self.settled:
            return None
        for limit in self.limits_mw:
            missing = self.profile_steps - self._run[limit]
            if missing > 0:
                return Trial(limit, 0 if limit == current_mw else self.warmup_steps, missing)
        return None

    def estimates(self, position: int) -> list[Estimate]:
        """See `Search`."""
        return _averages(self.limits_mw, self.samples)


class Adaptive(Search):
    """Measures where it helps the choice most, a few steps at a time, and then no further.

    After each piece every limit has an estimate, measured or not (`Estimates`). Random curves
    drawn from it show how much the present choice may cost too much, and which limit would be the
    better one; that limit or the present choice, whichever is known less, is measured next. Older
    measurements count less than new ones as the GPU warms up, so the choice is measured again when
    it depends on that. (Top-two sampling: Russo, "Simple Bayesian Algorithms for Best-Arm
    Identification", 2020.)

    It ends when the expected excess is below `TOLERANCE`, else after a third of the exhaustive
    search's steps, but not before four limits could be tried; after twice as many where times
    scatter so much that the choice is still expected to cost `EXTEND` too much.

    Args:
        costs: What the selector makes of a curve.
        gpus: How many GPUs train together.
    """

    def __init__(
        self,
        limits_mw: Sequence[int],
        warmup_steps: int,
        profile_steps: int,
        costs: Costs,
        gpus: int,
    ) -> None:
        super().__init__(limits_mw, warmup_steps, profile_steps)
        self.costs = costs
        self.piece = _piece(profile_steps)
        self.budget = _budget(len(self.limits_mw), warmup_steps, profile_steps)
        self._most = expected_steps("adaptive", len(limits_mw), warmup_steps, profile_steps)
        self._estimates = Estimates(self.limits_mw, gpus, horizon=self.budget)
        self._excess = math.inf
        self._at = 0  # the limit that is measured, ...
        self._seen = False  # ... and whether a sample of this stay has come
        randomness = random.Random(0)
        size = range(len(self.limits_mw))
        self._normals = [
            ([randomness.gauss(0, 1) for _ in size], [randomness.gauss(0, 1) for _ in size])
            for _ in range(CURVES)
        ]

    def add(self, sample: Sample) -> None:
        """See `Search`."""
        super().add(sample)
        self._estimates.add(sample)
        self._seen = self._seen or sample.power_limit_mw == self._at

    def without(self, power_limit_mw: int) -> None:
        """See `Search`."""
        super().without(power_limit_mw)
        self._estimates.limits_mw = self.limits_mw

    def next(self, current_mw: int, position: int) -> Trial | None:
        """See `Search`."""
        if self.settled:
            return None
        # A piece's energy comes a little later; until the first one's is there, measuring goes on.
        if current_mw and current_mw == self._at and not self._seen:
            return Trial(current_mw, 0, self.piece)
        if not self.samples:
            self._at = self.limits_mw[0]
            return self._trial(self._at, current_mw)
        limit = self._most_telling(current_mw, position)
        if limit is None:
            return None
        trial = self._trial(limit, current_mw)
        budget = self.budget if self._excess < EXTEND else self._most
        if position + trial.warmup_steps + trial.steps > budget:
            return None
        if limit != current_mw:
            self._at, self._seen = limit, False
        return trial

    def estimates(self, position: int) -> list[Estimate]:
        """See `Search`."""
        if not self.samples:
            return []
        everywhere = self._estimates.posterior(position).estimates()
        return [one for one in everywhere if one.steps]

    def _trial(self, limit: int, current_mw: int) -> Trial:
        warmup = 0
        if limit != current_mw or not self._run[limit]:
            warmup = self.warmup_steps
            if self.samples:
                fastest = min(one.time_s / one.steps for one in self.samples)
                warmup = min(warmup, max(2, math.ceil(SETTLE_S / fastest)))
        return Trial(limit, warmup, self.piece)

    def _most_telling(self, current_mw: int, position: int) -> int | None:
        posterior = self._estimates.posterior(position)
        curves = posterior.curves(self._normals)
        costs = [cost for curve in curves if (cost := self.costs(curve)) is not None]
        measured = [i for i, limit in enumerate(self.limits_mw) if self._run[limit]]
        if not measured:  # what was measured has been left out since
            return self.limits_mw[0]
        if not costs:
            return self._least_known(current_mw, posterior.estimates())
        lowest = [min(cost) for cost in costs]
        excess = {
            i: sum(cost[i] / low - 1 for cost, low in zip(costs, lowest, strict=True))
            for i in measured
        }
        best = min(measured, key=lambda i: excess[i])
        self._excess = excess[best] / len(costs)
        if excess[best] / len(costs) < TOLERANCE and len(measured) > 1:
            return None
        blame = [0.0] * len(self.limits_mw)
        for cost, low in zip(costs, lowest, strict=True):
            blame[cost.index(low)] += cost[best] / low - 1
        blame[best] = 0.0

        reach = STRIDE * min(self.limits_mw[i] for i in measured)
        near = [i for i, limit in enumerate(self.limits_mw) if limit >= reach]

        def worth(i: int) -> float:
            trial = self._trial(self.limits_mw[i], current_mw)
            return blame[i] / (trial.warmup_steps + trial.steps)

        rival = max(near, key=worth)
        if blame[rival] <= 0:
            if not any(blame):
                return None
            rival = min(max(near[-1], max(measured) + 1), len(blame) - 1)  # on the way there
        known_less = min((rival, best), key=lambda i: self._run[self.limits_mw[i]])
        return self.limits_mw[known_less]

    def _least_known(self, current_mw: int, estimates: list[Estimate]) -> int | None:
        """For a selector that names no costs: every limit until its estimate is good enough."""
        for one in estimates:
            enough = one.steps >= self.profile_steps or one.time_error < GOOD_ENOUGH
            if not one.steps or not enough:
                return one.power_limit_mw
        return None


def expected_steps(name: SearchName, limits: int, warmup_steps: int, profile_steps: int) -> int:
    """How many steps a search takes at most."""
    every = limits * (warmup_steps + profile_steps)
    if name == "exhaustive":
        return every
    return min(every, 2 * _budget(limits, warmup_steps, profile_steps))


def _budget(limits: int, warmup_steps: int, profile_steps: int) -> int:
    every = limits * (warmup_steps + profile_steps)
    four = min(4, limits) * (warmup_steps + 2 * _piece(profile_steps))
    return min(every, max(every // 3, four))


def _piece(profile_steps: int) -> int:
    return max(1, profile_steps // 8)


def _averages(limits_mw: Sequence[int], samples: Sequence[Sample]) -> list[Estimate]:
    found = []
    for limit in limits_mw:
        own = [one for one in samples if one.power_limit_mw == limit]
        if not own:
            continue
        steps = sum(one.steps for one in own)
        energy_j = sum(one.energy_j for one in own)
        error = sum(one.energy_error_j for one in own) / 2 / energy_j
        time_s = sum(one.time_s for one in own) / steps
        found.append(Estimate(limit, time_s, energy_j / steps, 0.0, error, steps))
    return found

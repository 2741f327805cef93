"""The adaptive search: measures where it helps the choice most, and stops when that is enough."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from zeus.optimizer.power_limit.estimates import (
    Estimates,
    LimitCurve,
    LimitEstimate,
    SettingSample,
    visits,
)
from zeus.optimizer.power_limit.review import Review
from zeus.optimizer.power_limit.search import LimitTrial, Search, budget, expected_steps, piece
from zeus_ipc.overriding import override

Costs = Callable[[LimitCurve], "list[float] | None"]
"""The cost of each limit under a curve, in the limits' order; None: unknown."""
Choice = Callable[[Sequence[LimitEstimate], bool], int]
"""Returns the choice from estimates, mW; its second argument is whether to be cautious."""

TOLERANCE = 0.002
"""The adaptive search ends when the expected excess cost of its choice is at most this share,
..."""
EXTEND = 0.007
"""... and may take twice its steps while the expected excess is more than this."""
STRIDE = 0.7
"""The next limit is at least this share of the lowest limit tried, or of the highest candidate: low
limits may be costly."""
GOOD_ENOUGH = 0.005
"""Sufficient accuracy of a limit's time, as a fraction, if the selector gives no costs."""
CURVES = 64
"""Number of random curves for a decision."""
MEASURED = 0.6
"""Share of steps that are measured; the others warm up."""
RESTARTS = 1
"""Number of times that a search gets its steps again after training has changed."""
REACH = 0.75
"""No limit affects a job that draws less than this share of the lowest limit."""
PEAKS = 0.6
"""A limit is not a candidate if the job draws less than this share of it: its peaks are below."""
NEAR = 1.05
"""A job that draws less than this share of the lowest limit is tried there first."""
AVERAGED_S = 0.03
"""A limit acts on power averaged over some tens of milliseconds. If a step is shorter than this,
that average has no peaks: a limit above a job's mean power has no effect."""
FALL = 0.03
"""No limit affects a job whose power falls by less than this share at the lowest limit."""
SETTLE_S = 0.5
"""Clocks and power have followed a new limit after this: max(3 sensor ticks, 300 ms) and more."""


class Adaptive(Search):
    """Measures where it helps the choice most, a few steps at a time, until that is enough.

    After each piece every limit has an estimate, measured or not (`Estimates`). Random curves drawn
    from it give the expected excess cost of the present choice, and a better candidate; the less
    certain of the two is measured next. (Top-two sampling: Russo, "Simple Bayesian Algorithms for
    Best-Arm Identification", 2020.)

    A limit saves energy only where it lowers power. So limits far above the job's power are not
    candidates, and a job that draws far less than the lowest limit, or less in short steps, stays
    at the highest. A job that draws about as much is tried at the lowest limit first, and stays at
    the highest unless that lowers its power (`_unreached`).

    Contradictory measurements (`Review`) are repeated before anything else. Before a limit is
    chosen, the highest is measured again beside it; and both once more by `check`.

    It ends when the expected excess is below `TOLERANCE`, or below what the remaining steps could
    resolve; else after a third of the exhaustive search's steps, but not before four limits could
    be tried; after twice as many if the expected excess is still above `EXTEND` or the choice is
    not certain.

    Args:
        costs: The selector's costs of a curve.
        choose: Returns the choice, mW, from estimates; cautious or not. Raises ValueError if there
            is none.
        gpus: Number of GPUs that train together.
    """

    cautious = True

    def __init__(
        self,
        limits_mw: Sequence[int],
        warmup_steps: int,
        profile_steps: int,
        costs: Costs,
        choose: Choice,
        gpus: int,
    ) -> None:
        super().__init__(limits_mw, warmup_steps, profile_steps)
        self.costs = costs
        self.choose = choose
        self.piece = piece(profile_steps)
        self.budget = budget(len(self.limits_mw), warmup_steps, profile_steps)
        self._most = expected_steps("adaptive", len(limits_mw), warmup_steps, profile_steps)
        self._begun_at: int | None = 0  # position from which the budgets count; None: the next
        self._restarts = 0
        self._estimates = Estimates(self.limits_mw, gpus, horizon=self.budget)
        self._review = Review([])
        self._to_check: list[int] = []
        self._only_checks = False  # measure nothing else, unless training has changed
        self._named = True  # whether the selector gives costs
        self._excess = math.inf
        self._rivals = 2  # limits that may be the best
        self._at = 0  # the limit that is measured, ...
        self._stay = 0  # ... how many steps of this stay were run, ...
        self._seen = False  # ... and whether a sample of it has come
        randomness = random.Random(0)
        size = range(len(self.limits_mw))
        self._normals = [
            ([randomness.gauss(0, 1) for _ in size], [randomness.gauss(0, 1) for _ in size])
            for _ in range(CURVES)
        ]

    @override
    def ran(self, power_limit_mw: int, steps: int) -> None:
        super().ran(power_limit_mw, steps)
        if power_limit_mw == self._at:
            self._stay += steps

    @override
    def add(self, sample: SettingSample) -> None:
        super().add(sample)
        self._seen = self._seen or sample.power_limit_mw == self._at
        self._review = Review(self.samples)
        for one in self.samples:
            if one not in self._review.trusted:
                self._run[one.power_limit_mw] -= one.steps
        self.samples = self._estimates.samples = self._review.trusted
        if self._review.changed:
            self._only_checks = False
            if self._restarts < RESTARTS:
                self._restarts += 1
                self._begun_at = None

    @override
    def without(self, power_limit_mw: int) -> None:
        super().without(power_limit_mw)
        self._estimates.limits_mw = self.limits_mw
        self._to_check = [one for one in self._to_check if one != power_limit_mw]

    def check(self, chosen_mw: int, position: int) -> None:
        """Measures the highest limit and the choice again, some steps after the choice."""
        self._to_check = [self.limits_mw[0], chosen_mw]
        self._begun_at = None
        self._restarts = 0
        self._only_checks = True
        self.settled = False

    @override
    def next(self, current_mw: int, position: int) -> LimitTrial | None:
        if self.settled:
            return None
        # A piece's energy arrives a little later; continue measuring until the first one has.
        if current_mw and current_mw == self._at and not self._seen:
            return LimitTrial(current_mw, 0, self.piece)
        if self._begun_at is None and not (self._to_check and current_mw != self._to_check[0]):
            self._begun_at = position
        limit = self._wanted(current_mw, position)
        if limit is None:
            return None
        trial = self._trial(limit, current_mw)
        # Without the highest limit, there is nothing to compare the others with.
        alone = bool(self.samples) and not self._estimates.steps_at(self.limits_mw[0])
        if self._spent(trial, position) > self._most * (1 + alone):
            return None
        if limit != current_mw or limit != self._at:
            self._at, self._stay, self._seen = limit, 0, False
        return trial

    @property
    @override
    def reason(self) -> str:
        if self._named and self._estimates.samples and self._unreached():
            return "no limit lowers the power that this job draws"
        return ""

    @override
    def estimates(self, position: int) -> list[LimitEstimate]:
        if not self._estimates.samples:
            return []
        everywhere = self._estimates.posterior(position).estimates()
        return [one for one in everywhere if one.steps]

    def _wanted(self, current_mw: int, position: int) -> int | None:
        if self._to_check:
            if current_mw == self._to_check[0] == self._at and self._stay >= self._beside:
                self._to_check.pop(0)
            if self._to_check:
                return self._to_check[0]
        highest = self.limits_mw[0]
        if not self._estimates.steps_at(highest):
            return highest
        if self._review.doubt in self.limits_mw:
            return self._review.doubt
        if self._only_checks:
            return None
        limit = self._most_telling(current_mw, position)
        if limit is not None:
            trial = self._trial(limit, current_mw)
            if self._spent(trial, position) <= self._allowed(position):
                return limit
        return self._to_be_sure(current_mw, position)

    def _to_be_sure(self, current_mw: int, position: int) -> int | None:
        """Returns what to measure before the choice: the highest limit, or the choice itself."""
        highest = self.limits_mw[0]
        stays = visits(self._estimates.samples)
        last = {stay[0].power_limit_mw: at for at, stay in enumerate(stays)}
        if not self._named:
            alone = sum(stay[0].power_limit_mw == highest for stay in stays) < 2
            return highest if alone and len(last) > 1 else None
        estimates = self.estimates(position)
        try:
            likely = self.choose(estimates, False)
            sure = self.choose(estimates, True)
        except ValueError:
            return None  # the choice fails in the same way, and reports it
        if likely == highest:
            return None
        met = [stay[0].power_limit_mw for stay in stays].index(likely)
        here = stays[last[highest]]
        if last[highest] < met or (
            current_mw == highest == self._at and sum(one.steps for one in here) < self._beside
        ):
            return highest
        if sure == likely or self._unreached():
            return None
        return min((likely, highest), key=self._estimates.steps_at)

    def _spent(self, trial: LimitTrial, position: int) -> int:
        """Steps of the search, with those of a trial."""
        begun_at = position if self._begun_at is None else self._begun_at
        return position - begun_at + trial.warmup_steps + trial.steps

    def _allowed(self, position: int) -> int:
        """Returns how many steps the search may take."""
        left = (self._most - self._spent(LimitTrial(0, 0, 0), position)) * MEASURED
        # The remaining steps, shared by all candidates, could not distinguish limits that differ by
        # less.
        each = max(1.0, left / self._rivals)
        apart = self._estimates.step_noise() * math.sqrt(2 / each)
        if self._excess >= max(EXTEND, apart):
            return self._most
        # The highest limit is still to be measured beside the choice.
        return self.budget - self._beside - self._trial(self.limits_mw[0], 0).warmup_steps

    @property
    def _beside(self) -> int:
        """Steps at the highest limit beside the choice."""
        return 2 * self.piece

    def _trial(self, limit: int, current_mw: int) -> LimitTrial:
        warmup = 0
        if limit != current_mw or not self._run[limit]:
            warmup = self.warmup_steps
            if self.samples:
                fastest = min(one.time_s / one.steps for one in self.samples)
                warmup = min(warmup, max(2, math.ceil(SETTLE_S / fastest)))
        return LimitTrial(limit, warmup, self.piece)

    def _unreached(self) -> bool | None:
        """Whether no limit lowers the job's power; None: the lowest limit must be tried to know."""
        draw, lowest = self._estimates.draw_mw(), self.limits_mw[-1]
        if draw < REACH * lowest or (draw < lowest and self._estimates.step_s() < AVERAGED_S):
            return True
        if draw > NEAR * lowest:
            return False
        if not self._estimates.steps_at(lowest):
            return None
        fall, error = self._estimates.fall_at(lowest)
        if abs(fall - FALL) < error and self._run[lowest] < self.profile_steps // 2:
            return None
        return fall < FALL + error

    def _most_telling(self, current_mw: int, position: int) -> int | None:
        posterior = self._estimates.posterior(position)
        curves = posterior.curves(self._normals)
        costs = [cost for curve in curves if (cost := self.costs(curve)) is not None]
        measured = [i for i, one in enumerate(self.limits_mw) if self._estimates.steps_at(one)]
        self._named = bool(costs)
        if not costs:
            return self._least_known(posterior.estimates())
        unreached = self._unreached()
        if unreached is not False:
            self._excess = 0.0
            ends = self.limits_mw[-1], self.limits_mw[0]
            return None if unreached else min(ends, key=self._estimates.steps_at)
        caps_mw = self._estimates.draw_mw() / PEAKS
        within = [i for i, one in enumerate(self.limits_mw) if i in measured or one <= caps_mw]
        lowest = [min(cost[i] for i in within) for cost in costs]
        excess = {
            i: sum(cost[i] / low - 1 for cost, low in zip(costs, lowest, strict=True))
            for i in measured
        }
        best = min(measured, key=lambda i: excess[i])
        self._excess = excess[best] / len(costs)
        if self._excess < TOLERANCE and len(measured) > 1:
            return None
        blame = [0.0] * len(self.limits_mw)
        for cost, low in zip(costs, lowest, strict=True):
            blame[min(within, key=cost.__getitem__)] += cost[best] / low - 1
        blame[best] = 0.0
        self._rivals = max(2, sum(one > 0 for one in blame))

        reach = STRIDE * min(caps_mw, *(self.limits_mw[i] for i in measured))
        near = [i for i in within if self.limits_mw[i] >= reach]

        def worth(i: int) -> float:
            trial = self._trial(self.limits_mw[i], current_mw)
            return blame[i] / (trial.warmup_steps + trial.steps)

        rival = max(near, key=worth)
        if blame[rival] <= 0:
            if not any(blame):
                return None
            lower = [i for i in within if i > max(measured)]
            rival = max(near[-1], *lower[:1])  # on the way there
        known_less = min((rival, best), key=lambda i: self._run[self.limits_mw[i]])
        return self.limits_mw[known_less]

    def _least_known(self, estimates: list[LimitEstimate]) -> int | None:
        """For a selector without costs: every limit until its estimate is accurate enough."""
        for one in estimates:
            enough = one.steps >= self.profile_steps or one.time_error < GOOD_ENOUGH
            if not one.steps or not enough:
                return one.power_limit_mw
        return None

"""The adaptive search: measures where it helps the choice most, and stops when that is enough."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from zeus.optimizer.power_limit.estimates import (
    Curve,
    Estimates,
    LimitEstimate,
    SettingSample,
    averages,
    visits,
)
from zeus.optimizer.power_limit.review import Review
from zeus.optimizer.power_limit.search import (
    LimitTrial,
    Outstanding,
    Search,
    budget,
    expected_steps,
    piece,
)
from zeus_ipc.overriding import override

Costs = Callable[[Curve], "list[float] | None"]
"""The cost of each limit under a curve, in the limits' order; None: unknown."""
Choice = Callable[[Sequence[LimitEstimate], bool], LimitEstimate]
"""Returns the choice from estimates; its second argument is whether to be cautious."""

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
REACH = 0.75
"""No limit affects a job that draws less than this share of the lowest limit."""
PEAKS = 0.6
"""A limit is not a candidate if the job draws less than this share of it: its peaks are below."""
MOMENTS = 0.01
"""Power never limits a GPU at a limit where it does for at most this share of the time."""
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
    chosen, the highest is measured again beside it.

    It ends when the expected excess is below `TOLERANCE`; else after a third of the exhaustive
    search's steps, but not before four limits could be tried; after twice as many if the expected
    excess is still above `EXTEND` or the choice is not certain.

    Where drivers count the time in which power limited the clocks, limits that do not bind are not
    told apart: while none has, the next one is at most the measured power; later, none is above one
    that did not bind.

    Args:
        costs: The selector's costs of a curve.
        choose: Returns the choice from estimates; cautious or not. Raises ValueError if there is
            none.
        gpus: Number of GPUs that train together.
    """

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
        self.gpus = gpus
        self.piece = piece(profile_steps)
        self.budget = budget(len(self.limits_mw), warmup_steps, profile_steps)
        self._most = expected_steps("adaptive", len(limits_mw), warmup_steps, profile_steps)
        self._begun_at: int | None = None  # position from which the budgets count; None: the next
        self._restarted = False  # with new steps, as training had changed; once
        self._doubt: int | None = None  # see `Review.doubt`
        self._named = True  # whether the selector gives costs
        self._excess = math.inf
        self._since: float | None = None  # position from which this stay began; None: none has
        self._outstanding: Outstanding = {}
        randomness = random.Random(0)
        size = range(len(self.limits_mw))
        normals = [[randomness.gauss(0, 1) for _ in size] for _ in range(2 * CURVES)]
        self._normals = normals[::2], normals[1::2]  # for times and powers

    @override
    def add(self, sample: SettingSample) -> None:
        super().add(sample)
        review = Review(self.samples)
        self.samples, self._doubt = review.trusted, review.doubt
        if review.changed and not self._restarted:
            self._restarted, self._begun_at = True, None

    @override
    def next(self, current_mw: int, position: int, outstanding: Outstanding) -> LimitTrial | None:
        self._outstanding = outstanding
        if not self.samples and self._begun_at is not None:  # waiting for the first is no search
            first = self._trial(self.limits_mw[0], 0)
            self._begun_at = max(self._begun_at, position - first.warmup_steps - first.steps)
        # A piece's energy arrives a little later; continue measuring until the first one has.
        if current_mw and self._since is not None and not self._seen(current_mw):
            return LimitTrial(current_mw, 0, self.piece)
        if self._begun_at is None:
            self._begun_at = position
        limit = self._wanted(current_mw, position)
        if limit is None:
            return None
        trial = self._trial(limit, current_mw)
        # Without the highest limit, there is nothing to compare the others with.
        alone = bool(self.samples) and not self._steps(self.limits_mw[0])
        if self._spent(trial, position) > self._most * (1 + alone):
            return None
        if limit != current_mw or self._since is None:
            self._since = position
        return trial

    @property
    @override
    def reason(self) -> str:
        if self._named and self.samples and self._unreached():
            return "no limit lowers the power that this job draws"
        if len(self.limits_mw) > 1 and len({one.power_limit_mw for one in self.samples}) == 1:
            return "no other was measured in time"
        return ""

    @override
    def estimates(self) -> list[LimitEstimate]:
        if not self.samples:
            return []
        return [one for one in self._everywhere().limits() if one.steps]

    def _everywhere(self) -> Estimates:
        return Estimates(self.limits_mw, self.samples, self.gpus)

    def _steps(self, power_limit_mw: int) -> int:
        """Steps of a limit that are known."""
        return self._run(power_limit_mw, {})

    def _seen(self, current_mw: int) -> int:
        """Steps of this stay that are known."""
        since = math.inf if self._since is None else self._since
        here = [one for one in self.samples if one.power_limit_mw == current_mw]
        return sum(one.steps for one in here if one.position > since)

    def _stayed(self, limit: int, current_mw: int) -> bool:
        """Whether this stay is at a limit, and long enough to compare it with others."""
        run = self._seen(limit) + self._outstanding.get(limit, 0)
        return current_mw == limit and run >= self._beside

    def _wanted(self, current_mw: int, position: int) -> int | None:
        highest = self.limits_mw[0]
        if not self._steps(highest):
            return highest
        if self._doubt in self.limits_mw:
            return self._doubt
        limit = self._most_telling(current_mw)
        if limit is not None:
            trial = self._trial(limit, current_mw)
            if self._spent(trial, position) <= self._allowed():
                return limit
        return self._to_be_sure(current_mw)

    def _to_be_sure(self, current_mw: int) -> int | None:
        """Returns what to measure before the choice: the highest limit, or the choice itself."""
        highest = self.limits_mw[0]
        stays = [stay[0].power_limit_mw for stay in visits(self.samples)]
        if not self._named:
            return highest if stays.count(highest) < 2 and len({*stays}) > 1 else None
        estimates = self.estimates()
        try:
            likely, sure = (self.choose(estimates, one).power_limit_mw for one in (False, True))
        except ValueError:
            return None  # the choice fails in the same way, and reports it
        if likely == highest:
            return None
        beside = stays.index(likely) < len(stays) - 1 - stays[::-1].index(highest)
        if not beside or (current_mw == highest and not self._stayed(highest, current_mw)):
            return highest
        if sure == likely or self._unreached():
            return None
        return min((likely, highest), key=self._steps)

    def _spent(self, trial: LimitTrial, position: int) -> int:
        """Steps of the search, with those of a trial."""
        begun_at = position if self._begun_at is None else self._begun_at
        return position - begun_at + trial.warmup_steps + trial.steps

    def _allowed(self) -> int:
        """Returns how many steps the search may take."""
        if self._excess >= EXTEND:
            return self._most
        # The highest limit is still to be measured beside the choice.
        return self.budget - self._beside - self._trial(self.limits_mw[0], 0).warmup_steps

    @property
    def _beside(self) -> int:
        """Steps at the highest limit beside the choice."""
        return 2 * self.piece

    def _trial(self, limit: int, current_mw: int) -> LimitTrial:
        warmup = 0
        if limit != current_mw or not self._run(limit, self._outstanding):
            warmup = self.warmup_steps
            if self.samples:
                fastest = min(one.step_s for one in self.samples)
                warmup = min(warmup, max(2, math.ceil(SETTLE_S / fastest)))
        return LimitTrial(limit, warmup, self.piece)

    def _unreached(self) -> bool | None:
        """Whether no limit lowers the job's power; None: the lowest limit must be tried to know."""
        measured = averages(self.samples)
        highest, lowest_mw = measured[0], self.limits_mw[-1]
        if lowest_mw in self._free():
            return True
        draw_mw = self._draw_mw(highest)
        if draw_mw < REACH * lowest_mw:
            return True
        if draw_mw < lowest_mw and highest.time_s < AVERAGED_S:
            return True
        if draw_mw > NEAR * lowest_mw:
            return False
        lowest = measured[-1]
        if lowest.power_limit_mw != lowest_mw:
            return None
        ratio = lowest.power_w / highest.power_w
        error = ratio * math.hypot(lowest.power_error, highest.power_error)
        unclear = abs(1 - ratio - FALL) < error
        if unclear and self._run(lowest_mw, self._outstanding) < self.profile_steps // 2:
            return None
        return 1 - ratio < FALL + error

    def _free(self) -> set[int]:
        """The limits at which power never limited a GPU's clocks, where drivers count that."""
        counted = [one for one in self.samples if one.limited_s is not None]
        bound = {
            one.power_limit_mw for one in counted if (one.limited_s or 0) > MOMENTS * one.time_s
        }
        return {one.power_limit_mw for one in counted} - bound

    def _draw_mw(self, highest: LimitEstimate) -> float:
        """Mean power of a GPU at the highest measured limit."""
        return highest.power_w / self.gpus * 1000

    def _most_telling(self, current_mw: int) -> int | None:
        everywhere = self._everywhere()
        curves = everywhere.curves(*self._normals)
        costs = [cost for curve in curves if (cost := self.costs(curve)) is not None]
        measured = [i for i, one in enumerate(self.limits_mw) if self._steps(one)]
        self._named = bool(costs)
        if not costs:
            return self._first_unknown(everywhere.limits())
        unreached = self._unreached()
        if unreached is not False:
            self._excess = 0.0
            ends = self.limits_mw[-1], self.limits_mw[0]
            return None if unreached else min(ends, key=self._steps)
        draw_mw, free = self._draw_mw(averages(self.samples)[0]), self._free()
        # Limits over this do not bind, or not more than a measured one.
        caps_mw = min(draw_mw / PEAKS, *free, self.limits_mw[0])
        reach_mw = STRIDE * min(caps_mw, *(self.limits_mw[i] for i in measured))
        if all(self.limits_mw[i] in free for i in measured):
            caps_mw = min(caps_mw, draw_mw)
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
        near = [i for i in within if self.limits_mw[i] >= reach_mw]

        def worth(i: int) -> float:
            trial = self._trial(self.limits_mw[i], current_mw)
            return blame[i] / (trial.warmup_steps + trial.steps)

        rival = max(near, key=worth)
        if blame[rival] <= 0:
            if not any(blame):
                return None
            lower = [i for i in within if i > max(measured)]
            rival = max(near[-1], *lower[:1])  # on the way there
        two = self.limits_mw[rival], self.limits_mw[best]
        return min(two, key=lambda limit: self._run(limit, self._outstanding))

    def _first_unknown(self, estimates: list[LimitEstimate]) -> int | None:
        """For a selector without costs: every limit until its estimate is accurate enough."""
        for one in estimates:
            vague = one.time_error >= GOOD_ENOUGH and one.steps < self.profile_steps
            if vague or not one.steps:
                return one.power_limit_mw
        return None

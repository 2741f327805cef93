"""Decides which samples to trust, and which limit to measure again before the choice. Training
varies: it starts slowly, warms up, is interrupted. Three things reveal that:

    pieces of one stay at a limit differ        an interruption, or the end of a slow start
    a limit measured again is not what it was   everything that was measured before is of no use
    a lower limit is faster than a higher one   the higher one is measured again

None leads to a choice; each leads to more measurement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from zeus.optimizer.power_limit.estimates import STEP_NOISE, SettingSample, step_noise, visits

PIECES_DIFFER = 4.0
"""Standard deviations between two pieces of one stay, and at least ..."""
PIECES_DIFFER_BY = 0.05
"""... so much of their time."""
CHANGED = 3.0
"""Standard deviations between two stays at one limit, and at least ..."""
CHANGED_BY = 0.05
"""... so much; less is the drift that estimates allow for."""
FASTER = 3.0
"""Standard deviations by which a lower limit is faster than a higher one, and at least ..."""
FASTER_BY = 0.02
"""... so much."""
MOST_PIECES = 5
"""A stay whose pieces never agree is accepted after this many."""


class Review:
    """Decides which samples to trust, of those in the order in which they were run.

    Attributes:
        trusted: The trusted ones, in the same order.
        changed: Whether training has changed, so that all earlier samples are excluded.
        doubt: The limit that must be measured next, mW; None: no contradiction is left.
    """

    def __init__(self, samples: Sequence[SettingSample]) -> None:
        self.doubt: int | None = None
        self.changed = False
        stays = visits(samples)
        trusted: list[SettingSample] = []
        for at, stay in enumerate(stays):
            agreed = _agreeing(stay)
            if agreed is None:
                later = [one for one in stays[at + 1 :] if _limit(one) == _limit(stay)]
                if later:
                    agreed = [one for one in stay if not _differ(one, later[0][0])]
                else:
                    agreed, self.doubt = stay, _limit(stay)
            trusted += agreed
        self.trusted = self._since_the_last_change(trusted)
        if self.doubt is None:
            self.doubt = self._too_slow()

    def _since_the_last_change(self, samples: list[SettingSample]) -> list[SettingSample]:
        stays = visits(samples)
        noise = step_noise(samples)
        for at in range(len(stays) - 1, 0, -1):
            here = stays[at]
            before = next((one for one in stays[at - 1 :: -1] if _limit(one) == _limit(here)), None)
            if before is None or not _changed(before, here, noise):
                continue
            if len(here) == 1 and at == len(stays) - 1:
                self.doubt = _limit(here)  # one piece may be an interruption
                return samples
            if len(here) > 1:
                self.changed = True
                return [one for stay in stays[at:] for one in stay]
        return samples

    def _too_slow(self) -> int | None:
        """Returns a limit that was measured, only once, to be slower than a lower one."""
        stays = visits(self.trusted)
        noise = step_noise(self.trusted)
        last = {_limit(stay): at for at, stay in enumerate(stays)}
        often = Counter(map(_limit, stays))
        limits = sorted(last, reverse=True)
        for place, high in enumerate(limits):
            if often[high] > 1 or last[high] == len(stays) - 1:
                continue
            for low in limits[place + 1 :]:
                slow, fast = stays[last[high]], stays[last[low]]
                off = math.log(_step_s(slow) / _step_s(fast))
                if off > max(FASTER_BY, FASTER * _error(slow, fast, noise)):
                    return high
        return None


def _limit(stay: Sequence[SettingSample]) -> int:
    return stay[0].power_limit_mw


def _steps(stay: Sequence[SettingSample]) -> int:
    return sum(one.steps for one in stay)


def _step_s(stay: Sequence[SettingSample]) -> float:
    return sum(one.time_s for one in stay) / _steps(stay)


def _error(a: Sequence[SettingSample], b: Sequence[SettingSample], noise: float) -> float:
    return noise * math.sqrt(1 / _steps(a) + 1 / _steps(b))


def _agreeing(stay: list[SettingSample]) -> list[SettingSample] | None:
    """Returns the pieces of a stay that agree, if most do; None if another one is needed."""
    newest = stay[-1]
    agree = [one for one in stay if not _differ(one, newest)]
    if len(agree) > 1 or len(stay) == 1:
        return agree
    others = stay[:-1]
    if len(others) > 1 and not any(_differ(one, others[-1]) for one in others):
        return others  # the newest was interrupted
    return stay if len(stay) >= MOST_PIECES else None


def _differ(a: SettingSample, b: SettingSample) -> bool:
    off = abs(math.log(_step_s([a]) / _step_s([b])))
    return off > max(PIECES_DIFFER_BY, PIECES_DIFFER * _error([a], [b], STEP_NOISE))


def _changed(a: Sequence[SettingSample], b: Sequence[SettingSample], noise: float) -> bool:
    off = abs(math.log(_step_s(a) / _step_s(b)))
    return off > max(CHANGED_BY, CHANGED * _error(a, b, noise))

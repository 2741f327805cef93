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

from zeus.optimizer.power_limit.estimates import (
    STEP_NOISE,
    SettingSample,
    merged,
    step_noise,
    visits,
)

DEVIATIONS = 3.0
"""Steps differ by at least this many standard deviations, ..."""
APART = 0.05
"""... and by so much of their time; less is the drift that estimates allow for. But ..."""
FASTER = 0.02
"""... a lower limit is faster than a higher one by this."""
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
                later = [one[0] for one in stays[at + 1 :] if _limit(one[0]) == _limit(stay[0])]
                if later:
                    agreed = [one for one in stay if not _differ(one, later[0])]
                else:
                    agreed, self.doubt = stay, _limit(stay[0])
            trusted += agreed
        self.trusted = self._since_the_last_change(trusted)
        if self.doubt is None:
            self.doubt = self._too_slow()

    def _since_the_last_change(self, samples: list[SettingSample]) -> list[SettingSample]:
        stays = visits(samples)
        whole = [merged(stay) for stay in stays]
        noise = step_noise(samples)
        for at in range(len(stays) - 1, 0, -1):
            here = whole[at]
            before = next((one for one in whole[at - 1 :: -1] if _limit(one) == _limit(here)), None)
            if before is None or not _differ(here, before, noise):
                continue
            if len(stays[at]) > 1:
                self.changed = True
                return [one for stay in stays[at:] for one in stay]
            if at == len(stays) - 1:
                self.doubt = _limit(here)  # one piece may be an interruption
                return samples
        return samples

    def _too_slow(self) -> int | None:
        """Returns a limit that was measured, only once, to be slower than a lower one."""
        stays = [merged(stay) for stay in visits(self.trusted)]
        noise = step_noise(self.trusted)
        last = {_limit(stay): stay for stay in stays}
        often = Counter(map(_limit, stays))
        for high in sorted(last, reverse=True):
            if often[high] > 1 or last[high] is stays[-1]:
                continue
            lower = [stay for limit, stay in last.items() if limit < high]
            if any(_slower(last[high], one, noise, FASTER) for one in lower):
                return high
        return None


def _limit(stay: SettingSample) -> int:
    return stay.power_limit_mw


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


def _differ(a: SettingSample, b: SettingSample, noise: float = STEP_NOISE) -> bool:
    return _slower(a, b, noise, APART) or _slower(b, a, noise, APART)


def _slower(a: SettingSample, b: SettingSample, noise: float, by: float) -> bool:
    """Whether a sample's steps are slower than another's by so much of their time, where single
    steps vary by `noise`.
    """
    error = noise * math.sqrt(1 / a.steps + 1 / b.steps)
    return math.log(a.step_s / b.step_s) > max(by, DEVIATIONS * error)

"""Searches workload power profiles beside limits: a candidate is a pair of the two.

Pure, like every search. A search that has ended for one profile is not used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zeus.optimizer.power_limit.estimates import LimitEstimate, Sample
from zeus.optimizer.power_limit.search import Exhaustive, LimitTrial, Search
from zeus_ipc.overriding import override

Reference = Callable[[], list[LimitEstimate]]
"""The estimate at the highest limit without a profile, to compare others with; empty: unknown yet,
or the limit in question has no profile."""
Make = Callable[[Reference], Search]
"""Creates a search of all limits under one profile."""
Best = Callable[[Sequence[LimitEstimate]], LimitEstimate]
"""The cautious choice among candidates; the first one is the reference."""


@dataclass
class _Family:
    """The search under one profile.

    Attributes:
        profile: The profile; None: none.
    """

    profile: int | None
    search: Search
    begun: int
    over: bool = False


class WithProfiles(Search):
    """Searches pairs of a limit and a profile in three stages.

    Limits without a profile come first, as in a search without profiles. Then each profile is
    measured at the highest limit. If the best of them is better than none there, lower limits under
    it are searched. The exhaustive search measures all pairs instead.
    """

    def __init__(
        self,
        limits_mw: Sequence[int],
        profiles: Sequence[int],
        warmup_steps: int,
        profile_steps: int,
        make: Make,
        best: Best,
        brief_steps: int | None,
    ) -> None:
        super().__init__(limits_mw, warmup_steps, profile_steps)
        self._untried = list(profiles)
        self._make = make
        self._best = best
        self._brief_steps = brief_steps
        self._deepened = brief_steps is None
        self._families = [_Family(None, make(list), 0)]
        self._highest: list[
            LimitEstimate
        ] = []  # the reference, for this number of samples without a profile
        self._referred = 0

    @override
    def ran(self, power_limit_mw: int, steps: int, profile: int | None = None) -> None:
        if (family := self._family(profile)) is not None:
            family.search.ran(power_limit_mw, steps)

    @override
    def lost(self, power_limit_mw: int, steps: int, profile: int | None = None) -> None:
        if (family := self._family(profile)) is not None:
            family.search.lost(power_limit_mw, steps)

    @override
    def add(self, sample: Sample) -> None:
        if (family := self._family(sample.profile)) is not None:
            family.search.add(replace(sample, position=sample.position - family.begun))
        self.samples = [
            replace(one, position=one.position + family.begun)
            for family in self._families
            for one in family.search.samples
        ]

    @override
    def resume(self, samples: Sequence[Sample], position: int = 0) -> None:
        for profile in list(self._untried):
            own = [one for one in samples if one.profile == profile]
            if own:
                begun = int(own[0].position - own[0].steps / 2)
                deep = any(one.power_limit_mw < self.limits_mw[0] for one in own)
                self._deepened |= deep
                self._try(profile, begun, deep)
        super().resume(samples, position)

    @property
    @override
    def pending(self) -> bool:
        return any(family.search.pending for family in self._families)

    @property
    @override
    def reason(self) -> str:
        return self._families[0].search.reason

    @override
    def check(self, chosen_mw: int, position: int, profile: int | None = None) -> None:
        self.settled = False
        self._untried, self._deepened = [], True
        plain, family = self._families[0], self._family(profile)
        # A choice with a profile is compared with the highest limit without one.
        limit = chosen_mw if profile is None else self.limits_mw[0]
        for one, checked in ((plain, limit), (family, chosen_mw)):
            if one is not None:
                one.search.check(checked, position - one.begun)
                one.over = False

    @override
    def without(self, power_limit_mw: int, profile: int | None = None) -> None:
        if profile is not None and power_limit_mw == self.limits_mw[0]:
            self._families = [one for one in self._families if one.profile != profile]
            self._untried = [one for one in self._untried if one != profile]
            return
        if profile is None:
            super().without(power_limit_mw)
        for family in self._families:
            if profile in (None, family.profile) and power_limit_mw in family.search.limits_mw:
                family.search.without(power_limit_mw)

    @override
    def next(self, current_mw: int, position: int, profile: int | None = None) -> LimitTrial | None:
        while not self.settled:
            for family in self._families:
                if family.over:
                    continue
                here = current_mw if family.profile == profile else 0
                trial = family.search.next(here, position - family.begun)
                if trial is not None:
                    return replace(trial, profile=family.profile)
                if family.search.pending:
                    return None
                family.over = True
            if not self._extend(position):
                break
        return None

    @override
    def estimates(self, position: int) -> list[LimitEstimate]:
        found: list[LimitEstimate] = []
        for family in self._families:
            own = family.search.estimates(position - family.begun)
            if family.profile is None:
                found += own
            elif found:
                first = found[0]
                found += [
                    replace(
                        one,
                        profile=family.profile,
                        time_ratio_error=math.hypot(one.time_error, first.time_error),
                        energy_ratio_error=math.hypot(one.energy_error, first.energy_error),
                    )
                    for one in own
                ]
        return found

    def _family(self, profile: int | None) -> _Family | None:
        """None: the profile was excluded meanwhile."""
        return next((one for one in self._families if one.profile == profile), None)

    def _reference(self) -> list[LimitEstimate]:
        plain = self._families[0].search
        if self._referred != (known := len(plain.samples)):
            last = max((one.position for one in plain.samples), default=0.0)
            self._referred, self._highest = known, plain.estimates(round(last))[:1]
        return self._highest

    def _try(self, profile: int, position: int, deep: bool = False) -> None:
        """Starts a profile: at the highest limit, or at all of them."""
        self._untried.remove(profile)
        if deep or self._brief_steps is None:
            search = self._make(self._reference)
        else:
            search = Exhaustive(self.limits_mw[:1], self.warmup_steps, self._brief_steps)
        self._families.append(_Family(profile, search, position))

    def _extend(self, position: int) -> bool:
        """Starts what is next, once everything started has ended. Returns False if nothing is
        left.
        """
        if self._untried:
            self._try(self._untried[0], position)
            return True
        if self._deepened:
            return False
        self._deepened = True
        highest = self.limits_mw[0]
        there = [one for one in self.estimates(position) if one.power_limit_mw == highest]
        try:
            family = self._family(self._best(there).profile)
        except ValueError:
            return False  # the choice fails in the same way, and reports it
        if family is None or family.profile is None:
            return False
        samples = [
            replace(one, position=one.position + family.begun - position)
            for one in family.search.samples
        ]
        family.search, family.begun = self._make(self._reference), position
        family.search.resume(samples)
        family.over = False
        return True

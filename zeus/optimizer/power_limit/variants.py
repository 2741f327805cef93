"""The search of settings: limits, and beside them workload power profiles or bounds of the graphics
clock.

What is beside a limit is a variant. Limits alone come first, as if there were no variants. Then
each variant is measured at the highest limit, in a few steps; clocks from the highest down, until
two lower ones were no better. If the best variant is better than none there, lower limits under it
are searched. The exhaustive search measures all pairs instead.

Pure, like every search. A search that has ended for one variant is not used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zeus.optimizer.power_limit.estimates import LimitEstimate, SettingSample
from zeus.optimizer.power_limit.search import Exhaustive, LimitTrial, Search
from zeus.optimizer.power_limit.settings import KINDS, Beside, Setting

Reference = Callable[[], list[LimitEstimate]]
"""The estimate at the highest limit alone, to compare others with; empty: unknown yet, or the
limits in question are alone."""
Make = Callable[[Reference], Search]
"""Creates a search of all limits under one variant."""
Best = Callable[[Sequence[LimitEstimate]], LimitEstimate]
"""The cautious choice among candidates; the first one is the reference."""

CLOCKS_BEHIND = 2
"""Clocks are not lowered further once the best is this many above the lowest that was measured."""


@dataclass
class _Family:
    """The search under one variant."""

    beside: Beside | None
    search: Search
    over: bool = False


class SettingsSearch:
    """Searches settings.

    Args:
        variants: What to search beside limits; clocks descend.
        brief_steps: Steps in which a variant is measured at the highest limit; None: all pairs are
            measured.

    Attributes:
        best: The choice among estimates; raises ValueError if there is none.
        position: Where it begins: steps of an earlier run.
    """

    def __init__(
        self,
        make: Make,
        variants: Sequence[Beside] = (),
        best: Best = lambda candidates: candidates[0],
        brief_steps: int | None = None,
    ) -> None:
        self.position = 0
        self.settled = False
        self._make = make
        self._untried = list(variants)
        self.best = best
        self._brief_steps = brief_steps
        self._deepened = brief_steps is None or not variants
        self._families = [_Family(None, make(list))]
        self._highest: list[LimitEstimate] = []  # the reference, for this many samples of limits
        self._referred = 0

    @property
    def limits_mw(self) -> list[int]:
        """The limits that may be tried alone, mW, descending."""
        return self._families[0].search.limits_mw

    @property
    def reason(self) -> str:
        """Why it has ended, if not because enough is known."""
        return self._families[0].search.reason

    @property
    def samples(self) -> list[SettingSample]:
        """All that count."""
        return [one for family in self._families for one in family.search.samples]

    def add(self, sample: SettingSample) -> None:
        """The sample of steps that were run."""
        if (family := self._family(sample)) is not None:
            family.search.add(sample)
            family.over = False  # a late sample may show that training has changed

    def resume(self, samples: Sequence[SettingSample], position: int = 0) -> None:
        """Adds the measurements of an earlier run of the same job, until a position."""
        self.position = position
        limits = list(self.limits_mw)
        for variant in list(self._untried):
            own = [one for one in samples if one.beside == variant]
            if own:
                deep = any(one.power_limit_mw < limits[0] for one in own)
                self._deepened |= deep
                self._try(variant, deep)
        for sample in samples:
            if sample.power_limit_mw in limits:
                self.add(sample)

    def without(self, setting: Setting) -> None:
        """A setting cannot be set: excludes it, with all limits under a variant that the highest
        limit does not take.
        """
        limit = setting.power_limit_mw
        if setting.beside is not None and limit == self.limits_mw[0]:
            self._families = [one for one in self._families if one.beside != setting.beside]
            self._untried = [one for one in self._untried if one != setting.beside]
            return
        for family in self._families:
            affected = setting.beside in (None, family.beside)
            if affected and limit in family.search.limits_mw:
                family.search.without(limit)

    def next(
        self,
        current: Setting | None,
        position: int,
        outstanding: Sequence[tuple[Setting, int]] = (),
    ) -> LimitTrial | None:
        """What to run next; None: enough is known, or will be when the last samples arrive.

        Args:
            current: The setting in force.
            position: Training steps since the search began.
            outstanding: Steps that were run, and whose samples have not arrived.
        """
        while not self.settled:
            for family in self._families:
                if family.over:
                    continue
                here = 0
                if current is not None and current.beside == family.beside:
                    here = current.power_limit_mw
                waits: Counter[int] = Counter()
                for setting, steps in outstanding:
                    if setting.beside == family.beside:
                        waits[setting.power_limit_mw] += steps
                trial = family.search.next(here, position, waits)
                if trial is not None:
                    return replace(trial, beside=family.beside)
                if waits:
                    return None
                family.over = True
            if not self._extend():
                break
        return None

    def estimates(self) -> list[LimitEstimate]:
        """Estimates of the measured settings: limits alone come first, descending."""
        found: list[LimitEstimate] = []
        for family in self._families:
            own = family.search.estimates()
            if family.beside is None:
                found += own
            elif found:
                first = found[0]
                found += [replace(one, beside=family.beside).against(first) for one in own]
        return found

    def _family(self, of: Setting) -> _Family | None:
        """None: the variant was excluded meanwhile."""
        return next((one for one in self._families if one.beside == of.beside), None)

    def _reference(self) -> list[LimitEstimate]:
        alone = self._families[0].search
        if self._referred != (known := len(alone.samples)):
            self._referred, self._highest = known, alone.estimates()[:1]
        return self._highest

    def _try(self, variant: Beside, deep: bool = False) -> None:
        """Starts a variant: at the highest limit, or at all of them."""
        self._untried.remove(variant)
        search = self._make(self._reference)
        if not deep and self._brief_steps is not None:
            search = Exhaustive(search.limits_mw[:1], search.warmup_steps, self._brief_steps)
        self._families.append(_Family(variant, search))

    def _extend(self) -> bool:
        """Starts what is next, once everything started has ended. Returns False if nothing is
        left.
        """
        if self._untried and _descends(self._untried[0]) and self._brief_steps is not None:
            self._skip_lower()
        if self._untried:
            self._try(self._untried[0])
            return True
        family = None if self._deepened else self._best_family()
        self._deepened = True
        if family is None or family.beside is None:
            return False
        earlier, family.search = family.search.samples, self._make(self._reference)
        for one in earlier:
            family.search.add(one)
        family.over = False
        return True

    def _best_family(self) -> _Family | None:
        """The family of the best candidate at the highest limit; None: the choice fails."""
        highest = self.limits_mw[0]
        there = [one for one in self.estimates() if one.power_limit_mw == highest]
        try:
            return self._family(self.best(there))
        except ValueError:
            return None  # the choice will fail in the same way, and report it

    def _skip_lower(self) -> None:
        """Leaves out the clocks that are left, if the lowest measured ones are not the best."""
        lowest = [one for one in self._families if _descends(one.beside)][-CLOCKS_BEHIND:]
        if len(lowest) == CLOCKS_BEHIND and self._best_family() not in lowest:
            self._untried = [one for one in self._untried if not _descends(one)]


def _descends(variant: Beside | None) -> bool:
    return variant is not None and KINDS[variant.kind].descends

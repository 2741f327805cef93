"""Decides what to measure next, for how many steps, and when enough is known. Pure: a search
receives what was run and its measurements, and returns what to run next. It has no monitor, no
clock and no other process.

`SettingsSearch` searches settings: limits, and beside them variants, which are workload power
profiles or bounds of the graphics clock. Limits alone come first, as if there were none. Then each
variant is measured at the highest limit, in a few steps; clocks from the highest down, until two
lower ones were no better. If the best variant is better than none there, lower limits under it are
searched. The exhaustive search measures all pairs instead. A search that has ended for one variant
is not used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zeus.optimizer.power_limit.estimates import LimitEstimate, SettingSample, averages
from zeus.optimizer.power_limit.settings import KINDS, Beside, Setting
from zeus_ipc.overriding import override

SearchName = Literal["adaptive", "exhaustive"]
Outstanding = Mapping[int, int]

Reference = Callable[[], list[LimitEstimate]]
"""The estimate at the highest limit alone, to compare others with; empty: unknown yet, or the
limits in question are alone."""
Make = Callable[[Reference], "Search"]
"""Creates a search of all limits under one variant."""
Best = Callable[[Sequence[LimitEstimate]], LimitEstimate]
"""The cautious choice among candidates; the first one is the reference."""

CLOCKS_BEHIND = 2
"""Clocks are not lowered further once the best is this many above the lowest that was measured."""


@dataclass(frozen=True)
class LimitTrial(Setting):
    """What to run next: a setting, unmeasured steps if it is a new one, and measured steps."""

    warmup_steps: int
    steps: int


class Search(ABC):
    """Measures limits until it knows enough. Positions are training steps since it began.

    Args:
        limits_mw: The limits, mW, descending.
        warmup_steps: Unmeasured steps after a change of the limit.
        profile_steps: Measured steps at each limit, at most or always.

    Attributes:
        samples: All that count.
    """

    def __init__(self, limits_mw: Sequence[int], warmup_steps: int, profile_steps: int) -> None:
        self.limits_mw = list(limits_mw)
        self.warmup_steps = warmup_steps
        self.profile_steps = profile_steps
        self.samples: list[SettingSample] = []

    def add(self, sample: SettingSample) -> None:
        """The sample of steps that were run."""
        self.samples.append(sample)

    @property
    def reason(self) -> str:
        """Why it has ended, if not because enough is known."""
        return ""

    def without(self, power_limit_mw: int) -> None:
        """A limit cannot be set: excludes it."""
        self.limits_mw.remove(power_limit_mw)
        self.samples = [one for one in self.samples if one.power_limit_mw != power_limit_mw]

    @abstractmethod
    def next(self, current_mw: int, position: int, outstanding: Outstanding) -> LimitTrial | None:
        """What to run next; None: enough is known, or will be when the last samples arrive.

        Args:
            current_mw: The limit in force; 0: another setting.
            outstanding: Steps that were run, and whose samples have not arrived, by limit.
        """

    @abstractmethod
    def estimates(self) -> list[LimitEstimate]:
        """Estimates of the measured limits, descending."""

    def _run(self, power_limit_mw: int, outstanding: Outstanding) -> int:
        """The number of steps run at a limit."""
        here = sum(one.steps for one in self.samples if one.power_limit_mw == power_limit_mw)
        return here + outstanding.get(power_limit_mw, 0)


class Exhaustive(Search):
    """Every limit, from the highest down, for `profile_steps` each; earlier measurements count."""

    @override
    def next(self, current_mw: int, position: int, outstanding: Outstanding) -> LimitTrial | None:
        for limit in self.limits_mw:
            missing = self.profile_steps - self._run(limit, outstanding)
            if missing > 0:
                return LimitTrial(limit, 0 if limit == current_mw else self.warmup_steps, missing)
        return None

    @override
    def estimates(self) -> list[LimitEstimate]:
        return averages(self.samples)


def expected_steps(name: SearchName, limits: int, warmup_steps: int, profile_steps: int) -> int:
    """The maximum number of steps of a search."""
    every = limits * (warmup_steps + profile_steps)
    if name == "exhaustive":
        return every
    return min(every, 2 * budget(limits, warmup_steps, profile_steps))


def budget(limits: int, warmup_steps: int, profile_steps: int) -> int:
    """The number of steps of the adaptive search if it is certain of its choice."""
    every = limits * (warmup_steps + profile_steps)
    four = min(4, limits) * (warmup_steps + 2 * piece(profile_steps))
    return min(every, max(every // 3, four))


def piece(profile_steps: int) -> int:
    """The number of steps that the adaptive search measures at a time."""
    return max(1, profile_steps // 8)


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
        estimates: list[LimitEstimate] = []
        for family in self._families:
            own = family.search.estimates()
            if family.beside is None:
                estimates += own
            elif estimates:
                first = estimates[0]
                estimates += [replace(one, beside=family.beside).against(first) for one in own]
        return estimates

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

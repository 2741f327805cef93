"""Decides which limit to measure next, for how many steps, and when enough is known; `variants`
does so for whole settings. Pure: a search receives what was run and its measurements, and returns
what to run next. It has no monitor, no clock and no other process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zeus.optimizer.power_limit.estimates import LimitEstimate, SettingSample, step_noise
from zeus.optimizer.power_limit.settings import Setting
from zeus_ipc.overriding import override

SearchName = Literal["adaptive", "exhaustive"]


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
    """

    cautious = False
    """Whether the choice skips limits whose estimates are too uncertain."""

    def __init__(self, limits_mw: Sequence[int], warmup_steps: int, profile_steps: int) -> None:
        self.limits_mw = list(limits_mw)
        self.warmup_steps = warmup_steps
        self.profile_steps = profile_steps
        self.samples: list[SettingSample] = []
        self.settled = False
        self.position = 0  # where it begins: steps of an earlier run
        self._run: Counter[int] = Counter()

    def ran(self, power_limit_mw: int, steps: int) -> None:
        """Steps were run and measured; their sample follows."""
        self._run[power_limit_mw] += steps

    def add(self, sample: SettingSample) -> None:
        """The sample of steps that were run."""
        self.samples.append(sample)

    def lost(self, power_limit_mw: int, steps: int) -> None:
        """The sample of steps that were run will not arrive."""
        self._run[power_limit_mw] -= steps

    def settle(self) -> None:
        """Whether enough is known."""
        self.settled = True

    @property
    def reason(self) -> str:
        """Why it has ended, if not because enough is known."""
        return ""

    @property
    def pending(self) -> bool:
        """Whether samples are outstanding."""
        return sum(self._run.values()) > sum(one.steps for one in self.samples)

    def resume(self, samples: Sequence[SettingSample], position: int = 0) -> None:
        """Adds the measurements of an earlier run of the same job, until a position."""
        self.position = position
        for sample in samples:
            if sample.power_limit_mw not in self.limits_mw:
                continue
            self.ran(sample.power_limit_mw, sample.steps)
            self.add(sample)

    def check(self, chosen_mw: int, position: int) -> None:  # noqa: B027 - most need no check
        """The choice is some steps old: measures again what it depends on."""

    def without(self, power_limit_mw: int) -> None:
        """A limit cannot be set: excludes it."""
        self.limits_mw.remove(power_limit_mw)

    @abstractmethod
    def next(self, current_mw: int, position: int) -> LimitTrial | None:
        """What to run next; None: enough is known, or will be when the last samples arrive."""

    @abstractmethod
    def estimates(self, position: int) -> list[LimitEstimate]:
        """Estimates of the measured limits, descending."""


class Exhaustive(Search):
    """Every limit, from the highest down, for `profile_steps` each; earlier measurements count."""

    @override
    def next(self, current_mw: int, position: int) -> LimitTrial | None:
        if self.settled:
            return None
        for limit in self.limits_mw:
            missing = self.profile_steps - self._run[limit]
            if missing > 0:
                return LimitTrial(limit, 0 if limit == current_mw else self.warmup_steps, missing)
        return None

    @override
    def estimates(self, position: int) -> list[LimitEstimate]:
        return _averages(self.limits_mw, self.samples)


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


def _averages(limits_mw: Sequence[int], samples: Sequence[SettingSample]) -> list[LimitEstimate]:
    found = []
    noise = step_noise(samples)
    for limit in limits_mw:
        own = [one for one in samples if one.power_limit_mw == limit]
        if not own:
            continue
        steps = sum(one.steps for one in own)
        energy_j = sum(one.energy_j for one in own)
        sensor = sum(one.energy_error_j for one in own) / 2 / energy_j
        time_s = sum(one.time_s for one in own) / steps
        error = noise / math.sqrt(steps)
        errors = error, math.hypot(error, sensor)
        found.append(LimitEstimate(limit, time_s, energy_j / steps, *errors, steps))
    return found

"""Decides which limit to measure next, for how many steps, and when enough is known; `variants`
does so for whole settings. Pure: a search receives what was run and its measurements, and returns
what to run next. It has no monitor, no clock and no other process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zeus.optimizer.power_limit.estimates import LimitEstimate, SettingSample, averages
from zeus.optimizer.power_limit.settings import Setting
from zeus_ipc.overriding import override

SearchName = Literal["adaptive", "exhaustive"]
Outstanding = Mapping[int, int]


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

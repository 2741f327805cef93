"""Measurements at each setting, and their files. A profile is JSON: `measurements` has
ml-energy/zeus's format; the rest says what it was measured on, and holds the samples, so that
another selector can continue from them. During a search, the same is kept beside it, in a file that
ends in `.partial`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from zeus.optimizer.power_limit.estimates import LimitEstimate, SettingSample
from zeus.optimizer.power_limit.settings import KINDS, Beside, beside
from zeus_common.atomic import write_text
from zeus_common.text import explain


class PowerLimitMeasurement(BaseModel):
    """Time and energy of training at one setting, for the same number of steps at each.

    Attributes:
        power_limit: W; whole numbers are integers.
        energy: J, of all GPUs together.
        time: s.
        power_profile: The workload power profile, such as `max-q`; None: none was set.
        graphics_clock: The highest graphics clock, MHz; None: it was unlocked.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    power_limit: PositiveInt | PositiveFloat
    energy: PositiveFloat
    time: PositiveFloat
    power_profile: str | None = None
    graphics_clock: PositiveInt | None = None

    @property
    def named(self) -> dict[str, Any]:
        """What was set beside the limit, by kind; None: nothing of that kind."""
        return {kind: getattr(self, kind) for kind in KINDS}


class Profile(BaseModel):
    """The file. Fields that ml-energy/zeus's files do not have are None or empty.

    Attributes:
        measurements: One for each measured limit, descending.
        gpus: Product names of the GPUs that trained together.
        range: Lowest and highest limit that they accept, W.
        selector: The criterion of the search.
        beside: What was searched beside limits.
        complete: Whether the choice was made.
        position: Steps that the search took.
        samples: The samples behind the measurements.
    """

    measurements: list[PowerLimitMeasurement]
    gpus: list[str] | None = None
    range: tuple[float, float] | None = None
    selector: str | None = None
    beside: list[Beside] = Field(default_factory=list)
    complete: bool = True
    position: int = 0
    samples: list[SettingSample] = Field(default_factory=list)

    def check(self, gpus: list[str], min_mw: int, max_mw: int) -> str | None:
        """Why it does not fit these GPUs, as the rest of a sentence; None: it does."""
        if self.gpus is not None and sorted(self.gpus) != sorted(gpus):
            return f"was measured on {_names(self.gpus)}, and this is {_names(gpus)}"
        here = (min_mw / 1000, max_mw / 1000)
        if self.range is not None and self.range != here:
            low, high = self.range
            return f"is of limits from {low:g} to {high:g} W, and here they are {_range(here)}"
        limits = [row.power_limit for row in self.measurements]
        for limit in limits + [one.power_limit_mw / 1000 for one in self.samples]:
            if not here[0] <= limit <= here[1]:
                return (
                    "was measured on another GPU or under another limit: "
                    f"{limit:g} W is outside {_range(here)}"
                )
        return None

    def estimates(self) -> tuple[LimitEstimate, ...]:
        """Returns the measurements as those of a step, from the highest limit on; the file does not
        say how far they are off.
        """
        estimates = [
            LimitEstimate(
                round(one.power_limit * 1000),
                one.time,
                one.energy,
                math.nan,
                math.nan,
                1,
                beside=beside(one.named),
            )
            for one in self.measurements
        ]
        return tuple(
            sorted(estimates, key=lambda one: (-one.power_limit_mw, one.beside is not None))
        )

    def as_samples(self, steps: int) -> list[SettingSample]:
        """Returns the samples; if only averages are known, they count as this many steps."""
        if self.samples:
            return self.samples
        return [
            SettingSample(round(one.power_limit * 1000), steps, one.energy, one.time)
            for one in self.measurements
            if not any(one.named.values())
        ]


class ProfileError(Exception):
    """The file is not a profile for these GPUs: one sentence that says why."""


class ProfileFile:
    """Saves a profile for the next run. A subclass may have another format.

    Attributes:
        partial: The file beside it, for an unfinished search.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = Path(f"{path}.partial")

    def load(self, path: Path) -> Profile:
        """Reads one of the two.

        Raises:
            ProfileError: It cannot be read, or is empty.
        """
        try:
            profile = Profile.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path} cannot be read ({error})") from None
        except ValidationError as error:
            fault = explain(error.errors()[0])
            raise ProfileError(f"{path} is not a power limit profile: {fault}") from None
        if not profile.measurements:
            raise ProfileError(f"{path} holds no measurements")
        return profile

    def keep(self, profile: Profile) -> None:
        """Writes a profile, or the measurements of an unfinished search. A reader sees the old file
        or the complete new one.

        Raises:
            OSError: It cannot be written.
        """
        path = self.path if profile.complete else self.partial
        write_text(path, profile.model_dump_json(indent=4, exclude_none=True))
        if profile.complete:
            self.partial.unlink(missing_ok=True)


def _names(gpus: list[str]) -> str:
    return ", ".join(f"{gpus.count(name)} {name}" for name in sorted(set(gpus)))


def _range(limits_w: tuple[float, float]) -> str:
    return f"{limits_w[0]:g} to {limits_w[1]:g} W"

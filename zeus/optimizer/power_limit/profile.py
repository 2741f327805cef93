"""What was measured at each limit, and the file it is kept in."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError


class PowerLimitMeasurement(BaseModel):
    """What training cost at one power limit, over the same number of steps at each.

    Attributes:
        power_limit: W; whole numbers are integers.
        energy: J, of all GPUs together.
        time: s.
    """

    power_limit: PositiveInt | PositiveFloat
    energy: PositiveFloat
    time: PositiveFloat


class _Profile(BaseModel):
    measurements: list[PowerLimitMeasurement]


class ProfileError(Exception):
    """The file is no profile for these GPUs: one sentence that says why."""


def watts(power_limit_mw: int) -> int | float:
    """A limit in watts, an integer where it is whole."""
    whole, rest = divmod(power_limit_mw, 1000)
    return power_limit_mw / 1000 if rest else whole


def load(path: Path, min_mw: int, max_mw: int) -> list[PowerLimitMeasurement]:
    """Reads a profile and checks it against what the GPUs take.

    Raises:
        ProfileError: It cannot be read, is empty, or has a limit outside the range.
    """
    try:
        profile = _Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path} cannot be read ({error})") from None
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise ProfileError(f"{path} is no power limit profile: {fault['msg']}") from None
    if not profile.measurements:
        raise ProfileError(f"{path} holds no measurements")
    for measurement in profile.measurements:
        if not min_mw <= measurement.power_limit * 1000 <= max_mw:
            raise ProfileError(
                f"{path} was measured on another GPU or under another limit: "
                f"{measurement.power_limit:g} W is outside {min_mw / 1000:g} to {max_mw / 1000:g} W"
            )
    return profile.measurements


def save(path: Path, measurements: Sequence[PowerLimitMeasurement]) -> None:
    """Writes a profile; a reader sees the old file or the whole new one.

    Raises:
        OSError: It cannot be written.
    """
    content = {"measurements": [measurement.model_dump() for measurement in measurements]}
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=4), encoding="utf-8")
    os.replace(aside, path)

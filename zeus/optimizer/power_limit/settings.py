"""What a search tries: settings of the GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from zeus_ipc.controls import profile_id, profile_name

Kind = Literal["power_profile", "graphics_clock"]
"""What may be searched beside a limit, by its name in files."""
_PHRASES: dict[Kind, str] = {
    "power_profile": " with the power profile {}",
    "graphics_clock": " with clocks up to {} MHz",
}

KINDS = tuple(_PHRASES)


@dataclass(frozen=True)
class Beside:
    """What is set beside a limit: a workload power profile's number, or a bound of the graphics
    clock, MHz.
    """

    kind: Kind
    value: int

    @property
    def shown(self) -> str | int:
        """The value as users and files have it: a profile by its name."""
        return profile_name(self.value) if self.kind == "power_profile" else self.value

    def __str__(self) -> str:
        return f"{self.shown} MHz" if self.kind == "graphics_clock" else str(self.shown)


@dataclass(frozen=True)
class Setting:
    """A power limit, mW; and what is beside it: None, nothing."""

    power_limit_mw: int
    beside: Beside | None = field(default=None, kw_only=True)

    @property
    def setting(self) -> Setting:
        """The setting of what has one, such as a sample."""
        return Setting(self.power_limit_mw, beside=self.beside)

    def of(self, kind: Kind) -> int | None:
        """The value of what is beside the limit, if it is of this kind."""
        return self.beside.value if self.beside is not None and self.beside.kind == kind else None

    @property
    def power_profile(self) -> str | None:
        """Name of the workload power profile beside the limit; None: none."""
        number = self.of("power_profile")
        return None if number is None else profile_name(number)

    @property
    def graphics_clock(self) -> int | None:
        """The highest graphics clock beside the limit, MHz; None: any."""
        return self.of("graphics_clock")

    @property
    def named(self) -> dict[str, Any]:
        """What is beside the limit, as files have it: a value for each kind; None: none."""
        found: dict[str, Any] = dict.fromkeys(KINDS)
        if self.beside is not None:
            found[self.beside.kind] = self.beside.shown
        return found

    def __str__(self) -> str:
        beside = "" if self.beside is None else _PHRASES[self.beside.kind].format(self.beside.shown)
        return f"{watts(self.power_limit_mw)} W{beside}"


def beside(named: Mapping[Kind, Any]) -> Beside | None:
    """What files name, see `Setting.named`."""
    for kind, shown in named.items():
        named_profile = kind == "power_profile" and shown is not None
        value = profile_id(shown) if named_profile else shown
        if value is not None:
            return Beside(kind, value)
    return None


def watts(power_limit_mw: int) -> int | float:
    """A limit in watts, as an integer if it is whole."""
    whole, rest = divmod(power_limit_mw, 1000)
    return power_limit_mw / 1000 if rest else whole

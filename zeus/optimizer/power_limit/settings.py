"""What a search tries: settings of the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from zeus_ipc.controls import profile_id, profile_name

if TYPE_CHECKING:
    from zeus.device import GPU, GPUs

CLOCK_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Bounds of the graphics clock to search, of the highest."""


@dataclass(frozen=True)
class VariantKind:
    """What may be set beside a limit.

    Attributes:
        plural: What there are several of, for users.
        argument: The optimizer's argument that asks for a search of it.
        phrase: Follows the limit in a sentence.
        offered: The values that a GPU takes; empty or ZeusGPUNotSupportedError: none.
        default: The values to search, of those that all GPUs take.
        parsed: The value of what users and files name; None: it is no such value.
        shown: The opposite.
        descends: Whether lower values save more: they are tried from the highest down.
        write: Sets a value on GPUs; None: restores them.
        control: What zeusd leases for it.
    """

    plural: str
    argument: str
    phrase: str
    offered: Callable[[GPU], Iterable[int]]
    default: Callable[[Sequence[int]], Iterable[int]]
    parsed: Callable[[Any], int | None]
    shown: Callable[[int], str | int]
    descends: bool
    write: Callable[[GPUs, Sequence[int], int | None], None]
    control: str


def _profiles(gpu: GPU) -> list[int]:
    return [
        number
        for name in gpu.get_supported_power_profiles()
        if (number := profile_id(name)) is not None
    ]


def _share_of_clocks(clocks: Sequence[int]) -> set[int]:
    return {min(clocks, key=lambda one: abs(one - share * max(clocks))) for share in CLOCK_SHARES}


def _clock(named: Any) -> int | None:
    return int(named) if isinstance(named, Integral) and not isinstance(named, bool) else None


KINDS = {
    "power_profile": VariantKind(
        plural="workload power profiles",
        argument="search_profiles",
        phrase=" with the power profile {}",
        offered=_profiles,
        default=lambda offered: offered,
        parsed=lambda named: profile_id(named) if isinstance(named, str) else None,
        shown=profile_name,
        descends=False,
        write=lambda gpus, indices, value: gpus.set_power_profiles_of(
            indices, [] if value is None else [value]
        ),
        control="power_profile",
    ),
    "graphics_clock": VariantKind(
        plural="graphics clocks",
        argument="search_clocks",
        phrase=" with clocks up to {} MHz",
        offered=lambda gpu: gpu.get_supported_graphics_clocks(),
        default=_share_of_clocks,
        parsed=_clock,
        shown=lambda mhz: mhz,
        descends=True,
        write=lambda gpus, indices, mhz: gpus.bound_graphics_clocks(indices, mhz),
        control="gpu_clocks",
    ),
}
"""By the name of their field in files."""


@dataclass(frozen=True)
class Beside:
    """What is set beside a limit: a value of a kind, such as a bound of the graphics clock, MHz."""

    kind: str
    value: int

    @property
    def shown(self) -> str | int:
        """The value as users and files have it: a profile by its name."""
        return KINDS[self.kind].shown(self.value)

    def __str__(self) -> str:
        return KINDS[self.kind].phrase.format(self.shown)


@dataclass(frozen=True)
class Setting:
    """A power limit, mW; and what is beside it: None, nothing."""

    power_limit_mw: int
    beside: Beside | None = field(default=None, kw_only=True)

    @property
    def setting(self) -> Setting:
        """The setting of what has one, such as a sample."""
        return Setting(self.power_limit_mw, beside=self.beside)

    def of(self, kind: str) -> int | None:
        """The value of what is beside the limit, if it is of this kind."""
        return self.beside.value if self.beside is not None and self.beside.kind == kind else None

    @property
    def named(self) -> dict[str, Any]:
        """What is beside the limit, as files have it: a value for each kind; None: none."""
        values: dict[str, Any] = dict.fromkeys(KINDS)
        if self.beside is not None:
            values[self.beside.kind] = self.beside.shown
        return values

    def __str__(self) -> str:
        return f"{watts(self.power_limit_mw)} W{self.beside or ''}"


def beside(named: Mapping[str, Any]) -> Beside | None:
    """What files name, see `Setting.named`."""
    for kind, shown in named.items():
        value = KINDS[kind].parsed(shown)
        if value is not None:
            return Beside(kind, value)
    return None


def watts(power_limit_mw: int) -> int | float:
    """A limit in watts, as an integer if it is whole."""
    whole, rest = divmod(power_limit_mw, 1000)
    return power_limit_mw / 1000 if rest else whole

"""The controls of a GPU: one `ControlSpec` each, and all that derives from it.

Pure data, standard library only: the protocol, zeusctl, the exporter, the daemon and the helper
that restores without a daemon all read this table. A new control is a member of `Control`, an entry
in `SPECS`, and its device calls in each backend under `zeusd/devices`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Literal, TypeAlias

from zeus_ipc.parsing import plain_number

ControlValue: TypeAlias = tuple[int, ...]
"""A control's value, in a form that compares, sorts and journals; see `ControlSpec.shape`."""

UNLOCKED: ControlValue = ()
"""The value of a range that is not restricted."""

MAX_MHZ = 100_000
MAX_MW = 100_000_000
CEILING_NAME = r"^(fleet|persisted|job:[A-Za-z0-9_.-]{1,64})$"
"""Names of ceilings that may be set; the site's is set in the configuration."""


class Control(str, Enum):
    """A setting of a GPU that can be changed, under a lease of its own."""

    __hash__ = str.__hash__  # Enum's own is a Python call for each look-up

    POWER_LIMIT = "power_limit"
    """The power limit."""
    GPU_CLOCKS = "gpu_clocks"
    """The range that the graphics (SM) clock is locked to."""
    MEMORY_CLOCKS = "memory_clocks"
    """The same for the memory clock."""
    PERSISTENCE_MODE = "persistence_mode"
    """Whether the driver stays loaded while nobody uses the GPU."""
    POWER_PROFILE = "power_profile"
    """Workload power profiles that are requested, by anyone."""


AMD_PROFILES = {
    240: "amd-custom",
    241: "amd-video",
    242: "amd-power-saving",
    243: "amd-compute",
    244: "amd-vr",
    245: "amd-3d-full-screen",
}
"""Names of the presets of AMD's driver: 240 and the bit of amdsmi_power_profile_preset_masks_t. A
GPU has one at a time."""

PROFILES = {
    0: "max-p",
    1: "max-q",
    2: "compute",
    3: "memory-bound",
    4: "network",
    5: "balanced",
    6: "llm-inference",
    7: "llm-training",
    8: "rbm",
    9: "dcpcie",
    10: "hmma-sparse",
    11: "hmma-dense",
    12: "sync-balanced",
    13: "hpc",
    14: "mig",
    15: "max-q-1",
    16: "network-bound",
    17: "high-throughput-inference",
    18: "medium-throughput-inference",
    19: "low-latency-inference",
    20: "training",
    21: "inference",
    22: "max-q-2",
    23: "max-q-3",
    24: "low-priority-background",
    **AMD_PROFILES,
}
"""Names of NVIDIA's workload power profiles, by nvmlPowerProfileType_t, and of AMD's. There may be
more."""

MAX_PROFILE = 254

MOST_MEMBERS = 32
"""Most members of one value of a set."""


@dataclass(frozen=True, slots=True)
class ControlSpec:
    """The complete definition of a control, the same for all vendors.

    Attributes:
        control: Which control.
        title: Its name in text, such as `power limit`.
        shape: number: `(value,)`. range: `(min, max)`, or `()` for unlocked. switch: `(0,)` or
            `(1,)`. set: numbers of the chosen members, ascending. Several users share one set: a
            lease adds to it, and its restore removes what the lease added.
        readable: Whether the device reports its value. If not, it can be neither verified nor
            compared before a restore.
        restore_order: Restores of one GPU begin in this order.
        unit: Unit in text; empty for a switch.
        scale: Number of the protocol's integers per `unit`.
        largest: The largest integer that the protocol takes.
        rounding: A driver may round a value by less than this, in the protocol's integers.
        refused_target: What a restore does if the device no longer accepts its target: use the
            nearest value in the device's range, unlock, or retry.
        ceilings: Whether ceilings apply: the control is one number, and lower draws less power.
        excludes: Controls that this one affects: both can be leased only on request.
        leased_by_default: Whether the group `zeus` may lease it by default.
        option: zeusctl's long option.
        letter: zeusctl's short option; empty: none.
        metavar: Placeholder of the value in the option's help.
        help: Text of the option's help.
        members: Of a set: names by number. Others are named by their number.
        member_prefix: Prefix of such a name.
    """

    control: Control
    title: str
    shape: Literal["number", "range", "switch", "set"]
    restore_order: int
    largest: int
    refused_target: Literal["nearest", "unlock", "retry"]
    leased_by_default: bool
    option: str
    metavar: str
    help: str
    readable: bool = True
    unit: str = ""
    scale: int = 1
    rounding: int = 0
    ceilings: bool = False
    letter: str = ""
    excludes: tuple[Control, ...] = ()
    members: Mapping[int, str] = field(default_factory=dict, hash=False)
    member_prefix: str = ""

    @property
    def merges(self) -> bool:
        """Whether a lease adds to the choices of others, instead of replacing them."""
        return self.shape == "set"

    @property
    def name(self) -> str:
        """Name in the protocol, the journal, metrics and JSON."""
        return self.control.value

    def fault(self, value: Sequence[int]) -> str | None:
        """Why no GPU could accept this value; None if one might."""
        if self.shape == "range" and not value:
            return None
        if self.shape == "set":
            return self._set_fault(value)
        wanted = 2 if self.shape == "range" else 1
        if len(value) != wanted:
            return f"{self.name} takes {wanted} number{'s' * (wanted > 1)}, not {len(value)}"
        smallest = 1 if self.shape == "number" else 0
        if min(value) < smallest or max(value) > self.largest:
            return f"{self.name} must be between {smallest} and {self.largest}"
        if self.shape == "range" and value[0] > value[1]:
            return (
                f"cannot set {self.name} to {value[0]} to {value[1]} {self.unit}: the minimum is "
                "above the maximum"
            )
        return None

    def _set_fault(self, value: Sequence[int]) -> str | None:
        if len(value) > MOST_MEMBERS:
            return f"{self.name} takes at most {MOST_MEMBERS} numbers, not {len(value)}"
        if not all(0 <= part <= self.largest for part in value):
            return f"{self.name} must be between 0 and {self.largest}"
        return None

    def normal(self, value: Sequence[int]) -> ControlValue:
        """Returns the canonical form of a value."""
        return tuple(sorted(set(value))) if self.shape == "set" else tuple(value)

    def text(self, value: Sequence[int]) -> str:
        """Formats a value, with its unit."""
        if self.shape == "set":
            return ", ".join(self.member(part) for part in value) or "none"
        if self.shape == "switch":
            return "on" if value[0] else "off"
        if not value:
            return "unlocked"
        parts = "-".join(f"{part / self.scale:g}" for part in dict.fromkeys(value))
        return f"{parts} {self.unit}"

    def member(self, number: int) -> str:
        """Returns the name of a set's member."""
        return self.members.get(number, f"{self.member_prefix}{number}")

    def member_number(self, name: str) -> int | None:
        """Returns the number of a set's member; None if the name is unknown."""
        word = name.strip().lower().replace("_", "-")
        known = {text: number for number, text in self.members.items()}
        digits = word.removeprefix(self.member_prefix)
        if word not in known and digits.isdecimal() and int(digits) <= self.largest:
            return int(digits)
        return known.get(word)

    def span_text(self, low: float, high: float) -> str:
        """Formats a range of permitted integers."""
        return f"{low / self.scale:g} to {high / self.scale:g} {self.unit}"

    def meant(self, value: int, low: int, high: int) -> str:
        """Asks about a value that is in this range in another unit; empty: it is not."""
        for other in (value * self.scale, value // self.scale):
            if self.scale > 1 and low <= other <= high:
                return f"did you mean {self.text((other,))} ({other} in the protocol)?"
        return ""

    def parse(self, text: str) -> ControlValue:
        """Parses a value.

        Raises:
            ValueError: It is not valid; the message says what to write.
        """
        word = text.strip()
        if self.shape == "switch":
            if word not in ("on", "off"):
                raise ValueError(f"{text!r} is neither on nor off")
            return (int(word == "on"),)
        if self.shape == "set":
            return self._parse_set(word)
        example = (
            ": 1200, or a range such as 900,1200" if self.shape == "range" else ", such as 250"
        )
        unit = "watts" if self.unit == "W" else self.unit
        hint = f"{text!r} is not a {self.title}; write {unit}{example}"
        for unit in (self.unit, self.unit.lower()):
            word = word.removesuffix(unit).strip()
        parts = word.replace("-", ",").split(",") if self.shape == "range" else [word]
        try:
            value = tuple(round(plain_number(part.strip()) * self.scale) for part in parts)
        except ValueError:
            raise ValueError(hint) from None
        if self.shape == "range" and len(value) == 1:
            value *= 2
        if len(value) > 2:
            raise ValueError(hint)
        smallest = self.scale if self.shape == "number" else 0
        if not all(smallest <= part <= self.largest for part in value):
            span = self.span_text(smallest, self.largest)
            why = f"{text!r} is out of range: a {self.title} is {span}"
            meant = self.meant(value[0], smallest, self.largest)
            raise ValueError(f"{why}; {meant}" if meant else why)
        return value

    def _parse_set(self, text: str) -> ControlValue:
        if text.lower() == "none":
            return ()
        numbers = []
        for name in text.split(","):
            number = self.member_number(name)
            if number is None:
                first, second, *_ = self.members.values()
                raise ValueError(
                    f"{name.strip()!r} is not a {self.title}; write names such as {second} or "
                    f"{first},{second}, or none; `zeusctl show GPU` lists the GPU's"
                )
            numbers.append(number)
        return self.normal(numbers)


# Why the table is as it is. NVML does not report locked clocks: a restore cannot ask what they are,
# so it writes, and unlocks them if its target is refused. The range of a power limit may shrink, as
# with another driver: the nearest value is better than none. Persistence mode concerns all users of
# the GPU, so a site has to allow it. A power profile affects limits and clocks, and no vendor says
# which of the two applies: they are leased together only on request.
SPECS: dict[Control, ControlSpec] = {
    spec.control: spec
    for spec in (
        ControlSpec(
            control=Control.POWER_LIMIT,
            title="power limit",
            shape="number",
            restore_order=2,
            unit="W",
            scale=1000,
            largest=MAX_MW,
            rounding=5000,
            refused_target="nearest",
            ceilings=True,
            leased_by_default=True,
            option="power-limit",
            letter="p",
            metavar="WATTS",
            help="Power limit, in watts.",
        ),
        ControlSpec(
            control=Control.GPU_CLOCKS,
            title="graphics clock",
            shape="range",
            readable=False,
            restore_order=0,
            unit="MHz",
            largest=MAX_MHZ,
            refused_target="unlock",
            leased_by_default=True,
            option="gpu-clocks",
            letter="g",
            metavar="MHZ[,MHZ]",
            help="Lock the graphics clock, in MHz.",
        ),
        ControlSpec(
            control=Control.MEMORY_CLOCKS,
            title="memory clock",
            shape="range",
            readable=False,
            restore_order=1,
            unit="MHz",
            largest=MAX_MHZ,
            refused_target="unlock",
            leased_by_default=True,
            option="memory-clocks",
            letter="m",
            metavar="MHZ[,MHZ]",
            help="Lock the memory clock, in MHz.",
        ),
        ControlSpec(
            control=Control.PERSISTENCE_MODE,
            title="persistence mode",
            shape="switch",
            restore_order=4,
            largest=1,
            refused_target="retry",
            leased_by_default=False,
            option="persistence",
            metavar="[on|off]",
            help="Persistence mode.",
        ),
        ControlSpec(
            control=Control.POWER_PROFILE,
            title="workload power profile",
            shape="set",
            restore_order=3,
            largest=MAX_PROFILE,
            refused_target="retry",
            leased_by_default=True,
            option="power-profile",
            metavar="NAME[,NAME]",
            help="Workload power profiles, such as max-q (Blackwell) or amd-compute.",
            excludes=(Control.POWER_LIMIT, Control.GPU_CLOCKS, Control.MEMORY_CLOCKS),
            members=PROFILES,
            member_prefix="profile-",
        ),
    )
}
"""Every control, in the order of zeusctl and the documentation."""

RESTORE_ORDER = tuple(sorted(SPECS, key=lambda control: SPECS[control].restore_order))
"""Controls in the order of a GPU's restores."""


profile_name = SPECS[Control.POWER_PROFILE].member
"""Returns the name of a workload power profile."""

profile_id = SPECS[Control.POWER_PROFILE].member_number
"""Returns the number of a workload power profile; None if the name is unknown."""


def exclusive(one: Control, other: Control) -> bool:
    """Whether one of two controls affects the other."""
    return other in SPECS[one].excludes or one in SPECS[other].excludes


@lru_cache(maxsize=1024)
def describe(control: Control, value: ControlValue) -> str:
    """Formats a control's value, with its unit."""
    return SPECS[control].text(value)

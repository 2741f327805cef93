"""Named upper bounds of a control: the least of them is what may be set, and what is restored.

Pure arithmetic; times are of CLOCK_BOOTTIME, which counts while the machine sleeps and survives a
restart of zeusd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeusd.core.model import ControlValue

SITE, PERSISTED, FLEET, JOB_PREFIX = "site", "persisted", "fleet", "job:"
"""Names. `site` is the configuration's and is nobody's to set; `job:ID` is one job's."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One upper bound.

    Attributes:
        value: The bound.
        uid: The user who set it.
        deadline_ns: CLOCK_BOOTTIME time at which `fallback` takes its place; None: never.
        fallback: Then the bound is this; None: there is none any more.
    """

    value: ControlValue
    uid: int
    deadline_ns: int | None = None
    fallback: ControlValue | None = None

    def to_json(self) -> dict[str, Any]:
        """The entry as the journal keeps it."""
        return {
            "value": list(self.value),
            "uid": self.uid,
            "deadline_ns": self.deadline_ns,
            "fallback": None if self.fallback is None else list(self.fallback),
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Ceiling:
        """Reads an entry back.

        Raises:
            ValueError, KeyError, TypeError: The entry is not one that `to_json` wrote.
        """
        deadline, fallback = entry.get("deadline_ns"), entry.get("fallback")
        return cls(
            tuple(int(part) for part in entry["value"]),
            int(entry.get("uid", 0)),
            None if deadline is None else int(deadline),
            None if fallback is None else tuple(int(part) for part in fallback),
        )


class Ceilings(dict[str, Ceiling]):
    """The ceilings of one control, by name; the site's is not among them."""

    __slots__ = ()

    def lowest(self, value: ControlValue, without: str = "") -> ControlValue:
        """The least of this value and all ceilings but one."""
        for name, one in self.items():
            if name != without and one.value < value:
                value = one.value
        return value

    def next_deadline_ns(self) -> int | None:
        """CLOCK_BOOTTIME time at which the next of them falls back."""
        deadlines = [one.deadline_ns for one in self.values() if one.deadline_ns is not None]
        return min(deadlines, default=None)

    def fall_back(self) -> list[str]:
        """Lets ceilings that are to fall back do so before their time. Returns their names."""
        fallen = []
        for name, one in [*self.items()]:
            if one.deadline_ns is not None and one.fallback is not None:
                fallen.append(name)
                self[name] = Ceiling(one.fallback, one.uid)
        return fallen

    def expire(self, boot_ns: int) -> list[str]:
        """Lets ceilings whose deadline is over fall back, or end. Returns their names."""
        expired = []
        for name, one in [*self.items()]:
            if one.deadline_ns is not None and boot_ns >= one.deadline_ns:
                expired.append(name)
                if one.fallback is None:
                    del self[name]
                else:
                    self[name] = Ceiling(one.fallback, one.uid)
        return expired

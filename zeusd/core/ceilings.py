"""Named upper bounds of a control. The lowest one bounds what may be set and what is restored.

Pure arithmetic; times are of CLOCK_BOOTTIME, which counts while the machine sleeps and survives a
restart of zeusd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zeus_ipc.controls import ControlSpec
from zeusd.core.model import ControlValue

SITE, PERSISTED, FLEET, JOB_PREFIX = "site", "persisted", "fleet", "job:"
"""Names. `site` is from the configuration and cannot be set; `job:ID` belongs to one job."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One upper bound.

    Attributes:
        value: The bound.
        uid: The user who set it.
        deadline_ns: CLOCK_BOOTTIME time at which `fallback` replaces `value`; None: never.
        fallback: The bound after the deadline; None: the ceiling ends.
    """

    value: ControlValue
    uid: int
    deadline_ns: int | None = None
    fallback: ControlValue | None = None

    def to_json(self) -> dict[str, Any]:
        """The journal's entry."""
        return {
            "value": list(self.value),
            "uid": self.uid,
            "deadline_ns": self.deadline_ns,
            "fallback": None if self.fallback is None else list(self.fallback),
        }

    def text(self, name: str, spec: ControlSpec, boot_ns: int) -> str:
        """Says what it allows, whose it is, and until when."""
        until = " until the job ends" if name.startswith(JOB_PREFIX) else ""
        if self.deadline_ns is not None:
            until = f" for {max(0, self.deadline_ns - boot_ns) // 10**9} s more"
        if self.fallback is not None:
            until += f", then {spec.text(self.fallback)}"
        return f"ceiling {name} of user {self.uid} allows at most {spec.text(self.value)}{until}"

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
    """The ceilings of one control by name, without the site's."""

    __slots__ = ()

    def lowest(self, value: ControlValue, without: str = "") -> ControlValue:
        """The lowest of this value and all ceilings but one."""
        for name, one in self.items():
            if name != without and one.value < value:
                value = one.value
        return value

    def lowest_named(self, without: str = "") -> tuple[str, Ceiling | None]:
        """The name of the lowest of all ceilings but one, and the ceiling; None: there is none."""
        others = [pair for pair in self.items() if pair[0] != without]
        return min(others, key=lambda pair: pair[1].value, default=("", None))

    def next_deadline_ns(self) -> int | None:
        """CLOCK_BOOTTIME time of the next deadline."""
        deadlines = [one.deadline_ns for one in self.values() if one.deadline_ns is not None]
        return min(deadlines, default=None)

    def fall_back(self) -> list[str]:
        """Applies all fallbacks before their deadlines. Returns the ceilings' names."""
        fallen = []
        for name, one in [*self.items()]:
            if one.deadline_ns is not None and one.fallback is not None:
                fallen.append(name)
                self[name] = Ceiling(one.fallback, one.uid)
        return fallen

    def expire(self, boot_ns: int) -> list[str]:
        """Applies the fallbacks of ceilings whose deadline has passed. Returns the ceilings'
        names."""
        expired = []
        for name, one in [*self.items()]:
            if one.deadline_ns is not None and boot_ns >= one.deadline_ns:
                expired.append(name)
                if one.fallback is None:
                    del self[name]
                else:
                    self[name] = Ceiling(one.fallback, one.uid)
        return expired

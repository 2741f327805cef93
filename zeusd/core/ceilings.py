"""Named upper bounds of a control. The lowest one bounds what may be set and what is restored.

Pure arithmetic; times are of CLOCK_BOOTTIME, which counts while the machine sleeps and survives a
restart of zeusd.
"""

from __future__ import annotations

from zeus_ipc.controls import ControlSpec, ControlValue
from zeusd.core.entries import Ceiling

SITE, PERSISTED, FLEET, JOB_PREFIX = "site", "persisted", "fleet", "job:"
"""Names. `site` is from the configuration and cannot be set; `job:ID` belongs to one job."""


def ceiling_text(ceiling: Ceiling, name: str, spec: ControlSpec, boot_ns: int) -> str:
    """Says what a ceiling allows, whose it is, and until when."""
    until = " until the job ends" if name.startswith(JOB_PREFIX) else ""
    if ceiling.deadline_ns is not None:
        until = f" for {max(0, ceiling.deadline_ns - boot_ns) // 10**9} s more"
    if ceiling.fallback is not None:
        until += f", then {spec.text(ceiling.fallback)}"
    return f"ceiling {name} of user {ceiling.uid} allows at most {spec.text(ceiling.value)}{until}"


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

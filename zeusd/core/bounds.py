"""What a control may hold at most, and what it is restored to.

A ceiling is a named upper bound; the lowest one bounds what may be set and what is restored. Pure
arithmetic; times are of CLOCK_BOOTTIME, which counts while the machine sleeps and survives a
restart of zeusd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zeus_common.units import WATT_MW
from zeus_ipc.controls import SPECS, Control, ControlSpec, ControlValue
from zeus_ipc.limited import BMC, BY_LEASE, SITE
from zeusd.core.effects import Forget, Put
from zeusd.core.entries import OBSERVED, RESTING, CeilingEntry, Kept, key_of
from zeusd.core.outbox import Outbox
from zeusd.core.policy import Target

PERSISTED, JOB_PREFIX = "persisted", "job:"
"""Names of ceilings; `job:ID` belongs to one job. The others are chosen by administrators."""


def ceiling_text(ceiling: CeilingEntry, name: str, spec: ControlSpec, boot_ns: int) -> str:
    """A ceiling in words: its value, its user and its end."""
    until = " until the job ends" if name.startswith(JOB_PREFIX) else ""
    if ceiling.deadline_ns is not None:
        until = f" for {max(0, ceiling.deadline_ns - boot_ns) // 10**9} s more"
    if ceiling.fallback is not None:
        until += f", then {spec.text(ceiling.fallback)}"
    return f"ceiling {name} of user {ceiling.uid} allows at most {spec.text(ceiling.value)}{until}"


def author(
    limit_mw: int | None,
    enforced_mw: int | None,
    leased_mw: int | None = None,
    site_mw: int | None = None,
    ceilings: Mapping[str, int] | None = None,
) -> str | None:
    """Returns who set the power limit in force: `BMC`, a ceiling's name, `site` or `lease`; None:
    nobody is known.

    Args:
        limit_mw: The limit that software requested.
        enforced_mw: The limit in force.
        leased_mw: The limit that the holder of a lease has set; None: there is none.
        site_mw: The site limit; None: there is none below the GPU's own.
        ceilings: The ceilings by name.
    """
    if limit_mw is None:
        return None
    # Only what is outside the driver lowers a limit below the one that was requested.
    if enforced_mw is not None and enforced_mw <= limit_mw - WATT_MW:
        return BMC
    bounds = {**({} if site_mw is None else {SITE: site_mw}), **(ceilings or {})}
    lowest = min(bounds, key=lambda name: bounds[name], default=None)
    # A lower limit is a holder's choice, a higher one someone else's.
    if lowest is not None and abs(limit_mw - bounds[lowest]) < WATT_MW:
        return lowest
    if leased_mw is not None and abs(limit_mw - leased_mw) < WATT_MW:
        return BY_LEASE
    return None


class Ceilings(dict[str, CeilingEntry]):
    """The ceilings of one control by name, without the site's."""

    __slots__ = ()

    def lowest(self, value: ControlValue, without: str = "") -> ControlValue:
        """The lowest of this value and all ceilings but one."""
        for name, one in self.items():
            if name != without and one.value < value:
                value = one.value
        return value

    def lowest_named(self, without: str = "") -> tuple[str, CeilingEntry | None]:
        """The name of the lowest of all ceilings but one, and the ceiling; None: there is none."""
        others = [pair for pair in self.items() if pair[0] != without]
        return min(others, key=lambda pair: pair[1].value, default=("", None))

    def next_deadline_ns(self) -> int | None:
        """CLOCK_BOOTTIME time of the next deadline."""
        deadlines = [one.deadline_ns for one in self.values() if one.deadline_ns is not None]
        return min(deadlines, default=None)

    def expire(self, boot_ns: int | None) -> list[str]:
        """Applies the fallbacks of ceilings whose deadline has passed; None: all fallbacks, before
        their deadlines. Returns the ceilings' names."""
        expired = []
        for name, one in [*self.items()]:
            due_ns = one.deadline_ns
            if due_ns is None or (boot_ns is not None and boot_ns < due_ns):
                continue
            if one.fallback is not None:
                self[name] = replace(one, value=one.fallback, deadline_ns=None, fallback=None)
            elif boot_ns is None:
                continue
            else:
                del self[name]
            expired.append(name)
        return expired


class Bounds:
    """The restore target of a control, and its upper bounds.

    Attributes:
        ceilings: Upper bounds other than the site's.
        initial: The initial value, if known.
        observed: The restore target if the site configured none, if known.
        resting: The value that zeusd left in force, because of ceilings, while nobody holds it.
    """

    def __init__(
        self, gpu: str, control: Control, site: Target, outbox: Outbox, override: bool
    ) -> None:
        self._gpu = gpu
        self._control = control
        self._spec = SPECS[control]
        self._out = outbox
        self.override = override
        self.initial: ControlValue | None = None
        self.ceilings = Ceilings()
        self.observed: ControlValue | None = None
        self.resting: ControlValue | None = None
        self.configure(site, override)

    def configure(self, site: Target, override: bool) -> None:
        """The site's configuration changed."""
        self._site = site
        self.override = override
        if not site.pinned:
            self.observed = site.value

    @property
    def enforced(self) -> bool:
        """Whether the site wants its target in force even if nobody ever leased the control."""
        return self._site.enforced

    @property
    def site_limit_mw(self) -> int | None:
        """The site limit, without ceilings; None: the control has none."""
        return self._site.highest_mw

    @property
    def configured(self) -> bool:
        """Whether the site configured the target."""
        return self._site.pinned

    @property
    def persisted(self) -> bool:
        """Whether an administrator chose the target (see `requests.Persist`)."""
        return PERSISTED in self.ceilings

    @property
    def pinned(self) -> bool:
        """Whether the target was configured or persisted, so that outside changes do not move
        it."""
        return self._site.pinned or bool(self.ceilings)

    @property
    def target(self) -> ControlValue:
        """The restore target: the site's target, bounded by all ceilings."""
        return self._under(self._site.value) if self.ceilings else self._site.value

    @property
    def active(self) -> bool:
        """Whether a value above the ceilings or the site limit is lowered as soon as zeusd sees
        it."""
        return self._spec.ceilings and (bool(self.ceilings) or self._site.enforced)

    @property
    def rests_elsewhere(self) -> bool:
        """Whether zeusd left a value in force that is no longer the target."""
        return self.resting is not None and self.resting != self.target

    @property
    def source(self) -> str:
        """The origin of the target, see `replies.Back`."""
        for name, ceiling in self.ceilings.items():
            if ceiling.value == self.target:
                return name
        if self._site.pinned:
            return "configured"
        return "observed" if self._spec.readable else "unreadable"

    def highest(self, without: str = "") -> ControlValue:
        """The highest value that may be set, bounded by all ceilings but the named one."""
        assert self._site.highest_mw is not None
        highest = (self._site.highest_mw,)
        return self._under(highest, without) if self.ceilings else highest

    def _under(self, value: ControlValue, without: str = "") -> ControlValue:
        if self._spec.ceilings:
            return self.ceilings.lowest(value, without)
        persisted = self.ceilings.get(PERSISTED)
        return value if persisted is None or without == PERSISTED else persisted.value

    def aim_at(self, target: ControlValue) -> None:
        """Changes the target, after an outside change or if the device does not accept the old
        one."""
        persisted = self.ceilings.get(PERSISTED)
        if persisted is not None and not self._spec.ceilings:
            self.ceilings[PERSISTED] = CeilingEntry(target, persisted.uid)
            return
        if self._site.pinned:  # until the configuration is read again, or another driver is loaded
            self._site = replace(self._site, value=target)
            return
        self._site = Target(target, False, target[0] if self._spec.ceilings else None)
        self.observed = target
        self._out.add(Put(key_of(OBSERVED, self._gpu, self._control), Kept(target)))

    def rest(self, value: ControlValue | None) -> None:
        """Records the value that zeusd leaves in force because of ceilings; None: none."""
        if value != self.resting:
            self.resting = value
            key = key_of(RESTING, self._gpu, self._control)
            self._out.add(Forget(key) if value is None else Put(key, Kept(value)))

"""The site's policy: restore targets, limits for clients, and lease TTLs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from zeus_common.units import SECOND_NS
from zeus_ipc.controls import SPECS, UNLOCKED, Control, ControlValue
from zeus_ipc.replies import GpuInfo
from zeusd.core.access import Access
from zeusd.core.model import DEFAULT_TTL_NS, GpuFacts
from zeusd.restore_rule import SETTLE_S

RestorePower = Literal["site-max", "device-max", "device-default"]
OutsideChange = Literal["keep", "override"]


@dataclass(frozen=True, slots=True)
class GpuRule:
    """An administrator's rule for the GPUs that `match` names.

    Attributes:
        match: Shell pattern for the GPU's UUID or product name.
        enforce: Whether the rule applies even if nobody ever leased the control: zeusd lowers a
            power limit above the site limit whenever it sees one, and writes clocks once.
        targets: What a restore writes: the power limit, mW, or a range of clocks, MHz.
    """

    match: str
    targets: Mapping[Control, ControlValue] = field(default_factory=dict)
    enforce: bool = False

    def applies(self, facts: GpuFacts) -> bool:
        """Whether the rule applies to this GPU."""
        return fnmatchcase(facts.info.uuid, self.match) or fnmatchcase(facts.info.name, self.match)


@dataclass(frozen=True, slots=True)
class Target:
    """Restore target of a control. `pinned`: set by configuration, so outside changes do not move
    it. `highest_mw` is the highest power limit that a client may set. `enforced`: zeusd lowers a
    higher value whenever it sees one, and writes a control that cannot be read when the GPU is
    found.
    """

    value: ControlValue
    pinned: bool
    highest_mw: int | None = None
    enforced: bool = False


@dataclass(frozen=True, slots=True)
class SitePolicy:
    """The core's part of the configuration. The first rule that applies counts."""

    restore_power: RestorePower = "site-max"
    outside_change: OutsideChange = "keep"
    """Whether a restore overwrites outside changes."""
    settle_s: float = SETTLE_S
    """How long after a write a driver may still apply it."""
    rules: tuple[GpuRule, ...] = field(default=())

    def target(
        self, control: Control, facts: GpuFacts, observed: ControlValue | None
    ) -> Target | None:
        """The restore target of one control, or None if the GPU does not have the control.
        `observed`: the last value seen without a lease, if known."""
        rule = next((rule for rule in self.rules if rule.applies(facts)), GpuRule(""))
        wanted = rule.targets.get(control)
        if control is Control.POWER_LIMIT:
            return self._power_target(facts, observed, wanted, rule.enforce)
        if SPECS[control].readable:
            value = facts.values.get(control) if observed is None else observed
            return None if value is None else Target(value, pinned=False)
        if wanted is None:
            return Target(UNLOCKED, pinned=False)
        return Target(wanted, pinned=True, enforced=rule.enforce)

    def _power_target(
        self,
        facts: GpuFacts,
        observed: ControlValue | None,
        wanted: ControlValue | None,
        enforce: bool,
    ) -> Target | None:
        info = facts.info
        low, high = info.power_limit_min_mw, info.power_limit_max_mw
        value = observed or facts.values.get(Control.POWER_LIMIT)
        if low is None or high is None or value is None:
            return None
        if wanted is not None:
            site = min(max(wanted[0], low), high)
            return Target((site,), pinned=True, highest_mw=site, enforced=enforce)
        if self.restore_power == "device-max":
            return Target((high,), pinned=True, highest_mw=high)
        if self.restore_power == "device-default" and info.power_limit_default_mw is not None:
            return Target((info.power_limit_default_mw,), pinned=True, highest_mw=high)
        return Target(value, pinned=False, highest_mw=value[0])


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """The default TTL of leases, and the range that a client may request."""

    ttl_ns: int = DEFAULT_TTL_NS
    ttl_min_ns: int = 2 * SECOND_NS
    ttl_max_ns: int = 120 * SECOND_NS
    busy_ttl_ns: int = 120 * SECOND_NS
    """TTL for a silent holder that is computing, such as one whose Python waits for C code."""

    def ttl(self, wanted_ms: int) -> int:
        """The TTL (ns) for a client that requests `wanted_ms` (0: the default)."""
        if wanted_ms == 0:
            return self.ttl_ns
        return min(max(wanted_ms * 1_000_000, self.ttl_min_ns), self.ttl_max_ns)


@dataclass(frozen=True, slots=True)
class LedgerAccess:
    """Who may see whose energy; administrators see all of it."""

    everybody: bool = False
    gids: frozenset[int] = frozenset()


def _no_findings(gpus: Sequence[GpuInfo]) -> Sequence[str]:
    return ()


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The core's part of `zeusd.toml`. A reload replaces it as a whole.

    Attributes:
        site: Limits and restore targets.
        access: The access rules.
        terms: Lease TTLs.
        ledger: Visibility of energy.
        findings: Returns sentences about rules that have no effect on a node with these GPUs; pure.
    """

    site: SitePolicy = field(default_factory=SitePolicy)
    access: Access = field(default_factory=Access)
    terms: LeaseTerms = field(default_factory=LeaseTerms)
    ledger: LedgerAccess = field(default_factory=LedgerAccess)
    findings: Callable[[Sequence[GpuInfo]], Sequence[str]] = _no_findings

"""Access rules. The default is to deny: without a rule that applies, a user may only read.

The kernel identifies a client by the process that connected: uid, groups, and whether it is in a
container. Nothing in a request, an environment or /proc counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from zeus_ipc.controls import SPECS, Control, ControlValue, describe
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import GpuInfo
from zeusd.core.model import Failure, Peer

RootMay = Literal["host", "always", "never"]

LOWERING = frozenset(spec.control for spec in SPECS.values() if spec.leased_by_default)
"""Controls that members of the default group may lease: those that can only lower power."""


@dataclass(frozen=True, slots=True)
class AllowRule:
    """Lets some users change some controls of some GPUs, within ranges.

    Attributes:
        ranges: Smallest and largest values, mW or MHz; the site limit applies as well.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    everyone: bool = False
    gpus: tuple[str, ...] = ("*",)
    controls: frozenset[Control] = LOWERING
    ranges: Mapping[Control, tuple[int, int]] = field(default_factory=dict)
    group_names: tuple[str, ...] = ()

    def covers(self, peer: Peer, gpu: GpuInfo, control: Control) -> bool:
        """Whether this rule applies to this user, GPU and control."""
        mine = self.everyone or peer.uid in self.uids or not self.gids.isdisjoint(peer.groups)
        return mine and self.concerns(gpu, control)

    def concerns(self, gpu: GpuInfo, control: Control) -> bool:
        """Whether this rule lets any user change this control of this GPU."""
        return control in self.controls and any(
            fnmatchcase(gpu.uuid, pattern)
            or fnmatchcase(gpu.name, pattern)
            or pattern == str(gpu.index)
            for pattern in self.gpus
        )

    def within(self, control: Control, value: ControlValue) -> bool:
        """Whether the value is in this rule's range. Unlocking clocks is always allowed."""
        allowed = self.ranges.get(control)
        if allowed is None or not value:
            return True
        return allowed[0] <= min(value) and max(value) <= allowed[1]


@dataclass(frozen=True, slots=True)
class Right:
    """One user's permissions for one control of one GPU.

    Attributes:
        refusal: Why the user may not lease the control; None: allowed.
        rules: The rules that allow it; an administrator needs none.
    """

    uid: int
    gpu: GpuInfo
    control: Control
    admin: bool
    refusal: Failure | None
    rules: tuple[AllowRule, ...]
    must_compute: bool

    def refuse(self, value: ControlValue | None) -> Failure | None:
        """Why this user may not lease this control, or set it to this value; None: allowed."""
        if self.admin or self.refusal is not None or value is None:
            return self.refusal
        if any(rule.within(self.control, value) for rule in self.rules):
            return None
        text = SPECS[self.control].span_text
        allowed = " or ".join(text(*span) for span in self.ranges)
        return Failure(
            ErrorCode.OUT_OF_RANGE,
            f"user {self.uid} may set {self.control.value} of {self.gpu.uuid} to {allowed}, not to "
            f"{describe(self.control, value)}; choose a value in between",
        )

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Ranges, one of which must contain this user's value; empty: no bound."""
        ranges = [rule.ranges.get(self.control) for rule in self.rules]
        return [] if None in ranges else [bounds for bounds in ranges if bounds is not None]


@dataclass(frozen=True, slots=True)
class Access:
    """The site's rules about users.

    Attributes:
        rules: Rules for ordinary users; one that covers a request and its value is enough.
        root: Whether uid 0 is an administrator: only outside containers, always, or never.
        writes_per_second: Sets, acquires and releases of one user; a burst may have twice as many.
        leases_per_user: Leases that one user's processes may hold at a time.
        losses_per_user: Leases that one user's processes may have lost without having acquired or
            released them since; beyond this, the user gets no new lease.
        user_hint: End of the refusal's sentence: what to ask the administrator for.
    """

    rules: tuple[AllowRule, ...] = ()
    admin_uids: frozenset[int] = frozenset()
    admin_gids: frozenset[int] = frozenset()
    root: RootMay = "host"
    require_compute_process: bool = False
    writes_per_second: float = 1000.0
    leases_per_user: int = 1024
    losses_per_user: int = 256
    user_hint: str = "ask the administrator for an [[allow]] rule in zeusd.toml"

    def is_admin(self, peer: Peer) -> bool:
        """Whether this user is an administrator."""
        if peer.uid == 0 and (self.root == "always" or (self.root == "host" and peer.on_host)):
            return True
        return peer.uid in self.admin_uids or not self.admin_gids.isdisjoint(peer.groups)

    def right(self, peer: Peer, gpu: GpuInfo, control: Control) -> Right:
        """This user's permissions for this control; valid until the rules or the GPU change."""
        if self.is_admin(peer):
            return Right(peer.uid, gpu, control, True, None, (), False)
        rules = tuple(rule for rule in self.rules if rule.covers(peer, gpu, control))
        refusal = None
        if not rules:
            refusal = Failure(
                ErrorCode.PERMISSION_DENIED,
                f"user {peer.uid} may not change {control.value} of {gpu.uuid}; "
                f"{self._remedy(gpu, control)}",
            )
        return Right(peer.uid, gpu, control, False, refusal, rules, self.require_compute_process)

    def _remedy(self, gpu: GpuInfo, control: Control) -> str:
        """The remedy for a user without a rule."""
        rules = [rule for rule in self.rules if rule.concerns(gpu, control)]
        if self.rules and not rules:
            return "only an administrator may; ask one, or for an [[allow]] rule in zeusd.toml"
        groups = sorted({name for rule in rules for name in rule.group_names})
        if groups:
            return f"ask the administrator to add you to the group {' or '.join(groups)}"
        return self.user_hint


OPEN = Access(rules=(AllowRule(everyone=True, controls=frozenset(Control)),), writes_per_second=1e6)
"""Rules that let everyone who can connect change everything: for simulated GPUs and embedded
engines."""

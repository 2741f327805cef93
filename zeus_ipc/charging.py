"""The methods of energy attribution, and the basis of their bounds: one basis for each method."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Method(str, Enum):
    """How a share was determined."""

    ALLOCATED = "allocated"
    """One holder: all of it. Exact."""
    WEIGHTS = "weights"
    """Several holders: by the parts of the GPU that were allocated to each."""
    EXCLUSIVE = "exclusive"
    """No holder, and processes of one account: all of it. Exact."""
    UTILIZATION = "utilization"
    """Several accounts: by the utilization that the driver reports for their processes."""
    EQUAL = "equal"
    """No holder, several accounts, and the driver reports no utilization: in equal parts."""
    NONE = "none"
    """Idle, or unattributed."""
    SLICES = "slices"
    """Several accounts on MIG instances with unknown utilization: by the instances' sizes."""
    UNREAD = "unread"
    """Accounts changed while the GPU could not be read: as if its power had been constant."""


class ChargeBasis(str, Enum):
    """The basis of a charge's bounds, the most certain first."""

    EXACT = "exact"
    """There is one possible value."""
    PRESENCE = "presence"
    """Holders of the GPU and accounts with processes on it: each may have used all of it, or
    nothing. Certain."""
    ACTIVITY = "activity"
    """The activity that the driver reports: correct if its samples are complete."""


BOUNDS: dict[Method, ChargeBasis] = {
    Method.ALLOCATED: ChargeBasis.EXACT,
    Method.WEIGHTS: ChargeBasis.PRESENCE,
    Method.EXCLUSIVE: ChargeBasis.EXACT,
    Method.UTILIZATION: ChargeBasis.ACTIVITY,
    Method.EQUAL: ChargeBasis.PRESENCE,
    Method.NONE: ChargeBasis.EXACT,
    Method.SLICES: ChargeBasis.PRESENCE,
    Method.UNREAD: ChargeBasis.PRESENCE,
}
"""The basis of each method's bounds."""

REASONS: dict[Method, str] = {
    Method.WEIGHTS: "several held parts and their use was not measured",
    Method.UTILIZATION: "several used it",
    Method.SLICES: "several had processes on MIG instances and their use was not measured",
    Method.EQUAL: "several had processes and their use was not measured",
    Method.UNREAD: "its users changed while it could not be read",
}
"""Returns why a method gives an estimate; without commas, for tables."""

_ORDER = tuple(ChargeBasis)


def bounds_of(methods: Iterable[str], meet: bool = False) -> ChargeBasis:
    """Returns the basis of a sum's bounds: of several methods, the least certain one.

    Args:
        methods: By name; an unknown one counts as the least certain.
        meet: Whether the bounds are equal: if both are certain, the sum is exact.
    """
    known = {method.value: BOUNDS[method] for method in Method}
    kinds = [known.get(method, _ORDER[-1]) for method in methods]
    basis = max(kinds, key=_ORDER.index, default=ChargeBasis.EXACT)
    return ChargeBasis.EXACT if meet and basis is ChargeBasis.PRESENCE else basis


def reason_of(methods: Iterable[str]) -> str:
    """Returns why a sum is an estimate; empty if it is not."""
    known = {*methods}
    return "; ".join(reason for method, reason in REASONS.items() if method.value in known)

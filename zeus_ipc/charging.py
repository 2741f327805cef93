"""How a share of energy was found, and what its bounds follow from: one kind for each method."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum


class Method(str, Enum):
    """How a share was found."""

    ALLOCATED = "allocated"
    """One holder: all of it. Exact."""
    WEIGHTS = "weights"
    """Several holders: by the parts of the GPU that were allocated to each."""
    EXCLUSIVE = "exclusive"
    """No holder, and processes of one account: all of it. Exact."""
    UTILIZATION = "utilization"
    """Several accounts: by the use that the driver reports for their processes."""
    EQUAL = "equal"
    """No holder, several accounts, and the driver reports no use: in equal parts."""
    NONE = "none"
    """Idle, or unattributed."""
    SLICES = "slices"
    """Several accounts on MIG instances whose use is not known: by the instances' sizes."""


class Bounds(str, Enum):
    """What the bounds of a charge follow from, the most certain first."""

    EXACT = "exact"
    """There is one possible value."""
    PRESENCE = "presence"
    """Who held the GPU or had a process on it: each of them may have used all of it, or nothing.
    Certain."""
    ACTIVITY = "activity"
    """Who used the GPU when, as the driver reports it: true if its samples are complete."""


BOUNDS: dict[Method, Bounds] = {
    Method.ALLOCATED: Bounds.EXACT,
    Method.WEIGHTS: Bounds.PRESENCE,
    Method.EXCLUSIVE: Bounds.EXACT,
    Method.UTILIZATION: Bounds.ACTIVITY,
    Method.EQUAL: Bounds.PRESENCE,
    Method.NONE: Bounds.EXACT,
    Method.SLICES: Bounds.PRESENCE,
}
"""The kind of the bounds that each method gives."""

REASONS: dict[Method, str] = {
    Method.WEIGHTS: "several held parts and their use was not measured",
    Method.UTILIZATION: "several used it",
    Method.SLICES: "several had processes on MIG instances and their use was not measured",
    Method.EQUAL: "several had processes and their use was not measured",
}
"""Why a method gives an estimate; without commas, for tables."""

_ORDER = tuple(Bounds)


def bounds_of(methods: Iterable[str], meet: bool = False) -> Bounds:
    """The kind of the bounds of a sum: of several methods, that of the least certain.

    Args:
        methods: By name; one that is not known counts as the least certain.
        meet: The lower and the upper bound are the same: where both are certain, it is exact.
    """
    known = {method.value: BOUNDS[method] for method in Method}
    kinds = [known.get(one, _ORDER[-1]) for one in methods]
    found = max(kinds, key=_ORDER.index, default=Bounds.EXACT)
    return Bounds.EXACT if meet and found is Bounds.PRESENCE else found


def reason_of(methods: Iterable[str]) -> str:
    """Why a sum is an estimate; empty: it is none."""
    known = {*methods}
    return "; ".join(reason for method, reason in REASONS.items() if method.value in known)

"""Whose energy: one amount, between two instants, shared among those who held or used a GPU.

Amounts are integers, in microjoules, and the shares of an amount always add up to it. Who holds a
GPU (a job or pod that it was allocated to) pays for all that it draws. Processes decide only where
nobody holds it, and their shares are estimates. What is not known goes to an account of its own,
with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Kind(str, Enum):
    """What an account is of."""

    JOB = "job"
    POD = "pod"
    NAMESPACE = "namespace"
    USER = "user"
    CONTAINER = "container"
    SERVICE = "service"
    IDLE = "idle"
    UNATTRIBUTED = "unattributed"


NOBODY = -1
"""The uid of an account that belongs to no user."""


class Account(NamedTuple):
    """Who or what energy is charged to.

    Attributes:
        kind: What it is.
        name: A job's id, `namespace/pod`, a unit, a container's id, or why nobody is charged.
        run: Tells two runs of one job apart: a restart count, or a SLUID.
        uid: The user who is charged; NOBODY: none.
    """

    kind: Kind
    name: str = ""
    run: str = ""
    uid: int = NOBODY


def parent_of(account: Account) -> Account:
    """Whose sum an account is part of: a user's, a namespace's, or only its own."""
    if account.kind is Kind.POD:
        return Account(Kind.NAMESPACE, account.name.partition("/")[0])
    if account.uid != NOBODY:
        return Account(Kind.USER, uid=account.uid)
    return account


IDLE = Account(Kind.IDLE)
"""What a GPU draws that nobody holds and nobody uses."""


def unattributed(reason: str) -> Account:
    """The account for energy that cannot be charged to anybody."""
    return Account(Kind.UNATTRIBUTED, reason)


class Method(str, Enum):
    """How a share was found."""

    ALLOCATED = "allocated"
    """One holder: all of it. Exact."""
    WEIGHTS = "weights"
    """Several holders: by the parts of the GPU that were allocated to each."""
    EXCLUSIVE = "exclusive"
    """No holder, and processes of one account: all of it. Exact."""
    UTILIZATION = "utilization"
    """No holder, several accounts: by the use that the driver reports for their processes."""
    EQUAL = "equal"
    """No holder, several accounts, and the driver reports no use: in equal parts."""
    NONE = "none"
    """Idle, or unattributed."""


class Claim(NamedTuple):
    """A claim on what a GPU draws.

    Attributes:
        account: Whose.
        weight: Its part beside other claims. 0: only if no other claim has a weight.
        measured: Whether the weight is a use that the driver reported.
    """

    account: Account
    weight: int = 1
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Charge:
    """What one account is charged.

    Attributes:
        account: Who.
        method: How it was found.
        active_uj: Energy while the GPU worked.
        idle_uj: Energy while the driver reported the GPU as idle.
        lower_uj: The account certainly used at least this.
        upper_uj: The account certainly used no more than this.
        ns: Time of the GPU.
    """

    account: Account
    method: Method
    active_uj: int
    idle_uj: int
    lower_uj: int
    upper_uj: int
    ns: int


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known about a GPU between two instants in which nothing changed.

    Attributes:
        holders: To whom it is allocated.
        present: Who has processes on it.
        listed: Whether its processes are known: nobody present then means that nobody used it.
        idle: Whether the driver reported it as idle.
        unknown: Why its users are not known; counts only where nobody holds it.
        excluded: Why not even a holder is charged; empty: a holder is.
    """

    holders: Sequence[Claim] = ()
    present: Sequence[Claim] = ()
    listed: bool = False
    idle: bool = False
    unknown: str = ""
    excluded: str = ""


NO_HOLDER = "no holder"
"""The GPU worked, was not allocated to anybody, and its processes are not looked at."""


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Integer parts of an amount, by weight; they add up to it exactly.

    The rest of the division goes to the largest remainders. Where no weight is above 0, the parts
    are equal.

    Args:
        total: The amount, not negative.
        weights: At least one, none negative.
    """
    whole = sum(weights)
    if not whole:
        weights = [1] * len(weights)
        whole = len(weights)
    parts = [total * weight // whole for weight in weights]
    left = total - sum(parts)
    remainders = [total * weight % whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda place: (-remainders[place], place))
    for place in order[:left]:
        parts[place] += 1
    return parts


def split(energy_uj: int, ns: int, situation: Situation) -> list[Charge]:
    """Charges that add up to an energy and a time.

    Args:
        energy_uj: What the GPU drew.
        ns: How long that took.
        situation: What is known about the GPU meanwhile.
    """
    if situation.excluded:
        return [_nobody(unattributed(situation.excluded), energy_uj, ns)]
    claims = _merged(situation.holders)
    if claims:
        method = Method.ALLOCATED if len(claims) == 1 else Method.WEIGHTS
        return _charges(claims, method, energy_uj, ns, situation.idle)
    claims = _merged(situation.present)
    if claims:
        measured = any(claim.measured for claim in claims)
        several = Method.UTILIZATION if measured else Method.EQUAL
        method = Method.EXCLUSIVE if len(claims) == 1 else several
        return _charges(claims, method, energy_uj, ns, situation.idle)
    if situation.listed or situation.idle:
        return [_nobody(IDLE, energy_uj, ns)]
    return [_nobody(unattributed(situation.unknown or NO_HOLDER), energy_uj, ns)]


def _merged(claims: Iterable[Claim]) -> list[Claim]:
    """One claim for each account, in a fixed order; without those that count only alone."""
    found: dict[Account, Claim] = {}
    for claim in claims:
        known = found.get(claim.account)
        if known is not None:
            measured = claim.measured or known.measured
            claim = Claim(claim.account, claim.weight + known.weight, measured)
        found[claim.account] = claim
    merged = [found[account] for account in sorted(found)]
    # A process without use in this sample is present all the same; a service's is not.
    weighty = [claim for claim in merged if claim.weight or claim.measured]
    return weighty or merged


def _charges(
    claims: Sequence[Claim], method: Method, energy_uj: int, ns: int, idle: bool
) -> list[Charge]:
    weights = [claim.weight for claim in claims]
    energies, times = shares(energy_uj, weights), shares(ns, weights)
    # What an idle GPU draws is shared by rule, and no part of it is anybody's doing.
    exact = len(claims) == 1 or idle
    return [
        Charge(
            claim.account,
            method,
            active_uj=0 if idle else part_uj,
            idle_uj=part_uj if idle else 0,
            lower_uj=part_uj if exact else 0,
            upper_uj=part_uj if exact else energy_uj,
            ns=part_ns,
        )
        for claim, part_uj, part_ns in zip(claims, energies, times, strict=True)
    ]


def _nobody(account: Account, energy_uj: int, ns: int) -> Charge:
    idle_uj = energy_uj if account is IDLE else 0
    active_uj = energy_uj - idle_uj
    return Charge(account, Method.NONE, active_uj, idle_uj, energy_uj, energy_uj, ns)

"""Divides one amount of energy among those who held or used a GPU between two instants.

Amounts are integers, in microjoules, and the shares of an amount always add up to it. The holder of
a GPU (the job or pod that it was allocated to) is charged for everything that it draws. Processes
count only if nobody holds the GPU, and their shares are estimates. Energy that cannot be assigned
goes to a separate account, with the reason. An account's charge is divided among its processes
likewise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from zeus_ipc.charging import BOUNDS, ChargeBasis, Method


class Kind(str, Enum):
    """The kind of an account."""

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
    """An account that energy is charged to.

    Attributes:
        kind: Its kind.
        name: A job's id, `namespace/pod`, a unit, a container's id, or why nobody is charged.
        run: Distinguishes runs of one job: a restart count, or a SLUID.
        uid: The user who is charged; NOBODY: none.
    """

    kind: Kind
    name: str = ""
    run: str = ""
    uid: int = NOBODY


def parent_of(account: Account) -> Account:
    """The parent account: the user, the namespace, or the account itself."""
    if account.kind is Kind.POD:
        return Account(Kind.NAMESPACE, account.name.partition("/")[0])
    if account.uid != NOBODY:
        return Account(Kind.USER, uid=account.uid)
    return account


IDLE = Account(Kind.IDLE)
"""The account for GPUs that nobody holds and nobody uses."""


def unattributed(reason: str) -> Account:
    """The account for energy that cannot be assigned."""
    return Account(Kind.UNATTRIBUTED, reason)


class Claim(NamedTuple):
    """A claim on a GPU's energy.

    Attributes:
        account: The account that has the claim.
        weight: Its weight relative to other claims. 0: it counts only if no other claim has a
            weight.
        of: Number of parts, if a GPU is divided into a fixed number of them; 0: it is not.
    """

    account: Account
    weight: int = 1
    of: int = 0


@dataclass(frozen=True, slots=True)
class Charge:
    """The charge of one account.

    Attributes:
        account: The account.
        method: How it was determined.
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
    """The facts about a GPU between two instants without a change.

    Attributes:
        holders: Claims of those to whom it is allocated.
        present: Claims of those who have processes on it.
        used: Use by account, as the driver measured it. Empty: not known.
        slices: Sizes of the MIG instances on which accounts have processes, if their use is not
            known.
        idle_uw: Its power when nobody uses it; 0: not known.
        listed: Whether its processes are known: an empty `present` then means that nobody used it.
        idle: Whether the driver reported it as idle.
        unknown: Why its users are not known; counts only if nobody holds it.
        excluded: Why not even a holder is charged; empty: the holder is charged.
    """

    holders: Sequence[Claim] = ()
    present: Sequence[Claim] = ()
    used: Sequence[Claim] = ()
    slices: Sequence[Claim] = ()
    idle_uw: int = 0
    listed: bool = False
    idle: bool = False
    unknown: str = ""
    excluded: str = ""


NO_HOLDER = "no holder"
"""Reason: the GPU worked, was not allocated, and its processes are not listed."""


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """Integer parts of an amount, by weight; they add up to it exactly.

    The rest of the division goes to the largest remainders. If no weight is above 0, the parts are
    equal.

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
        ns: The time in which it did.
        situation: The facts about the GPU in that time.
    """
    if situation.excluded:
        return [_nobody(unattributed(situation.excluded), energy_uj, ns)]
    if situation.holders:
        claims = _with_rest(_merged(situation.holders))
        if len(claims) > 1:
            return _shared(claims, Method.WEIGHTS, energy_uj, ns, situation)
        return [_whole(claims[0].account, Method.ALLOCATED, energy_uj, ns, situation.idle)]
    claims = _merged(situation.present)
    if claims:
        if len(claims) > 1:
            return _shared(claims, Method.EQUAL, energy_uj, ns, situation)
        return [_whole(claims[0].account, Method.EXCLUSIVE, energy_uj, ns, situation.idle)]
    if situation.listed or situation.idle:
        return [_nobody(IDLE, energy_uj, ns)]
    return [_nobody(unattributed(situation.unknown or NO_HOLDER), energy_uj, ns)]


def _merged(claims: Iterable[Claim]) -> list[Claim]:
    """One claim for each account, in a fixed order, without claims of weight 0 beside others."""
    by_account: dict[Account, Claim] = {}
    for claim in claims:
        known = by_account.get(claim.account)
        if known is not None:
            of = max(claim.of, known.of)
            claim = Claim(claim.account, claim.weight + known.weight, of)
        by_account[claim.account] = claim
    merged = [by_account[account] for account in sorted(by_account)]
    return [claim for claim in merged if claim.weight] or merged


def _with_rest(claims: list[Claim]) -> list[Claim]:
    """Claims of the holders, and one for the parts that nobody holds."""
    rest = max(claim.of for claim in claims) - sum(claim.weight for claim in claims)
    return [*claims, Claim(IDLE, rest)] if rest > 0 else claims


def _basis(
    claims: Sequence[Claim], default: Method, situation: Situation
) -> tuple[Method, Sequence[Claim]]:
    """The method and weights by which claims share the energy of a GPU in use."""
    known = {claim.account for claim in claims}
    for method, weights in (
        (Method.UTILIZATION, situation.used),
        (Method.SLICES, situation.slices),
    ):
        weighted = [claim for claim in weights if claim.account in known and claim.weight]
        if weighted:
            return method, _merged(weighted)
    return default, claims


def _shared(
    claims: Sequence[Claim], default: Method, energy_uj: int, ns: int, situation: Situation
) -> list[Charge]:
    """Divides idle power by rule, without uncertainty, because nobody caused it. Divides the rest
    by use, with an uncertainty."""
    method, basis = _basis(claims, default, situation)
    # The driver reports once a second whether the GPU is idle, and for each second whether it was
    # used.
    idle = situation.idle and method is not Method.UTILIZATION
    if idle:
        method, basis, standing_uj = default, claims, energy_uj
    else:
        standing_uj = min(energy_uj, situation.idle_uw * ns // 1_000_000_000)
    used_uj = energy_uj - standing_uj
    weights = [claim.weight for claim in claims]
    users = [claim.account for claim in basis]
    parts = dict(zip(users, shares(used_uj, [claim.weight for claim in basis]), strict=True))
    charges = []
    for claim, rule_uj, part_ns in zip(
        claims, shares(standing_uj, weights), shares(ns, weights), strict=True
    ):
        account, estimate_uj = claim.account, rule_uj + parts.get(claim.account, 0)
        lower_uj, upper_uj = rule_uj, rule_uj + used_uj
        if method is Method.UTILIZATION:
            if account not in parts:
                upper_uj = rule_uj
            elif len(parts) == 1:
                lower_uj = upper_uj
        idle_uj = estimate_uj if idle or account == IDLE else 0
        active_uj = estimate_uj - idle_uj
        charges.append(Charge(account, method, active_uj, idle_uj, lower_uj, upper_uj, part_ns))
    return charges


def _whole(account: Account, method: Method, energy_uj: int, ns: int, idle: bool) -> Charge:
    idle_uj = energy_uj if idle else 0
    return Charge(account, method, energy_uj - idle_uj, idle_uj, energy_uj, energy_uj, ns)


def _nobody(account: Account, energy_uj: int, ns: int) -> Charge:
    idle_uj = energy_uj if account is IDLE else 0
    active_uj = energy_uj - idle_uj
    return Charge(account, Method.NONE, active_uj, idle_uj, energy_uj, energy_uj, ns)


def unread(charge: Charge, others_uj: int) -> Charge:
    """A charge for a part of a time of which only the whole energy is known.

    Args:
        charge: As if the power had been constant.
        others_uj: What the other parts are charged.
    """
    certain = BOUNDS[charge.method] is ChargeBasis.EXACT
    method = Method.UNREAD if certain else charge.method
    return replace(charge, method=method, lower_uj=0, upper_uj=charge.upper_uj + others_uj)


class ChargedProcess(NamedTuple):
    """A process, distinct from a later one with the same pid.

    Attributes:
        pid: In zeusd's pid namespace.
        start_ticks: When it started, in clock ticks of CLOCK_BOOTTIME.
    """

    pid: int
    start_ticks: int


def divide(
    charge: Charge,
    present: Sequence[ChargedProcess],
    used: Mapping[ChargedProcess, int],
    slices: Mapping[ChargedProcess, int],
) -> list[tuple[ChargedProcess, Charge]]:
    """A charge for each process; they add up to the account's charge.

    Args:
        charge: The account's charge.
        present: The account's processes, at least one.
        used: The use by each of them, as the driver measured it; empty: not known.
        slices: Sizes of their MIG instances, if their use is not known.
    """
    if len(present) == 1:
        return [(present[0], charge)]
    method, weights, users = Method.EQUAL, [1] * len(present), len(present)
    for basis, uses in ((Method.UTILIZATION, used), (Method.SLICES, slices)):
        known = [uses.get(one, 0) for one in present]
        if any(known):
            method, weights, users = basis, known, len([one for one in known if one])
            break
    measured = method is Method.UTILIZATION
    divided = []
    for process, weight, active_uj, idle_uj, ns in zip(
        present,
        weights,
        shares(charge.active_uj, weights),
        shares(charge.idle_uj, weights),
        shares(charge.ns, [1] * len(present)),
        strict=True,
    ):
        part = replace(charge, method=method, active_uj=active_uj, idle_uj=idle_uj, ns=ns)
        if measured and not weight:
            part = replace(part, lower_uj=0, upper_uj=0)
        elif not measured or users > 1:
            part = replace(part, lower_uj=0)
        divided.append((process, part))
    return divided

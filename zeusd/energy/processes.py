"""Divides an account's charge among its processes; the parts add up to the charge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zeus_ipc.charging import Method
from zeusd.energy.split import Charge, shares


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
    for basis, found in ((Method.UTILIZATION, used), (Method.SLICES, slices)):
        known = [found.get(one, 0) for one in present]
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

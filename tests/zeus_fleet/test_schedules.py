"""Random schedules on the shipped core; benchmarks/fleet_schedules.py runs any number."""

from __future__ import annotations

import pytest

from tests.seeds import fresh
from tests.zeus_fleet.mutants import MUTANTS
from tests.zeus_fleet.parts import Violation
from tests.zeus_fleet.world import World

SCHEDULES = 120
MOST = 400
"""The rarest of the mutants below is noticed by one schedule of fifteen."""


def test_limits_in_hardware_stay_within_the_budget() -> None:
    seed = fresh()
    used = allowed = raises = 0
    for one in range(seed, seed + SCHEDULES):
        world = World(one)
        try:
            world.run()
        except Violation as violation:
            raise AssertionError(f"World({one}): {violation}") from None
        used, allowed, raises = (
            used + world.used_mw,
            allowed + world.allowed_mw,
            raises + world.raises,
        )
    # That nothing is exceeded is easy where nothing is granted: floors alone are below 0.55.
    assert used > 0.58 * allowed
    assert raises > 8 * SCHEDULES


@pytest.mark.parametrize(
    "mutant", ["dead-man in the agent", "charge by the grant", "proof by the store's leases"]
)
def test_schedules_notice_a_missing_rule(mutant: str) -> None:
    seed = fresh()
    for one in range(seed, seed + MOST):
        try:
            World(one, MUTANTS[mutant]).run()
        except Violation:
            return
    pytest.fail(f"{MOST} schedules from {seed} on did not notice: {mutant}")

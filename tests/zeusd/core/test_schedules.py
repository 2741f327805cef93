"""For any events in any order: no GPU stays throttled, and no running process loses a lease."""

from __future__ import annotations

import os
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import seeds
from tests.zeusd.core.schedules import run_schedule

SCHEDULES = int(os.environ.get("ZEUSD_TEST_SCHEDULES", seeds.tries(1000)))


@settings(
    max_examples=seeds.tries(120),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(st.randoms())
def test_whatever_hypothesis_thinks_of(chance: random.Random) -> None:
    """It chooses extremes, and finds the shortest failing history."""
    run_schedule(chance)


def test_random_schedules() -> None:
    first = seeds.fresh()
    print(f"schedules {first} to {first + SCHEDULES - 1}; see benchmarks/chaos.py --seed")
    for seed in range(first, first + SCHEDULES):
        try:
            run_schedule(seed)
        except Exception as error:
            raise AssertionError(
                f"schedule {seed} (python benchmarks/chaos.py --seed {seed}): {error}"
            ) from error

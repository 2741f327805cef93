"""The seeds of randomised tests: the same in each run, so that a change is judged by itself.
Another ZEUSD_TEST_SEED (`scripts/test --seed`) gives each test another seed."""

from __future__ import annotations

import os
import zlib

VARIABLE = "ZEUSD_TEST_SEED"
DEFAULT = "1"
QUICK = "ZEUSD_TEST_QUICK"
"""If it is set, as by `scripts/test --quick`, randomised tests try a fifth of the cases."""


def tries(most: int) -> int:
    """How many random cases to try, of so many with a seed that was asked for: with that of each
    run a third, as they are the same each time."""
    if os.environ.get(QUICK):
        return max(1, most // 5)
    return most if os.environ.get(VARIABLE, DEFAULT) != DEFAULT else max(1, most // 3)


def fresh(what: str = "this test") -> int:
    """A seed below 1e9. It is printed, so that a failure shows it.

    Args:
        what: What it is for, where a test has several.
    """
    # A different one for each test, independent of tests that ran before.
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
    run = os.environ.get(VARIABLE, DEFAULT)
    seed = zlib.crc32(f"{run} {test} {what}".encode()) % 10**9
    print(f"{what}: seed {seed}")
    return seed

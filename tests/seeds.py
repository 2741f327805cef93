"""Where randomised tests begin: again in each run, or, with ZEUSD_TEST_SEED, where a run began."""

from __future__ import annotations

import os
import random
import zlib

VARIABLE = "ZEUSD_TEST_SEED"
QUICK = "ZEUSD_TEST_QUICK"
"""If it is set, as by `scripts/test --quick`, randomised tests try a fifth of the cases."""


def tries(usual: int) -> int:
    """How many random cases to try, of so many in a usual run."""
    return max(1, usual // 5) if os.environ.get(QUICK) else usual


def fresh(what: str = "this test") -> int:
    """A seed below 1e9. It is printed, so that a failure shows it.

    Args:
        what: What it is for, where a test has several.
    """
    given = os.environ.get(VARIABLE)
    if given is None:
        seed = random.SystemRandom().randrange(10**9)
    else:
        # A different one for each test, independent of tests that ran before.
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
        seed = zlib.crc32(f"{given} {test} {what}".encode()) % 10**9
    print(f"{what}: seed {seed}")
    return seed

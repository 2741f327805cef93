"""Finds another process's work on the GPU: power above idle in time without a step.

It cannot find a process that only runs during steps. zeusd knows which jobs hold the GPU, and
the caller can report them (`Ledger.foreign`).
"""

from __future__ import annotations

import numpy as np

from zeus.serving.digest import Condensed

LEAST_UPDATES = 5
"""Number of updates in a row, ignoring those with steps, that must show it."""
SHARE = 0.25
"""Threshold, as a share of the difference between idle and busy power."""

Interval = tuple[int, int, str]
"""Start and end, ns, and the reason."""


def find_foreign(what: Condensed) -> list[Interval]:
    """Intervals in which another process used the GPU."""
    length_s = (what.update_end_ns - what.update_begin_ns) / 1e9
    empty = what.idle_s > 0.999 * length_s
    busy = np.flatnonzero(~empty)
    if busy.size == 0:
        return []
    # An update may lag behind slightly, so one next to a step is not trusted.
    trusted = empty.copy()
    trusted[1:] &= empty[:-1]
    trusted[:-1] &= empty[1:]
    trusted[: busy[0]] = False  # start-up: loading weights, capturing graphs
    where = np.flatnonzero(trusted)
    if where.size < 2 * LEAST_UPDATES:
        return []
    power = what.joules[where] / length_s[where]
    idle_w = float(np.quantile(power, 0.2))
    busy_w = float((what.joules[~empty] / length_s[~empty]).mean())
    limit_w = idle_w + SHARE * max(busy_w - idle_w, 0.2 * idle_w)
    above = power > limit_w
    found: list[Interval] = []
    begin = 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(int)))
    for begin, end in edges.reshape(-1, 2).tolist():
        if end - begin < LEAST_UPDATES:
            continue
        # From the last normal idle update to the next one.
        first = where[begin - 1] + 1 if begin else 0
        last = where[end] - 1 if end < where.size else what.idle_s.size - 1
        found.append(
            (
                int(what.update_begin_ns[first]),
                int(what.update_end_ns[last]),
                f"another process used the GPU: {power[begin:end].mean():.0f} W without a step, "
                f"{idle_w:.0f} W is idle",
            )
        )
    return found

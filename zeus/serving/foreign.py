"""Finds another process's work on the GPU: power in time without a step that idling cannot explain.

A process that runs only while steps run too cannot be seen this way; zeusd knows who holds the GPU,
and the caller may say so (`Ledger.foreign`).
"""

from __future__ import annotations

import numpy as np

from zeus.serving.digest import Condensed

LEAST_UPDATES = 5
"""Updates in a row, steps between them aside, that must show it."""
SHARE = 0.25
"""Of the way from idle power to busy power."""

Interval = tuple[int, int, str]
"""Begin and end, ns, and what is wrong."""


def find_foreign(what: Condensed) -> list[Interval]:
    """Intervals in which someone else used the GPU."""
    length_s = (what.update_end_ns - what.update_begin_ns) / 1e9
    empty = what.idle_s > 0.999 * length_s
    busy = np.flatnonzero(~empty)
    if busy.size == 0:
        return []
    # What an update shows may lag behind by a little: one beside a step is not trusted.
    trusted = empty.copy()
    trusted[1:] &= empty[:-1]
    trusted[:-1] &= empty[1:]
    trusted[: busy[0]] = False  # start-up: weights are loaded, graphs captured
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
        # From the last idle update that was as it should be to the next one.
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

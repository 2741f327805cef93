"""Finds the instants at which the energy cost of steps changes.

For instance, a model is swapped, a driver changes a clock silently, or another GPU on the same
board becomes busy: then one set of weights is wrong on both sides. An instant is a cut if weights
fitted separately to both sides explain much more than one set fitted to both.
"""

from __future__ import annotations

import numpy as np

from zeus.serving.columns import Flags, Floats, Ints

LEAST_BUSY = 150
"""Busy updates on each side of a cut."""
BLOCKS = 120
"""Number of instants that are tried first; then the best one is refined update by update."""
GAIN = 0.15
"""Share of the unexplained sum of squares that a cut must explain."""
MOST_CUTS = 7

_RIDGE = 1e-4


def find_cuts(columns: Floats, joules: Floats, weight: Floats, busy: Flags) -> Ints:
    """Positions of the first update after each cut, ascending."""
    where = np.flatnonzero(busy)
    found: list[int] = []
    pieces = [(0, where.size)]
    a, y, w = columns[where], joules[where], weight[where]
    while pieces and len(found) < MOST_CUTS:
        begin, end = pieces.pop()
        cut = _best_cut(a[begin:end], y[begin:end], w[begin:end])
        if cut is not None:
            found.append(begin + cut)
            pieces += [(begin, begin + cut), (begin + cut, end)]
    positions: Ints = where[np.array(sorted(found), int)]
    return positions


def _best_cut(a: Floats, y: Floats, w: Floats) -> int | None:
    count = y.size
    if count < 2 * LEAST_BUSY:
        return None
    edges = np.unique(np.linspace(0, count, min(BLOCKS, count // 20) + 1).astype(int))
    gram, right, own = _squares(a, y, w, edges)
    pull = gram[-1].diagonal().copy()
    one = _unexplained(gram[-1], right[-1], own[-1], pull)
    best: tuple[float, int] | None = None
    for number in range(1, edges.size - 1):
        if min(edges[number], count - edges[number]) < LEAST_BUSY:
            continue
        two = _unexplained(gram[number], right[number], own[number], pull) + _unexplained(
            gram[-1] - gram[number], right[-1] - right[number], own[-1] - own[number], pull
        )
        if best is None or two < best[0]:
            best = two, number
    # Chance alone explains about two per column; a cut must explain much more than that.
    chance = 4 * a.shape[1] / count
    if best is None or one - best[0] < (GAIN + chance) * one:
        return None
    return _refined(a, y, w, edges, best[1], pull)


def _squares(a: Floats, y: Floats, w: Floats, edges: Ints) -> tuple[Floats, Floats, Floats]:
    """Gram matrices, right-hand sides and sums of squares of all that is before each edge."""
    size = edges.size
    gram = np.zeros((size, a.shape[1], a.shape[1]))
    right = np.zeros((size, a.shape[1]))
    own = np.zeros(size)
    for n in range(1, size):
        part = slice(edges[n - 1], edges[n])
        weighted = a[part] * w[part, None]
        gram[n] = weighted.T @ a[part]
        right[n] = weighted.T @ y[part]
        own[n] = (w[part] * y[part] ** 2).sum()
    return np.cumsum(gram, axis=0), np.cumsum(right, axis=0), np.cumsum(own)


def _unexplained(gram: Floats, right: Floats, own: float, pull: Floats) -> float:
    theta = np.linalg.solve(gram + np.diag(_RIDGE * pull + 1e-12), right)
    return max(0.0, float(own - 2 * theta @ right + theta @ gram @ theta))


def _refined(a: Floats, y: Floats, w: Floats, edges: Ints, number: int, pull: Floats) -> int:
    """The best cut near an edge: where the other side's weights begin to have the smaller error."""
    low, high = int(edges[max(0, number - 2)]), int(edges[min(edges.size - 1, number + 2)])
    ridge = np.diag(_RIDGE * pull + 1e-12)
    errors = []
    for side in (slice(0, low + 1), slice(high - 1, None)):
        weighted = a[side] * w[side, None]
        theta = np.linalg.solve(weighted.T @ a[side] + ridge, weighted.T @ y[side])
        errors.append(w[low:high] * (y[low:high] - a[low:high] @ theta) ** 2)
    before = np.concatenate([[0], np.cumsum(errors[0])])
    after = np.concatenate([[0], np.cumsum(errors[1])])
    cut = low + int(np.argmin(before + after[-1] - after))
    return min(max(cut, LEAST_BUSY), y.size - LEAST_BUSY)

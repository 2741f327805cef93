"""Exact k-means of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeus.utils.lazy import needed


def kmeans_1d(values: Sequence[float], k: int) -> list[int]:
    """Splits numbers into clusters with the least sum of squared distances to their means.

    Clusters of numbers are intervals, so the best ones are found exactly, and nothing is random:
    sorted, the best split of the first `i` numbers into `c` clusters follows from those into
    `c - 1`, and where its last cluster begins only moves up with `i`. O(k n log n) in time, O(k n)
    in memory.

    Args:
        values: The numbers; the order does not matter.
        k: Number of clusters.

    Returns:
        For each value its cluster; clusters are numbered from 0 in ascending order.

    Raises:
        ValueError: There are fewer different values than clusters.

    Source: Wang, Song, "Ckmeans.1d.dp", The R Journal 3(2), 2011; the O(n log n) step as in
    Grønlund et al., "Fast exact k-means, k-medians and Bregman divergence clustering in 1D", 2017.
    """
    np = needed("numpy", "k-means", "simulate")
    found, where, weights = np.unique(
        np.asarray(values, dtype=float), return_inverse=True, return_counts=True
    )
    n = len(found)
    if not 1 <= k <= n:
        raise ValueError(f"{n} different values cannot be split into {k} clusters")
    x = found - np.average(found, weights=weights)  # sums of squares keep their digits
    sums = [np.concatenate(([0.0], np.cumsum(weights * x**power))) for power in (0, 1, 2)]

    def spread(first: Any, end: Any) -> Any:
        """Sum of squared distances within `x[first:end]`, not empty."""
        count, total, squares = (one[end] - one[first] for one in sums)
        return squares - total**2 / count

    # best[i]: of x[:i + 1] in the clusters so far; begins[c][i]: where the last of c + 1 begins.
    ends = np.arange(1, n + 1)
    best = spread(np.zeros(n, dtype=int), ends)
    begins = [np.zeros(n, dtype=int)]
    for cluster in range(1, k):
        best, begin = _one_more(best, cluster, spread)
        begins.append(begin)
    labels = np.empty(n, dtype=int)
    end = n
    for cluster in range(k - 1, -1, -1):
        begin = int(begins[cluster][end - 1])
        labels[begin:end] = cluster
        end = begin
    return [int(label) for label in labels[where.ravel()]]


def _one_more(before: Any, cluster: int, spread: Any) -> tuple[Any, Any]:
    """The best splits with one more cluster, of all prefixes; halves are solved side by side."""
    import numpy as np

    n = len(before)
    best = np.full(n, np.inf)
    begin = np.full(n, cluster, dtype=int)
    # Each task: prefixes that end in [low, high], and where their last cluster may begin.
    low, high = np.array([cluster]), np.array([n - 1])
    first, last = np.array([cluster]), np.array([n - 1])
    while len(low):
        middle = (low + high) // 2
        upto = np.minimum(last, middle)
        lengths = upto - first + 1
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        candidates = np.arange(lengths.sum()) + np.repeat(first - starts, lengths)
        costs = before[candidates - 1] + spread(candidates, np.repeat(middle + 1, lengths))
        least = np.minimum.reduceat(costs, starts)
        hits = np.flatnonzero(costs == np.repeat(least, lengths))
        task = np.repeat(np.arange(len(low)), lengths)[hits]
        leftmost = hits[np.unique(task, return_index=True)[1]]
        best[middle], begin[middle] = least, candidates[leftmost]
        split = begin[middle]
        low, high, first, last = (
            np.concatenate(pair)
            for pair in (
                (low, middle + 1),
                (middle - 1, high),
                (first, split),
                (split, last),
            )
        )
        left = low <= high
        low, high, first, last = low[left], high[left], first[left], last[left]
    return best, begin

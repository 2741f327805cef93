from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest

from tests import seeds
from zeus.simulate.groups import kmeans_1d


def spread(values: list[float], labels: list[int]) -> float:
    clusters: defaultdict[int, list[float]] = defaultdict(list)
    for value, label in zip(values, labels, strict=True):
        clusters[label].append(value)
    means = {label: sum(some) / len(some) for label, some in clusters.items()}
    return sum((value - means[label]) ** 2 for value, label in zip(values, labels, strict=True))


def least_spread(values: list[float], k: int) -> float:
    """By trying all splits of the sorted values."""
    values = sorted(values)
    best = float("inf")
    for cuts in itertools.combinations(range(1, len(values)), k - 1):
        labels = [sum(place >= cut for cut in cuts) for place in range(len(values))]
        best = min(best, spread(values, labels))
    return best


def test_no_split_is_better() -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    for _ in range(150):
        kind = rng.choice((lambda: rng.randint(0, 5), lambda: rng.lognormvariate(0, 3)))
        values = [float(kind()) for _ in range(rng.randint(1, 9))]
        k = rng.randint(1, len(set(values)))
        labels = kmeans_1d(values, k)
        assert sorted(set(labels)) == list(range(k))
        # As clusters are intervals, in the order of their numbers.
        assert [label for _, label in sorted(zip(values, labels, strict=True))] == sorted(labels)
        assert spread(values, labels) <= least_spread(values, k) * (1 + 1e-9) + 1e-9, values


def test_equal_values_are_together_and_far_ones_apart() -> None:
    values = [7.0] * 3 + [1e9, 1e9 + 1] + [8.0]
    assert kmeans_1d(values, 2) == [0, 0, 0, 1, 1, 0]
    assert kmeans_1d(values, 4) == [0, 0, 0, 2, 3, 1]


def test_many_values() -> None:
    rng = random.Random(5)
    values = [rng.gauss(center, 1) for center in (0, 100, 1000) for _ in range(3000)]
    assert kmeans_1d(values, 3) == [0] * 3000 + [1] * 3000 + [2] * 3000


@pytest.mark.parametrize("k", [0, 3])
def test_there_must_be_enough_different_values(k: int) -> None:
    with pytest.raises(ValueError, match=f"2 different values cannot be split into {k} clusters"):
        kmeans_1d([1.0, 2.0, 2.0], k)

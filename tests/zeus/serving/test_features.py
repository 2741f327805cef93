from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests import seeds
from tests.zeus.serving.server import serve
from zeus.serving.columns import StepColumns, by_end, clipped
from zeus.serving.features import NAMES, TAUS, saturating, shares


def _steps(begin: list[int], end: list[int], sizes: list[int]) -> StepColumns:
    rows = sum(sizes)
    return StepColumns(
        np.array(begin),
        np.array(end),
        np.concatenate([[0], np.cumsum(sizes)]),
        np.arange(rows),
        np.zeros(rows, bool),
        np.arange(1.0, rows + 1),
        np.zeros(rows),
    )


def _shapley(own: list[float], tau: float) -> list[float]:
    def worth(some: tuple[int, ...]) -> float:
        return 1 - math.exp(-sum(own[n] for n in some) / tau)

    found = [0.0] * len(own)
    orders = list(itertools.permutations(range(len(own))))
    for order in orders:
        for n, one in enumerate(order):
            found[one] += (worth(order[: n + 1]) - worth(order[:n])) / len(orders)
    return found


@pytest.mark.parametrize("own", [[1, 1, 1], [300, 1, 1, 1], [7.5, 20, 900], [4]])
def test_shares_of_saturating_features_are_shapley_values(own):
    found = saturating(np.zeros(len(own), np.int64), np.array(own, float), 1)

    for column, tau in enumerate(TAUS):
        assert found[:, column] == pytest.approx(_shapley(own, tau), rel=2e-3)


def test_shares_add_up_to_the_feature():
    served = serve(seeds.fresh(), seconds=10)
    found = np.add.reduceat(shares(served.steps), served.steps.first_row[:-1], axis=0)
    tokens = np.add.reduceat(served.steps.tokens, served.steps.first_row[:-1])

    assert found.shape[1] == len(NAMES)
    assert found[:, 0] == pytest.approx(1.0)
    assert set(np.round(found[:, 1], 9)) <= {0.0, 1.0}
    for column, tau in enumerate(TAUS):
        assert found[:, 7 + column] == pytest.approx(1 - np.exp(-tokens / tau))


def test_overlapping_steps_are_clipped_to_the_end_of_the_one_before():
    found = clipped(_steps([0, 5, 30, 32], [10, 20, 40, 40], [1, 1, 1, 1]))

    assert found.begin_ns.tolist() == [0, 10, 30, 40]
    assert found.end_ns.tolist() == [10, 20, 40, 41]


def test_steps_are_sorted_with_their_rows():
    found = by_end(_steps([20, 0, 10], [30, 10, 20], [1, 2, 3]))

    assert found.end_ns.tolist() == [10, 20, 30]
    assert found.request.tolist() == [1, 2, 3, 4, 5, 0]
    assert found.first_row.tolist() == [0, 2, 5, 6]

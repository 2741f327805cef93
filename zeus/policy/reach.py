"""Whether a run with a batch size reaches its target at all: one coin per size.

A size may miss the target always, never, or now and then, whatever its neighbours do: there is no
order in the probabilities. What a neighbour did still says a little about a size that was not
tried.
"""

from __future__ import annotations

import numpy as np

from zeus.policy.curves import Array

_PRIOR_MEAN, _PRIOR_RUNS = 0.9, 0.08
"""Before any run: so probable, with the weight of so many runs."""

_SHARED = 0.05
"""Weight of a run one octave away or nearer, compared with one of the size itself, ..."""
_OCTAVES = 1.0
_MOST_SHARED = 2.0
"""... and so many runs of each neighbour count at most: a hundred runs of one size say no more of
the next size than a few."""


class Reach:
    """Probabilities that runs reach the target.

    Args:
        x: Octaves (log2) from the default size, shape (sizes,).
        reached: Runs that reached the target, shape (sizes,).
        missed: Runs that did not, for another reason than their cost; need not be whole.
        reached_too: What is known from elsewhere, as so many runs.
        missed_too: The same.

    Attributes:
        reached: As given.
        missed: As given.
    """

    def __init__(
        self,
        x: Array,
        reached: Array,
        missed: Array,
        reached_too: Array | float = 0.0,
        missed_too: Array | float = 0.0,
    ) -> None:
        self.reached, self.missed = reached, missed
        near = _SHARED * np.exp(-0.5 * ((x[:, None] - x[None, :]) / _OCTAVES) ** 2)
        np.fill_diagonal(near, 0.0)
        self.any_missed = bool(np.any(missed + missed_too))
        """Whether any run did."""
        self._a = (
            _PRIOR_MEAN * _PRIOR_RUNS
            + reached_too
            + reached
            + near @ np.minimum(reached, _MOST_SHARED)
        )
        self._b = (
            (1 - _PRIOR_MEAN) * _PRIOR_RUNS
            + missed_too
            + missed
            + near @ np.minimum(missed, _MOST_SHARED)
        )
        self.mean: Array = self._a / (self._a + self._b)
        """Shape (sizes,)."""

    def draw(self, rng: np.random.Generator, draws: int) -> Array:
        """Probabilities that may be, shape (draws, sizes).

        While no run has missed, none is expected to."""
        if not self.any_missed:
            return np.ones((draws, len(self._a)))
        return np.asarray(rng.beta(self._a, self._b, (draws, len(self._a))))

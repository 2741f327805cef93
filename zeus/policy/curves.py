"""Functions of the batch size that are learnt from a few noisy values: Gaussian processes.

A curve is one of several shapes, plus a smooth deviation, plus what each batch size has of its own.
How large these are, how large the noise is, and which shape it is, are hypotheses: all are kept,
each weighted by how well it explains what was seen.

Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, chapters 2 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LEVEL_SD = 3.0
"""A curve's level is not known beforehand: a factor of twenty up or down."""

_JITTER = 1e-6


@dataclass(frozen=True)
class Prior:
    """What is thought of a curve before anything was seen.

    Attributes:
        shapes: The curve's course in each hypothesis, shape (shapes, sizes).
        log_weights: Of the shapes, shape (shapes,).
        deviations: Hypotheses about what the shape leaves out: standard deviation of the smooth
            deviation, standard deviation of what each size has of its own, and log weight.
        noises: Standard deviations of one value's noise, one a hypothesis.
        octaves: Over how many octaves the smooth deviation is alike.
    """

    shapes: Array
    log_weights: Array
    deviations: tuple[tuple[float, float, float], ...]
    noises: tuple[float, ...]
    octaves: float = 1.5


class Tally:
    """Values seen at one size: how many, their mean and their scatter."""

    __slots__ = ("count", "mean", "scatter")

    def __init__(self, count: int = 0, mean: float = 0.0, scatter: float = 0.0) -> None:
        self.count = count
        self.mean = mean
        self.scatter = scatter
        """Sum of the squared distances from the mean."""

    def and_also(self, value: float) -> Tally:
        """With another value."""
        off = value - self.mean
        mean = self.mean + off / (self.count + 1)
        return Tally(self.count + 1, mean, self.scatter + off * (value - mean))


class CurveModel:
    """What is known of a curve, over the sizes of a job.

    Args:
        x: Octaves (log2) from the default size, shape (sizes,).
        prior: Before anything was seen.
    """

    def __init__(self, x: Array, prior: Prior) -> None:
        apart = (x[:, None] - x[None, :]) / prior.octaves
        smooth = np.exp(-0.5 * apart**2)
        self._covariances = np.stack(
            [
                _LEVEL_SD**2 + sd**2 * smooth + own**2 * np.eye(len(x))
                for sd, own, _ in prior.deviations
            ]
        )
        self._noises = np.array(prior.noises)
        self._shapes = prior.shapes
        self.log_weights = prior.log_weights
        """Of the shapes, before anything was seen; shape (shapes,)."""
        of_deviations = np.array([weight for _, _, weight in prior.deviations])
        self._log_weights = of_deviations[:, None, None] + prior.log_weights

    def learn(self, seen: Mapping[int, Tally], evidence: Array | float = 0.0) -> Belief:
        """What is believed after some values.

        Args:
            seen: Values seen at each size, by its index; at least one.
            evidence: Further log likelihood of the shapes, shape (shapes,).
        """
        at = np.array(sorted(seen))
        tallies = [seen[i] for i in sorted(seen)]
        counts = np.array([tally.count for tally in tallies])
        values = np.array([tally.mean for tally in tallies])
        within = sum(tally.scatter for tally in tallies)
        noise = np.diag(1 / counts) * self._noises[:, None, None] ** 2
        # Values of one size say as much as their mean and its scatter. From here on arrays are of
        # (deviations, noises, ...).
        noisy = self._covariances[:, None][..., at[:, None], at[None, :]] + noise
        root = np.linalg.cholesky(noisy)
        hypotheses = root.shape[:2]
        off = (values[None, :] - self._shapes[:, at]).T
        cross = self._covariances[:, None][..., at, :]
        both = np.concatenate(
            [
                np.broadcast_to(off, (*hypotheses, *off.shape)),
                np.broadcast_to(cross, (*hypotheses, *cross.shape[2:])),
            ],
            axis=-1,
        )
        solved = np.linalg.solve(root, both)
        white, gain = solved[..., : off.shape[1]], solved[..., off.shape[1] :]
        log_likelihood = (
            -0.5 * (white**2).sum(axis=2)
            - np.log(np.diagonal(root, axis1=2, axis2=3)).sum(axis=2)[..., None]
            + (-(counts.sum() - len(counts)) * np.log(self._noises))[:, None]
            + (-0.5 * within / self._noises**2)[:, None]
            + self._log_weights
            + evidence
        )
        weights = np.exp(log_likelihood - log_likelihood.max())
        weights /= weights.sum()
        gain_t = np.swapaxes(gain, 2, 3)
        courses = self._shapes + np.swapaxes(gain_t @ white, 2, 3)
        return Belief(weights, courses, self._covariances[:, None] - gain_t @ gain)


class Belief:
    """A mixture of Gaussian processes.

    Args:
        weights: Of the hypotheses, shape (deviations, noises, shapes); their sum is 1.
        courses: Mean of each, shape (deviations, noises, shapes, sizes).
        covariances: Of each, shape (deviations, noises, sizes, sizes).
    """

    def __init__(self, weights: Array, courses: Array, covariances: Array) -> None:
        self._weights = weights
        self._courses = courses
        self._covariances = covariances
        self.mean: Array = np.asarray(np.tensordot(weights, courses, axes=3), np.float64)
        """Of the curve, shape (sizes,)."""

    def draw(self, rng: np.random.Generator, draws: int) -> Array:
        """Curves that may be, shape (draws, sizes)."""
        shapes, sizes = self._courses.shape[2:]
        up_to = np.cumsum(self._weights)
        which = np.searchsorted(up_to, rng.random(draws) * up_to[-1])
        drawn: Array = self._courses.reshape(-1, sizes)[which]
        normal = rng.standard_normal((draws, sizes))
        covariances = self._covariances.reshape(-1, sizes, sizes)
        for gp in np.unique(which // shapes):
            root = np.linalg.cholesky(covariances[gp] + _JITTER * np.eye(sizes))
            of_it = which // shapes == gp
            drawn[of_it] += normal[of_it] @ root.T
        return drawn


def saturating(x: Array, knees: Array) -> Array:
    """Logarithm of an epoch's cost, if a step costs something fixed and something a sample.

    Below its knee an epoch's cost is in inverse proportion to the batch size, beyond it constant.

    Returns:
        Shape (shapes, sizes); 0 at the default.
    """
    return np.asarray(_from_default(np.log1p(2.0 ** -(x - knees[:, None])), x))


def critical(x: Array, knees: Array) -> Array:
    """Logarithm of the epochs to a target, if larger batches help up to a critical size.

    Returns:
        Shape (shapes, sizes); 0 at the default.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, equation 2.11.
    """
    return np.asarray(_from_default(np.log1p(2.0 ** (x - knees[:, None])), x))


def _from_default(courses: Array, x: Array) -> Array:
    return np.asarray(courses - courses[:, [int(np.argmin(np.abs(x)))]])

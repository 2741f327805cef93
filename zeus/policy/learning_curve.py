"""Whether a run will reach its target, by the metrics of its epochs so far.

A metric's course is one of several shapes that rise and flatten: a power of the epoch, an
exponential, or a logarithm, each with a level and a height of its own. All are kept, each weighted
by how well it explains what was seen; recent epochs count more. A curve may leave its shape, by
more the further one looks ahead, as where a learning rate is lowered.

Pure, with randomness of its own seed only. Source: Swersky, Snoek, Adams, "Freeze-Thaw Bayesian
Optimization", 2014, of which the shapes are; Domhan, Springenberg, Hutter, "Speeding Up Automatic
Hyperparameter Optimization of Deep Neural Networks by Extrapolation of Learning Curves", 2015, of
which the rule is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SURE = 0.98
"""A run is given up where it misses its target with this probability."""
LEAST_EPOCHS = 4
"""Fewer epochs say too little of a curve."""

_DRAWS = 400
_POINTS = 64
"""So many future epochs are looked at: of more, some between."""
_POWERS = (0.25, 0.5, 1.0, 2.0)
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of exponentials, in epochs so far."""
_MEMORY = 0.6
"""Epochs further back than this share of all count less."""
_WIDE = 3.0
"""Standard deviation of levels and heights, in distances from the first metric to the target."""
_NOISE = 0.02
"""What is thought of a metric's noise, in the same unit, as of `_NOISE_EPOCHS` epochs."""
_NOISE_EPOCHS = 1.0
_LEAVES = 0.1
"""How far a curve leaves its shape until its epochs have doubled, in the same unit."""


def reach_probability(
    metrics: Sequence[float | None], target: float, higher_is_better: bool, more: float
) -> float:
    """Probability that a run reaches its target in some more epochs.

    Returns:
        1 where too little is known to say.
    """
    sign = 1.0 if higher_is_better else -1.0
    seen = [
        (epoch, sign * metric)
        for epoch, metric in enumerate(metrics, 1)
        if metric is not None and math.isfinite(metric)
    ]
    if len(seen) < LEAST_EPOCHS:
        return 1.0
    if more < 1:
        return 0.0
    epochs, values = (np.array(column, dtype=float) for column in zip(*seen, strict=True))
    now = float(len(metrics))
    gap = sign * target - values.max()
    unit = max(sign * target - values[0], float(np.ptp(values)))
    if gap <= 0 or not 0 < unit < math.inf:
        return 1.0
    ahead = _ahead(more)
    features, future = _shapes(epochs, now), _shapes(now + ahead, now)
    weights = np.exp(-(now - epochs) / (_MEMORY * now + 1))
    rng = np.random.default_rng(0)
    paths = _draw(features, (values - values[0]) / unit, weights, future, rng)
    walk = rng.standard_normal(paths.shape) * np.sqrt(np.diff(ahead, prepend=0.0) / now)
    paths = paths + _LEAVES * np.cumsum(walk, axis=1)
    return float((paths.max(axis=1) >= (sign * target - values[0]) / unit).mean())


def hopeless(
    metrics: Sequence[float | None], target: float, higher_is_better: bool, more: float
) -> bool:
    """Whether a run will hardly reach its target in some more epochs, see `reach_probability`."""
    return reach_probability(metrics, target, higher_is_better, more) <= 1 - SURE


def _ahead(more: float) -> Array:
    """How far future epochs are from now."""
    last = math.floor(more)
    if last <= _POINTS:
        return np.arange(1.0, last + 1, dtype=np.float64)
    return np.unique(np.round(np.geomspace(1, last, _POINTS)))


def _shapes(epochs: Array, now: float) -> Array:
    """Each shape at some epochs, from 1 down to 0; shape (shapes, epochs)."""
    powers = [epochs**-power for power in _POWERS]
    exponentials = [np.exp(-(epochs - 1) / (scale * now)) for scale in _SCALES]
    return np.stack([*powers, *exponentials, -np.log(epochs)])


def _draw(
    features: Array, values: Array, weights: Array, future: Array, rng: np.random.Generator
) -> Array:
    """Courses that may be, shape (draws, future epochs).

    Each shape's level, height and noise have a normal inverse gamma posterior: Bishop, "Pattern
    Recognition and Machine Learning", 2006, section 3.3 and exercise 3.12.
    """
    shapes = len(features)
    root = np.sqrt(weights)
    x = np.stack([np.ones_like(features), features], axis=2) * root[None, :, None]
    y = values * root
    prior = np.eye(2) * (_NOISE / _WIDE) ** 2
    precision = prior + np.swapaxes(x, 1, 2) @ x
    mean = np.linalg.solve(precision, (np.swapaxes(x, 1, 2) @ y)[..., None])[..., 0]
    a = (_NOISE_EPOCHS + weights.sum()) / 2
    residual = (y**2).sum() - np.einsum("si,sij,sj->s", mean, precision, mean)
    b = (_NOISE_EPOCHS * _NOISE**2 + np.maximum(residual, 0.0)) / 2
    log_weights = -0.5 * np.linalg.slogdet(precision)[1] - a * np.log(b)
    chances = np.exp(log_weights - log_weights.max())
    which = rng.choice(shapes, _DRAWS, p=chances / chances.sum())
    variance = b[which] / rng.gamma(a, size=_DRAWS)
    spread = np.linalg.cholesky(np.linalg.inv(precision))[which]
    drawn = mean[which] + np.sqrt(variance)[:, None] * np.einsum(
        "dij,dj->di", spread, rng.standard_normal((_DRAWS, 2))
    )
    courses = drawn[:, :1] + drawn[:, 1:] * future[which]
    return np.asarray(courses + np.sqrt(variance)[:, None] * rng.standard_normal(courses.shape))

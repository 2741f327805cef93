"""Fits the energy of steps to a sensor's updates.

One ridge fit over the whole run explains the energy of each update by the features of the steps in
the part that the sensor measured, and by idle seconds. Time is not a feature while the GPU is busy,
so a request that lengthens a step is charged for the power of that time. Each clock level, and each
side of an instant at which the energy cost changes, has its own weights, which are regularised
towards the common ones. Such an instant is a cut: weights fitted separately to both sides explain
much more than one set. For instance, a model is swapped, a driver changes a clock silently, or
another GPU on the same board becomes busy. Slow drifts that the weights miss are a ratio of
measured to predicted energy, smoothed over time with the width that predicts updates best from
their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zeus.serving.columns import Flags, Floats, Ints, Seen
from zeus.serving.features import NAMES

WIDTHS_S = (0.7, 1.5, 3.0, 6.0, 12.0, 30.0)
"""Candidate widths of the smoothing kernel; one sigma."""
LEAST_UPDATES = 300
"""Fewest updates with a step that are needed to attribute energy."""
LEAST_WITH_PRIOR = 20
"""The same with an earlier fit's weights as a prior."""
MOST_RESIDUAL = 0.20
"""Largest relative residual of an update with which energy is attributed."""
RIDGE = 3e-5
"""Ridge of the common weights, relative to a column's mean square."""
GROUP_UPDATES = 0.3
"""Weight of the common weights for a group, in updates."""
PRIOR_UPDATES = 30.0
"""Weight of an earlier fit's weights, in updates."""
LEAST_BUSY = LEAST_UPDATES // 2
"""Busy updates on each side of a cut."""
BLOCKS = 120
"""Number of instants that are tried first; then the best one is refined update by update."""
GAIN = 0.15
"""Share of the unexplained sum of squares that a cut must explain."""
MOST_CUTS = 7
CUT_RIDGE = 1e-4
MOST_PLACES = 200_000
"""Points in time that a ratio is smoothed over."""
ROUNDS = 3
"""Number of alternating fits of weights and ratio."""
LEVEL_WIDTH = 0.03
"""Clocks with a smaller relative difference form one level."""

Weights = Mapping[float, Sequence[float]]
"""Cost of each feature, J per unit, and idle power, W, by clock in MHz; 0: the clock is unknown."""

_COLUMNS = len(NAMES) + 1
IDLE = len(NAMES)
"""Position of the idle seconds' weight, which is the idle power in W."""


@dataclass(frozen=True)
class Fit:
    """The energy cost of steps.

    Attributes:
        weights: J per unit of each feature, idle W last; groups x columns.
        covariance: Covariance of the weights; groups x columns x columns.
        levels: Number of clock levels; group = segment * levels + level.
        cuts_s: Instants between segments.
        center_s, ratio: Measured to predicted energy of busy time, at instants.
        width_s: Width of the kernel that smoothed it.
        residual: Root mean square of the residuals of busy updates, relative to their mean.
        slow: The same of the ratio's estimate, relative.
        updates: Busy updates that were used.
        period_s: Typical distance between updates.
    """

    weights: Floats
    covariance: Floats
    levels: int
    cuts_s: Floats
    center_s: Floats
    ratio: Floats
    width_s: float
    residual: float
    slow: float
    updates: int
    period_s: float
    least: int = LEAST_UPDATES
    """Fewest updates that are needed to attribute energy; fewer with a prior."""

    def group(self, at_s: Floats, level: Ints) -> Ints:
        """The groups of weights that apply at instants and clock levels."""
        groups: Ints = np.searchsorted(self.cuts_s, at_s, side="right") * self.levels + level
        return groups

    def ratio_at(self, at_s: Floats) -> Floats:
        """The smoothed ratio at instants."""
        return np.interp(at_s, self.center_s, self.ratio)

    @property
    def refusal(self) -> str:
        """Why no energy can be attributed with this fit; empty: it can."""
        if self.updates < self.least:
            return (
                f"too few sensor updates: {self.updates} with a step in them, "
                f"{self.least} are needed"
            )
        if self.residual > MOST_RESIDUAL:
            return (
                f"large residual: the steps leave {100 * self.residual:.0f} % of an update "
                f"unexplained, more than {100 * MOST_RESIDUAL:.0f} %"
            )
        return ""


def fit(seen: Seen, levels: int, prior: Floats | None = None) -> Fit:
    """Fits weights and ratio.

    Args:
        seen: The updates, sorted by time.
        levels: Number of clock levels.
        prior: Weights of earlier fits of the same model; levels x columns.
    """
    busy = seen.busy
    count = int(busy.sum())
    if count < 2:
        return _empty(seen, levels, count)
    weight = _noise_weights(seen)
    scale = np.sqrt(np.mean(seen.features[busy] ** 2, axis=0))
    scale[IDLE] = max(scale[IDLE], 1e-3 * float(np.median(seen.features.sum(axis=1))), 1e-6)
    scale = np.where(scale > 0, scale, 1.0)
    columns = seen.features / scale
    anchors = None if prior is None else prior * scale
    target = None
    if anchors is not None:
        target = np.average(anchors, axis=0, weights=np.bincount(seen.level[busy], None, levels))
    cuts_s: Floats = np.zeros(0)
    group = seen.level
    groups = levels
    ratio: Floats = np.ones(seen.joules.size)
    width_s, slow = WIDTHS_S[-1], 0.0
    common = _common(columns, seen.joules, weight, target)
    factor = _level_factors(columns @ common, seen, weight, levels)
    cuts = find_cuts(columns * factor[seen.level][:, None], seen.joules, weight, seen.busy)
    if cuts.size:
        cuts_s = (seen.center_s[cuts - 1] + seen.center_s[cuts]) / 2
        group = np.searchsorted(cuts_s, seen.center_s, side="right") * levels + seen.level
        groups = levels * (cuts_s.size + 1)
    for turn in range(ROUNDS + 1):
        scaled = columns * ratio[:, None]
        scaled[:, IDLE] = columns[:, IDLE]
        common = _common(scaled, seen.joules, weight, target)
        theta = _by_group(scaled, seen.joules, weight, group, groups, common, anchors)
        predicted = np.einsum("uk,uk->u", columns, theta[group])
        idle_j = columns[:, IDLE] * theta[group, IDLE]
        if turn < ROUNDS:
            ratio, width_s, slow = _smooth(
                seen.center_s, seen.joules - idle_j, predicted - idle_j, weight, busy
            )
        weight = _noise_weights(seen, np.maximum(predicted, 0.0))
    explained = (predicted - idle_j) * ratio + idle_j
    error = seen.joules - explained
    level_j = float(np.mean(seen.joules[busy]))
    residual = float(np.sqrt(np.mean(error[busy] ** 2))) / max(level_j, 1e-12)
    covariance = np.zeros((groups, _COLUMNS, _COLUMNS))
    spread = float(np.mean(weight[busy] * error[busy] ** 2))
    total = _gram(columns, weight)
    for one in range(groups):
        some = group == one
        pull = _pull(total, RIDGE) + (_pull(total, GROUP_UPDATES / count) if groups > 1 else 0.0)
        inverse = np.linalg.inv(_gram(columns[some], weight[some]) + pull)
        covariance[one] = spread * inverse / np.outer(scale, scale)
    return Fit(
        theta / scale,
        covariance,
        levels,
        cuts_s,
        seen.center_s,
        ratio,
        width_s,
        residual,
        slow,
        count,
        _period(seen.center_s),
        LEAST_UPDATES if prior is None else LEAST_WITH_PRIOR,
    )


def _empty(seen: Seen, levels: int, count: int) -> Fit:
    weights = np.zeros((levels, _COLUMNS))
    idle_s = float(seen.features[:, IDLE].sum())
    if idle_s > 0:
        weights[:, IDLE] = float(seen.joules.sum()) / idle_s
    at = seen.center_s[:1] if seen.center_s.size else np.zeros(1)
    none = np.zeros((levels, _COLUMNS, _COLUMNS))
    return Fit(
        weights, none, levels, np.zeros(0), at, np.ones(1), WIDTHS_S[-1], 0.0, 0.0, count, 1.0
    )


def _noise_weights(seen: Seen, predicted: Floats | None = None) -> Floats:
    """Inverse variances: noise grows with the reading, and has a floor."""
    typical = float(np.median(seen.joules[seen.busy])) or 1.0
    level = seen.joules if predicted is None else predicted
    weights: Floats = 1.0 / np.maximum(level, 0.5 * abs(typical)) ** 2
    return weights


def _gram(columns: Floats, weight: Floats) -> Floats:
    gram: Floats = (columns * weight[:, None]).T @ columns
    return gram


def _pull(gram: Floats, strength: float) -> Floats:
    """A ridge in proportion to each column's own square, and a little of the mean one."""
    own = np.diag(gram)
    return np.diag(strength * (own + 1e-3 * own.mean() + 1e-300))


def _solved(
    columns: Floats, joules: Floats, weight: Floats, pull: Floats, target: Floats | float = 0.0
) -> Floats:
    """Weights that explain energies, pulled towards a target."""
    right = columns.T @ (weight * joules) + pull @ np.broadcast_to(target, len(pull))
    solution: Floats = np.linalg.solve(_gram(columns, weight) + pull, right).astype(np.float64)
    return solution


def _common(columns: Floats, joules: Floats, weight: Floats, target: Floats | None) -> Floats:
    """Weights of the whole run, pulled towards those of earlier fits if there are any."""
    strength = RIDGE if target is None else max(RIDGE, PRIOR_UPDATES / max(1, joules.size))
    pull = _pull(_gram(columns, weight), strength)
    return _solved(columns, joules, weight, pull, 0.0 if target is None else target)


def _level_factors(predicted: Floats, seen: Seen, weight: Floats, levels: int) -> Floats:
    """Cost of each clock level relative to the common cost."""
    above = np.bincount(seen.level, weight * predicted * seen.joules, levels)
    below = np.bincount(seen.level, weight * predicted**2, levels)
    factors: Floats = np.divide(above, below, out=np.ones(levels), where=below > 0)
    return factors


def _by_group(
    columns: Floats,
    joules: Floats,
    weight: Floats,
    group: Ints,
    groups: int,
    common: Floats,
    anchors: Floats | None,
) -> Floats:
    """Weights of each group, regularised towards the common ones times the group's relative cost,
    or towards those of earlier fits at its clock.
    """
    near: Floats = np.tile(common, (groups, 1))
    if groups == 1:
        return near
    worth = GROUP_UPDATES
    if anchors is not None:
        near, worth = np.tile(anchors, (groups // len(anchors), 1)), PRIOR_UPDATES
    solutions: Floats = near.copy()
    pull = _pull(_gram(columns, weight), worth / joules.size)
    for one in range(groups):
        some = group == one
        if not some.any():
            continue
        a, y, w = columns[some], joules[some], weight[some]
        base = a @ near[one]
        price = float((w * base * y).sum() / max(float((w * base**2).sum()), 1e-300))
        solutions[one] = _solved(a, y, w, pull, price * near[one])
    return solutions


def _smooth(
    center_s: Floats, measured: Floats, predicted: Floats, weight: Floats, busy: Flags
) -> tuple[Floats, float, float]:
    """Ratio of measured to predicted energy, its kernel width in s, and the ratio's error."""
    count = center_s.size
    if count < 10:
        return np.ones(count), WIDTHS_S[-1], 0.0
    period_s = _period(center_s)
    place = np.round((center_s - center_s[0]) / period_s).astype(int)
    size = int(place[-1]) + 1
    root = np.sqrt(weight) * busy
    above = np.bincount(place, root * measured, size).astype(np.float64)
    below = np.bincount(place, root * predicted, size).astype(np.float64)
    hole = max(1, round(0.15 / period_s))
    best: tuple[float, Floats, float] | None = None
    typical = float(below[below > 0].mean()) if (below > 0).any() else 1.0
    for width_s in WIDTHS_S:
        reach = min(size - 1, int(3 * width_s / period_s) + hole + 1)
        lag = np.arange(-reach, reach + 1)
        kernel = np.exp(-0.5 * (lag * period_s / width_s) ** 2)
        without = kernel * (np.abs(lag) > hole)
        little = 3.0 * typical  # a prior for 1 with the weight of three updates
        blind = (_convolve(above, without) + little) / (_convolve(below, without) + little)
        loss = float(((above - blind * below) ** 2).sum())
        ratio = (_convolve(above, kernel) + little) / (_convolve(below, kernel) + little)
        if best is None or loss < best[0]:
            best = loss, ratio, width_s
    assert best is not None
    ratio = np.clip(best[1], 0.2, 5.0)
    miss = float(np.sqrt(best[0] / max(1, int(busy.sum())))) / typical
    taken = max(1.0, best[2] * 3.54 / period_s * float(busy.mean()))
    return ratio[place], best[2], miss / taken**0.5


def _period(center_s: Floats) -> float:
    """Median distance between updates, s."""
    if center_s.size < 2:
        return 1.0
    span_s = float(center_s[-1] - center_s[0])
    return max(float(np.median(np.diff(center_s))), span_s / MOST_PLACES, 1e-6)


def _convolve(values: Floats, kernel: Floats) -> Floats:
    """`np.convolve` with mode `same`, by Fourier transform, because kernels span many updates."""
    size = values.size + kernel.size - 1
    length = 1 << (size - 1).bit_length()
    whole = np.fft.irfft(np.fft.rfft(values, length) * np.fft.rfft(kernel, length), length)
    begin = (kernel.size - 1) // 2
    values_out: Floats = whole[begin : begin + values.size]
    return values_out


def nearest_weights(known: Weights, clocks_mhz: Sequence[float]) -> Floats | None:
    """Weights of the nearest known clock for each clock level, levels x columns; None: there are
    none."""
    usable = {mhz: row for mhz, row in known.items() if len(row) == _COLUMNS}
    if not usable:
        return None
    mean = np.mean(list(usable.values()), axis=0)
    rows = [
        mean if mhz == 0 else usable[min(usable, key=lambda one: abs(one - mhz))]
        for mhz in clocks_mhz
    ]
    return np.array(rows)


def learned_weights(
    known: Weights, fit: Fit, seen: Seen, clocks_mhz: Sequence[float]
) -> dict[float, list[float]]:
    """The known weights with those of the fit: the last ones at each clock at which steps ran."""
    learned = {mhz: list(row) for mhz, row in known.items() if len(row) == _COLUMNS}
    group = fit.group(seen.center_s[seen.busy], seen.level[seen.busy])
    last = len(fit.weights) - fit.levels
    for level, mhz in enumerate(clocks_mhz):
        if (group == last + level).any():
            for near in [one for one in learned if abs(one - mhz) <= LEVEL_WIDTH * max(one, mhz)]:
                del learned[near]
            learned[mhz] = fit.weights[last + level].tolist()
    return learned


def find_cuts(columns: Floats, joules: Floats, weight: Floats, busy: Flags) -> Ints:
    """Positions of the first update after each cut, ascending; only busy updates count."""
    where = np.flatnonzero(busy)
    cuts: list[int] = []
    pieces = [(0, where.size)]
    a, y, w = columns[where], joules[where], weight[where]
    while pieces and len(cuts) < MOST_CUTS:
        begin, end = pieces.pop()
        cut = _best_cut(a[begin:end], y[begin:end], w[begin:end])
        if cut is not None:
            cuts.append(begin + cut)
            pieces += [(begin, begin + cut), (begin + cut, end)]
    positions: Ints = where[np.array(sorted(cuts), int)]
    return positions


def _best_cut(a: Floats, y: Floats, w: Floats) -> int | None:
    count = y.size
    if count < 2 * LEAST_BUSY:
        return None
    edges = np.unique(np.linspace(0, count, min(BLOCKS, count // 20) + 1).astype(int))
    best = int(np.argmin(_unexplained_by_two(a, y, w, edges)[:-1]))
    low, high = int(edges[max(0, best - 1)]), int(edges[best + 1])
    edges = np.unique([0, *range(low, high + 1), count])  # each update near the best one
    unexplained = _unexplained_by_two(a, y, w, edges)
    best = int(np.argmin(unexplained[:-1]))
    # Chance alone explains about two per column; a cut must explain much more than that.
    one, chance = unexplained[-1], 4 * a.shape[1] / count
    return int(edges[best]) if one - unexplained[best] >= (GAIN + chance) * one else None


def _unexplained_by_two(a: Floats, y: Floats, w: Floats, edges: Ints) -> Floats:
    """What fits before and after each edge leave; at the last one, one fit. Infinity: too near to
    an end."""
    parts = [slice(begin, end) for begin, end in pairwise([0, *edges.tolist()])]
    gram = np.cumsum([_gram(a[part], w[part]) for part in parts], axis=0)
    right = np.cumsum([a[part].T @ (w[part] * y[part]) for part in parts], axis=0)
    own = np.cumsum([(w[part] * y[part] ** 2).sum() for part in parts])
    pull = np.diag(CUT_RIDGE * gram[-1].diagonal() + 1e-12)

    def left(gram: Floats, right: Floats, own: float) -> float:
        theta = np.linalg.solve(gram + pull, right)
        return max(0.0, float(own - 2 * theta @ right + theta @ gram @ theta))

    unexplained = np.full(edges.size, np.inf)
    unexplained[-1] = left(gram[-1], right[-1], own[-1])
    whole = gram[-1], right[-1], own[-1]
    for n in np.flatnonzero(np.minimum(edges, y.size - edges) >= LEAST_BUSY):
        before = gram[n], right[n], own[n]
        after = (one - other for one, other in zip(whole, before, strict=True))
        unexplained[n] = left(*before) + left(*after)
    return unexplained

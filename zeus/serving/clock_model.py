"""Learns online how long a step takes at each clock; pure.

A step's time is the decode part times the clock's stretch, plus the prefill part over r, the
clock's share of the highest. The parts are linear in what the step computes, and are fitted by a
Kalman filter. The stretch of a clock without measurements is the physical bound 1/r, which can only
be too long. The stretch is learned from decode steps just before and just after a change of clocks,
so that load changes at other times cannot confound it. The model does not assume a knee.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import mul

COMPARED = 12
"""Decode steps before and after a change that are compared."""

STEADY = 0.06
"""Largest difference between the two halves of the steps after a change."""

REMEMBERED = 4.0
"""Half-life of a comparison's weight, in comparisons."""

PRIOR = (0.02, 2e-4, 0.01, 1e-7, 0.01, 1e-4)
"""Standard deviations of the prior, s, in the order of `StepTime`'s parts. They cover models from
1B to 400B."""

SATURATION = 24.0
"""Tokens at which a saturating part reaches 63 %: weights of a mixture of experts."""

DRIFT = 2e-4
"""Share of the prior's variance that each step adds."""

RELATIVE_NOISE = 0.04
"""Smallest noise of a step's time, as a share of it."""


def saturation(tokens: float) -> float:
    """Share, from 0 to 1, of the saturating part that a step with this many tokens needs."""
    return 1.0 - math.exp(-tokens / SATURATION)


class Kalman:
    """A linear model whose weights follow its data.

    Args:
        theta: Weights.
        variances: Of the weights before any data.
        drift: Share of these variances that each update adds, up to 5 % of them.
    """

    def __init__(
        self, theta: Sequence[float], variances: Sequence[float], drift: float = 0.0
    ) -> None:
        self.theta = list(theta)
        self._drift = [drift * variance for variance in variances]
        self._most = [0.05 * variance for variance in variances]
        self._p = [
            [v if i == j else 0.0 for j in range(len(theta))] for i, v in enumerate(variances)
        ]

    def error(self, x: Sequence[float], seen: float) -> float:
        """How far a value is above the prediction."""
        error: float = seen - sum(map(mul, x, self.theta))
        return error

    def update(self, x: Sequence[float], seen: float, noise: float) -> None:
        """Learns from one value with this variance; an outlier does not move the weights far."""
        px = [sum(map(mul, row, x)) for row in self._p]
        variance = sum(map(mul, px, x)) + noise
        limit = 3.0 * math.sqrt(variance)
        error = min(max(self.error(x, seen), -limit), limit)
        for i, row in enumerate(self._p):
            gain = px[i] / variance
            self.theta[i] += gain * error
            row[:] = [one - gain * other for one, other in zip(row, px, strict=True)]
            if row[i] < self._most[i]:
                row[i] += self._drift[i]

    def open(self) -> None:
        """Makes it learn fast again after the truth has changed."""
        for i, most in enumerate(self._most):
            self._p[i][i] += 0.2 * most


class StepTime:
    """The two parts of a step's time at the highest clock, s.

    The decode part: per step, per sequence, saturating with tokens, and per token of context. The
    prefill part: per step with prompt tokens (negative where compute hides behind memory), prompt
    token.

    Attributes:
        base_s, sequence_s, saturating_s, context_s: The fit through the last step's batch with
            slopes that are not negative: larger batches are never predicted to be faster.
        token_s: One more prompt token.
        residual2: Mean square of relative residuals.
    """

    def __init__(self) -> None:
        prior = [sd * sd for sd in PRIOR]
        self._fit = Kalman([0.005, 0.0, 0.0, 0.0, 0.0, 2e-5], prior, DRIFT * DRIFT)
        self.residual2 = 0.01
        self.base_s, self.token_s = 0.005, 2e-5
        self.sequence_s = self.saturating_s = self.context_s = 0.0

    def decode(self, sequences: float, context: float) -> float:
        """A step without prompt tokens at the highest clock, s."""
        return (
            self.base_s
            + self.sequence_s * sequences
            + self.saturating_s * saturation(sequences)
            + self.context_s * context
        )

    def prefill(
        self, tokens: float, sequences: float = 0.0, stretch: float = 1.0, r: float = 1.0
    ) -> float:
        """Additional time of one step for prompt tokens, given its decoding sequences, s.

        It includes the weights that only the prompt tokens touch: nearly all of a mixture of
        experts, at any clock.
        """
        if tokens <= 0.0:
            return 0.0
        touched = saturation(sequences + tokens) - saturation(sequences)
        computed = self._fit.theta[4] + self.token_s * tokens
        return max(0.0, stretch * self.saturating_s * touched + computed / r)

    def update(
        self,
        sequences: float,
        context: float,
        tokens: float,
        stretch: float,
        r: float,
        seen_s: float,
    ) -> None:
        """Learns from one step."""
        fit = self._fit
        x = [
            *(stretch, stretch * sequences, stretch * saturation(sequences + tokens)),
            *(stretch * context, 1.0 / r if tokens > 0 else 0.0, tokens / r),
        ]
        relative = fit.error(x, seen_s) / seen_s
        self.residual2 += 0.02 * (min(relative * relative, 0.04) - self.residual2)
        fit.update(x, seen_s, seen_s * seen_s * max(self.residual2, RELATIVE_NOISE**2))
        theta = fit.theta
        touched = saturation(sequences)
        here = theta[0] + theta[1] * sequences + theta[2] * touched + theta[3] * context
        self.sequence_s, self.saturating_s, self.context_s = (max(0.0, one) for one in theta[1:4])
        self.base_s = max(
            1e-5,
            here
            - self.sequence_s * sequences
            - self.saturating_s * touched
            - self.context_s * context,
        )
        self.token_s = max(1e-9, theta[5])

    def open(self) -> None:
        """Makes the model learn fast again after times have changed."""
        self._fit.open()


class Stretch:
    """Stretch: how much longer a decode step is at each clock than at the highest.

    Args:
        ratios: Each clock's share of the highest, from 1 down.
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        self._ratios = list(ratios)
        self._ascending = [-r for r in ratios]
        self._seen: list[float | None] = [None] * len(ratios)
        self._seen[0] = 1.0
        self._weight: dict[int, float] = {}
        self.values = [1.0] * len(ratios)
        """Stretch by level; without a measurement, the largest possible value."""
        self._refresh()

    def at(self, r: float) -> float:
        """Interpolates between the levels, because an effective clock need not be an offered
        one."""
        ratios, values = self._ratios, self.values
        below = bisect_left(self._ascending, -r)  # first level with a share of at most r
        if below == 0:
            return ratios[0] / r if r < ratios[0] else 1.0
        if below >= len(ratios):
            return values[-1] * ratios[-1] / r
        high, low = ratios[below - 1], ratios[below]
        part = (high - r) / (high - low)
        return values[below - 1] + part * (values[below] - values[below - 1])

    def learn(self, level: int, value: float) -> None:
        """One comparison."""
        if level == 0:
            return
        value = min(max(value, 1.0), 1.0 / self._ratios[level])
        before = self._seen[level]
        if before is None:
            self._seen[level], self._weight[level] = value, 1.0
        else:
            weight = min(REMEMBERED, self._weight[level]) + 1.0
            self._seen[level], self._weight[level] = before + (value - before) / weight, weight
        self._refresh()

    def load(self, values: Sequence[float | None]) -> None:
        """Starts from earlier values by level; None: not known."""
        for level, value in enumerate(values[: len(self._seen)]):
            if level and value is not None and 0.5 < value < 100.0:
                bound = 1.0 / self._ratios[level]
                self._seen[level] = min(max(value, 1.0), bound)
                self._weight[level] = 1.0
        self._refresh()

    def _refresh(self) -> None:
        ratios, seen, values = self._ratios, self._seen, self.values
        last = 1.0
        self.known = [value is not None for value in seen]
        """Whether each level was compared with another."""
        for level, value in enumerate(seen):  # grows by level, at most as the clocks
            if level:
                bound = values[level - 1] * ratios[level - 1] / ratios[level]
                last = bound if value is None else min(max(value, last), bound)
            values[level] = last


class Comparison:
    """Compares decode steps just before a change of clocks with those just after.

    Each step counts as the ratio of its time to the fit's time at the highest clock, so errors of
    the fit cancel.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=COMPARED)
        self._before = 0.0

    @property
    def under_way(self) -> bool:
        """Whether steps after a change are being collected."""
        return self._before > 0.0

    def changed(self) -> None:
        """Handles a changed clock."""
        enough = len(self._steps) >= COMPARED // 2
        self._before = _middle(list(self._steps)) if enough else 0.0
        self._steps.clear()

    def cancel(self) -> None:
        """Discards the collected steps."""
        self._steps.clear()
        self._before = 0.0

    def add(self, ratio: float) -> float | None:
        """Adds one decode step. Returns how much longer steps are since the change, once known."""
        steps = self._steps
        steps.append(ratio)
        if self._before <= 0.0 or len(steps) < COMPARED:
            return None
        values = list(steps)
        half = COMPARED // 2
        late = _middle(values[half:])
        if abs(_middle(values[:half]) - late) > STEADY * late:
            return None  # the change took effect meanwhile: wait for steps after it
        drift = _middle(values) / self._before
        self._before = 0.0
        return drift


def _middle(values: list[float]) -> float:
    """Mean of the middle values."""
    values = sorted(values)
    few = len(values) // 6
    values = values[few : len(values) - few]
    return sum(values) / len(values)

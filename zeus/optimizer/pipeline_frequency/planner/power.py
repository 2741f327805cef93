"""What a plan's stages draw together over an iteration: its peak, and how fast it rises and falls.

An instruction draws its mean power from its beginning to its end, and a stage between two of them
the blocking power. Iterations follow one another without a pause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.changes import Steady
from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem

_SLACK = 1e-9
"""A bound is kept up to this share of it: powers are quotients of what was measured."""


@dataclass(frozen=True)
class PowerBound:
    """What some stages may draw together.

    Attributes:
        peak_w: At any time, W.
        ramp_w_per_s: Change of the mean over one window to the mean over the next, W/s.
        window_s: The window: how fast a change matters, s. Within it, supplies buffer.
        stages: Those that share a supply, such as the stages of one node; None: all.
    """

    peak_w: float = math.inf
    ramp_w_per_s: float = math.inf
    window_s: float = 1.0
    stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for what, value in (
            ("a bound on power must be watts", self.peak_w),
            ("a bound on a ramp must be watts per second", self.ramp_w_per_s),
            ("the window of a ramp must be seconds", self.window_s),
        ):
            if not value > 0:
                raise PipelineFrequencyError(f"{what} above 0, not {value}")

    def excess(self, draw: Draw) -> float:
        """Largest share by which a bound is passed; 0 or below: both are kept."""
        over = draw.peak_w / self.peak_w - 1.0
        if self.ramp_w_per_s < math.inf:
            over = max(over, draw.ramp_w_per_s(self.window_s) / self.ramp_w_per_s - 1.0)
        return 0.0 if over <= _SLACK else over


@dataclass(frozen=True)
class Draw:
    """Power over one iteration.

    Attributes:
        at_s: Instants at which it changes, from 0 to the iteration's end.
        watts: From each to the next.
    """

    at_s: Floats
    watts: Floats

    @property
    def peak_w(self) -> float:
        """The highest power, W."""
        return float(self.watts.max())

    def ramp_w_per_s(self, window_s: float) -> float:
        """Largest difference of the means of two windows one after the other, over their length.

        The energy until an instant is piecewise linear, so the largest lies where a window begins
        or ends with a change of power.
        """
        period_s = float(self.at_s[-1])
        energy_j = np.concatenate([[0.0], np.cumsum(self.watts * np.diff(self.at_s))])

        def until(t_s: Floats) -> Floats:
            rounds = np.floor(t_s / period_s)
            part = np.interp(t_s - rounds * period_s, self.at_s, energy_j)
            return np.asarray(rounds * energy_j[-1] + part)

        begins = np.concatenate([self.at_s - part * window_s for part in range(3)])
        first, middle, last = (until(begins + part * window_s) for part in range(3))
        return float(np.abs(last - 2 * middle + first).max()) / window_s**2


class PlanPower:
    """Tells what plans of one problem draw.

    Args:
        problem: The problem.
        steady: Knows what changes of clocks take.
    """

    def __init__(self, problem: Problem, steady: Steady) -> None:
        self._problem = problem
        self._steady = steady
        self._stage = np.array([one.stage for one in problem.pipeline.instructions])
        self._blocked_w = problem.p2p_power_w * problem.gpus_per_stage

    def draw(self, clocks: Ints, stages: tuple[int, ...] | None = None) -> Draw:
        """Power of an iteration.

        Args:
            clocks: Of each instruction.
            stages: Of which stages; None: of all.
        """
        starts, ends, cost_j = self._steady.runs(clocks)
        extra_w = cost_j / (ends - starts)
        count = self._problem.pipeline.num_stages
        until_s = float(ends.max())
        if stages is not None:
            inside = np.isin(self._stage, stages)
            starts, ends, extra_w = starts[inside], ends[inside], extra_w[inside]
            count = len(stages)
        # One stage's instructions meet exactly, but for rounding: they never overlap.
        grid_s = max(self._problem.tolerance_s, 1e-15)
        edges = np.rint(np.concatenate([ends, starts, [0.0, until_s]]) / grid_s)
        changes = np.concatenate([-extra_w, extra_w, [0.0, 0.0]])
        at, place = np.unique(edges, return_inverse=True)
        steps = np.zeros(len(at))
        np.add.at(steps, place.ravel(), changes)
        return Draw(at * grid_s, count * self._blocked_w + np.cumsum(steps)[:-1])

    def active(self, clocks: Ints, at_s: float, stages: tuple[int, ...] | None) -> Ints:
        """Instructions of these stages that run at an instant."""
        starts, ends, _ = self._steady.runs(clocks)
        running = (starts <= at_s) & (at_s < ends)
        if stages is not None:
            running &= np.isin(self._stage, stages)
        return np.flatnonzero(running)

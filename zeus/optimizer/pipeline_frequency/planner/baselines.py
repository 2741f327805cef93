"""What simpler policies than a plan take: one clock for all, or one power limit for all.

The best of them are also where the search begins, so that no plan is worse than they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, Problem


@dataclass(frozen=True)
class Policies:
    """Several ways to run a pipeline by one simple rule.

    Attributes:
        options: For each way the option of every instruction (instructions, ways), or a faster and
            cheaper one where the profile has it.
        time_s: Iteration time of each way as the rule has it.
        cost_j: Its effective energy.
    """

    options: Ints
    time_s: Floats
    cost_j: Floats

    def energy_within(self, problem: Problem, limit_s: float) -> float | None:
        """Least energy of an iteration within a time, J; None if no way is that fast."""
        fit = self.time_s <= limit_s * (1 + 1e-9)
        energy = problem.energy(self.cost_j, self.time_s)[fit]
        return float(energy.min()) if len(energy) else None


def one_clock(problem: Problem) -> Policies:
    """Every instruction at the same clock.

    An instruction that was not measured at a clock takes its next higher one.
    """
    clocks = np.unique([option.frequency for options in problem.offered for option in options])
    chosen = []
    for options in problem.offered:
        own = np.array([option.frequency for option in options])
        chosen.append(np.maximum((own[:, None] >= clocks).sum(axis=0) - 1, 0))
    return _policies(problem, np.array(chosen))


def one_power_limit(problem: Problem) -> Policies:
    """Every GPU under the same power limit.

    An instruction then runs at its highest clock whose mean power is within the limit, or at its
    lowest clock.
    """
    powers = [
        np.array([option.energy_j / option.time_s for option in options])
        for options in problem.offered
    ]
    limits = np.unique(np.concatenate(powers))
    chosen = []
    for own in powers:
        within = own[:, None] <= limits
        chosen.append(np.where(within.any(axis=0), within.argmax(axis=0), len(own) - 1))
    return _policies(problem, np.array(chosen))


def _policies(problem: Problem, chosen: Ints) -> Policies:
    """Of (kinds, ways): which of a kind's settings each way takes, counted from the highest."""
    chosen = np.unique(chosen, axis=1)
    times, costs = np.empty(chosen.shape), np.empty(chosen.shape)
    options = np.empty(chosen.shape, dtype=np.intp)
    for row, curve in enumerate(problem.curves):
        time_s, cost_j = problem.offered_figures(row)
        times[row], costs[row] = time_s[chosen[row]], cost_j[chosen[row]]
        options[row] = np.searchsorted(curve.time_s, times[row], side="right") - 1
    return Policies(
        options[problem.kind], problem.longest(times[problem.kind]), costs[problem.kind].sum(axis=0)
    )

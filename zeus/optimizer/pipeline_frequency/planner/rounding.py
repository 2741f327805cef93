"""From the linear program's durations to settings that a GPU has: many plans at once, as columns.

A plan is walked through level after level, from the iteration's beginning or from its end. An
instruction gets the slowest option with which it ends when the linear program says; what it does
not use is left to those after it. So no plan misses its deadline. Afterwards instructions that have
slack get slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import (
    Floats,
    Ints,
    Level,
    PipelineProblem,
    latest,
)

_SLACK = 1e-12
"""Share of the longest time that a walk gives an instruction more than the linear program says: an
end is a sum that rounds."""

_SNAP = 1e-6
"""Share of an option's time within which the linear program means that option: its tolerance."""


class Rounding:
    """Rounds for one problem. Options are numbered through all curves."""

    def __init__(self, problem: PipelineProblem) -> None:
        self._problem = problem
        self._slack_s = _SLACK * problem.max_time_s
        fastest = problem.fastest[:, None]
        # Shortest time from an instruction's end to the iteration's, and from its beginning.
        self._rest = [
            problem.finishes(fastest, levels)[:-1] - fastest
            for levels in (problem.reverse, problem.forward)
        ]

    def round(self, durations_s: Floats, deadlines_s: Floats) -> Ints:
        """Plans (instructions, 2 * columns) within the deadlines: each column is walked from both
        ends.
        """
        problem = self._problem
        snapped, ceilings = self._snap(durations_s)
        plans = [
            self._walk(levels, snapped, ceilings, deadlines_s - rest)
            for levels, rest in zip((problem.forward, problem.reverse), self._rest, strict=True)
        ]
        options = np.concatenate(plans, axis=1)
        return self._settings(self._use_slack(options, np.tile(deadlines_s, len(plans))))

    def fill(self, plans: Ints) -> Ints:
        """Plans whose instructions use the slack that they have within each plan's own time."""
        options = self._options(plans)
        return self._settings(self._use_slack(options, self._problem.time(plans)))

    # ------------------------------------------------------------------------------ internals

    def _settings(self, options: Ints) -> Ints:
        return np.asarray(self._problem.option_settings[options])

    def _options(self, plans: Ints) -> Ints:
        """For each setting the option of its curve that is not slower."""
        problem = self._problem
        kinds = problem.kind[:, None]
        return problem.slowest_within(kinds, problem.times[kinds, plans] * (1 + _SLACK))

    def _snap(self, durations_s: Floats) -> tuple[Floats, Ints]:
        """Durations without the solver's tolerance, and the options on the hull that are not
        faster: to go beyond them, as an instruction could that is given more time than the linear
        program gave it, costs 0.03 % of the energy, and 0.1 % where options are few.
        """
        problem, kinds = self._problem, self._problem.kind[:, None]
        below = problem.slowest_within(kinds, durations_s * (1 + _SNAP))
        exact = problem.option_times[below] >= durations_s * (1 - _SNAP)
        snapped = np.where(exact, problem.option_times[below], durations_s)
        return snapped, np.where(exact, below, problem.hull_above[below])

    def _walk(
        self, levels: Sequence[Level], durations_s: Floats, ceilings: Ints, latest_s: Floats
    ) -> Ints:
        problem = self._problem
        # Snapping may have made the program's times longer than the deadline by a hair.
        targets = np.minimum(problem.finishes(durations_s, levels)[:-1], latest_s) + self._slack_s
        ends = np.zeros((problem.count + 1, durations_s.shape[1]))
        options = np.empty(durations_s.shape, dtype=np.intp)
        for level in levels:
            starts = latest(ends, level.before)
            kinds = problem.kind[level.span, None]
            slowest = problem.slowest_within(kinds, targets[level.span] - starts)
            slowest = np.minimum(problem.hull_below[slowest], ceilings[level.span])
            options[level.span] = slowest
            np.add(starts, problem.option_times[slowest], out=ends[level.span])
        return options

    def _use_slack(self, options: Ints, deadlines_s: Floats) -> Ints:
        """Makes instructions slower where the deadline allows it, from both ends of the graph."""
        problem = self._problem
        for levels, back in (
            (problem.forward, problem.reverse),
            (problem.reverse, problem.forward),
        ):
            durations = problem.option_times[options]
            tails = problem.finishes(durations, back)
            begins = deadlines_s - tails + self._slack_s  # at the latest; the last row: the end
            ends = np.zeros(begins.shape)
            for level in levels:
                starts = latest(ends, level.before)
                until = begins[level.after].min(axis=1)
                kinds = problem.kind[level.span, None]
                slowest = problem.slowest_within(kinds, until - starts)
                np.maximum(slowest, options[level.span], out=slowest)
                options[level.span] = slowest
                np.add(starts, problem.option_times[slowest], out=ends[level.span])
        return options

"""Improves a plan piece by piece: each piece of the iteration by a small mixed-integer program.

A program of the whole iteration finds little in seconds where there are hundreds of instructions;
one of a few dozen, the others as they are, is solved in a fraction of one.
"""

from __future__ import annotations

import time

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.exact import Program
from zeus.optimizer.pipeline_frequency.planner.problem import Ints, Problem

WINDOW = 32
"""Instructions of a piece."""

WHOLE = 96
"""Up to so many instructions are one piece."""

_STEPS = 4
"""Options that an instruction may go up or down at a time."""

_LIMIT_S = 0.5
"""For one piece."""


def polish(problem: Problem, options: Ints, until_s: float, limit_s: float) -> Ints:
    """A plan that costs no more, and less where that was found.

    Args:
        problem: The problem.
        options: One for each instruction.
        until_s: The time that the plan keeps within.
        limit_s: How long it may take, s.
    """
    began_s = time.monotonic()
    count = problem.count
    size = count if count <= WHOLE else WINDOW
    for turn in range(100):
        before = float(problem.cost(options[:, None])[0])
        durations = problem.durations(options[:, None])
        middles = problem.finishes(durations)[:-1, 0] - durations[:, 0] / 2
        order = np.argsort(middles)
        # Every other time the pieces begin in the middle of the last ones.
        first = -(size // 2) if turn % 2 and size < count else 0
        for start in range(first, count, size):
            left_s = limit_s - (time.monotonic() - began_s)
            if left_s <= 0:
                return options
            piece = order[max(0, start) : start + size]
            options = _solved(problem, options, piece, until_s, left_s, size == count)
        after = float(problem.cost(options[:, None])[0])
        if after >= before - 1e-7 * abs(before) or size == count:
            break
    return options


def _solved(
    problem: Problem, options: Ints, piece: Ints, until_s: float, left_s: float, whole: bool
) -> Ints:
    places = np.arange(problem.times.shape[1] - 1)
    allowed = places == options[:, None]
    allowed[piece] = np.abs(places - options[piece, None]) <= _STEPS
    limit_s = left_s if whole else min(_LIMIT_S, left_s)
    found = Program(problem, allowed=allowed).solve(until_s, start=options, time_limit_s=limit_s)
    if found is None:
        return options
    better = problem.cost(found.options[:, None])[0] < problem.cost(options[:, None])[0]
    return found.options if better else options

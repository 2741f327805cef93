"""Plans clocks for a pipeline: the whole frontier, or the plan for one deadline or straggler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.changes import Changes, Steady
from zeus.optimizer.pipeline_frequency.planner.exact import Program
from zeus.optimizer.pipeline_frequency.planner.polish import polish as polished
from zeus.optimizer.pipeline_frequency.planner.problem import EnergyPer, Ints, Problem
from zeus.optimizer.pipeline_frequency.planner.search import Search, fitting
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile
from zeus.optimizer.pipeline_frequency.schedules import Pipeline

Progress = Callable[[int, int], None]
"""Is told how much is done, and of how much."""

SMALL = 48
"""Choices, summed over instructions, up to which plans are exact unless told otherwise."""

_SMALL_LIMIT_S = 0.5
_POLISH_LIMIT_S = 6.0
_EXACT_LIMIT_S = 600.0


class Planner:
    """Plans for one pipeline.

    Args:
        profile: What each instruction takes at each clock.
        pipeline: Which instructions there are, and which waits for which.
        p2p_power_w: What one GPU draws while it is blocked on communication, W.
        gpus_per_stage: GPUs that share a stage.
        energy_per: Whether the profile's energies are of one GPU, as published ones are, or of all
            GPUs of a stage.
        changes: What changes of a clock cost; nothing by default.
        exact: Whether plans are the very best, by a mixed-integer program; None: where the pipeline
            is small enough for that to take milliseconds.
        polish: Whether plans are improved by small mixed-integer programs; seconds for each.

    Attributes:
        fastest_time_s: No plan is faster.

    Raises:
        PipelineFrequencyError: These do not fit each other.
    """

    def __init__(
        self,
        profile: InstructionProfile,
        pipeline: Pipeline,
        *,
        p2p_power_w: float,
        gpus_per_stage: int = 1,
        energy_per: EnergyPer = "gpu",
        changes: Changes | None = None,
        exact: bool | None = None,
        polish: bool = False,
    ) -> None:
        self._problem = Problem(
            profile,
            pipeline,
            p2p_power_w=p2p_power_w,
            gpus_per_stage=gpus_per_stage,
            energy_per=energy_per,
        )
        self._search = Search(self._problem)
        self._changes = changes or Changes()
        self._steady = Steady(self._problem, self._changes)
        choices = int(self._problem.num_options[self._problem.kind].sum())
        self._small = exact is None and choices <= SMALL
        self._exact = exact or self._small
        self._polish = polish
        self.fastest_time_s = self._problem.min_time_s

    # ------------------------------------------------------------------------------ questions

    def frontier(self, points: int = 100, progress: Progress | None = None) -> Frontier:
        """Plans from the fastest to the one with the least effective energy.

        Args:
            points: How many at most; fewer where the pipeline has not so many that differ.
            progress: Is told how far it is.
        """
        if points < 1:
            raise PipelineFrequencyError(f"a frontier has at least one plan, not {points}")
        tell = progress or (lambda done, total: None)
        problem = self._problem
        intervals = max(1, points - 1)
        pool = self._search.frontier(intervals, lambda done, total: tell(done, total + points))
        steps = self._search.steps
        fast = fitting(pool, problem.min_time_s)
        chosen = [int(fast[pool.cost_j[fast].argmin()])]
        if points > 1:
            chosen += [int(one) for one in pool.best_of_each() if one not in chosen]
        edges = np.linspace(problem.min_time_s, problem.max_time_s, intervals + 1)[1:]
        edges = edges[pool.interval(pool.time_s)]
        plans = []
        for number, one in enumerate(chosen):
            # Exact plans may use all of their interval; the others are as good as their own time.
            until_s = float(edges[one] if self._exact and number else pool.time_s[one])
            plans.append(self._finished(pool.options[:, one], until_s))
            tell(steps + number + 1, steps + points)
        tell(steps + points, steps + points)
        return self._of([plan for plan in plans if plan is not None])

    def deadline(self, time_s: float) -> Frontier:
        """The plan that takes the least energy of those that take at most so long.

        Raises:
            PipelineFrequencyError: No plan is that fast.
        """
        blocking_w = self._problem.blocking_w
        target_s = time_s
        # Where more time would save more than blocking takes, the deadline is what counts.
        if self._search.solve(time_s).price_w < blocking_w:
            target_s = self._search.solve_cheapest().deadline_s
        return self._one(time_s, target_s, blocking_w)

    def max_slowdown(self, factor: float) -> Frontier:
        """`deadline`, as a multiple of the fastest time."""
        if not factor >= 1.0:
            raise PipelineFrequencyError(f"a slowdown is at least 1, not {factor}")
        return self.deadline(factor * self.fastest_time_s)

    def straggler(self, time_s: float) -> Frontier:
        """The plan to run while another pipeline needs `time_s` for an iteration.

        GPUs wait for it anyway, so what is least is the effective energy within that time. The
        fastest plan where the other pipeline is no straggler.
        """
        time_s = max(time_s, self.fastest_time_s)
        return self._one(time_s, time_s, 0.0)

    # ------------------------------------------------------------------------------ internals

    def _one(self, limit_s: float, target_s: float, price_w: float) -> Frontier:
        problem = self._problem
        pool = self._search.near(target_s)
        fit = fitting(pool, limit_s)
        cost = pool.cost_j[fit] + price_w * pool.time_s[fit]
        options = pool.options[:, fit[int(cost.argmin())]]
        plan = self._finished(options, min(limit_s, problem.max_time_s), price_w)
        if plan is None:
            raise PipelineFrequencyError(
                f"no plan that takes {limit_s:.6g} s with that few clock changes was found; allow "
                "more changes, or a longer time"
            )
        return self._of([plan])

    def _finished(self, options: Ints, until_s: float, price_w: float = 0.0) -> Plan | None:
        """A plan, improved as asked for, with its figures."""
        problem = self._problem
        proven_j = -np.inf
        if self._polish and not self._exact:
            options = polished(problem, options, until_s, _POLISH_LIMIT_S)
        if self._exact:
            program = Program(
                problem,
                change_time_s=self._changes.time_s,
                max_changes=self._changes.most,
                count_changes=self._small,
            )
            found = program.solve(
                until_s,
                time_price_w=price_w,
                start=options,
                time_limit_s=_SMALL_LIMIT_S if self._small else _EXACT_LIMIT_S,
                fewest_changes=self._small,
            )
            if found is not None:
                options = found.options
                if not price_w and self._changes == Changes():
                    proven_j = found.bound_j
        clocks = self._steady.settle(problem.clocks(options), until_s)
        if clocks is None:
            return None
        return self._plan(clocks, proven_j)

    def _plan(self, clocks: Ints, proven_j: float) -> Plan:
        problem = self._problem
        time_s = float(self._steady.times(clocks[:, None])[0])
        cost_j = self._steady.cost(clocks)
        if self._polish:
            # Tangents of other deadlines' optima are a little below this one's.
            self._search.solve(time_s)
        # What is proven for a longer time holds for this one, too.
        bound_j = max(proven_j, float(self._search.bound(np.array([time_s]))[0]))
        stages = problem.stages(clocks)
        busy_s = sum(self._steady.time_of(place, mhz) for place, mhz in enumerate(clocks.tolist()))
        gpus_w = problem.p2p_power_w * problem.gpus_per_stage
        return Plan(
            stages,
            time_s=time_s,
            energy_j=float(problem.energy(cost_j, time_s)),
            effective_energy_j=cost_j,
            blocking_energy_j=problem.blocking_w * time_s - gpus_w * busy_s,
            bound_j=float(problem.energy(min(bound_j, cost_j), time_s)),
        )

    def _of(self, plans: list[Plan]) -> Frontier:
        """Without plans that another beats."""
        kept: list[Plan] = []
        for plan in sorted(plans, key=lambda one: (one.time_s, one.effective_energy_j)):
            if not kept or plan.effective_energy_j < kept[-1].effective_energy_j:
                kept.append(plan)
        problem = self._problem
        baseline_s, baseline_j = problem.at_highest_clock()
        return Frontier(
            tuple(reversed(kept)),
            problem.pipeline.name,
            problem.pipeline.num_stages,
            problem.pipeline.num_microbatches,
            problem.p2p_power_w,
            problem.gpus_per_stage,
            baseline_s,
            baseline_j,
        )


def plan_frontier(
    profile: InstructionProfile,
    pipeline: Pipeline,
    *,
    p2p_power_w: float,
    gpus_per_stage: int = 1,
    energy_per: EnergyPer = "gpu",
    points: int = 100,
    exact: bool | None = None,
    polish: bool = False,
    progress: Progress | None = None,
) -> Frontier:
    """The frontier of a pipeline; see `Planner` and `Planner.frontier`."""
    planner = Planner(
        profile,
        pipeline,
        p2p_power_w=p2p_power_w,
        gpus_per_stage=gpus_per_stage,
        energy_per=energy_per,
        exact=exact,
        polish=polish,
    )
    return planner.frontier(points, progress)

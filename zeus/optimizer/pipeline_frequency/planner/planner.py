"""Plans clocks for a pipeline: the frontier between time and energy, and the plan for one time.

The frontier is found first, for any question, and kept: a question for one time is answered from
it and from what is found at that time. So no answer is worse than the frontier's, and a later
question never gets a worse answer than an earlier one had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import cached_property
from numbers import Integral
from typing import Literal

import numpy as np
from pydantic import ValidationError

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner import baselines
from zeus.optimizer.pipeline_frequency.planner.changes import ChangeSearch, ties
from zeus.optimizer.pipeline_frequency.planner.linear import Program
from zeus.optimizer.pipeline_frequency.planner.pool import Pool
from zeus.optimizer.pipeline_frequency.planner.power import Draw, PowerBound, plan_within_power
from zeus.optimizer.pipeline_frequency.planner.problem import (
    Changes,
    Floats,
    Ints,
    PipelineProblem,
    fits,
)
from zeus.optimizer.pipeline_frequency.planner.search import (
    MAX_PLANS,
    PlanSearch,
    Progress,
    quietly,
    spread,
)
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan, PlanningProblem, Step
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Setting
from zeus.optimizer.pipeline_frequency.schedules import Instruction, Pipeline
from zeus_common.text import sentence

_POINTS = 100


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
        exact: Whether plans are the very best, by a program in whole numbers; None: where the
            pipeline is small enough for that to take milliseconds.

    Attributes:
        problem: What is planned.
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
        energy_per: Literal["gpu", "stage"] = "gpu",
        changes: Changes | None = None,
        exact: bool | None = None,
    ) -> None:
        changes = changes or Changes()
        try:
            self.problem = PlanningProblem(
                profile=profile.kinds,
                pipeline=pipeline.graph,
                p2p_power_w=p2p_power_w,
                gpus_per_stage=gpus_per_stage,
                energy_per=energy_per,
                change_time_s=changes.time_s,
                max_changes=changes.most,
            )
        except ValidationError as error:
            raise PipelineFrequencyError(f"this cannot be planned: {sentence(error)}") from None
        self._problem = problem = PipelineProblem(profile, pipeline, self.problem)
        self.fastest_time_s = problem.min_time_s
        choices = sum(len(problem.curves[kind].time_s) for kind in problem.kind)
        self._exact = exact
        # Choices, summed over instructions, up to which plans are exact unless told otherwise: a
        # program in whole numbers then mostly takes a tenth of a second.
        self._small = exact is None and choices <= 48
        self._exactly = exact or self._small
        # A small pipeline whose programs take longer in all is planned as larger ones are.
        self._left_s = 20.0 if self._small else math.inf
        self._proven: list[tuple[float, float]] = []  # deadline, least effective energy
        self._free = changes == Changes()
        self._search = PlanSearch(problem)
        self._finder = self._search if self._free else ChangeSearch(self._search)
        costs_j = np.array([curve.cost_j[0] for curve in problem.curves])[problem.kind]
        # Share of the energy that is rounding: effective energies are differences of large numbers.
        self._equal_j = 1e-12 * float(
            np.abs(costs_j).sum() + problem.blocking_w * problem.max_time_s
        )

    @classmethod
    def of(cls, problem: PlanningProblem, exact: bool | None = None) -> Planner:
        """A planner for what a frontier was made for (`Frontier.problem`)."""
        if not isinstance(problem, PlanningProblem):
            raise PipelineFrequencyError(
                f"a planner is of Frontier.problem, a PlanningProblem, not of {problem!r:.60}"
            )
        return cls(
            InstructionProfile.of_kinds(problem.profile),
            Pipeline.of_graph(problem.pipeline),
            p2p_power_w=problem.p2p_power_w,
            gpus_per_stage=problem.gpus_per_stage,
            energy_per=problem.energy_per,
            changes=Changes(problem.change_time_s, problem.max_changes),
            exact=exact,
        )

    # ------------------------------------------------------------------------------ questions

    @property
    def shortest_time_s(self) -> float:
        """Time of the fastest plan, with its clock changes, s; infinite: none was found that
        changes clocks so seldom. `fastest_time_s` is without changes.
        """
        self._finder.everywhere()
        return float(self._finder.pool.time_s.min(initial=math.inf))

    def frontier(self, points: int | None = None, progress: Progress | None = None) -> Frontier:
        """Plans from the fastest to the one with the least effective energy.

        Args:
            points: Maximum number of plans. None: as many as it takes for neighbours to differ by
                at most 0.1 % in energy, and for a plan every 0.1 % of the time up to 5 % above the
                fastest; with `exact=True` every plan that no other plan beats, but for those within
                half a millionth of the longest time of a slower one; 100 for pipelines of more than
                20,000 instructions.

        Raises:
            PipelineFrequencyError: No plan changes clocks so seldom.
        """
        if points is not None and not (isinstance(points, Integral) and points >= 1):
            raise PipelineFrequencyError(f"a frontier has at least one plan, not {points!r:.60}")
        # Instructions above which a frontier has `_POINTS` plans unless told otherwise: each plan
        # has a clock for every instruction, in memory and in files.
        if points is None and self._problem.count > 20_000:
            points = _POINTS
        self._finder.everywhere(progress or quietly)
        pool = self._finder.pool
        if self._exactly and points != 1:
            exact = self._exact_plans(points or (_POINTS if self._small else MAX_PLANS))
            pool = exact if self._exactly else pool  # there may not have been time for all
        if not len(pool.time_s):
            raise self.too_few()
        chosen = np.arange(len(pool.time_s))
        if pool is self._finder.pool:
            chosen = spread(self._problem, pool, self._bound(pool.time_s), points)
        return self._of(self._plans(ties(self._problem, pool.plans(chosen))))

    def deadline(self, time_s: float) -> Frontier:
        """The plan that takes the least energy of those that take at most so long.

        Args:
            time_s: The deadline, s; infinity for the least energy of all.

        Raises:
            PipelineFrequencyError: No plan is that fast.
        """
        self._check_time(time_s)
        if not fits(self.fastest_time_s, time_s):
            raise PipelineFrequencyError(
                f"no plan takes {time_s:.6g} s or less; the fastest takes "
                f"{self.fastest_time_s:.6g} s: ask for at least that"
            )
        return self._of(self._best(time_s, self._problem.blocking_w))

    def max_slowdown(self, factor: float) -> Frontier:
        """`deadline`, as a multiple of the fastest time."""
        if not factor >= 1.0:
            raise PipelineFrequencyError(f"a slowdown is at least 1, not {factor}")
        return self.deadline(factor * self.fastest_time_s)

    def straggler(self, time_s: float) -> Frontier:
        """The plan to run while another pipeline needs `time_s` for an iteration.

        GPUs wait for it anyway, so the plan has the least effective energy within that time. It is
        the fastest plan where the other pipeline is no straggler.
        """
        self._check_time(time_s)
        return self._of(self._best(max(time_s, self.fastest_time_s), 0.0))

    def bounded(self, bounds: Sequence[PowerBound], time_s: float | None = None) -> Frontier:
        """A plan whose power stays within bounds: one that is found, not proven to be the best.

        Args:
            bounds: All of which are kept.
            time_s: The deadline, s, for the least energy; None: as fast as possible.

        Raises:
            PipelineFrequencyError: No such plan was found.
        """
        if time_s is not None:
            self._check_time(time_s)
        return self._of([plan_within_power(self, self._problem, bounds, time_s)])

    def plan_of(self, stages: Sequence[Sequence[Step]]) -> Plan:
        """What a plan as it is written takes."""
        plan = self._problem.read(stages)[:, None]
        self._finder.everywhere()
        self._search.solve(float(self._problem.time(plan)[0]))
        return self._plans(plan)[0]

    def runs(
        self, stages: Sequence[Sequence[Step]] | None = None
    ) -> list[tuple[Instruction, Setting, float, float]]:
        """Each instruction of an iteration with its setting, begin and end, s.

        Args:
            stages: The plan's; None: all at the highest clocks.
        """
        problem = self._problem
        plan = problem.highest if stages is None else problem.read(stages)
        starts, ends = problem.runs(plan[:, None])[:, :, 0].tolist()
        settings = [problem.settings[one] for one in plan]
        return list(zip(problem.instructions, settings, starts, ends, strict=True))

    def limited(self, profile: InstructionProfile) -> Planner:
        """A planner of the same pipeline with fewer settings."""
        return self.of(self.problem.model_copy(update={"profile": profile.kinds}), self._exact)

    # ------------------------------------------------------------------------------ internals

    @cached_property
    def _program(self) -> Program:
        counted = self._small or not self._free
        return Program(self._problem, whole=True, count_changes=counted)

    def _bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J."""
        proven = [np.where(fits(time_s, limit_s), j, -np.inf) for limit_s, j in self._proven]
        return np.asarray(np.maximum.reduce([self._finder.bound(time_s), *proven]))

    @staticmethod
    def _check_time(time_s: float) -> None:
        if math.isnan(time_s):
            raise PipelineFrequencyError("a time to keep within must be a number of seconds")

    def _best(self, limit_s: float, price_w: float) -> list[Plan]:
        plan = self._near(limit_s, price_w)
        if plan is None:
            raise self.too_few(f" that takes {limit_s:.6g} s", ", or a longer time")
        return self._plans(ties(self._problem, plan[:, None]))

    def _near(self, limit_s: float, price_w: float) -> Ints | None:
        """The best plan of those that are known and those around a deadline.

        Args:
            price_w: Cost of a second of the iteration beside the effective energy.
        """
        self._finder.near(limit_s, price_w)
        exact = self._add_exact(limit_s, price_w) if self._exactly else None
        best = self._finder.pool.best(limit_s, price_w)
        if exact is None or best is None:
            return best
        two = np.stack([exact, best], axis=1)
        exact_j, best_j = self._problem.cost(two) + price_w * self._problem.time(two)
        # Of plans that cost the same, the program's has the fewest changes.
        return exact if exact_j <= best_j + self._equal_j else best

    def _add_exact(self, limit_s: float, price_w: float = 0.0) -> Ints | None:
        """The best plan within a deadline, which is known from then on; None: there is none."""
        begin_s = time.monotonic()
        program_s = 2.0 if self._small else 600.0
        solution = self._program.best(limit_s, price_w, time_limit_s=program_s)
        self._left_s -= time.monotonic() - begin_s
        self._exactly = self._left_s > 0
        if solution is None:
            return None
        plan, bound_j = solution
        tied = ties(self._problem, plan[:, None])
        self._finder.pool.add(tied)
        if not price_w:
            self._proven.append((limit_s, bound_j))
        return tied[:, 0]

    def _exact_plans(self, most: int) -> Pool:
        """Solves for one deadline after the other, the widest step in energy first.

        Between two plans it asks for the middle of their times, and if that finds nothing, for all
        times below the slower plan's: then that step is known to be one.
        """
        problem, pool = self._problem, Pool(self._problem)
        if not self._free:  # the program knows no setting that another one beats
            pool.add(self._finder.pool.plans(np.arange(len(self._finder.pool.time_s))))
        # Share of the longest time within which an exact frontier has one plan: the solver's
        # tolerance.
        apart_s = 5e-7 * problem.max_time_s

        def solve(limit_s: float) -> tuple[float, float] | None:
            plan = self._add_exact(limit_s)
            if plan is None:
                return None
            pool.add(plan[:, None])
            return float(problem.time(plan[:, None])[0]), float(problem.cost(plan[:, None])[0])

        slow = solve(math.inf)
        fast = solve(self.fastest_time_s) or slow
        steps = [] if slow is None or fast is None else [(fast, slow, False)]
        while steps and len(pool.time_s) < most and self._exactly:
            steps.sort(key=lambda step: step[0][1] - step[1][1])
            fast, slow, asked = steps.pop()
            last_s = slow[0] - apart_s
            if last_s <= fast[0]:
                continue
            at_s = last_s if asked else min(last_s, (fast[0] + slow[0]) / 2)
            between = solve(at_s)
            if between is None or between[1] >= fast[1] - self._equal_j:
                steps += [] if at_s == last_s else [(fast, slow, True)]
            else:
                steps += [(fast, between, False)]
                steps += [] if at_s == last_s else [(between, slow, False)]
        return pool

    def _plans(self, plans: Ints) -> list[Plan]:
        """Plans (instructions, plans) with their figures."""
        problem = self._problem
        runs = problem.runs(plans)
        starts, ends = runs
        time_s, cost_j = ends.max(axis=0), problem.cost(plans)
        busy_s = (ends - starts).sum(axis=0)
        blocking_j = problem.blocking_w * time_s - problem.blocked_w * busy_s
        energy_j = problem.energy(cost_j, time_s)
        bound_j = problem.energy(np.minimum(cost_j, self._bound(time_s)), time_s)
        return [
            Plan(
                problem.written(plans[:, n]),
                time_s=float(time_s[n]),
                energy_j=float(energy_j[n]),
                effective_energy_j=float(cost_j[n]),
                blocking_energy_j=float(blocking_j[n]),
                bound_j=float(bound_j[n]),
                peak_power_w=Draw.of(problem, plans[:, n], runs=runs[:, :, n]).peak_w,
            )
            for n in range(plans.shape[1])
        ]

    def _of(self, plans: Sequence[Plan]) -> Frontier:
        """Without plans that another beats."""
        kept: list[Plan] = []
        for plan in sorted(plans, key=lambda one: (one.time_s, one.effective_energy_j)):
            if not kept or plan.effective_energy_j + self._equal_j < kept[-1].effective_energy_j:
                kept.append(plan)
        problem = self._problem
        ((baseline_s, baseline_j),) = baselines.figures(problem, problem.highest[:, None])
        return Frontier(
            tuple(reversed(kept)),
            problem.pipeline.name,
            problem.pipeline.num_stages,
            problem.pipeline.num_microbatches,
            self.problem.p2p_power_w,
            self.problem.gpus_per_stage,
            baseline_s,
            baseline_j,
            {
                name: tuple(baselines.figures(problem, plans))
                for name, plans in self._search.policies.items()
            },
            self.problem,
        )

    @staticmethod
    def too_few(which: str = "", more: str = "") -> PipelineFrequencyError:
        """The error where too few changes are allowed."""
        return PipelineFrequencyError(
            f"no plan{which} with that few clock changes was found; allow more changes{more}"
        )

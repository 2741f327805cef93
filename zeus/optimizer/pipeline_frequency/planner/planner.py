"""Plans clocks for a pipeline: the whole frontier, or the plan for one deadline or straggler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner.bounded import Bounded
from zeus.optimizer.pipeline_frequency.planner.changes import Changes, Steady
from zeus.optimizer.pipeline_frequency.planner.exact import NODES, Program
from zeus.optimizer.pipeline_frequency.planner.power import PlanPower, PowerBound
from zeus.optimizer.pipeline_frequency.planner.problem import EnergyPer, Floats, Ints, Problem
from zeus.optimizer.pipeline_frequency.planner.search import MOST, STEP, PlanSearch, wanted_times
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan, Step
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import Pipeline

Progress = Callable[[int, int], None]
"""Is told how much is done, and of how much."""

SMALL = 48
"""Choices, summed over instructions, up to which plans are exact unless told otherwise."""

_SMALL_LIMIT_S = 30.0
_SMALL_NODES = 300
"""Small programs take a tenth of a second and a dozen nodes at most."""

_SMALL_POINTS = 100
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

    Attributes:
        fastest_time_s: No plan is faster.
        changes: What changes of a clock cost.

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
    ) -> None:
        self._problem = Problem(
            profile,
            pipeline,
            p2p_power_w=p2p_power_w,
            gpus_per_stage=gpus_per_stage,
            energy_per=energy_per,
        )
        self._search = PlanSearch(self._problem)
        self.changes = changes or Changes()
        self._changing = self.changes != Changes()
        self._steady = Steady(self._problem, self.changes, self._search)
        self._meter = PlanPower(self._problem, self._steady)
        choices = int(self._problem.num_options[self._problem.kind].sum())
        self._small = exact is None and choices <= SMALL
        self._exact = exact or self._small
        self._known: list[Plan] = []
        self._within_power: dict[float, Planner] = {}
        # Effective energies are differences of large numbers: less than this is rounding.
        costs_j = self._problem.costs[self._problem.kind, 0]
        self._equal_j = 1e-12 * float(
            np.abs(costs_j).sum() + self._problem.blocking_w * self._problem.max_time_s
        )
        self.fastest_time_s = self._problem.min_time_s

    @classmethod
    def of_json(cls, problem: Any) -> Planner:
        """A planner for what a frontier was made for.

        Args:
            problem: `Frontier.problem`.

        Raises:
            PipelineFrequencyError: It is something else.
        """
        try:
            return cls(
                InstructionProfile.from_json(problem["profile"]),
                Pipeline.from_json(problem["pipeline"]),
                p2p_power_w=float(problem["p2p_power_w"]),
                gpus_per_stage=int(problem["gpus_per_stage"]),
                energy_per=problem["energy_per"],
                changes=Changes(problem["change_time_s"], problem["max_changes"]),
            )
        except (KeyError, TypeError) as error:
            raise PipelineFrequencyError(
                f"this is no planning problem ({type(error).__name__}: {error})"
            ) from None

    @cached_property
    def problem(self) -> dict[str, Any]:
        """What is planned, as JSON can hold it."""
        return {
            "profile": self._problem.profile.to_json(),
            "pipeline": self._problem.pipeline.to_json(),
            "p2p_power_w": self._problem.p2p_power_w,
            "gpus_per_stage": self._problem.gpus_per_stage,
            "energy_per": self._problem.energy_per,
            "change_time_s": self.changes.time_s,
            "max_changes": self.changes.most,
        }

    # ------------------------------------------------------------------------------ questions

    @property
    def shortest_time_s(self) -> float:
        """Time of the fastest plan, with its clock changes, s; infinite: none was found that
        changes clocks so seldom. `fastest_time_s` is without changes.
        """
        if not self._changing:
            return self.fastest_time_s
        return float(self._steady.pool.time_s.min(initial=math.inf))

    @cached_property
    def _slowest_s(self) -> float:
        """Time above which no plan takes less energy, s."""
        slowest_s = self._problem.max_time_s + self.changes.time_s * self._problem.count
        if not self._changing:
            return slowest_s
        # Where few changes are allowed, the common clocks may all be slow.
        return float(self._steady.pool.time_s.max(initial=slowest_s))

    def frontier(self, points: int | None = None, progress: Progress | None = None) -> Frontier:
        """Plans from the fastest to the one with the least effective energy.

        Args:
            points: Plans at most. None: as many as it takes for neighbours to differ by at most
                0.1 % in energy, and for a plan every 0.1 % of the time up to 5 % above the fastest;
                with `exact=True` every plan that no other plan beats, but for those
                within half a millionth of the longest time of a slower one. Energies are told apart
                from 1e-10 of the effective energy on.
            progress: Is told how far it is.
        """
        if points is not None and points < 1:
            raise PipelineFrequencyError(f"a frontier has at least one plan, not {points}")
        tell = progress or (lambda done, total: None)
        if self._exact and points != 1:
            plans = self._exact_frontier(points, tell)
            if not plans:
                raise self.too_few()
            return self._of(plans)
        problem, search = self._problem, self._search
        most = MOST if points is None else points
        total = search.steps + most
        if not self._changing:
            search.everywhere(lambda done, steps: tell(done, total))
        pool = self._steady.pool if self._changing else search.pool
        if not len(pool.time_s):
            raise self.too_few()
        chosen = np.array([pool.best(float(pool.time_s[0]))])
        if points != 1:
            ends_s = (float(pool.time_s[0]), float(pool.time_s[-1]))
            edges_s = wanted_times(problem, self._bound, ends_s, points, STEP)
            chosen = np.union1d(chosen, pool.nearest(edges_s, self._bound(pool.time_s)))
        if points is None:
            least_j = float(problem.energy(pool.cost_j, pool.time_s).min())
            chosen = pool.between(chosen, STEP * abs(least_j))
        if self._changing:
            clocks = self._steady.clocks(chosen)
        else:
            clocks = problem.clocks(pool.options(chosen))
        plans = []
        for number, one in enumerate(clocks.T):
            plans.append(self._plan(one if self._changing else self._steady.ties(one)))
            tell(search.steps + most * (number + 1) // len(chosen), total)
        self._known += plans
        return self._of(plans)

    def deadline(self, time_s: float) -> Frontier:
        """The plan that takes the least energy of those that take at most so long.

        Args:
            time_s: The deadline, s; infinity for the least energy of all.

        Raises:
            PipelineFrequencyError: No plan is that fast.
        """
        self._check_time(time_s)
        problem = self._problem
        if time_s < problem.min_time_s * (1 - 1e-9):
            raise PipelineFrequencyError(
                f"no plan takes {time_s:.6g} s or less; the fastest takes "
                f"{problem.min_time_s:.6g} s: ask for at least that"
            )
        time_s = min(max(time_s, problem.min_time_s), self._slowest_s)
        return self._one(time_s, problem.blocking_w)

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
        time_s = min(max(time_s, self.fastest_time_s), self._slowest_s)
        return self._one(time_s, 0.0)

    def bounded(self, bounds: Sequence[PowerBound], time_s: float | None = None) -> Frontier:
        """A plan whose power stays within bounds: one that is found, not proven to be the best.

        Args:
            bounds: All of which are kept.
            time_s: The deadline, s, for the least energy; None: as fast as possible.

        Raises:
            PipelineFrequencyError: No such plan was found.
        """
        found = Bounded(self, self._problem, self._meter, bounds)
        if math.isinf(self.shortest_time_s):
            raise self.too_few()
        if time_s is None:
            return self._of([found.fastest()])
        self._check_time(time_s)
        return self._of([found.within(time_s)])

    # ---------------------------------------------------------------------------- other plans

    def within_power(self, watts: float) -> Planner:
        """A planner without settings that draw more, but for each instruction's lowest.

        Args:
            watts: Of one GPU or of a stage, as the profile's energies are.
        """
        found = self._within_power.get(watts)
        if found is None:
            problem = self._problem
            kept: dict[tuple[int, str, int], Sequence[Option]] = {}
            for key in problem.kinds:
                options = problem.profile.options(*key)
                lowest = min(options, key=lambda one: one.energy_j / one.time_s)
                below = [one for one in options if one.energy_j / one.time_s <= watts * (1 + 1e-12)]
                kept[key] = below or [lowest]
            found = self._within_power[watts] = Planner(
                InstructionProfile(kept, problem.profile.tensor_parallel),
                problem.pipeline,
                p2p_power_w=problem.p2p_power_w,
                gpus_per_stage=problem.gpus_per_stage,
                energy_per=problem.energy_per,
                changes=self.changes,
                exact=None if self._small else self._exact,
            )
        return found

    def clocks_of(self, stages: Sequence[Sequence[Step]]) -> Ints:
        """The setting of each instruction of a plan as it is written, as a number."""
        return self._problem.clocks_of(stages)

    def durations_of(self, clocks: Ints) -> Floats:
        """What each instruction takes, s."""
        starts, ends, _ = self._steady.runs(clocks)
        return ends - starts

    def plan_of(self, stages: Sequence[Sequence[Step]]) -> Plan:
        """What a plan as it is written takes."""
        clocks = self.clocks_of(stages)
        time_s = float(self._steady.times(clocks[:, None])[0])
        if not self._changing:
            self._search.solve(min(max(time_s, self.fastest_time_s), self._problem.max_time_s))
        return self._plan(clocks)

    # ------------------------------------------------------------------------------ internals

    def _bound(self, time_s: Floats) -> Floats:
        """Least effective energy of plans that take at most these times, J."""
        return (self._steady if self._changing else self._search).bound(time_s)

    @staticmethod
    def _check_time(time_s: float) -> None:
        if math.isnan(time_s):
            raise PipelineFrequencyError("a time to keep within must be a number of seconds")

    def _one(self, limit_s: float, price_w: float) -> Frontier:
        self._finish(limit_s, price_w, twice=True)
        fit = [plan for plan in self._known if plan.time_s <= limit_s * (1 + 1e-9)]
        if not fit:
            raise self.too_few(f" that takes {limit_s:.6g} s", ", or a longer time")
        return self._of([min(fit, key=lambda one: one.effective_energy_j + price_w * one.time_s)])

    @staticmethod
    def too_few(which: str = "", more: str = "") -> PipelineFrequencyError:
        """The error where too few changes are allowed."""
        return PipelineFrequencyError(
            f"no plan{which} with that few clock changes was found; allow more changes{more}"
        )

    def _finish(self, limit_s: float, price_w: float = 0.0, *, twice: bool = False) -> Plan | None:
        """The best plan for a time, which is known from then on.

        Args:
            limit_s: The time.
            price_w: What a second of the iteration costs beside the effective energy.
            twice: Whether a program looks a second time; and whether plans are looked for before.

        Returns:
            None where no plan with so few changes of clocks was found.
        """
        problem, search = self._problem, self._search
        # First, so that these plans do not depend on what was asked for before.
        found = self._steady.within(limit_s, price_w) if self._changing else []
        proven_j = -np.inf
        if self._exact or not self._changing or self._steady.almost_free:
            target_s = min(limit_s, problem.max_time_s)
            if price_w:
                target_s = search.solve(target_s, price_w).deadline_s
            if not self._exact:
                search.within(limit_s, target_s, price_w)
            elif twice:
                search.near(target_s)
            options = search.pool.options(np.array([search.pool.best(limit_s, price_w)]))[:, 0]
            if self._exact:
                program = Program(
                    problem,
                    change_time_s=self.changes.time_s,
                    max_changes=self.changes.most,
                    count_changes=self._small,
                )
                best = program.solve(
                    limit_s,
                    time_price_w=price_w,
                    start=options,
                    time_limit_s=_SMALL_LIMIT_S if self._small else _EXACT_LIMIT_S,
                    node_limit=_SMALL_NODES if self._small else NODES,
                    fewest_changes=self._small,
                    twice=twice,
                )
                if best is not None:
                    options = best.options
                    search.pool.add(options[:, None])
                    if not price_w and not self._changing:
                        proven_j = best.bound_j
            found.append(self._steady.ties(problem.clocks(options)))
        plans = [self._plan(one, proven_j) for one in found if self._steady.fits(one, limit_s)]
        self._known += plans

        def total_j(plan: Plan) -> float:
            return plan.effective_energy_j + price_w * plan.time_s

        return min(plans, key=total_j, default=None)

    def _exact_frontier(self, points: int | None, tell: Progress) -> list[Plan]:
        """Solves for one deadline after the other, the widest step in energy first.

        Between two plans it asks for the middle of their times, and if that finds nothing, for all
        times below the slower plan's: then that step is known to be one.
        """
        search, problem = self._search, self._problem
        # What a solver tells apart: of a deadline closer to a plan's time it may lose that plan.
        apart_s = 5e-7 * problem.max_time_s
        most = points or (MOST if not self._small else _SMALL_POINTS)
        search.survey()

        slow = self._finish(self._slowest_s)
        if slow is None:
            return []
        fast = self._finish(problem.min_time_s) or slow
        found = [slow, fast]
        # (fast, slow, whether the middle was asked for)
        steps = [(fast, slow, False)] if fast.time_s < slow.time_s - apart_s else []
        while steps and len(found) < most:
            tell(len(found), most)
            steps.sort(key=lambda step: step[0].effective_energy_j - step[1].effective_energy_j)
            fast, slow, asked = steps.pop()
            last_s = slow.time_s - apart_s
            at_s = last_s if asked else min(last_s, (fast.time_s + slow.time_s) / 2)
            plan = self._finish(at_s, twice=at_s == last_s)
            if plan is None or plan.effective_energy_j >= fast.effective_energy_j - self._equal_j:
                if at_s < last_s:
                    steps.append((fast, slow, True))
                continue
            found.append(plan)
            if plan.time_s - fast.time_s > apart_s:
                steps.append((fast, plan, False))
            if at_s < last_s:
                steps.append((plan, slow, False))
        # What lies beside a plan was not asked for, so a solver may have missed a better one.
        if steps:
            found = [self._finish(plan.time_s, twice=True) or plan for plan in found]
        tell(most, most)
        return found

    def _plan(self, clocks: Ints, proven_j: float = -np.inf) -> Plan:
        problem = self._problem
        starts, ends, costs_j = self._steady.runs(clocks)
        time_s, cost_j = float(ends.max()), float(costs_j.sum())
        # What is proven for a longer time holds for this one, too.
        bound_j = max(proven_j, float(self._bound(np.array([time_s]))[0]))
        gpus_w = problem.p2p_power_w * problem.gpus_per_stage
        return Plan(
            problem.stages(clocks),
            time_s=time_s,
            energy_j=float(problem.energy(cost_j, time_s)),
            effective_energy_j=cost_j,
            blocking_energy_j=problem.blocking_w * time_s - gpus_w * float((ends - starts).sum()),
            bound_j=float(problem.energy(min(bound_j, cost_j), time_s)),
            peak_power_w=self._meter.draw(clocks).peak_w,
        )

    def _of(self, plans: list[Plan]) -> Frontier:
        """Without plans that another beats."""
        kept: list[Plan] = []
        for plan in sorted(plans, key=lambda one: (one.time_s, one.effective_energy_j)):
            least_j = plan.effective_energy_j + self._equal_j
            if not kept or least_j < kept[-1].effective_energy_j:
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
            {name: tuple(one.ways(problem)) for name, one in self._search.policies.items()},
            self.problem,
        )

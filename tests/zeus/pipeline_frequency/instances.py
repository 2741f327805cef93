"""Random planning problems of nine kinds, and the invariants of every answer to them.

The figures are found step by step through the schedule's graph, not by the planner's arrays.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.zeus.pipeline_frequency.timeline import timeline, totals
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan, Step
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option
from zeus.optimizer.pipeline_frequency.schedules import (
    Pipeline,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
)

Stages = tuple[tuple[Step, ...], ...]

KINDS = (
    "convex",
    "not convex",
    "equal times",
    "equal energies",
    "gaps",
    "rounded",
    "few settings",
    "other scales",
    "slower is no cheaper",
)


@dataclass(frozen=True)
class Instance:
    """One problem."""

    kind: str
    profile: InstructionProfile
    pipeline: Pipeline
    p2p_power_w: float

    def planner(self, exact: bool | None = None) -> Planner:
        """A planner that was asked nothing yet."""
        return Planner(self.profile, self.pipeline, p2p_power_w=self.p2p_power_w, exact=exact)

    def stages(self, clocks: dict[tuple[int, str], int]) -> list[list[tuple[str, int]]]:
        """A plan in which every instruction of a stage and name has one clock."""
        return [
            [
                (one.name, clocks[one.stage, one.name])
                for one in (self.pipeline.instructions[place] for place in order)
            ]
            for order in self.pipeline.stages
        ]

    def totals(self, stages: Sequence[Sequence[Step]]) -> tuple[float, float]:
        """Time, s, and energy, J, of a plan."""
        runs = timeline(self.profile, self.pipeline, stages)
        return totals(runs, self.pipeline.num_stages, self.p2p_power_w)

    def effective_j(self, time_s: float, energy_j: float) -> float:
        """Energy beyond blocking throughout."""
        return energy_j - self.p2p_power_w * self.pipeline.num_stages * time_s


def options_of(rnd: random.Random, kind: str, most: int) -> list[Option]:
    """Options of one instruction, from the highest clock down."""
    number = rnd.randint(1, 3) if kind == "few settings" else rnd.randint(min(3, most), most)
    time_s, power_w = rnd.uniform(0.05, 0.2), rnd.uniform(220, 320)
    scale = 1.0
    if kind == "other scales":
        time_s, scale = time_s * 10 ** rnd.uniform(-4, 2), 10 ** rnd.uniform(-3, 3)
    energy_j = time_s * power_w
    fall = 0.06
    rows = []
    for step in range(number):
        rows.append(Option(1410 - 15 * step, time_s, energy_j * scale))
        slower = rnd.uniform(1.005, 1.06)
        if kind == "equal times" and rnd.random() < 0.4:
            slower = 1.0
        if kind == "gaps" and rnd.random() < 0.25:
            slower = rnd.uniform(1.1, 1.4)
        time_s *= slower
        if kind == "convex":
            energy_j *= 1 - fall
            fall *= 0.8
        elif kind == "equal energies" and rnd.random() < 0.4:
            continue
        elif kind == "slower is no cheaper":
            energy_j *= rnd.uniform(0.99, 1.08)
        else:
            energy_j *= rnd.uniform(0.9, 1.02)
    if kind == "rounded":
        rows = [Option(r.frequency, round(r.time_s, 2), float(round(r.energy_j))) for r in rows]
    return rows


def random_instance(rnd: random.Random, kind: str, *, small: bool = False) -> Instance:
    """A problem; a small one has so few plans that all can be listed."""
    if small:
        stages, microbatches = rnd.choice([(1, 2), (2, 1), (2, 2), (3, 1)])
        most = 3 if stages * microbatches < 4 else 2
        make = rnd.choice([one_f_one_b, gpipe])
    else:
        stages, microbatches, most = rnd.randint(1, 6), rnd.randint(1, 12), 12
        make = rnd.choice([one_f_one_b, gpipe, one_f_one_b])
        if rnd.random() < 0.2:
            microbatches = stages * rnd.randint(1, 2)
            make = interleaved_1f1b  # of two chunks
    unit = 10 ** rnd.uniform(-3, 3) if kind == "other scales" else 1.0
    options = {}
    for stage in range(stages):
        for name in ("forward", "backward"):
            rows = options_of(rnd, "few settings" if kind == "few settings" else kind, most)
            options[stage, name, 0] = [
                Option(row.frequency, row.time_s, row.energy_j * unit) for row in rows
            ]
    p2p_power_w = rnd.choice([0.0, rnd.uniform(50, 90), 75.0]) * unit
    if kind == "rounded" and rnd.random() < 0.5:
        # The price of time is then exactly that of blocking.
        p2p_power_w = float(rnd.choice([50, 100]))
    return Instance(kind, InstructionProfile(options), make(stages, microbatches), p2p_power_w)


def uniform_clocks(instance: Instance) -> list[dict[tuple[int, str], int]]:
    """The clocks of each stage and name: with one clock, and with one power limit, for all."""
    profile = instance.profile
    kinds = {
        (one.stage, one.name): profile.options(one.stage, one.name)
        for one in instance.pipeline.instructions
    }
    found = []
    clocks = {option.frequency for options in kinds.values() for option in options}
    for mhz in sorted(clocks):
        chosen = {
            kind: min(
                [o.frequency for o in options if o.frequency >= mhz], default=options[0].frequency
            )
            for kind, options in kinds.items()
        }
        found.append(chosen)
    limits = {o.energy_j / o.time_s for options in kinds.values() for o in options}
    for limit in sorted(limits):
        chosen = {}
        for kind, options in kinds.items():
            fit = [o.frequency for o in options if o.energy_j / o.time_s <= limit]
            chosen[kind] = max(fit, default=options[-1].frequency)
        found.append(chosen)
    return found


def uniform_policies(instance: Instance) -> list[tuple[float, float]]:
    """Times and energies with one clock for all, and with one power limit for all."""
    return [instance.totals(instance.stages(clocks)) for clocks in uniform_clocks(instance)]


def every_plan(instance: Instance) -> list[tuple[float, float, float, Stages]]:
    """Time, effective energy, energy and stages of each possible plan."""
    found = []
    profile, pipeline = instance.profile, instance.pipeline
    choices = [profile.options(one.stage, one.name) for one in pipeline.instructions]
    for chosen in itertools.product(*choices):
        stages = tuple(
            tuple((pipeline.instructions[place].name, chosen[place].frequency) for place in order)
            for order in pipeline.stages
        )
        time_s, energy_j = instance.totals(stages)
        found.append((time_s, instance.effective_j(time_s, energy_j), energy_j, stages))
    return found


def pareto(plans: list[tuple[float, float]], equal_j: float) -> list[tuple[float, float]]:
    """Those that no other beats, the fastest first; costs that differ by rounding are equal."""
    kept: list[tuple[float, float]] = []
    for time_s, cost_j in sorted(plans):
        if not kept or cost_j < kept[-1][1] - equal_j:
            kept.append((time_s, cost_j))
    return kept


EQUAL = 1e-10
"""Share of the effective energy below which a difference is taken for rounding."""

APART = 5e-7
"""Share of the longest time within which an exact frontier has only the slower one of two plans."""


def missed(instance: Instance, frontier: Frontier) -> tuple[int, list[tuple[float, float]]]:
    """How many Pareto points brute force finds, and those that an exact frontier lacks."""
    plans = [(time_s, cost_j) for time_s, cost_j, *_ in every_plan(instance)]
    span_s, scale_j = max(one[0] for one in plans), max(abs(one[1]) for one in plans)
    points = pareto(plans, EQUAL * scale_j)
    have = [(plan.time_s, plan.effective_energy_j) for plan in frontier.plans]
    lacking = [
        (time_s, cost_j)
        for time_s, cost_j in points
        if not any(
            abs(a - time_s) <= APART * span_s * (1 + 1e-6) and b <= cost_j + EQUAL * scale_j
            for a, b in have
        )
    ]
    return len(points), lacking


def check_frontier(instance: Instance, frontier: Frontier) -> None:
    """Every plan is what it says, none beats its bound, and none is beaten by another or by a
    simpler policy at the same iteration time.
    """
    stages = instance.pipeline.num_stages
    for plan in frontier.plans:
        time_s, energy_j = instance.totals(plan.stages)
        effective_j = instance.effective_j(plan.time_s, plan.energy_j)
        scale = energy_j + instance.p2p_power_w * stages * time_s
        assert math.isclose(plan.time_s, time_s, rel_tol=1e-9)
        assert math.isclose(plan.energy_j, energy_j, rel_tol=1e-9)
        assert math.isclose(plan.effective_energy_j, effective_j, abs_tol=1e-9 * scale)
        assert plan.bound_j <= plan.energy_j + 1e-9 * scale
        for policy_j in frontier.beside(plan).values():
            assert math.isnan(policy_j) or plan.energy_j <= policy_j + 1e-9 * scale
    for slower, faster in itertools.pairwise(frontier.plans):
        assert slower.time_s > faster.time_s
        assert slower.effective_energy_j < faster.effective_energy_j


@dataclass
class Answer:
    """A requested plan, and by how much it is worse than something simpler, as shares.

    Attributes:
        late: Above the deadline.
        above_policy: Above one clock or one power limit for all.
        above_frontier: Above the frontier's own plan.
    """

    late: float
    above_policy: float
    above_frontier: float


def ask(
    instance: Instance,
    planner: Planner,
    frontier: Frontier,
    policies: list[tuple[float, float]],
    time_s: float,
    straggler: bool,
) -> Answer:
    """Requests a plan within a time, and compares it."""

    def cost(time_s: float, energy_j: float) -> float:
        return instance.effective_j(time_s, energy_j) if straggler else energy_j

    (plan,) = (planner.straggler if straggler else planner.deadline)(time_s).plans
    limit_s = time_s * (1 + 1e-9)
    scale = plan.energy_j + instance.p2p_power_w * instance.pipeline.num_stages * plan.time_s
    own = cost(plan.time_s, plan.energy_j)
    simple = min((cost(*one) for one in policies if one[0] <= limit_s), default=math.inf)

    def of(one: Plan) -> float:
        return cost(one.time_s, one.energy_j)

    listed = min((of(one) for one in frontier.plans if one.time_s <= limit_s), default=math.inf)
    return Answer(plan.time_s / time_s - 1, (own - simple) / scale, (own - listed) / scale)

"""Plans within a bound on the whole pipeline's power, beside one power limit for all GPUs.

    python benchmarks/pipeline_power.py [--gpu a100] [--stages 8] [--microbatches 8]

For bounds from 95 to 70 % of the fastest plan's peak power, it prints the time and energy of an
iteration relative to the fastest plan's: for the bounded plan, for the fastest uniform power limit
that keeps the bound, and for the plan with the least energy in that limit's time. Profiles are
those of GPT-3 175B that come with the simulator.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner import Planner, PowerBound
from zeus.optimizer.pipeline_frequency.plans import Plan
from zeus.optimizer.pipeline_frequency.profile import INSTRUCTIONS, InstructionProfile
from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b

DATA = Path(__file__).resolve().parents[1] / "zeusd/devices/simulated/data/perseus"
BLOCKED_W = 75.0


def one_limit(planner: Planner, profile: InstructionProfile, microbatches: int) -> list[Plan]:
    """Each uniform power limit as a plan: every instruction at its highest clock below it."""
    stages = range(profile.num_stages)
    kinds = [(stage, name) for stage in stages for name in INSTRUCTIONS]
    powers = np.unique(
        [one.energy_j / one.time_s for kind in kinds for one in profile.options(*kind)]
    )
    found = []
    for watts in powers:
        clock = {}
        for kind in kinds:
            options = profile.options(*kind)
            below = [one for one in options if one.energy_j / one.time_s <= watts]
            clock[kind] = (below or options[-1:])[0].frequency
        pipeline = one_f_one_b(profile.num_stages, microbatches)
        found.append(
            planner.plan_of(
                [
                    [
                        (
                            pipeline.instructions[place].name,
                            clock[stage, pipeline.instructions[place].name],
                        )
                        for place in places
                    ]
                    for stage, places in enumerate(pipeline.stages)
                ]
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gpu", default="a100", choices=["a100", "a40"])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    profile = InstructionProfile.read(DATA / f"gpt3-175b+{args.gpu}.columns.csv.xz")
    profile = profile.pick(list(range(args.stages)))
    pipeline = one_f_one_b(args.stages, args.microbatches)
    planner = Planner(profile, pipeline, p2p_power_w=BLOCKED_W)
    fast = planner.deadline(planner.fastest_time_s).plans[0]
    limits = one_limit(planner, profile, args.microbatches)

    def beside(plan: Plan) -> str:
        return f"{plan.time_s / fast.time_s - 1:+.1%}, {plan.energy_j / fast.energy_j - 1:+.1%}"

    print(f"GPT-3 175B, {args.gpu}, {args.stages} stages, {args.microbatches} microbatches; the ")
    print(f"fastest plan takes {fast.time_s:.3f} s and up to {fast.peak_power_w:.0f} W\n")
    print("| bound | fastest plan | uniform limit | least energy in its time | CPU, s |")
    print("|---|--:|--:|--:|--:|")
    for share in (0.95, 0.9, 0.85, 0.8, 0.75, 0.7):
        bound = PowerBound(peak_w=share * fast.peak_power_w)
        began_s = time.process_time()
        try:
            (plan,) = planner.bounded([bound]).plans
        except PipelineFrequencyError as error:
            print(f"| {share:.0%} | {error} | | | |")
            continue
        took_s = time.process_time() - began_s
        fit = [one for one in limits if one.peak_power_w <= bound.peak_w]
        simple = min(fit, key=lambda one: one.time_s, default=None)
        cells = [beside(plan), "none"]
        if simple is not None:
            (thrifty,) = planner.bounded([bound], simple.time_s).plans
            cells[1:] = [beside(simple), beside(thrifty)]
        print(f"| {share:.0%} | {' | '.join(cells)} | {took_s:.1f} |")


if __name__ == "__main__":
    main()

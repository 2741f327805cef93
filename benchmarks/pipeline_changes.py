"""Plans whose clock changes cost something: how long they take, how close to the bound they are.

    python benchmarks/pipeline_changes.py [--instances a100:4x8,a100:8x32]

For each cost of a change: CPU seconds from the profile to the frontier and to one plan for 1.1
times the fastest time, both cold; plans; their energy above the bound, mean and largest, %; the
energy that the one plan saves against the highest clocks, %, and its changes.
"""

from __future__ import annotations

import argparse
import time

from pipeline_frequency import Instance

COSTS = ((0.0005, None), (0.002, None), (0.012, None), (0.05, None), (0.0, 12), (0.0, 4), (0.0, 0))


def main() -> None:
    """Prints a line for each cost."""
    from zeus.optimizer.pipeline_frequency.planner import Changes

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", default="a100:4x8,a40:4x8")
    arguments = parser.parse_args()
    print("instance        s  most  frontier     one  plans    mean largest   saved changes")
    for name in arguments.instances.split(","):
        instance = Instance.of(name)
        for cost_s, most in COSTS:
            began = time.process_time()
            frontier = instance.planner(changes=Changes(cost_s, most)).frontier()
            middle = time.process_time()
            found = instance.planner(changes=Changes(cost_s, most)).max_slowdown(1.1)
            ended = time.process_time()
            gaps = [100 * plan.gap for plan in frontier.plans]
            saved = 100 * (1 - found.plans[0].energy_j / found.baseline_energy_j)
            print(
                f"{name:<9} {cost_s:7.4f} {most!s:>5} {middle - began:9.2f} {ended - middle:7.2f} "
                f"{len(gaps):6} {sum(gaps) / len(gaps):7.3f} {max(gaps):7.3f} {saved:7.2f} "
                f"{found.plans[0].clock_changes:7}"
            )


if __name__ == "__main__":
    main()

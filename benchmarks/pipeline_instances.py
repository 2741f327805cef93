"""Plans random pipelines of nine kinds, and counts what must not happen.

    python benchmarks/pipeline_instances.py [--instances 1000] [--seed N] [--exact 90]

Each instance is new (its seed is printed when something is wrong): convex curves and others,
equal times and energies, gaps, rounded figures, 1 to 12 settings, three schedules. A frontier is
planned, then single plans: for random deadlines and stragglers and for times of the frontier's own
plans, by the planner that has the frontier and by one that was asked nothing before. Columns:

- errors: exceptions, and figures that a walk through the schedule's graph does not confirm.
- late: plans that miss their deadline.
- policy: plans that take more than one clock or one power limit for all instructions.
- own: plans that take more than the frontier's plan of that time has, same planner.
- fresh: the same for a planner that has not planned the frontier, with the largest excess, %.
- missed: of small instances planned with exact=True, Pareto points that brute force finds and the
  frontier lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.zeus.pipeline_frequency.instances import (
    KINDS,
    ask,
    check_frontier,
    missed,
    random_instance,
    uniform_policies,
)

EPSILON = 1e-9


def heuristic(seed: int, kind: str, counts: dict[str, float]) -> None:
    """One instance without exactness."""
    rnd = random.Random(seed)
    instance = random_instance(rnd, kind)
    planner = instance.planner(exact=False)
    frontier = planner.frontier()
    check_frontier(instance, frontier)
    policies = uniform_policies(instance)
    fastest_s, slowest_s = frontier.plans[-1].time_s, frontier.plans[0].time_s
    times = [rnd.uniform(fastest_s, 1.1 * slowest_s) for _ in range(2)]
    times += [rnd.choice(frontier.plans).time_s for _ in range(2)]
    times += [fastest_s * rnd.uniform(1.0, 1.05)]
    for number, time_s in enumerate(times):
        straggler = bool(number % 2)
        for who in (planner, instance.planner(exact=False)):
            found = ask(instance, who, frontier, policies, time_s, straggler)
            counts["asked"] += 1
            counts["late"] += found.late > EPSILON
            if max(found.late, found.above_policy, found.above_frontier) > EPSILON:
                print(f"{kind} {seed}: {found}")
            counts["policy"] += found.above_policy > EPSILON
            if who is planner:
                counts["own"] += found.above_frontier > EPSILON
            else:
                counts["fresh"] += found.above_frontier > EPSILON
                counts["excess"] = max(counts["excess"], found.above_frontier)


def complete(seed: int, kind: str, counts: dict[str, float]) -> None:
    """One small instance, against every plan there is."""
    instance = random_instance(random.Random(seed), kind, small=True)
    frontier = instance.planner(exact=True).frontier()
    check_frontier(instance, frontier)
    points, lacking = missed(instance, frontier)
    counts["points"] += points
    counts["missed"] += len(lacking)
    for time_s, cost_j in lacking:
        print(f"{kind} {seed}: lacks {time_s:.9g} s, {cost_j:.9g} J")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument(
        "--exact", type=int, default=90, help="number of small instances, solved by brute force"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    arguments = parser.parse_args()
    print(f"seeds from {arguments.seed}")
    began = time.perf_counter()
    table: dict[str, dict[str, float]] = {}
    with contextlib.suppress(KeyboardInterrupt):  # the table then has the results so far
        for work, number in ((heuristic, arguments.instances), (complete, arguments.exact)):
            for turn in range(number):
                kind = KINDS[turn % len(KINDS)]
                counts = table.setdefault(kind, dict.fromkeys(COLUMNS, 0))
                try:
                    work(arguments.seed + turn, kind, counts)
                except Exception:
                    counts["errors"] += 1
                    print(f"{kind} {arguments.seed + turn}")
                    traceback.print_exc(limit=-3)
                counts["instances"] += 1
    print(f"{'kind':<21}" + "".join(f"{name:>10}" for name in COLUMNS))
    for kind, counts in table.items():
        cells = [100 * counts[name] if name == "excess" else counts[name] for name in COLUMNS]
        print(f"{kind:<21}" + "".join(f"{cell:>10.4g}" for cell in cells))
    print(f"{time.perf_counter() - began:.0f} s")


COLUMNS = (
    "instances", "errors", "asked", "late", "policy", "own", "fresh", "excess", "points", "missed",
)  # fmt: skip


if __name__ == "__main__":
    main()

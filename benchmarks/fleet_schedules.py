"""Runs any number of random schedules on the fleet's protocol: is the budget ever exceeded?

    python benchmarks/fleet_schedules.py                       10,000 schedules on all processors
    python benchmarks/fleet_schedules.py --schedules 100000
    python benchmarks/fleet_schedules.py --mutants             each rule removed in turn
    python benchmarks/fleet_schedules.py --seed 8524           one schedule, to debug it

A schedule is a minute of four nodes, two allocators and a store (tests/zeus_fleet/world.py), with
a fault every three seconds: partitions up to 60 s, messages delayed up to 7 s, dead and stopped
agents, restarts of zeusd, suspends, a stuck GPU, deposed and partitioned allocators, budget cuts;
clocks drift by up to 1e-3. Every change of a limit in hardware is checked in each domain.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import multiprocessing.pool
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.zeus_fleet.mutants import MUTANTS
from tests.zeus_fleet.parts import Rules, Violation
from tests.zeus_fleet.world import World

CHUNK = 100


class Outcome(NamedTuple):
    """Of some schedules."""

    schedules: int
    violations: list[tuple[int, str]]
    used_mw: int
    allowed_mw: int
    raises: int


def run_chunk(mutant: str | None, seconds: float, first: int) -> Outcome:
    rules = Rules() if mutant is None else MUTANTS[mutant]
    violations, used, allowed, raises = [], 0, 0, 0
    for seed in range(first, first + CHUNK):
        world = World(seed, rules, seconds=seconds)
        try:
            world.run()
        except Violation as violation:
            violations.append((seed, str(violation)))
        used, allowed, raises = (
            used + world.used_mw,
            allowed + world.allowed_mw,
            raises + world.raises,
        )
    return Outcome(CHUNK, violations, used, allowed, raises)


def run(pool: multiprocessing.pool.Pool, mutant: str | None, options: argparse.Namespace) -> int:
    """Prints a row, and the first violations of the shipped rules; returns how many there were."""
    chunks = range(options.first_seed, options.first_seed + options.schedules, CHUNK)
    outcomes = [*pool.imap_unordered(functools.partial(run_chunk, mutant, options.seconds), chunks)]
    schedules = sum(one.schedules for one in outcomes)
    violations = sorted(violation for one in outcomes for violation in one.violations)
    used = sum(one.used_mw for one in outcomes) / sum(one.allowed_mw for one in outcomes)
    raises = sum(one.raises for one in outcomes) / schedules
    name = mutant or "shipped"
    print(f"| {name} | {schedules} | {len(violations)} | {used:.2f} | {raises:.1f} |", flush=True)
    if mutant is None:
        for seed, violation in violations[:5]:
            print(f"seed {seed}: {violation}")
    return len(violations)


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated length of each")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutants", action="store_true", help="remove each rule in turn")
    parser.add_argument("--seed", type=int, help="run only this schedule and print its violations")
    options = parser.parse_args()
    if options.seed is not None:
        World(options.seed, seconds=options.seconds).run()
        print(f"schedule {options.seed}: no violations")
        return 0
    began = time.monotonic()
    print("| rules | schedules | violations | held of the budget | raises per schedule |")
    print("|---|--:|--:|--:|--:|")
    with multiprocessing.Pool(options.processes) as pool:
        violated = run(pool, None, options)
        for mutant in MUTANTS if options.mutants else ():
            run(pool, mutant, options)
    print(f"in {time.monotonic() - began:.0f} s")
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())

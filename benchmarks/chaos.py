"""Runs any number of random schedules against the core: leases, crashes, faults, outside changes.

    python benchmarks/chaos.py                     10,000 schedules on all processors
    python benchmarks/chaos.py --schedules 1000000
    python benchmarks/chaos.py --drivers           2,000 rounds of random drivers
    python benchmarks/chaos.py --seed 8524         one schedule, or round, to debug it

Each schedule is thirty events on a node with two GPUs (tests/zeusd/core/schedules.py); then all
faults end, and then all clients die. The invariants are checked after each event.

Each round of random drivers (tests/zeusd/core/drivers.py) is half a minute of virtual time on four
GPUs whose drivers fail, round, come late and report old values, while processes, zeusd and the
helper are killed. Then errors end and all clients die, and every limit must be restored.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.zeusd.core.drivers import run_round
from tests.zeusd.core.schedules import run_schedule

CHUNK = 500
ROUNDS = 20
"""Rounds of random drivers in a chunk."""
HEEDLESS = (signal.SIGINT, signal.SIG_IGN)
"""Ctrl-C is for the process that counts."""


def run_chunk(seeds: range, drivers: bool) -> list[tuple[int, str]]:
    """Runs the schedules of one chunk. Returns the seeds that violated something, and what."""
    violations = []
    for seed in seeds:
        try:
            (run_round if drivers else run_schedule)(seed)
        except Exception as error:
            violations.append((seed, f"{type(error).__name__}: {error}"))
    return violations


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, help="how many; 10,000, or 2,000 rounds")
    parser.add_argument("--drivers", action="store_true", help="rounds of random drivers")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="run only this schedule and print its violations")
    options = parser.parse_args()
    if options.seed is not None:
        try:
            (run_round if options.drivers else run_schedule)(options.seed)
        except Exception:
            traceback.print_exc()
            return 1
        print(f"schedule {options.seed}: no violations")
        return 0
    size = ROUNDS if options.drivers else CHUNK
    most = options.schedules or (2_000 if options.drivers else 10_000)
    chunks = [
        range(first, first + size)
        for first in range(options.first_seed, options.first_seed + most, size)
    ]
    began = time.monotonic()
    violations: list[tuple[int, str]] = []
    count = 0
    with (
        contextlib.suppress(KeyboardInterrupt),  # results until then are reported
        multiprocessing.Pool(options.processes, signal.signal, HEEDLESS) as pool,
    ):
        for found in pool.imap(partial(run_chunk, drivers=options.drivers), chunks):
            count += size
            violations += found
            for seed, what in found:
                print(f"seed {seed}: {what}", flush=True)
    seconds = time.monotonic() - began
    first = options.first_seed
    print(f"schedules  {count:>10,}  (seeds {first} to {first + count - 1})")
    print(f"violations {len(violations):>10,}")
    print(f"time       {seconds:>10,.0f} s, {count / seconds:,.0f} schedules/s")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())

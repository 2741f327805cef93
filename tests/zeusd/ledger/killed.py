"""Kills processes that write the ledger, one after another, and checks the files that they left.

    python -m tests.zeusd.ledger.killed DIRECTORY SEED

A program of its own, because each of the processes is forked from it: from pytest, with all that
its tests import, a fork takes many times as long.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
import time
from pathlib import Path

from tests import seeds
from tests.zeusd.ledger.world import World, energy_uj

KILLS = seeds.tries(200)


def keep_accounts(world: World, rng: random.Random, begun: int) -> None:
    """Runs until it is killed: the work of a zeusd, much faster. Reports when it has begun."""
    os.write(begun, b"!")
    while True:
        name, gpu = f"job{rng.randrange(4)}", f"GPU-{rng.randrange(2)}"
        if rng.random() < 0.4:
            world.allocate(name, uid=rng.randrange(3), gpus=[gpu])
        elif rng.random() < 0.4:
            world.deallocate(name)
        world.tick(rng.randrange(700), rng.randrange(1, 20), idle=rng.random() < 0.3)
        world.accounts.settle()


def check(world: World) -> int:
    """The ledger's sums agree with each other and with its position, which truth is not below."""
    db = sqlite3.connect(world.directory / "energy.db")
    sums = {
        table: dict(db.execute(f"SELECT gpu, SUM({columns}) FROM {table} GROUP BY gpu").fetchall())
        for table, columns in (("energy", "active_uj + idle_uj"), ("meter", "uj"))
    }
    positions = dict(db.execute("SELECT gpu, energy_uj FROM position").fetchall())
    counted = dict(db.execute("SELECT gpu, counted_uj FROM position").fetchall())
    (days,) = db.execute("SELECT coalesce(SUM(active_uj + idle_uj), 0) FROM day").fetchone()
    (total,) = db.execute("SELECT coalesce(SUM(active_uj + idle_uj), 0) FROM total").fetchone()
    db.close()
    assert sums["energy"] == sums["meter"] == positions == counted
    assert days == total == sum(positions.values())
    truth = sum(gpu.energy_uj for gpu in world.gpus.values())
    assert sum(positions.values()) <= truth
    return truth


def main(directory: Path, seed: int) -> None:
    """A kill at any instant charges nothing twice and loses nothing."""
    rng = random.Random(seed)
    world = World(directory, gpus=2)
    for number in range(KILLS):
        world.open()
        heard, begun = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                keep_accounts(world, random.Random(seed + number), begun)
            finally:
                os._exit(1)
        os.read(heard, 1)  # a busy machine is slow
        time.sleep(rng.uniform(0, 0.008))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)
        os.close(begun)
        for gpu in world.gpus.values():
            gpu.open()
        check(world)
    world.open()
    edges = [0, 2**40 // 900 * 900]
    assert sum(map(energy_uj, world.answer("job", edges).sums)) == check(world) > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

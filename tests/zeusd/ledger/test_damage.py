"""The ledger after kills at any instant, power failures, and damage."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests import seeds
from tests.preloaded import preloaded
from tests.support import IMPORTED
from tests.zeusd.ledger.killed import check
from tests.zeusd.ledger.world import World
from zeusd.ledger.schema import LedgerError, damaged, open_ledger

ROOT = Path(__file__).parents[3]


def test_a_kill_at_any_instant_charges_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    program = ["-m", "tests.zeusd.ledger.killed", str(tmp_path), str(seeds.fresh())]
    ran = preloaded(*IMPORTED).run(*program, cwd=ROOT, env=os.environ)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_power_failure_at_any_byte_of_the_log_leaves_a_ledger_that_agrees(
    tmp_path: Path,
) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    world = World(tmp_path, gpus=2).open()
    for number in range(40):
        world.allocate(f"job{number}", uid=number)
        world.tick(rng.randrange(700), 10)
        world.accounts.settle()
    log = (world.directory / "energy.db-wal").read_bytes()
    assert len(log) > 10_000
    for number in range(60):
        copy = tmp_path / f"after-{number}"
        shutil.copytree(world.directory, copy / "ledger", ignore=shutil.ignore_patterns("*-shm"))
        at = rng.randrange(len(log))
        cut = log[:at]
        if number % 2:
            cut += rng.randbytes(min(4096, len(log) - at))
        (copy / "ledger/energy.db-wal").write_bytes(cut)
        after = World(copy, gpus=2)
        after.gpus = world.gpus
        open_ledger(after.directory).close()
        assert damaged(after.directory) == []
        check(after)
        shutil.rmtree(copy)


@pytest.mark.parametrize("damage", ["no database", "pages", "empty"])
def test_a_damaged_ledger_is_moved_aside_and_another_begins(world: World, damage: str) -> None:
    for number in range(200):
        world.allocate(f"job{number}", uid=number)
    world.tick(100, 10)
    world.accounts.settle()
    world.accounts.close()
    path = world.directory / "energy.db"
    data = bytearray(path.read_bytes())
    if damage == "no database":
        data[:100] = b"x" * 100
    elif damage == "pages":
        data[4096:] = os.urandom(len(data) - 4096)
    else:
        data.clear()
    path.write_bytes(data)
    world.open()
    world.tick(100, 10)
    world.accounts.settle()
    assert len(damaged(world.directory)) == (damage != "empty")
    world.accounts.close()


def test_nobody_but_zeusd_may_open_the_ledger(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        world = World(tmp_path).open()
        world.tick(100, 10)
        world.accounts.settle()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in world.directory.iterdir()}
    assert modes == dict.fromkeys(("energy.db", "energy.db-wal", "energy.db-shm"), 0o600)
    assert world.directory.stat().st_mode & 0o777 == 0o700


def test_a_ledger_of_a_later_version_or_another_kind_is_not_touched(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.open().accounts.close()
    db = sqlite3.connect(world.directory / "energy.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(LedgerError, match="version 99"):
        open_ledger(world.directory)
    assert damaged(world.directory) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="without accounting"):
        open_ledger(tmp_path / "file")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "energy.db").symlink_to(world.directory / "energy.db")
    with pytest.raises(LedgerError):
        open_ledger(elsewhere)

"""The ledger after kills at any instant, power failures, and damage."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from tests import seeds
from tests.zeusd.ledger.world import World
from zeus_ipc.replies import Usage
from zeus_ipc.requests import Allocate, Deallocate, GetUsage
from zeusd.ledger.schema import LedgerError, damaged, open_ledger
from zeusd.runtime.books import Books

KILLS = 200


def keep_books(world: World, rng: random.Random, books: Books, begun: int) -> None:
    """Continues until it is killed: what a zeusd does, much faster. Says when it has begun."""
    os.write(begun, b"!")
    while True:
        name, gpu = f"job{rng.randrange(4)}", f"GPU-{rng.randrange(2)}"
        if rng.random() < 0.4:
            uid = rng.randrange(3)
            books.allocate(Allocate(id=1, gpus=[gpu], name=name, uid=uid), world.now_ns)
        elif rng.random() < 0.4:
            books.deallocate(Deallocate(id=1, name=name), world.now_ns)
        world.tick(rng.randrange(700), rng.randrange(1, 20), idle=rng.random() < 0.3)
        books.settle()


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


def test_a_kill_at_any_instant_charges_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    world = World(tmp_path, gpus=2)
    for number in range(KILLS):
        books = world.books()
        heard, begun = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                keep_books(world, random.Random(seed + number), books, begun)
            finally:
                os._exit(1)
        os.read(heard, 1)  # a busy machine takes its time
        time.sleep(rng.uniform(0, 0.008))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(heard)
        os.close(begun)
        check(world)
    books = world.books()
    books.settle()
    answer = books.usage(GetUsage(id=1, edges=[0, 2**40 // 900 * 900], by="job"), None)
    assert isinstance(answer, Usage)
    charged = sum(one.active_uj + one.idle_uj for one in answer.sums)
    assert charged == check(world) > 0


def test_a_power_failure_at_any_byte_of_the_log_leaves_a_ledger_that_agrees(
    tmp_path: Path,
) -> None:
    seed = seeds.fresh()
    rng = random.Random(seed)
    world = World(tmp_path, gpus=2)
    books = world.books()
    for number in range(40):
        request = Allocate(id=1, gpus=["GPU-0"], name=f"job{number}", uid=number)
        books.allocate(request, world.now_ns)
        world.tick(rng.randrange(700), 10)
        books.settle()
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
def test_a_damaged_ledger_is_set_aside_and_another_begins(tmp_path: Path, damage: str) -> None:
    world = World(tmp_path)
    books = world.books()
    for number in range(200):
        request = Allocate(id=1, gpus=["GPU-0"], name=f"job{number}", uid=number)
        books.allocate(request, world.now_ns)
    world.tick(100, 10)
    books.settle()
    books.close()
    path = world.directory / "energy.db"
    data = bytearray(path.read_bytes())
    if damage == "no database":
        data[:100] = b"x" * 100
    elif damage == "pages":
        data[4096:] = os.urandom(len(data) - 4096)
    else:
        data.clear()
    path.write_bytes(data)
    books = world.books()
    world.tick(100, 10)
    books.settle()
    assert len(damaged(world.directory)) == (damage != "empty")
    books.close()


def test_nobody_but_zeusd_may_open_the_ledger(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        world = World(tmp_path)
        books = world.books()
        world.tick(100, 10)
        books.settle()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in world.directory.iterdir()}
    assert modes == dict.fromkeys(("energy.db", "energy.db-wal", "energy.db-shm"), 0o600)
    assert world.directory.stat().st_mode & 0o777 == 0o700


def test_a_ledger_of_a_later_version_or_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.books().close()
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

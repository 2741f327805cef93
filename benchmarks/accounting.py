"""Measures the cost of the energy ledger: CPU, disk, queries, and its effect on sets.

    python benchmarks/accounting.py [cpu] [size] [sets]

cpu: ten minutes of a node with 8 GPUs whose sensors change every 100 ms, 2,000 jobs an hour and
1,000 processes, in simulated time; the CPU time of the ledger, as a share of a core. The rate of
the sensors' updates makes no difference to it.

size: 13 months with 2,660 rows a day, each of them limited by one cause, and the duration of
queries.

sets: power limits set on two simulated nodes in turn, one of which keeps a ledger under constant
queries and changes.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import RunningDaemon, configuration, running_daemon
from tests.zeusd.ledger.world import START_S, World
from zeus_ipc.charging import Method
from zeus_ipc.requests import Allocate, Deallocate
from zeusd.energy.accountant import ChargeRow, Key, Position, Settlement
from zeusd.energy.split import IDLE, Account, Kind
from zeusd.ledger.schema import FILE, open_ledger
from zeusd.ledger.store import LedgerStore
from zeusd.ledger.usage import By, Reader
from zeusd.runtime.activity import Activity, Listed, PidUse

GPUS, JOBS, PROCESSES = 8, 2_000, 1_000
DAYS, BUCKETS_PER_DAY, ROWS_PER_DAY, USERS = 396, 96, 2_660, 50
SETS = 400


def main() -> None:
    """Runs the benchmarks that are named, or all."""
    wanted = sys.argv[1:] or ["cpu", "size", "sets"]
    for name, run in (("cpu", cpu), ("size", size), ("sets", sets)):
        if name in wanted:
            run()


def cpu() -> None:
    """Half of the GPUs run jobs, whose processes nobody lists; the others run processes."""
    pids = [child() for _ in range(PROCESSES)]
    spent = {"jobs and settlements": 0.0, "lists of processes": 0.0}

    def timed(what: str, call: Callable[..., object], *arguments: object) -> None:
        begin = time.thread_time()
        call(*arguments)
        spent[what] += time.thread_time() - begin

    seconds = 600
    try:
        with tempfile.TemporaryDirectory() as folder:
            world = World(Path(folder), GPUS)
            accounts = world.open(ignored_units=[]).accounts
            held, unheld = [*world.gpus][: GPUS // 2], [*world.gpus][GPUS // 2 :]
            names: dict[str, str] = {}
            every_s = 3600 * len(held) / JOBS
            for second in range(seconds):
                world.tick(300, 10)
                for number, uuid in enumerate(held):
                    if second % every_s < 1:
                        name, t_ns = f"{number}-{second}", world.now_ns
                        ended = Deallocate(id=1, name=names.pop(uuid, "none"))
                        begun = Allocate(id=1, gpus=[uuid], name=name, uid=1000 + number)
                        names[uuid] = name
                        timed("jobs and settlements", accounts.deallocate, ended, t_ns)
                        timed("jobs and settlements", accounts.settle)
                        timed("jobs and settlements", accounts.allocate, begun, t_ns)
                for number, uuid in enumerate(unheld):
                    now_ns, there = world.now_ns, tuple(pids[number :: len(unheld)])
                    uses = tuple(PidUse(pid, now_ns, 1 + pid % 99) for pid in there)
                    activity = Activity(now_ns - 1_000_000_000, uses)
                    found = Listed(uuid, now_ns, there, activity)
                    timed("lists of processes", accounts.listed, found)
                timed("jobs and settlements", accounts.work)
            accounts.close()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(f"CPU, {GPUS} GPUs, {JOBS:,} jobs an hour, {PROCESSES:,} processes: share of a core")
    for what, took in spent.items():
        print(f"  {what:24} {100 * took / seconds:6.3f} %")
    print(f"  {'both':24} {100 * sum(spent.values()) / seconds:6.3f} %")


def child() -> int:
    """A process that does nothing."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


def size() -> None:
    """Rows as a node with many short jobs makes them."""
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as folder:
        connection = open_ledger(folder)
        store = LedgerStore(connection, "boot")
        first = START_S // 900
        begin = time.perf_counter()
        job = accounts = 0
        for bucket in range(first, first + DAYS * BUCKETS_PER_DAY):
            settlements = {}
            for gpu in range(GPUS):
                rows = {}
                for place in range(round(ROWS_PER_DAY / BUCKETS_PER_DAY / GPUS)):
                    account = Account(Kind.JOB, str(job), "0", 1000 + rng.randrange(USERS))
                    job += 1
                    if place == 0 and rng.random() < 0.14:
                        account = IDLE
                    uj = rng.randrange(10**11)
                    method = Method.NONE if account is IDLE else Method.ALLOCATED
                    rows[Key(bucket, account, method)] = ChargeRow(
                        *(uj, uj // 20, uj, uj, 3 * 10**11),
                        begin_ns=(begin_ns := bucket * 900 * 10**9 + place * 3 * 10**11),
                        end_ns=begin_ns + 3 * 10**11,
                    )
                metered = sum(row.active_uj + row.idle_uj for row in rows.values())
                position = Position(bucket * 900 * 10**9, metered)
                settled = Settlement(rows, {bucket: metered}, position)
                settled.limited |= {(bucket, key.account, "power:site"): 10**11 for key in rows}
                settlements[f"GPU-{gpu}"] = settled
            store.settle(settlements, 0)
            connection.execute(
                "UPDATE account SET begin_s = ?, end_s = ? WHERE id > ? AND +kind = 'job'",
                (bucket * 900, bucket * 900 + 900, accounts),
            )
            (accounts,) = connection.execute("SELECT max(id) FROM account").fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (rows_stored,) = connection.execute("SELECT count(*) FROM energy").fetchone()
        megabytes = Path(folder, FILE).stat().st_size / 1e6
        print(
            f"Size: {rows_stored:,} rows of {DAYS} days, {job:,} jobs: {megabytes:.0f} MB "
            f"(written in {time.perf_counter() - begin:.0f} s)"
        )
        for what, tables in (
            ("rows, sums of days and meters", ("energy", "day", "total", "meter")),
            ("jobs", ("account", "sqlite_autoindex_account_1")),
            ("time limited, one cause each", ("limited",)),
        ):
            (size_bytes,) = connection.execute(
                f"SELECT sum(pgsize) FROM dbstat WHERE name IN ({','.join('?' * len(tables))})",
                tables,
            ).fetchone()
            print(f"  {what:32} {size_bytes / 1e6:8.1f} MB")
        end_s = (first + DAYS * BUCKETS_PER_DAY) * 900
        reader = Reader(connection)
        month = [end_s - 30 * 86_400 - 3600 * 5, end_s - 3600 * 5]
        year = [end_s - 365 * 86_400 - 3600 * 5, end_s - 3600 * 5]
        days = [*range(month[0], month[1] + 1, 86_400)]
        name = str(job - 5_000)
        for what, ask in (
            ("a user's month", lambda: reader.usage(month, By.USER, None, 1001)),
            ("a user's month by day", lambda: reader.usage(days, By.USER, None, 1001)),
            ("all users' year", lambda: reader.usage(year, By.USER, None)),
            ("a day's jobs", lambda: reader.usage([end_s - 86_400, end_s], By.JOB, None)),
            ("one job", lambda: reader.usage(year, By.JOB, None, None, name)),
        ):
            took = sorted(timed_ms(lambda ask=ask: [*ask()]) for _ in range(5))
            print(f"  {what:24} {took[2]:8.1f} ms")
        print(f"  {'expiring a day':24} {timed_ms(lambda: store.expire(end_s, 395, 760)):8.1f} ms")


def timed_ms(call: Callable[..., object], *arguments: object) -> float:
    """How long a call takes, ms."""
    begin = time.perf_counter()
    call(*arguments)
    return 1e3 * (time.perf_counter() - begin)


def sets() -> None:
    """Alternates, so that other load of the machine affects both alike."""
    node = ("--simulate", "1xv100-pcie:setter_ms=0")
    with tempfile.TemporaryDirectory() as folder:
        options = configuration(Path(folder), f'[accounting]\ndirectory = "{folder}"\n')
        with running_daemon(*node) as plain, running_daemon(*node, *options) as keeping:
            clients = {"without": plain.client(), "with a ledger": keeping.client()}
            gpus = {name: client.node().gpus[0].uuid for name, client in clients.items()}
            took: dict[str, list[float]] = {name: [] for name in clients}
            ended = threading.Event()
            busy = threading.Thread(target=use, args=(keeping, ended))
            busy.start()
            for number in range(SETS):
                for name, client in clients.items():
                    watts = 150_000 + 1_000 * (number % 2)
                    took[name].append(timed_ms(client.set_power_limit, gpus[name], watts))
            ended.set()
            busy.join()
            for client in clients.values():
                client.close()
    print(f"Setting a power limit, {SETS} times each, alternating: ms")
    for name, values in took.items():
        p99 = statistics.quantiles(values, n=100)[98]
        print(f"  {name:24} median {statistics.median(values):.2f}, 99th percentile {p99:.2f}")


def use(daemon: RunningDaemon, ended: threading.Event) -> None:
    """Twice as many jobs as 2,000 an hour, and a question each second."""
    with daemon.client() as client:
        uuid = client.node().gpus[0].uuid
        end = int(time.time()) // 900 * 900 + 900
        number = 0
        while not ended.wait(0.9):
            client.allocate(uuid, f"job{number}", uid=number % 50)
            client.usage([end - 86_400, end], "job")
            client.deallocate(f"job{number}")
            number += 1


if __name__ == "__main__":
    main()

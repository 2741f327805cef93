"""Measures the figures of docs/explain/reliability.md.

    python benchmarks/reliability.py restore           # SIGKILL of a holder to 8 GPUs restored
    python benchmarks/reliability.py attack            # honest users beside each attack
    python benchmarks/reliability.py attack --systemd  # the same with the units, in a container
    python benchmarks/reliability.py systemd           # kill -9 of zeusd until it has recovered
    python benchmarks/reliability.py restarts          # threads of a client while zeusd is killed

`attack` acts as other users and needs root; `attack --socket PATH` attacks a zeusd that systemd
runs on this machine. The containers need root and systemd-nspawn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.system.test_systemd import Node

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.adversary import ATTACKS, SUBUIDS
from benchmarks.attack import GPUS, HONEST_UID, attacker, others_may_be_played, quantile
from benchmarks.attack_table import NOT_RUN, add_options, attack_installed, print_table
from benchmarks.processes import FIRST_ATTACKER, Daemon, OwnDaemon
from tests.fake_nvml.double import NvmlDouble
from tests.support import (
    ALL_MAY,
    NOBODY,
    RunningDaemon,
    as_nobody,
    configuration,
    public_directory,
    running_daemon,
    script,
    wait_for,
)
from zeus_ipc.charging import Method
from zeus_ipc.requests import BUCKET_S
from zeusd.energy.accountant import ChargeRow, Key, Position, Settlement
from zeusd.energy.split import Account, Kind
from zeusd.ledger.schema import open_ledger
from zeusd.ledger.store import BUCKETS_PER_DAY, LedgerStore

SET_LIMIT = "nvmlDeviceSetPowerManagementLimit"
LIMIT = 250_000
ROOT = Path(__file__).resolve().parents[1]
SOURCES, PYTHON = "/usr/src/zeusd", "/opt/zeusd/bin/python"
"""Of a booted machine."""

HOLDER = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1], timeout_s=30)
client.set_power_limit([gpu.uuid for gpu in client.node().gpus], 150_000)
print("holding", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def site(
    gpus: int, latency_ms: float, text: str = ""
) -> Iterator[tuple[RunningDaemon, NvmlDouble]]:
    """zeusd on the recording library, where everybody may set."""
    shm = Path("/dev/shm")  # the journal lies on tmpfs, as /run does on a node
    with (
        public_directory() as directory,
        TemporaryDirectory(dir=shm if shm.is_dir() else None, prefix="zeusd-") as state,
    ):
        privilege = 0 if os.getuid() == 0 else 1
        double = NvmlDouble(directory, [{}] * gpus, privilege=privilege, latency_ms=latency_ms)
        with running_daemon(
            *("--nvml-library", double.library, "--socket-mode", "0666"),
            *("--state-dir", state),
            *configuration(directory, text + ALL_MAY),
            gpus=gpus,
            env=double.env,
            directory=directory,
        ) as daemon:
            yield daemon, double


def measure_restore(runs: int) -> None:
    """Prints how long after a holder's death the last of 8 GPUs was written."""
    print(f"SIGKILL of the lease's holder until the last of 8 limits is restored, {runs} runs, ms")
    print(f"{'one setter takes':>18} {'p50':>8} {'p99':>8} {'max':>8} {'p99 minus it':>14}")
    cases: list[tuple[float, str | None, int]] = [(0.0, None, 0), (12.0, None, 0)]
    if others_may_be_played():
        cases += [(12.0, "480 reads/s", 0), (12.0, "reads without end", 0)]
        cases += [(12.0, "reads without end", 1)]
    for latency_ms, name, getter_ms in cases:
        with site(8, latency_ms) as (daemon, double), contextlib.ExitStack() as stack:
            took_ms = []
            for gpu in range(8 if getter_ms else 0):
                double.inject(gpu, SET_LIMIT)  # the first injected error applies
                double.inject(gpu, "*", delay_ms=getter_ms)
            if name is not None:
                slow = f", and every getter takes {getter_ms} ms" if getter_ms else ""
                print(f"the same beside another user who sends {name}{slow}:")
                attacked = OwnDaemon(daemon.socket, daemon.process.pid, daemon.log_path)
                stack.callback(attacker(ATTACKS[name], attacked, FIRST_ATTACKER).kill)
            for _ in range(runs):
                holder = script(HOLDER, daemon.socket, **as_nobody())
                assert holder.stdout is not None
                holder.stdout.readline()
                killed_ns = time.monotonic_ns()
                holder.kill()
                wait_for(
                    lambda: all(double.limit_mw(gpu) == LIMIT for gpu in range(8)), "the limits"
                )
                holder.wait()
                last_ns = max(call.t_ns for call in double.calls(SET_LIMIT)[-8:])
                took_ms.append((last_ns - killed_ns) / 1e6)
        p50, p99 = quantile(took_ms, 0.5), quantile(took_ms, 0.99)
        print(
            f"{latency_ms:>15g} ms {p50:>8.1f} {p99:>8.1f} {max(took_ms):>8.1f} "
            f"{p99 - latency_ms:>14.1f}",
            flush=True,
        )


def fill_ledger(directory: Path) -> None:
    """Writes a year of a busy node: each GPU has another job every six hours."""
    store = LedgerStore(open_ledger(directory), "an earlier boot")
    last = int(time.time()) // BUCKET_S
    buckets = range(last - 365 * BUCKETS_PER_DAY, last)
    uj = 300 * BUCKET_S * 1_000_000
    used = ChargeRow(uj, 0, uj, uj, BUCKET_S * 1_000_000_000)
    for gpu in range(GPUS):
        rows = {}
        for bucket in buckets:
            job = GPUS * (bucket // (BUCKETS_PER_DAY // 4)) + gpu
            account = Account(Kind.JOB, str(job), "0", HONEST_UID + job % 50)
            rows[Key(bucket, account, Method.ALLOCATED)] = used
        metered = dict.fromkeys(buckets, uj)
        position = Position(1, len(buckets) * uj)
        store.settle({f"GPU-of-the-past-{gpu}": Settlement(rows, metered, position)}, 0)
    store.close()


@contextlib.contextmanager
def attacked_site(past: Path) -> Iterator[Daemon]:
    """A daemon for each attack, with a ledger of earlier times."""
    with TemporaryDirectory(prefix="zeusd-ledger-") as ledger:
        shutil.copytree(past, ledger, dirs_exist_ok=True)
        accounts = f"[accounting]\ndirectory = {ledger!r}\n"
        with site(GPUS, 0.0, accounts) as (daemon, _):
            yield OwnDaemon(daemon.socket, daemon.process.pid, daemon.log_path)


def measure_attack(names: list[str], seconds: float, socket: str | None) -> int:
    """Prints honest users' figures beside each attack. Returns the number of missed goals."""
    if not others_may_be_played():
        print(NOT_RUN)
        return 0
    if socket is not None:
        return attack_installed(names, seconds, socket)
    with TemporaryDirectory(prefix="zeusd-ledger-") as past:
        fill_ledger(Path(past))
        return print_table(names, seconds, lambda: attacked_site(Path(past)))


@contextlib.contextmanager
def booted(gpus: int) -> Iterator[Node]:
    """A systemd with zeusd installed as it is shipped."""
    from tests import needs
    from tests.system import test_systemd

    if missing := needs.unmet("systemd"):
        sys.exit(f"cannot boot a systemd here: it needs {', '.join(missing)}")
    with contextlib.contextmanager(test_systemd.boot_node)(gpus, watchdog_s=None) as node:
        yield node


def measure_systemd(runs: int) -> None:
    """Prints how long after `kill -9` of zeusd its clients' sets are done again."""
    with booted(2) as node:
        user = node.user()
        assert user.set(0, 200) == "ok"
        took_ms, restored_ms = [], []
        for number in range(runs):
            dying = node.user()
            assert dying.set(1, 150) == "ok"
            began = time.monotonic()
            node.machine.systemctl("kill", "--signal=KILL", "--kill-whom=main", "zeusd")
            dying.kill()
            assert user.set(0, 180 + number % 10) == "ok"
            took_ms.append((time.monotonic() - began) * 1e3)
            wait_for(lambda: node.limits()[1] == LIMIT, "what the dead held")
            restored_ms.append((time.monotonic() - began) * 1e3)
            time.sleep(7.0)  # stays below the unit's limit of starts
        user.kill()
    print(f"kill -9 of zeusd under systemd, {runs} runs, ms")
    print(f"{'':<34} {'p50':>8} {'max':>8}")
    for name, values in (
        ("until a living client's set is done", took_ms),
        ("until the dead's limit is back", restored_ms),
    ):
        print(f"{name:<36} {quantile(values, 0.5):>6.0f} {max(values):>8.0f}")


def measure_restarts(kills: int) -> None:
    """Prints the longest request of eight threads that share a client while zeusd is killed and
    restarted, beside twice as many busy processes as there are cores."""
    from tests.system.test_crashes import ask_through_kills

    burning = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            busy = subprocess.Popen(burning)
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        directory = stack.enter_context(public_directory())
        simulated = ("--simulate", "2xv100-pcie:setter_ms=0", *configuration(directory))
        daemon = stack.enter_context(running_daemon(*simulated, gpus=2, directory=directory))
        longest_s = ask_through_kills(daemon, kills, threads=8)
    print(f"{kills} kills under 8 threads: no request failed; the longest took {longest_s:.1f} s")


def measure_attack_on_units(names: list[str], seconds: float) -> int:
    """The same in a booted systemd, where attackers have names and 158 users one owner."""
    with booted(GPUS) as node:
        root, sources = node.machine.root, f"{node.machine.root}{SOURCES}"
        shutil.copytree(ROOT / "benchmarks", Path(sources, "benchmarks"))
        with (root / "etc/passwd").open("a") as users:
            for number in range(len(ATTACKS) + 1):
                uid = FIRST_ATTACKER + number
                users.write(f"attacker{number}:x:{uid}:{NOBODY}::/nonexistent:/bin/false\n")
        (root / "etc/subuid").write_text(f"attacker0:{SUBUIDS.start}:65536\n")
        command = [PYTHON, f"{SOURCES}/benchmarks/attack_table.py", "--seconds", str(seconds)]
        for name in names:
            command += ["--only", name]
        return subprocess.run(node.machine.command(*command)).returncode


def main() -> int:
    """Prints the requested tables. Returns 1 if an attack missed the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["restore", "attack", "systemd", "restarts"], nargs="+")
    parser.add_argument("--runs", type=int, help="restore: 200; systemd: 20; restarts: 1000")
    add_options(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--socket", metavar="PATH", help="attack the zeusd of this machine's systemd"
    )
    where.add_argument(
        "--systemd", action="store_true", help="attack a zeusd in a booted container"
    )
    options = parser.parse_args()
    short = 0
    if "restore" in options.what:
        measure_restore(options.runs or 200)
    if "attack" in options.what:
        names = options.only or list(ATTACKS)
        if options.systemd:
            short = measure_attack_on_units(names, options.seconds)
        else:
            short = measure_attack(names, options.seconds, options.socket)
    if "systemd" in options.what:
        measure_systemd(options.runs or 20)
    if "restarts" in options.what:
        measure_restarts(options.runs or 1000)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())

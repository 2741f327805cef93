"""Measures honest users beside an attacker: latencies and leases, and zeusd's log and CPU time.

One process of a user without permissions runs each attack (see `adversary.py`). Beside it run
processes of three honest users: one constantly sets a power limit; one keeps a lease of two seconds
alive with heartbeats, and opens a new connection four times a second; and one dies while it holds a
lease. The same is measured beside a busy loop, on the same daemon, alternating every few seconds.
The ratio of the two is the figure to judge.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.adversary import ATTACKS, SUBUIDS, Attack
from benchmarks.processes import Daemon, names_any, subordinate_users, user_name

HONEST_UID, HOLDER_UID, DYING_UID = 12_345, 12_346, 12_347
GPUS = 4
"""For the honest user, the holder, the one who dies, and the attacker."""
TTL_S = 2.0
"""The shortest lease that zeusd grants by default."""
WARM_UP_S = 1.0
TURN_S = 1.5 * TTL_S
"""The shortest turn of an attack: a lease whose heartbeats are not read expires within it."""

RESTORE_S = 60.0

HONEST = """
import json, random, sys, time
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
path, gpu, pause_s = sys.argv[1:]
client = Client(path, timeout_s=10)
client.set_power_limit(gpu, 200_000)
print("ready", flush=True)
watts = 0
for line in sys.stdin:
    took_ns, errors, end = [], [], time.monotonic() + float(line)
    while time.monotonic() < end or len(took_ns) < 20:  # however busy the machine is
        watts = (watts + 1) % 50
        began_ns = time.monotonic_ns()
        try:
            client.set_power_limit(gpu, 150_000 + 1000 * watts)
        except ZeusIpcError as error:
            errors.append(f"{error.code}: {error.message}")
        took_ns.append(time.monotonic_ns() - began_ns)
        time.sleep(random.random() * float(pause_s))
    print(json.dumps([took_ns, errors]), flush=True)
"""

HOLDER = """
import json, sys, time
from zeus_ipc import Client
from zeus_ipc.errors import ZeusIpcError
path, gpu, ttl_s = sys.argv[1:]
client = Client(path, timeout_s=10)
client.acquire(gpu, ["power_limit"], ttl_s=float(ttl_s))
client.set_power_limit(gpu, 180_000)
print("ready", flush=True)
for line in sys.stdin:
    took_ns, errors, end = [], [], time.monotonic() + float(line)
    while time.monotonic() < end:
        began_ns = time.monotonic_ns()
        try:
            with Client(path, timeout_s=10) as other:
                other.node()
        except ZeusIpcError as error:
            errors.append(f"{error.code}: {error.message}")
        took_ns.append(time.monotonic_ns() - began_ns)
        time.sleep(0.25)
    print(json.dumps([took_ns, errors]), flush=True)
"""

DYING = """
import sys
from zeus_ipc import Client
client = Client(sys.argv[1], timeout_s=30)
client.set_power_limit(sys.argv[2], 170_000)
print("ready", flush=True)
sys.stdin.read()
"""


def quantile(values: list[int], share: float) -> float:
    """The value below which this share of all lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Phase:
    """What honest users saw for some seconds."""

    sets_ns: list[int]
    connects_ns: list[int]
    errors: list[str]
    restored_s: list[float]
    """From a holder's death until its lease was over and its limit restored."""

    def __add__(self, other: Phase) -> Phase:
        return Phase(
            self.sets_ns + other.sets_ns,
            self.connects_ns + other.connects_ns,
            self.errors + other.errors,
            self.restored_s + other.restored_s,
        )

    def set_us(self, share: float) -> float:
        return quantile(self.sets_ns, share) / 1e3

    @property
    def connect_ms(self) -> float:
        """The longest time that a new connection took to be answered."""
        return max(self.connects_ns) / 1e6


NOTHING = Phase([], [], [], [])
BUSY_LOOP = ATTACKS["a busy loop"]


@dataclass(frozen=True)
class Observation:
    """Observations during an attack."""

    attack: Attack
    honest: Phase
    busy: Phase
    """The same beside a busy loop instead; nothing where it was not run."""
    after: Phase
    """The same from the attacker's death on; nothing where the busy loop was not run."""
    lost: list[str]
    """GPUs whose leases living holders lost."""
    cpu_percent: float
    """Of one core, by all processes of zeusd."""
    peak_mib: float
    named: list[str]
    """Log lines that name the attacker's user."""
    seconds: float
    """How long the attack lasted."""

    def ratio(self, share: float) -> float:
        return self.honest.set_us(share) / self.busy.set_us(share)

    def ratio_after(self, share: float) -> float:
        return self.after.set_us(share) / self.busy.set_us(share)

    def faults(self) -> list[str]:
        """What must never happen, however busy the machine is."""
        errors = self.honest.errors + self.after.errors
        faults = [f"honest users: {error}" for error in errors[:3]]
        faults += [f"a living holder lost its lease on {gpu}" for gpu in self.lost]
        most = 1 + int(self.seconds // 60)
        if self.attack.breaks_protocol and not self.named:
            faults.append("no log line names the attacker's user")
        if len(self.named) > most:
            lines = "; ".join(self.named[:3])
            faults.append(f"{len(self.named)} log lines, not {most}, name the user: {lines}")
        return faults


def others_may_be_played() -> bool:
    """Whether this process may become other users."""
    return os.geteuid() == 0


def _groups(may_set: bool) -> list[int]:
    """The group whose members may change GPUs, where the node has it."""
    with contextlib.suppress(KeyError):
        return [grp.getgrnam("zeus").gr_gid] if may_set else []
    return []


def _as(uid: int, may_set: bool = True) -> dict[str, Any]:
    if not others_may_be_played():
        return {}
    return {"user": uid, "group": uid, "extra_groups": _groups(may_set)}


class Child:
    """A child process with pipes, which has printed `ready`."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        if self._line() != "ready\n":
            self.kill()
            raise RuntimeError("a process of the benchmark ended at once; see its error above")

    def rest(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def work(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        return json.loads(self._line())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


class Honest:
    """The honest users of one daemon.

    Args:
        daemon: The daemon.
        pause_s: The longest pause between two of the power limits that one of them sets.
    """

    def __init__(self, daemon: Daemon, pause_s: float = 0.004) -> None:
        self._daemon = daemon
        setter = ["-c", HONEST, daemon.path, daemon.gpus[0], str(pause_s)]
        self._setter = Child(setter, **_as(HONEST_UID))
        holder = ["-c", HOLDER, daemon.path, daemon.gpus[1], str(TTL_S)]
        self._holder = Child(holder, **_as(HOLDER_UID))

    def observe(self, seconds: float) -> Phase:
        """Lets them work for so long."""
        gpu = self._daemon.gpus[2]
        dying = Child(["-c", DYING, self._daemon.path, gpu], **_as(DYING_UID))
        for child in (self._setter, self._holder):
            child.say(str(seconds))
        time.sleep(seconds / 2)
        late: list[str] = []
        with self._daemon.client() as client:
            client.leases()  # measure the restore, not the connection
            killed = time.monotonic()
            dying.kill()
            while any(lease.gpu == gpu for lease in client.leases()) and not late:
                time.sleep(0.002)
                if time.monotonic() > killed + RESTORE_S:
                    late.append(f"a dead holder's limit was not restored within {RESTORE_S:g} s")
        restored_s = time.monotonic() - killed
        sets_ns, errors = self._setter.answer()
        connects_ns, other_errors = self._holder.answer()
        return Phase(sets_ns, connects_ns, errors + other_errors + late, [restored_s])

    def newest_record(self) -> int:
        """Number of the newest audit record."""
        with self._daemon.client() as client:
            return max((one.number for one in client.audit(limit=1).records), default=0)

    def lost(self, after: int) -> list[str]:
        """Leases that they lost since this audit record."""
        mine = self._daemon.gpus[:2]
        with self._daemon.client() as client:
            records = client.audit(after=after, limit=1000).records
            held = {lease.gpu for lease in client.leases() if not lease.restoring}
        expired = {one.gpu for one in records if one.event == "lease_expired"}
        return [gpu for gpu in mine if gpu in expired or gpu not in held]

    def close(self) -> None:
        self._setter.kill()
        self._holder.kill()


def attacker(attack: Attack, daemon: Daemon, uid: int) -> Child:
    """Starts the attack; a list of users needs root to become them."""
    # By its text: another user may not be let into the folder in which it lies.
    program = Path(__file__).with_name("adversary.py").read_text(encoding="utf-8")
    command = ["-c", program, attack.name, daemon.path, *daemon.gpus]
    return Child(command, **({} if attack.as_root else _as(uid, attack.may_set)))


def beside(
    attack: Attack,
    honest: Honest,
    daemon: Daemon,
    uid: int,
    seconds: float,
    *,
    compare: bool = False,
) -> Observation:
    """Measures honest users beside an attack by the user `uid`.

    Args:
        attack: The attack.
        honest: The honest users.
        daemon: The daemon under attack.
        uid: The attacker's uid.
        seconds: How long they are observed.
        compare: Whether a busy loop takes turns with the attack, and the time after the attacker's
            death is measured, too.
    """
    turns = max(1, int(seconds // TURN_S)) if compare else 1
    newest = honest.newest_record()
    began = time.monotonic()
    seen = busy = dead = NOTHING
    cpu_s = observed_s = 0.0
    with daemon.new_log_lines() as lines, contextlib.ExitStack() as running:
        enemy, *others = [
            attacker(one, daemon, uid) for one in ([attack, BUSY_LOOP] if compare else [attack])
        ]
        for one in (enemy, *others):
            running.callback(one.kill)
            one.rest()
        for turn in range(turns):
            for burner in others:
                burner.work()
                time.sleep(WARM_UP_S)
                busy += honest.observe(seconds / turns)
                burner.rest()
            enemy.work()
            if compare:  # latencies beside an attack that is already running
                time.sleep(WARM_UP_S)
            before, started = daemon.usage(), time.monotonic()
            seen += honest.observe(seconds / turns)
            after = daemon.usage()
            cpu_s += after.cpu_s - before.cpu_s
            observed_s += time.monotonic() - started
            if compare and turn == turns - 1:
                enemy.kill()
                for burner in others:  # the machine is as busy as before
                    burner.work()
                dead = honest.observe(max(TURN_S, seconds / turns))
            enemy.rest()
        lost = honest.lost(newest)
        lasted_s = time.monotonic() - began
    users = subordinate_users(SUBUIDS) if attack.as_root else {user_name(uid)}
    return Observation(
        attack=attack,
        honest=seen,
        busy=busy,
        after=dead,
        lost=lost,
        cpu_percent=100 * cpu_s / observed_s,
        peak_mib=after.peak_mib,
        named=[line for line in lines if names_any(line, users)],
        seconds=lasted_s,
    )

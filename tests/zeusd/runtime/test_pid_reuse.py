"""Pids that the kernel reuses: processes of two users that all have the same pid.

It runs in a pid namespace of its own, where the next pid can be chosen. For more of them:
`unshare --mount --pid --fork --mount-proc python -m tests.zeusd.runtime.test_pid_reuse 10000`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import forked
from zeusd.energy.accountant import Accountant, Fact, FactSpan, Position, Settlement
from zeusd.energy.split import Account, Kind
from zeusd.runtime.identities import Identities, Identity
from zeusd.runtime.presence import Exits, Presence

FORKS = 60
USERS = (1, 2)
WATTS = 100
NEXT_PID = Path("/proc/sys/kernel/ns_last_pid")

UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.needs("root", "namespaces")
@pytest.mark.timeout(300)
def test_no_energy_goes_to_another_process_with_the_same_pid() -> None:
    ran = subprocess.run(
        [*UNSHARE, sys.executable, "-m", __name__, str(FORKS)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["pids", "1", "forks", str(FORKS)]


def child(uid: int) -> tuple[int, int]:
    """A process of this user, always with the same pid. Returns it, and a pipe that ends it."""
    NEXT_PID.write_text("500")
    read, write = os.pipe()
    ready, told = os.pipe()

    def until_told() -> None:
        os.close(write)
        os.setresuid(uid, uid, uid)
        os.write(told, b".")
        os.read(read, 1)

    pid = forked(until_told)
    os.close(read)
    os.close(told)
    os.read(ready, 1)
    os.close(ready)
    return pid, write


class Remembered(Identities):
    """Knows whom it identified last."""

    def identify(self, pid: int) -> Identity | None:
        self.last = super().identify(pid)
        return self.last


def main(forks: int) -> None:
    """Lists each process while it runs, and asks how the account of the GPU charges it."""
    spans: list[FactSpan] = []
    exits, accountant = Exits(), Accountant(Position(time.monotonic_ns(), 0))
    begin_ns = accountant.position.t_ns
    truth: list[tuple[Account, int, int]] = []
    pids = set()

    def add(_: str, span: FactSpan) -> None:
        accountant.add(span)
        if span.fact is Fact.PRESENT:
            spans.append(span)

    def asleep() -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()

    identities = Remembered()
    presence = Presence(add, identities, exits, (), asleep)
    before_ns = begin_ns
    for number in range(forks):
        account = Account(Kind.USER, uid=USERS[number % 2])
        pid, pipe = child(account.uid)
        pids.add(pid)
        presence.listed("GPU-0", time.monotonic_ns(), [pid])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
        gone_ns = time.monotonic_ns()
        present = identities.last
        while exits.ended_ns(present.pidfd) is None:  # another thread is about to record it
            time.sleep(0)
        gone_ns = max(gone_ns, exits.ended_ns(present.pidfd) or 0)
        truth.append((account, before_ns, gone_ns))
        before_ns = exits.ended_ns(present.pidfd) or 0
    end_ns = time.monotonic_ns()
    presence.listed("GPU-0", end_ns, [])
    presence.close()
    assert len(spans) == forks
    for span, (account, earliest_ns, gone_ns) in zip(spans, truth, strict=True):
        assert span.claim.account == account
        assert earliest_ns <= span.begin_ns <= span.end_ns <= gone_ns
    settled = accountant.settle(end_ns, lambda t_ns: WATTS * (t_ns - begin_ns) // 1000, 0)
    check(settled, truth)
    print("pids", len(pids), "forks", len(spans))


def check(settled: Settlement, truth: list[tuple[Account, int, int]]) -> None:
    """No user has more than was drawn while a process of that user lived."""
    assert sum(row.active_uj + row.idle_uj for row in settled.rows.values()) == sum(
        settled.metered.values()
    )
    for uid in USERS:
        lived_ns = sum(end - begin for account, begin, end in truth if account.uid == uid)
        rows = [row for key, row in settled.rows.items() if key.account.uid == uid]
        charged_uj = sum(row.active_uj for row in rows)
        assert 0 < charged_uj <= WATTS * lived_ns // 1000 + len(truth)  # a rounding each


if __name__ == "__main__":
    main(int(sys.argv[1]))

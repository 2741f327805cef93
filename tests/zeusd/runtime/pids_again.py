"""Processes in a pid namespace with 300 pids, which are reused: whom a list charges.

unshare --pid --fork --mount-proc python -m tests.zeusd.runtime.pids_again 10000
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from zeusd.energy.accountant import Fact, FactSpan
from zeusd.runtime.identities import Identities, Identity
from zeusd.runtime.presence import Exits, Presence

EVERY, FIRST, PIDS = 20, 100, 300
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
"""Of this namespace only, unlike pid_max on older kernels."""


def start(pid: int, uid: int | None) -> None:
    """A process with this pid; with a user, it runs until it is killed."""
    LAST_PID.write_text(str(pid - 1))
    ready, say = os.pipe()
    found = os.fork()
    if found == 0:
        if uid is not None:
            os.setresuid(uid, uid, uid)
            os.write(say, b"x")
            signal.pause()
        os._exit(0)
    assert found == pid, (found, pid)
    os.close(say)
    os.read(ready, 1)
    os.close(ready)


class Remembered(Identities):
    """Knows whom it identified last."""

    def identify(self, pid: int) -> Identity | None:
        self.last = super().identify(pid)
        return self.last


def main(forks: int) -> None:
    """Prints how many processes were listed, and how many of them were charged as others."""
    spans: list[FactSpan] = []
    exits = Exits()
    offset_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    identities = Remembered()
    presence = Presence(
        lambda _, span: spans.append(span), identities, exits, [], lambda: offset_ns
    )

    def listed(*pids: int) -> None:
        presence.listed("GPU-0", time.monotonic_ns(), pids)

    listed()
    truth = []
    for number in range(forks):
        pid = FIRST + number % PIDS
        if number % EVERY:
            start(pid, None)
            os.waitpid(pid, 0)
            continue
        # The second one has the first one's pid, and no list without it comes between.
        for uid in (1000 + number // EVERY % 7, 2000 + number // EVERY % 5):
            start(pid, uid)
            listed(pid)
            present = identities.last
            truth.append(uid)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            while exits.ended_ns(present.pidfd) is None:
                time.sleep(0.0005)
        listed()
    charged = [span.claim.account.uid for span in spans if span.fact is Fact.PRESENT and span.claim]
    wrong = sum(one != other for one, other in zip(charged, truth, strict=False))
    print(len(truth), abs(len(charged) - len(truth)) + wrong)
    presence.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))

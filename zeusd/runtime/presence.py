"""Tracks processes on GPUs that nobody holds: turns a list per second into spans of time.

Seeing a process once is enough to know its lifetime: /proc has its start, and a pidfd reports its
end. A process counts from its start, but not from before the last list without it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from zeusd.energy.accountant import NEVER_NS, Fact, FactSpan
from zeusd.energy.split import Account, ChargedProcess, Claim, unattributed
from zeusd.identity import has_exited
from zeusd.runtime.activity import Activity, PidUse
from zeusd.runtime.identities import Identities, is_ignored

LIST_NS = 1_000_000_000
STALE_NS = 3 * LIST_NS
"""Longest time between lists; who was present during a longer gap is not known."""

UNKNOWN_PROCESS = unattributed("unknown process")
"""Reason for energy drawn while a listed process could not be identified."""

LIST_FAILED = "process list failed"

LATE_NS = 10 * LIST_NS
"""Largest age of a driver's samples of use relative to the list of processes."""

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class _Present:
    """A listed process, and its span in the GPU's account."""

    span: FactSpan
    pidfd: int


@dataclass(slots=True)
class _KnownProcesses:
    """The known processes of one GPU, and the time until which they are complete."""

    t_ns: int
    known_ns: int
    processes: dict[int, _Present] = field(default_factory=dict)


class Exits:
    """Records when processes end, on its own thread."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._epoll = select.epoll()
        self._ended: dict[int, int] = {}
        threading.Thread(target=self._run, name="exits", daemon=True).start()

    def watch(self, pidfd: int) -> None:
        """Watches for the end of this process."""
        self._epoll.register(pidfd, select.EPOLLIN | select.EPOLLONESHOT)

    def ended_ns(self, pidfd: int) -> int | None:
        """When a process ended; None: it has not."""
        ended_ns = self._ended.get(pidfd)
        if ended_ns is not None and not has_exited(pidfd):
            del self._ended[pidfd]  # recorded for another process with the same number
            return None
        return ended_ns

    def forget(self, pidfd: int) -> None:
        """Stops watching a process and closes its pidfd."""
        with contextlib.suppress(OSError):
            self._epoll.unregister(pidfd)
        self._ended.pop(pidfd, None)
        os.close(pidfd)

    def close(self) -> None:
        """Stops the thread at its next wake-up."""
        self._epoll.close()

    def _run(self) -> None:
        while True:
            try:
                for pidfd, _ in self._epoll.poll(1.0):
                    self._ended[pidfd] = self._clock_ns()
            except (OSError, ValueError):  # closed
                return


class Presence:
    """The processes of the listed GPUs. Belongs to one thread."""

    def __init__(
        self,
        add: Callable[[str, FactSpan], None],
        identities: Identities,
        exits: Exits,
        ignored_units: Iterable[str],
        boot_offset_ns: Callable[[], int],
    ) -> None:
        self._add = add
        self._identities = identities
        self._exits = exits
        self._ignored_units = tuple(ignored_units)
        self._boot_offset_ns = boot_offset_ns
        self._gpus: dict[str, _KnownProcesses] = {}

    def listed(
        self,
        uuid: str,
        t_ns: int,
        pids: Iterable[int],
        activity: Activity | None = None,
        charged: Callable[[Account], Account] = lambda account: account,
    ) -> None:
        """Processes a list of a GPU's processes."""
        known = self._gpus.get(uuid)
        if known is None or t_ns - known.t_ns > STALE_NS:
            self.stop(uuid, t_ns if known is None else known.t_ns)
            known = self._gpus[uuid] = _KnownProcesses(t_ns, t_ns)
        before_ns = known.t_ns
        self._add(uuid, FactSpan(Fact.LISTED, before_ns, t_ns))
        present = {*pids}
        # A process that used the GPU may have ended since.
        seen = _spans(known)
        ended = self._end(known, t_ns, present)
        for pid in sorted(present - known.processes.keys()):
            # Starts are known to 10 ms, and are not before the end of an earlier process with the
            # pid.
            self._begin(uuid, known, pid, max(before_ns, ended.get(pid, 0)), t_ns)
        known.t_ns = known.known_ns = t_ns
        if activity is not None:
            seen |= _spans(known)
            for use in activity.uses:
                self._use(uuid, activity, use, seen.get(use.pid), charged)
            newest_ns = max((use.end_ns for use in activity.uses), default=t_ns)
            known.known_ns = min(t_ns, max(newest_ns, t_ns - LATE_NS))

    def known_ns(self, uuid: str) -> int | None:
        """Time until which a GPU's processes and their use are known; None: they are not listed."""
        known = self._gpus.get(uuid)
        return None if known is None else known.known_ns

    def failed(self, uuid: str, t_ns: int) -> None:
        """Records that a GPU's processes could not be read."""
        known = self._gpus.get(uuid)
        since_ns = t_ns - LIST_NS if known is None else known.t_ns
        self.stop(uuid, since_ns)
        self._add(uuid, FactSpan(Fact.UNKNOWN, since_ns, t_ns, reason=LIST_FAILED))

    def stop(self, uuid: str, t_ns: int) -> None:
        """Stops tracking a GPU whose processes are no longer listed."""
        known = self._gpus.pop(uuid, None)
        if known is not None:
            self._end(known, t_ns, set())

    def suspended(self, t_ns: int) -> None:
        """Discards what is known from before a suspend."""
        for uuid in [*self._gpus]:
            self.stop(uuid, t_ns)

    def close(self) -> None:
        """Stops watching all processes."""
        for uuid, known in [*self._gpus.items()]:
            self.stop(uuid, known.t_ns)
        self._exits.close()

    def _begin(
        self, uuid: str, known: _KnownProcesses, pid: int, before_ns: int, t_ns: int
    ) -> None:
        identity = None
        # Most processes that are watched at a time; others count as unknown.
        if sum(len(gpu.processes) for gpu in self._gpus.values()) < 8192:
            identity = self._identities.identify(pid)
        if identity is None:
            claim = Claim(UNKNOWN_PROCESS)
            self._add(uuid, FactSpan(Fact.PRESENT, before_ns, t_ns, claim))
            return
        start_ns = identity.start_ticks * TICK_NS - self._boot_offset_ns()
        weight = 0 if is_ignored(identity.account, self._ignored_units) else 1
        begin_ns = min(t_ns, max(before_ns, start_ns))
        span = FactSpan(Fact.PRESENT, begin_ns, NEVER_NS, Claim(identity.account, weight))
        span.process = ChargedProcess(pid, identity.start_ticks)
        self._add(uuid, span)
        self._exits.watch(identity.pidfd)
        known.processes[pid] = _Present(span, identity.pidfd)

    def _use(
        self,
        uuid: str,
        activity: Activity,
        use: PidUse,
        present: FactSpan | None,
        charged: Callable[[Account], Account],
    ) -> None:
        begin_ns, end_ns = activity.begin_ns, use.end_ns
        known = None if present is None else present.claim
        account = charged(UNKNOWN_PROCESS if known is None else known.account)
        process = None if present is None else present.process
        if account == UNKNOWN_PROCESS:
            self._add(uuid, FactSpan(Fact.PRESENT, begin_ns, end_ns, Claim(account)))
        fact = Fact.USED if activity.measured else Fact.SLICES
        claim = Claim(account, use.weight)
        self._add(uuid, FactSpan(fact, begin_ns, end_ns, claim, process=process))

    def _end(self, known: _KnownProcesses, t_ns: int, present: set[int]) -> dict[int, int]:
        """Ends the spans of processes that exited or are no longer listed; returns the times by
        pid."""
        ends: dict[int, int] = {}
        for pid, one in [*known.processes.items()]:
            ended_ns = self._exits.ended_ns(one.pidfd)
            if pid in present and ended_ns is None:
                continue  # an ended process may still be listed, or its pid may have been reused
            # It ended or closed its context since the last list.
            one.span.end_ns = min(t_ns, ended_ns or t_ns)
            ends[pid] = one.span.end_ns
            self._exits.forget(one.pidfd)
            del known.processes[pid]
        return ends


def _spans(known: _KnownProcesses) -> dict[int, FactSpan]:
    return {pid: one.span for pid, one in known.processes.items()}

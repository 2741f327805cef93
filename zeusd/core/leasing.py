"""What a lease and a set are, and how sets wait: `control.ControlMachine` works with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from zeus_ipc.controls import ControlValue
from zeusd.core.model import Failure, Peer, Process, ProcessUsage

Done: TypeAlias = Callable[["Failure | ControlValue | None"], None]
"""Takes what came of a set: what the control holds now, None after an acquire, or why not."""

ZEUSD = Process(0, 0)
"""Stands for zeusd itself, where no process holds what is being restored."""


@dataclass(slots=True)
class Lease:
    """Who may write this control, and until when if it says nothing more."""

    holder: Process
    uid: int
    client: str
    since_ns: int
    ttl_ns: int
    expires_ns: int
    acquired: bool = False
    """Whether it was asked for by itself, and so outlives a set that failed."""
    forgiven: bool = False
    """Whether it was extended since the last heartbeat because zeusd itself stood still."""
    command: str = ""
    job: str = ""
    """See `model.Peer`."""
    asked: ControlValue | None = None
    """What the holder asked for last; the control may hold less under a ceiling, or a value that
    the driver made of it."""
    over: str = ""
    """The ceiling that this holder may exceed: an administrator's is replaced next."""
    recoveries: int = 0
    """How often a zeusd that was started again took it over since the last heartbeat. Each time the
    holder has half as long to say something: however often zeusd dies, a hung holder expires."""
    usage: ProcessUsage | None = None
    """What the holder was doing when it was last looked at, since its last heartbeat."""
    heard_ns: int = 0
    """When the holder last sent a heartbeat."""
    profile: tuple[tuple[int, ...], tuple[float, ...]] | None = None
    """What the holder has published: power limits, mW, and its relative speed at each."""
    measuring: bool = False
    """Whether the holder says that it measures and needs its highest limit."""
    needs_mw: int | None = None
    """The limit below which it says that it misses a latency objective; None: it has none."""

    @property
    def name(self) -> str:
        """Tells this lease from others in logs."""
        return f"{self.holder.pid}-{self.since_ns}"


@dataclass(slots=True, eq=False)
class Set:
    """A set that waits for its turn. `value` None takes the lease and writes nothing."""

    peer: Peer
    client: str
    value: ControlValue | None
    deadline_ns: int
    ttl_ns: int
    block: bool
    done: Done
    over: str = ""
    """See `Lease.over`."""


MAX_WAITING = 32
"""Sets that may wait for one control."""


class SetQueue(deque[Set]):
    """Of several sets that nobody waits for, only the newest is kept."""

    def add(self, item: Set) -> list[Set]:
        """Adds a set. Returns those that are not wanted any more because of it."""
        superseded = [] if item.block else self._take(item.peer.process, unwaited=True)
        self.append(item)
        return superseded

    def take(self, process: Process, client: str | None = None) -> list[Set]:
        """Takes those of a process, or of one client object in it."""
        return self._take(process, client)

    def take_all(self) -> list[Set]:
        """Takes all."""
        sets = [*self]
        self.clear()
        return sets

    def _take(
        self, process: Process, client: str | None = None, unwaited: bool = False
    ) -> list[Set]:
        taken = [
            item
            for item in self
            if item.peer.process == process
            and client in (None, item.client)
            and not (unwaited and (item.block or item.value is None))
        ]
        for item in taken:
            self.remove(item)
        return taken

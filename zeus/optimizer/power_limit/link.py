"""Communication between the processes that train together and the leader: no call ever waits long.
With torch.distributed they leave messages in the key-value store of the process group. This is not
a collective: a process that lags, is gone, or makes no steps blocks no other, and it works with any
backend.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter

from zeus.optimizer.power_limit.leader import SILENCE_S, SILENCE_STEPS, Leader
from zeus.optimizer.power_limit.messages import COMMAND, MESSAGE, Command, Message, Trouble
from zeus.utils import framework
from zeus_ipc.overriding import override

log = logging.getLogger(__name__)

STORE_TIMEOUT = timedelta(seconds=10)
BEAT = 10
"""Calls of `hear` between heartbeats of rank 0."""
_parties = itertools.count()


class LeaderError(Exception):
    """The other processes cannot be reached: one sentence that says why."""


class LeaderConnection(ABC):
    """One process's connection to the leader."""

    leader: Leader | None
    """The leader, if it is in this process."""

    @abstractmethod
    def tell(self, message: Message) -> None:
        """Sends a message to the leader.

        Raises:
            LeaderError: It cannot be reached.
        """

    @abstractmethod
    def hear(self, now_s: float, step: int) -> list[Command]:
        """Returns the leader's commands since the last call.

        Raises:
            LeaderError: It cannot be reached.
        """

    def leave(self, reason: str, now_s: float, step: int) -> None:
        """Notifies the leader, and through it the others, that this process no longer searches.
        Never raises.
        """
        try:
            self.tell(Trouble(reason=reason))
            self.hear(now_s, step)  # the leader's answer, for the others
        except LeaderError as error:
            log.info("the other processes will miss this one: %s", error)


class Alone(LeaderConnection):
    """A process that is its own leader."""

    def __init__(self, leader: Leader) -> None:
        self.leader: Leader = leader

    @override
    def tell(self, message: Message) -> None:
        self.leader.take(0, message)

    @override
    def hear(self, now_s: float, step: int) -> list[Command]:
        self.leader.tick(now_s, step)
        return self.leader.commands()


class Together(LeaderConnection):
    """One of several processes, over a key-value store."""

    def __init__(self, store: Any, rank: int, world: int, leader: Leader | None) -> None:
        self._store = store
        self._rank = rank
        self.leader = leader
        self._messages = 0  # messages left by this process; on rank 0, by all
        self._heard = 0
        self._taken = [0] * world
        self._calls = 0
        self._beats = -1
        self._beat_at = (0.0, 0)  # seconds and calls, when rank 0 was last known to live

    @override
    def tell(self, message: Message) -> None:
        if self.leader is not None:
            self.leader.take(self._rank, message)
            return
        self._set(f"{self._rank}/{self._messages}", MESSAGE.dump_json(message))
        self._messages += 1
        self._count("messages", 1)

    @override
    def hear(self, now_s: float, step: int) -> list[Command]:
        self._calls += 1
        if self.leader is None:
            new: list[Command] = []
            while (note := self._note(f"command/{self._heard}")) is not None:
                new.append(_read(COMMAND, note))
                self._heard += 1
            if not new:
                self._watch_leader(now_s)
            return new
        if self._calls % BEAT == 1:
            self._count("alive", 1)
        self.leader.tick(now_s, step)
        self._collect(self.leader)
        self.leader.look()
        commands = self.leader.commands()
        for command in commands:
            self._set(f"command/{self._heard}", COMMAND.dump_json(command))
            self._heard += 1
        return commands

    def _watch_leader(self, now_s: float) -> None:
        """Raises LeaderError if rank 0 has been silent for long."""
        if self._calls % BEAT != 1:
            return
        beats = self._count("alive", 0)
        if beats != self._beats:
            self._beats, self._beat_at = beats, (now_s, self._calls)
        since_s, since_calls = self._beat_at
        if now_s - since_s > SILENCE_S and self._calls - since_calls > SILENCE_STEPS:
            raise LeaderError(f"rank 0 has not been heard of for {now_s - since_s:.0f} s")

    def _collect(self, leader: Leader) -> None:
        messages = self._count("messages", 0)
        if messages == self._messages:
            return
        self._messages = messages
        others = [rank for rank in range(len(self._taken)) if rank != self._rank]
        for rank in others:
            while (note := self._note(f"{rank}/{self._taken[rank]}")) is not None:
                self._taken[rank] += 1
                leader.take(rank, _read(MESSAGE, note))

    def _note(self, key: str) -> bytes | None:
        try:
            if not self._store.check([key]):
                return None
            return bytes(self._store.get(key))
        except RuntimeError as error:  # as torch's own errors are
            raise LeaderError(f"the store of torch.distributed does not answer ({error})") from None

    def _count(self, key: str, more: int) -> int:
        """Counts, and says how far: `messages`, notes that others have left, and rank 0's steps."""
        try:
            return int(self._store.add(key, more))
        except RuntimeError as error:
            raise LeaderError(f"the store of torch.distributed does not answer ({error})") from None

    def _set(self, key: str, note: bytes) -> None:
        try:
            self._store.set(key, note)
        except RuntimeError as error:
            raise LeaderError(f"the store of torch.distributed does not answer ({error})") from None


def _read(kind: TypeAdapter[Any], note: bytes) -> Any:
    try:
        return kind.validate_json(note)
    except ValueError:
        raise LeaderError(
            "another process of this job has another version of zeus; install the same on all nodes"
        ) from None


def connect(leader: Leader, world: int) -> LeaderConnection:
    """Returns this process's connection; uses the given leader on rank 0.

    All processes must call it the same number of times.

    Raises:
        LeaderError: There is no store through which to reach the others.
    """
    if world == 1:
        return Alone(leader)
    store = framework.store(STORE_TIMEOUT)
    if store is None:
        raise LeaderError("torch.distributed has no store that the processes could meet through")
    rank = framework.rank()
    prefixed = framework.prefixed(f"zeus/power_limit/{next(_parties)}", store)
    return Together(prefixed, rank, world, leader if rank == 0 else None)

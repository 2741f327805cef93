"""How the processes that train together reach the leader, and it them: no call ever waits long.

Under torch.distributed they leave notes in the store that the processes have met through. That is
no collective: a process that is behind, gone, or makes no steps keeps nobody waiting, and it works
beside any backend.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any

from zeus.optimizer.power_limit.leader import COMMAND, MESSAGE, Command, Leader, Message
from zeus.utils import framework

log = logging.getLogger(__name__)

STORE_TIMEOUT = timedelta(seconds=10)
_parties = itertools.count()


class LinkError(Exception):
    """The other processes cannot be reached: one sentence that says why."""


class Link(ABC):
    """One process's way to the leader."""

    leader: Leader | None
    """The leader, in the process where it is."""

    @abstractmethod
    def tell(self, message: Message) -> None:
        """Tells the leader something.

        Raises:
            LinkError: It cannot be reached.
        """

    @abstractmethod
    def hear(self, now_s: float, step: int) -> list[Command]:
        """What the leader has commanded since.

        Args:
            now_s: Monotonic seconds.
            step: Training steps that this process has begun.

        Raises:
            LinkError: It cannot be reached.
        """


class Alone(Link):
    """A process that is its own leader."""

    def __init__(self, leader: Leader) -> None:
        self.leader: Leader = leader

    def tell(self, message: Message) -> None:
        """See `Link`."""
        self.leader.take(0, message)

    def hear(self, now_s: float, step: int) -> list[Command]:
        """See `Link`."""
        self.leader.tick(now_s, step)
        return self.leader.commands()


class Together(Link):
    """One of several processes, over a key-value store.

    Args:
        store: A `torch.distributed.Store`.
        rank: This process's number.
        world: How many there are.
        leader: The leader, on rank 0.
    """

    def __init__(self, store: Any, rank: int, world: int, leader: Leader | None) -> None:
        self._store = store
        self._rank = rank
        self.leader = leader
        self._told = 0  # notes left by this process; on rank 0, by all
        self._heard = 0
        self._taken = [0] * world

    def tell(self, message: Message) -> None:
        """See `Link`."""
        if self.leader is not None:
            self.leader.take(self._rank, message)
            return
        self._set(f"{self._rank}/{self._told}", MESSAGE.dump_json(message))
        self._told += 1
        self._count(1)

    def hear(self, now_s: float, step: int) -> list[Command]:
        """See `Link`."""
        if self.leader is None:
            new: list[Command] = []
            while (note := self._note(f"command/{self._heard}")) is not None:
                new.append(COMMAND.validate_json(note))
                self._heard += 1
            return new
        self._collect(self.leader)
        self.leader.tick(now_s, step)
        commands = self.leader.commands()
        for command in commands:
            self._set(f"command/{self._heard}", COMMAND.dump_json(command))
            self._heard += 1
        return commands

    def _collect(self, leader: Leader) -> None:
        told = self._count(0)
        if told == self._told:
            return
        self._told = told
        others = [rank for rank in range(len(self._taken)) if rank != self._rank]
        for rank in others:
            while (note := self._note(f"{rank}/{self._taken[rank]}")) is not None:
                self._taken[rank] += 1
                leader.take(rank, MESSAGE.validate_json(note))

    def _note(self, key: str) -> bytes | None:
        try:
            if not self._store.check([key]):
                return None
            return bytes(self._store.get(key))
        except RuntimeError as error:  # as torch's own errors are
            raise LinkError(f"the store of torch.distributed does not answer ({error})") from None

    def _count(self, more: int) -> int:
        """How many notes all have left: one question, whether there is something to look for."""
        try:
            return int(self._store.add("told", more))
        except RuntimeError as error:
            raise LinkError(f"the store of torch.distributed does not answer ({error})") from None

    def _set(self, key: str, note: bytes) -> None:
        try:
            self._store.set(key, note)
        except RuntimeError as error:
            raise LinkError(f"the store of torch.distributed does not answer ({error})") from None


def connect(leader: Leader, world: int) -> Link:
    """This process's link; the leader given is used on rank 0.

    All processes must call it the same number of times.

    Raises:
        LinkError: There is no store to reach the others through.
    """
    if world == 1:
        return Alone(leader)
    store = framework.store(STORE_TIMEOUT)
    if store is None:
        raise LinkError("torch.distributed has no store that the processes could meet through")
    rank = framework.rank()
    prefixed = framework.prefixed(f"zeus/power_limit/{next(_parties)}", store)
    return Together(prefixed, rank, world, leader if rank == 0 else None)

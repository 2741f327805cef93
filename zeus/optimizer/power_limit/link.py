"""Communication between the processes that train together and the leader, through notes: no call
ever waits long.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from typing import Any

from pydantic import TypeAdapter

from zeus.optimizer.power_limit.leader import SILENCE_S, SILENCE_STEPS, Leader
from zeus.optimizer.power_limit.messages import COMMAND, MESSAGE, Command, Message, Trouble
from zeus.utils import framework
from zeus.utils.framework import Notes, RanksUnreachable
from zeus_ipc.overriding import override

log = logging.getLogger(__name__)

BEAT = 10
"""Calls of `hear` between heartbeats of rank 0."""
_parties = itertools.count()


class LeaderConnection(ABC):
    """One process's connection to the leader."""

    leader: Leader | None
    """The leader, if it is in this process."""

    @abstractmethod
    def tell(self, message: Message) -> None:
        """Sends a message to the leader.

        Raises:
            RanksUnreachable: It cannot be reached.
        """

    @abstractmethod
    def hear(self, now_s: float, step: int) -> list[Command]:
        """Returns the leader's commands since the last call.

        Raises:
            RanksUnreachable: It cannot be reached.
        """

    def leave(self, reason: str, now_s: float, step: int) -> None:
        """Notifies the leader, and through it the others, that this process no longer searches.
        Never raises.
        """
        try:
            self.tell(Trouble(reason=reason))
            self.hear(now_s, step)  # the leader's answer, for the others
        except RanksUnreachable as error:
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
    """One of several processes."""

    def __init__(self, notes: Notes, rank: int, world: int, leader: Leader | None) -> None:
        self._notes = notes
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
        self._notes.set(f"{self._rank}/{self._messages}", MESSAGE.dump_json(message))
        self._messages += 1
        self._notes.add("messages", 1)

    @override
    def hear(self, now_s: float, step: int) -> list[Command]:
        self._calls += 1
        if self.leader is None:
            new: list[Command] = []
            while (note := self._notes.get(f"command/{self._heard}")) is not None:
                new.append(_read(COMMAND, note))
                self._heard += 1
            if not new:
                self._watch_leader(now_s)
            return new
        if self._calls % BEAT == 1:
            self._notes.add("alive", 1)
        self.leader.tick(now_s, step)
        self._collect(self.leader)
        self.leader.look()
        commands = self.leader.commands()
        for command in commands:
            self._notes.set(f"command/{self._heard}", COMMAND.dump_json(command))
            self._heard += 1
        return commands

    def _watch_leader(self, now_s: float) -> None:
        """Raises RanksUnreachable if rank 0 has been silent for long."""
        if self._calls % BEAT != 1:
            return
        beats = self._notes.add("alive", 0)
        if beats != self._beats:
            self._beats, self._beat_at = beats, (now_s, self._calls)
        since_s, since_calls = self._beat_at
        if now_s - since_s > SILENCE_S and self._calls - since_calls > SILENCE_STEPS:
            raise RanksUnreachable(f"rank 0 has not been heard of for {now_s - since_s:.0f} s")

    def _collect(self, leader: Leader) -> None:
        messages = self._notes.add("messages", 0)
        if messages == self._messages:
            return
        self._messages = messages
        others = [rank for rank in range(len(self._taken)) if rank != self._rank]
        for rank in others:
            while (note := self._notes.get(f"{rank}/{self._taken[rank]}")) is not None:
                self._taken[rank] += 1
                leader.take(rank, _read(MESSAGE, note))


def _read(kind: TypeAdapter[Any], note: bytes) -> Any:
    try:
        return kind.validate_json(note)
    except ValueError:
        raise RanksUnreachable(
            "another process of this job has another version of zeus; install the same on all nodes"
        ) from None


def connect(leader: Leader, world: int) -> LeaderConnection:
    """Returns this process's connection; uses the given leader on rank 0.

    All processes must call it the same number of times.

    Raises:
        RanksUnreachable: There is no store through which to reach the others.
    """
    if world == 1:
        return Alone(leader)
    notes = framework.notes(f"zeus/power_limit/{next(_parties)}")
    if notes is None:
        raise RanksUnreachable(
            "torch.distributed has no store that the processes could meet through"
        )
    rank = framework.rank()
    return Together(notes, rank, world, leader if rank == 0 else None)

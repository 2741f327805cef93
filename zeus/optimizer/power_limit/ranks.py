"""How the processes that train together reach the leader: through notes (`framework.Notes`), so
that no call ever waits long. A single process has its leader at hand.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

from pydantic import TypeAdapter

from zeus.optimizer.power_limit.leader import SILENCE_S, SILENCE_STEPS, Leader
from zeus.optimizer.power_limit.messages import COMMAND, MESSAGE, Command, Message, Trouble
from zeus.utils import framework
from zeus.utils.framework import Notes, RanksUnreachable

log = logging.getLogger(__name__)

BEAT = 10
"""Calls of `hear` between heartbeats of rank 0."""
_parties = itertools.count()


class Ranks:
    """One process's connection to the leader.

    Every call raises RanksUnreachable if the others cannot be reached.

    Attributes:
        world: Number of processes that train together.
        leader: The leader, if it is in this process.
    """

    def __init__(self, notes: Notes | None, rank: int, world: int, leader: Leader | None) -> None:
        self.world = world
        self.leader = leader
        self._notes = notes
        self._rank = rank
        self._messages = 0  # messages left by this process; on rank 0, by all
        self._heard = 0
        self._taken = [0] * world
        self._calls = 0
        self._beats = -1
        self._beat_at = (0.0, 0)  # seconds and calls, when rank 0 was last known to live

    def tell(self, message: Message) -> None:
        """Sends a message to the leader."""
        if self.leader is not None:
            self.leader.take(self._rank, message)
        elif self._notes is not None:
            self._notes.set(f"{self._rank}/{self._messages}", MESSAGE.dump_json(message))
            self._messages += 1
            self._notes.add("messages", 1)

    def hear(self, now_s: float, step: int) -> list[Command]:
        """Returns the leader's commands since the last call."""
        leader, notes = self.leader, self._notes
        self._calls += 1
        beats = self._calls % BEAT == 1
        if leader is not None:
            leader.tick(now_s, step)
        if notes is None:
            return [] if leader is None else leader.commands()
        if leader is None:
            new: list[Command] = []
            while (note := notes.get(f"command/{self._heard}")) is not None:
                new.append(_read(COMMAND, note))
                self._heard += 1
            if beats and not new:
                self._watch_leader(notes, now_s)
            return new
        if beats:
            notes.add("alive", 1)
        self._collect(notes, leader)
        leader.look()
        commands = leader.commands()
        for command in commands:
            notes.set(f"command/{self._heard}", COMMAND.dump_json(command))
            self._heard += 1
        return commands

    def leave(self, reason: str, now_s: float, step: int) -> None:
        """Notifies the leader, and through it the others, that this process no longer searches.
        Never raises.
        """
        try:
            self.tell(Trouble(reason=reason))
            self.hear(now_s, step)  # the leader's answer, for the others
        except RanksUnreachable as error:
            log.info("the other processes will miss this one: %s", error)

    def _watch_leader(self, notes: Notes, now_s: float) -> None:
        """Raises RanksUnreachable if rank 0 has been silent for long."""
        beats = notes.add("alive", 0)
        if beats != self._beats:
            self._beats, self._beat_at = beats, (now_s, self._calls)
        since_s, since_calls = self._beat_at
        if now_s - since_s > SILENCE_S and self._calls - since_calls > SILENCE_STEPS:
            raise RanksUnreachable(f"rank 0 has not been heard of for {now_s - since_s:.0f} s")

    def _collect(self, notes: Notes, leader: Leader) -> None:
        messages = notes.add("messages", 0)
        if messages == self._messages:
            return
        self._messages = messages
        for rank in range(self.world):
            while rank != self._rank and (note := notes.get(f"{rank}/{self._taken[rank]}")):
                self._taken[rank] += 1
                leader.take(rank, _read(MESSAGE, note))


def _read(kind: TypeAdapter[Any], note: bytes) -> Any:
    try:
        return kind.validate_json(note)
    except ValueError:
        raise RanksUnreachable(
            "another process of this job has another version of zeus; install the same on all nodes"
        ) from None


def connect(leader: Leader, world: int) -> Ranks:
    """Returns this process's connection; uses the given leader on rank 0.

    All processes must call it the same number of times.

    Raises:
        RanksUnreachable: There is no store through which to reach the others.
    """
    if world == 1:
        return Ranks(None, 0, world, leader)
    notes = framework.notes(f"zeus/power_limit/{next(_parties)}")
    if notes is None:
        raise RanksUnreachable(
            "torch.distributed has no store that the processes could meet through"
        )
    rank = framework.rank()
    return Ranks(notes, rank, world, leader if rank == 0 else None)

"""The states of one control, as a table that is executed.

`TABLE[state][event]` is the next state; an event that a state does not list is a bug in zeusd, and
raises. `control.Control` decides which event comes next and keeps the lease, the values and the
timers; only this table changes the state. The table in docs/explain/controls.md is generated
from it.
"""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The meaning of a state to clients."""

    FREE = "free"
    HELD = "held"
    RESTORING = "restoring"


class State(Enum):
    """The states of a control."""

    __hash__ = object.__hash__  # Enum's own hash calls Python code at each look-up

    FREE = "nobody holds it and nothing is pending"
    TAKEN = "held; what the device holds has not been read yet"
    READING = "held; it is being read before the first write"
    HELD = "held; no device call is in flight"
    LOOKING = "held; it is being read because a ceiling moved"
    WRITING = "held; a value is being written"
    ENDING = "the lease has ended; a device call from before is in flight"
    CHECKING = "being restored: it is read first"
    RESTORING = "being restored: a value is being written and read back"
    FITTING = "being restored: the range is read, to find out what the device takes"
    PENDING = "a restore failed and waits for its next attempt"
    AWAY = "the device is out of reach; nothing is pending"
    AWAY_PENDING = "the device is out of reach; a restore is pending"
    AWAY_BUSY = "the same, and a device call from before has not returned"


class Event(Enum):
    """The events of a control."""

    __hash__ = object.__hash__

    TAKE = "a process takes the lease"
    RECOVER = "the journal says who holds it"
    READ = "the first set begins: what the device holds is read"
    LOOK = "a ceiling moved: what the device holds is read"
    KNOWN = "it has been read"
    UNKNOWN = "it could not be read"
    WRITE = "a set is written"
    WRITTEN = "the device answered the write"
    DROP = "the lease was for one set only, which changed nothing"
    END = "the lease ends while a device call is in flight"
    CHECK = "a restore begins, or begins again, by reading"
    RESTORE = "the restore target is written"
    FIT = "the restore asks for the device's range"
    FAIL = "an attempt to restore failed"
    DONE = "nothing is left to restore"
    LEAVE = "the device goes out of reach"
    ANSWER = "the device call from before returned"
    BACK = "the device is in reach again"


S, E = State, Event

TABLE: dict[State, dict[Event, State]] = {
    S.FREE: {
        E.TAKE: S.TAKEN,
        E.RECOVER: S.HELD,
        E.CHECK: S.CHECKING,
        E.RESTORE: S.RESTORING,
        E.LEAVE: S.AWAY,
    },
    S.TAKEN: {
        E.READ: S.READING,
        E.WRITE: S.WRITING,
        E.DROP: S.FREE,
        E.CHECK: S.CHECKING,
        E.RESTORE: S.RESTORING,
        E.DONE: S.FREE,
    },
    S.READING: {E.KNOWN: S.HELD, E.UNKNOWN: S.TAKEN, E.END: S.ENDING},
    S.HELD: {
        E.LOOK: S.LOOKING,
        E.WRITE: S.WRITING,
        E.DROP: S.FREE,
        E.CHECK: S.CHECKING,
        E.RESTORE: S.RESTORING,
        E.DONE: S.FREE,
    },
    S.LOOKING: {E.KNOWN: S.HELD, E.UNKNOWN: S.HELD, E.END: S.ENDING},
    S.WRITING: {E.WRITTEN: S.HELD, E.END: S.ENDING},
    S.ENDING: {
        E.CHECK: S.CHECKING,
        E.RESTORE: S.RESTORING,
        E.DONE: S.FREE,
        E.LEAVE: S.AWAY_BUSY,
    },
    S.CHECKING: {
        E.CHECK: S.CHECKING,
        E.FIT: S.FITTING,
        E.RESTORE: S.RESTORING,
        E.FAIL: S.PENDING,
        E.DONE: S.FREE,
        E.LEAVE: S.AWAY_BUSY,
    },
    S.RESTORING: {
        E.CHECK: S.CHECKING,
        E.RESTORE: S.RESTORING,
        E.FIT: S.FITTING,
        E.FAIL: S.PENDING,
        E.DONE: S.FREE,
        E.LEAVE: S.AWAY_BUSY,
    },
    S.FITTING: {
        E.CHECK: S.CHECKING,
        E.RESTORE: S.RESTORING,
        E.FAIL: S.PENDING,
        E.DONE: S.FREE,
        E.LEAVE: S.AWAY_BUSY,
    },
    S.PENDING: {
        E.CHECK: S.CHECKING,
        E.RESTORE: S.RESTORING,
        E.DONE: S.FREE,
        E.LEAVE: S.AWAY_PENDING,
    },
    S.AWAY: {E.BACK: S.FREE},
    S.AWAY_PENDING: {E.BACK: S.PENDING},
    S.AWAY_BUSY: {E.ANSWER: S.AWAY_PENDING, E.BACK: S.ENDING},
}

PHASES: dict[State, Phase] = {
    **dict.fromkeys((S.FREE, S.AWAY), Phase.FREE),
    **dict.fromkeys((S.TAKEN, S.READING, S.HELD, S.LOOKING, S.WRITING), Phase.HELD),
    **dict.fromkeys(
        (
            *(S.ENDING, S.CHECKING, S.RESTORING, S.FITTING, S.PENDING),
            *(S.AWAY_PENDING, S.AWAY_BUSY),
        ),
        Phase.RESTORING,
    ),
}

IN_FLIGHT = frozenset(
    {
        *(S.READING, S.LOOKING, S.WRITING, S.ENDING),
        *(S.CHECKING, S.RESTORING, S.FITTING, S.AWAY_BUSY),
    }
)
"""States in which a device call is in flight; there is at most one."""

READY = frozenset({S.FREE, S.TAKEN, S.HELD})
"""States in which a waiting set is made."""

OUT_OF_REACH = frozenset({S.AWAY, S.AWAY_PENDING, S.AWAY_BUSY})
"""States in which no device call may start."""


class Lifecycle:
    """The state of one control.

    Attributes:
        state: The present one.
        phase: Its meaning to clients.
    """

    __slots__ = ("phase", "state")

    def __init__(self) -> None:
        self.state = State.FREE
        self.phase = Phase.FREE

    def on(self, event: Event) -> None:
        """Makes one transition.

        Raises:
            AssertionError: The table does not have it.
        """
        after = TABLE[self.state].get(event)
        assert after is not None, f"{event.name} in {self.state.name} is not in the table"
        self.state = after
        self.phase = PHASES[after]

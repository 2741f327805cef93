"""The states of one control, as a table that is executed.

`TABLE[state][event]` is the next state; an event that a state does not list is a bug in zeusd, and
raises. `control.ControlMachine` decides which event comes next; only this table changes the state.
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
    HELD = "held; no device call is in flight"
    WORKING = "held; it is being read or written"
    ENDING = "the lease has ended; a device call from before is in flight"
    RESTORING = "being restored: it is being read or written"
    PENDING = "a restore failed, or may be undone by an earlier write, and is tried again"
    AWAY = "the device is out of reach; nothing is pending"
    AWAY_PENDING = "the device is out of reach; a restore is pending"
    AWAY_BUSY = "the same, and a device call from before has not returned"


class ControlEvent(Enum):
    """The events of a control."""

    __hash__ = object.__hash__

    TAKE = "a process takes the lease, or it is taken over from the journal"
    CALL = "a set, or a ceiling that moved, calls the device"
    ANSWER = "the device call returned"
    DROP = "the lease was for one set only, which changed nothing"
    END = "the lease ends while a device call is in flight"
    RESTORE = "an attempt to restore begins"
    WAIT = "the attempt did not settle it"
    DONE = "nothing is left to restore"
    LEAVE = "the device goes out of reach"
    BACK = "the device is in reach again"


S, E = State, ControlEvent

TABLE: dict[State, dict[ControlEvent, State]] = {
    S.FREE: {E.TAKE: S.HELD, E.RESTORE: S.RESTORING, E.LEAVE: S.AWAY},
    S.HELD: {E.CALL: S.WORKING, E.DROP: S.FREE, E.RESTORE: S.RESTORING},
    S.WORKING: {E.ANSWER: S.HELD, E.END: S.ENDING},
    S.ENDING: {E.RESTORE: S.RESTORING, E.LEAVE: S.AWAY_BUSY},
    S.RESTORING: {E.WAIT: S.PENDING, E.DONE: S.FREE, E.LEAVE: S.AWAY_BUSY},
    S.PENDING: {E.RESTORE: S.RESTORING, E.LEAVE: S.AWAY_PENDING},
    S.AWAY: {E.BACK: S.FREE},
    S.AWAY_PENDING: {E.BACK: S.PENDING},
    S.AWAY_BUSY: {E.ANSWER: S.AWAY_PENDING, E.BACK: S.ENDING},
}

PHASES: dict[State, Phase] = {
    **dict.fromkeys((S.FREE, S.AWAY), Phase.FREE),
    **dict.fromkeys((S.HELD, S.WORKING), Phase.HELD),
    **dict.fromkeys(
        (S.ENDING, S.RESTORING, S.PENDING, S.AWAY_PENDING, S.AWAY_BUSY), Phase.RESTORING
    ),
}

IN_FLIGHT = frozenset({S.WORKING, S.ENDING, S.RESTORING, S.AWAY_BUSY})
"""States in which a device call is in flight; there is at most one."""

READY = frozenset({S.FREE, S.HELD})
"""States in which a waiting set is made."""

OUT_OF_REACH = frozenset({S.AWAY, S.AWAY_PENDING, S.AWAY_BUSY})
"""States in which no device call may start."""


class Lifecycle:
    """The state of one control."""

    __slots__ = ("phase", "state")

    def __init__(self) -> None:
        self.state = State.FREE
        self.phase = Phase.FREE

    def on(self, event: ControlEvent) -> None:
        """Makes one transition.

        Raises:
            AssertionError: The table does not have it.
        """
        after = TABLE[self.state].get(event)
        assert after is not None, f"{event.name} in {self.state.name} is not in the table"
        self.state = after
        self.phase = PHASES[after]

"""Collects what the core wants done while it handles one event."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from zeusd.core.deadlines import Deadlines
from zeusd.core.effects import Effect, Note
from zeusd.core.trail import Trail

Continuation: TypeAlias = Callable[[object], None]
"""Takes a device call's result: a value, None after a write, or a `Failure`."""


class Outbox:
    """Effects of the present event, and what goes on when a device call returns.

    Attributes:
        now_ns: Time of the present event.
        due_ns: When something wants to be woken, by who it is.
        trail: What was noted so far.
        boot_offset_ns: CLOCK_BOOTTIME less CLOCK_MONOTONIC: how long the machine slept.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.due_ns: Deadlines[object] = Deadlines()
        self.trail = Trail()
        self.boot_offset_ns = 0
        self._effects: list[Effect] = []
        self._next_ticket = 1
        self._pending: dict[int, Continuation] = {}

    def add(self, effect: Effect) -> None:
        """Appends an effect."""
        if isinstance(effect, Note):
            self.trail.note(self.now_ns, effect)
        self._effects.append(effect)

    def ticket(self, then: Continuation) -> int:
        """A new ticket; `then` gets the result of the device call that carries it."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._pending[ticket] = then
        return ticket

    def finish(self, ticket: int, result: object) -> None:
        """A device call returned."""
        then = self._pending.pop(ticket, None)
        if then is not None:
            then(result)

    @property
    def in_flight(self) -> int:
        """Device calls that have not returned."""
        return len(self._pending)

    def take(self) -> list[Effect]:
        """The effects so far, in order; the outbox is empty afterwards."""
        effects, self._effects = self._effects, []
        return effects

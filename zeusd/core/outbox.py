"""Collects the effects of one event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from zeusd.core.audit_log import AuditLog
from zeusd.core.deadlines import Deadlines
from zeusd.core.effects import Effect, Note

Continuation: TypeAlias = Callable[[object], None]
"""Receives a device call's result: a value, None after a write, or a `Failure`."""


class Outbox:
    """Effects of the present event, and continuations of device calls.

    Attributes:
        boot_offset_ns: CLOCK_BOOTTIME minus CLOCK_MONOTONIC: how long the machine was suspended.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.due_ns: Deadlines[object] = Deadlines()
        self.audit_log = AuditLog()
        self.boot_offset_ns = 0
        self._effects: list[Effect] = []
        self._next_ticket = 1
        self._pending: dict[int, Continuation] = {}

    def add(self, effect: Effect) -> None:
        """Appends an effect. A warning that repeats is logged when its number has doubled."""
        if isinstance(effect, Note):
            count = self.audit_log.note(self.now_ns, effect)
            if effect.warning and count > 1:
                if count & (count - 1):
                    return
                effect = replace(effect, fields={**effect.fields, "count": count})
        self._effects.append(effect)

    def ticket(self, then: Continuation) -> int:
        """A new ticket; `then` receives the result of the device call with it."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._pending[ticket] = then
        return ticket

    def finish(self, ticket: int, result: object) -> None:
        """Handles a device call that returned."""
        then = self._pending.pop(ticket, None)
        if then is not None:
            then(result)

    @property
    def in_flight(self) -> int:
        """Device calls in flight."""
        return len(self._pending)

    def take(self) -> list[Effect]:
        """Removes and returns the effects, in order."""
        effects, self._effects = self._effects, []
        return effects

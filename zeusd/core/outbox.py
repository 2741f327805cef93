"""Collects the effects of one event, and knows what is due when."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from zeus_ipc.controls import Control, ControlValue, describe
from zeusd.core.audit_log import AuditLog
from zeusd.core.effects import Effect, Note
from zeusd.core.model import Failure, Peer

if TYPE_CHECKING:
    from zeusd.core.holding import HeldLease

K = TypeVar("K", bound=Hashable)

Continuation: TypeAlias = Callable[[object], None]
"""Receives a device call's result: a value, None after a write, or a `Failure`."""

Then: TypeAlias = Callable[[], None]


class Deadlines(dict[K, int]):
    """Times by key. The earliest is searched for only after it has changed."""

    _earliest_ns: int | None = None

    def __setitem__(self, key: K, due_ns: int) -> None:
        before_ns = self.get(key)
        super().__setitem__(key, due_ns)
        earliest_ns = self._earliest_ns
        if earliest_ns is not None:
            if due_ns <= earliest_ns:
                self._earliest_ns = due_ns
            elif before_ns == earliest_ns:
                self._earliest_ns = None

    def drop(self, key: K) -> int | None:
        """Removes a key. Returns its due time; None: never."""
        before_ns = self.pop(key, None)
        if before_ns is not None and before_ns == self._earliest_ns:
            self._earliest_ns = None
        return before_ns

    def earliest_ns(self) -> int | None:
        """The earliest due time; None: there is none."""
        if self._earliest_ns is None and self:
            self._earliest_ns = min(self.values())
        return self._earliest_ns

    def due(self, now_ns: int) -> list[K]:
        """The keys that are due at the time of the call."""
        return [key for key, due_ns in self.items() if due_ns <= now_ns]


class Outbox:
    """Effects of the present event, continuations of device calls, and what is due later.

    Attributes:
        due_ns: What to call when, CLOCK_MONOTONIC.
        boot_offset_ns: CLOCK_BOOTTIME minus CLOCK_MONOTONIC: how long the machine was suspended.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.due_ns: Deadlines[Then] = Deadlines()
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

    def note(self, event: str, warning: bool = False, **fields: Any) -> None:
        """Writes a record to the audit log."""
        self.add(Note(event, fields, warning))

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

    def run_due(self) -> None:
        """Calls what is due."""
        for then in self.due_ns.due(self.now_ns):
            if self.due_ns.get(then, self.now_ns + 1) <= self.now_ns:  # not moved by another
                self.due_ns.drop(then)
                then()

    @property
    def in_flight(self) -> int:
        """Device calls in flight."""
        return len(self._pending)

    def take(self) -> list[Effect]:
        """Removes and returns the effects, in order."""
        effects, self._effects = self._effects, []
        return effects


def after_all(count: int, then: Then) -> Then:
    """A function whose call number `count` calls `then`; if that is 0, it is called now."""
    left = count

    def one() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            then()

    if not count:
        then()
    return one


class ControlAudit:
    """Writes records about one control, and the user who caused them."""

    def __init__(self, gpu: str, control: Control, out: Outbox) -> None:
        self._where = {"gpu": gpu, "control": control.value}
        self._control = control
        self._out = out

    def note(
        self, event: str, by: HeldLease | Peer | None = None, warning: bool = False, **fields: Any
    ) -> None:
        """Writes a record."""
        who = {} if by is None else by.fields
        self._out.note(event, warning, **{**self._where, **who, **fields})

    def values(
        self,
        event: str,
        old: ControlValue | None,
        new: ControlValue,
        by: HeldLease | Peer | None = None,
        warning: bool = False,
        **more: str,
    ) -> None:
        """Writes a record about two values; None: it was not known."""
        before = "unknown" if old is None else describe(self._control, old)
        self.note(event, by, warning, old=before, new=describe(self._control, new), **more)

    def outside(self, old: ControlValue, new: ControlValue, result: str) -> None:
        """Another program has changed the control."""
        self.values("outside_change", old, new, warning=True, result=result)

    def clamped(self, target: ControlValue, new: ControlValue) -> None:
        """A restore target was set, and the control holds another value."""
        reason = "the device does not take the restore target exactly"
        self.values("restore_clamped", target, new, warning=True, reason=reason)

    def write(
        self,
        event: str,
        old: ControlValue | None,
        new: ControlValue,
        failure: Failure | None,
        lease: HeldLease | None,
        reason: str,
    ) -> None:
        """zeusd has written the control, or has tried to."""
        result = "ok" if failure is None else failure.message
        self.values(event, old, new, lease, failure is not None, reason=reason, result=result)

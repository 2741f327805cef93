"""What the audit log says about one control."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeus_ipc.controls import Control, ControlValue, describe
from zeusd.core.model import Failure, Peer
from zeusd.core.outbox import Outbox

if TYPE_CHECKING:
    from zeusd.core.holding import HeldLease


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

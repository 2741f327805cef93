"""What zeusd has written to a control and may be in force. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeus_ipc.controls import ControlValue

FOREVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Values:
    """The values that may be in force because zeusd wrote them.

    Attributes:
        values: The values, newest last; empty: none was written.
        doubts: Those whose write was never confirmed, and until when each may still take effect,
            ns, CLOCK_MONOTONIC.
        confirmed: Whether the last write was.
    """

    values: tuple[ControlValue, ...] = ()
    doubts: dict[ControlValue, int] = field(default_factory=dict)
    confirmed: bool = False

    @property
    def newest(self) -> ControlValue | None:
        """The newest value; None: nothing was written."""
        return self.values[-1] if self.values else None

    def asking(self, value: ControlValue, *before: ControlValue, doubted: bool = True) -> Values:
        """A write of this value begins; these may be in force just before."""
        values = _last(value, (*self.doubts, *self.values, *before))
        if not doubted:
            return Values(values, self.doubts)
        doubts = {one: ns for one, ns in self.doubts.items() if one != value}
        return Values(values, {**doubts, value: FOREVER_NS})

    def holding(
        self,
        asked: ControlValue,
        holds: ControlValue,
        now_ns: int,
        late: tuple[ControlValue, ...] = (),
        until_ns: int = 0,
    ) -> Values:
        """The write of `asked` was confirmed: only later effects of other writes are possible, and
        `late` until then."""
        doubts = {one: ns for one, ns in self.doubts.items() if one != asked and ns > now_ns}
        doubts |= dict.fromkeys(late, until_ns)
        return Values(_last(holds, tuple(doubts)), doubts, True)

    def unknown(self, asked: ControlValue, until_ns: int, holds: ControlValue | None) -> Values:
        """It is not known what the write of `asked` did; it may take effect until then."""
        values = _last(holds, self.values) if holds in self.values else self.values
        doubts = {**self.doubts, asked: until_ns} if asked in self.doubts else self.doubts
        return Values(values, doubts)

    def after(self, now_ns: int, *known: ControlValue) -> Values:
        """Of all values only these are in force. Writes that may still take effect are not over."""
        return Values(known, {one: ns for one, ns in self.doubts.items() if ns > now_ns})

    def settles_ns(self, target: ControlValue) -> int:
        """When no write of another value than the target can take effect any more; 0: there is
        none in doubt."""
        return max((ns for one, ns in self.doubts.items() if one != target), default=0)


def _last(value: ControlValue | None, values: tuple[ControlValue, ...]) -> tuple[ControlValue, ...]:
    """The values without duplicates, and this one last."""
    others = tuple(dict.fromkeys(one for one in values if one != value))
    return others if value is None else (*others, value)

"""Finds the period and phase at which a sensor changes, and says when to look at it.

While the period is unknown the sensor is looked at every few milliseconds. Once it is, two looks
a tick suffice: shortly before the change is due, and shortly after. What they bracket corrects the
prediction, so that a change is dated to a fraction of a millisecond, and a look that comes late
costs nothing: the prediction holds. Sensors that tick every 20 ms are bracketed at every fourth
tick, and looked at once at the others.
"""

from __future__ import annotations

from typing import NamedTuple

MS = 1_000_000

SEARCH_POLL_NS = 4 * MS
SLOW_POLL_NS = 50 * MS
SEARCH_CHANGES = 6
SLOW_AFTER_NS = 3_000 * MS
"""A sensor that shows fewer changes than `SEARCH_CHANGES` in this time is looked at less often."""

STILL_NS = 1_000 * MS
STILL_TICK_NS = 100 * MS
"""A sensor that shows no change for so long is taken to tick, silently, so often."""

CONTINUOUS_NS = 20 * MS
"""How often a sensor is looked at that changes whenever one looks."""

SPREAD_MIN_NS = 350_000
SPREAD_START_NS = 2_500_000
STEP_MIN_NS = 700_000
TOWARDS_MIDDLE = 0.15
"""How far a prediction moves to the middle of what two looks bracket."""

MAX_LOOKS = 8
"""Looks at one tick before it is taken for silent."""

MAX_ASTRAY = 6
"""Ticks in a row that come far from where they are expected before the search begins anew."""

MAX_SILENT = 50
FAST_PERIOD_NS = 50 * MS
SETTLED_TICKS = 20
BRACKET_EVERY = 4

RETRY_NS = 2 * MS
RETRY_MAX_NS = 1_000 * MS


class Tick(NamedTuple):
    """The newest change of a sensor.

    Attributes:
        t_ns: When it happened.
        slop_ns: How far off that may be.
        count: Ticks since the one before; more than one where some were not looked at.
        silent: A change was due, and the reading stayed the same.
    """

    t_ns: int
    slop_ns: int
    count: int = 1
    silent: bool = False


class TickTracker:
    """Tracks one sensor. It is told of each look, and says when the next is due.

    Args:
        now_ns: The time.

    Attributes:
        next_read_ns: When to look next.
        period_ns: The tick; None while it is searched for.
    """

    def __init__(self, now_ns: int) -> None:
        self.next_read_ns = now_ns
        self.period_ns: int | None = None
        self._period = 0.0
        self._failures = 0
        self._restart(now_ns)

    def _restart(self, now_ns: int) -> None:
        self.period_ns = None
        self._continuous = False
        self._read_ns: int | None = None
        self._moved_ns = now_ns
        self._began_ns = now_ns
        self._changes: list[int] = []
        self._due = 0.0
        self._spread = float(SPREAD_START_NS)
        self._looks = 0
        self._ticks = 0
        self._astray = 0
        self._silent = 0

    def failed(self, t_ns: int) -> None:
        """A look gave no reading: looks again soon, and ever more rarely."""
        self._failures += 1
        pause_ns = min(RETRY_NS << min(self._failures - 1, 16), RETRY_MAX_NS)
        self.next_read_ns = t_ns + pause_ns

    def observe(self, t_ns: int, changed: bool) -> Tick | None:
        """A look at `t_ns` found the reading of the last look, or another."""
        if self._failures > MAX_ASTRAY:
            self._restart(t_ns)  # it was away for long
        self._failures = 0
        if self.period_ns is None:
            tick = self._search(t_ns, changed)
        elif self._continuous:
            tick = Tick(t_ns, 0, silent=not changed)
            self.next_read_ns = t_ns + CONTINUOUS_NS
            self._silent = 0 if changed else self._silent + 1
            if self._silent > MAX_SILENT:
                self._restart(t_ns)
        else:
            tick = self._follow(t_ns, changed)
        self._read_ns = t_ns
        return tick

    # ------------------------------------------------------------------------------------ search

    def _search(self, t_ns: int, changed: bool) -> Tick | None:
        slow = t_ns - self._began_ns > SLOW_AFTER_NS
        poll_ns = SLOW_POLL_NS if slow and len(self._changes) < 2 else SEARCH_POLL_NS
        self.next_read_ns = t_ns + poll_ns
        if not changed or self._read_ns is None:
            if t_ns - self._moved_ns < STILL_NS:
                return None
            self._moved_ns = t_ns - STILL_NS + STILL_TICK_NS
            return Tick(t_ns, STILL_TICK_NS, silent=True)
        self._moved_ns = t_ns
        at_ns = (self._read_ns + t_ns) // 2
        slop_ns = (t_ns - self._read_ns) // 2
        self._changes.append(at_ns)
        if len(self._changes) >= SEARCH_CHANGES:
            self._settle(t_ns)
        return Tick(at_ns, slop_ns)

    def _settle(self, t_ns: int) -> None:
        changes = self._changes
        gaps = sorted(b - a for a, b in zip(changes, changes[1:], strict=False))
        median = gaps[len(gaps) // 2]
        alike = [gap for gap in gaps if abs(gap - median) <= 2.5 * SEARCH_POLL_NS]
        if 5 * len(alike) < 3 * len(gaps):
            del changes[0]
            return
        if median < 2.5 * SEARCH_POLL_NS:
            self._continuous = True
            self.period_ns = CONTINUOUS_NS
            self.next_read_ns = t_ns + CONTINUOUS_NS
            return
        self._period = sum(alike) / len(alike)
        self.period_ns = round(self._period)
        self._due = changes[-1] + self._period
        self._changes = []
        self._plan()

    # ------------------------------------------------------------------------------------ follow

    @property
    def _step(self) -> float:
        return max(STEP_MIN_NS, self._spread / 2)

    def _plan(self) -> None:
        """The first look at the tick that is due."""
        self._looks = 0
        once = (
            self._period < FAST_PERIOD_NS
            and self._ticks > SETTLED_TICKS
            and self._ticks % BRACKET_EVERY
        )
        self.next_read_ns = round(self._due + (self._spread if once else -self._spread))

    def _follow(self, t_ns: int, changed: bool) -> Tick | None:
        self._looks += 1
        if changed:
            return self._found(t_ns)
        late = t_ns - self._due
        if self._looks >= MAX_LOOKS or late > self._period / 2:
            return self._quiet()
        step = self._step
        if late > self._spread:
            step *= 2.0 ** min(self._looks, 6)
        self.next_read_ns = round(max(t_ns + step, self._due - self._spread))
        return None

    def _quiet(self) -> Tick:
        tick = Tick(round(self._due), round(self._period / 2), silent=True)
        self._due += self._period
        self._silent += 1
        if self._silent > MAX_SILENT:
            self._restart(tick.t_ns)
            self.next_read_ns = tick.t_ns
        else:
            self._plan()
        return tick

    def _found(self, t_ns: int) -> Tick:
        before_ns = t_ns if self._read_ns is None else self._read_ns
        period = self._period
        missed = int(max(0.0, t_ns - self._due) // period)
        due = self._due + missed * period
        low, high = max(before_ns, due - period / 2), float(t_ns)
        narrow = high - low <= 3 * self._step
        middle = (low + high) / 2
        if due > high:  # it came before it was looked for
            at = high - min(self._spread, (high - low) / 2)
            slop = min(2 * self._spread, (high - low) / 2)
            self._miss(2.0)
        elif low >= due:  # it was looked for in vain before
            at, slop = min(middle, low + self._step), (high - low) / 2
            self._miss(1.5)
        elif narrow:
            at, slop = due + TOWARDS_MIDDLE * (middle - due), (high - low) / 2
            self._astray = 0
            self._spread = max(SPREAD_MIN_NS, 0.8 * self._spread)
        else:  # a late look tells little: what was predicted holds
            at, slop = due, self._spread
        count = 1 + missed + self._silent
        gain = 0.4 if self._ticks < SETTLED_TICKS else 0.04
        self._period += gain * min(1.0, STEP_MIN_NS / (high - low + 1)) * (at - due) / count
        self.period_ns = round(self._period)
        self._ticks += 1
        self._silent = 0
        self._due = at + self._period
        tick = Tick(round(at), round(slop), count)
        if self._astray > MAX_ASTRAY:
            self._restart(t_ns)
            self.next_read_ns = t_ns + SEARCH_POLL_NS
        else:
            self._plan()
            # The next tick may be due already when this thread was kept from its turn.
            self.next_read_ns = max(self.next_read_ns, t_ns + SPREAD_MIN_NS)
        return tick

    def _miss(self, widen: float) -> None:
        self._spread = min(widen * self._spread, self._period / 4)
        if self._spread >= self._period / 4:
            self._astray += 1

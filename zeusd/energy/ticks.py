"""Finds the period and phase at which a sensor changes, and schedules its readings.

While the period is unknown, the sensor is read every few milliseconds. Afterwards two readings date
a change to a fraction of a millisecond: one shortly before it is due, one shortly after. Most
changes are not dated: if a sensor is regular, the prediction is valid for seconds, and one
reading at any time between two changes gives the value of the last one. That reading may wait until
other devices are read.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from zeus_common.units import MS

SEARCH_POLL_NS = 4 * MS
SLOW_POLL_NS = 50 * MS
SEARCH_CHANGES = 6
SLOW_AFTER_NS = 3_000 * MS
"""A sensor with fewer changes than `SEARCH_CHANGES` in this time is read less often."""

AWAY_NS = 10 * SEARCH_POLL_NS
"""Delay of a reading after which it is not known when the sensor changed meanwhile."""

UNRELATED_NS = 5_000 * MS
"""Changes on both sides of such a pause do not determine a period."""

GIVE_UP_NS = 30_000 * MS
"""A sensor without a period for this long has none, and is read as if it changed all the time."""

STILL_NS = 300 * MS
STILL_TICK_NS = 100 * MS
"""A sensor without a change for the first time, which is three of the longest period, is assumed to
tick silently with the second period: without a counter, a steady power is all that there is."""

CONTINUOUS_NS = 20 * MS
"""Period at which a sensor that changes at every reading is read."""

GRAIN_NS = 700_000
"""Shortest useful time between two readings that date a change. It is longer for a reading that
itself takes longer (an H100's counter: 3 to 16 ms), and all that follows from it is, too."""

SPREAD_MIN = 0.5
"""Least uncertainty of a prediction, in grains."""

SPREAD_START_NS = 2_500_000
MIDDLE_SHARE = 0.15
"""Share by which a prediction moves to the middle between two readings."""

CORRECTION = 0.25
"""Distance, in grains, by which a trusted prediction is corrected beyond the reading that refuted
it."""

MAX_READS = 8
"""Readings at one tick before it counts as silent."""

MAX_MISSES = 6
"""Ticks in a row far from their predictions before the search starts again."""

MAX_SILENT = 50
FAST_PERIOD_NS = 50 * MS
SETTLED_TICKS = 20
BRACKET_EVERY = 4
STEADY_BRACKETS = 8
"""Correct predictions in a row before predictions are trusted for longer."""

STEADY_NS = 500 * MS
TIMED_FACTOR = 3.0
"""How long predictions are trusted then, and how much longer at most once the period has been
measured: in proportion to the grain, and at least this."""

GUARD_NS = 1 * MS
TOOK_SHARE, LONGEST_NS = 0.1, 20 * MS
"""Share of a reading's duration or delay in their means, and the longest duration that counts: a
driver may hang once."""

DATED = 2.0
"""A change dated less precisely than this, in grains, is not one that the period is measured
between."""

REPHASED = 4.0
"""A change this far from its prediction, in grains, means that the sensor's phase has changed."""

ANCHOR_TICKS = 20
MAX_ANCHORS = 12
"""The period is measured over up to `MAX_ANCHORS` times `ANCHOR_TICKS` ticks, or more if most are
not dated, or not well."""

PATIENT_SHARE, HURRIED_SHARE = 0.8, 0.6
"""A reading that does not date a change may be delayed by this share of the tick; by as little as
the second one if readings have lately been late: after the next change it would be taken for this
one."""

DELAY_FADES = 0.99
"""What is left of the longest delay after a reading."""

RETRY_NS = 2 * MS
RETRY_MAX_NS = 1_000 * MS


class Tick(NamedTuple):
    """The newest change of a sensor.

    Attributes:
        t_ns: When it happened.
        ticks: Ticks since the previous change, read or not; 0: the sensor changes all the time.
        silent: Whether a change was due but the reading stayed the same.
    """

    t_ns: int
    ticks: int = 1
    silent: bool = False


class TickTracker:
    """Tracks one sensor: receives each reading, and schedules the next one.

    Args:
        now_ns: The time.

    Attributes:
        next_read_ns: When to read next.
        latest_read_ns: Latest time for that reading.
        period_ns: The update period; None: not known yet.
    """

    def __init__(self, now_ns: int) -> None:
        self.next_read_ns = self.latest_read_ns = now_ns
        self.period_ns: int | None = None
        self._period = 0.0
        self._failures = 0
        self._ticks = 0
        self._began_ns = self._changed_ns = now_ns
        self._took = 0.0
        self._grain = float(GRAIN_NS)
        self._half = 0
        self._late = 0.0
        self._delay = 0.0
        self._restart(now_ns)

    def _restart(self, now_ns: int) -> None:
        self.period_ns = None
        self._continuous = False
        self._read_ns: int | None = None
        self._moved_ns = now_ns
        if self._ticks > 3 * SETTLED_TICKS:
            self._began_ns = now_ns  # it had a period, which may have changed
        self._changes: list[int] = []
        self._due = 0.0
        self._spread = float(SPREAD_START_NS)
        self._reads = 0
        self._ticks = 0
        self._undated = 0
        self._misses = 0
        self._right = 0
        self._silent = 0
        self._passed = 0
        self._anchors: list[tuple[int, float]] = []
        self._measured = 0  # over how many ticks the period was
        self._routine = 0

    def _read_at(self, t_ns: float, latest_ns: float | None = None) -> None:
        self.next_read_ns = round(t_ns)
        self.latest_read_ns = self.next_read_ns if latest_ns is None else round(latest_ns)

    def failed(self, t_ns: int) -> None:
        """Handles a failed reading: retries soon, then less and less often."""
        self._failures += 1
        self._routine = 0
        pause_ns = min(RETRY_NS << min(self._failures - 1, 16), RETRY_MAX_NS)
        self._read_at(t_ns + pause_ns)

    def observe(self, t_ns: int, changed: bool, took_ns: int = 0) -> Tick | None:
        """Processes a reading that is the same as the last one, or another.

        Args:
            t_ns: The middle of the reading.
            changed: Whether it is another.
            took_ns: How long it took; the value is of any time within.
        """
        if self._failures > MAX_MISSES:
            self._restart(t_ns)  # it was not read for long
        self._failures = 0
        self._took += TOOK_SHARE * (min(took_ns, LONGEST_NS) - self._took)
        self._grain = max(float(GRAIN_NS), self._took)
        self._half = took_ns // 2
        if self._read_ns is not None:
            delay_ns = min(t_ns - self._half - self.latest_read_ns, LONGEST_NS)
            self._delay = max(DELAY_FADES * self._delay, delay_ns)
        if self.period_ns is None:
            tick = self._search(t_ns, changed)
        elif self._continuous:
            tick = Tick(t_ns, 0, silent=not changed)
            self._read_at(t_ns + CONTINUOUS_NS)
            self._silent = 0 if changed else self._silent + 1
            if self._silent > MAX_SILENT:
                self._restart(t_ns)
        else:
            tick = self._follow(t_ns, changed)
        self._read_ns = t_ns - self._half
        return tick

    # ------------------------------------------------------------------------------------ search

    def _search(self, t_ns: int, changed: bool) -> Tick | None:
        slow = t_ns - self._began_ns > SLOW_AFTER_NS
        away = t_ns - self.next_read_ns > AWAY_NS
        poll_ns = SLOW_POLL_NS if slow and len(self._changes) < 2 else SEARCH_POLL_NS
        self._read_at(t_ns + poll_ns)
        if not changed or self._read_ns is None:
            if t_ns - self._moved_ns < STILL_NS:
                return None
            self._moved_ns = t_ns - STILL_NS + STILL_TICK_NS
            return Tick(t_ns, silent=True)
        if t_ns - self._changed_ns > UNRELATED_NS:
            self._began_ns, self._changes = t_ns, []  # it did not change until now
        self._moved_ns = self._changed_ns = t_ns
        if away:
            self._changes = []
            return Tick(t_ns)
        at_ns = t_ns - (t_ns - self._read_ns) // 2
        self._changes.append(at_ns)
        if len(self._changes) >= SEARCH_CHANGES:
            if t_ns - self._began_ns > GIVE_UP_NS:
                self._read_continuously(t_ns)
            else:
                self._settle(t_ns)
        return Tick(at_ns)

    def _read_continuously(self, t_ns: int) -> None:
        self._continuous = True
        self.period_ns = CONTINUOUS_NS
        self._read_at(t_ns + CONTINUOUS_NS)

    def _settle(self, t_ns: int) -> None:
        changes = self._changes
        gaps = sorted(b - a for a, b in itertools.pairwise(changes))
        median = gaps[len(gaps) // 2]
        alike = [gap for gap in gaps if abs(gap - median) <= 2.5 * SEARCH_POLL_NS]
        if 5 * len(alike) < 3 * len(gaps):
            del changes[0]
            return
        if median < 2.5 * SEARCH_POLL_NS:
            self._read_continuously(t_ns)
            return
        self._period = sum(alike) / len(alike)
        self.period_ns = round(self._period)
        self._due = changes[-1] + self._period
        self._changes = []
        self._plan()

    # ------------------------------------------------------------------------------------ follow

    @property
    def _step(self) -> float:
        return max(self._grain, self._spread / 2)

    def _plan(self) -> None:
        """Processes the first reading at a tick that is due."""
        self._reads = 0
        if self._ticks <= SETTLED_TICKS:
            every = 1
        elif self._right >= STEADY_BRACKETS:
            most = STEADY_NS * max(TIMED_FACTOR, self._grain / GRAIN_NS)
            # Half as long as it was measured: the dates at both ends are a grain or two uncertain,
            # and a prediction that is off by more than the guard counts a change too many or few.
            trusted = max(STEADY_NS, min(most, self._measured * self._period / 2))
            every = max(1, int(trusted / self._period))
        else:
            every = BRACKET_EVERY if self._period < FAST_PERIOD_NS else 1
        self._routine = every - 1 - self._undated
        if self._routine > 0:
            self._read_patiently()
        else:
            self._read_at(self._due - self._spread - self._took - self._late)

    def _read_patiently(self) -> None:
        """Plans a reading that does not date the change."""
        after = max(self._spread, GUARD_NS) + 2 * self._took
        share = 1.0 - (after + 2 * self._delay) / self._period
        share = min(PATIENT_SHARE, max(HURRIED_SHARE, share))
        self._read_at(self._due + after, self._due + max(after, share * self._period))

    def _follow(self, t_ns: int, changed: bool) -> Tick | None:
        self._reads += 1
        if changed and self._routine > 0 and t_ns - self.latest_read_ns < self._period / 8:
            return self._pass(t_ns)
        delay_ns = t_ns - self._half - self.next_read_ns
        if self._routine <= 0 and 0 < delay_ns < GRAIN_NS:
            # The thread wakes a little late: what dates a change is planned so much earlier.
            self._late += TOOK_SHARE * (delay_ns - self._late)
        if changed:
            return self._found(t_ns)
        late = t_ns - self._half - self._due
        if self._reads >= MAX_READS or late > self._period / 2:
            return self._quiet(max(1, round(late / self._period)))
        step = self._step
        if late > self._spread:
            step *= 2.0 ** min(self._reads, 6)
        self._read_at(max(t_ns + self._half + step, self._due - self._spread) - self._late)
        return None

    def _quiet(self, ticks: int) -> Tick:
        """Processes a number of due changes that did not happen."""
        self._due += ticks * self._period
        tick = Tick(round(self._due - self._period), ticks, silent=True)
        self._silent += ticks
        if self._silent > MAX_SILENT:
            self._restart(tick.t_ns)
            self._read_at(tick.t_ns)
        else:
            self._plan()
        return tick

    def _found(self, t_ns: int) -> Tick:
        self._changed_ns = t_ns
        before_ns = t_ns if self._read_ns is None else self._read_ns
        period = self._period
        missed = int(max(0.0, t_ns - self._due) // period)
        due = self._due + missed * period
        low, high = max(before_ns, due - period / 2), float(t_ns + self._half)
        narrow = high - low <= 3 * self._step + 2 * self._took
        middle = (low + high) / 2
        if due > high:  # it changed earlier than expected
            near = CORRECTION * self._grain if self._right else self._spread
            at = high - min(near, (high - low) / 2)
            slop = min(2 * self._spread, (high - low) / 2)
            self._right //= 2  # readings come late, so predictions become late, too
            self._misses += 1
            if due - high > self._grain:
                self._miss(2.0)
        elif low >= due:  # earlier readings at this tick found no change
            near = CORRECTION * self._grain if self._right else self._step / 2
            at, slop = min(middle, low + near), (high - low) / 2
            if low - due > self._grain:
                self._miss(1.5)
            if narrow:
                self._misses = 0
        elif narrow:
            at, slop = due + MIDDLE_SHARE * (middle - due), (high - low) / 2
            self._misses = 0
            self._right += 1
            self._spread = max(SPREAD_MIN * self._grain, 0.8 * self._spread)
        else:  # a late reading gives little information: the prediction stands
            at, slop = due, self._spread
        count = 1 + missed + self._silent
        self._ticks += 1
        self._undated = 0 if narrow else self._undated + 1
        self._passed += count
        if abs(at - due) > REPHASED * self._grain:
            self._anchors, self._measured = [], 0
        if narrow:
            self._time_period(at, (at - due) / count, slop)
        self.period_ns = round(self._period)
        self._silent = 0
        self._due = at + self._period
        tick = Tick(round(at), count)
        if self._misses > MAX_MISSES:
            self._restart(t_ns)
            self._read_at(t_ns + SEARCH_POLL_NS)
        else:
            self._plan()
            # The next tick may already be due if this thread was delayed.
            soon = round(t_ns + self._half + SPREAD_MIN * self._grain)
            self._read_at(
                max(self.next_read_ns, soon),
                max(self.latest_read_ns, soon),
            )
        return tick

    def _pass(self, t_ns: int) -> Tick:
        """Processes a change that a planned reading found, without dating it."""
        self._changed_ns = t_ns
        at, count = self._due, 1 + self._silent
        self._ticks += 1
        self._undated += 1
        self._passed += count
        self._silent = 0
        self._due += self._period
        self._routine -= 1
        if self._routine:
            self._read_patiently()
        else:
            self._plan()
        return Tick(round(at), count)

    def _time_period(self, at: float, error: float, slop: float) -> None:
        """The period, measured over the whole time in which the sensor was regular; before,
        corrected by the errors of predictions, less by those that are not well known."""
        anchors, coarse = self._anchors, self._grain / GRAIN_NS
        well = DATED * self._grain
        if slop <= well:
            if not anchors or self._passed - anchors[-1][0] >= ANCHOR_TICKS * coarse:
                anchors.append((self._passed, at))
                del anchors[:-MAX_ANCHORS]
            ticks, since = anchors[0]
            passed = self._passed - ticks
            self._measured = passed if passed >= ANCHOR_TICKS * coarse else 0
            if self._measured:
                self._period = (at - since) / self._measured
        if not self._measured:
            share = 0.3 if slop <= well else 0.3 * (well / slop) ** 2
            self._period += share * error / coarse

    def _miss(self, widen: float) -> None:
        self._right = 0
        self._spread = min(widen * self._spread, self._period / 4)
        if self._spread >= self._period / 4:
            self._misses += 1

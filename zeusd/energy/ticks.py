"""Finds the period and phase at which a sensor changes, and schedules its readings.

While the period is unknown, the sensor is read every few milliseconds. Afterwards two readings date
a change to a fraction of a millisecond: one shortly before it is due, one shortly after. Most
changes are not dated: if a sensor is regular, the prediction is valid for seconds, and one
reading at any time between two changes gives the value of the last one. That reading may wait until
other devices are read.

A change happened between the last reading that did not show it and the first that did, however late
that one was. So what is known is a span in which the next change is due, and by how much the period
may be wrong. Each reading cuts from that span, each tick widens it, and a change is dated before
the span is wider than two readings can tell apart. A reading so close to a change that it may show
this one or the one before is not used: the next one tells.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from zeus_common.units import MS

SEARCH_POLL_NS = 4 * MS
SLOW_POLL_NS = 50 * MS
SEARCH_CHANGES = 6
SLOW_AFTER_NS = 3_000 * MS
"""A sensor with fewer changes than `SEARCH_CHANGES` in this time is read less often."""

AWAY_NS = 10 * SEARCH_POLL_NS
"""Delay of a reading after which it is not known how often the sensor changed meanwhile."""

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

AGAIN_NS = 600_000 * MS
"""The period of such a sensor is searched again after this: it may only have been read late."""

GRAIN_NS = 700_000
"""Shortest useful time between two readings that date a change. It is longer for a reading that
itself takes longer (an H100's counter: 3 to 16 ms), and all that follows from it is, too."""

SPREAD_MIN = 0.25
"""Least half-width of the span in which a change is due, in grains: two readings a grain apart
halve it when the first is made at its middle."""

LOST = 0.33
"""Half-width of that span, as a share of the period, at which the search starts again."""

MAX_READS = 8
"""Readings at one tick before it counts as silent."""

MAX_MISSES = 6
"""Ticks in a row far from their predictions before the search starts again."""

SURE_SHARE = 0.2
"""Difference between the longest and the shortest period that may be, as a share, by which the
search ends."""

CONTINUOUS_POLLS = 2.5
"""A sensor that changes once in so many readings of the search, or more often, is read as if it
changed all the time."""

MAX_SILENT = 50
TRUSTED_NS = 1_500 * MS
TRUSTED_GRAINS = 700
"""How long a sensor is taken to be regular: the first, or the second if that is longer."""

GUARD_NS = 1 * MS
TOOK_SHARE, LONGEST_NS = 0.1, 20 * MS
"""Share of a reading's duration or delay in their means, and the longest duration that counts: a
driver may hang once."""

DATED = 2.0
"""A change dated less precisely than this, in grains, is not one that the period is measured
between, unless the period is known less."""

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


Span = tuple[float, float]
"""Two times between which a sensor changed."""


class Tick(NamedTuple):
    """The newest change of a sensor.

    Attributes:
        t_ns: When it happened.
        slop_ns: By how much that may be wrong.
        silent: Whether a change was due but the reading stayed the same.
    """

    t_ns: int
    slop_ns: int = 0
    silent: bool = False


def _periods(before: Span, after: Span, shortest: float, longest: float) -> tuple[int, int]:
    """How many periods may be between two changes: at least, and at most."""
    return (
        max(1, math.ceil((after[0] - before[1]) / longest)),
        math.floor((after[1] - before[0]) / shortest),
    )


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
        self._passed = 0
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
        if self._passed > 3 * ANCHOR_TICKS:
            self._began_ns = now_ns  # it had a period, which may have changed
        self._changes: list[Span] = []
        self._due = 0.0  # the next change, give or take `_spread`
        self._spread = 0.0
        self._halves = True  # whether the last change was read from the middle of its span on
        self._drift = 0.0  # by how much the period may be wrong
        self._dated_ns = 0.0
        self._seen_ns: float | None = None  # when a change was seen that may be another
        self._reads = 0
        self._misses = 0
        self._skipped = 0
        self._silent = 0
        self._passed = 0
        self._anchors: list[tuple[int, float, float]] = []

    def _read_at(self, t_ns: float, latest_ns: float | None = None) -> None:
        self.next_read_ns = round(t_ns)
        self.latest_read_ns = self.next_read_ns if latest_ns is None else round(latest_ns)

    def failed(self, t_ns: int) -> None:
        """Handles a failed reading: retries soon, then less and less often."""
        self._failures += 1
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
            tick = Tick(t_ns, silent=not changed)
            self._read_at(t_ns + CONTINUOUS_NS)
            self._silent = 0 if changed else self._silent + 1
            if self._silent > MAX_SILENT or t_ns - self._began_ns > AGAIN_NS:
                self._began_ns = t_ns
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
        apart_ns = t_ns - self._read_ns
        if away:
            self._changes = []
            # The last of several changes was up to one period ago, of 20 to 100 ms.
            early_ns = min(apart_ns, STILL_TICK_NS) // 4
            return Tick(t_ns - early_ns, 3 * early_ns)
        self._changes.append((self._read_ns, t_ns + self._half))
        if len(self._changes) >= SEARCH_CHANGES:
            if t_ns - self._began_ns > GIVE_UP_NS:
                self._read_continuously(t_ns)
            else:
                self._settle(t_ns)
        return Tick(t_ns - apart_ns // 2, apart_ns // 2 + self._half)

    def _read_continuously(self, t_ns: int) -> None:
        self._continuous = True
        self.period_ns = CONTINUOUS_NS
        self._read_at(t_ns + CONTINUOUS_NS)

    def _settle(self, t_ns: int) -> None:
        (begin, _), (_, end) = self._changes[0], self._changes[-1]
        if end - begin < CONTINUOUS_POLLS * SEARCH_POLL_NS * (len(self._changes) - 1):
            self._read_continuously(t_ns)
        elif self._fit(GRAIN_NS // 2) or self._fit(SEARCH_POLL_NS):
            self.period_ns = round(self._period)
            self._changes = []
            self._plan()
        elif len(self._changes) >= 2 * SEARCH_CHANGES:
            del self._changes[0]

    def _fit(self, slack_ns: int) -> bool:
        """Finds the period and the next change.

        Args:
            slack_ns: By how much a change may be early or late.

        Returns:
            Whether what is known of the changes leaves only periods that are much the same.
        """
        spans = [(low - slack_ns, high + slack_ns) for low, high in self._changes]
        pairs = [
            (before, after, later - earlier)
            for (earlier, before), (later, after) in itertools.combinations(enumerate(spans), 2)
        ]
        # There is no change between two that were seen in a row, and each of them is one.
        shortest = max(after[0] - before[1] for before, after, steps in pairs if steps == 1)
        longest = min((after[1] - before[0]) / steps for before, after, steps in pairs)
        for _ in range(3):  # what one pair excludes leaves less to others
            for before, after, _ in pairs:
                if not 0 < shortest <= longest:
                    return False
                least, most = _periods(before, after, shortest, longest)
                if least == most:
                    shortest = max(shortest, (after[0] - before[1]) / most)
                    longest = min(longest, (after[1] - before[0]) / most)
        if not shortest <= longest <= (1 + SURE_SHARE) * shortest:
            return False
        first, last = spans[-1]
        for span in spans[:-1]:
            least, most = _periods(span, spans[-1], shortest, longest)
            if least == most:
                first = max(first, span[0] + most * shortest)
                last = min(last, span[1] + most * longest)
        self._period, self._drift = (shortest + longest) / 2, (longest - shortest) / 2
        self._dated_ns = (first + last) / 2
        self._due = self._dated_ns + self._period
        self._spread = (last - first) / 2 + self._drift
        return first <= last

    # ------------------------------------------------------------------------------------ follow

    def _plan(self) -> None:
        """Plans the first reading at the change that is due."""
        self._reads = 0
        trusted_ns = max(TRUSTED_NS, TRUSTED_GRAINS * self._grain)
        if self._spread > self._grain or self._due - self._dated_ns > trusted_ns:
            # By turns around the span, which shows whether it is right, and from its middle on,
            # which halves it; around it until it is right.
            self._halves = not (self._halves or self._misses)
            before = 0.0 if self._halves else self._spread
            self._read_at(self._due - before - self._took - self._late)
            return
        # One that does not date the change.
        after = max(self._spread, GUARD_NS) + 2 * self._took
        share = 1.0 - (after + 2 * self._delay) / self._period
        share = min(PATIENT_SHARE, max(HURRIED_SHARE, share))
        self._read_at(self._due + after, self._due + max(after, share * self._period))

    def _follow(self, t_ns: int, changed: bool) -> Tick | None:
        self._reads += 1
        low, high = t_ns - self._half, t_ns + self._half
        delay_ns = low - self.next_read_ns
        if self.latest_read_ns == self.next_read_ns and 0 < delay_ns < GRAIN_NS:
            # The thread wakes a little late: what dates a change is planned so much earlier.
            self._late += TOOK_SHARE * (delay_ns - self._late)
        if changed:
            self._changed_ns = t_ns
            return self._newest(low, high)
        if self._seen_ns is not None:
            return self._found(self._due - self._spread, self._seen_ns)
        late = low - self._due
        if self._reads >= MAX_READS or late > self._period / 2:
            return self._quiet(max(1, round(late / self._period)))
        step = self._step
        if late > self._spread:
            step *= 2.0 ** min(self._reads, 6)
        self._read_at(max(high + step, self._due - self._spread) - self._late)
        return None

    @property
    def _step(self) -> float:
        return max(self._grain, self._spread / 2)

    def _skip(self, ticks: int) -> None:
        """The change that is due is a later one."""
        self._due += ticks * self._period
        self._spread += ticks * self._drift
        self._skipped += ticks

    def _quiet(self, ticks: int) -> Tick:
        """Processes a number of due changes that did not happen."""
        self._skip(ticks)
        tick = Tick(round(self._due - self._period), round(self._spread), silent=True)
        self._silent += ticks
        if self._silent > MAX_SILENT:
            self._restart(tick.t_ns)
            self._read_at(tick.t_ns)
        else:
            self._plan()
        return tick

    def _newest(self, low: float, high: float) -> Tick | None:
        """Processes a reading between two times that shows another change."""
        close = int((high + self._spread - self._due) // self._period)
        if close > 0 and self._due + close * (self._period + self._drift) + self._spread > low:
            self._skip(close)
            if self._lost:
                return self._search_again(high)
            self._seen_ns = high  # this change or the one before: the next reading tells
            self._read_at(self._due + self._spread + self._took)
            return None
        self._skip(max(0, int((high - self._due) // self._period)))
        return self._found(high if self._read_ns is None else self._read_ns, high)

    def _found(self, low: float, high: float) -> Tick:
        """Processes the change that is due, which happened between two times."""
        narrow = high - low <= 3 * self._step + 2 * self._took
        at, missed = self._date(low, high)
        tick = Tick(round(at), round(self._spread))
        self._passed += 1 + self._skipped
        if narrow:
            self._dated_ns = at
            self._time_period(at, (high - low) / 2)
        self.period_ns = round(self._period)
        self._skipped = self._silent = 0
        self._seen_ns = None
        self._due = at + self._period
        self._spread += self._drift
        self._misses = self._misses + 1 if missed else 0
        if missed:
            self._spread = min(self._spread, self._period / 4)
        if self._misses > MAX_MISSES or self._lost:
            self._search_again(high)
        else:
            self._plan()
            # The next change may already be due if this thread was delayed.
            soon = round(high + SPREAD_MIN * self._grain)
            self._read_at(max(self.next_read_ns, soon), max(self.latest_read_ns, soon))
        return tick

    def _date(self, low: float, high: float) -> tuple[float, bool]:
        """When the change happened, and whether that was predicted wrongly."""
        due, spread, least = self._due, self._spread, SPREAD_MIN * self._grain
        first, last = max(low, due - spread), min(high, due + spread)
        beyond = first - last
        if beyond < 0:
            at, self._spread = (first + last) / 2, max(least, -beyond / 2)
        else:
            near = min(least, (high - low) / 2)
            at = low + near if low > due else high - near
            self._spread = max(least, min((high - low) / 2, spread))
        if beyond > self._grain:  # its phase or period is another
            self._anchors = []
            ticks = max(1, round((due - self._dated_ns) / self._period))
            self._drift = max(self._drift, beyond / ticks)
        early = self._reads == 1 and not self._halves and high < due
        missed = beyond > self._grain or early
        if missed:
            self._spread = max(2 * self._spread, beyond)
        return at, missed

    @property
    def _lost(self) -> bool:
        return self._spread > LOST * self._period

    def _search_again(self, t_ns: float) -> Tick:
        slop_ns = self._period + self._spread  # it may have been this change or the one before
        tick = Tick(round(t_ns), round(slop_ns))
        self._restart(tick.t_ns)
        self._read_at(t_ns + SEARCH_POLL_NS)
        return tick

    def _time_period(self, at: float, slop: float) -> None:
        """The period, measured over the whole time in which the sensor was regular."""
        if slop > max(DATED * self._grain, self._drift):
            return
        slop = max(slop, SPREAD_MIN * self._grain)
        anchors = self._anchors
        if anchors:
            ticks, since, early = anchors[0]
            passed = self._passed - ticks
            drift = (early + slop) / passed
            if drift <= self._drift or passed >= ANCHOR_TICKS:
                self._period, self._drift = (at - since) / passed, drift
        if not anchors or self._passed - anchors[-1][0] >= ANCHOR_TICKS:
            anchors.append((self._passed, at, slop))
            del anchors[:-MAX_ANCHORS]

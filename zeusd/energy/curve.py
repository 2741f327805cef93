"""Energy between any two instants, with its uncertainty.

Between ticks the energy is interpolated from the readings around (`EnergyCurve.energy_uj`): a
continuous function that never decreases and equals the counter at every tick.

A window that a program has aligned with the GPU's work (it waited for the GPU at both ends) gives
more information: if power inside differs from power outside, it changed at the window's ends and
nowhere else in the ticks there. The energy of such a window is computed from the readings inside
it, and the energy of its neighbours is subtracted from the ticks that it shares with them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter, sub
from typing import NamedTuple

from zeus_common.units import MS
from zeusd.energy.history import History, TickRows
from zeusd.energy.meter import EXACT

CONTRAST = 0.15
"""Power levels that differ by this share are different loads, not noise."""

CONTRAST_MW = 6_000

AROUND = 8
"""Ticks on each side of a window's end from which the unsteadiness of the load is estimated."""

NEAR = 2 * AROUND
"""Ticks on each side of a window's end that matter for its energy."""

STALL_NS = 1_500 * MS
"""Ticks further apart than any sensor's: it could not be read. The powers around say nothing about
the power between them."""

OUTSIDE = 3
"""Ticks before and after a window of which the lowest power counts as that of the idle GPU: the
others may contain work that is not measured, or another window."""

# Components of the standard deviation. Chosen so that the truth is within two of them in 95 % of
# windows under each load of benchmarks/accuracy.py, as far as that can be known.

UNSEEN = 0.6
"""Error of the part of a tick that no sensor measured, as a share of the ticks' roughness."""

UNSEEN_IN_MEANS = 1.2
"""The same for a sensor that measures each tick's mean, which hides changes within the tick."""

CONCEALED = 0.55
"""Error of an aligned window that contains no whole tick, as a share of the energy that it may have
in addition: the device may have paused beside it in each tick."""

FLOOR = 0.02
"""Smallest error as a share of the energy in a tick: no load is steadier."""

STEADY = 0.001
"""Smallest error as a share of the energy over any time."""


_begin, _end = itemgetter(0), itemgetter(1)  # of a pause


class WindowEnergy(NamedTuple):
    """Energy of a window, and its uncertainty (two standard deviations), microjoules."""

    energy_uj: int
    uncertainty_uj: int


class EnergyCurve:
    """One device's energy over time.

    Args:
        history: Its ticks.
        window_ns: Part before each tick that the sensor measures; None: all of it.
        ceiling_mw: Highest power that it may draw.
        resolution_mw: Resolution of the power that its energy is integrated from.
        error_ns: Error of a tick's time.
        least_mw: Lowest power of any tick so far.
    """

    def __init__(
        self,
        history: History,
        window_ns: int | None,
        ceiling_mw: int,
        resolution_mw: int = 0,
        error_ns: int = EXACT.error_ns,
        least_mw: int = 0,
    ) -> None:
        self._h = history
        self.window_ns = window_ns
        self._ceiling_mw = ceiling_mw
        self._resolution_mw = resolution_mw
        self._error_ns = error_ns
        self._least_mw = least_mw

    # --------------------------------------------------------------------------- at an instant

    def energy_uj(self, t_ns: int) -> int:
        """Energy until an instant. After the newest tick, its power is assumed to continue."""
        number, start, end = self._place(t_ns)
        if number == start:
            return self._coarse_uj(t_ns, start)
        first = max(start, number - 2)
        return self._energy_uj(self._h.rows(first, min(end, number + 2)), t_ns, number - first)

    def _place(self, t_ns: int) -> tuple[int, int, int]:
        """The first tick that is not before an instant, the oldest tick, and the next one."""
        ticks = self._h.ticks
        start, end = ticks.start, ticks.end
        return self._h.t_ns.first_at_least(t_ns, start, end), start, end

    def _energy_uj(self, h: TickRows, t_ns: int, number: int) -> int:
        """Energy until an instant between the tick before `number` and that one."""
        if number == len(h.t_ns):
            return h.energy_uj[-1] + self._joules(h.level_mw[-1], t_ns - h.t_ns[-1])
        return h.energy_uj[number - 1] + self._until(h, number, t_ns)

    def _until(self, h: TickRows, number: int, t_ns: int) -> int:
        """Energy from the tick before `number` to an instant before it."""
        before_ns = h.t_ns[number - 1]
        span_ns = h.t_ns[number] - before_ns
        total_uj = h.energy_uj[number] - h.energy_uj[number - 1]
        passed_ns = t_ns - before_ns
        if span_ns <= 0:
            return total_uj
        seen_ns = self._seen_ns(h, number)
        level_mw, last_mw = h.level_mw[number], h.level_mw[number - 1]
        if seen_ns < span_ns:
            seen_uj = min(total_uj, self._joules(level_mw, seen_ns))
            gap_ns = span_ns - seen_ns
            if passed_ns >= gap_ns:
                return total_uj - seen_uj + seen_uj * (passed_ns - gap_ns) // seen_ns
            share = passed_ns / gap_ns
            mean_mw = (last_mw + level_mw) / 2
            if mean_mw > 0:
                share *= (last_mw + (level_mw - last_mw) * share / 2) / mean_mw
            return round((total_uj - seen_uj) * share)
        if 1 < number < len(h.t_ns) - 1:
            next_mw = h.level_mw[number + 1]
            if (level_mw - last_mw) * (next_mw - level_mw) > 0 and self._contrast(last_mw, next_mw):
                # One step within the tick; the mean determines when.
                step_ns = span_ns * (level_mw - next_mw) / (last_mw - next_mw)
                low_ns = min(passed_ns, step_ns)
                return min(
                    total_uj, round((last_mw * low_ns + next_mw * (passed_ns - low_ns)) / MS)
                )
        return total_uj * passed_ns // span_ns

    def _coarse_uj(self, t_ns: int, start: int) -> int:
        """Energy before the oldest tick that is kept, interpolated in a coarser tier."""
        h = self._h
        ring = h.coarse(t_ns)
        if ring is None:
            return h.energy_uj[start] - self._joules(h.level_mw[start], h.t_ns[start] - t_ns)
        times, energies = ring.column(0), ring.column(1)
        number = times.first_at_least(t_ns, ring.start, ring.end)
        if number == ring.end:  # between the newest coarse row and the oldest tick
            later_ns, later_uj = h.t_ns[start], h.energy_uj[start]
        else:
            later_ns, later_uj = times[number], energies[number]
        if number == ring.start:
            return later_uj
        earlier_ns, earlier_uj = times[number - 1], energies[number - 1]
        span_ns = max(1, later_ns - earlier_ns)
        return earlier_uj + (later_uj - earlier_uj) * (t_ns - earlier_ns) // span_ns

    # --------------------------------------------------------------------------------- windows

    def window(
        self,
        begin_ns: int,
        end_ns: int,
        aligned: bool,
        joins: tuple[bool, bool] = (False, False),
        pauses: Sequence[tuple[int, int]] = (),
    ) -> WindowEnergy:
        """Energy between two instants.

        Args:
            begin_ns: First.
            end_ns: Second.
            aligned: Whether the GPU was idle, apart from the measured work, just before the first
                and just after the second.
            joins: Whether another window ends at the first, and whether one begins at the second:
                then the GPU works on there.
            pauses: Spans in which the GPU is known to have had nothing to do, in order. Those
                around an aligned window say nothing about its work.
        """
        if end_ns <= begin_ns:
            return WindowEnergy(0, 0)
        h = self._h.recent
        first = bisect_left(h.t_ns, begin_ns)
        if first > NEAR:
            last = bisect_left(h.t_ns, end_ns, first)
            return self._beside(h, begin_ns, end_ns, first, last, aligned, joins, pauses)
        first, start, end = self._place(begin_ns)
        last = self._h.t_ns.first_at_least(end_ns, first, end)  # covers the end; may be `end`
        if first == start or end - start < 2:
            whole_uj = max(0, self.energy_uj(end_ns) - self.energy_uj(begin_ns))
            if end - start < 2 or begin_ns < self._h.t_ns[start]:
                return WindowEnergy(
                    whole_uj, self._coarse_uncertainty_uj(begin_ns, end_ns, whole_uj)
                )
            first = start + 1
            last = max(first, last)
        oldest = max(start, first - NEAR)
        if last - first > 4 * NEAR:  # what is far from both ends does not matter
            early = self._h.rows(oldest, first + 2 * NEAR)
            late = self._h.rows(last - NEAR, min(end, last + NEAR))
            h = TickRows(*(one + other for one, other in zip(early, late, strict=True)))
            last = len(early.t_ns) + NEAR
        else:
            h = self._h.rows(oldest, min(end, last + NEAR))
            last -= oldest
        return self._beside(h, begin_ns, end_ns, first - oldest, last, aligned, joins, pauses)

    def _beside(
        self,
        h: TickRows,
        begin_ns: int,
        end_ns: int,
        first: int,
        last: int,
        aligned: bool,
        joins: tuple[bool, bool],
        pauses: Sequence[tuple[int, int]],
    ) -> WindowEnergy:
        """Energy between two instants, with the ticks in pauses or without: the more certain."""
        around = self._around(h, begin_ns, end_ns, first, last, aligned, joins)
        work = self._at_work(h, begin_ns, end_ns, pauses) if aligned and pauses else h
        if work is h:
            return around
        first, last = bisect_left(work.t_ns, begin_ns), bisect_left(work.t_ns, end_ns)
        other = self._around(work, begin_ns, end_ns, first, last, aligned, joins)
        return min(around, other, key=itemgetter(1))

    def _around(
        self,
        h: TickRows,
        begin_ns: int,
        end_ns: int,
        first: int,
        last: int,
        aligned: bool,
        joins: tuple[bool, bool],
    ) -> WindowEnergy:
        """Energy between two instants, from the ticks around: `NEAR` of each, if there are."""
        whole_uj = self._energy_uj(h, end_ns, last) - self._energy_uj(h, begin_ns, first)
        snapped_uj = None
        if aligned:
            snapped_uj = self._snap(h, begin_ns, end_ns, first, last, whole_uj, joins)
        energy_uj = whole_uj if snapped_uj is None else snapped_uj
        deviation_uj = self._deviation_uj(
            h, begin_ns, end_ns, first, last, energy_uj, aligned, whole_uj
        )
        unsnapped = aligned and snapped_uj is None and not self._partial
        if unsnapped and last < len(h.t_ns) and last - first <= 1:
            span_ns = end_ns - begin_ns
            # The energy of its ticks, beyond the least where no other window joins.
            most_uj = h.energy_uj[last] - h.energy_uj[first - 1]
            for joined, uj, beside_ns in (
                (joins[0], self._until(h, first, begin_ns), begin_ns - h.t_ns[first - 1]),
                (
                    joins[1],
                    h.energy_uj[last] - self._energy_uj(h, end_ns, last),
                    h.t_ns[last] - end_ns,
                ),
            ):
                most_uj -= uj if joined else self._joules(self._least_mw, beside_ns)
            most_uj = min(most_uj, self._joules(self._ceiling_mw, span_ns))
            concealed_uj = CONCEALED * max(0, most_uj - energy_uj)
            deviation_uj = math.hypot(deviation_uj, concealed_uj)
        elif snapped_uj is not None and not self._partial:
            before_mw, after_mw = self._mixed_mw(h, first - 1, -1), self._mixed_mw(h, last + 1, 1)
            if last + 1 >= len(h.t_ns):
                after_mw = before_mw  # it counts for both, see `_snap`
            before_ns = 0 if joins[0] else begin_ns - h.t_ns[first - 1]
            after_ns = 0 if joins[1] or last >= len(h.t_ns) else h.t_ns[last] - end_ns
            more_uj = self._joules(before_mw, before_ns) + self._joules(after_mw, after_ns)
            deviation_uj = math.hypot(deviation_uj, CONCEALED * more_uj)
        return WindowEnergy(energy_uj, round(2 * deviation_uj))

    def _mixed_mw(self, h: TickRows, number: int, away: int) -> int:
        """By how much a tick beside a window may be above the power of the pause there: work beyond
        ended or began within it, if the power beyond is higher."""
        beyond = number + away
        if min(number, beyond) < 0 or max(number, beyond) >= len(h.t_ns):
            return 0
        here_mw, beyond_mw = h.level_mw[number], h.level_mw[beyond]
        if beyond_mw < here_mw or not self._contrast(here_mw, beyond_mw):
            return 0
        return max(0, here_mw - self._least_mw)

    def _snap(
        self,
        h: TickRows,
        begin_ns: int,
        end_ns: int,
        first: int,
        last: int,
        whole_uj: int,
        joins: tuple[bool, bool],
    ) -> int | None:
        """The energy if power changes at the window's ends; None: it does not seem to."""
        end = len(h.t_ns)
        before_mw = min(h.level_mw[max(0, first - OUTSIDE) : first])
        after = last
        while after < end and h.t_ns[after] - self._seen_ns(h, after) < end_ns:
            after += 1
        after_mw = min(h.level_mw[after : after + OUTSIDE], default=None)
        inner = first
        if inner < end and h.t_ns[inner] - self._seen_ns(h, inner) < begin_ns:
            inner += 1
        outer = last if last < end and h.t_ns[last] == end_ns else last - 1
        if inner <= outer:
            # Work that goes on beside the window is not a pause, though one may be close.
            if not self._contrast(h.level_mw[first - 1], h.level_mw[inner]):
                before_mw = h.level_mw[inner]
            if after < end and not self._contrast(h.level_mw[after], h.level_mw[outer]):
                after_mw = h.level_mw[outer]
            return self._snap_long(
                h,
                begin_ns,
                end_ns,
                first,
                last,
                (inner, outer),
                (before_mw, after_mw),
                joins,
                whole_uj,
            )
        if last >= end or any(joins):
            return None
        later_mw = before_mw if after_mw is None else after_mw
        # Steady work that goes on has no contrast, though a pause may be close.
        near_mw = h.level_mw[first - 1], h.level_mw[after] if after < end else h.level_mw[first - 1]
        if self._partial:
            return self._snap_unseen(h, begin_ns, end_ns, first, last, before_mw, later_mw)
        if self._excess(h, begin_ns, end_ns, first, last, near_mw) is None:
            return None
        return self._excess(h, begin_ns, end_ns, first, last, (before_mw, later_mw))

    def _excess(
        self,
        h: TickRows,
        begin_ns: int,
        end_ns: int,
        first: int,
        last: int,
        outside_mw: tuple[int, int],
    ) -> int | None:
        """What the ticks around a window have beyond the power outside it."""
        least_mw, _ = self._range_mw(h, first)
        energy_uj = h.energy_uj[last] - h.energy_uj[first - 1]
        energy_uj -= self._joules(outside_mw[0], begin_ns - h.t_ns[first - 1])
        energy_uj -= self._joules(outside_mw[1], h.t_ns[last] - end_ns)
        span_ns, most_mw = end_ns - begin_ns, max(outside_mw)
        if self._error_ns > EXACT.error_ns:
            beyond_uj = abs(energy_uj - self._joules(most_mw, span_ns))
            if beyond_uj < self._joules(most_mw, 2 * self._error_ns):
                return None  # so much follows from the errors of the ticks' times
        return self._if_contrast(energy_uj, span_ns, outside_mw, least_mw)

    def _snap_long(
        self,
        h: TickRows,
        begin_ns: int,
        end_ns: int,
        first: int,
        last: int,
        inside: tuple[int, int],
        outside_mw: tuple[int, int | None],
        joins: tuple[bool, bool],
        whole_uj: int,
    ) -> int | None:
        """A window that contains whole readings; `inside` has the first and the last one."""
        inner, outer = inside
        before_mw, after_mw = outside_mw
        head_mw, tail_mw = h.level_mw[inner], h.level_mw[outer]
        energy_uj = whole_uj
        snapped = False
        least_mw, _ = self._range_mw(h, first)
        if not joins[0] and self._contrast(before_mw, head_mw):
            snapped = True
            from_ns = h.t_ns[inner] - self._seen_ns(h, inner)
            whole = bisect_left(h.t_ns, from_ns)
            energy_uj -= self._energy_uj(h, from_ns, whole) - self._energy_uj(h, begin_ns, first)
            if self._partial or before_mw > head_mw or inner == first:
                energy_uj += self._joules(head_mw, from_ns - begin_ns)
            else:
                shared_uj = h.energy_uj[first] - h.energy_uj[first - 1]
                taken_uj = self._joules(before_mw, begin_ns - h.t_ns[first - 1])
                energy_uj += self._bounded(
                    shared_uj - taken_uj, from_ns - begin_ns, least_mw, self._error_ns
                )
        other_mw = before_mw if after_mw is None else after_mw
        if not joins[1] and self._contrast(other_mw, tail_mw):
            snapped = True
            until_ns = h.t_ns[outer]
            energy_uj -= self._energy_uj(h, end_ns, last) - h.energy_uj[outer]
            if self._partial or other_mw > tail_mw or last in (outer, len(h.t_ns)):
                energy_uj += self._joules(tail_mw, end_ns - until_ns)
            else:
                shared_uj = h.energy_uj[last] - h.energy_uj[last - 1]
                taken_uj = self._joules(other_mw, h.t_ns[last] - end_ns)
                energy_uj += self._bounded(
                    shared_uj - taken_uj, end_ns - until_ns, least_mw, self._error_ns
                )
        return energy_uj if snapped else None

    def _snap_unseen(
        self,
        h: TickRows,
        begin_ns: int,
        end_ns: int,
        first: int,
        last: int,
        before_mw: int,
        later_mw: int,
    ) -> int | None:
        """A window without a whole reading, of a sensor that measures part of each tick."""
        covered_ns, excess_uj = 0, 0
        for number in range(first, last + 1):
            seen_ns = self._seen_ns(h, number)
            from_ns, until_ns = h.t_ns[number] - seen_ns, h.t_ns[number]
            inside_ns = max(0, min(until_ns, end_ns) - max(from_ns, begin_ns))
            if inside_ns:
                covered_ns += inside_ns
                outside_mw = before_mw if from_ns < begin_ns else later_mw
                excess_uj += self._joules(h.level_mw[number], seen_ns)
                excess_uj -= self._joules(outside_mw, seen_ns - inside_ns)
        if 4 * covered_ns < min(self.window_ns or 0, end_ns - begin_ns):
            return None
        span_ns = end_ns - begin_ns
        energy_uj = excess_uj * span_ns // covered_ns
        return self._if_contrast(energy_uj, span_ns, (before_mw, later_mw), 0)

    def _if_contrast(
        self, energy_uj: int, span_ns: int, outside_mw: tuple[int, int], least_mw: int
    ) -> int | None:
        """An energy, if its power differs from that outside and the device can draw it."""
        if span_ns <= 0:
            return None
        bounded_uj = self._bounded(energy_uj, span_ns, least_mw)
        level_mw = bounded_uj * MS // span_ns
        if all(self._contrast(level_mw, other_mw) for other_mw in outside_mw):
            return bounded_uj
        return None

    def _bounded(self, energy_uj: int, span_ns: int, least_mw: int, slack_ns: int = 0) -> int:
        """An energy that the device can draw in a time, which is known to `slack_ns`."""
        least_uj = self._joules(least_mw, max(0, span_ns - slack_ns))
        return min(max(least_uj, energy_uj), self._joules(self._ceiling_mw, span_ns + slack_ns))

    # ----------------------------------------------------------------------------- uncertainty

    def _deviation_uj(
        self,
        h: TickRows,
        begin_ns: int,
        end_ns: int,
        first: int,
        last: int,
        energy_uj: int,
        aligned: bool,
        whole_uj: int,
    ) -> float:
        """One standard deviation, from the unsteadiness of the load in the ticks around.

        `whole_uj` is the curve's energy; `energy_uj` may be the aligned window's.
        """
        end = len(h.t_ns)
        span_ns = max(1, end_ns - begin_ns)
        stop = min(last, end - 1)
        tick_ns = h.t_ns[first] - h.t_ns[first - 1] if first < end else 100 * MS
        tick_ns = max(1, min(tick_ns, 1_000 * MS))
        snapped = energy_uj != whole_uj
        level_mw = energy_uj * MS / span_ns
        low, high = max(1, first - AROUND), min(end - 1, stop + AROUND)
        if snapped:
            outer_mw = max(self._roughness(h, low, first - 1), self._roughness(h, stop + 2, high))
            inner_mw = self._roughness(h, min(first + 2, stop), min(stop - 1, first + 2 * AROUND))
            rough_mw = max(outer_mw, inner_mw)
        else:
            outer_mw = 0.0
            rough_mw = max(
                self._roughness(h, low, min(end - 1, first + AROUND)),
                self._roughness(h, max(1, stop - AROUND), high),
            )
        unseen_ns = tick_ns - self._seen_ns(h, min(first, end - 1))
        ends_ns = math.sqrt(min(span_ns, tick_ns) * tick_ns)
        ends_mwns = (UNSEEN if unseen_ns > 0 else UNSEEN_IN_MEANS) * rough_mw * ends_ns
        if unseen_ns <= 0 and last < end:
            # The energy is known at the ticks, and what may be drawn in between has a limit.
            near_ns = sum(
                min(t_ns - h.t_ns[number - 1], h.t_ns[number] - t_ns)
                for t_ns, number in ((begin_ns, first), (end_ns, last))
            )
            ends_mwns = min(ends_mwns, self._ceiling_mw * near_ns / 2)
        parts = [
            self._stamp_mwns(h, first, last, level_mw, snapped),
            STEADY * level_mw * span_ns + self._resolution_mw * span_ns / 2,
            FLOOR * level_mw * min(span_ns, tick_ns),
            ends_mwns,
        ]
        if unseen_ns > 0:
            ticks = span_ns / tick_ns
            parts.append(UNSEEN * rough_mw * min(unseen_ns, span_ns) * math.sqrt(max(ticks, 0.2)))
        if not snapped:
            parts.append(self._leeway_mwns(h, begin_ns, first) + self._leeway_mwns(h, end_ns, last))
        if snapped:
            # Part of its energy may belong to work around it.
            jump_mw = max(1.0, abs(level_mw - h.level_mw[first - 1]))
            doubt = min(1.0, 4 * outer_mw / jump_mw)
            parts.append(0.6 * doubt * abs(energy_uj - whole_uj) * MS)
            if self.window_ns is not None:
                # A reading that seems to be inside may be partly outside, and one before it may be
                # of work that has ended since.
                parts.append(jump_mw * self._error_ns * min(3.0, span_ns / self.window_ns))
                least_mw, most_mw = self._range_mw(h, first)
                parts.append(0.3 * doubt * (most_mw - least_mw) * min(span_ns, tick_ns))
        elif aligned and unseen_ns > 0 and span_ns < tick_ns:
            # An idle device, and work between two readings: it may have drawn any power.
            quiet_mw = max(h.level_mw[first - 1], h.level_mw[stop])
            if 3 * quiet_mw < self._ceiling_mw:
                parts.append(0.5 * (self._ceiling_mw - quiet_mw) * min(span_ns, unseen_ns))
        if last >= end:  # the tick that shows it is not there
            parts.append(0.3 * level_mw * min(span_ns, end_ns - h.t_ns[end - 1]))
        return math.hypot(*parts) / MS

    def _at_work(
        self, h: TickRows, begin_ns: int, end_ns: int, pauses: Sequence[tuple[int, int]]
    ) -> TickRows:
        """The ticks as if the work of a window had gone on in the pauses around it: without those
        that have a reading in a pause, if another reading is inside the window."""
        paused = set[int]()
        earliest = bisect_left(pauses, h.t_ns[0], key=_end)
        for from_ns, until_ns in pauses[earliest : bisect_left(pauses, h.t_ns[-1], key=_begin)]:
            if from_ns < end_ns and begin_ns < until_ns:
                continue  # it is part of the window
            number = max(1, bisect_left(h.t_ns, from_ns))
            while number < len(h.t_ns) and h.t_ns[number] - self._seen_ns(h, number) < until_ns:
                paused.add(number)
                number += 1
        within = range(max(1, bisect_left(h.t_ns, begin_ns)), bisect_right(h.t_ns, end_ns))
        whole = (n for n in within if h.t_ns[n] - self._seen_ns(h, n) >= begin_ns)
        if not paused or paused.issuperset(whole):
            return h
        # Nothing is left of the work before a pause that begins no later than the oldest tick.
        oldest = next(n for n in range(1, len(h.t_ns)) if n not in paused) if 1 in paused else 0
        rows = [(h.t_ns[0], h.energy_uj[0], h.level_mw[oldest], h.power_mw[0])]
        for number in range(1, len(h.t_ns)):
            t_ns, energy_uj, level_mw = h.t_ns[number], h.energy_uj[number], h.level_mw[number]
            last_ns, last_uj, last_mw, _ = rows[-1]
            if number in paused:
                if number < len(h.t_ns) - 1:
                    continue
                level_mw = last_mw
            if paused.isdisjoint((number - 1, number)):
                energy_uj += last_uj - h.energy_uj[number - 1]
            else:
                seen_ns = self._seen_ns(h, number) if self._partial else t_ns - last_ns
                energy_uj = last_uj + self._joules(level_mw, seen_ns)
                energy_uj += self._joules((last_mw + level_mw) // 2, t_ns - last_ns - seen_ns)
            rows.append((t_ns, energy_uj, level_mw, h.power_mw[number]))
        return TickRows(*map(list, zip(*rows, strict=True)))

    def _stamp_mwns(
        self,
        h: TickRows,
        first: int,
        last: int,
        level_mw: float,
        snapped: bool,
    ) -> float:
        """Error of a window from errors of the ticks' times, mW ns.

        A tick that is a little earlier or later changes a window by the difference in power at its
        end. A snapped window, which takes all power above its surroundings', changes by more,
        because a driver's samples leave out some time between two of them, or have it twice.
        """
        more_ns = self._error_ns - EXACT.error_ns
        if not more_ns:
            changes_mw = 0.0
        elif snapped:
            beside_mw = h.level_mw[first - 1], h.level_mw[min(last + 1, len(h.t_ns) - 1)]
            changes_mw = math.hypot(*(level_mw - one for one in beside_mw))
        else:
            changes_mw = 0.0
            for one in (first, last):
                around = h.level_mw[max(0, one - 1) : one + 2]
                changes_mw += max(around) - min(around)
        return level_mw * EXACT.error_ns + changes_mw * more_ns

    def _leeway_mwns(self, h: TickRows, t_ns: int, number: int) -> float:
        """Error of the energy at an instant if only a tick's mean is known: its power may have been
        anything between the powers of the ticks around."""
        if not 0 < number < len(h.t_ns):
            return 0.0
        span_ns = h.t_ns[number] - h.t_ns[number - 1]
        stalled = span_ns > STALL_NS
        if not stalled and self._seen_ns(h, number) < span_ns:
            return 0.0  # see UNSEEN
        least, most = self._range_mw(h, number)
        if stalled:
            least, most = min(least, self._least_mw), max(most, self._ceiling_mw)
        here_mw, last_mw = h.level_mw[number], h.level_mw[number - 1]
        next_mw = h.level_mw[number + 1] if number + 1 < len(h.t_ns) else last_mw
        if self._contrast(here_mw, last_mw) and self._contrast(here_mw, next_mw):
            # Work started and ended within the tick: its power is not known.
            if here_mw > max(last_mw, next_mw):
                most = max(most, self._ceiling_mw)
            elif here_mw < min(last_mw, next_mw):
                least = 0
        before_ns, after_ns = t_ns - h.t_ns[number - 1], h.t_ns[number] - t_ns
        total = h.level_mw[number] * span_ns
        highest = min(most * before_ns, total - least * after_ns)
        lowest = max(least * before_ns, total - most * after_ns)
        return max(0.0, highest - lowest) / 3

    def _range_mw(self, h: TickRows, number: int) -> tuple[int, int]:
        """Lowest and highest power of a tick and those around it."""
        levels = h.level_mw[max(0, number - AROUND) : number + AROUND + 1]
        return min(levels), max(levels)

    def _roughness(self, h: TickRows, low: int, high: int) -> float:
        """Mean difference in power between consecutive ticks, mW."""
        low = max(low, 1)
        if high < low:
            return 0.0
        levels = h.level_mw[low - 1 : high + 1]
        differences: Iterator[int] = map(abs, map(sub, levels[1:], levels))
        return sum(differences) / (high + 1 - low)

    def _coarse_uncertainty_uj(self, begin_ns: int, end_ns: int, energy_uj: int) -> int:
        ring = self._h.coarse(begin_ns)
        grain_ns = 100 * MS
        if ring is not None and ring.end - ring.start > 1:
            times = ring.column(0)
            grain_ns = (times[ring.end - 1] - times[ring.start]) // (ring.end - 1 - ring.start)
        span_ns = max(1, end_ns - begin_ns)
        return round(energy_uj * min(1.0, 0.5 * grain_ns / span_ns))

    # --------------------------------------------------------------------------------- internals

    @property
    def _partial(self) -> bool:
        return self.window_ns is not None

    def _seen_ns(self, h: TickRows, number: int) -> int:
        """Part of a tick that its reading covers."""
        span_ns = h.t_ns[number] - h.t_ns[number - 1]
        return span_ns if self.window_ns is None else min(self.window_ns, span_ns)

    @staticmethod
    def _contrast(one_mw: int, other_mw: int) -> bool:
        difference = abs(one_mw - other_mw)
        return difference > CONTRAST_MW and difference > CONTRAST * max(one_mw, other_mw)

    @staticmethod
    def _joules(power_mw: int, span_ns: int | float) -> int:
        """Energy of a power over a time, microjoules."""
        return round(power_mw * span_ns / MS)

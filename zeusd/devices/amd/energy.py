"""AMD's counters: the energy's unit and wrap, and whether it is trusted; the time limited."""

from __future__ import annotations

from collections.abc import Sequence

ABSENT = 0xFFFFFFFFFFFFFFFF
"""The library's value if the driver's metrics have no energy."""

_WRAP = 1 << 32
"""Range of the 32-bit counter of the oldest metrics tables: 65,536 J."""

MAX_POWER_W = 5_000
"""More than any socket draws."""

_RATIOS = (0.7, 1.4)
"""Ratio of counted to integrated energy, for a counter that is trusted."""


def microjoules(counter: int) -> int:
    """Energy of a counter's value. The firmware's unit is 2^-16 J, not 15.3 uJ as in the
    library."""
    return counter * 1_000_000 >> 16


class EnergyCounter:
    """Follows one socket's counter.

    Attributes:
        believed: Whether the counter agrees with the power reading. True until it does not.
        changed: Whether `believed` changed with the last reading.
    """

    def __init__(self) -> None:
        self.believed = True
        self.changed = False
        self._against = 0
        self._wrapped = 0
        self._raw: int | None = None
        self._raw_ns = 0
        self._start: tuple[int, int] | None = None  # ns, counter
        self._last: tuple[int, int] | None = None  # ns, W
        self._drawn_uj = 0

    def energy_uj(self, t_ns: int, raw: int, power_w: int | None) -> int | None:
        """Energy of a reading, in uJ.

        Args:
            t_ns: When it was taken.
            raw: The counter.
            power_w: Power, from the reading beside it.

        Returns:
            None: there is no counter, as on the second die of an MI250, or it is not trusted.
        """
        self.changed = False
        if raw in (0, ABSENT):
            return None
        counter = self._unwrapped(t_ns, raw)
        self._check(t_ns, counter, power_w)
        return microjoules(counter) if self.believed else None

    def _unwrapped(self, t_ns: int, raw: int) -> int:
        """Energy since the last value. A smaller value is a wrap if that energy is possible, else a
        reset."""
        before, before_ns = self._raw, self._raw_ns
        self._raw, self._raw_ns = raw, t_ns
        if before is not None and raw < before:
            most = MAX_POWER_W * (t_ns - before_ns) * 65_536 // 1_000_000_000
            if before < _WRAP and raw + _WRAP - before <= most:
                self._wrapped += _WRAP
            else:
                self._wrapped = 0
                self._start = None
        return raw + self._wrapped

    def _check(self, t_ns: int, counter: int, power_w: int | None) -> None:
        last, self._last = self._last, None if power_w is None else (t_ns, power_w)
        # Longest pause between readings over which the power is known well enough.
        if power_w is None or last is None or t_ns - last[0] > 1_000_000_000 or self._start is None:
            self._start, self._drawn_uj = (t_ns, counter), 0
            return
        self._drawn_uj += (t_ns - last[0]) * (last[1] + power_w) // 2_000
        start_ns, start = self._start
        # Energy and power are compared over at least this time.
        if t_ns - start_ns < 2_000_000_000:
            return
        drawn_uj, self._drawn_uj = self._drawn_uj, 0
        self._start = t_ns, counter
        # Below this mean power, rounding to whole watts outweighs the counter's error.
        if drawn_uj * 1_000 < 20 * (t_ns - start_ns):
            return
        ratio = microjoules(counter - start) / drawn_uj
        agrees = _RATIOS[0] <= ratio <= _RATIOS[1]
        self._against = self._against + 1 if agrees is not self.believed else 0
        # Windows in a row that change the verdict.
        if self._against >= 3:
            self.believed, self.changed, self._against = agrees, True, 0


class LimitedTime:
    """Follows one socket's counters of violations, which are numbers of samples."""

    def __init__(self) -> None:
        self._power_ns = self._heat_ns = 0
        self._last: tuple[int, Sequence[int]] | None = None

    def ns(self, t_ns: int, counts: Sequence[int]) -> tuple[int | None, ...]:
        """The time limited for each of `REASONS`, since the first reading; empty: not counted.

        Args:
            t_ns: When it was read.
            counts: All samples, and those in violation, see `layouts.VIOLATIONS`.
        """
        if ABSENT in (counts[0], counts[2]):
            return ()
        last_ns, last = self._last or (t_ns, counts)
        samples, hot, power, *hotter = (
            0 if ABSENT in (now, before) else now - before
            for now, before in zip(counts, last, strict=True)
        )
        if samples > 0 and min(hot, power, *hotter) >= 0:  # else the driver was loaded again
            passed_ns = t_ns - last_ns
            self._power_ns += passed_ns * min(power, samples) // samples
            # Several may have been too hot at once.
            self._heat_ns += passed_ns * min(max(hot, *hotter), samples) // samples
        if samples or self._last is None:
            self._last = t_ns, counts
        return self._power_ns, self._heat_ns, None, None, None

"""Finds the lowest clock that meets a serving engine's latency objectives; pure: no I/O, no clock.

It receives numbers after each step, and returns a clock. Times are seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from zeus.serving.clock_load import (
    LONGEST_S,
    MOST,
    Load,
    Objective,
    Prediction,
    Queue,
    RateBound,
    Step,
    levels,
    number,
)
from zeus.serving.clock_model import Comparison, StepTime, Stretch, saturation
from zeus.serving.clock_power import LEAST_WINDOWS, Floor, longer_busy

COLD_STEPS = 100
"""Steps at the highest clock before any other clock."""

DOWN_S = 0.2
"""Time between two steps down; steps up are immediate."""

KNOWN_LEVELS = 3
"""Levels per step down if the step times there are known."""

SETTLE_S = 0.06
"""Time after a change in which it is not known at which clock a step ran."""

ESCAPE_OVER = 0.35
ESCAPE_SIGMAS = 5.0
ESCAPE_STEPS = 4
ESCAPE_S = 1.0
"""After this many steps in a row that are longer than predicted by this share, and by this many
residuals, use the highest clock for this time. Residuals count where step times are noisy."""

SILENT_S = 0.3
"""Time without a step, while there are requests, after which to use the highest clock."""

DOWN_SLACK = 0.97
"""Additional margin that a lower clock must have."""

SHORT_OUTPUT = 15.0
"""Tokens that queued prompts are assumed to delay: sequences with short outputs miss first. A share
of the mean output saved 0.3 points more, with twice the violations under bursts."""

SHORTEST_S = 1e-6
"""Shortest measurable step."""

LATE_S = 1.0
"""Largest age of a number relative to the newest: threads and processes may be out of order."""

LOST, FOUND = 0.3, 0.15
"""Share of requests that miss an objective above which they cannot be met at any clock, until it is
below the second again."""

LOST_REQUESTS = 40
"""Requests that this share is of."""


class ClockPolicy:
    """Chooses the lowest clock whose predicted TTFT and TPOT meet their objectives.

    It changes its choice at most 200 times in any minute, of which the last is to the highest
    clock.

    Args:
        clocks_mhz: Clocks that may be set, MHz, in any order.
        ttft_s: Objective for each request's time to first token, s.
        tpot_s: Objective for each request's mean time per output token, s.
        floor_mhz: No clock below this one; None: it finds a floor by itself.
        stretch: Values from earlier runs: how much longer a decode step is at a clock, by MHz.

    Raises:
        ValueError: No clock is offered, or an objective is not a positive number.
    """

    def __init__(
        self,
        clocks_mhz: Iterable[int],
        ttft_s: float,
        tpot_s: float,
        floor_mhz: float | None = None,
        stretch: dict[int, float] | None = None,
    ) -> None:
        for name, value in (("ttft_s", ttft_s), ("tpot_s", tpot_s)):
            if not 0.0 < value < MOST:
                raise ValueError(f"{name} must be a positive number of seconds, not {value!r}")
        if floor_mhz is not None and not 0.0 <= floor_mhz < MOST:
            raise ValueError(f"floor_mhz must be a clock in MHz or None, not {floor_mhz!r}")
        self.clocks_mhz = levels(clocks_mhz, floor_mhz)
        """The clocks it may want, the highest first."""
        self.highest_mhz = self.clocks_mhz[0]
        self._ratios = [clock / self.highest_mhz for clock in self.clocks_mhz]
        self._ttft, self._tpot = Objective(ttft_s), Objective(tpot_s)
        self._missed = 0.0  # share of requests
        self._lost = False  # the objectives cannot be met
        self._find_floor = floor_mhz is None
        self._time = StepTime()
        self._stretch = Stretch(self._ratios)
        if stretch:
            self._stretch.load([stretch.get(clock) for clock in self.clocks_mhz])
        self._comparison = Comparison()
        self._load = Load()
        self.floor = Floor(self._ratios)
        """Learns from the board's energy below which clock nothing is saved."""
        self._rate = RateBound(self.highest_mhz)
        self._level = self._level_before = 0
        self._lowest = len(self.clocks_mhz) - 1
        self._lowest_at = -math.inf
        self._steps = 0
        self._ended_s: float | None = None  # the last step
        self._counted_s: float | None = None  # time until which the load is counted
        self._changed_s = -math.inf
        self._down_s = -math.inf
        self._escape_until_s = -math.inf
        self._over = 0
        self._below = 0.0  # share of recent time below the highest clock
        self._decoding = 0.0
        self._present = False  # whether there were requests after the last step
        self._ended, self._ended_before = 0, 0
        self.escapes = 0

    # ------------------------------------------------------------------------------------- inputs

    def step(self, step: Step, queue: Queue) -> int:
        """Handles the end of a step. Returns the clock wanted from now on, MHz. Never raises for
        implausible numbers, but returns the highest clock.
        """
        begin, end, *counts, oldest = map(number, (*step[:5], *queue))
        if not (
            begin < end < begin + LONGEST_S and all(count >= 0 for count in counts) and oldest >= 0
        ):
            return self._unknown(end)
        prompt, sequences, context, waiting, backlog = counts
        last = self._ended_s
        if last is None or end - last > 3600.0:
            last = begin
        elif end <= last:  # slightly out of order, or time has gone back
            return self.clocks_mhz[self._level] if last - end < LATE_S else self._unknown(end)
        took = end - (begin if begin > last else last)
        if took < SHORTEST_S:
            return self.clocks_mhz[self._level]
        counted = self._counted_s
        passed = end - counted if counted is not None and last <= counted < end else end - last
        passed = passed if passed > took else took
        self._ended_s = self._counted_s = end
        mhz = number(step.clock_mhz, 1.0)
        r = self._ratios[self._level] if math.isnan(mhz) else mhz / self.highest_mhz
        r = min(max(r, 0.05), 1.0)
        if prompt or sequences:
            self._learn(end - took, end, took, prompt, sequences, context, r)
            self.floor.step(end - took, end, self._stretch.at(r), r)
        self._below += (passed / (3.0 + passed)) * ((r < 0.995) - self._below)
        left = sequences < self._decoding
        ended = self._ended - (int(self._decoding - sequences) if left else 0)
        self._ended_before, self._ended = min(max(0, ended), self._ended), 0
        self._decoding = sequences
        self._load.step(passed, took, prompt, sequences, context, waiting, backlog, oldest)
        self._present = waiting > 0 or backlog > 0
        return self._choose(end)

    def finished(self, ttft_s: float, tpot_s: float) -> None:
        """Handles the end of a request, just before or just after its last step.

        Args:
            ttft_s: Its time to first token, s.
            tpot_s: Its mean time per further token, s; 0 if it has a single token.
        """
        self._ended += 1
        self.seen(ttft_s, tpot_s)

    def seen(self, ttft_s: float, tpot_s: float) -> None:
        """Handles a request's latencies if the feed does not know which request: `finished` without
        its end."""
        ours = min(1.0, 2.0 * self._below)
        late_first = self._ttft.finished(number(ttft_s, 0.0), ours)
        late_mean = self._tpot.finished(number(tpot_s, 0.0), ours)
        self._missed += ((late_first or late_mean) - self._missed) / LOST_REQUESTS
        self._lost = self._missed > (FOUND if self._lost else LOST)

    def drained(self) -> None:
        """Handles that the engine has no request. Optional: `finished` also shows it. A feed with
        neither leads to the highest clock while idle.
        """
        self._present = False
        self._decoding = 0.0

    def idle(self, now_s: float) -> int:
        """Handles that no step runs, or no statistics arrive. Returns the clock wanted from now on,
        MHz. Call it about every 0.1 s.
        """
        last, counted, now_s = self._ended_s, self._counted_s, number(now_s)
        if last is None or counted is None or not last - LATE_S <= now_s:
            return self._unknown(now_s)
        if self._present or self._decoding > self._ended + self._ended_before:
            if now_s - last >= SILENT_S:
                self.floor.forget()  # the energy of steps that are not known explains nothing
                return self._go(0, now_s)
        elif now_s - counted > 0.05:
            self._counted_s = now_s
            self._load.step(now_s - counted, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
            self._decoding = 0.0
            return self._choose(now_s)
        return self.clocks_mhz[self._level]

    def energy(self, begin_s: float, end_s: float, joules: float) -> None:
        """Reports the board's energy between two instants of the steps' clock, J; windows of about
        1 s. Optional: it improves the floor if a GPU's power curve is unusual.
        """
        begin_s, end_s, joules = map(number, (begin_s, end_s, joules))
        if joules > 0.0 and begin_s < end_s:
            self.floor.energy(begin_s, end_s, joules)

    # ------------------------------------------------------------------------------------ outputs

    @property
    def clock_mhz(self) -> int:
        """The clock wanted now, MHz."""
        return self.clocks_mhz[self._level]

    @property
    def violations(self) -> tuple[int, int]:
        """Requests that missed the objective for TTFT, and that for TPOT."""
        return self._ttft.violations, self._tpot.violations

    @property
    def stretch(self) -> dict[int, float]:
        """Learned values: how much longer a decode step is, by clock, MHz."""
        return {
            clock: self._stretch.values[level]
            for level, clock in enumerate(self.clocks_mhz)
            if self._stretch.known[level]
        }

    def predict(self) -> Prediction:
        """Predicted latencies at the clock wanted now, under the present load."""
        return self._predict(self._level)

    def saving(self) -> float:
        """Share of energy saved compared with the highest clock, from the fit of the board's
        energy, for the present clock and load; NaN: too little energy was reported.
        """
        if self.floor.windows < LEAST_WINDOWS:
            return math.nan
        return self.floor.saving(self._level, self._stretch.values, self._busy())

    # ------------------------------------------------------------------------------------ internals

    def _unknown(self, now_s: float) -> int:
        """Discards what is known about the present."""
        now = self._ended_s if math.isnan(now_s) else now_s
        self._ended_s = self._counted_s = now
        self._comparison.cancel()
        self.floor.forget()
        self._changed_s = self._down_s = self._lowest_at = -math.inf
        self._over = 0
        now = 0.0 if now is None else now
        self._escape_until_s = now + ESCAPE_S
        return self._go(0, now)

    def _learn(
        self,
        begin: float,
        end: float,
        took: float,
        prompt: float,
        sequences: float,
        context: float,
        r: float,
    ) -> None:
        settled = begin >= self._changed_s + SETTLE_S
        stretch, time = self._stretch, self._time
        longer = stretch.at(r)
        base = time.decode(sequences, context)
        expected = longer * base + time.prefill(prompt, sequences, longer, r)
        self._steps += 1
        most = max(ESCAPE_OVER, ESCAPE_SIGMAS * min(0.2, time.residual2**0.5))
        if settled and self._steps > COLD_STEPS and took > (1 + most) * expected:
            self._over += 1
            if self._over >= ESCAPE_STEPS:
                self._over = 0
                if self._level:
                    self.escapes += 1
                self._escape_until_s = end + ESCAPE_S
                time.open()
                self._comparison.cancel()
        else:
            self._over = 0
        if not settled:
            return
        level = self._level
        if abs(self._ratios[level] - r) > 0.01:
            self._comparison.cancel()  # running at another clock than requested
        elif not prompt and sequences:
            drift = self._comparison.add(took / base)
            if drift is not None:
                self._compared(drift)
        time.update(sequences, context, prompt, longer, r, took)

    def _compared(self, longer: float) -> None:
        """Sets how much longer steps are at this level than at the previous one."""
        level, before = self._level, self._level_before
        stretch = self._stretch
        if stretch.known[before] and (before < level or not stretch.known[level]):
            stretch.learn(level, longer * stretch.values[before])
        elif stretch.known[level]:
            stretch.learn(before, stretch.values[level] / longer)

    def _predict(self, level: int) -> Prediction:
        time, load = self._time, self._load
        s, r = self._stretch.values[level], self._ratios[level]
        token = time.token_s / r
        share = load.prompt_rate * token  # share of time for prompts
        free = 1.0 - share
        room = free - s * (time.sequence_s + time.context_s * load.each_context) * load.output_rate
        if room <= 0.02:
            return Prediction(math.inf, math.inf, math.inf)
        flat = time.base_s + time.saturating_s * saturation(load.sequences)
        steady = s * flat / room
        step_s = s * time.decode(load.sequences, load.context)
        backlog_s = load.backlog * token
        queued = step_s / free + backlog_s / SHORT_OUTPUT
        chunk = load.chunk
        first_s = step_s + time.prefill(chunk, load.sequences, s, r)  # a prompt that arrives now
        if load.backlog > 0.0:
            steps = 1.0 + load.backlog / chunk if chunk > 0 else 1.0
            first_s = max(first_s, load.oldest_s + backlog_s + steps * step_s)
        return Prediction(steady, queued, first_s)

    def _keeps(self, level: int, slack: float) -> bool:
        steady, queued, first = self._predict(level)
        return self._tpot.keeps(max(steady, queued), slack) and self._ttft.keeps(first, slack)

    def _choose(self, now: float) -> int:
        if self._steps < COLD_STEPS or self._lost or now < self._escape_until_s:
            return self._go(0, now)
        level = self._level
        if now >= self._lowest_at + 0.5:
            self._lowest_at = now
            if self._find_floor:
                stretch = self._stretch
                self._lowest = self.floor.level(stretch.values, stretch.known, self._busy())
        if level and not self._keeps(level, 1.0):
            level -= 1
            while level and not self._keeps(level, DOWN_SLACK):
                level -= 1
            return self._go(level, now)
        if level > self._lowest and now >= self._down_s + DOWN_S:
            return self._go(level - 1, now)
        if (
            level < self._lowest
            and now >= self._down_s + DOWN_S
            and not (self._comparison.under_way and now < self._changed_s + 2.0)
            and self._keeps(level + 1, DOWN_SLACK)
        ):
            self._down_s = now
            lower = level + 1
            known = self._stretch.known
            last = min(self._lowest, level + KNOWN_LEVELS)
            while lower < last and known[lower + 1] and self._keeps(lower + 1, DOWN_SLACK):
                lower += 1
            return self._go(lower, now)
        return self.clocks_mhz[level]

    def _busy(self) -> float:
        """Share of time in which steps would run at the highest clock."""
        return longer_busy(self._load.busy, 1.0 / self._stretch.values[self._level])

    def _go(self, level: int, now: float) -> int:
        before = self._level
        if level != before:
            clock = self._rate.allowed(now, self.clocks_mhz[before], self.clocks_mhz[level])
            level = self.clocks_mhz.index(clock)
        if level != before:
            self._comparison.changed()
            self._level, self._level_before = level, before
            self._changed_s = now
            if level < before:
                self._down_s = now
        return self.clocks_mhz[level]

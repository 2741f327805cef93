"""What the clock policy is told and keeps of it: inputs, the engine's load, margins to the
objectives, and the bound on changes; pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

LEVEL_SHARE = 0.05
"""Smallest distance between two levels, as a share of the highest clock."""

LOWEST_SHARE = 0.3
"""Clocks below this share of the highest are not used."""

MOST = 1e9
"""Largest plausible number."""

LONGEST_S = 60.0
"""Longest plausible step."""


class Step(NamedTuple):
    """One step of the engine.

    Attributes:
        begin_s: When it began, s.
        end_s: When it ended, s.
        prefill_tokens: Prompt tokens that it computed.
        decode_sequences: Sequences that got a token.
        decode_context: Sum of their contexts, tokens.
        clock_mhz: Effective clock; not a positive number where it is not known.
    """

    begin_s: float
    end_s: float
    prefill_tokens: float
    decode_sequences: float
    decode_context: float
    clock_mhz: float


class Queue(NamedTuple):
    """The queue at the end of a step.

    Attributes:
        waiting: Requests whose prompt is not computed.
        backlog_tokens: Prompt tokens not yet computed.
        oldest_wait_s: Time since the oldest of them arrived, s.
    """

    waiting: float
    backlog_tokens: float
    oldest_wait_s: float


class Prediction(NamedTuple):
    """Predictions for a clock: mean TPOT in the steady state, mean TPOT of the present batch and
    queue, and TTFT of the queue, s.
    """

    steady_tpot_s: float
    tpot_s: float
    ttft_s: float


def levels(clocks_mhz: Iterable[int], floor_mhz: float | None) -> list[int]:
    """Some of the offered clocks, from the highest down, far enough apart to be worth a change.

    Raises:
        ValueError: No clock is offered.
    """
    offered: Sequence[int] = sorted(
        {int(clock) for clock in clocks_mhz if 0 < clock < MOST and clock == int(clock)},
        reverse=True,
    )
    if not offered:
        raise ValueError("clocks_mhz is empty; pass the clocks that the GPU offers, in MHz")
    chosen = [offered[0]]
    lowest = max(LOWEST_SHARE * chosen[0], floor_mhz or 0.0)
    for clock in offered:
        if clock >= lowest and chosen[-1] - clock >= LEVEL_SHARE * chosen[0]:
            chosen.append(clock)
    return chosen


def number(value: Any, low: float = -MOST) -> float:
    """A value as a plausible number; NaN: it is none, or below `low`."""
    try:
        parsed = float(value)
    except (TypeError, ValueError, ArithmeticError):
        return math.nan
    return parsed if low <= parsed < MOST else math.nan


FAST_S = 4.0
SLOW_S = 25.0
"""Time constants of rates: one for bursts, one for a steady load."""

FORECAST_S = 2.0
"""Time by which the growth of the batch is extrapolated: a spike is answered before it is there."""

SHORT_S = 0.4
LONG_S = 1.6
"""Time constants of two means whose difference gives the growth of the batch."""


class Load:
    """Rates of the open load, and the present batch.

    Attributes:
        sequences: Decoding sequences expected soon, including those of queued requests.
        context: Their context, tokens.
        each_context: Context of one sequence, tokens.
        backlog: Prompt tokens not yet computed.
        oldest_s: Wait of the oldest request, s.
        prompt_rate: Arrival rate of prompt tokens, 1/s: the higher of the fast and the slow mean.
        output_rate: Demand of output tokens, 1/s.
        chunk: Most prompt tokens in a recent step.
    """

    def __init__(self) -> None:
        self.sequences = 0.0
        self.context = 0.0
        self.each_context = 500.0
        self.backlog = 0.0
        self.oldest_s = 0.0
        self.prompt_rate = 0.0
        self.output_rate = 0.0
        self.chunk = 0.0
        self.busy = 1.0
        self._prompt_fast = self._prompt_slow = 0.0
        self._output_fast = self._output_slow = 0.0
        self._short = self._long = 0.0
        self._backlog = 0.0

    @property
    def slow_output_rate(self) -> float:
        """Output tokens, 1/s, over the last half minute."""
        return self._output_slow

    def step(
        self,
        passed_s: float,
        busy_s: float,
        prompt: float,
        sequences: float,
        context: float,
        waiting: float,
        backlog: float,
        oldest_s: float,
    ) -> None:
        """Adds one step, or an interval without steps.

        Args:
            passed_s: Time since the previous step, s.
            busy_s: The step's part of it, s.
            prompt: Prompt tokens that it computed.
            sequences: Sequences that decoded.
            context: Their context, tokens.
            waiting: Waiting requests.
            backlog: Prompt tokens not yet computed.
            oldest_s: Wait of the oldest, s.
        """
        fast = passed_s / (FAST_S + passed_s)
        slow = passed_s / (SLOW_S + passed_s)
        arrived = prompt + backlog - self._backlog
        prompt_rate = arrived / passed_s if arrived > 0.0 else 0.0
        output_rate = sequences / passed_s
        self._prompt_fast += fast * (prompt_rate - self._prompt_fast)
        self._prompt_slow += slow * (prompt_rate - self._prompt_slow)
        self._output_fast += fast * (output_rate - self._output_fast)
        self._output_slow += slow * (output_rate - self._output_slow)
        self.busy += slow * (busy_s / passed_s - self.busy)
        now = sequences + waiting
        short = passed_s / (SHORT_S + passed_s)
        long = passed_s / (LONG_S + passed_s)
        self._short += short * (now - self._short)
        self._long += long * (now - self._long)
        growth = (self._short - self._long) * (FORECAST_S / (LONG_S - SHORT_S))
        growth = 0.0 if growth < 0.0 else min(growth, now + 8.0)
        if sequences >= 1.0:
            self.each_context += 0.05 * (context / sequences - self.each_context)
        self.sequences = now + growth
        self.context = context + backlog + growth * self.each_context
        self.backlog = self._backlog = backlog
        self.oldest_s = oldest_s
        self.chunk = max(prompt, self.chunk * (1.0 - min(1.0, passed_s / 120.0)))
        self.prompt_rate = max(self._prompt_fast, self._prompt_slow)
        wanted = 0.0
        if self._prompt_slow > 1.0:  # arrived prompts will need their outputs
            wanted = self.prompt_rate * self._output_slow / self._prompt_slow
        self.output_rate = max(self._output_fast, self._output_slow, min(wanted, 4 * output_rate))


NEAR = 0.9
"""A request above this share of its objective is a near miss."""

LOWEST, HIGHEST, FIRST = 0.5, 1.0, 0.7
"""Range of the margin."""

RISE, NEAR_FALL, MISS_FALL = 3e-4, 0.015, 0.06
"""Changes of the margin by a request, a near miss and a miss. So the margin is stable with one near
miss in 50 requests, or one miss in 200: misses often occur in clusters. Twice the fall for a miss
was measured: a bursty load misses half as often, and a day's load saves 3 points less."""


class Objective:
    """One objective, its misses, and the share of it that a prediction may use."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.margin = FIRST
        self.violations = 0

    def finished(self, seen_s: float, ours: float) -> bool:
        """Handles a request; returns whether it missed.

        Args:
            seen_s: Its latency, s; NaN: not known, so nothing changes.
            ours: Share of the time before in which the clock was below the highest: no margin can
                avoid misses at the highest clock.
        """
        late = seen_s > self.seconds
        self.violations += late
        if seen_s > NEAR * self.seconds:
            fall = MISS_FALL if late else NEAR_FALL
            self.margin = max(LOWEST, self.margin - fall * ours)
        elif seen_s >= 0:
            self.margin = min(HIGHEST, self.margin + RISE)
        return late

    def keeps(self, predicted_s: float, slack: float) -> bool:
        """Whether a prediction, with this additional margin, keeps it."""
        return predicted_s <= slack * self.margin * self.seconds


WINDOW_S = 60.0


class RateBound:
    """A limit of changes in any minute, with one reserved to reach the highest clock.

    In the last quarter of a minute's changes, a lower clock waits so long after the last change
    that there is room for the way up. So the limit, at which only the highest clock is left, is
    rarely reached. A minute is 60 s of elapsed time: a clock that is set back adds none, and so
    permits no further change.

    Args:
        per_minute: Most changes; at least 2.
    """

    def __init__(self, highest_mhz: int, per_minute: int = 200) -> None:
        if per_minute < 2:
            raise ValueError(f"per_minute must be at least 2, not {per_minute}")
        self._highest = highest_mhz
        self._most = per_minute
        self._now_s: float | None = None
        self._elapsed_s = 0.0
        self._changes: deque[float] = deque()

    def allowed(self, now_s: float, present_mhz: int, wanted_mhz: int) -> int:
        """The clock to set now: the wanted one, the highest, or the present one. If it is not the
        present one, it counts as a change."""
        if self._now_s is not None and now_s > self._now_s:
            self._elapsed_s += now_s - self._now_s
        self._now_s = now_s
        changes = self._changes
        while changes and changes[0] <= self._elapsed_s - WINDOW_S:
            changes.popleft()
        left = self._most - len(changes)
        soon = changes and self._elapsed_s < changes[-1] + 2 * WINDOW_S / self._most
        if wanted_mhz < present_mhz and soon and left < self._most / 4:
            return present_mhz
        if left < 2 and wanted_mhz != self._highest:
            wanted_mhz = self._highest if left and wanted_mhz > present_mhz else present_mhz
        if not left or wanted_mhz == present_mhz:
            return present_mhz
        changes.append(self._elapsed_s)
        return wanted_mhz

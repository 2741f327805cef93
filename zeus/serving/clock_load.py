"""Estimates the engine's present load and its load in the near future; pure."""

from __future__ import annotations

FAST_S = 4.0
SLOW_S = 25.0
"""Time constants of rates: one for bursts, one for a steady load."""

FORECAST_S = 2.0
"""Time by which the growth of the batch is extrapolated."""

SHORT_S = 0.4
LONG_S = 1.6
"""Time constants of two means whose difference gives the growth of the batch."""


class Load:
    """Rates of the open load, and the present batch.

    Attributes:
        context: Their context, tokens.
        each_context: Context of one sequence, tokens.
        backlog: Prompt tokens not yet computed.
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
        self.output_tokens = 100.0
        self._prompt_fast = self._prompt_slow = 0.0
        self._output_fast = self._output_slow = 0.0
        self._short = self._long = 0.0
        self._backlog = 0.0
        self._outputs = self._requests = 0.0

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
        """Adds one step, or an interval without steps."""
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
        self._outputs += sequences
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

    def finished(self) -> None:
        """Handles the end of a request."""
        self._requests += 1.0
        if self._requests >= 50.0:
            seen = min(max(self._outputs / self._requests, 8.0), 4096.0)
            self.output_tokens += 0.5 * (seen - self.output_tokens)
            self._outputs = self._requests = 0.0

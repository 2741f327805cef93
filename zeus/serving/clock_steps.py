"""Inputs and predictions of the clock policy; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEVEL_SHARE = 0.05
"""Smallest distance between two levels, as a share of the highest clock."""

LOWEST_SHARE = 0.3
"""Clocks below this share of the highest are not used."""

MOST, MOST_TOKENS = 1e12, 1e9
"""Largest plausible number."""

MOST_MHZ = 100_000
"""Highest plausible clock."""

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
        {int(clock) for clock in clocks_mhz if 0 < clock < MOST_MHZ and clock == int(clock)},
        reverse=True,
    )
    if not offered:
        raise ValueError("clocks_mhz is empty; pass the clocks that the GPU offers, in MHz")
    found = [offered[0]]
    lowest = max(LOWEST_SHARE * found[0], floor_mhz or 0.0)
    for clock in offered:
        if clock >= lowest and found[-1] - clock >= LEVEL_SHARE * found[0]:
            found.append(clock)
    return found


def within(low: float, value: float) -> bool:
    """Whether a value is a plausible number, and at least `low`."""
    try:
        return low <= value < MOST
    except (TypeError, ArithmeticError):  # not a number, or of a type that cannot be compared
        return False


def possible(step: Step, queue: Queue) -> bool:
    """Whether numbers are plausible; the clock may be unknown."""
    begin, end, prompt, sequences, context, _ = step
    waiting, backlog, oldest = queue
    try:
        return (
            -MOST < begin < end < MOST
            and end - begin < LONGEST_S
            and 0 <= prompt < MOST_TOKENS
            and 0 <= sequences < MOST_TOKENS
            and 0 <= context < MOST_TOKENS
            and 0 <= waiting < MOST_TOKENS
            and 0 <= backlog < MOST_TOKENS
            and 0 <= oldest < MOST
        )
    except (TypeError, ArithmeticError):
        return False

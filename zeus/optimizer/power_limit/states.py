"""The states of the power limit optimizer. Power limits are in mW; `steps` count down."""

from __future__ import annotations

from pydantic import BaseModel, NonNegativeInt, PositiveInt


class Ready(BaseModel):
    """Will warm up at a limit after some steps."""

    next_power_limit: NonNegativeInt
    steps: PositiveInt


class Warmup(BaseModel):
    """Trains at a limit without measuring, until clocks and power have settled."""

    current_power_limit: PositiveInt
    steps: NonNegativeInt


class Profiling(BaseModel):
    """Measures at a limit."""

    current_power_limit: PositiveInt
    steps: PositiveInt


class Done(BaseModel):
    """The search is over.

    Attributes:
        optimal_power_limit: The choice; without one, the highest limit, or 0 if the GPUs have no
            limit to set.
        optimal_power_profile: The workload power profile of the choice, such as `max-q`; None:
            none.
        optimal_clock: The graphics clock, MHz, up to which the choice lets clocks rise; None: any.
        chosen: Whether it is a choice. False: the search was given up, or training ended first;
            then the limit in force need not be `optimal_power_limit`.
        reason: Why there is no choice; empty if there is one.
    """

    optimal_power_limit: NonNegativeInt
    chosen: bool = True
    reason: str = ""
    optimal_power_profile: str | None = None
    optimal_clock: PositiveInt | None = None


State = Ready | Warmup | Profiling | Done

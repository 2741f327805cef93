"""The states of the power limit optimizer. Power limits are in mW, `steps` count down."""

from __future__ import annotations

from pydantic import BaseModel, NonNegativeInt, PositiveInt


class Ready(BaseModel):
    """Will begin to warm up at a limit after some steps."""

    next_power_limit: PositiveInt
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
    """Has chosen, or has given up at the highest limit."""

    optimal_power_limit: PositiveInt


State = Ready | Warmup | Profiling | Done

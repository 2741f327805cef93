"""Messages of the processes that train together to the leader, and its commands.

Hello     what a process can: its range of limits, its GPUs
Piece     what some steps of a trial took here
Missing   what such steps took is not known
Trouble   this limit cannot be set here, or nothing can any more
->
Try       hold this limit, measure in pieces
Choose    hold this limit from now on
Stop      the highest limit, for this reason
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
)

from zeus.optimizer.power_limit.estimates import LimitEstimate


class Hello(BaseModel):
    """The capabilities of a process. Limits in mW, the highest that it may set last (0: its GPUs
    have none to set), and the workload power profiles to search. Without GPUs: other processes set
    the limits of its GPUs, and count their energy.
    """

    kind: Literal["hello"] = "hello"
    gpus: list[str]
    min_mw: NonNegativeInt
    max_mw: NonNegativeInt
    profiles: list[int] = []


class Piece(BaseModel):
    """Measurement of some steps of a trial, on all GPUs of this process."""

    kind: Literal["piece"] = "piece"
    trial: int
    index: int
    steps: PositiveInt
    energy_j: NonNegativeFloat
    energy_error_j: float
    time_s: PositiveFloat


class Missing(BaseModel):
    """The measurement of some steps of a trial will not be known; they are run again."""

    kind: Literal["missing"] = "missing"
    trial: int
    index: int


class Trouble(BaseModel):
    """This limit (mW) or profile cannot be set here, or, without a limit, nothing can any more."""

    kind: Literal["trouble"] = "trouble"
    reason: str
    power_limit_mw: int | None = None
    profile: int | None = None


Message = Hello | Piece | Missing | Trouble


class Try(BaseModel):
    """Hold a limit (mW) from a step on and measure in pieces until another command comes.

    With `check`, the choice stays until there is another.
    """

    kind: Literal["try"] = "try"
    trial: int
    power_limit_mw: int
    warmup_steps: int
    steps: int
    check: bool = False
    from_step: int = 0
    profile: int | None = None


class Choose(BaseModel):
    """Hold a limit (mW) from a step on: the choice, from these estimates. `reason`: why the search
    ended, if not because enough is known.
    """

    kind: Literal["choose"] = "choose"
    power_limit_mw: int
    estimates: list[LimitEstimate]
    reason: str = ""
    from_step: int = 0
    profile: int | None = None


class Stop(BaseModel):
    """Return to the highest limit."""

    kind: Literal["stop"] = "stop"
    reason: str


Command = Try | Choose | Stop
MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
COMMAND: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])

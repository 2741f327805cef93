"""Messages of the processes that train together to the leader, and its commands.

Hello     what a process can: its range of limits, its GPUs
Piece     what some steps of a trial took here, or that it is not known
Trouble   this setting cannot be set here, or nothing can any more
->
Try       hold this setting, measure in pieces
Choose    hold this setting from now on
Stop      the highest limit, for this reason
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveInt, TypeAdapter

from zeus.optimizer.power_limit.estimates import LimitEstimate
from zeus.optimizer.power_limit.settings import Beside, Setting

CHECK = 0
"""The trial of steps that are measured at the choice."""


class RankHello(BaseModel):
    """The capabilities of a process, or what all of them together can do. The product name of each
    GPU; limits in mW, the highest that it may set last (0: its GPUs have none to set), and what to
    search beside them. Without GPUs: other processes set the limits of its GPUs, and count their
    energy.
    """

    kind: Literal["hello"] = "hello"
    gpus: list[str]
    min_mw: NonNegativeInt
    max_mw: NonNegativeInt
    beside: list[Beside] = []


class Piece(BaseModel):
    """Measurement of some steps of a trial, on all GPUs of this process. A time of 0: it will not
    be known, and the steps are run again. `limited_s`: time in which power limited a GPU's clocks;
    None: not counted.
    """

    kind: Literal["piece"] = "piece"
    trial: int
    index: int
    steps: PositiveInt
    energy_j: NonNegativeFloat = 0.0
    energy_error_j: float = 0.0
    time_s: NonNegativeFloat = 0.0
    limited_s: float | None = None


class Trouble(BaseModel):
    """This setting cannot be set here; without one, nothing can any more."""

    kind: Literal["trouble"] = "trouble"
    reason: str
    setting: Setting | None = None


Message = RankHello | Piece | Trouble


class Try(BaseModel):
    """Hold a setting and measure in pieces until another command comes."""

    kind: Literal["try"] = "try"
    trial: int
    setting: Setting
    warmup_steps: int
    steps: int


class Choose(BaseModel):
    """Hold a setting from now on: the choice, from these estimates. `reason`: why the search ended,
    if not because enough is known.
    """

    kind: Literal["choose"] = "choose"
    setting: Setting
    estimates: list[LimitEstimate]
    reason: str = ""

    @property
    def chosen(self) -> LimitEstimate:
        """The estimate of the choice."""
        return next(one for one in self.estimates if one.setting == self.setting)


class Stop(BaseModel):
    """Return to the highest limit."""

    kind: Literal["stop"] = "stop"
    reason: str


Command = Try | Choose | Stop
MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
COMMAND: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])

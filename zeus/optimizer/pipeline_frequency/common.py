"""The protocol between server and client of the pipeline frequency optimizer: JSON over HTTP.

Names and fields of the first five models and paths are those of ml-energy/zeus, so either side may
be from that project. Times are in seconds, energies in joules, clocks in MHz.
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import Step
from zeus.optimizer.pipeline_frequency.profile import RANKS, ProfileMeasurement, Setting

GET_SERVER_INFO_URL = "/info"
REGISTER_JOB_URL = "/register_job"
REGISTER_RANK_URL = "/register_rank/{job_id}"
GET_FREQUENCY_SCHEDULE_URL = "/schedule/{job_id}"
REPORT_PROFILING_RESULT_URL = "/result/{job_id}"
REPORT_PROGRESS_URL = "/progress/{job_id}"
REPORT_PROFILE_URL = "/profile/{job_id}"
CHOOSE_PLAN_URL = "/choose/{job_id}"

REPORT_INTERVAL_S = 1.0

REPORTS_PER_S = 2000
"""Most reports of one job in a second: a third of what one core of the server can handle."""

_ODD = re.compile(r"[^A-Za-z0-9._-]+")

Wish = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
"""Seconds, or a ratio; the maximum keeps products and percentages finite."""

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Seconds, joules or watts."""

Name = Annotated[str, Field(min_length=1, max_length=64)]
Rank = Annotated[int, Field(ge=0)]
Iteration = Annotated[int, Field(ge=0, le=10**12)]


def report_interval_s(world_size: int) -> float:
    """Period at which each rank of a job reports its progress, s; plans start some periods
    ahead."""
    return max(REPORT_INTERVAL_S, world_size / REPORTS_PER_S)


class _Message(BaseModel):
    """Base of messages; ignores unknown fields."""

    model_config = ConfigDict(extra="ignore")


class JobInfo(_Message):
    """A training job, registered by its rank 0.

    Attributes:
        job_id: Id, assigned by the server; empty in a request.
        pp_degree: Number of stages of a pipeline.
        dp_degree: Number of data-parallel pipelines.
        tp_degree: Number of processes that share a stage.
        world_size: Number of processes, the product of the three.
        job_metadata: A description of the job, for display.
        schedule: Order of instructions, such as `1f1b`, if the server plans.
        num_microbatches: Microbatches of an iteration, if the server plans.
    """

    job_id: str = ""
    pp_degree: int = Field(ge=1)
    dp_degree: int = Field(ge=1)
    tp_degree: int = Field(ge=1)
    world_size: int = Field(ge=1, le=1_000_000)
    job_metadata: str | None = Field(default=None, max_length=4096)
    schedule: str | None = Field(default=None, max_length=64)
    num_microbatches: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _whole_world(self) -> JobInfo:
        if self.pp_degree * self.dp_degree * self.tp_degree != self.world_size:
            raise ValueError(
                f"world_size is {self.world_size}, but pp_degree * dp_degree * tp_degree is "
                f"{self.pp_degree} * {self.dp_degree} * {self.tp_degree}; give the degrees of the "
                "job's parallelism"
            )
        return self

    def check(self, **numbers: int) -> None:
        """Checks numbers of a rank, such as `dp_rank`.

        Raises:
            PipelineFrequencyError: One is outside the job.
        """
        for name, number in numbers.items():
            end = getattr(self, "world_size" if name == "rank" else f"{name[:2]}_degree")
            if not 0 <= number < end:
                raise PipelineFrequencyError(
                    f"{name} {number} is outside the job: {name} must be from 0 to {end - 1}; "
                    "ranks count from 0"
                )


def new_job_id(info: JobInfo, scheduler: str, now: datetime) -> str:
    """A unique id with the time and a description, which needs no quoting in a URL."""
    parts = [
        now.strftime("%Y-%m-%d-%H-%M-%S"),
        f"dp{info.dp_degree}",
        f"pp{info.pp_degree}",
        f"tp{info.tp_degree}",
        scheduler,
        slug(info.job_metadata or ""),
        secrets.token_hex(4),
    ]
    return "+".join(part for part in parts if part)


def slug(text: str) -> str:
    """The characters of a text that are valid in a URL and a file name, at most 64."""
    return _ODD.sub("-", text).strip("-.")[:64]


class _OfRank(_Message):
    """A message about one process of a job.

    Attributes:
        rank: Its number among all processes.
        dp_rank: Its pipeline.
        pp_rank: Its stage.
        tp_rank: Its number among the stage's processes.
    """

    rank: Rank
    dp_rank: Rank
    pp_rank: Rank
    tp_rank: Rank

    @property
    def numbers(self) -> dict[str, int]:
        """All four by name."""
        return {name: getattr(self, name) for name in RANKS}

    @property
    def place(self) -> dict[str, int]:
        """These numbers as columns of a profile."""
        return {"stage": self.pp_rank, **self.numbers}


class RankInfo(_OfRank):
    """One process of a job.

    Attributes:
        available_frequencies: Clocks that its GPU supports, MHz.
    """

    available_frequencies: list[Annotated[int, Field(ge=0, le=100_000)]] = Field(max_length=10_000)


class FrequencySchedule(_Message):
    """The instructions of a rank in one iteration, with their clocks.

    Attributes:
        rank: Whose.
        frequencies: Pairs of instruction and MHz, or another setting's name. Empty: there is no
            plan, so do not set clocks.
        version: Version of the plan in force, to which `Progress.version` refers; 0: there is none.
    """

    rank: Rank
    frequencies: list[Step]
    version: int = 0


class ProfilingResult(_Message):
    """A rank's measurements under its last schedule.

    Attributes:
        rank: Whose.
        iter_time: Time of each iteration, s.
        iter_energy: Energy of each iteration, J.
        time_breakdown: Times of the instructions of each iteration, by name, s.
        energy_breakdown: The same in J.
    """

    rank: Rank
    iter_time: list[Amount]
    iter_energy: list[Amount]
    time_breakdown: dict[str, list[list[Amount]]] = {}
    energy_breakdown: dict[str, list[list[Amount]]] = {}


class RankProfile(_OfRank):
    """All measurements of one rank's instructions.

    Attributes:
        rows: In JSON without the rank's own numbers: `instruction`, `frequency`, `time`, `energy`
            and, if its stage has several, `chunk`. Means of this GPU.
        p2p_power_w: Power of the GPU while blocked on communication, W, if measured.
        instructions: Instructions of one iteration, in the order in which they ran.
    """

    rows: list[ProfileMeasurement] = Field(min_length=1, max_length=100_000)
    p2p_power_w: Amount | None = None
    instructions: list[Name] = Field(default=[], max_length=1_000_000)

    @field_validator("rows", mode="before")
    @classmethod
    def _of_this_rank(cls, rows: Any, known: ValidationInfo) -> Any:
        place = {
            "stage": known.data.get("pp_rank"),
            **{name: known.data.get(name) for name in RANKS},
        }
        rows = rows if isinstance(rows, list) else []
        return [{**row, **place} if isinstance(row, dict) else row for row in rows]


class Progress(_Message):
    """A rank's progress; sent about every `report_interval_s`.

    Attributes:
        rank: Whose.
        iteration: The present iteration.
        iter_times: `[iteration, seconds]` of the iterations finished since its last report: from
            the start of the first instruction to the end of the last.
        instruction_times: `[iteration, instruction, setting, seconds]`: the shortest time of each
            kind of instruction under each setting, for some of these iterations.
        version: Version of the plan that it runs; 0: none.
    """

    rank: Rank
    iteration: Iteration
    iter_times: list[tuple[Iteration, Amount]] = Field(default=[], max_length=100_000)
    instruction_times: list[tuple[Iteration, Name, Setting, Amount]] = Field(
        default=[], max_length=100_000
    )
    version: int = Field(default=0, ge=0)


class PlanUpdate(_Message):
    """The reply to `Progress`.

    Attributes:
        version: Version of the plan in force for this rank.
        at_iteration: The first iteration to run under it. A rank that is past it starts with its
            next iteration.
        frequencies: As in `FrequencySchedule`; None if the rank already has this version.
        note: Why there is no plan, if planning failed: a sentence for the rank's log.
    """

    version: int
    at_iteration: int
    frequencies: list[Step] | None = None
    note: str | None = None


class Choice(_Message):
    """The choice of a plan: exactly one of the fields, not counting `dp_rank`.

    Attributes:
        deadline_s: Choose the plan with the least energy whose iteration takes at most this time.
        max_slowdown: The same, as a multiple of the fastest plan's time.
        straggler_s: Iteration time of a straggler, s.
        plan: Index of the plan; 0 is the slowest.
        automatic: Return to the scheduler's initial choice.
        dp_rank: With `straggler_s`: the straggling pipeline, which gets the fastest plan.

    With `deadline_s`, `max_slowdown` and `automatic` the server continues to compensate for
    stragglers that it detects; `plan` and `straggler_s` are in force until the next choice.
    """

    model_config = ConfigDict(extra="forbid")

    deadline_s: Wish | None = None
    max_slowdown: Annotated[Wish, Field(ge=1)] | None = None
    straggler_s: Wish | None = None
    plan: Annotated[int, Field(ge=0)] | None = None
    automatic: bool | None = None
    dp_rank: Rank | None = None

    @field_validator("automatic")
    @classmethod
    def _only_true(cls, value: bool | None) -> bool | None:
        if value is False:
            raise ValueError("automatic must be true; to end it, choose a plan")
        return value

    @model_validator(mode="after")
    def _exactly_one(self) -> Choice:
        wishes = ("deadline_s", "max_slowdown", "straggler_s", "plan", "automatic")
        if sum(getattr(self, name) is not None for name in wishes) != 1:
            raise ValueError(f"give exactly one of {', '.join(wishes)}")
        if self.dp_rank is not None and self.straggler_s is None:
            raise ValueError("dp_rank says which pipeline is the straggler: give straggler_s too")
        return self

    @property
    def watches_stragglers(self) -> bool:
        """Whether the server may deviate from it for a straggler that it detects."""
        return self.plan is None and self.straggler_s is None


class Chosen(_Message):
    """The reply to `Choice`.

    Attributes:
        plan: Index of the plan of pipelines that are not stragglers.
        at_iteration: The first iteration under it.
        plans: Index of the plan of each pipeline, by dp_rank.
        note: What was done instead, if the choice was not possible.
    """

    plan: int
    at_iteration: int
    plans: list[int]
    note: str | None = None


class PFOServerSettings(Protocol):
    """The settings of `server.settings.PlanServerSettings` that a scheduler may read."""

    @property
    def log_level(self) -> str:
        """Such as INFO."""

    @property
    def dump_data(self) -> bool:
        """Whether to write files."""

    @property
    def dump_dir(self) -> Path:
        """Where to."""

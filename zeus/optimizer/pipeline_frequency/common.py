"""What server and client of the pipeline frequency optimizer say to one another, as JSON over HTTP.

Names and fields of the first five models and paths are those of ml-energy/zeus: either side may be
of that project. Times are in seconds, energies in joules, clocks in MHz.
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

GET_SERVER_INFO_URL = "/info"
REGISTER_JOB_URL = "/register_job"
REGISTER_RANK_URL = "/register_rank/{job_id}"
GET_FREQUENCY_SCHEDULE_URL = "/schedule/{job_id}"
REPORT_PROFILING_RESULT_URL = "/result/{job_id}"
REPORT_PROGRESS_URL = "/progress/{job_id}"
REPORT_PROFILE_URL = "/profile/{job_id}"
CHOOSE_PLAN_URL = "/choose/{job_id}"

MOST_REPORTS = 4096
"""Reports of a node's ranks in one request."""

REPORT_INTERVAL_S = 1.0
"""How often a rank reports its progress; the server lets plans begin some of these ahead."""

_ODD = re.compile(r"[^A-Za-z0-9._-]+")

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Joules = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
MHz = Annotated[int, Field(ge=0, le=100_000)]
SettingName = Annotated[str, Field(min_length=1, max_length=200)]
Iteration = Annotated[int, Field(ge=0, le=10**12)]


class _Message(BaseModel):
    """Fields that this release does not know are ignored."""

    model_config = ConfigDict(extra="ignore")


class JobInfo(_Message):
    """A training job, as its rank 0 registers it.

    Attributes:
        job_id: Given by the server; empty in a request.
        pp_degree: Stages of a pipeline.
        dp_degree: Pipelines that train side by side.
        tp_degree: Processes that share a stage.
        world_size: Processes altogether, the product of the three.
        job_metadata: A few words about the job, for people.
        schedule: Order of instructions, such as `1f1b`, where the server is to plan.
        num_microbatches: Of an iteration, where the server is to plan.
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
                f"{self.pp_degree} * {self.dp_degree} * {self.tp_degree}"
            )
        return self


def new_job_id(info: JobInfo, scheduler: str, now: datetime) -> str:
    """An id that says when and what, is different each time, and needs no quoting in a URL."""
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
    """What of a text may stand in a URL and in a file name, 64 characters at most."""
    return _ODD.sub("-", text).strip("-.")[:64]


class RankInfo(_Message):
    """One process of a job.

    Attributes:
        rank: Among all processes.
        dp_rank: Which pipeline.
        pp_rank: Which stage of it.
        tp_rank: Which of the stage's processes.
        available_frequencies: Clocks that its GPU takes, MHz.
    """

    rank: int = Field(ge=0)
    dp_rank: int = Field(ge=0)
    pp_rank: int = Field(ge=0)
    tp_rank: int = Field(ge=0)
    available_frequencies: list[MHz] = Field(max_length=10_000)


class FrequencySchedule(_Message):
    """A rank's instructions of one iteration with their clocks.

    Attributes:
        rank: Whose.
        frequencies: Pairs of instruction and MHz, or another setting's name. Empty while there is
            no plan: leave clocks alone.
        version: Of the plan in force; what `Progress.version` refers to. 0 while there is none.
    """

    rank: int = Field(ge=0)
    frequencies: list[tuple[str, MHz | SettingName]]
    version: int = 0


class ProfilingResult(_Message):
    """What a rank measured under the schedule that it got last.

    Attributes:
        rank: Whose.
        iter_time: Of each iteration, s.
        iter_energy: Of each iteration, J.
        time_breakdown: By instruction: for each iteration the times of its instructions, s.
        energy_breakdown: The same in J.
    """

    rank: int = Field(ge=0)
    iter_time: list[Seconds]
    iter_energy: list[Joules]
    time_breakdown: dict[str, list[list[Seconds]]] = {}
    energy_breakdown: dict[str, list[list[Joules]]] = {}


class ProfileRow(_Message):
    """Mean time and energy of an instruction at a clock, or another named setting, on one GPU.

    `chunk` is which of the stage's model chunks, where it has several.
    """

    instruction: Name
    chunk: int = Field(default=0, ge=0)
    frequency: Annotated[int, Field(ge=1, le=100_000)] | SettingName
    time: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    energy: Joules


class RankProfile(_Message):
    """All that one rank measured of its instructions.

    Attributes:
        rank: Whose, with its place in the job.
        rows: Instruction, clock, mean seconds, mean joules of this GPU.
        p2p_power_w: What the GPU draws while it is blocked on communication, W, if measured.
        instructions: Of one iteration, in the order in which they ran.
    """

    rank: int = Field(ge=0)
    dp_rank: int = Field(ge=0)
    pp_rank: int = Field(ge=0)
    tp_rank: int = Field(ge=0)
    rows: list[ProfileRow] = Field(min_length=1, max_length=100_000)
    p2p_power_w: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    instructions: list[Name] = Field(default=[], max_length=1_000_000)


class OfflineProfilingResult(_Message):
    """What a rank measured, in the form of ml-energy/zeus: figures by clock."""

    rank: int = Field(ge=0)
    dp_rank: int = Field(ge=0)
    pp_rank: int = Field(ge=0)
    tp_rank: int = Field(ge=0)
    forward_time: dict[int, float]
    forward_energy: dict[int, float]
    backward_time: dict[int, float]
    backward_energy: dict[int, float]

    @model_validator(mode="after")
    def _pairs(self) -> OfflineProfilingResult:
        for name in ("forward", "backward"):
            if getattr(self, f"{name}_time").keys() != getattr(self, f"{name}_energy").keys():
                raise ValueError(f"{name}_time and {name}_energy must be of the same clocks")
        return self

    def to_profile(self) -> RankProfile:
        """The same as rows."""
        rows = [
            {
                "instruction": name,
                "frequency": mhz,
                "time": time_s,
                "energy": getattr(self, f"{name}_energy")[mhz],
            }
            for name in ("forward", "backward")
            for mhz, time_s in getattr(self, f"{name}_time").items()
        ]
        place = self.model_dump(include={"rank", "dp_rank", "pp_rank", "tp_rank"})
        return RankProfile.model_validate({**place, "rows": rows})


class Progress(_Message):
    """How far a rank is; sent about every `REPORT_INTERVAL_S`.

    Attributes:
        rank: Whose.
        iteration: The one that it is in.
        iter_times: `[iteration, seconds]` of the iterations that it has finished since its last
            report: from the begin of the first instruction to the end of the last.
        instruction_times: `[iteration, instruction, setting, seconds]`: the least time of each kind
            of instruction under each setting, of some of these iterations.
        version: Of the plan that it runs; 0 for none.
    """

    rank: int = Field(ge=0)
    iteration: Iteration
    iter_times: list[tuple[Iteration, Seconds]] = Field(default=[], max_length=100_000)
    instruction_times: list[tuple[Iteration, Name, MHz | SettingName, Seconds]] = Field(
        default=[], max_length=100_000
    )
    version: int = Field(default=0, ge=0)


class PlanUpdate(_Message):
    """The answer to `Progress`.

    Attributes:
        version: Of the plan in force for this rank.
        at_iteration: The first iteration to run under it. Who is past that takes it with its next.
        frequencies: As in `FrequencySchedule`; None where the rank has this version already.
        note: Why there is no plan, where planning has failed: a sentence for the rank's log.
    """

    version: int
    at_iteration: int
    frequencies: list[tuple[str, MHz | SettingName]] | None = None
    note: str | None = None


class Choice(_Message):
    """Which plan is wanted: exactly one of the fields, `dp_rank` aside.

    Attributes:
        deadline_s: The plan with the least energy whose iteration takes no longer.
        max_slowdown: The same, as a multiple of the fastest plan's time.
        straggler_s: What an iteration of another pipeline, or of whatever else all wait for, takes.
        plan: This one, by its index; 0 is the slowest.
        automatic: What the scheduler was started with.
        dp_rank: With `straggler_s`: the pipeline that is late, which gets the fastest plan.

    With `deadline_s`, `max_slowdown` and `automatic` the server goes on to make up for stragglers
    that it sees by itself; `plan` and `straggler_s` stay until the next choice.
    """

    model_config = ConfigDict(extra="forbid")

    deadline_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    max_slowdown: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    straggler_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    plan: Annotated[int, Field(ge=0)] | None = None
    automatic: bool | None = None
    dp_rank: Annotated[int, Field(ge=0)] | None = None

    @field_validator("automatic")
    @classmethod
    def _only_true(cls, value: bool | None) -> bool | None:
        if value is False:
            raise ValueError("automatic can only be true; to end it choose a plan")
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
        """Whether the server may deviate from it for a straggler that it sees."""
        return self.plan is None and self.straggler_s is None


class Chosen(_Message):
    """The answer to `Choice`.

    Attributes:
        plan: Index of the plan of pipelines that are not late.
        at_iteration: The first iteration under it.
        plans: Index of the plan of each pipeline, by dp_rank.
        note: Where the wish could not be met, what was done instead.
    """

    plan: int
    at_iteration: int
    plans: list[int]
    note: str | None = None


class PFOServerSettings(Protocol):
    """What a scheduler may read of the server's settings, `server.settings.ServerSettings`."""

    @property
    def log_level(self) -> str:
        """Such as INFO."""

    @property
    def dump_data(self) -> bool:
        """Whether files are to be written."""

    @property
    def dump_dir(self) -> Path:
        """Where to."""

"""Frequency plans, the frontier from the fastest plan to the one with the least energy, and their
files.

A plan file is a Python literal with one line for each stage, the usual format
(`freqs_pipeline_00042.py`); comments have its time and energy. It is read with `ast.literal_eval`,
never executed.
"""

from __future__ import annotations

import ast
import csv
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
)

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.profile import InstructionOptions, Setting, SettingName
from zeus.optimizer.pipeline_frequency.schedules import Graph
from zeus_common.text import sentence
from zeus_ipc.parsing import Malformed, parse, read_file

Step = tuple[str, Setting]
"""An instruction's name and its setting; 0: unchanged."""


@lru_cache(maxsize=4096)
def _shared(step: Step) -> Step:
    """One object for equal steps, because a frontier has hundreds of thousands of them."""
    return step


Stages = Annotated[
    tuple[
        Annotated[
            # Strict, because a file must not have True for 1 MHz.
            tuple[
                tuple[str, Annotated[int, Field(strict=True, ge=0, le=100_000)] | SettingName], ...
            ],
            Field(min_length=1),
            AfterValidator(lambda steps: tuple(map(_shared, steps))),
        ],
        ...,
    ],
    Field(min_length=1),
]

Count = Annotated[int, Field(strict=True, ge=1)]

Figure = Annotated[
    float,
    Field(strict=True),
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None, when_used="json"),
]
"""nan: not known. JSON has no nan: null stands for it."""

MOST_BYTES = 1 << 28
"""Largest file that is read: a problem has up to 200,000 instructions."""

Model = TypeVar("Model", bound=BaseModel)

INDEX = "frontier.json"
TABLE = "frontier.csv"
PROBLEM = "problem.json"
PLAN = "freqs_pipeline_{:05d}.py"

_COSTS = (
    ("time_s", "iteration time (s)"),
    ("energy_j", "energy of an iteration (J)"),
    ("effective_energy_j", "energy beyond blocking throughout (J)"),
    ("blocking_energy_j", "of it while blocked (J)"),
    ("bound_j", "no plan of this time takes less than (J)"),
    ("peak_power_w", "highest power of all GPUs together (W)"),
)
_REFERENCE = {"total cost": "effective_energy_j", "total cost with P2P": "energy_j"}
"""Label in ml-energy/zeus's files after `# Iteration 324`; from its fitted curves, so slightly
inaccurate."""

_COMMENT = re.compile(r"^#\s*(?:Iteration \d+ )?(?P<name>.*?):\s*(?P<value>\S+)\s*$")


@dataclass(frozen=True)
class Plan:
    """The clock of every instruction of an iteration.

    Attributes:
        stages: For each stage its instructions in the order in which they run.
        time_s: Iteration time, s, from the schedule's graph.
        energy_j: Iteration energy, J: all GPUs of one pipeline, including blocking.
        effective_energy_j: `energy_j` minus blocking power for the whole iteration: the objective
            if the iteration's length is given, by a deadline or a straggler.
        blocking_energy_j: The part of `energy_j` while GPUs wait for another stage.
        bound_j: Lower bound of the energy of plans of this time, J: no plan that takes at most
            `time_s` has less effective energy than this minus blocking throughout.
        peak_power_w: The highest power of all GPUs of one pipeline together, W, if every
            instruction draws its mean power.
        clock_changes: Clock changes of all stages in an iteration.

    Values that are missing in a file are nan.
    """

    stages: Stages
    time_s: Figure = math.nan
    energy_j: Figure = math.nan
    effective_energy_j: Figure = math.nan
    blocking_energy_j: Figure = math.nan
    bound_j: Figure = math.nan
    peak_power_w: Figure = math.nan
    clock_changes: Annotated[int, Field(strict=True)] = -1

    def __post_init__(self) -> None:
        if self.clock_changes < 0:
            object.__setattr__(self, "clock_changes", count_changes(self.stages))

    @property
    def gap(self) -> float:
        """Share by which the plan's energy is above the bound; nan: not known."""
        return self.energy_j / self.bound_j - 1.0 if self.bound_j else math.nan

    def text(self) -> str:
        """The text of a plan file."""
        lines = ["[", *(f"{list(stage)!r}," for stage in self.stages), "]"]
        costs = [(label, getattr(self, name)) for name, label in _COSTS]
        lines += [f"# {label}: {cost!r}" for label, cost in costs if not math.isnan(cost)]
        return "\n".join([*lines, f"# clock changes: {self.clock_changes}", ""])


def count_changes(stages: Iterable[Sequence[Step]]) -> int:
    """Number of changes of a stage's setting in one iteration; a setting of 0 is not a change."""
    count = 0
    for stage in stages:
        settings = [setting for _, setting in stage if setting]
        count += sum(a != b for a, b in itertools.pairwise(settings))
    return count


class PlanningProblem(BaseModel):
    """What a frontier was made for, as `problem.json` has it.

    Attributes:
        profile: Of each kind of instruction.
        p2p_power_w: Power of one GPU while blocked on communication, W.
        gpus_per_stage: GPUs that share a stage's work.
        energy_per: Whether the profile's energies are of one GPU, or of all GPUs of a stage.
        change_time_s: Delay of the instruction that follows a clock change, s.
        max_changes: Maximum number of clock changes in an iteration; None: any number.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    profile: list[InstructionOptions]
    pipeline: Graph
    p2p_power_w: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    gpus_per_stage: Count
    energy_per: Literal["gpu", "stage"]
    change_time_s: Annotated[float, Field(ge=0, lt=3600)]
    max_changes: Annotated[int, Field(ge=0)] | None


@dataclass(frozen=True)
class Frontier:
    """Plans of one pipeline, slowest first: each is slower and takes less energy than the next.

    Attributes:
        plans: Times fall and effective energies rise.
        schedule: Such as `1f1b`.
        num_stages: Number of stages, each with `gpus_per_stage` GPUs.
        num_microbatches: Microbatches of an iteration.
        p2p_power_w: Power of one GPU while blocked on communication, W.
        gpus_per_stage: GPUs that share a stage's work.
        baseline_time_s: Time of an iteration with every instruction at its highest clock, s.
        baseline_energy_j: Its energy, J.
        policies: Results of simpler policies by name: times, s, ascending, and energies, J. One
            clock for all instructions; one power limit; the critical path at full clocks and one
            clock for the rest of each stage, as in EnvPipe.
        problem: What it was made for, to plan again when times change; None: not known.
    """

    plans: tuple[Plan, ...]
    schedule: str
    num_stages: Count
    num_microbatches: Count
    p2p_power_w: Figure
    gpus_per_stage: Count
    baseline_time_s: Figure
    baseline_energy_j: Figure
    policies: Mapping[str, tuple[tuple[Figure, Figure], ...]] = field(default_factory=dict)
    problem: PlanningProblem | None = field(default=None, repr=False, compare=False)
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.plans:
            raise PipelineFrequencyError("a frontier needs at least one plan")
        stages = {len(plan.stages) for plan in self.plans}
        stages |= set() if self.problem is None else {len(self.problem.pipeline.stages)}
        if stages != {self.num_stages}:
            raise PipelineFrequencyError(
                f"a frontier of {self.num_stages} stages has plans, or a problem, of "
                f"{', '.join(map(str, sorted(stages - {self.num_stages})))}: files are mixed"
            )

    def fastest(self) -> int:
        """Index of the fastest plan."""
        return len(self.plans) - 1

    def by_deadline(self, time_s: float) -> int:
        """Index of the plan with the least energy of those that take at most `time_s`.

        The fastest plan if none does.
        """
        return self._best(time_s, lambda plan: plan.energy_j)

    def by_max_slowdown(self, factor: float) -> int:
        """`by_deadline`, as a multiple of the fastest plan's time."""
        if not factor >= 1.0:
            raise PipelineFrequencyError(f"a slowdown is at least 1, not {factor}")
        return self.by_deadline(factor * self.plans[-1].time_s)

    def by_straggler(self, time_s: float) -> int:
        """Index of the plan to run if another pipeline needs `time_s` for an iteration.

        GPUs then wait at the end of the iteration with blocking power, so the effective energy is
        minimised. The fastest plan if none is as fast as the straggler.
        """
        return self._best(time_s, lambda plan: plan.effective_energy_j)

    def _best(self, time_s: float, cost: Callable[[Plan], float]) -> int:
        if math.isnan(time_s):
            raise PipelineFrequencyError("a time to keep within must be a number of seconds")
        # A time that was written and read again may have lost its last digits.
        limit = time_s * (1 + 1e-9)
        fitting = [index for index, plan in enumerate(self.plans) if plan.time_s <= limit]
        return min(fitting, key=lambda index: cost(self.plans[index]), default=self.fastest())

    def beside(self, plan: Plan) -> dict[str, float]:
        """Energy of simpler policies for an iteration of a plan's length, J: the best one of each
        that is as fast, plus blocking until then. nan: none is.
        """
        limit_s = plan.time_s * (1 + 1e-9)
        blocking_w = self.p2p_power_w * self.gpus_per_stage * self.num_stages
        return {
            name: min(
                (
                    energy_j + blocking_w * max(0.0, plan.time_s - time_s)
                    for time_s, energy_j in ways
                    if time_s <= limit_s
                ),
                default=math.nan,
            )
            for name, ways in self.policies.items()
        }

    # ---------------------------------------------------------------------------------- files

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Writes every plan's file, the index `frontier.json` and the table `frontier.csv`."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        without: Any = {"problem": True, "plans": {"__all__": {"stages"}}}
        index = FRONTIER.dump_python(self, mode="json", exclude=without)
        for number, plan in enumerate(self.plans):
            name = index["plans"][number]["file"] = PLAN.format(number)
            (path / name).write_text(plan.text(), encoding="utf-8")
        if self.problem is not None:
            (path / PROBLEM).write_text(f"{self.problem.model_dump_json()}\n", encoding="utf-8")
        with (path / TABLE).open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            names = [*(name for name, _ in _COSTS), "gap", "clock_changes"]
            beside = [f"{name.replace(' ', '_')}_energy_j" for name in self.policies]
            table.writerow(["plan", *names, *beside])
            for number, plan in enumerate(self.plans):
                others = self.beside(plan).values()
                table.writerow([number, *(getattr(plan, name) for name in names), *others])
        # Last, so that all plans of an index exist.
        (path / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Frontier:
        """Reads the result of `write`: the folder, or its `frontier.json`.

        Raises:
            PipelineFrequencyError: It is missing, or not a frontier.
        """
        path = Path(folder)
        path = path / INDEX if path.is_dir() else path
        hint = "give the folder that run_optimization.py wrote"
        now, problem = path.with_name(PROBLEM), None
        try:
            if now.is_file():
                problem = read_model(now, PlanningProblem)
            now = path
            index = parse(read_file(path, MOST_BYTES), MOST_BYTES)
            for plan in index["plans"]:
                plan["stages"] = read_plan(path.parent / plan.pop("file")).stages
            return FRONTIER.validate_python({**index, "problem": problem})
        except (OSError, Malformed) as error:
            raise PipelineFrequencyError(
                f"the frontier {now} cannot be read ({why(error)}); {hint}"
            ) from None
        except ValidationError as error:
            raise PipelineFrequencyError(
                f"{now} is not of a frontier of this release ({sentence(error)}); make it again"
            ) from None
        except (KeyError, TypeError, AttributeError):
            raise PipelineFrequencyError(f"{path} is not an index of a frontier; {hint}") from None


FRONTIER = TypeAdapter(Frontier)
"""A frontier as JSON, with its plans and its problem."""


def read_model(path: str | os.PathLike[str], kind: type[Model]) -> Model:
    """Reads a JSON file, within bounds and as strictly as its model is.

    Raises:
        OSError: It cannot be read.
        Malformed: It is not JSON, or beyond the bounds.
        ValidationError: It is something else.
    """
    text = read_file(path, MOST_BYTES)
    parse(text, MOST_BYTES)
    return kind.model_validate_json(text)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan file, of this project or of ml-energy/zeus.

    Raises:
        PipelineFrequencyError: It cannot be read, or is not a plan.
    """
    try:
        text = read_file(path, MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise PipelineFrequencyError(
            f"the plan {os.fspath(path)} cannot be read ({why(error)})"
        ) from None
    try:
        stages = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" at line {line}"
        raise PipelineFrequencyError(
            f"the plan {os.fspath(path)} is not a Python literal{where}; it must be a list of "
            "stages, each a list of ('forward', MHz) pairs"
        ) from None
    labels = {**{label: name for name, label in _COSTS}, **_REFERENCE}
    costs: dict[str, float] = {}
    for line in text.splitlines():
        comment = _COMMENT.match(line)
        if comment and comment["name"] in labels:
            try:
                costs[labels[comment["name"]]] = float(comment["value"])
            except ValueError:
                continue
    try:
        return Plan(parse_stages(stages), **costs)  # type: ignore[arg-type]  # by _COSTS, floats
    except PipelineFrequencyError as error:
        raise PipelineFrequencyError(f"the plan {os.fspath(path)}: {error.message}") from None


def parse_stages(stages: Any) -> tuple[tuple[Step, ...], ...]:
    """Validates a plan's stages.

    Raises:
        PipelineFrequencyError: They are not valid; the message names the stage and the instruction.
    """
    try:
        return _STAGES.validate_python(stages)
    except ValidationError as error:
        place = error.errors()[0]["loc"]
    if not place:
        raise PipelineFrequencyError("a plan is a list of stages, and has at least one")
    if len(place) == 1:
        raise PipelineFrequencyError(
            f"stage {place[0]} must be a list of ('forward', MHz) pairs with at least one"
        )
    step = stages[place[0]][place[1]]
    raise PipelineFrequencyError(
        f"instruction {place[1]} of stage {place[0]} must be a pair such as ('forward', 1410), "
        f"not {step!r}"
    )


_STAGES = TypeAdapter(Stages)


def why(error: Exception) -> str:
    """Why `read_file` has failed: a clause."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

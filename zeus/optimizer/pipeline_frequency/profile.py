"""The profile of a pipeline: time and energy of each instruction at each clock, as a CSV file."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from zeus.exceptions import PipelineFrequencyError
from zeus_common import tables

SettingName = Annotated[str, Field(min_length=1, max_length=200)]

Setting = Annotated[int, Field(ge=0, le=100_000)] | SettingName
"""A clock, MHz, or the name of another setting of a GPU or kernel."""

NEEDED = ("stage", "instruction", "frequency", "time", "energy")
SETTING = "setting"
"""A profile may have this column of settings' names instead of `frequency`."""

RANKS = ("rank", "dp_rank", "pp_rank", "tp_rank")
INSTRUCTIONS = ("forward", "backward")

_POWER_W = (3.0, 100_000.0)
"""Plausible mean power of an instruction on one GPU, or on all GPUs of a stage; outside, units are
wrong."""


def _no_number(text: str) -> str:
    try:
        float(text)
    except ValueError:
        return text
    raise ValueError("a clock is a whole number of MHz")


Number = Annotated[int, Field(ge=0, description="a whole number from 0")]
Frequency = Annotated[
    Annotated[int, Field(ge=0, le=100_000)] | Annotated[SettingName, AfterValidator(_no_number)],
    Field(union_mode="left_to_right", description="MHz, such as 1410, or a setting's name"),
]


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
InstructionName = Annotated[
    str,
    StringConstraints(strip_whitespace=True, to_lower=True, min_length=1),
    Field(description="a name, such as forward or backward"),
]


@dataclass(frozen=True)
class ProfileMeasurement:
    """One measurement.

    Attributes:
        stage: From 0.
        instruction: Its name, such as `forward`, `backward_input`, `all_reduce`.
        frequency: SM clock, MHz, or another setting's name; 0: the instruction does not depend on
            it.
        time: Time of one instruction on one microbatch, s.
        energy: Energy of the same, J.
        rank, dp_rank, pp_rank, tp_rank: The rank that measured it; None: not known.
        chunk: The stage's model chunk, from 0; only interleaved schedules have several.
    """

    stage: Number
    instruction: InstructionName
    frequency: Frequency
    time: Annotated[
        float,
        Field(
            ge=1e-9,
            le=3600,
            description="a number of seconds from 1e-9 to 3600, and not of milliseconds",
        ),
    ]
    energy: Annotated[Positive, Field(description="a number of joules above 0")]
    rank: Number | None = None
    dp_rank: Number | None = None
    pp_rank: Number | None = None
    tp_rank: Number | None = None
    chunk: Number = 0


@dataclass(frozen=True)
class Option:
    """A possible setting of an instruction: MHz or a name, s, J of one GPU."""

    frequency: Setting
    time_s: Positive
    energy_j: Positive


@dataclass(frozen=True)
class InstructionOptions:
    """The options of one kind of instruction."""

    stage: Number
    instruction: InstructionName
    chunk: Number
    options: Annotated[list[Option], Field(min_length=1)]


class InstructionProfile:
    """Time and energy of each stage's instructions at each clock.

    Rows of several ranks for one clock are joined: the time is that of the slowest rank, because
    the others wait for it, and the energy is the ranks' mean, so energies are those of one GPU.

    Args:
        options: Options by stage, instruction and chunk; sorted here by descending clock, and other
            settings from the fastest.
        tensor_parallel: GPUs of one pipeline that share a stage, as far as known from the ranks.
    """

    def __init__(
        self,
        options: Mapping[tuple[int, str, int], Sequence[Option]],
        tensor_parallel: int = 1,
    ) -> None:
        self._options = {
            key: tuple(sorted(choices, key=_from_the_top)) for key, choices in options.items()
        }
        self.tensor_parallel = tensor_parallel
        self.num_stages = 1 + max((stage for stage, _, _ in options), default=-1)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> InstructionProfile:
        """Reads a profile with five columns, or more; see `zeus_common.tables.read`.

        Raises:
            PipelineFrequencyError: It is not valid; the message names the line and the column.
        """
        try:
            placed = list(tables.read(path, ProfileMeasurement, {SETTING: "frequency"}))
        except tables.TableError as error:
            raise PipelineFrequencyError(f"the profile cannot be used: {error}") from None
        try:
            places = [place.rpartition(", ")[2] for place, _ in placed]
            return cls.from_rows([row for _, row in placed], places)
        except PipelineFrequencyError as error:
            raise PipelineFrequencyError(
                f"the profile {os.fspath(path)}: {error.message}"
            ) from None

    @classmethod
    def from_rows(
        cls, rows: Iterable[ProfileMeasurement], places: Sequence[str] | None = None
    ) -> InstructionProfile:
        """Joins measurements of several ranks.

        Args:
            places: Where they are in the file, for messages.

        Raises:
            PipelineFrequencyError: A stage is missing, or units are mixed.
        """
        measured: _Measured = {}
        tensor_ranks: set[int] = set()
        for number, row in enumerate(rows):
            place = f"row {number + 1}" if places is None else places[number]
            kind = measured.setdefault((row.stage, row.instruction, row.chunk), {})
            kind.setdefault(row.frequency, []).append((row, place))
            if row.tp_rank is not None:
                tensor_ranks.add(row.tp_rank)
        if not measured:
            raise PipelineFrequencyError(
                "it has no measurement; it needs one row for each stage, instruction and clock"
            )
        _check_complete(measured)
        _check_units(measured)
        return cls(
            {
                key: [
                    Option(
                        mhz,
                        max(row.time for row, _ in pairs),
                        math.fsum(row.energy for row, _ in pairs) / len(pairs),
                    )
                    for mhz, pairs in clocks.items()
                ]
                for key, clocks in measured.items()
            },
            max(1, len(tensor_ranks)),
        )

    @property
    def kinds(self) -> list[InstructionOptions]:
        """The options of each kind of instruction."""
        return [InstructionOptions(*key, list(choices)) for key, choices in self._options.items()]

    @classmethod
    def of_kinds(cls, kinds: Iterable[InstructionOptions]) -> InstructionProfile:
        """The profile that has these `kinds`."""
        return cls({(one.stage, one.instruction, one.chunk): one.options for one in kinds})

    def has(self, stage: int, instruction: str) -> bool:
        """Whether a stage has this instruction."""
        return (stage, instruction, 0) in self._options

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the instructions, in the order of the profile."""
        return tuple(dict.fromkeys(name for _, name, _ in self._options))

    def pick(self, stages: Sequence[int]) -> InstructionProfile:
        """A profile of only these stages, numbered from 0 in this order."""
        for stage in stages:
            if not 0 <= stage < self.num_stages:
                raise PipelineFrequencyError(
                    f"the profile has no stage {stage}; it has stages 0 to {self.num_stages - 1}"
                )
        return InstructionProfile(
            {
                (number, name, chunk): choices
                for number, picked in enumerate(stages)
                for (stage, name, chunk), choices in self._options.items()
                if stage == picked
            },
            self.tensor_parallel,
        )

    def options(self, stage: int, instruction: str, chunk: int = 0) -> tuple[Option, ...]:
        """Time and energy of an instruction at each clock, descending.

        A chunk that is missing in the profile is like chunk 0.

        Raises:
            PipelineFrequencyError: The profile has no such instruction.
        """
        for key in ((stage, instruction, chunk), (stage, instruction, 0)):
            if key in self._options:
                return self._options[key]
        raise PipelineFrequencyError(
            f"the profile has no {instruction} of stage {stage}; it has stages 0 to "
            f"{self.num_stages - 1}: measure what is missing, or plan for fewer stages"
        )


def write_profile(rows: Iterable[ProfileMeasurement], path: str | os.PathLike[str]) -> None:
    """Writes measurements with nine columns, and `chunk` if one is not 0; atomically."""
    rows = list(rows)
    columns = [*RANKS, *NEEDED, *(["chunk"] if any(row.chunk for row in rows) else [])]
    kinds = tables.kinds(ProfileMeasurement) | {"frequency": str}
    cells = ([getattr(row, column) for column in columns] for row in rows)
    tables.write(Path(path), {column: kinds[column] for column in columns}, cells)


_Measured = dict[tuple[int, str, int], dict[Setting, list[tuple[ProfileMeasurement, str]]]]


def _from_the_top(option: Option) -> tuple[float, float]:
    if isinstance(option.frequency, str):
        return -math.inf, option.time_s
    return -option.frequency, 0.0


def _check_complete(measured: _Measured) -> None:
    stages = {stage for stage, _, _ in measured}
    for stage in range(max(stages) + 1):
        if stage not in stages:
            raise PipelineFrequencyError(
                f"stage {stage} has no row; measure it, or number the stages from 0 without a gap"
            )
    for (stage, instruction, _), settings in measured.items():
        if 0 in settings and len(settings) > 1:
            raise PipelineFrequencyError(
                f"{instruction} of stage {stage} has a row for frequency 0, which stands for any, "
                "and others; leave out one or the other"
            )


def _check_units(measured: _Measured) -> None:
    """Checks that times are seconds and energies joules.

    One instruction's values must be within a factor of 100 of each other, and its power must be
    plausible for a GPU.
    """
    powers = sorted(
        row.energy / row.time
        for clocks in measured.values()
        for pairs in clocks.values()
        for row, _ in pairs
    )
    power_w = powers[len(powers) // 2]
    if not _POWER_W[0] <= power_w <= _POWER_W[1]:
        raise PipelineFrequencyError(
            f"instructions draw {power_w:.3g} W, which no GPU does; times must be seconds and "
            "energies joules: are the times milliseconds, or the energies millijoules?"
        )
    for clocks in measured.values():
        placed = [pair for pairs in clocks.values() for pair in pairs]
        for column in ("time", "energy"):
            values = sorted(getattr(row, column) for row, _ in placed)
            middle = values[len(values) // 2]
            for row, place in placed:
                value = getattr(row, column)
                if not middle / 100 < value < middle * 100:
                    raise PipelineFrequencyError(
                        f"{place}, column {column}: {value} is far from the {middle} that is usual "
                        f"for {row.instruction} of stage {row.stage}; are units mixed? Times are "
                        "seconds, energies joules"
                    )

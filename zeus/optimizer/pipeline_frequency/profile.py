"""The profile of a pipeline: time and energy of each instruction at each clock, as a CSV file."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.plans import MOST_CHARACTERS, Setting
from zeus_ipc import tables

NEEDED = ("stage", "instruction", "frequency", "time", "energy")
SETTING = "setting"
"""A profile may have this column of settings' names instead of `frequency`."""

RANKS = ("rank", "dp_rank", "pp_rank", "tp_rank")
INSTRUCTIONS = ("forward", "backward")

_LONGEST_S = 3600.0
"""A longer time of one instruction must be in milliseconds."""

_POWER_W = (3.0, 100_000.0)
"""Plausible mean power of an instruction on one GPU, or on all GPUs of a stage; outside, units are
wrong."""


@dataclass(frozen=True)
class Row:
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

    stage: int
    instruction: str
    frequency: Setting
    time: float
    energy: float
    rank: int | None = None
    dp_rank: int | None = None
    pp_rank: int | None = None
    tp_rank: int | None = None
    chunk: int = 0


@dataclass(frozen=True)
class Option:
    """A possible setting of an instruction: MHz or a name, s, J of one GPU."""

    frequency: Setting
    time_s: float
    energy_j: float


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
        options: dict[tuple[int, str, int], Sequence[Option]],
        tensor_parallel: int = 1,
    ) -> None:
        self._options = {
            key: tuple(sorted(found, key=_from_the_top)) for key, found in options.items()
        }
        self.tensor_parallel = tensor_parallel
        self.num_stages = 1 + max((stage for stage, _, _ in options), default=-1)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> InstructionProfile:
        """Reads a profile with five columns, or more; it may be compressed, see `zeus_ipc.tables`.

        Raises:
            PipelineFrequencyError: It is not valid; the message names the row and the column.
        """
        name = os.fspath(path)
        try:
            return cls._of_lines(name, tables.rows(path))
        except OSError as error:
            raise PipelineFrequencyError(
                f"the profile {name} cannot be read ({error.strerror or error}); give a CSV file "
                f"with the columns {','.join(NEEDED)}"
            ) from None
        except tables.TableError as error:
            raise PipelineFrequencyError(
                f"the profile {name} is not a CSV file ({error})"
            ) from None

    @classmethod
    def _of_lines(cls, name: str, lines: Iterator[tuple[str, ...]]) -> InstructionProfile:
        header = [column.strip().lower() for column in next(lines, ())]
        header = ["frequency" if column == SETTING else column for column in header]
        missing = [column for column in NEEDED if column not in header]
        if missing:
            raise PipelineFrequencyError(
                f"the profile {name} has no column {', '.join(missing)} in its first row; it needs "
                f"{','.join(NEEDED)}"
            )
        rows: list[Row] = []
        places: list[int] = []
        for number, line in enumerate(lines, start=2):
            if not any(cell.strip() for cell in line):
                continue
            cells = dict(zip(header, (cell.strip() for cell in line), strict=False))
            try:
                row = _row(cells)
            except PipelineFrequencyError as error:
                raise PipelineFrequencyError(f"{name}, row {number}, {error.message}") from None
            rows.append(row)
            places.append(number)
        if not rows:
            raise PipelineFrequencyError(
                f"the profile {name} has no measurement; it needs one row for each stage, "
                "instruction and clock"
            )
        try:
            return cls.from_rows(rows, places)
        except PipelineFrequencyError as error:
            raise PipelineFrequencyError(f"the profile {name}: {error.message}") from None

    @classmethod
    def from_rows(
        cls, rows: Iterable[Row], places: Sequence[int] | None = None
    ) -> InstructionProfile:
        """Joins measurements of several ranks.

        Args:
            rows: The measurements.
            places: Their rows in the file, for messages.

        Raises:
            PipelineFrequencyError: A stage is missing, or units are mixed.
        """
        measured: _Measured = {}
        tensor_ranks: set[int] = set()
        for number, row in enumerate(rows):
            place = f"row {number + 1 if places is None else places[number]}"
            kind = measured.setdefault((row.stage, row.instruction, row.chunk), {})
            kind.setdefault(row.frequency, []).append((row, place))
            if row.tp_rank is not None:
                tensor_ranks.add(row.tp_rank)
        if not measured:
            raise PipelineFrequencyError("there is no measurement")
        _check_complete(measured)
        _check_units(measured)
        return cls(
            {
                key: [
                    Option(
                        mhz,
                        max(row.time for row, _ in found),
                        math.fsum(row.energy for row, _ in found) / len(found),
                    )
                    for mhz, found in clocks.items()
                ]
                for key, clocks in measured.items()
            },
            max(1, len(tensor_ranks)),
        )

    def to_json(self) -> list[Any]:
        """The profile in JSON-compatible form; `from_json` reads it."""
        return [
            [*key, [[one.frequency, one.time_s, one.energy_j] for one in found]]
            for key, found in self._options.items()
        ]

    @classmethod
    def from_json(cls, data: Any, tensor_parallel: int = 1) -> InstructionProfile:
        """What `to_json` made.

        Raises:
            PipelineFrequencyError: It is something else.
        """
        try:
            return cls(
                {
                    (int(stage), str(name), int(chunk)): [
                        Option(
                            setting if isinstance(setting, str) else int(setting),
                            float(time_s),
                            float(energy_j),
                        )
                        for setting, time_s, energy_j in found
                    ]
                    for stage, name, chunk, found in data
                },
                tensor_parallel,
            )
        except (ValueError, TypeError) as error:
            raise PipelineFrequencyError(
                f"this is not a profile ({type(error).__name__}: {error})"
            ) from None

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
                (number, name, chunk): found
                for number, picked in enumerate(stages)
                for (stage, name, chunk), found in self._options.items()
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


def write_profile(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """Writes measurements as CSV with nine columns, and `chunk` if one is not 0; atomically."""
    rows = list(rows)
    chunks = any(row.chunk for row in rows)
    target = Path(path)
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    columns = [*RANKS, *NEEDED, *(["chunk"] if chunks else [])]
    try:
        with part.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(columns)
            for row in rows:
                cells = (getattr(row, column) for column in columns)
                table.writerow(["" if cell is None else cell for cell in cells])
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _row(cells: dict[str, str]) -> Row:
    """Parses a row; errors begin with `column`."""
    instruction = cells.get("instruction", "").lower()
    if not instruction:
        raise PipelineFrequencyError(
            "column instruction: must be a name, such as forward or backward"
        )
    ranks = {
        column: None if not cells.get(column) else _whole(column, cells[column]) for column in RANKS
    }
    frequency = _setting(cells.get("frequency", ""))
    return Row(
        stage=_whole("stage", cells.get("stage", "")),
        instruction=instruction,
        frequency=frequency,
        time=_positive("time", cells.get("time", ""), "seconds"),
        energy=_positive("energy", cells.get("energy", ""), "joules"),
        chunk=_whole("chunk", cells.get("chunk") or "0"),
        **ranks,
    )


def _whole(column: str, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0 and value == int(value)):
        raise PipelineFrequencyError(f"column {column}: must be a whole number, not {text!r}")
    return int(value)


def _setting(text: str) -> Setting:
    """Parses a setting: MHz, or a name."""
    try:
        float(text)
    except ValueError:
        if 0 < len(text) <= MOST_CHARACTERS:
            return text
        raise PipelineFrequencyError(
            f"column frequency: must be MHz, such as 1410, or a setting's name, not {text!r}"
        ) from None
    frequency = _whole("frequency", text)
    if frequency > 100_000:
        raise PipelineFrequencyError(
            f"column frequency: must be MHz, such as 1410, not {frequency}"
        )
    return frequency


def _positive(column: str, text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise PipelineFrequencyError(
            f"column {column}: must be a number of {unit} above 0, not {text!r}"
        )
    return value


_Measured = dict[tuple[int, str, int], dict[Setting, list[tuple[Row, str]]]]


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
        found = [pair for pairs in clocks.values() for pair in pairs]
        for column in ("time", "energy"):
            values = sorted(getattr(row, column) for row, _ in found)
            middle = values[len(values) // 2]
            for row, place in found:
                value = getattr(row, column)
                if not middle / 100 < value < middle * 100:
                    raise PipelineFrequencyError(
                        f"{place}, column {column}: {value} is far from the {middle} that is usual "
                        f"for {row.instruction} of stage {row.stage}; are units mixed? Times are "
                        "seconds, energies joules"
                    )
        for row, place in found:
            if row.time > _LONGEST_S:
                raise PipelineFrequencyError(
                    f"{place}, column time: {row.time} s for one instruction; times are seconds, "
                    "are these milliseconds?"
                )

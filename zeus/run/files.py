"""The files of recurring jobs: names and contents.

Names and formats are ml-energy/zeus's; fields with a default here are not in its files. A profile
that is not finished has the same form, in a file that ends in `.partial`.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from pprint import pformat
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    TypeAdapter,
    ValidationError,
)

from zeus.analyze import HistoryEntry
from zeus_common.atomic import write_text
from zeus_common.text import explain

MASTER_LOG = "master.log"
HISTORY = "history.json"
HISTORY_PY = "history.py"

Model = TypeVar("Model", bound=BaseModel)


def job_id(recurrence: int, number: int) -> str:
    """Returns the prefix of a run's files; both numbers start at 1."""
    return f"rec{recurrence:02d}+try{number:02d}"


def train_log(log_dir: str | Path, job_id: str) -> Path:
    """The training script's output."""
    return Path(log_dir, f"{job_id}.train.log")


def train_json(log_dir: str | Path, job_id: str, batch_size: int) -> Path:
    """The result of a run."""
    return Path(log_dir, f"{job_id}+bs{batch_size}.train.json")


def power_json(log_dir: str | Path, batch_size: int) -> Path:
    """The power limits of a batch size, once all are measured."""
    return Path(log_dir, f"bs{batch_size}.power.json")


class TrainResult(BaseModel):
    """The result of a run.

    Attributes:
        energy: Energy, J.
        time: Time, s.
        cost: Energy-time cost, J.
        num_epochs: Epochs that it trained.
        reached: Whether it reached the target.
        overhead: The part of the cost added by finding the power limit, J.
        stopped_by_cost: Whether it was stopped for its cost.
        next_cost: If it was stopped for its cost: the cost after another epoch, J.
        max_power: The highest limits of the GPUs that it trained on, together, W; None in files of
            ml-energy/zeus.
        failure: How its script failed before it had a result, if it did; written by the master.
    """

    energy: NonNegativeFloat
    time: NonNegativeFloat
    cost: NonNegativeFloat
    num_epochs: int
    reached: bool
    overhead: float = 0.0
    stopped_by_cost: bool = False
    next_cost: NonNegativeFloat | None = None
    max_power: PositiveFloat | None = None
    failure: Literal["oom", "failed"] | None = None

    @property
    def utilization(self) -> float | None:
        """Mean power relative to its maximum, if known."""
        if self.max_power is None or self.time <= 0:
            return None
        return min(1.0, self.energy / self.time / self.max_power)


class PowerByLimit(BaseModel):
    """Power and throughput of a batch size at each power limit. Limits in mW, power in W of all
    GPUs together.

    Attributes:
        job_id: The run that finished it.
        train_power: Power while training, by limit.
        train_throughput: Iterations a second while training, by limit.
        eval_power: Power while evaluating at the limit that was held.
        eval_throughput: Iterations a second while evaluating.
        optimal_pl: The best limit; None where not all are measured.
        gpus: Product names of the GPUs.
    """

    job_id: str = ""
    train_power: dict[int, PositiveFloat] = Field(default_factory=dict)
    train_throughput: dict[int, PositiveFloat] = Field(default_factory=dict)
    eval_power: dict[int, float] = Field(default_factory=dict)
    eval_throughput: dict[int, float] = Field(default_factory=dict)
    optimal_pl: int | None = None
    gpus: list[str] | None = None


class FileError(ValueError):
    """A file cannot be read or is not valid: one sentence that says which and why."""


def load_result(path: Path) -> TrainResult:
    """Reads the result of a run.

    Raises:
        FileError: It cannot be used.
    """
    return _load(path, TrainResult, "result of a run")


def load_profile(path: Path) -> PowerByLimit:
    """Reads a profile.

    Raises:
        FileError: It cannot be used.
    """
    return _load(path, PowerByLimit, "power profile")


def _load(path: Path, model: type[Model], what: str) -> Model:
    try:
        return model.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read ({error})") from None
    except ValidationError as error:
        raise FileError(f"{path} is not a {what}: {explain(error.errors()[0])}") from None


def save(path: Path, content: BaseModel | str) -> None:
    """Writes a file; a reader sees the old file or the complete new one.

    Raises:
        OSError: It cannot be written.
    """
    text = content if isinstance(content, str) else content.model_dump_json(indent=4) + "\n"
    write_text(path, text)


# ------------------------------------------------------------------------------------- history


def write_history(log_dir: str | Path, history: Sequence[HistoryEntry]) -> None:
    """Writes the runs of a job as JSON, and in ml-energy/zeus's form.

    Raises:
        OSError: They cannot be written.
    """
    rows = [asdict(entry) for entry in history]
    save(Path(log_dir, HISTORY), json.dumps(rows, indent=4) + "\n")
    save(Path(log_dir, HISTORY_PY), pformat(list(history)) + "\n")


def read_history(path: str | Path) -> list[HistoryEntry]:
    """Reads the runs of a job, in either form, without executing the file.

    Args:
        path: `history.json`, `history.py`, or the folder that has one of them.

    Raises:
        ValueError: It is not a history; the message says why.
        OSError: It cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        path = path / HISTORY if (path / HISTORY).exists() else path / HISTORY_PY
    text = path.read_text(encoding="utf-8")
    try:
        rows = _python_rows(text) if path.suffix == ".py" else json.loads(text)
        history = TypeAdapter(list[HistoryEntry]).validate_json(json.dumps(rows), strict=True)
        if not all(math.isfinite(number) for one in history for number in (one.energy, one.time)):
            raise ValueError("an energy or a time is not finite")
        return history
    except (ValueError, TypeError, KeyError, SyntaxError, RecursionError) as error:
        why = explain(error.errors()[0]) if isinstance(error, ValidationError) else error
        raise FileError(f"{path} is not a history of runs: {why}") from None


def _python_rows(text: str) -> list[dict[str, Any]]:
    """Parses `[HistoryEntry(bs=128, ...), ...]` to mappings, without executing it."""
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("it is not a list")
    rows = []
    for call in tree.elts:
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or call.func.id != "HistoryEntry"
            or call.args
        ):
            raise ValueError(f"line {call.lineno} is not a HistoryEntry(bs=..., ...)")
        rows.append({str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    return rows

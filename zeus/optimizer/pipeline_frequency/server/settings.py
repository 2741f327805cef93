"""The server's settings: environment variables that start with `ZEUS_PFO_`."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any, TypeGuard, get_origin

from pydantic import ConfigDict, Field, field_validator, model_validator

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.server import scheduler as schedulers
from zeus.optimizer.pipeline_frequency.server.scheduler import FrequencyScheduler
from zeus.utils.settings import HttpSettings
from zeus_ipc.parsing import Malformed, parse

PREFIX = "ZEUS_PFO_"


class PlanServerSettings(HttpSettings):
    """The settings.

    Attributes:
        scheduler: Scheduler class: its name in the scheduler module, or `package.module:Class`.
            Without it the arguments decide: a plan file is run by `PointSolution`, a folder of
            plans by `FrontierSolution`, and without either jobs profile themselves
            (`OnlineSolution`).
        scheduler_args: Arguments of its constructor after the first three, as a JSON object.
        dump_data: Whether to also write ranks, schedules and results as JSON files.
        dump_dir: Folder of these, and of the profiles and plans of jobs that profile themselves.
        max_job_idle_time: Time without requests after which a job is dropped, s.
        database: SQLite file for the server's state; `:memory:`: none.
        register_timeout: How long a request for a schedule waits for the other ranks, s.
        max_jobs: Most jobs; further ones are refused.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)
    prefix = PREFIX
    error = PipelineFrequencyError

    scheduler: type[FrequencyScheduler]
    scheduler_args: dict[str, Any] = Field(default_factory=dict)
    dump_data: bool = True
    dump_dir: Path = Path("dump")
    max_job_idle_time: float = Field(default=7 * 24 * 3600, gt=0, allow_inf_nan=False)
    database: str = ""
    register_timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    max_jobs: int = Field(default=1000, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _scheduler_by_arguments(cls, data: Any) -> Any:
        args = data.get("scheduler_args", {})
        args = _object(args) if isinstance(args, str) else args
        data = {**data, "scheduler_args": args}
        if data.get("scheduler"):
            return data
        path = args.get("solution_path")
        kind: type[FrequencyScheduler] = schedulers.OnlineSolution
        if isinstance(path, str):
            of_folder = Path(path).is_dir() or path.endswith(".json")
            kind = schedulers.FrontierSolution if of_folder else schedulers.PointSolution
        return {**data, "scheduler": kind}

    @field_validator("scheduler", mode="before")
    @classmethod
    def _class(cls, value: Any) -> Any:
        return _find(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _arguments_fit(self) -> PlanServerSettings:
        signature = inspect.signature(self.scheduler)
        try:
            signature.bind(job_info=None, rank_infos=None, pfo_settings=None, **self.scheduler_args)
        except TypeError as error:
            takes = [name for name in signature.parameters if name not in _GIVEN]
            raise ValueError(
                f"SCHEDULER_ARGS do not fit {self.scheduler.__name__} ({error}); it takes "
                f"{', '.join(takes) or 'none'}"
            ) from None
        try:
            self.scheduler.check(**self.scheduler_args)
        except PipelineFrequencyError as error:
            raise ValueError(f"SCHEDULER_ARGS: {error.message}") from None
        return self

    @property
    def database_path(self) -> str:
        """Path of the state's file."""
        return self.database or str(self.dump_dir / "pfo.sqlite")


_GIVEN = ("job_info", "rank_infos", "pfo_settings")


def _object(text: str) -> dict[str, Any]:
    try:
        value = parse(text)
    except Malformed as error:
        raise ValueError(
            f"SCHEDULER_ARGS are not JSON ({error}); write them as "
            '\'{"solution_path": "freqs_pipeline_00042.py"}\''
        ) from None
    if not isinstance(value, dict):
        raise ValueError("SCHEDULER_ARGS must be a JSON object: names and values in braces")
    return value


def _find(name: str) -> type[FrequencyScheduler]:
    path = name if ":" in name else f"{schedulers.__name__}:{name}"
    module_name, _, attribute = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), attribute, None)
    except ImportError as error:
        raise ValueError(
            f"the scheduler {name} cannot be imported ({error}); name it package.module:Class, and "
            "see that the package is on PYTHONPATH"
        ) from None
    if not _is_scheduler(kind):
        known = [
            name
            for name, value in vars(schedulers).items()
            if _is_scheduler(value) and not inspect.isabstract(value)
        ]
        raise ValueError(
            f"{name} is not a FrequencyScheduler; there are {', '.join(known)}, and your own as "
            "package.module:Class"
        )
    return kind


def _is_scheduler(value: object) -> TypeGuard[type[FrequencyScheduler]]:
    generic = get_origin(value) is not None  # Python 3.10 takes list[int] for a class
    return inspect.isclass(value) and not generic and issubclass(value, FrequencyScheduler)

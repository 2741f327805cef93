"""The environment variables by which `ZeusMaster` configures `ZeusDataLoader`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from zeus_common.text import sentence
from zeus_ipc.wire import matching


def _number(value: Any) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"must be a number, not {value!r}")
    return number


def _iterations(value: Any) -> tuple[int, int]:
    try:
        warmup, measure = map(int, value.split(",") if isinstance(value, str) else value)
    except ValueError:
        warmup, measure = -1, -1
    if warmup < 0 or measure < 1:
        raise ValueError(
            "must be two whole numbers of iterations, to warm up and to measure, such as 10,40, "
            f"not {value!r}"
        )
    return warmup, measure


def _truth(value: Any) -> Any:
    return {"true": True, "false": False}.get(str(value).lower(), value)


Number = Annotated[float, BeforeValidator(_number)]


MONITOR_PATH = "zeus_monitor"
"""As ml-energy/zeus installs it."""


class Settings(BaseModel):
    """Settings of a run, each in the variable of its name, in capitals after `ZEUS_`.

    Attributes:
        target_metric: The target of training.
        log_dir: Folder of the run's files.
        job_id: Prefix of their names.
        cost_thresh: Cost at which the run is stopped, J; infinite for never.
        eta_knob: 1 counts energy only, 0 time only.
        monitor_path: Path of ml-energy/zeus's monitor program. Nothing here runs it.
        profile_params: Two numbers: iterations that are not measured after a change of the power
            limit, and iterations that are measured at each limit.
        use_optimal_pl: Whether to train at the best limit once it is known; if false, limits are
            still measured, and training stays at the highest.
    """

    model_config = ConfigDict(
        frozen=True, populate_by_name=True, alias_generator=lambda name: f"ZEUS_{name.upper()}"
    )

    target_metric: Number
    log_dir: str = "zeus_log"
    job_id: Annotated[str, matching("[^/]+", "it begins the names of files")] = "zeus"
    cost_thresh: Number = math.inf
    eta_knob: Annotated[float, Field(ge=0, le=1)] = 0.5
    monitor_path: str = MONITOR_PATH
    profile_params: Annotated[tuple[int, int], BeforeValidator(_iterations)] = (10, 40)
    use_optimal_pl: Annotated[bool, Field(strict=True), BeforeValidator(_truth)] = True

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Reads them from environment variables.

        Raises:
            ValueError: A variable is missing or makes no sense; one sentence says which.
        """
        try:
            return cls.model_validate({n: v for n, v in env.items() if n.startswith("ZEUS_")})
        except ValidationError as error:
            raise ValueError(sentence(error)) from None

    def to_env(self) -> dict[str, str]:
        """Returns the environment variables with these settings."""
        texts = {name: str(value) for name, value in self.model_dump(by_alias=True).items()}
        return {**texts, "ZEUS_PROFILE_PARAMS": ",".join(map(str, self.profile_params))}

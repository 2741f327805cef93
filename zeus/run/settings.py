"""The environment variables by which `ZeusMaster` configures `ZeusDataLoader`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

TARGET_METRIC = "ZEUS_TARGET_METRIC"
LOG_DIR = "ZEUS_LOG_DIR"
JOB_ID = "ZEUS_JOB_ID"
COST_THRESH = "ZEUS_COST_THRESH"
ETA_KNOB = "ZEUS_ETA_KNOB"
MONITOR_PATH = "ZEUS_MONITOR_PATH"
PROFILE_PARAMS = "ZEUS_PROFILE_PARAMS"
USE_OPTIMAL_PL = "ZEUS_USE_OPTIMAL_PL"


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    Attributes:
        target_metric: The target of training.
        log_dir: Folder of the run's files.
        job_id: Prefix of their names.
        cost_thresh: Cost at which the run is stopped, J; infinite for never.
        eta_knob: 1 counts energy only, 0 time only.
        monitor_path: Path of ml-energy/zeus's monitor program. Nothing here runs it.
        warmup_iters: Iterations that are not measured after a change of the power limit.
        measure_iters: Iterations that are measured at each limit.
        use_optimal_pl: Whether to train at the best limit once it is known; if false, limits are
            still measured, and training stays at the highest.
    """

    target_metric: float
    log_dir: str = "zeus_log"
    job_id: str = "zeus"
    cost_thresh: float = math.inf
    eta_knob: float = 0.5
    monitor_path: str = "zeus_monitor"
    warmup_iters: int = 10
    measure_iters: int = 40
    use_optimal_pl: bool = True

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Reads them from environment variables.

        Raises:
            ValueError: A variable is missing or makes no sense; one sentence says which.
        """
        if TARGET_METRIC not in env:
            raise ValueError(
                f"the environment variable {TARGET_METRIC} is missing: set it to the metric at "
                "which training has reached its target, or start the script by ZeusMaster"
            )
        warmup, measure = _iterations(env.get(PROFILE_PARAMS, "10,40"))
        eta = _number(env, ETA_KNOB, "0.5")
        if not 0 <= eta <= 1:
            raise ValueError(f"{ETA_KNOB} must be between 0 and 1, not {eta:g}")
        job_id = env.get(JOB_ID, "zeus")
        if not job_id or "/" in job_id:
            raise ValueError(f"{JOB_ID} begins the names of files, and cannot be {job_id!r}")
        return cls(
            target_metric=_number(env, TARGET_METRIC, ""),
            log_dir=env.get(LOG_DIR, "zeus_log"),
            job_id=job_id,
            cost_thresh=_number(env, COST_THRESH, "inf"),
            eta_knob=eta,
            monitor_path=env.get(MONITOR_PATH, "zeus_monitor"),
            warmup_iters=warmup,
            measure_iters=measure,
            use_optimal_pl=_boolean(env, USE_OPTIMAL_PL, "True"),
        )

    def to_env(self) -> dict[str, str]:
        """Returns the environment variables with these settings."""
        return {
            TARGET_METRIC: repr(self.target_metric),
            LOG_DIR: self.log_dir,
            JOB_ID: self.job_id,
            COST_THRESH: repr(self.cost_thresh),
            ETA_KNOB: repr(self.eta_knob),
            MONITOR_PATH: self.monitor_path,
            PROFILE_PARAMS: f"{self.warmup_iters},{self.measure_iters}",
            USE_OPTIMAL_PL: str(self.use_optimal_pl),
        }


def _number(env: Mapping[str, str], name: str, default: str) -> float:
    text = env.get(name, default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ValueError(f"{name} must be a number, not {text!r}")
    return value


def _boolean(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, default)
    if text.lower() not in ("true", "false"):
        raise ValueError(f"{name} must be True or False, not {text!r}")
    return text.lower() == "true"


def _iterations(text: str) -> tuple[int, int]:
    try:
        warmup, measure = (int(part) for part in text.split(","))
    except ValueError:
        warmup, measure = -1, -1
    if warmup < 0 or measure < 1:
        raise ValueError(
            f"{PROFILE_PARAMS} must be two whole numbers of iterations, to warm up and to measure, "
            f"such as 10,40, not {text!r}"
        )
    return warmup, measure

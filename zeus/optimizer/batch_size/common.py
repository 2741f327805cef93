"""The messages between training jobs and the store of the trials. The first five of these
endpoints, and the fields without a default here, are ml-energy/zeus's; its clients work, too.
"""

from __future__ import annotations

import math
import secrets
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from zeus.policy.knowledge import Place
from zeus_ipc.wire import matching

JOBS_URL = "/jobs"
BATCH_SIZE_URL = "/jobs/batch_size"
REPORT_URL = "/report"
TRIALS_URL = "/trials"
HEARTBEAT_URL = "/trials/heartbeat"
JOB_TRIALS_URL = "/jobs/{job_id}/trials"
RELEASE_URL = "/jobs/{job_id}/release"
IDEMPOTENCY_HEADER = "Idempotency-Key"

Reason = Literal["ok", "failed", "oom", "lost", "cancelled"]
"""How a trial ended: `ok` by a report whose reply stopped it, converged or not; `failed` by a
crash; `oom` when GPU memory was too small; `lost` when its reports stopped; `cancelled` by a person
or a scheduler."""

JobId = Annotated[
    str,
    matching(
        # . and .. mean another path in a URL.
        r"(?!\.\.?$)[^\x00-\x1f/?#\ud800-\udfff]{1,400}",
        "use 1 to 400 characters, no control characters or / ? #, and not . or ..",
    ),
]
# The maximum keeps all sums and costs finite.
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

MOST_W = 20_000.0
"""More than a GPU draws."""


def _pair(value: Any) -> Any:
    """JSON's arrays are lists, where another validator has read them first."""
    return tuple(value) if isinstance(value, list) else value


class _BatchSizeMessage(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class JobSpec(_BatchSizeMessage):
    """A recurring job, as described by its user.

    Attributes:
        job_id: Its name; begins with `job_id_prefix`. None: one is generated.
        job_id_prefix: Prefix of a generated name; `job_id` if only that is given.
        batch_sizes: The sizes to choose among, ascending.
        default_batch_size: Where the search begins; it must reach the target.
        eta_knob: 1 counts energy only, 0 time only.
        beta_knob: A run is stopped early when it would cost this multiple of the best; None for
            never.
        target_metric: The target of training.
        higher_is_better_metric: Whether a larger metric is better.
        max_epochs: A run is stopped early after this many epochs.
        policy: Name of the policy that chooses sizes (`zeus.policy.make_policy`): `gp` shares
            information between neighboring sizes, `pruning-gts` decides as ml-energy/zeus.
        window_size: Number of each size's last runs that count; 0 for all.
        num_pruning_rounds: For `pruning-gts`.
        mab_prior_mean: For `pruning-gts` and `gts`: prior mean of a size's reward (negative cost).
        mab_prior_precision: For the same: its precision; 0: no prior.
        mab_num_explorations: For the same: runs of each size before the first draw.
        mab_seed: Makes the choices repeatable.
        family: Jobs of one family train the same model on other GPUs, or under other power limits;
            a new one starts with what others of its policy know. With a family, a job that is
            registered on other GPUs, or with other power limits, gets these appended to its name:
            it is another job. None: no family.
    """

    job_id: JobId | None = None
    job_id_prefix: JobId
    batch_sizes: list[Annotated[int, Field(gt=0, lt=2**31)]] = Field(min_length=1, max_length=1000)
    default_batch_size: int = Field(gt=0)
    eta_knob: float = Field(default=0.5, ge=0, le=1)
    beta_knob: Positive | None = 2.0
    target_metric: Finite = 0.5
    higher_is_better_metric: bool = True
    max_epochs: int = Field(default=100, gt=0)
    policy: Annotated[str, Field(max_length=100)] = "gp"
    window_size: int = Field(default=0, ge=0)
    num_pruning_rounds: int = Field(default=2, ge=0)
    mab_prior_mean: Finite = 0.0
    mab_prior_precision: NotNegative = 0.0
    mab_num_explorations: int = Field(default=2, ge=0)
    mab_seed: int | None = Field(default=None, ge=0)
    family: JobId | None = None

    @model_validator(mode="before")
    @classmethod
    def _prefixed(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("job_id_prefix") is None and data.get("job_id"):
            return {**data, "job_id_prefix": data["job_id"]}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.default_batch_size not in self.batch_sizes:
            raise ValueError(
                f"default_batch_size {self.default_batch_size} is not in batch_sizes "
                f"{self.batch_sizes}; add it or take another"
            )
        if self.job_id is not None and not self.job_id.startswith(self.job_id_prefix):
            raise ValueError(
                f"job_id {self.job_id!r} must begin with job_id_prefix {self.job_id_prefix!r}"
            )
        object.__setattr__(self, "batch_sizes", sorted(set(self.batch_sizes)))
        return self

    def naming(self) -> dict[str, str]:
        """Returns the fields with a generated name, if it has none."""
        if self.job_id is not None:
            return {}
        prefix = self.job_id_prefix[:391]
        return {"job_id": f"{prefix}-{secrets.token_hex(4)}", "job_id_prefix": prefix}


class GpuConfig(_BatchSizeMessage):
    """The GPUs of a job. Jobs on different GPUs are different jobs; see `JobSpec.family`.

    Attributes:
        max_power: Maximum power limits of all its GPUs, added, W.
        number_of_gpus: How many.
        gpu_model: Their model.
        power_limits: The lowest and the highest power limit that each may have, W. Clients set it
            if the job has a family. None: unknown.
    """

    max_power: Positive
    number_of_gpus: int = Field(gt=0)
    gpu_model: str = Field(min_length=1, max_length=200)
    power_limits: Annotated[tuple[Positive, Positive], BeforeValidator(_pair)] | None = None

    @model_validator(mode="after")
    def _in_watts(self) -> GpuConfig:
        if self.max_power > MOST_W * self.number_of_gpus:
            raise ValueError(
                f"max_power is {self.max_power:g} W for {self.number_of_gpus} GPU(s), but no GPU "
                "has such a limit, so give it in W"
            )
        return self

    @property
    def place(self) -> Place:
        """The conditions under which knowledge about the job is valid."""
        return Place(self.gpu_model, self.power_limits)


class JobSpecFromClient(JobSpec, GpuConfig):
    """A job with its GPUs: the body of `POST /jobs`."""


class CreatedJob(JobSpecFromClient):
    """A registered job, with its name: the reply."""

    job_id: JobId


class TrialId(_BatchSizeMessage):
    """Identifies a trial: one run with a batch size.

    Attributes:
        job_id: Its job.
        batch_size: The batch size.
        trial_number: From 1 in each job, or above the generation of the database.
        key: Key of the request that it was begun for. Another run may have its number, if the
            database was restored from an older backup. None: ml-energy/zeus's clients send none.
    """

    job_id: JobId
    batch_size: int = Field(gt=0)
    trial_number: int = Field(gt=0)
    key: str | None = None


class _Used(_BatchSizeMessage):
    """Time and energy of a run since it began, over all its processes.

    Attributes:
        time: Time, s.
        energy: Energy, J.
        overhead_time: The part of the time spent on finding the power limit, s.
        overhead_energy: The same part of the energy, J.
    """

    time: NotNegative = 0.0
    energy: NotNegative = 0.0
    overhead_time: NotNegative = 0.0
    overhead_energy: NotNegative = 0.0


class NewTrial(TrialId, _Used):
    """The reply to a request for a batch size.

    Attributes:
        lease_s: The trial is lost if nothing is heard from it for this long; None: it has no lease.
        cost_bound: Cost at which it is stopped early, J; None for never.
        best_batch_size: The size with the lowest estimated cost; a run uses it when the store is
            unavailable. None while no run has converged.
        reason: How the trial ended; None while it runs. A repeated request, as by a resumed run,
            may find an old trial.
        current_epoch: Number of reported epochs.
    """

    lease_s: float | None = None
    cost_bound: float | None = None
    best_batch_size: int | None = None
    reason: Reason | None = None
    current_epoch: int = Field(default=0, ge=0)


class TrainingResult(TrialId, _Used):
    """A run's totals up to the end of an epoch: the body of `POST /report`.

    Attributes:
        metric: The metric after this epoch; None if it is not finite, which never reaches the
            target.
        current_epoch: Epochs trained.
        searching: Whether a power limit is still searched for: no cost stops the run meanwhile.
    """

    time: NotNegative
    energy: NotNegative
    metric: Finite | None
    current_epoch: int = Field(gt=0)
    searching: bool = False

    @field_validator("metric", mode="before")
    @classmethod
    def _number(cls, metric: Any) -> Any:
        # JSON has neither NaN nor infinity, and a loss that exploded must not be an error.
        return None if isinstance(metric, float) and not math.isfinite(metric) else metric


class ReportResponse(_BatchSizeMessage):
    """The reply to a report.

    Attributes:
        stop_train: Whether training has ended.
        converged: Whether it reached the target.
        message: Why.
        cost: Its cost so far, J.
        predicted_cost: Its cost after another epoch, J.
        cost_bound: Cost at which it is stopped early, J; None for never.
    """

    stop_train: bool
    converged: bool
    message: str
    cost: float | None = None
    predicted_cost: float | None = None
    cost_bound: float | None = None


class EndTrial(TrialId):
    """A run ends other than by a report: the body of `PATCH /trials`.

    Attributes:
        reason: Why. ml-energy/zeus's clients send none, which means `failed`.
    """

    reason: Reason = "failed"


class Trials(Protocol):
    """A store of the trials of jobs: a server, or a file on this machine. All methods raise
    ZeusBSORuntimeError, with an HTTP status: 404 for an unknown job or trial, 409 for a job that is
    registered with other settings, 0 without a reply.
    """

    def register(self, spec: JobSpecFromClient) -> CreatedJob:
        """Registers a job, or finds the one with this name, which must be the same."""

    def begin_trial(self, job_id: str, key: str) -> NewTrial:
        """Chooses a batch size.

        Args:
            key: The same key gets the same trial: a request may be repeated.
        """

    def report(self, result: TrainingResult) -> ReportResponse:
        """An epoch has ended. Also renews the lease. May be repeated."""

    def heartbeat(self, trial: TrialId) -> None:
        """The run is alive."""

    def end_trial(self, end: EndTrial) -> None:
        """The run has ended in another way. May be repeated; an ended trial does not change."""

    def close(self) -> None:
        """Closes connections and files."""

"""What training jobs and the keeper of the trials say to each other.

The first five of these endpoints, and the fields without a default here, are ml-energy/zeus's; its
clients are served, too.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from zeus.policy.knowledge import Place
from zeus.policy.signal import Signal
from zeus.policy.trade_off import Relative, TradeOff, time_of_day

JOBS_URL = "/jobs"
BATCH_SIZE_URL = "/jobs/batch_size"
REPORT_URL = "/report"
TRIALS_URL = "/trials"
HEARTBEAT_URL = "/trials/heartbeat"
JOB_TRIALS_URL = "/jobs/{job_id}/trials"
IDEMPOTENCY_HEADER = "Idempotency-Key"

MOST_METRICS = 10_000
"""A run of more epochs than this has no learning curve."""

PolicyName = Literal["gp", "pruning-gts", "gts"]
"""`gp` shares strength between neighbouring sizes; `pruning-gts` decides as ml-energy/zeus."""

Reason = Literal["ok", "failed", "oom", "lost", "cancelled"]
"""How a trial ended: `ok` by a report that told it to stop, converged or not; `failed` by a crash;
`oom` for want of GPU memory; `lost` when nothing more was heard of it; `cancelled` by a person or a
scheduler."""

JobId = Annotated[str, Field(min_length=1, max_length=400, pattern=r"^[^\x00-\x1f/?#]+$")]
# The most keeps all sums and costs finite.
Positive = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class JobSpec(_Message):
    """A recurring job, as who trains describes it.

    Attributes:
        job_id: Its name; begins with `job_id_prefix`. None lets one be made.
        job_id_prefix: What a made name begins with.
        batch_sizes: The sizes to choose among, ascending.
        default_batch_size: Where the search begins; it must reach the target.
        eta_knob: 1 counts energy only, 0 time only.
        beta_knob: A run is given up when it would cost so many times the best; None for never.
        target_metric: What training is to reach.
        higher_is_better_metric: Whether a larger metric is better.
        max_epochs: A run is given up after so many epochs.
        policy: What chooses the sizes.
        window_size: So many of each size's last runs count; 0 for all.
        num_pruning_rounds: Of `pruning-gts`.
        mab_prior_mean: Of `pruning-gts` and `gts`: mean reward (negative cost) expected of a size.
        mab_prior_precision: Of the same: how sure that is; 0 for not at all.
        mab_num_explorations: Of the same: runs of each size before the first draw.
        mab_seed: Makes the choices repeatable.
        family: Jobs of one family train the same on other GPUs, or under other power limits; a new
            one begins with what is known of the others. With a family, the name of a job that is
            registered on other GPUs, or with other power limits, gets these appended: it is another
            job. None for none.
        stop_by_curve: Whether a run of a size that never reached the target is also given up by its
            learning curve. None: as the policy does; `gp` does.
        signal: Price or carbon intensity that `eta_knob` follows, with `gp`: the name of a signal
            of the server, or, with a file for a store, what `zeus.monitor.signals.signal_of` reads.
            None: it is the same for all runs.
        done_by: Each run is to be done at this time of day, such as `08:00`, with the least energy;
            with `gp`. Local time of who keeps the trials where it has no offset.
        on_time: Probability with which it is to be done by then.
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
    policy: PolicyName = "gp"
    window_size: int = Field(default=0, ge=0)
    num_pruning_rounds: int = Field(default=2, ge=0)
    mab_prior_mean: Finite = 0.0
    mab_prior_precision: NotNegative = 0.0
    mab_num_explorations: int = Field(default=2, ge=0)
    mab_seed: int | None = Field(default=None, ge=0)
    family: JobId | None = None
    stop_by_curve: bool | None = None
    signal: Annotated[str, Field(min_length=1, max_length=400)] | None = None
    done_by: str | None = None
    on_time: float = 0.95

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
        self.trade_off(None if self.signal is None else Signal([(0.0, 1.0)]))
        object.__setattr__(self, "batch_sizes", sorted(set(self.batch_sizes)))
        return self

    @property
    def eta_follows(self) -> bool:
        """Whether each trial has an eta of its own."""
        return self.signal is not None or self.done_by is not None

    @property
    def weighs(self) -> str:
        """What weighs energy against time, for people: eta, and what it follows."""
        parts = [f"eta {self.eta_knob:g}"]
        if self.signal is not None:
            parts.append(f"following {self.signal}")
        if self.done_by is not None:
            parts.append(f"done by {self.done_by}")
        return ", ".join(parts)

    def trade_off(self, signal: Relative | None) -> TradeOff | None:
        """What decides which eta a trial has; None: the job's.

        Args:
            signal: That which the job names.

        Raises:
            ValueError: The job cannot be.
        """
        due = None if self.done_by is None else time_of_day(self.done_by)
        if signal is None and due is None:
            return None
        if self.policy != "gp":
            raise ValueError("only with the policy gp can eta_knob follow a signal or a deadline")
        return TradeOff(self.eta_knob, signal, due, self.on_time)


class GpuConfig(_Message):
    """What a job trains on. Jobs on different GPUs are different jobs; see `JobSpec.family`.

    Attributes:
        max_power: Maximum power limits of all its GPUs, added, W.
        number_of_gpus: How many.
        gpu_model: Their model.
        power_limits: The lowest and the highest power limit that each may have, W. Clients give it
            where the job has a family. None: not known.
    """

    max_power: Positive
    number_of_gpus: int = Field(gt=0)
    gpu_model: str = Field(min_length=1, max_length=200)
    power_limits: tuple[Positive, Positive] | None = None

    @property
    def place(self) -> Place:
        """What knowledge of the job is true of."""
        return Place(self.gpu_model, self.power_limits)


class JobSpecFromClient(JobSpec, GpuConfig):
    """A job with what it trains on: the body of `POST /jobs`."""


class CreatedJob(JobSpecFromClient):
    """A registered job, with its name: the answer."""

    job_id: JobId


class TrialId(_Message):
    """Which trial: a batch size that a run trains with.

    Attributes:
        job_id: Its job.
        batch_size: The batch size.
        trial_number: From 1 in each job.
    """

    job_id: JobId
    batch_size: int = Field(gt=0)
    trial_number: int = Field(gt=0)


class _Used(_Message):
    """What a run has used since it began, in all processes that it had.

    Attributes:
        time: Time, s.
        energy: Energy, J.
        overhead_time: Of the time what was spent on finding the power limit, s.
        overhead_energy: Of the energy the same, J.
    """

    time: NotNegative = 0.0
    energy: NotNegative = 0.0
    overhead_time: NotNegative = 0.0
    overhead_energy: NotNegative = 0.0


class NewTrial(TrialId, _Used):
    """The answer to who asks for a batch size.

    Attributes:
        lease_s: The trial is lost unless something is heard of it in each so many seconds; None
            where it has no lease.
        cost_bound: Cost at which it will be given up, J; None for never.
        rerun_cost: What a run of the best size is expected to cost, J, where the trial may also be
            given up by its learning curve; None where it may not, and when a request is repeated.
        best_batch_size: The size that is thought cheapest by now; a run takes it where nobody
            answers. None while no run has converged.
        reason: How the trial ended; None while it goes on. A request that is repeated, as by a run
            that was stopped and goes on, may find an old trial.
        current_epoch: Epochs that were reported of it.
        eta_knob: The eta of its cost; None: the job's.
    """

    lease_s: float | None = None
    cost_bound: float | None = None
    rerun_cost: float | None = None
    best_batch_size: int | None = None
    reason: Reason | None = None
    current_epoch: int = Field(default=0, ge=0)
    eta_knob: float | None = None


class TrainingResult(TrialId, _Used):
    """What a run has used up to the end of an epoch: the body of `POST /report`.

    Attributes:
        metric: The metric after this epoch; None where it is no finite number, which is never the
            target.
        current_epoch: Epochs trained.
        metrics: The metrics of all epochs, in order, for the learning curve; empty where there is
            none to go by.
        rerun_cost: That of `NewTrial`.
        limits: Energy, J, and time, s, of a step at each power limit that was measured, once one is
            chosen; what another eta would have chosen follows from it.
    """

    time: NotNegative
    energy: NotNegative
    metric: Finite | None
    current_epoch: int = Field(gt=0)
    metrics: list[Finite | None] = Field(default_factory=list, max_length=MOST_METRICS)
    rerun_cost: NotNegative | None = None
    limits: list[tuple[Positive, Positive]] = Field(default_factory=list, max_length=1000)

    @field_validator("metric", mode="before")
    @classmethod
    def _number(cls, metric: Any) -> Any:
        # JSON has neither NaN nor infinity, and a loss that exploded must not be an error.
        return None if isinstance(metric, float) and not math.isfinite(metric) else metric


class ReportResponse(_Message):
    """What a run is to do.

    Attributes:
        stop_train: Whether training has ended.
        converged: Whether it reached the target.
        message: Why.
        cost: What it cost until now, J.
        predicted_cost: What it will have cost after another epoch, J.
        cost_bound: Cost at which it is given up, J; None for never.
    """

    stop_train: bool
    converged: bool
    message: str
    cost: float | None = None
    predicted_cost: float | None = None
    cost_bound: float | None = None


class EndTrial(TrialId):
    """A run ends without a report that told it to: the body of `PATCH /trials`.

    Attributes:
        reason: Why. ml-energy/zeus's clients say none, which is `failed`.
    """

    reason: Reason = "failed"


class Trials(Protocol):
    """Who keeps the trials of jobs: a server, or a file of this machine.

    All raise ZeusBSORuntimeError, with a status as HTTP has them: 404 for an unknown job or trial,
    409 for a job that is registered otherwise, 0 where nobody answers.
    """

    def register(self, spec: JobSpecFromClient) -> CreatedJob:
        """Makes a job, or finds the one of this name, which must be the same."""

    def begin_trial(self, job_id: str, key: str) -> NewTrial:
        """Chooses a batch size.

        Args:
            job_id: The job.
            key: The same key gets the same trial: a request may be repeated.
        """

    def report(self, result: TrainingResult) -> ReportResponse:
        """An epoch has ended. Keeps the lease, too. May be repeated."""

    def heartbeat(self, trial: TrialId) -> None:
        """The run lives."""

    def end_trial(self, end: EndTrial) -> None:
        """The run has ended otherwise. May be repeated; a trial that has ended stays as it is."""

    def close(self) -> None:
        """Lets connections and files go."""

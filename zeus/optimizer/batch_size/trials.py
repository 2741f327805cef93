"""A trial and its state transitions. Pure: no file, no clock, no socket.

- A report is judged in this order: the target is reached; the epochs are used up; another epoch
  would cost more than the trial's bound, which is fixed when the trial begins. While a power limit
  is searched for, an epoch's cost is not that of its size, and no cost stops the run.
- A trial is lost if nothing was heard from it for its lease, and runs again after its next message.
  Other ended trials do not change, except by a report that they reached the target.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from zeus.optimizer.batch_size.common import (
    MOST_W,
    CreatedJob,
    Reason,
    ReportResponse,
    TrainingResult,
)
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.policy.knowledge import Knowledge
from zeus.policy.recurrence import (
    Used,
    Verdict,
    after_another_epoch,
    judge,
    reaches,
)
from zeus.utils.metric import zeus_cost

Status = Literal["running"] | Reason
STATUSES: tuple[Status, ...] = ("running", "ok", "failed", "oom", "lost", "cancelled")


@dataclass(frozen=True)
class JobRecord:
    """A stored job.

    Attributes:
        seed: Seed of all choices; `spec.mab_seed`, or random.
        created_s: When it was registered, s since 1970.
        trials: The highest number of its trials.
        changes: Number of changes of its trials, but for heartbeats.
        knowledge: Knowledge of its family when it was registered.
        released: Ends up to this change exclude no size.
    """

    spec: CreatedJob
    seed: int
    created_s: float
    trials: int = 0
    changes: int = 0
    released: int = 0
    knowledge: Knowledge | None = None

    @property
    def job_id(self) -> str:
        """Its name."""
        return self.spec.job_id

    def cost(self, energy: float, time: float) -> float:
        """Returns the cost of energy (J) and time (s), J."""
        return zeus_cost(energy, time, self.spec.eta_knob, self.spec.max_power)


@dataclass(frozen=True)
class Trial:
    """A run of a job with a batch size.

    Attributes:
        number: From 1 in each job, or above the generation of the database.
        began_s: When it began, s since 1970.
        heard_s: Time of its last message, s since 1970.
        lease_s: It is lost after this time without a message, s; None for never.
        cost_bound: Cost at which it is stopped early, J; None for never.
        end_order: Number of the change that ended it: the order in which a job's trials ended.
        epochs: Number of reported epochs.
        time: Time up to the end of the last of them, s.
        energy: Energy up to there, J.
        overhead_time: The part of the time spent on finding the power limit, s.
        overhead_energy: The same part of the energy, J.
        metric: The metric then; None if there is none, or it is not a number.
    """

    number: int
    batch_size: int
    began_s: float
    heard_s: float
    lease_s: float | None = None
    cost_bound: float | None = None
    status: Status = "running"
    ended_s: float | None = None
    end_order: int | None = None
    converged: bool = False
    stopped_by_cost: bool = False
    epochs: int = 0
    time: float = 0.0
    energy: float = 0.0
    overhead_time: float = 0.0
    overhead_energy: float = 0.0
    metric: float | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.status == "running"

    @property
    def used(self) -> Used:
        """Its time and energy."""
        return Used(self.time, self.energy, self.overhead_time, self.overhead_energy)

    @property
    def order(self) -> int:
        """Sort key of ended trials: the order of their ends."""
        return self.end_order or 0

    @property
    def trials(self) -> int:
        """A trial is a group of one, see `rows.summed`."""
        return 1


def lost(trials: Iterable[Trial], now_s: float) -> list[Trial]:
    """Returns the running trials whose lease has expired."""
    return [
        trial
        for trial in trials
        if trial.running and trial.lease_s is not None and now_s > trial.heard_s + trial.lease_s
    ]


def reported(
    job: JobRecord, trial: Trial, result: TrainingResult, now_s: float, order: int
) -> tuple[Trial, ReportResponse]:
    """Handles a report.

    Args:
        order: Number of this change.

    Returns:
        The updated trial, and the reply.

    Raises:
        ZeusBSORuntimeError: No GPUs draw such power (422).
    """
    if trial.status == "ok":
        return trial, _answer(job, trial, True, f"trial {trial.number} was already reported")
    power_w = result.energy / max(result.time, 1.0)
    if power_w > MOST_W * job.spec.number_of_gpus:
        raise ZeusBSORuntimeError(
            f"{result.energy:g} J in {result.time:g} s is {power_w:.3g} W, which no GPU draws; "
            "give energy in joules and time in seconds",
            422,
        )
    heard = replace(trial, heard_s=now_s)
    if result.current_epoch >= trial.epochs:
        # A report that arrives after a later one adds nothing.
        heard = replace(
            heard,
            epochs=result.current_epoch,
            time=result.time,
            energy=result.energy,
            overhead_time=min(result.overhead_time, result.time),
            overhead_energy=min(result.overhead_energy, result.energy),
            metric=result.metric,
        )
    spec = job.spec
    converged = reaches(heard.metric, spec.target_metric, spec.higher_is_better_metric)
    if not converged and trial.status not in ("running", "lost"):
        why = f"trial {trial.number} had ended: {trial.status}"
        return heard, _answer(job, heard, True, why)
    verdict = judge(
        reached=converged,
        epochs=heard.epochs,
        max_epochs=spec.max_epochs,
        next_cost=None if result.searching else _predicted_cost(job, heard),
        cost_bound=heard.cost_bound,
    )
    why = _why(job, heard, verdict)
    if not verdict.stop:
        heard = replace(heard, status="running", ended_s=None, end_order=None)
        return heard, _answer(job, heard, False, why)
    heard = replace(
        heard,
        status="ok",
        ended_s=now_s,
        end_order=order,
        converged=converged,
        stopped_by_cost=verdict.by_cost,
    )
    return heard, _answer(job, heard, True, why)


def ended(trial: Trial, reason: Reason, now_s: float, order: int) -> Trial:
    """Handles the end of a run other than by a report.

    Raises:
        ZeusBSORuntimeError: Only a report ends a trial `ok` (422).
    """
    if reason == "ok":
        raise ZeusBSORuntimeError(
            "a trial ends ok by a report that tells it to stop; for another end say failed, oom, "
            "lost or cancelled",
            422,
        )
    if not trial.running and (trial.status != "lost" or reason == "lost"):
        return trial
    return replace(trial, status=reason, ended_s=now_s, end_order=order)


def alive(trial: Trial, now_s: float) -> Trial:
    """Handles a heartbeat; a lost trial is running again, other ended trials do not change."""
    if trial.status == "lost":
        return replace(trial, status="running", ended_s=None, end_order=None, heard_s=now_s)
    return replace(trial, heard_s=now_s) if trial.running else trial


def _why(job: JobRecord, trial: Trial, verdict: Verdict) -> str:
    spec = job.spec
    if not verdict.stop:
        return "train on"
    if verdict.reached:
        return f"{trial.metric:g} reaches the target {spec.target_metric:g}"
    if verdict.next_cost is None:
        return f"the target {spec.target_metric:g} is not reached in max_epochs {spec.max_epochs}"
    return (
        f"after another epoch the run would have cost {verdict.next_cost:.4g} J; its bound is "
        f"{trial.cost_bound:.4g} J (beta_knob {spec.beta_knob:g})"
    )


def _predicted_cost(job: JobRecord, trial: Trial) -> float:
    return job.cost(*after_another_epoch(trial.used, trial.epochs))


def _answer(job: JobRecord, trial: Trial, stop: bool, message: str) -> ReportResponse:
    return ReportResponse(
        stop_train=stop,
        converged=trial.converged,
        message=message,
        cost=job.cost(trial.energy, trial.time),
        predicted_cost=None if stop else _predicted_cost(job, trial),
        cost_bound=trial.cost_bound,
    )

"""Jobs as shown by the page and `GET /jobs`: JSON without the plans' instructions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zeus.optimizer.pipeline_frequency.plans import FRONTIER, Frontier
from zeus.optimizer.pipeline_frequency.server import views
from zeus.optimizer.pipeline_frequency.server.job import TrainingJob


def summary(job: TrainingJob, now_s: float) -> dict[str, Any]:
    """A job in a line."""
    return {
        **job.info.model_dump(exclude={"schedule", "num_microbatches"}),
        "phase": job.phase,
        "ranks_registered": len(job.ranks),
        "iteration": job.iteration,
        "created_s": job.created_s,
        "heard_ago_s": max(0.0, now_s - job.heard_s),
        "has_frontier": job.frontier is not None,
        "plans": len(job.frontier.plans) if job.frontier is not None else None,
        "plan": job.base if job.frontier is not None else None,
        "stragglers": _stragglers(job),
    }


def detail(job: TrainingJob, now_s: float) -> dict[str, Any]:
    """All data of a job."""
    error = job.failure.message if job.failure is not None else job.planning_error
    return {
        **summary(job, now_s),
        "error": error,
        "missing_ranks": job.missing(job.ranks)[:100],
        "profiles": len(job.profiles),
        "choice": job.choice.model_dump(exclude_none=True),
        "initial_choice": job.initial.model_dump(exclude_none=True),
        "pipelines": pipelines(job),
        "replans": job.replans,
        "instruction_paces": _paces(job),
        "ranks": _ranks(job, now_s),
        "frontier": _frontier(job.frontier) if job.frontier is not None else None,
    }


def _stragglers(job: TrainingJob) -> list[int]:
    return [dp for dp, slowdown in enumerate(job.slowdowns) if slowdown != 1.0]


def _paces(job: TrainingJob) -> list[dict[str, Any]]:
    """Ratio of the instructions' times to those in the plan."""
    return [
        {"stage": stage, "instruction": name, "pace": pace}
        for (stage, name), pace in sorted(job.drift.paces.items())
    ]


def pipelines(job: TrainingJob) -> list[dict[str, Any]]:
    """The plans in force, and what they promise."""
    if job.frontier is None:
        return []
    paces, times = job.watch.paces, job.times()
    return [
        {
            "dp_rank": dp_rank,
            "plan": one.plan,
            "version": one.version,
            "at_iteration": one.at_iteration,
            "slowdown": job.slowdowns[dp_rank],
            "pace": paces[dp_rank] if paces else None,
            "time_s": times.get(dp_rank),
            "planned_time_s": _number(job.frontier.plans[one.plan].time_s),
            "planned_energy_j": _number(job.frontier.plans[one.plan].energy_j),
        }
        for dp_rank, one in enumerate(job.in_force)
    ]


def _ranks(job: TrainingJob, now_s: float) -> list[dict[str, Any]]:
    ranks = []
    for number in sorted(job.ranks):
        rank, seen = job.ranks[number], job.progress.get(number)
        wanted = job.in_force[rank.dp_rank].version if job.frontier is not None else None
        ranks.append(
            {
                **rank.model_dump(exclude={"available_frequencies"}),
                "iteration": seen.iteration if seen else None,
                "time_s": seen.time_s if seen else None,
                "version": seen.version if seen else None,
                "wanted_version": wanted,
                "heard_ago_s": max(0.0, now_s - seen.heard_s) if seen else None,
                "profiled": number in job.profiles,
            }
        )
    return ranks


def _frontier(frontier: Frontier) -> dict[str, Any]:
    without: Any = {"problem": True, "policies": True, "plans": {"__all__": {"stages"}}}
    shown: dict[str, Any] = FRONTIER.dump_python(frontier, mode="json", exclude=without)
    for plan, its in zip(frontier.plans, shown["plans"], strict=True):
        its["gap"] = _number(plan.gap)
    return shown


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return value if math.isfinite(value) else None


PHASES = ("registering", "profiling", "planning", "running", "failed")

_PIPELINE = ("job_id", "dp_rank")
_FAMILIES = (
    (("job_id",), "ranks_registered", "Ranks that have registered.", "ranks_registered"),
    (("job_id",), "ranks", "Ranks that the job has.", "world_size"),
    (("job_id",), "heard_timestamp_seconds", "When the job was last heard of.", "heard_s"),
    (("job_id",), "iteration", "The iteration that the last rank is in.", "iteration"),
    (("job_id",), "plans", "Plans on the job's frontier.", "plans"),
    (_PIPELINE, "plan", "Index of the plan in force; 0 is the slowest.", "plan"),
    (_PIPELINE, "planned_iteration_seconds", "What the plan in force promises.", "planned_time_s"),
    (_PIPELINE, "planned_iteration_joules", "What the plan in force promises.", "planned_energy_j"),
    (_PIPELINE, "iteration_seconds", "Longest last iteration of its ranks.", "time_s"),
    (_PIPELINE, "straggler_slowdown_ratio", "1 where the pipeline is not late.", "slowdown"),
)
"""Labels, name, text, and the figure's name in `views`."""


class PipelineJobs(Collector):
    """All families; those of jobs are empty while there are no jobs."""

    def __init__(self, jobs: Mapping[str, TrainingJob]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """The families."""
        jobs = self._jobs.values()
        phases = [job.phase for job in jobs]
        count = GaugeMetricFamily("zeus_pfo_jobs", "Jobs by phase.", labels=["phase"])
        for phase in PHASES:
            count.add_metric([phase], phases.count(phase))
        yield count
        rows = [{**views.summary(job, job.heard_s), "heard_s": job.heard_s} for job in jobs]
        pipelines = [{"job_id": key, **row} for key, job in self._jobs.items() for row in _of(job)]
        for labels, name, text, key in _FAMILIES:
            family = GaugeMetricFamily(f"zeus_pfo_{name}", text, labels=labels)
            for row in pipelines if labels is _PIPELINE else rows:
                if row.get(key) is not None:
                    family.add_metric([str(row[label]) for label in labels], row[key])
            yield family
        replans = CounterMetricFamily(
            "zeus_pfo_replans",
            "Plans made again because instructions took longer than planned.",
            labels=["job_id"],
        )
        for job_id, job in self._jobs.items():
            replans.add_metric([job_id], job.replans)
        yield replans


def _of(job: TrainingJob) -> list[dict[str, Any]]:
    """Its pipelines; where there is no frontier, their times."""
    times = job.times()
    return views.pipelines(job) or [
        {"dp_rank": dp_rank, "time_s": times[dp_rank]} for dp_rank in sorted(times)
    ]

"""The server's metrics for Prometheus, collected on request: figures that the page shows, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zeus.optimizer.pipeline_frequency.server import views
from zeus.optimizer.pipeline_frequency.server.job import TrainingJob

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

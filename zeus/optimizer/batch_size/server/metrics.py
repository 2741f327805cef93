"""The server's metrics for Prometheus: from the database, so that every worker has the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily

_OF_JOB = (
    (_COUNTER, "converged_trials", "converged", "Trials that reached the target."),
    (_COUNTER, "training_seconds", "time_s", "Time that trials have reported."),
    (_COUNTER, "training_joules", "energy_j", "Energy that trials have reported."),
    (
        _COUNTER,
        "cost_joules",
        "cost_j",
        "What trials have cost: energy and time weighed by eta_knob.",
    ),
    (
        _GAUGE,
        "cheapest_batch_size",
        "cheapest_batch_size",
        "Size of the lowest mean cost so far.",
    ),
    (_GAUGE, "cheapest_cost_joules", "cheapest_mean_cost_j", "That mean cost."),
    (_GAUGE, "default_cost_joules", "default_mean_cost_j", "Mean cost of the default size."),
    (_GAUGE, "heard_timestamp_seconds", "heard_s", "When a trial of the job was last heard of."),
)
"""Kind, name, field of the job's summary, and text."""


class BatchSizeJobs(Collector):
    """Returns all families; those of jobs have no samples without jobs.

    Args:
        jobs: Their summaries (`views.summary`).
    """

    def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """The families."""
        yield GaugeMetricFamily("zeus_bso_jobs", "Registered jobs.", value=len(self._jobs))
        # Gauges, as a lost trial may be found again.
        trials = GaugeMetricFamily(
            "zeus_bso_trials", "Trials by how they ended.", labels=["job_id", "status"]
        )
        for job in self._jobs:
            for status, count in job["counts"].items():
                trials.add_metric([job["job_id"], status], count)
        yield trials
        for kind, name, field, text in _OF_JOB:
            family = kind(f"zeus_bso_{name}", text, labels=["job_id"])
            for job in self._jobs:
                if job[field] is not None:
                    family.add_metric([job["job_id"]], job[field])
            yield family

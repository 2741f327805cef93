"""The server's metrics for Prometheus: from the database, so that every worker has the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zeus.optimizer.batch_size.trials import Overview


class BatchSizeJobs(Collector):
    """Returns all families; those of jobs have no samples without jobs."""

    def __init__(self, jobs: Sequence[Overview]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """The families."""

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"zeus_bso_{name}", text, labels=["job_id"])

        def counter(name: str, text: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"zeus_bso_{name}", text, labels=["job_id"])

        yield GaugeMetricFamily("zeus_bso_jobs", "Registered jobs.", value=len(self._jobs))
        # Gauges, as a lost trial may be found again.
        trials = GaugeMetricFamily(
            "zeus_bso_trials", "Trials by how they ended.", labels=["job_id", "status"]
        )
        converged = counter("converged_trials", "Trials that reached the target.")
        time_s = counter("training_seconds", "Time that trials have reported.")
        energy = counter("training_joules", "Energy that trials have reported.")
        cost = counter("cost_joules", "What trials have cost: energy and time weighed by eta_knob.")
        cheapest = gauge("cheapest_batch_size", "Size of the lowest mean cost so far.")
        lowest = gauge("cheapest_cost_joules", "That mean cost.")
        default = gauge("default_cost_joules", "Mean cost of the default size.")
        heard = gauge("heard_timestamp_seconds", "When a trial of the job was last heard of.")
        for job in self._jobs:
            name = job.job.job_id
            for status, count in job.counts.items():
                trials.add_metric([name, status], count)
            converged.add_metric([name], job.converged)
            time_s.add_metric([name], job.time)
            energy.add_metric([name], job.energy)
            cost.add_metric([name], job.cost)
            if job.heard_s is not None:
                heard.add_metric([name], job.heard_s)
            best = job.cheapest
            if best is not None:
                cheapest.add_metric([name], best)
                lowest.add_metric([name], job.mean_cost(best) or 0.0)
            of_default = job.mean_cost(job.job.spec.default_batch_size)
            if of_default is not None:
                default.add_metric([name], of_default)
        yield from (trials, converged, time_s, energy, cost, cheapest, lowest, default, heard)

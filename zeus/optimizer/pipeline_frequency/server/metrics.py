"""The server's metrics for Prometheus, collected on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zeus.optimizer.pipeline_frequency.server.job import TrainingJob

PHASES = ("registering", "profiling", "planning", "running", "failed")


class PipelineJobs(Collector):
    """All families; those of jobs are empty while there are no jobs."""

    def __init__(self, jobs: Mapping[str, TrainingJob]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """The families."""
        phases = [job.phase for job in self._jobs.values()]
        count = GaugeMetricFamily("zeus_pfo_jobs", "Jobs by phase.", labels=["phase"])
        for phase in PHASES:
            count.add_metric([phase], phases.count(phase))
        yield count

        def of_job(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"zeus_pfo_{name}", text, labels=["job_id"])

        def of_pipeline(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"zeus_pfo_{name}", text, labels=["job_id", "dp_rank"])

        registered = of_job("ranks_registered", "Ranks that have registered.")
        world = of_job("ranks", "Ranks that the job has.")
        heard = of_job("heard_timestamp_seconds", "When the job was last heard of.")
        iteration = of_job("iteration", "The iteration that the last rank is in.")
        plans = of_job("plans", "Plans on the job's frontier.")
        plan = of_pipeline("plan", "Index of the plan in force; 0 is the slowest.")
        promised = of_pipeline("planned_iteration_seconds", "What the plan in force promises.")
        energy = of_pipeline("planned_iteration_joules", "What the plan in force promises.")
        time_s = of_pipeline("iteration_seconds", "Longest last iteration of its ranks.")
        slowdown = of_pipeline("straggler_slowdown_ratio", "1 where the pipeline is not late.")
        replans = CounterMetricFamily(
            "zeus_pfo_replans",
            "Plans made again because instructions took longer than planned.",
            labels=["job_id"],
        )
        for job_id, job in self._jobs.items():
            replans.add_metric([job_id], job.replans)
            registered.add_metric([job_id], len(job.ranks))
            world.add_metric([job_id], job.info.world_size)
            heard.add_metric([job_id], job.heard_s)
            if job.progress:
                least = min(one.iteration for one in job.progress.values())
                iteration.add_metric([job_id], least)
            for dp_rank, longest_s in sorted(job.times().items()):
                time_s.add_metric([job_id, str(dp_rank)], longest_s)
            if job.frontier is None:
                continue
            plans.add_metric([job_id], len(job.frontier.plans))
            for dp_rank, one in enumerate(job.in_force):
                labels, chosen = [job_id, str(dp_rank)], job.frontier.plans[one.plan]
                plan.add_metric(labels, one.plan)
                promised.add_metric(labels, chosen.time_s)
                energy.add_metric(labels, chosen.energy_j)
                slowdown.add_metric(labels, job.slowdowns[dp_rank])
        yield from (registered, world, heard, iteration, plans)
        yield from (plan, promised, energy, time_s, slowdown, replans)

"""Every metric, from the families that the exporters make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zeus import metric as of_windows
from zeus.optimizer.batch_size.server.metrics import BatchSizeJobs
from zeus.optimizer.pipeline_frequency.server.views import PipelineJobs
from zeus_ipc.replies import Metrics, NodeInfo
from zeusctl.exporter.collector import ZeusdCollector

from .markdown import code, heading, prose, table

_LEAD = """# Metrics

Names, types, units and labels of everything that can be scraped or is pushed. A histogram's series
end with `_bucket`, `_sum` and `_count`. What they are good for, and alerts on them:
[monitoring](../operate/monitoring.md).
"""

_ZEUSD = """One node, asked at each scrape; see [zeusd-exporter](commands/zeusd-exporter.md).
`gpu` is the index as `nvidia-smi` counts, `uuid` the GPU's UUID.
"""

_BATCH_SIZE = """At `/metrics` of `bso serve`; see [its page](../train/batch_size_server.md).
"""

_PIPELINE = """At `/metrics` of the server; see [its page](../train/pipeline_frequency_server.md).
"""

_WINDOWS = """Pushed by training jobs to a push gateway; see [zeus.metric](api/metric.md). What
names the group at the gateway is on each series, too: `job`, `instance`, `rank` and `metric`.
"""

_UNITS = ("seconds", "joules", "watts", "hertz", "celsius", "ratio", "bytes")


def page() -> str:
    """The page."""
    return "".join(
        [
            _LEAD,
            *_section("zeusd-exporter", _ZEUSD, of_collector(_collector())),
            *_section("Batch size server", _BATCH_SIZE, of_collector(BatchSizeJobs([]))),
            *_section("Pipeline frequency server", _PIPELINE, of_collector(PipelineJobs({}))),
            *_section("zeus.metric", _WINDOWS, windows()),
        ]
    )


def _collector() -> ZeusdCollector:
    return ZeusdCollector(_Nothing(), workloads=True, otel=True)


class _Nothing:
    """A client of a node without GPUs on which nothing has happened yet."""

    def node(self) -> NodeInfo:
        return NodeInfo(
            protocol=1,
            protocols=[1],
            daemon_version="",
            driver_version=None,
            lease_ttl_ms=0,
            simulated=None,
            gpus=[],
        )

    def metrics(self) -> Metrics:
        empty: Any = {
            name: []
            for name in (
                *("changes", "restores", "restore_failures", "outside_changes", "refusals"),
                *("pending", "calls", "sources"),
            )
        }
        return Metrics(t_ns=0, started_ns=0, lease_expiries=0, connections=0, **empty)

    def leases(self) -> list[Any]:
        return []

    def state(self, gpus: list[str]) -> dict[str, Any]:
        return {}


def of_collector(collector: Collector) -> list[Metric]:
    """The metric families of a collector, including those without a sample."""
    return list(collector.collect())


def windows() -> list[Metric]:
    """What training jobs push, by the constants that they make it with."""
    from prometheus_client import Counter, Gauge, Histogram

    registries = [CollectorRegistry() for _ in range(3)]
    for kind in of_windows.KINDS:
        arguments = of_windows.energy_name(kind), of_windows.ENERGY_HELP, of_windows.LABELS
        Histogram(*arguments, registry=registries[0])
        Counter(*arguments, registry=registries[1])
    Gauge(of_windows.POWER_NAME, of_windows.POWER_HELP, of_windows.LABELS, registry=registries[2])
    found = []
    for registry in registries:
        for family in registry.collect():
            family._labelnames = of_windows.LABELS
            found.append(family)
    return found


def _section(title: str, lead: str, families: Iterable[Metric]) -> Iterator[str]:
    yield heading(2, title)
    yield lead + "\n"
    rows = [
        (
            code(family.name + ("_total" if family.type == "counter" else "")),
            family.type,
            _unit(family.name),
            ", ".join(code(label) for label in labels_of(family)),
            prose(family.documentation),
        )
        for family in families
    ]
    yield table(("name", "type", "unit", "labels", "meaning"), rows)


def labels_of(family: Metric) -> tuple[str, ...]:
    """The labels of a family, whether or not it has samples."""
    return tuple(getattr(family, "_labelnames", ()))


def _unit(name: str) -> str:
    return next((unit for unit in _UNITS if name.endswith(f"_{unit}")), "")

"""The metrics, declared once: `NAME{LABEL,...} HELP`, see `zeusctl.columns.ExporterMetric`. What
`zeusctl status` shows of a GPU is declared in `zeusctl.entities`. A name in `_total` is a counter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from zeusctl.columns import ExporterMetric as Declared

DAEMON = """
zeusd_build_info{version,driver,protocol} Versions.
zeusd_start_time_seconds When zeusd started.
zeusd_gpus GPUs that zeusd knows.
zeusd_connections Clients that are connected.
zeusd_quiesced Whether zeusd is quiesced (the driver is closed).
zeusd_problem_seconds{part,source,code,cause,command} For how long a part of zeusd has not worked:
 why, and what to run.
zeusd_configuration_findings Rules of zeusd.toml that have no effect on this node.
zeusd_changes_total{control,result} Sets performed.
zeusd_restores_total{reason,result} Leases that ended.
zeusd_restore_failures_total{control} Restore attempts that failed.
zeusd_outside_changes_total{control,result} Values that someone set outside zeusd.
zeusd_refusals_total{code} Requests that were refused.
zeusd_lease_expiries_total Leases that expired because the holder's heartbeat stopped.
zeusd_nvml_errors_total{operation,code} Driver calls that failed.
zeusd_user_rate_limited_seconds_total{user} How long a user's requests have waited because of the
 rate limit.
zeusd_user_connections_refused_total{user} Connections of a user that were closed as they came: too
 many, or too many a second.
zeusd_user_protocol_errors_total{user} Connections of a user that were closed because they broke
 ZeroMQ's protocol.
"""

LEASES = """
zeusd_lease_held{gpu,uuid,control} Whether a control is leased.
zeusd_lease_heartbeat_age_seconds{gpu,uuid,control} Time since the holder's last heartbeat.
zeusd_restore_pending{gpu,uuid,control} Whether a restore is pending.
zeusd_restore_pending_seconds{gpu,uuid,control} Time since a pending restore first failed.
zeusd_persisted{gpu,uuid,control} Controls that an administrator persisted.
"""

SOURCES = """
zeusd_gpu_energy_joules_total{gpu,uuid} Energy that a GPU drew, as zeusd samples it.
zeusd_gpu_limited_seconds_total{gpu,uuid,reason} Time in which a GPU's clocks were limited, by the
 driver's counters.
zeusd_cpu_energy_joules_total{package,part} Energy that a CPU package or its memory drew.
zeusd_module_energy_joules_total{module} Energy that a superchip drew: its CPU, memory and GPUs,
 which are part of it.
zeusd_module_power_watts{module} Power of a superchip.
zeusd_sample_lag_seconds{source} Age of a device's latest sample.
zeusd_sample_period_seconds{source} Update period of a device's sensors.
"""

OTEL = """
hw_energy_joules_total{hw_id,hw_type} Energy consumed by the component.
"""
"""Names of OpenTelemetry's conventions for hardware (`hw.energy`), as they look in Prometheus.
Status of the conventions: development."""

GPUS = """
zeusd_gpu_info{gpu,uuid,name,pci_address} What a GPU is.
zeusd_gpu_readable{gpu,uuid} Whether a GPU answers.
zeusd_gpu_throttled{gpu,uuid,reason} Whether clocks are throttled, by reason.
zeusd_gpu_power_profile{gpu,uuid,profile,kind} Workload power profiles: requested by anybody,
 enforced by the GPU.
"""

_ESTIMATES = """
zeusd_OF_estimated_energy_joules_total{LABELS,method,bounds} The part of the energy that is an
 estimate, by method.
zeusd_OF_energy_lower_joules_total{LABELS,method,bounds} Used at least, of the part that is an
 estimate. bounds: what this follows from.
zeusd_OF_energy_upper_joules_total{LABELS,method,bounds} Used at most, of the part that is an
 estimate.
"""


def _estimates(of: str, labels: str) -> str:
    return _ESTIMATES.replace("OF", of).replace("LABELS", labels)


LEDGER = f"""
zeusd_account_energy_joules_total{{kind,account}} Energy charged to a user, a namespace, a service
 or a container.
zeusd_account_idle_energy_joules_total{{kind,account}} The part of it that was drawn while the
 driver reported the GPU as idle.
{_estimates("account", "kind,account").strip()}
zeusd_cpu_account_energy_joules_total{{kind,account}} Energy of CPU packages by user, namespace or
 service, in proportion to CPU time; `idle` and `unattributed` are nobody's. Never part of the
 energy of GPUs.
{_estimates("cpu_account", "kind,account").strip()}
zeusd_cpu_accounted_energy_joules_total{{cpu}} Energy of a CPU package in the ledger: the sum over
 all accounts.
zeusd_idle_energy_joules_total{{gpu,uuid,held}} Energy that a GPU drew unused. held=no: nobody held
 it. held=yes: part of the energy of a holder, drawn while the driver reported the GPU as idle.
zeusd_unattributed_energy_joules_total{{gpu,uuid,reason}} Energy of a GPU that could not be
 attributed.
zeusd_accounted_energy_joules_total{{gpu,uuid}} Energy of a GPU in the ledger: the sum over all
 accounts.
zeusd_accounting_dropped_total Requests to the ledger that were refused because its queue was full.
zeusd_ledger_damaged_files Damaged ledgers that were moved aside.
"""

# Not the labels `job`, `namespace` and `pod`: Prometheus gives those to the exporter itself.
WORKLOADS = f"""
zeusd_job_energy_joules_total{{slurm_job,user}} Energy charged to a job that runs, or ended in the
 last 5 minutes.
{_estimates("job", "slurm_job,user").strip()}
zeusd_pod_energy_joules_total{{k8s_namespace_name,k8s_pod_name}} The same of a pod.
{_estimates("pod", "k8s_namespace_name,k8s_pod_name").strip()}
"""


class Samples:
    """The samples of some metrics; iterates over their families, also those without a sample."""

    def __init__(self, declared: str) -> None:
        self._families: dict[str, Any] = {}
        for line in re.split(r"\n(?! )", declared.strip()):
            one = Declared.parse(line.replace("\n", ""))
            self.declare(one.name, one.help, one.labels)

    def declare(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        """Adds a metric, unless it is there."""
        form = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        self._families.setdefault(name, form(name, text, labels=labels))

    def add(self, name: str, number: float, *labels: object) -> None:
        """Adds a sample, with the values of its labels."""
        values = ["" if label is None else str(label) for label in labels]
        self._families[name].add_metric(values, number)

    def __iter__(self) -> Iterator[Metric]:
        yield from self._families.values()

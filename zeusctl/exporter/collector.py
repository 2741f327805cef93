"""zeusd's replies as metrics. Names and units follow Prometheus's conventions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from zeus_common.checks import read_states
from zeus_common.outage import Outage
from zeus_common.text import user_name
from zeus_ipc.client import Client
from zeus_ipc.controls import SPECS, Control, profile_name
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import CALL_BUCKETS_S, GpuInfo, GpuState, LeaseInfo, Metrics, NodeInfo
from zeusctl.columns import ExporterMetric as Declared
from zeusctl.columns import columns_of
from zeusctl.entities import Gpu, problems_of
from zeusctl.exporter import accounting
from zeusctl.exporter.metrics import DAEMON, GPUS, LEASES, OTEL, SOURCES, Samples
from zeusctl.text import named_reasons
from zeusctl.views import reports_of

log = logging.getLogger(__name__)

CONTROLS = tuple(control.value for control in SPECS)


class ZeusdCollector(Collector):
    """Queries zeusd at each scrape; `zeusd_up` is 0 if it does not answer.

    Args:
        workloads: Also the energy of each job and pod that runs.
        otel: Also energy by OpenTelemetry's names.
    """

    def __init__(self, client: Client, workloads: bool = False, otel: bool = False) -> None:
        self._client = client
        self._workloads = workloads
        self._otel = otel
        self._guard = threading.Lock()
        self._outage = Outage(log)
        self._families: list[Metric] = []
        self._answered_s = 0.0

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: zeusd may not run yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics. Those that cannot be read are omitted, and `zeusd_up` is 0.

        Scrapes that come while one waits for zeusd share its answer.
        """
        begin_s = time.perf_counter()
        with self._guard:
            if self._answered_s < begin_s:
                self._ask()
            families = self._families
            up = not self._outage.lasts
        took_s = time.perf_counter() - begin_s
        yield GaugeMetricFamily("zeusd_up", "Whether zeusd answered this scrape.", up)
        yield GaugeMetricFamily(
            "zeusd_scrape_seconds", "Duration of the requests to zeusd.", took_s
        )
        yield from families

    def _ask(self) -> None:
        try:
            self._families = [*self._read()]
            self._outage.succeeded()
        except ZeusIpcError as error:
            self._outage.failed(f"cannot reach zeusd: {error.message}")
            self._families = []
        self._answered_s = time.perf_counter()

    def _read(self) -> Iterator[Metric]:
        client = self._client
        node, metrics, leases = client.node(), client.metrics(), client.leases()
        yield from _daemon(node, metrics)
        if metrics.ledger is not None:
            yield from accounting.families(node, metrics.ledger, self._workloads)
        yield from _leases(node, leases)
        yield from _sources(node, metrics)
        if self._otel:
            yield from _hardware(node, metrics)
        yield _calls(metrics)
        states = {} if node.quiesced_ns is not None else read_states(client, node.gpus)[0]
        yield from _gpus(node.gpus, states)


def _daemon(node: NodeInfo, metrics: Metrics) -> Samples:
    samples = Samples(DAEMON)
    versions = node.daemon_version, node.driver_version, node.protocol
    samples.add("zeusd_build_info", 1, *versions)
    # Rounded, so that the start time does not vary with the scrape's delay.
    started_s = round(time.time() - (metrics.t_ns - metrics.started_ns) / 1e9, 1)
    samples.add("zeusd_start_time_seconds", started_s)
    samples.add("zeusd_gpus", len(node.gpus))
    samples.add("zeusd_connections", metrics.connections)
    samples.add("zeusd_quiesced", node.quiesced_ns is not None)
    names = {gpu.uuid: f"gpu:{gpu.index}" for gpu in node.gpus}
    for one in problems_of(node):
        why = one.part, names.get(one.source, one.source), one.code, one.cause, one.command
        samples.add("zeusd_problem_seconds", one.since_s, *why)
    samples.add("zeusd_configuration_findings", len(node.findings))
    _counts(samples, metrics)
    samples.add("zeusd_lease_expiries_total", metrics.lease_expiries)
    for calls in metrics.calls:
        for code, count in calls.errors.items():
            samples.add("zeusd_nvml_errors_total", count, calls.operation, code)
    for load in metrics.users:
        user = user_name(load.uid)
        samples.add("zeusd_user_rate_limited_seconds_total", load.limited_ns / 1e9, user)
        samples.add("zeusd_user_connections_refused_total", load.refused, user)
        samples.add("zeusd_user_protocol_errors_total", load.faults, user)
    return samples


def _age_s(since_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - since_ns) / 1e9)


def _counts(samples: Samples, metrics: Metrics) -> None:
    # A counter that begins at 1 shows no increase: what alerts watch is there from the start.
    outside = product(
        (spec.name for spec in SPECS.values() if spec.readable),
        ("adopted", "kept", "overridden", "noticed"),
    )
    for name, counts, labels, known in (
        ("changes", metrics.changes, ("control", "result"), ()),
        ("restores", metrics.restores, ("reason", "result"), ()),
        ("restore_failures", metrics.restore_failures, ("control",), product(CONTROLS)),
        ("outside_changes", metrics.outside_changes, ("control", "result"), outside),
        ("refusals", metrics.refusals, ("code",), ()),
    ):
        totals: dict[tuple[str, ...], int] = dict.fromkeys(known, 0)
        for count in counts:
            key = tuple(count.labels.get(label, "") for label in labels)
            totals[key] = totals.get(key, 0) + count.count
        for key, total in totals.items():
            samples.add(f"zeusd_{name}_total", total, *key)


def _leases(node: NodeInfo, leases: Iterable[LeaseInfo]) -> Samples:
    """Every control of every GPU, and those of missing GPUs that are to be restored."""
    samples, now_ns = Samples(LEASES), time.monotonic_ns()
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    leased = {(lease.gpu, lease.control.value): lease for lease in leases}
    known = [(uuid, control) for uuid in gpus for control in CONTROLS]
    for uuid, control in dict.fromkeys([*known, *leased]):
        gpu, lease = gpus.get(uuid), leased.get((uuid, control))
        labels = None if gpu is None else gpu.index, uuid, control
        pending, held = (lease, None) if lease is not None and lease.restoring else (None, lease)
        failed = pending is not None and pending.trouble is not None
        samples.add("zeusd_restore_pending", failed, *labels)
        if pending is not None and pending.pending_ns is not None:
            pending_s = _age_s(pending.pending_ns, now_ns)
            samples.add("zeusd_restore_pending_seconds", pending_s, *labels)
        if gpu is None:
            continue
        samples.add("zeusd_lease_held", held is not None, *labels)
        if held is not None:
            age_s = _age_s(held.expires_ns - held.ttl_ms * 1_000_000, now_ns)
            samples.add("zeusd_lease_heartbeat_age_seconds", age_s, *labels)
        if control in gpu.persisted:
            samples.add("zeusd_persisted", 1, *labels)
    return samples


def _sources(node: NodeInfo, metrics: Metrics) -> Samples:
    samples = Samples(SOURCES)
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    for source in metrics.sources:
        name, joules = source.source, source.energy_uj / 1e6
        part, _, number = name.partition(":")
        if name in gpus:
            index = gpus[name].index
            samples.add("zeusd_gpu_energy_joules_total", joules, index, name)
            for reason, ns in source.limited_ns.items():
                samples.add("zeusd_gpu_limited_seconds_total", ns / 1e9, index, name, reason)
            name = f"gpu:{index}"
        elif part == "module":
            samples.add("zeusd_module_energy_joules_total", joules, number)
            samples.add("zeusd_module_power_watts", source.power_mw / 1000, number)
        else:
            part = "memory" if part == "dram" else "package"
            samples.add("zeusd_cpu_energy_joules_total", joules, number, part)
        samples.add("zeusd_sample_lag_seconds", _age_s(source.t_ns, metrics.t_ns), name)
        samples.add("zeusd_sample_period_seconds", source.tick_ns / 1e9, name)
    return samples


def _hardware(node: NodeInfo, metrics: Metrics) -> Samples:
    samples, gpus = Samples(OTEL), {gpu.uuid for gpu in node.gpus}
    for source in metrics.sources:
        kind = "gpu" if source.source in gpus else source.source.partition(":")[0]
        if kind in ("gpu", "cpu"):
            samples.add("hw_energy_joules_total", source.energy_uj / 1e6, source.source, kind)
    return samples


def _calls(metrics: Metrics) -> Metric:
    calls = HistogramMetricFamily(
        "zeusd_nvml_call_seconds", "Duration of driver calls.", labels=("operation",)
    )
    bounds = [*(str(bound_s) for bound_s in CALL_BUCKETS_S), "+Inf"]
    for call in metrics.calls:
        calls.add_metric(
            [call.operation], list(zip(bounds, call.buckets, strict=True)), call.seconds
        )
    return calls


def _gpus(gpus: Sequence[GpuInfo], states: Mapping[str, GpuState]) -> Samples:
    samples = Samples(GPUS)
    shown = reports_of(gpus, states, {})
    for column in columns_of(Gpu):
        if column.metric:
            name, text, labels, _ = Declared.parse(column.metric)
            samples.declare(name, text, ("gpu", "uuid", *labels))
            for one in shown:
                for values, number in column.samples(one):
                    samples.add(name, number, one.index, one.uuid, *values)
    for gpu in gpus:
        labels = str(gpu.index), gpu.uuid
        state = states.get(gpu.uuid)
        samples.add("zeusd_gpu_info", 1, *labels, gpu.name, gpu.pci_address)
        samples.add("zeusd_gpu_readable", state is not None, *labels)
        if state is None:
            continue
        bits = state.throttle_reasons
        for bit, reason in sorted(named_reasons(bits).items()) if bits is not None else ():
            samples.add("zeusd_gpu_throttled", bool((bits or 0) & bit), *labels, reason)
        for kind, chosen in (
            ("requested", state.controls.get(Control.POWER_PROFILE.value)),
            ("enforced", state.enforced_power_profiles),
        ):
            for profile in chosen or ():
                samples.add("zeusd_gpu_power_profile", 1, *labels, profile_name(profile), kind)
    return samples

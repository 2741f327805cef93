"""zeusd's replies as metrics. Names and units follow Prometheus's conventions. What is known about
a GPU is declared in `zeusctl.entities`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from zeus_ipc.checks import read_states
from zeus_ipc.client import Client
from zeus_ipc.controls import SPECS, Control, profile_name
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import CALL_BUCKETS_S, Count, GpuInfo, GpuState, LeaseInfo, Metrics, NodeInfo
from zeusctl.columns import Metric as Declared
from zeusctl.columns import columns_of
from zeusctl.entities import Gpu
from zeusctl.exporter import accounting
from zeusctl.exporter.accounting import GPU, Sample, counter, gauge
from zeusctl.text import named_reasons, user_name
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
        self._failing = False
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
            up = gauge("zeusd_up", "Whether zeusd answered this scrape.", not self._failing)
        took_s = time.perf_counter() - begin_s
        took = gauge("zeusd_scrape_seconds", "Duration of the requests to zeusd.", took_s)
        yield from (up, took, *families)

    def _ask(self) -> None:
        try:
            self._families = [*self._read()]
            self._failing = False
        except ZeusIpcError as error:
            if not self._failing:
                log.warning("cannot reach zeusd: %s", error.message)
            self._families, self._failing = [], True
        self._answered_s = time.perf_counter()

    def _read(self) -> Iterator[Metric]:
        client = self._client
        node, metrics, leases = client.node(), client.metrics(), client.leases()
        yield from _daemon(node, metrics)
        yield from _counts(metrics)
        yield from _users(metrics)
        if metrics.ledger is not None:
            yield from accounting.families(node, metrics.ledger, self._workloads)
        if self._otel:
            yield accounting.hardware(node, metrics)
        yield from _leases(node, leases)
        yield from _sources(node, metrics)
        yield from _calls(metrics)
        states = {} if node.quiesced_ns is not None else read_states(client, node.gpus)[0]
        yield from _gpus(node.gpus, states)


def _daemon(node: NodeInfo, metrics: Metrics) -> Iterator[Metric]:
    versions = (node.daemon_version, node.driver_version or "", str(node.protocol))
    labels = ("version", "driver", "protocol")
    yield gauge("zeusd_build_info", "Versions.", [(versions, 1)], labels)
    # Rounded, so that the start time does not vary with the scrape's delay.
    started_s = round(time.time() - (metrics.t_ns - metrics.started_ns) / 1e9, 1)
    yield gauge("zeusd_start_time_seconds", "When zeusd started.", started_s)
    yield gauge("zeusd_gpus", "GPUs that zeusd knows.", len(node.gpus))
    yield gauge("zeusd_connections", "Clients that are connected.", metrics.connections)
    quiesced = node.quiesced_ns is not None
    yield gauge("zeusd_quiesced", "Whether zeusd is quiesced (the driver is closed).", quiesced)
    yield gauge(
        "zeusd_problem_seconds",
        "For how long a part of zeusd has not worked: why, and what to run.",
        [
            ((one.part, one.code, one.cause, one.command), _age_s(one.since_ns, metrics.t_ns))
            for one in node.problems
        ],
        ("part", "code", "cause", "command"),
    )
    yield gauge(
        "zeusd_configuration_findings",
        "Rules of zeusd.toml that have no effect on this node.",
        len(node.findings),
    )


def _age_s(since_ns: int, now_ns: int) -> float:
    return max(0.0, (now_ns - since_ns) / 1e9)


def _counts(metrics: Metrics) -> Iterator[Metric]:
    # A counter that begins at 1 shows no increase: what alerts watch is there from the start.
    outside = [
        Count(labels={"control": control, "result": result}, count=0)
        for control in (spec.name for spec in SPECS.values() if spec.readable)
        for result in ("adopted", "kept", "overridden", "noticed")
    ]
    failures = [Count(labels={"control": control}, count=0) for control in CONTROLS]
    for name, text, counts, labels in (
        ("zeusd_changes", "Sets performed.", metrics.changes, ("control", "result")),
        ("zeusd_restores", "Leases that ended.", metrics.restores, ("reason", "result")),
        (
            "zeusd_restore_failures",
            "Restore attempts that failed.",
            [*failures, *metrics.restore_failures],
            ("control",),
        ),
        (
            "zeusd_outside_changes",
            "Values that someone set outside zeusd.",
            [*outside, *metrics.outside_changes],
            ("control", "result"),
        ),
        ("zeusd_refusals", "Requests that were refused.", metrics.refusals, ("code",)),
    ):
        totals: dict[tuple[str, ...], int] = {}
        for one in counts:
            key = tuple(one.labels.get(label, "") for label in labels)
            totals[key] = totals.get(key, 0) + one.count
        yield counter(name, text, totals.items(), labels)
    yield counter(
        "zeusd_lease_expiries",
        "Leases that expired because the holder's heartbeat stopped.",
        metrics.lease_expiries,
    )


def _users(metrics: Metrics) -> Iterator[Metric]:
    users = [((user_name(load.uid),), load) for load in metrics.users]
    yield counter(
        "zeusd_user_rate_limited_seconds",
        "How long a user's requests have waited because of the rate limit.",
        [(user, load.limited_ns / 1e9) for user, load in users],
        ("user",),
    )
    yield counter(
        "zeusd_user_connections_refused",
        "Connections of a user that were closed as they came: too many, or too many a second.",
        [(user, load.refused) for user, load in users],
        ("user",),
    )
    yield counter(
        "zeusd_user_protocol_errors",
        "Connections of a user that were closed because they broke ZeroMQ's protocol.",
        [(user, load.faults) for user, load in users],
        ("user",),
    )


def _leases(node: NodeInfo, leases: Iterable[LeaseInfo]) -> Iterator[Metric]:
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    held = {(gpu.uuid, control): 0.0 for gpu in node.gpus for control in CONTROLS}
    pending = dict(held)
    since_s: dict[tuple[str, str], float] = {}
    age_s: dict[tuple[str, str], float] = {}
    now_ns = time.monotonic_ns()
    for lease in leases:
        key = lease.gpu, lease.control.value
        if lease.restoring:
            pending[key] = float(lease.trouble is not None)
            if lease.pending_ns is not None:
                since_s[key] = _age_s(lease.pending_ns, now_ns)
        elif lease.gpu in gpus:
            held[key] = 1.0
            age_s[key] = _age_s(lease.expires_ns - lease.ttl_ms * 1_000_000, now_ns)
    persisted = {(gpu.uuid, control): 1.0 for gpu in node.gpus for control in gpu.persisted}
    for name, text, values in (
        ("zeusd_lease_held", "Whether a control is leased.", held),
        ("zeusd_restore_pending", "Whether a restore is pending.", pending),
        ("zeusd_restore_pending_seconds", "Time since a pending restore first failed.", since_s),
        ("zeusd_lease_heartbeat_age_seconds", "Time since the holder's last heartbeat.", age_s),
        ("zeusd_persisted", "Controls that an administrator persisted.", persisted),
    ):
        samples = [
            ((*(_labels(gpus[uuid]) if uuid in gpus else ("", uuid)), control), value)
            for (uuid, control), value in values.items()
        ]
        yield gauge(name, text, samples, (*GPU, "control"))


def _sources(node: NodeInfo, metrics: Metrics) -> Iterator[Metric]:
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    energy, package, module, power, lag, tick = ([] for _ in range(6))
    for source in metrics.sources:
        joules = source.energy_uj / 1e6
        gpu = gpus.get(source.source)
        part, _, number = source.source.partition(":")
        if gpu is not None:
            energy.append((_labels(gpu), joules))
        elif part == "module":
            module.append(((number,), joules))
            power.append(((number,), source.power_mw / 1000))
        else:
            package.append(((number, "memory" if part == "dram" else "package"), joules))
        name = (source.source if gpu is None else f"gpu:{gpu.index}",)
        lag.append((name, _age_s(source.t_ns, metrics.t_ns)))
        tick.append((name, source.tick_ns / 1e9))
    yield counter(
        "zeusd_gpu_energy_joules", "Energy that a GPU drew, as zeusd samples it.", energy, GPU
    )
    yield counter(
        "zeusd_cpu_energy_joules",
        "Energy that a CPU package or its memory drew.",
        package,
        ("package", "part"),
    )
    yield counter(
        "zeusd_module_energy_joules",
        "Energy that a superchip drew: its CPU, memory and GPUs, which are part of it.",
        module,
        ("module",),
    )
    yield gauge("zeusd_module_power_watts", "Power of a superchip.", power, ("module",))
    text = "Age of a device's latest sample."
    yield gauge("zeusd_sample_lag_seconds", text, lag, ("source",))
    text = "Update period of a device's sensors."
    yield gauge("zeusd_sample_period_seconds", text, tick, ("source",))


def _calls(metrics: Metrics) -> Iterator[Metric]:
    calls = HistogramMetricFamily(
        "zeusd_nvml_call_seconds", "Duration of driver calls.", labels=("operation",)
    )
    bounds = [*(str(bound_s) for bound_s in CALL_BUCKETS_S), "+Inf"]
    for one in metrics.calls:
        calls.add_metric([one.operation], list(zip(bounds, one.buckets, strict=True)), one.seconds)
    yield calls
    errors = [
        ((one.operation, code), count)
        for one in metrics.calls
        for code, count in one.errors.items()
    ]
    text = "Driver calls that failed."
    yield counter("zeusd_nvml_errors", text, errors, ("operation", "code"))


def _gpus(gpus: Sequence[GpuInfo], states: Mapping[str, GpuState]) -> Iterator[Metric]:
    info = [((*_labels(gpu), gpu.name, gpu.pci_address), 1) for gpu in gpus]
    yield gauge("zeusd_gpu_info", "What a GPU is.", info, (*GPU, "name", "pci_address"))
    readable = [(_labels(gpu), gpu.uuid in states) for gpu in gpus]
    yield gauge("zeusd_gpu_readable", "Whether a GPU answers.", readable, GPU)
    shown = reports_of(gpus, states, {})
    found: dict[str, Any] = {}
    for column in columns_of(Gpu):
        if column.metric:
            name, text, labels, _ = Declared.parse(column.metric)
            family = found.setdefault(name, gauge(name, text, (), (*GPU, *labels)))
            for one in shown:
                for values, number in column.samples(one):
                    family.add_metric([str(one.index), one.uuid, *values], number)
    yield from found.values()
    throttled: list[Sample] = []
    profiles: list[Sample] = []
    for gpu in gpus:
        state = states.get(gpu.uuid)
        if state is None:
            continue
        bits = state.throttle_reasons
        for bit, reason in sorted(named_reasons(bits).items()) if bits is not None else ():
            throttled.append(((*_labels(gpu), reason), bool((bits or 0) & bit)))
        for kind, chosen in (
            ("requested", state.controls.get(Control.POWER_PROFILE.value)),
            ("enforced", state.enforced_power_profiles),
        ):
            profiles += [((*_labels(gpu), profile_name(one), kind), 1) for one in chosen or ()]
    yield gauge(
        "zeusd_gpu_throttled",
        "Whether clocks are throttled, by reason.",
        throttled,
        (*GPU, "reason"),
    )
    yield gauge(
        "zeusd_gpu_power_profile",
        "Workload power profiles: requested by anybody, enforced by the GPU.",
        profiles,
        (*GPU, "profile", "kind"),
    )


def _labels(gpu: GpuInfo) -> tuple[str, str]:
    return str(gpu.index), gpu.uuid

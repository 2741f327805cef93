"""zeusd's replies as metrics. Names and units follow Prometheus's conventions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from zeus_ipc.client import Client
from zeus_ipc.controls import SPECS, Control, profile_name
from zeus_ipc.errors import ZeusIpcError
from zeus_ipc.replies import (
    CALL_BUCKETS_S,
    Count,
    GpuInfo,
    LeaseInfo,
    Metrics,
    NodeInfo,
)
from zeusctl.exporter import accounting
from zeusctl.text import REASONS, user_name
from zeusctl.views import read_states

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuState

log = logging.getLogger(__name__)

CONTROLS = tuple(control.value for control in SPECS)
GPU = ("gpu", "uuid")
"""Labels of everything about one GPU: the index, as nvidia-smi counts, and the UUID."""


class ZeusdCollector(Collector):
    """Queries zeusd at each scrape; `zeusd_up` is 0 if it does not answer."""

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
            up = _gauge("zeusd_up", "Whether zeusd answered this scrape.", not self._failing)
        took_s = time.perf_counter() - begin_s
        took = _gauge("zeusd_scrape_seconds", "Duration of the requests to zeusd.", took_s)
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
            yield from accounting.hardware(node, metrics)
        yield from _leases(node, leases)
        yield from _sources(node, metrics)
        yield from _calls(metrics)
        states = {} if node.quiesced_ns is not None else read_states(client, node.gpus)[0]
        yield from _gpus(node.gpus, states)


def _daemon(node: NodeInfo, metrics: Metrics) -> Iterator[Metric]:
    build = GaugeMetricFamily(
        "zeusd_build_info", "Versions.", labels=("version", "driver", "protocol")
    )
    build.add_metric([node.daemon_version, node.driver_version or "", str(node.protocol)], 1)
    yield build
    uptime_s = (metrics.t_ns - metrics.started_ns) / 1e9
    # Rounded, so that the start time does not vary with the scrape's delay.
    yield _gauge(
        "zeusd_start_time_seconds", "When zeusd started.", round(time.time() - uptime_s, 1)
    )
    yield _gauge("zeusd_gpus", "GPUs that zeusd knows.", len(node.gpus))
    yield _gauge("zeusd_connections", "Clients that are connected.", metrics.connections)
    yield _gauge(
        "zeusd_quiesced",
        "Whether zeusd is quiesced (the driver is closed).",
        node.quiesced_ns is not None,
    )
    problems = GaugeMetricFamily(
        "zeusd_problem_seconds",
        "For how long a part of zeusd has not worked: why, and what to run.",
        labels=("part", "code", "cause", "command"),
    )
    for one in node.problems:
        age_s = (metrics.t_ns - one.since_ns) / 1e9
        problems.add_metric([one.part, one.code, one.cause, one.command], max(0.0, age_s))
    yield problems
    yield _gauge(
        "zeusd_configuration_findings",
        "Rules of zeusd.toml that have no effect on this node.",
        len(node.findings),
    )


def _counts(metrics: Metrics) -> Iterator[Metric]:
    # A counter that begins at 1 shows no increase: what alerts watch is there from the start.
    outside = [
        Count(labels={"control": control, "result": result}, count=0)
        for control in (spec.name for spec in SPECS.values() if spec.readable)
        for result in ("adopted", "kept", "overridden", "noticed")
    ]
    failures = [Count(labels={"control": control}, count=0) for control in CONTROLS]
    for name, help_text, counts, labels in (
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
        yield _counter(name, help_text, counts, labels)
    expiries = CounterMetricFamily(
        "zeusd_lease_expiries", "Leases that expired because the holder's heartbeat stopped."
    )
    expiries.add_metric([], metrics.lease_expiries)
    yield expiries


def _users(metrics: Metrics) -> Iterator[Metric]:
    limited = CounterMetricFamily(
        "zeusd_user_rate_limited_seconds",
        "How long a user's requests have waited because of the rate limit.",
        labels=("user",),
    )
    refused = CounterMetricFamily(
        "zeusd_user_connections_refused",
        "Connections of a user that were closed as they came: too many, or too many a second.",
        labels=("user",),
    )
    faults = CounterMetricFamily(
        "zeusd_user_protocol_errors",
        "Connections of a user that were closed because they broke ZeroMQ's protocol.",
        labels=("user",),
    )
    for load in metrics.users:
        label = [user_name(load.uid)]
        limited.add_metric(label, load.limited_ns / 1e9)
        refused.add_metric(label, load.refused)
        faults.add_metric(label, load.faults)
    yield from (limited, refused, faults)


def _counter(
    name: str, help_text: str, counts: Iterable[Count], labels: tuple[str, ...]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=labels)
    totals: dict[tuple[str, ...], int] = {}
    for one in counts:
        key = tuple(one.labels.get(label, "") for label in labels)
        totals[key] = totals.get(key, 0) + one.count
    for values, total in totals.items():
        family.add_metric(values, total)
    return family


def _leases(node: NodeInfo, leases: Iterable[LeaseInfo]) -> Iterator[Metric]:
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    held = {(gpu.uuid, control): 0.0 for gpu in node.gpus for control in CONTROLS}
    pending = dict(held)
    since_s: dict[tuple[str, str], float] = {}
    age = GaugeMetricFamily(
        "zeusd_lease_heartbeat_age_seconds",
        "Time since the holder's last heartbeat.",
        labels=(*GPU, "control"),
    )
    now_ns = time.monotonic_ns()
    for lease in leases:
        control = lease.control.value
        if lease.restoring:
            pending[lease.gpu, control] = float(lease.trouble is not None)
            if lease.pending_ns is not None:
                since_s[lease.gpu, control] = max(0.0, (now_ns - lease.pending_ns) / 1e9)
            continue
        if lease.gpu not in gpus:
            continue
        held[lease.gpu, control] = 1.0
        last_ns = lease.expires_ns - lease.ttl_ms * 1_000_000
        age.add_metric([*_labels(gpus[lease.gpu]), control], max(0.0, (now_ns - last_ns) / 1e9))
    yield _by_control("zeusd_lease_held", "Whether a control is leased.", gpus, held)
    yield _by_control("zeusd_restore_pending", "Whether a restore is pending.", gpus, pending)
    text = "Time since a pending restore first failed."
    yield _by_control("zeusd_restore_pending_seconds", text, gpus, since_s)
    yield age
    persisted = {(gpu.uuid, control): 1.0 for gpu in node.gpus for control in gpu.persisted}
    yield _by_control(
        "zeusd_persisted", "Controls that an administrator persisted.", gpus, persisted
    )


def _by_control(
    name: str,
    help_text: str,
    gpus: Mapping[str, GpuInfo],
    values: Mapping[tuple[str, str], float],
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=(*GPU, "control"))
    for (uuid, control), value in values.items():
        gpu = _labels(gpus[uuid]) if uuid in gpus else ["", uuid]
        family.add_metric([*gpu, control], value)
    return family


def _sources(node: NodeInfo, metrics: Metrics) -> Iterator[Metric]:
    gpus = {gpu.uuid: gpu for gpu in node.gpus}
    energy = CounterMetricFamily(
        "zeusd_gpu_energy_joules", "Energy that a GPU drew, as zeusd samples it.", labels=GPU
    )
    package = CounterMetricFamily(
        "zeusd_cpu_energy_joules",
        "Energy that a CPU package or its memory drew.",
        labels=("package", "part"),
    )
    module = CounterMetricFamily(
        "zeusd_module_energy_joules",
        "Energy that a superchip drew: its CPU, memory and GPUs, which are part of it.",
        labels=("module",),
    )
    module_power = GaugeMetricFamily(
        "zeusd_module_power_watts", "Power of a superchip.", labels=("module",)
    )
    lag = GaugeMetricFamily(
        "zeusd_sample_lag_seconds", "Age of a device's latest sample.", labels=("source",)
    )
    tick = GaugeMetricFamily(
        "zeusd_sample_period_seconds", "Update period of a device's sensors.", labels=("source",)
    )
    for source in metrics.sources:
        joules = source.energy_uj / 1e6
        gpu = gpus.get(source.source)
        name = source.source if gpu is None else f"gpu:{gpu.index}"
        if gpu is not None:
            energy.add_metric(_labels(gpu), joules)
        else:
            part, _, number = source.source.partition(":")
            if part == "module":
                module.add_metric([number], joules)
                module_power.add_metric([number], source.power_mw / 1000)
            else:
                package.add_metric([number, "memory" if part == "dram" else "package"], joules)
        lag.add_metric([name], max(0.0, (metrics.t_ns - source.t_ns) / 1e9))
        tick.add_metric([name], source.tick_ns / 1e9)
    yield from (energy, package, module, module_power, lag, tick)


def _calls(metrics: Metrics) -> Iterator[Metric]:
    calls = HistogramMetricFamily(
        "zeusd_nvml_call_seconds", "Duration of driver calls.", labels=("operation",)
    )
    errors = CounterMetricFamily(
        "zeusd_nvml_errors", "Driver calls that failed.", labels=("operation", "code")
    )
    for one in metrics.calls:
        bounds = [*(str(bound_s) for bound_s in CALL_BUCKETS_S), "+Inf"]
        calls.add_metric([one.operation], list(zip(bounds, one.buckets, strict=True)), one.seconds)
        for code, count in one.errors.items():
            errors.add_metric([one.operation, code], count)
    yield from (calls, errors)


def _gpus(gpus: Iterable[GpuInfo], states: Mapping[str, GpuState]) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "zeusd_gpu_info", "What a GPU is.", labels=(*GPU, "name", "pci_address")
    )
    power = GaugeMetricFamily("zeusd_gpu_power_watts", "Power at this moment.", labels=GPU)
    memory_power = GaugeMetricFamily(
        "zeusd_gpu_memory_power_watts",
        "Power of a GPU's memory, which is part of the GPU's.",
        labels=GPU,
    )
    scope = GaugeMetricFamily(
        "zeusd_gpu_energy_counter_scope",
        "What a superchip's energy counter counts: gpu, module or unknown.",
        labels=(*GPU, "scope"),
    )
    limits = GaugeMetricFamily(
        "zeusd_gpu_power_limit_watts",
        "Power limits: requested by software, enforced by the board, site limit.",
        labels=(*GPU, "kind"),
    )
    clocks = GaugeMetricFamily("zeusd_gpu_clock_hertz", "Clocks.", labels=(*GPU, "clock"))
    locked = GaugeMetricFamily(
        "zeusd_gpu_locked_clock_hertz",
        "Ends of the ranges that zeusd locked clocks to.",
        labels=(*GPU, "clock", "end"),
    )
    temperature = GaugeMetricFamily("zeusd_gpu_temperature_celsius", "Temperature.", labels=GPU)
    throttled = GaugeMetricFamily(
        "zeusd_gpu_throttled", "Whether clocks are throttled, by reason.", labels=(*GPU, "reason")
    )
    profiles = GaugeMetricFamily(
        "zeusd_gpu_power_profile",
        "Workload power profiles: requested by anybody, enforced by the GPU.",
        labels=(*GPU, "profile", "kind"),
    )
    readable = GaugeMetricFamily("zeusd_gpu_readable", "Whether a GPU answers.", labels=GPU)
    for gpu in gpus:
        labels, state = _labels(gpu), states.get(gpu.uuid)
        info.add_metric([*labels, gpu.name, gpu.pci_address], 1)
        readable.add_metric(labels, state is not None)
        _add(limits, [*labels, "site"], gpu.power_limit_site_mw, 1e-3)
        _add(limits, [*labels, "highest"], gpu.power_limit_highest_mw, 1e-3)
        if state is None:
            continue
        _add(power, labels, state.power_mw, 1e-3)
        _add(memory_power, labels, state.memory_power_mw, 1e-3)
        if gpu.module is not None:
            scope.add_metric([*labels, state.energy_scope], 1)
        _add(limits, [*labels, "requested"], state.power_limit_mw, 1e-3)
        _add(limits, [*labels, "enforced"], state.enforced_power_limit_mw, 1e-3)
        _add(clocks, [*labels, "gpu"], state.gpu_clock_mhz, 1e6)
        _add(clocks, [*labels, "memory"], state.memory_clock_mhz, 1e6)
        for clock, span in (
            ("gpu", state.locked_gpu_clocks_mhz),
            ("memory", state.locked_memory_clocks_mhz),
        ):
            for end, value in zip(("lowest", "highest"), span or (), strict=False):
                _add(locked, [*labels, clock, end], value, 1e6)
        for kind, found in (
            ("requested", state.controls.get(Control.POWER_PROFILE.value)),
            ("enforced", state.enforced_power_profiles),
        ):
            for profile in found or ():
                profiles.add_metric([*labels, profile_name(profile), kind], 1)
        _add(temperature, labels, state.temperature_c, 1)
        if state.throttle_reasons is not None:
            for bit, reason in REASONS.items():
                throttled.add_metric([*labels, reason], bool(state.throttle_reasons & bit))
    yield from (info, readable, power, memory_power, scope, limits)
    yield from (clocks, locked, temperature, throttled, profiles)


def _labels(gpu: GpuInfo) -> list[str]:
    return [str(gpu.index), gpu.uuid]


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None, factor: float) -> None:
    if value is not None:
        family.add_metric(labels, value * factor)


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=value)

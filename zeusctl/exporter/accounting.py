"""Energy accounting as metrics: counters by user that survive restarts, and unused energy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from zeus_ipc.charging import bounds_of
from zeus_ipc.replies import Estimate, LedgerState, LedgerTotal, Metrics, NodeInfo
from zeusctl.text import user_name

ACCOUNT = ("kind", "account")
MAX_ACCOUNTS = 200
"""Accounts with a series of their own; the others are summed as `other`."""

GPU = ("gpu", "uuid")
"""Labels of everything about one GPU: the index, as nvidia-smi counts, and the UUID."""
JOB = ("slurm_job", "user")
POD = ("k8s_namespace_name", "k8s_pod_name")
"""Not `job`, `namespace` and `pod`: Prometheus gives those to the exporter itself."""

Sample = tuple[tuple[str, ...], float]
"""Values of the labels, and the number."""
_Key = tuple[str, ...]
_Estimated = tuple[_Key, Estimate]
"""An estimate, with the label values of its account."""


def _family(
    kind: Any, name: str, text: str, samples: float | Iterable[Sample], labels: tuple[str, ...] = ()
) -> Any:
    family = kind(name, text, labels=labels)
    for values, number in [((), samples)] if isinstance(samples, (int, float)) else samples:
        family.add_metric(values, number)
    return family


gauge = partial(_family, GaugeMetricFamily)
"""A gauge: its name, its meaning, its value or samples, and its labels."""
counter = partial(_family, CounterMetricFamily)
"""The same for a counter."""


def families(node: NodeInfo, ledger: LedgerState, workloads: bool) -> Iterator[Metric]:
    """The metrics of a ledger."""
    yield from _accounts(ledger)
    yield from _cpus(ledger)
    yield from _unused(node, ledger)
    if workloads:
        yield from _workloads(ledger)
    yield counter(
        "zeusd_accounting_dropped",
        "Requests to the ledger that were refused because its queue was full.",
        ledger.dropped,
    )
    text = "Damaged ledgers that were moved aside."
    yield gauge("zeusd_ledger_damaged_files", text, len(ledger.damaged))


def _summed(
    totals: Iterable[LedgerTotal],
) -> tuple[dict[tuple[str, str], tuple[int, int]], list[_Estimated]]:
    """Active and idle energy by account, and what is an estimate. The first `MAX_ACCOUNTS` accounts
    get series of their own, and keep them.
    """
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    estimates: list[_Estimated] = []
    for total in totals:
        key = _key(total, sums)
        active_uj, idle_uj = sums.get(key, (0, 0))
        sums[key] = active_uj + total.active_uj, idle_uj + total.idle_uj
        estimates += [(key, one) for one in total.estimates]
    return sums, estimates


def _accounts(ledger: LedgerState) -> Iterator[Metric]:
    charged = (one for one in ledger.totals if one.kind not in ("idle", "unattributed"))
    sums, estimates = _summed(charged)
    yield counter(
        "zeusd_account_energy_joules",
        "Energy charged to a user, a namespace, a service or a container.",
        [(key, sum(amounts) / 1e6) for key, amounts in sums.items()],
        ACCOUNT,
    )
    yield counter(
        "zeusd_account_idle_energy_joules",
        "The part of it that was drawn while the driver reported the GPU as idle.",
        [(key, idle_uj / 1e6) for key, (_, idle_uj) in sums.items()],
        ACCOUNT,
    )
    yield from _estimates("zeusd_account", ACCOUNT, estimates)


def _estimates(
    prefix: str, labels: tuple[str, ...], estimates: Iterable[_Estimated]
) -> Iterator[Metric]:
    """What is an estimate, with bounds of one kind for each method."""
    sums: dict[_Key, list[int]] = {}
    for key, one in estimates:
        known = sums.setdefault((*key, one.method), [0, 0, 0])
        for place, amount_uj in enumerate((one.energy_uj, one.lower_uj, one.upper_uj)):
            known[place] += amount_uj
    for place, (name, text) in enumerate(
        (
            ("estimated_energy", "The part of the energy that is an estimate, by method."),
            (
                "energy_lower",
                "Used at least, of the part that is an estimate. bounds: what this follows from.",
            ),
            ("energy_upper", "Used at most, of the part that is an estimate."),
        )
    ):
        samples = [
            ((*key, bounds_of(key[-1:]).value), amounts[place] / 1e6)
            for key, amounts in sums.items()
        ]
        yield counter(f"{prefix}_{name}_joules", text, samples, (*labels, "method", "bounds"))


def _cpus(ledger: LedgerState) -> Iterator[Metric]:
    sums, estimates = _summed(ledger.cpu_totals)
    yield counter(
        "zeusd_cpu_account_energy_joules",
        "Energy of CPU packages by user, namespace or service, in proportion to CPU time; `idle` "
        "and `unattributed` are nobody's. Never part of the energy of GPUs.",
        [(key, sum(amounts) / 1e6) for key, amounts in sums.items()],
        ACCOUNT,
    )
    counted = ledger.cpu_counted_uj.items()
    yield counter(
        "zeusd_cpu_accounted_energy_joules",
        "Energy of a CPU package in the ledger: the sum over all accounts.",
        [((name.partition(":")[2],), amount_uj / 1e6) for name, amount_uj in counted],
        ("cpu",),
    )
    yield from _estimates("zeusd_cpu_account", ACCOUNT, estimates)


def _unused(node: NodeInfo, ledger: LedgerState) -> Iterator[Metric]:
    indices = {gpu.uuid: str(gpu.index) for gpu in node.gpus}
    idle: list[Sample] = []
    unattributed: list[Sample] = []
    for uuid, one in ledger.by_gpu.items():
        gpu = indices.get(uuid, ""), uuid
        idle += [((*gpu, "no"), one.idle_uj / 1e6), ((*gpu, "yes"), one.held_idle_uj / 1e6)]
        lost = one.unattributed_uj.items()
        unattributed += [((*gpu, reason), amount_uj / 1e6) for reason, amount_uj in lost]
    yield counter(
        "zeusd_idle_energy_joules",
        "Energy that a GPU drew unused. held=no: nobody held it. held=yes: part of the energy of a "
        "holder, drawn while the driver reported the GPU as idle.",
        idle,
        (*GPU, "held"),
    )
    yield counter(
        "zeusd_unattributed_energy_joules",
        "Energy of a GPU that could not be attributed.",
        unattributed,
        (*GPU, "reason"),
    )
    yield counter(
        "zeusd_accounted_energy_joules",
        "Energy of a GPU in the ledger: the sum over all accounts.",
        [
            ((indices.get(uuid, ""), uuid), ledger.counted_uj.get(uuid, 0) / 1e6)
            for uuid in {**dict.fromkeys(indices), **ledger.counted_uj}
        ],
        GPU,
    )


def _workloads(ledger: LedgerState) -> Iterator[Metric]:
    for kind, labels, text in (
        ("job", JOB, "Energy charged to a job that runs, or ended in the last 5 minutes."),
        ("pod", POD, "The same of a pod."),
    ):
        found = [
            (_names(one), one) for one in ledger.workloads if (one.kind == "pod") == (kind == "pod")
        ]
        samples = [(names, (one.active_uj + one.idle_uj) / 1e6) for names, one in found]
        yield counter(f"zeusd_{kind}_energy_joules", text, samples, labels)
        estimates = [(names, part) for names, one in found for part in one.estimates]
        yield from _estimates(f"zeusd_{kind}", labels, estimates)


def _names(one: LedgerTotal) -> tuple[str, str]:
    """The values of `POD` or `JOB`."""
    if one.kind == "pod":
        namespace, _, name = one.name.partition("/")
        return namespace, name
    return one.name, user_name(one.uid) if one.uid >= 0 else ""


def _key(total: LedgerTotal, known: Collection[tuple[str, str]]) -> tuple[str, str]:
    """Returns an account's kind and name; those of all others if too many are known already."""
    name = total.name if total.uid < 0 else user_name(total.uid)
    key = (total.kind, name)
    return ("other", "") if key not in known and len(known) >= MAX_ACCOUNTS else key


def hardware(node: NodeInfo, metrics: Metrics) -> Metric:
    """Energy of devices by the names of OpenTelemetry's conventions for hardware (`hw.energy`), as
    they look in Prometheus. Status of the conventions: development.
    """
    gpus = {gpu.uuid for gpu in node.gpus}
    kinds = [
        (one, "gpu" if one.source in gpus else one.source.partition(":")[0])
        for one in metrics.sources
    ]
    samples = [
        ((one.source, kind), one.energy_uj / 1e6) for one, kind in kinds if kind in ("gpu", "cpu")
    ]
    text = "Energy consumed by the component."
    found: Metric = counter("hw_energy_joules", text, samples, ("hw_id", "hw_type"))
    return found

"""Energy accounting as metrics: counters by user that survive restarts, and unused energy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from zeus_ipc.charging import bounds_of
from zeus_ipc.replies import Estimate, LedgerState, LedgerTotal, Metrics, NodeInfo
from zeusctl.text import user_name

ACCOUNT = ("kind", "account")
MAX_ACCOUNTS = 200
"""Accounts with a series of their own; the others are summed as `other`."""

GPU = ("gpu", "uuid")
JOB = ("slurm_job", "user")
POD = ("k8s_namespace_name", "k8s_pod_name")
"""Not `job`, `namespace` and `pod`: Prometheus gives those to the exporter itself."""
_AMOUNTS = ("active_uj", "idle_uj")

_Estimated = tuple[tuple[str, ...], Estimate]
"""An estimate, with the label values of its account."""


def families(node: NodeInfo, ledger: LedgerState, workloads: bool) -> Iterator[Metric]:
    """The metrics of a ledger."""
    yield from _accounts(ledger)
    yield from _cpus(ledger)
    yield from _unused(node, ledger)
    if workloads:
        yield from _workloads(ledger)
    dropped = CounterMetricFamily(
        "zeusd_accounting_dropped",
        "Requests to the ledger that were refused because its queue was full.",
    )
    dropped.add_metric([], ledger.dropped)
    yield dropped
    yield GaugeMetricFamily(
        "zeusd_ledger_damaged_files",
        "Damaged ledgers that were moved aside.",
        value=len(ledger.damaged),
    )


def _accounts(ledger: LedgerState) -> Iterator[Metric]:
    """The first `MAX_ACCOUNTS` accounts get series of their own, and keep them."""
    texts = {
        "energy": "Energy charged to a user, a namespace, a service or a container.",
        "idle_energy": "The part of it that was drawn while the driver reported the GPU as idle.",
    }
    found = {
        name: CounterMetricFamily(f"zeusd_account_{name}_joules", text, labels=ACCOUNT)
        for name, text in texts.items()
    }
    sums: dict[tuple[str, str], list[int]] = {}
    estimates: list[_Estimated] = []
    for total in ledger.totals:
        if total.kind in ("idle", "unattributed"):
            continue
        key = _key(total, sums)
        known = sums.setdefault(key, [0] * len(_AMOUNTS))
        for place, amount in enumerate(_AMOUNTS):
            known[place] += getattr(total, amount)
        estimates += [(key, one) for one in total.estimates]
    for key, (active_uj, idle_uj) in sums.items():
        for family, value in zip(found.values(), (active_uj + idle_uj, idle_uj), strict=True):
            family.add_metric(key, value / 1e6)
    yield from found.values()
    yield from _estimates("zeusd_account", ACCOUNT, estimates)


def _estimates(
    prefix: str, labels: tuple[str, ...], estimates: Iterable[_Estimated]
) -> Iterator[Metric]:
    """What is an estimate, with bounds of one kind for each method."""
    texts = {
        "estimated_energy": "The part of the energy that is an estimate, by method.",
        "energy_lower": "Used at least, of the part that is an estimate. bounds: what this follows "
        "from.",
        "energy_upper": "Used at most, of the part that is an estimate.",
    }
    names = (*labels, "method", "bounds")
    found = [
        CounterMetricFamily(f"{prefix}_{name}_joules", text, labels=names)
        for name, text in texts.items()
    ]
    sums: dict[tuple[str, ...], list[int]] = {}
    for key, one in estimates:
        known = sums.setdefault((*key, one.method), [0, 0, 0])
        for place, amount_uj in enumerate((one.energy_uj, one.lower_uj, one.upper_uj)):
            known[place] += amount_uj
    for key, amounts in sums.items():
        for family, amount_uj in zip(found, amounts, strict=True):
            family.add_metric([*key, bounds_of(key[-1:]).value], amount_uj / 1e6)
    yield from found


def _cpus(ledger: LedgerState) -> Iterator[Metric]:
    account = CounterMetricFamily(
        "zeusd_cpu_account_energy_joules",
        "Energy of CPU packages by user, namespace or service, in proportion to CPU time; `idle` "
        "and `unattributed` are nobody's. Never part of the energy of GPUs.",
        labels=ACCOUNT,
    )
    sums: dict[tuple[str, str], int] = {}
    estimates: list[_Estimated] = []
    for total in ledger.cpu_totals:
        key = _key(total, sums)
        sums[key] = sums.get(key, 0) + total.active_uj + total.idle_uj
        estimates += [(key, one) for one in total.estimates]
    for key, amount_uj in sums.items():
        account.add_metric(key, amount_uj / 1e6)
    counted = CounterMetricFamily(
        "zeusd_cpu_accounted_energy_joules",
        "Energy of a CPU package in the ledger: the sum over all accounts.",
        labels=("cpu",),
    )
    for name, amount_uj in ledger.cpu_counted_uj.items():
        counted.add_metric([name.partition(":")[2]], amount_uj / 1e6)
    yield from (account, counted)
    yield from _estimates("zeusd_cpu_account", ACCOUNT, estimates)


def _unused(node: NodeInfo, ledger: LedgerState) -> Iterator[Metric]:
    idle = CounterMetricFamily(
        "zeusd_idle_energy_joules",
        "Energy that a GPU drew unused. held=no: nobody held it. held=yes: part of the energy of a "
        "holder, drawn while the driver reported the GPU as idle.",
        labels=(*GPU, "held"),
    )
    unattributed = CounterMetricFamily(
        "zeusd_unattributed_energy_joules",
        "Energy of a GPU that could not be attributed.",
        labels=(*GPU, "reason"),
    )
    counted = CounterMetricFamily(
        "zeusd_accounted_energy_joules",
        "Energy of a GPU in the ledger: the sum over all accounts.",
        labels=GPU,
    )
    indices = {gpu.uuid: str(gpu.index) for gpu in node.gpus}
    for uuid, one in ledger.by_gpu.items():
        gpu = [indices.get(uuid, ""), uuid]
        idle.add_metric([*gpu, "no"], one.idle_uj / 1e6)
        idle.add_metric([*gpu, "yes"], one.held_idle_uj / 1e6)
        for reason, amount_uj in one.unattributed_uj.items():
            unattributed.add_metric([*gpu, reason], amount_uj / 1e6)
    for uuid in {**dict.fromkeys(indices), **ledger.counted_uj}:
        amount_uj = ledger.counted_uj.get(uuid, 0)
        counted.add_metric([indices.get(uuid, ""), uuid], amount_uj / 1e6)
    yield from (idle, unattributed, counted)


def _workloads(ledger: LedgerState) -> Iterator[Metric]:
    job = CounterMetricFamily(
        "zeusd_job_energy_joules",
        "Energy charged to a job that runs, or ended in the last 5 minutes.",
        labels=JOB,
    )
    pod = CounterMetricFamily("zeusd_pod_energy_joules", "The same of a pod.", labels=POD)
    of_jobs: list[_Estimated] = []
    of_pods: list[_Estimated] = []
    for one in ledger.workloads:
        joules = (one.active_uj + one.idle_uj) / 1e6
        if one.kind == "pod":
            namespace, _, name = one.name.partition("/")
            pod.add_metric([namespace, name], joules)
            of_pods += [((namespace, name), part) for part in one.estimates]
        else:
            user = user_name(one.uid) if one.uid >= 0 else ""
            job.add_metric([one.name, user], joules)
            of_jobs += [((one.name, user), part) for part in one.estimates]
    yield from (job, pod)
    yield from _estimates("zeusd_job", JOB, of_jobs)
    yield from _estimates("zeusd_pod", POD, of_pods)


def _key(total: LedgerTotal, known: Collection[tuple[str, str]]) -> tuple[str, str]:
    """Returns an account's kind and name; those of all others if too many are known already."""
    key = (total.kind, _name(total))
    if key not in known and len(known) >= MAX_ACCOUNTS:
        return "other", ""
    return key


def _name(total: LedgerTotal) -> str:
    return total.name if total.uid < 0 else user_name(total.uid) or str(total.uid)


def hardware(node: NodeInfo, metrics: Metrics) -> Iterator[Metric]:
    """Energy of devices by the names of OpenTelemetry's conventions for hardware (`hw.energy`), as
    they look in Prometheus. Status of the conventions: development.
    """
    energy = CounterMetricFamily(
        "hw_energy_joules", "Energy consumed by the component.", labels=("hw_id", "hw_type")
    )
    gpus = {gpu.uuid for gpu in node.gpus}
    for source in metrics.sources:
        kind = "gpu" if source.source in gpus else source.source.partition(":")[0]
        if kind in ("gpu", "cpu"):
            energy.add_metric([source.source, kind], source.energy_uj / 1e6)
    yield energy

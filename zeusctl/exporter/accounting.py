"""Energy accounting as metrics: counters by user that survive restarts, and unused energy."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from prometheus_client.core import Metric

from zeus_common.text import user_name
from zeus_ipc.charging import bounds_of
from zeus_ipc.replies import EstimatedEnergy, LedgerState, LedgerTotal, NodeInfo
from zeusctl.exporter.metrics import LEDGER, WORKLOADS, Samples

MAX_ACCOUNTS = 200
"""Accounts with a series of their own; the others are summed as `other`."""

_Key = tuple[str, str]
"""An account's kind and name, a job's id and user, or a pod's namespace and name."""


def families(node: NodeInfo, ledger: LedgerState, workloads: bool) -> Iterator[Metric]:
    """The metrics of a ledger."""
    samples = Samples(LEDGER)
    _accounts(samples, ledger)
    for key, amounts in _summed(samples, "cpu_account", ledger.cpu_totals).items():
        samples.add("zeusd_cpu_account_energy_joules_total", sum(amounts) / 1e6, *key)
    for name, uj in ledger.cpu_counted_uj.items():
        samples.add("zeusd_cpu_accounted_energy_joules_total", uj / 1e6, name.partition(":")[2])
    _unused(samples, node, ledger)
    samples.add("zeusd_accounting_dropped_total", ledger.dropped)
    samples.add("zeusd_ledger_damaged_files", len(ledger.damaged))
    yield from samples
    if workloads:
        yield from _workloads(ledger)


def _accounts(samples: Samples, ledger: LedgerState) -> None:
    charged = (total for total in ledger.totals if total.kind not in ("idle", "unattributed"))
    for key, (active_uj, idle_uj) in _summed(samples, "account", charged).items():
        samples.add("zeusd_account_energy_joules_total", (active_uj + idle_uj) / 1e6, *key)
        samples.add("zeusd_account_idle_energy_joules_total", idle_uj / 1e6, *key)


def _summed(
    samples: Samples, of: str, totals: Iterable[LedgerTotal]
) -> dict[_Key, tuple[int, int]]:
    """Active and idle energy by account; adds what is an estimate. The first `MAX_ACCOUNTS`
    accounts get series of their own, and keep them.
    """
    sums: dict[_Key, tuple[int, int]] = {}
    estimates: list[tuple[_Key, EstimatedEnergy]] = []
    for total in totals:
        key = _key(total, sums)
        active_uj, idle_uj = sums.get(key, (0, 0))
        sums[key] = active_uj + total.active_uj, idle_uj + total.idle_uj
        estimates += [(key, estimate) for estimate in total.estimates]
    _add_estimates(samples, of, estimates)
    return sums


def _add_estimates(
    samples: Samples, of: str, estimates: Iterable[tuple[_Key, EstimatedEnergy]]
) -> None:
    """Adds what is an estimate, with bounds of one kind for each method."""
    sums: dict[tuple[_Key, str], list[int]] = {}
    for key, one in estimates:
        known = sums.setdefault((key, one.method), [0, 0, 0])
        for place, amount_uj in enumerate((one.energy_uj, one.lower_uj, one.upper_uj)):
            known[place] += amount_uj
    for (key, method), amounts in sums.items():
        labels = *key, method, bounds_of([method]).value
        for part, amount_uj in zip(
            ("estimated_energy", "energy_lower", "energy_upper"), amounts, strict=True
        ):
            samples.add(f"zeusd_{of}_{part}_joules_total", amount_uj / 1e6, *labels)


def _unused(samples: Samples, node: NodeInfo, ledger: LedgerState) -> None:
    indices = {gpu.uuid: gpu.index for gpu in node.gpus}
    for uuid, one in ledger.by_gpu.items():
        gpu = indices.get(uuid), uuid
        samples.add("zeusd_idle_energy_joules_total", one.idle_uj / 1e6, *gpu, "no")
        samples.add("zeusd_idle_energy_joules_total", one.held_idle_uj / 1e6, *gpu, "yes")
        for reason, uj in one.unattributed_uj.items():
            samples.add("zeusd_unattributed_energy_joules_total", uj / 1e6, *gpu, reason)
    for uuid in {**indices, **ledger.counted_uj}:
        counted_j = ledger.counted_uj.get(uuid, 0) / 1e6
        samples.add("zeusd_accounted_energy_joules_total", counted_j, indices.get(uuid), uuid)


def _workloads(ledger: LedgerState) -> Samples:
    samples = Samples(WORKLOADS)
    for workload in ledger.workloads:
        kind, key = "job", (workload.name, user_name(workload.uid) if workload.uid >= 0 else "")
        if workload.kind == "pod":
            namespace, _, name = workload.name.partition("/")
            kind, key = "pod", (namespace, name)
        samples.add(
            f"zeusd_{kind}_energy_joules_total", (workload.active_uj + workload.idle_uj) / 1e6, *key
        )
        _add_estimates(samples, kind, [(key, part) for part in workload.estimates])
    return samples


def _key(total: LedgerTotal, known: Collection[_Key]) -> _Key:
    """Returns an account's kind and name; those of all others if too many are known already."""
    name = total.name if total.uid < 0 else user_name(total.uid)
    key = (total.kind, name)
    return ("other", "") if key not in known and len(known) >= MAX_ACCOUNTS else key

"""Estimates as they are shown: each with bounds, what these follow from, and why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from tests.zeusctl.test_exporter import one
from zeus_common import tables
from zeus_ipc.replies import EstimatedEnergy, LedgerState, LedgerTotal, NodeInfo, Usage, UsageSum
from zeusctl.day_files import METERS, Row, read, usage_of
from zeusctl.entities import account_text
from zeusctl.exporter.accounting import families
from zeusctl.usage import lines, reported, summary_line, tightened

ENDS = [0, 900]
METER = (METERS, "")


def used(kind: str, uj: int, lower: int, upper: int, *methods: str, name: str = "") -> UsageSum:
    return UsageSum(
        interval=0,
        kind=kind,
        name=name,
        run="",
        uid=1_000_000 if kind == "user" else -1,
        active_uj=uj,
        idle_uj=0,
        lower_uj=lower,
        upper_uj=upper,
        ns=0,
        methods=[*methods],
    )


def test_bounds_of_activity_are_never_called_exact() -> None:
    """They are true if the driver's samples are complete, also where both are the same."""
    shown = reported(used("user", 5, 5, 5, "allocated", "utilization"), ENDS, None)
    assert (shown.exact, shown.bounds, shown.reason) == (False, "activity", "several used it")
    shown = reported(used("user", 5, 5, 5, "allocated", "exclusive"), ENDS, None)
    assert (shown.exact, shown.bounds, shown.reason) == (True, "exact", "")
    shown = reported(used("unattributed", 5, 5, 5, name="down"), ENDS, None)
    assert (shown.exact, shown.reason) == (True, "down")


def test_how_much_a_gpu_drew_is_not_in_doubt() -> None:
    shown = reported(used("gpu", 5, 5, 5, "weights"), ENDS, None)
    assert (shown.exact, shown.bounds, shown.reason) == (True, "exact", "")


def test_users_together_used_everything_that_is_not_idle() -> None:
    idle, total = used("idle", 20, 10, 25, "weights"), used("total", 80, 0, 160, "weights")
    usage = Usage(sums=[total, idle], more=False, metered_uj=[100], begins_s=None)
    found = tightened(usage).sums[0]
    assert (found.lower_uj, found.upper_uj) == (75, 90)


def test_the_table_and_a_jobs_summary_say_what_bounds_follow_from_and_why() -> None:
    rows = [
        reported(used("job", 9_000_000, 1_000_000, 17_000_000, "equal", name="7"), ENDS, None),
        reported(used("job", 9_000_000, 9_000_000, 9_000_000, "allocated", name="8"), ENDS, None),
    ]
    table = lines(rows, 18.0)
    columns = table[0].split()
    assert columns[3:6] == ["J", "LOWER", "UPPER"]
    assert table[1].split()[4:7] == ["1.0", "17.0", "presence"]
    assert table[2].split()[4] == "exact"
    assert table[-2] == "equal: several had processes and their use was not measured"
    assert "(between 10.0 J and 26.0 J by presence)" in summary_line("job", "7", 1, rows)
    idle = reported(used("idle", 9_000_000, 9_000_000, 9_000_000), ENDS, None)
    assert lines([idle], 9.0) == ["(idle) 9.0   total 9.0 J   GPU counters 9.0 J"]
    assert "between" not in summary_line("job", "8", 1, rows[1:])


def test_a_process_is_named_with_what_it_belongs_to() -> None:
    one = used("process", 5, 5, 5, "exclusive", name="4711")
    of_job = one.model_copy(update={"run": "123", "workload": "job 77", "begin_s": 900})
    shown = [reported(some, ENDS, None) for some in (of_job, one)]
    assert [*map(account_text, shown)] == ["process 4711 of job 77", "process 4711"]
    assert shown[0].begin is not None
    assert shown[0].begin.timestamp() == 900


def test_a_run_in_files_is_found_by_its_sluid_and_not_by_its_number() -> None:
    sluid = "sEKNKTV3WPV500"
    rows = [
        Row("n1", 0, "job", "7", sluid, 7, 10, 0, 10, 10, 1, "allocated"),
        Row("n1", 0, "job", "8", "0", 7, 20, 0, 20, 20, 1, "allocated"),
    ]
    found = {
        name: [one.name for one in usage_of(rows, ENDS, "job", name=name).sums]
        for name in (sluid, "7", "0", "8")
    }
    assert found == {sluid: ["7"], "7": ["7"], "0": [], "8": ["8"]}


def test_a_job_of_two_nodes_is_one_sum_however_often_their_files_came(tmp_path: Path) -> None:
    def write(name: str, node: str, uj: int) -> None:
        amounts = (uj, 0, uj, uj, 1, "allocated")
        rows = [Row(node, 0, kind, job, "", 7, *amounts) for kind, job in (("job", "7"), METER)]
        path = tmp_path / f"energy-{name}.csv"
        tables.write(path, tables.kinds(Row), rows)

    for name, node, uj in (("1", "n1", 10), ("2", "n2", 20), ("3", "n1", 10), ("4", "n2", 15)):
        write(name, node, uj)  # the last one was made before its quarter of an hour was over
        os.utime(tmp_path / f"energy-{name}.csv", (int(name), int(name)))
    found = usage_of(read(tmp_path), ENDS, "job")
    assert [(one.name, one.active_uj) for one in found.sums] == [("7", 30)]
    assert found.metered_uj == [30]


def test_files_have_a_sum_for_each_method() -> None:
    rows = [
        Row("n1", 0, "user", "", "", 7, 10, 0, 5, 15, 1, "weights"),
        Row("n2", 0, "user", "", "", 7, 20, 0, 20, 20, 1, "allocated"),
    ]
    found = usage_of(rows, ENDS, "user", by_method=True).sums
    assert [(one.methods, one.lower_uj, one.upper_uj) for one in found] == [
        (["allocated"], 20, 20),
        (["weights"], 5, 15),
    ]
    (whole,) = usage_of(rows, ENDS, "user").sums
    assert (whole.methods, whole.lower_uj, whole.upper_uj) == (["allocated", "weights"], 25, 35)


def test_an_estimate_has_its_bounds_their_kind_and_its_method() -> None:
    def total(kind: str, uid: int, name: str = "") -> LedgerTotal:
        estimates = [
            EstimatedEnergy(
                method="utilization", energy_uj=4_000_000, lower_uj=3_000_000, upper_uj=7_000_000
            ),
            EstimatedEnergy(method="weights", energy_uj=2_000_000, lower_uj=0, upper_uj=9_000_000),
        ]
        plain = LedgerTotal(
            kind=kind, name=name, uid=uid, active_uj=8_000_000, idle_uj=0, lower_uj=0, upper_uj=0
        )
        return plain.model_copy(update={"estimates": estimates})

    ledger = LedgerState(
        totals=[total("user", 0), total("user", 0)],
        cpu_totals=[total("user", 0)],
        workloads=[total("job", 0, "7"), total("pod", -1, "ml/train")],
        counted_uj={},
        held=[],
        damaged=[],
        dropped=0,
    )

    class Fixed:
        def collect(self) -> Iterator[Metric]:
            node = cast("NodeInfo", SimpleNamespace(gpus=[]))
            yield from families(node, ledger, workloads=True)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Fixed())
    found = generate_latest(registry).decode()
    owners: dict[str, tuple[dict[str, str], int]] = {
        "account": ({"kind": "user", "account": "root"}, 2),
        "cpu_account": ({"kind": "user", "account": "root"}, 1),
        "job": ({"slurm_job": "7", "user": "root"}, 1),
        "pod": ({"k8s_namespace_name": "ml", "k8s_pod_name": "train"}, 1),
    }
    for prefix, (owner, times) in owners.items():
        for name, used, weighed in (
            ("estimated_energy", 4, 2),
            ("energy_lower", 3, 0),
            ("energy_upper", 7, 9),
        ):
            metric = f"zeusd_{prefix}_{name}_joules_total"
            activity = {"method": "utilization", "bounds": "activity"}
            assert one(found, metric, **owner, **activity) == times * used
            presence = {"method": "weights", "bounds": "presence"}
            assert one(found, metric, **owner, **presence) == times * weighed

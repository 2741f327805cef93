"""Accounts as metrics: they add up to the counters, and there is a bound on their number."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.zeusd.ledger.world import World
from zeus_ipc.replies import LedgerState, LedgerTotal, NodeInfo
from zeusctl.exporter.accounting import MAX_ACCOUNTS, families

USER = 1_000_000
"""Users from here on have no name."""


def test_accounts_idle_and_unattributed_energy_add_up_to_the_counters(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    accounts = world.open().accounts
    world.tick(50, 20, idle=True)
    world.tick(60, 10)  # for nobody
    for number in range(MAX_ACCOUNTS + 30):
        world.allocate(f"job{number}", uid=USER + number)
        world.tick(100, idle=number % 3 == 0)
    accounts.settle()
    ledger = LedgerState(
        totals=accounts.totals(),
        by_gpu=accounts.by_gpu(),
        counted_uj=accounts.counted_uj(),
        held=[],
        damaged=[],
        dropped=0,
    )
    gpus = [SimpleNamespace(uuid=uuid, index=number) for number, uuid in enumerate(world.gpus)]
    sums: dict[str, float] = defaultdict(float)
    names: list[tuple[str, str]] = []
    for family in families(cast("NodeInfo", SimpleNamespace(gpus=gpus)), ledger, workloads=False):
        for sample in family.samples:
            name = sample.name.removeprefix("zeusd_").removesuffix("_energy_joules_total")
            if sample.labels.get("held") != "yes":
                sums[name] += sample.value
            if name == "account":
                names.append((sample.labels["kind"], sample.labels["account"]))
    drawn_j = sum(gpu.energy_uj for gpu in world.gpus.values()) / 1e6
    assert abs(sums["accounted"] - drawn_j) < 1e-5
    assert abs(sums["account"] + sums["idle"] + sums["unattributed"] - drawn_j) < 1e-5
    assert min(sums[part] for part in ("account", "idle", "unattributed")) > 0
    assert ("user", str(USER)) in names
    assert ("other", "") in names
    assert len(names) == len({*names}) == MAX_ACCOUNTS + 1


def test_accounts_that_the_exporter_may_not_see_are_one_series_without_a_name() -> None:
    amounts = {"active_uj": 2_000_000, "idle_uj": 0, "lower_uj": 2_000_000, "upper_uj": 2_000_000}
    hidden = LedgerTotal(kind="others", name="", uid=-1, **amounts)
    ledger = LedgerState(
        totals=[hidden],
        by_gpu={},
        counted_uj={},
        held=[],
        damaged=[],
        dropped=0,
    )
    samples = [
        sample
        for family in families(cast("NodeInfo", SimpleNamespace(gpus=[])), ledger, workloads=False)
        for sample in family.samples
        if sample.name == "zeusd_account_energy_joules_total"
    ]
    assert [(one.labels, one.value) for one in samples] == [({"kind": "others", "account": ""}, 2)]

"""Samples that no session prints are what the program prints for their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from tests.snippets import ROOT
from tests.zeusctl.kubernetes.node import a_pod
from zeus.optimizer.batch_size.command import job_lines
from zeus_common.checks import Check
from zeus_common.receipts import GpuReceipt, Limit, Occupant, Receipt
from zeus_fleet.commands.operating import event_text
from zeus_fleet.records import EventReport
from zeus_ipc.replies import CeilingInfo, GpuInfo, GpuState, UsageSum
from zeusctl import receipts, usage
from zeusctl.commands.doctor import lines as doctor_lines
from zeusctl.kubernetes.plan import condition_of, plan
from zeusctl.kubernetes.pods import pod_of

START = datetime(2026, 11, 28, 10, tzinfo=timezone(timedelta(hours=1)))
LIMITED = (
    "GPU 0: its power limit was 230 W, below its usual 400 W: power limit changed outside zeusd to "
    "230 W at Nov 27 18:02:11 by an unknown program"
)


def energy() -> Iterable[str]:
    """`zeusctl energy`: kind, name, GPU-hours, kWh active and idle, bounds, methods."""
    accounts = (
        ("user", "", 168, 68.10, 3.22, 0, "allocated"),
        ("namespace", "ml", 40.5, 13.51, 0.51, 0, "allocated"),
        ("user", "", 12.4, 3.10, 0, (2.61, 3.44), "exclusive utilization"),
        ("idle", "", 0, 0, 24.0, 0, ""),
        ("unattributed", "down", 0, 0.02, 0, 0, ""),
    )
    sums = []
    for (kind, name, hours, active, idle, bounds, methods), user in zip(
        accounts, ("alice", None, "bob", None, None), strict=True
    ):
        low, high = bounds or (active + idle, active + idle)
        counted = UsageSum(
            interval=0,
            kind=kind,
            name=name,
            run="",
            uid=-1,
            active_uj=round(active * 3.6e12),
            idle_uj=round(idle * 3.6e12),
            lower_uj=round(low * 3.6e12),
            upper_uj=round(high * 3.6e12),
            ns=round(hours * 3.6e12),
            methods=methods.split(),
        )
        shown = usage.reported(counted, [0, 86_400], timezone.utc)
        sums.append(replace(shown, user=user))
    return usage.lines(sums, sum(one.energy_j for one in sums))


def receipt() -> Iterable[str]:
    gpu = GpuReceipt(
        index=0,
        uuid="GPU-1",
        name="NVIDIA A100-SXM4-80GB",
        vbios="92.00.45.00.03",
        energy_j=138101.4,
        uncertainty_j=69.3,
        average_power_w=230.2,
        method="counter",
        limited_s={"power": 584.2},
        gaps=[],
        power_limits=[Limit(since=START, power_limit_w=230)],
        power_limit_default_w=400,
        gpu_clock_mhz=[945, 1200, 1410],
        changes=[],
        occupants=[Occupant(who="process 4211 of alice", since=START, until=START, own=True)],
    )
    return receipts.page(
        Receipt(
            at=START,
            host="n01",
            zeusd="0.1.0",
            driver="595.58.03",
            simulated=False,
            since=START,
            until=START.replace(minute=10),
            time_s=600,
            subject="",
            gpus=[gpu],
            energy_j=138101.4,
            uncertainty_j=69.3,
            restarts=[],
            valid=False,
            reasons=[LIMITED],
        )
    )


def condition() -> Iterable[str]:
    """The message of a pod's condition, on a GPU that a budget bounds."""
    pod, uuid = a_pod(watts="200"), "GPU-3b1e6a70-..."
    names = (("fleet", 180_000), (f"job:{pod['metadata']['uid']}", 200_000))
    gpu = GpuInfo.model_construct(
        uuid=uuid,
        index=3,
        pci_address="00000000:03:00.0",
        device_file="/dev/nvidia3",
        power_limit_highest_mw=180_000,
        power_limit_max_mw=250_000,
        ceilings=[
            CeilingInfo.model_construct(name=name, control="power_limit", value=[mw])
            for name, mw in names
        ],
    )
    key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
    state = GpuState.model_construct(
        power_limit_mw=180_000, enforced_power_limit_mw=180_000, limit_author="fleet"
    )
    shown = condition_of(
        pod_of(pod), plan([pod_of(pod)], {key: (uuid,)}, [gpu]), [gpu], {uuid: state}
    )
    return [shown.message] if shown else []


def event() -> Iterable[str]:
    start_s, end_s = (
        datetime(2026, 11, 23, hour, minute).timestamp() for hour, minute in ((16, 56), (20, 4))
    )
    return [
        event_text(
            EventReport(
                *(start_s, end_s, 100_000, 80_000, 61.3, 83_900, 71_200, 39.8),
                *(80_000, 0, 0, 38.1, 1360, 0),
            )
        )
    ]


def estimates() -> Iterable[str]:
    sizes = (
        (64, 446, 312.2, 585.9, 0.01, 0),
        (128, 290.6, 264.7, 318.7, 0, 1),
        (256, 241.1, 232.5, 250.5, 0.61, 7),
        (512, 244.3, 230.7, 257.9, 0.37, 3),
        (1024, 351.4, 320.5, 385.4, 0, 1),
        (2048, 528.9, 402.8, 754.8, 0, 0),
    )
    names = ("batch_size", "mean_j", "low_j", "high_j", "probability_best", "runs")
    spec = {"higher_is_better_metric": True, "beta_knob": 2, "max_power": 250, "eta_knob": 0.5}
    job = {
        "job_id": "small",
        "number_of_gpus": 1,
        "gpu_model": "V100",
        "policy": "gp",
        "spec": {**spec, "target_metric": 0.9, "max_epochs": 9},
        "converged": 1,
        "counts": {},
        "energy_j": 1.0,
        "time_s": 1.0,
        "best_batch_size": 256,
        "best_cost_j": 241.1,
        "estimates": [
            dict(zip(names, one, strict=True), excluded="", explored=True) for one in sizes
        ],
        "trials": [],
    }
    return job_lines(job)[3:]


PRINTED = {
    "operate/accounting.md": energy,
    "operate/receipts.md": receipt,
    "operate/kubernetes.md": condition,
    "operate/fleet.md": event,
    "train/recurring_jobs.md": estimates,
}


@pytest.mark.parametrize(("page", "lines"), PRINTED.items())
def test_samples_are_what_the_program_prints(page: str, lines: Callable[[], Iterable[str]]) -> None:
    text = (ROOT / "docs" / page).read_text()
    printed = [line for part in lines() for line in part.splitlines()]
    assert len(printed) > 0
    assert [line for line in printed if f"\n{line.rstrip()}\n" not in text] == []


CHECK = re.compile(r"^(ok|note|fault) +(\S+) +(.+)(?:\n +-> (.*))?$", re.MULTILINE)


@pytest.mark.parametrize("page", ["operate/incident.md", "operate/install.md"])
def test_lines_of_doctor_are_as_it_prints_them(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    seen = [*CHECK.finditer(text)]
    assert seen
    for match in seen:
        state, name, found, remedy = match.groups()
        check = Check(name=name, state=state, found=found, remedy=remedy or "")
        assert "\n".join(doctor_lines(check)) == match[0]

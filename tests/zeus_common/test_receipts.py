"""What makes a receipt valid, and how each thing that does not is named."""

from __future__ import annotations

import json
import os
import pwd
import re
import time
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from tests.zeusd.core.world import facts
from zeus_common.receipts import Evidence, Receipt, Subject, receipt_of
from zeus_ipc.replies import (
    AuditRecord,
    AuditRecords,
    CeilingInfo,
    GpuInfo,
    NodeInfo,
    UsageSum,
    WindowEnergies,
)
from zeusctl import text, usage
from zeusctl.receipts import aiperf, differences, inferencex, page

GPU = "GPU-1"
SECOND = 1_000_000_000
BEGIN, END = 1000 * SECOND, 1060 * SECOND
UTC_NS = 1_790_000_000 * SECOND
BEGIN_MS, END_MS = (BEGIN + UTC_NS) // 10**6, (END + UTC_NS) // 10**6
ME = os.getuid()
ROOT = pwd.getpwuid(0).pw_name


def info(**more: Any) -> GpuInfo:
    limits = {"power_limit_max_mw": 400_000, "power_limit_default_mw": 400_000}
    usual = {"name": "A", "vbios": "92.00", **limits, "power_limit_site_mw": 400_000}
    return facts(GPU, 0).info.model_copy(update={**usual, **more})


def node(**more: Any) -> NodeInfo:
    return NodeInfo(
        protocol=1,
        protocols=[1],
        daemon_version="0.1.0",
        driver_version="595",
        lease_ttl_ms=1000,
        simulated=None,
        gpus=[],
        started_ns=SECOND,
    ).model_copy(update=more)


def used(kind: str, name: str, **more: Any) -> UsageSum:
    fields = {"run": "", "uid": 65_534, "active_uj": 10**9, "idle_uj": 0, "lower_uj": 10**9}
    fields |= {"upper_uj": 10**9, "ns": SECOND, "methods": [], "interval": 0}
    fields |= {"first_ms": BEGIN_MS - 5000, "last_ms": END_MS + 5000}
    return UsageSum(**{**fields, "kind": kind, "name": name, **more})


def record(event: str, t_s: float, **more: Any) -> AuditRecord:
    t_ns = round(t_s * SECOND)
    fields = {"number": 1, "t_ns": t_ns, "last_ns": t_ns, "count": 1, "warning": False}
    if event in ("set", "restore", "ceiling"):
        fields["result"] = "ok"
    return AuditRecord(**{**fields, "event": event, "gpu": GPU, **more})


def limit(event: str, t_s: float, mw: int = 230_000, **more: Any) -> AuditRecord:
    values = {"old": "400 W", "new": f"{mw / 1000:g} W"}
    return record(event, t_s, control="power_limit", **{**values, **more})


OWN = used("process", "123", uid=ME, active_uj=2 * 10**9)
USUAL = Evidence(
    host="n1",
    node=node(),
    gpus=[info()],
    since_ns=BEGIN,
    until_ns=END,
    utc_ns=UTC_NS,
    uid=ME,
    windows={
        GPU: WindowEnergies(
            energy_uj=[6_000_000_000],
            uncertainty_uj=[3_000_000],
            limited_ms={"power": [1500], "heat": [None], "sync": [0]},
            begins_ns=1,
            tick_ns=10**8,
        )
    },
    timelines={
        (GPU, "power_limit"): [(BEGIN - SECOND, 400_000), (BEGIN + SECOND, 400_000)],
        (GPU, "gpu_clock"): [(BEGIN + SECOND, 1400), (BEGIN + 2 * SECOND, 1410)],
        (GPU, "gap"): [],
    },
    audit=AuditRecords(records=[], dropped=0),
    usage={GPU: [OWN, used("user", "", uid=ME)]},
    settled_ms=END_MS,
    subject=Subject(),
)


def capped(*rows: tuple[int, int], **more: Any) -> dict[str, Any]:
    known = [(BEGIN - SECOND, 230_000), *rows] if not rows else [*rows]
    return {"timelines": {**USUAL.timelines, (GPU, "power_limit"): known}, **more}


def logged(*records: AuditRecord, **more: Any) -> dict[str, Any]:
    return {"audit": AuditRecords(records=[*records], dropped=0, **more)}


CAP = "GPU 0: its power limit was 230 W, below its usual 400 W: "

DISTURBED: dict[str, tuple[dict[str, Any], str]] = {
    "outside, before": (
        capped() | logged(limit("outside_change", 500)),
        CAP + "power limit changed outside zeusd to 230 W at ",
    ),
    "outside, noticed after the interval": (
        capped((BEGIN - SECOND, 400_000), (END - 2 * SECOND, 230_000))
        | logged(limit("restore", 300, 400_000), limit("outside_change", 1063, number=2)),
        CAP + "power limit changed outside zeusd to 230 W at ",
    ),
    "enforced by the board, long after another's cap": (
        capped()
        | logged(
            limit("set", 300, uid=65_533), limit("restore", 310, 400_000, uid=65_533, number=2)
        ),
        CAP + "no record says who set it",
    ),
    "a ceiling that the driver rounded": (
        capped((BEGIN - SECOND, 229_600))
        | logged(
            limit("ceiling_set", 500, uid=0, reason="fleet"),
            limit("ceiling", 501, 229_600, uid=0, pid=0, number=2),
        ),
        "its power limit was 229.6 W, below its usual 400 W: ceiling fleet set",
    ),
    "ceiling by root": (
        capped()
        | logged(
            limit("ceiling_set", 500, uid=0, reason="fleet"),
            limit("ceiling", 501, uid=0, pid=0, number=2),
        ),
        CAP + "ceiling fleet set, power limit at most 230 W at ",
    ),
    "a ceiling older than the log": (
        capped(
            gpus=[
                info(
                    ceilings=[
                        CeilingInfo(
                            name="fleet",
                            control="power_limit",
                            value=[230_000],
                            uid=0,
                            deadline_ns=None,
                            fallback=None,
                        )
                    ]
                )
            ]
        ),
        f"{CAP}the ceiling fleet of {ROOT}",
    ),
    "found at the start": (capped(), CAP + "no record says who set it"),
    "lease of another": (
        capped((BEGIN - SECOND, 400_000), (BEGIN + 9 * SECOND, 230_000))
        | logged(limit("set", 1008, uid=65_533)),
        CAP + "power limit set to 230 W at ",
    ),
    "changed and restored in between": (
        logged(
            limit("set", 1008, uid=65_533),
            limit("restore", 1009, 400_000, uid=65_533, number=2),
        ),
        "GPU 0: power limit set to 230 W at ",
    ),
    "clocks locked before": (
        logged(record("set", 400, control="gpu_clocks", old="unlocked", new="900 MHz", uid=65_533)),
        "GPU 0: gpu clocks set to 900 MHz at ",
    ),
    "a second process": (
        {"usage": {GPU: [OWN, used("process", "321", workload="job 9")]}},
        "GPU 0: process 321 of ",
    ),
    "another user, unnamed": (
        {"usage": {GPU: [OWN, used("others", "", uid=-1, active_uj=1)]}},
        "GPU 0: other users, whom zeusd does not name to you, used it, too",
    ),
    "nobody but others, unnamed": (
        {"usage": {GPU: [used("others", "", uid=-1)]}},
        "GPU 0: other users, whom zeusd does not name to you, used it, too",
    ),
    "another beside a job, for a part": (
        {
            "usage": {
                GPU: [
                    used("job", "8", methods=["allocated"], ns=60 * SECOND, active_uj=2 * 10**9),
                    used("job", "7", methods=["allocated"], ns=10 * SECOND),
                ]
            }
        },
        "GPU 0: job 7 of nobody used it, too",
    ),
    "a pod without a user": (
        {"usage": {GPU: [OWN, used("pod", "ml/p", uid=-1, workload="bert")]}},
        "GPU 0: pod ml/p (bert) used it, too",
    ),
    "not listed": (
        {"usage": {GPU: [used("unattributed", "no holder", uid=-1)]}},
        "GPU 0: nobody knows who used it for a time: no holder; allocate it",
    ),
    "no ledger": ({"usage": "this zeusd keeps no ledger"}, "nobody knows who used the GPUs: this"),
    "ledger too young": (
        {"usage": {GPU: [used("idle", "", first_ms=BEGIN_MS + 500)]}},
        "GPU 0: the energy ledger does not reach back",
    ),
    "ledger behind": ({"settled_ms": END_MS - 500}, "the energy ledger has not reached the end"),
    "a gap across the end": (
        {"timelines": {**USUAL.timelines, (GPU, "gap"): [(END + 4 * SECOND, 9000)]}},
        "GPU 0: no reading of its sensors for 5.0 s from ",
    ),
    "restart": (
        logged(record("restarted", 1030, gpu=None, last_ns=1040 * SECOND)),
        "zeusd was restarted at ",
    ),
    "restart after it, with records lost": (
        logged(record("restarted", 1050, gpu=None, last_ns=1100 * SECOND)),
        "it has recorded nothing since ",
    ),
    "log of an earlier zeusd lost": (
        {"node": node(started_ns=END + SECOND)},
        "and has no earlier audit log",
    ),
    "log rolled over": (logged(complete_ns=BEGIN + 1), "the audit log is complete from "),
    "before the history": (
        {
            "windows": {
                GPU: WindowEnergies(
                    energy_uj=[None], uncertainty_uj=[0], begins_ns=BEGIN + 1, tick_ns=10**8
                )
            }
        },
        ", later than the interval",
    ),
    "unread": ({"windows": {GPU: "it fell off the bus"}}, "energy is not known: it fell off"),
    "lost": (logged(record("gpu_lost", 1010)), "GPU 0: the driver lost the GPU at "),
}


@pytest.mark.parametrize("case", DISTURBED)
def test_what_disturbed_an_interval_is_named(case: str) -> None:
    changes, sentence = DISTURBED[case]
    found = receipt_of(replace(USUAL, **changes))
    assert not found.valid
    assert any(sentence in reason for reason in found.reasons), found.reasons
    assert any(sentence in line for line in page(found))


HARMLESS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "own limit, under a lease": capped() | logged(limit("set", 500, uid=ME, pid=123, lease="L")),
    "own limit, restored just before": capped()
    | logged(
        limit("set", 990, uid=ME, pid=123, lease="L"),
        limit("restore", 999, 400_000, uid=ME, pid=123, number=2),
    ),
    "a limit that the site configured": capped(
        gpus=[info(power_limit_site_mw=230_000, power_limit_configured=True)]
    ),
    "a limit that was restored before": logged(
        limit("outside_change", 400), limit("restore", 500, 400_000, number=2)
    ),
    "a set that failed": logged(limit("set", 1010, uid=65_533, result="out of range")),
    "persistence mode": logged(
        record("set", 1010, control="persistence_mode", old="off", new="on", uid=65_533)
    ),
    "clocks unlocked long ago": logged(
        record("set", 400, control="gpu_clocks", old="900 MHz", new="unlocked", uid=65_533)
    ),
    "users before and after": {
        "usage": {
            GPU: [
                OWN,
                used("process", "5", last_ms=BEGIN_MS + 10),
                used("process", "6", first_ms=END_MS),
            ]
        }
    },
    "a job that held the GPU between others of the same quarter of an hour": {
        "usage": {
            GPU: [
                used("job", "8", methods=["allocated"], ns=70 * SECOND),
                used("unattributed", "no holder", uid=-1, first_ms=BEGIN_MS - 60_000),
                used("job", "7", methods=["allocated"], first_ms=BEGIN_MS - 60_000),
            ]
        }
    },
    "a process alone, while another's pause": {
        "usage": {
            GPU: [
                used("process", "5", methods=["exclusive"], ns=70 * SECOND),
                used("user", "", methods=["exclusive", "equal"], ns=80 * SECOND),
                used("process", "6", methods=["exclusive"], first_ms=BEGIN_MS - 60_000),
            ]
        }
    },
    "idle in between": {
        "usage": {
            GPU: [
                used("idle", "", ns=70 * SECOND),
                used("process", "5", methods=["exclusive"], first_ms=BEGIN_MS - 60_000),
            ]
        }
    },
    "several processes of one job": {
        "usage": {
            GPU: [used("process", "5", workload="job 7"), used("process", "6", workload="job 7")]
        }
    },
    "a gap before": {"timelines": {**USUAL.timelines, (GPU, "gap"): [(BEGIN, 9000)]}},
    "restarts before and after": {
        "node": node(started_ns=END + SECOND),
        **logged(
            record("restarted", 900, gpu=None),
            record("restarted", 1060.5, gpu=None, last_ns=END + SECOND, number=2),
        ),
    },
    "an idle GPU": {"usage": {GPU: [used("idle", "")]}},
}


@pytest.mark.parametrize("case", HARMLESS)
def test_without_a_disturbance_a_receipt_is_valid(case: str) -> None:
    found = receipt_of(replace(USUAL, **HARMLESS[case]))
    assert (found.valid, found.reasons) == (True, [])
    assert [*page(found)][-1] == "valid"


def test_a_subject_is_what_was_named() -> None:
    process = used("process", "321", uid=ME, workload="job 9")
    usage = {GPU: [OWN, process]}
    by_name = {
        name: receipt_of(replace(USUAL, usage=usage, subject=subject)).reasons
        for name, subject in {
            "321": Subject("process", "321"),
            "123": Subject("process", "123"),
            "9": Subject("job", "9"),
        }.items()
    }
    assert [len(reasons) for reasons in by_name.values()] == [1, 1, 1]
    assert "process 123" in by_name["321"][0]
    assert "process 123" in by_name["9"][0]
    assert "process 321" in by_name["123"][0]
    # Another process of the same user sets a limit: own without a subject only.
    cap = capped() | logged(limit("set", 500, uid=ME, pid=321, lease="L"))
    assert receipt_of(replace(USUAL, **cap)).valid
    assert not receipt_of(replace(USUAL, **cap, subject=Subject("process", "123"))).valid


def test_two_receipts_are_comparable_if_nothing_differs() -> None:
    first = receipt_of(USUAL)
    again = Receipt.model_validate_json(first.json_text())
    assert again == first
    assert differences(first, again) == []
    ceiling = limit("ceiling_set", 500, uid=0, reason="fleet")
    second = receipt_of(replace(USUAL, **capped(), **logged(ceiling)))
    texts = differences(first, second)
    assert any(
        "ceiling fleet" in one and one.endswith(f"by {ROOT}, in the second") for one in texts
    )
    assert "GPU 0, power limit: 400 W in the first, 230 W in the second" in texts
    other = receipt_of(replace(USUAL, gpus=[info(vbios="")], node=node(driver_version="600")))
    assert differences(first, other) == [
        "driver: 595 in the first, 600 in the second",
        "GPU 0, VBIOS: 92.00 in the first, unknown in the second",
    ]


def test_the_time_limited_is_given_by_reason() -> None:
    found = receipt_of(USUAL)
    assert found.gpus[0].limited_s == {"power": 1.5, "heat": None, "sync": 0.0}
    assert [line for line in page(found) if "limited" in line] == [
        "       limited by power for 1.5 s"
    ]
    blind = {"windows": {GPU: "it has no sensor"}, "usage": {GPU: []}}
    unread = receipt_of(replace(USUAL, **blind))
    assert unread.gpus[0].limited_s == {}
    assert unread.reasons == ["GPU 0: its energy is not known: it has no sensor"]


def test_a_page_says_when_and_how_long_with_the_time_zone() -> None:
    whole, part = receipt_of(USUAL), receipt_of(replace(USUAL, until_ns=BEGIN + SECOND // 4))
    assert next(page(whole)).endswith(f" to {whole.until.isoformat(' ')} (1 min 0 s) on n1")
    begin, end = (one.isoformat(" ", "milliseconds") for one in (part.since, part.until))
    assert next(page(part)) == f"Receipt: {begin} to {end} (0.25 s) on n1"
    assert re.search(r"\.250[+-]\d\d:\d\d$", end)


def test_benchmarks_get_the_fields_that_they_read() -> None:
    valid, broken = receipt_of(USUAL), receipt_of(replace(USUAL, settled_ms=0))
    assert inferencex(valid) == {
        "power_metric_schema_version": 2,
        "power_valid": 1,
        "avg_power_w": 100.0,
        "avg_total_gpu_power_w": 100.0,
        "total_gpu_energy_j": 6000.0,
    }
    assert inferencex(broken) == {"power_metric_schema_version": 2, "power_valid": 0}
    exported = aiperf(valid)
    (gpu,) = exported["endpoints"]["zeusd"]["gpus"].values()
    assert gpu["metrics"] == {
        "energy_consumption": {"unit": "MJ", "avg": 0.006},
        "gpu_power_usage": {"unit": "W", "avg": 100.0},
    }
    assert (gpu["gpu_index"], gpu["gpu_uuid"], gpu["hostname"]) == (0, GPU, "n1")


@pytest.mark.parametrize(
    ("instant", "local"),
    [
        ("2026-07-15T12:00:00+00:00", "2026-07-15T14:00:00+02:00"),
        ("2026-12-15T12:00:00+00:00", "2026-12-15T13:00:00+01:00"),
    ],
)
def test_an_instant_has_the_offset_of_its_own_date(
    monkeypatch: pytest.MonkeyPatch, instant: str, local: str
) -> None:
    """Whether it is summer now or not: in the audit log, the ledger and receipts."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        then_s = int(datetime.fromisoformat(instant).timestamp())
        now = datetime(2026, 11, 29, 12, tzinfo=timezone.utc)
        then_ns, now_ns = then_s * 10**9, int(now.timestamp()) * 10**9
        receipt = receipt_of(replace(USUAL, since_ns=0, until_ns=SECOND, utc_ns=then_ns))
        for found in (
            text.wall_time(then_ns, now_ns, now),
            usage.reported(OWN, [then_s, then_s + 900], None).since,
            usage.instant(local[:16], None, now).astimezone(),
            receipt.since,
        ):
            assert found.isoformat(timespec="seconds") == local
        assert next(page(receipt)).startswith(
            f"Receipt: {local[:10]} {local[11:19]}.000{local[19:]}"
        )
        assert json.loads(receipt.json_text())["since"] == local
    finally:
        monkeypatch.undo()
        time.tzset()

"""Values, times and tables as text, and GPUs as a person names them."""

from __future__ import annotations

from datetime import datetime, timezone
from types import SimpleNamespace

import pytest

from tests.zeusd.core.world import facts
from zeus_common import text as numbers
from zeus_ipc.replies import GpuInfo
from zeusctl import text
from zeusctl.columns import Entity, column
from zeusctl.exits import CommandError, Exit
from zeusctl.session import select


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7260, "2 h 1 min")]
    + [(90_000, "1 d 1 h"), (86_400 * 400, "400 d 0 h"), (-3, "0 s")],
)
def test_durations(seconds: float, said: str) -> None:
    assert numbers.duration(seconds) == said


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("30s", 30), ("10m", 600), ("1.5h", 5400), ("2d", 172_800), ("45", 45), ("250ms", 0.25)]
    + [("5 min", 300)],
)
def test_durations_are_read(said: str, seconds: float) -> None:
    assert text.parse_duration(said) == pytest.approx(seconds)


@pytest.mark.parametrize("said", ["", "x", "-3s", "0", "3 weeks", "1e3", "10 m s"])
def test_other_texts_are_not_durations(said: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        text.parse_duration(said)


@pytest.mark.parametrize(
    ("joules", "said"),
    [(0.04, "0.0 J"), (9999, "9999.0 J"), (10_000, "10.0 kJ"), (2.5e7, "25.0 MJ")]
    + [(3e10, "30.0 GJ")],
)
def test_energy(joules: float, said: str) -> None:
    assert numbers.energy(joules) == said


def test_quantities_have_their_units_and_dashes_where_nothing_is_known() -> None:
    assert [numbers.memory(mib) for mib in (None, 1023, 1024, 1536)] == [
        *("-", "1023 MiB", "1 GiB", "1.5 GiB")
    ]
    assert [numbers.number(one, "W") for one in (None, 2.04, 2.06)] == ["-", "2 W", "2.1 W"]
    assert [numbers.number(one, digits=0) for one in (9.6, 10.0)] == ["10", "10"]
    assert [numbers.count(one, "lease") for one in (0, 1, 2)] == ["0 leases", "1 lease", "2 leases"]
    assert [numbers.split(one) for one in ([], [1], [0, 1])] == [
        *("MIG is on", "MIG is on", "2 partitions")
    ]
    assert [numbers.percent(0.1766), numbers.percent(-0.5, "+.0")] == ["17.7 %", "-50 %"]
    values = {"power_limit": 150.5, "gpu_clocks": [600, 900], "power_profile": ["max-q", "mig"]}
    assert [numbers.quantity_text(*one) for one in values.items()] == [
        *("150.5 W", "600-900 MHz", "max-q, mig")
    ]
    assert [numbers.quantity_text("power_profile", one) for one in ([], None)] == [
        *("none", "not set")
    ]


def test_gpus_by_their_indices_and_what_was_never_set() -> None:
    assert numbers.value_text("memory_clocks", None) == "not set"
    assert numbers.gpus_text([0]) == "GPU 0"
    assert numbers.gpus_text(["0", "3"]) == "GPUs 0, 3"


def test_reasons_leave_idleness_out() -> None:
    assert text.reasons(0x1) == []
    assert text.reasons(0x4 | 0x40 | 0x1) == ["power limit", "hardware thermal"]
    assert text.reasons(None) == []
    assert text.reasons(0x200 | 0x400 | 0x1) == ["board limit", "reliability"]
    assert text.reasons(0x4 | 0x10000) == ["power limit", "0x10000"]  # of a newer driver


def test_columns_line_up_with_and_without_colour() -> None:
    lines = text.table(("A", "N"), [["x", "1"], ["\x1b[31mlonger\x1b[0m", "22"]], right=(1,))
    assert [line.replace("\x1b[31m", "").replace("\x1b[0m", "") for line in lines] == [
        "A        N",
        "x        1",
        "longer  22",
    ]


def test_a_table_fits_by_dropping_wrapping_and_stacking() -> None:
    header, row = ("A", "BLANK", "SPARE", "LAST"), ["x" * 10, "", "s" * 12, "one two three four"]
    assert text.table(header, [row], spare=(2,), width=0)[1].endswith("four")
    assert text.table(header, [row], spare=(2,), width=47) == [
        "A           SPARE         LAST",
        "xxxxxxxxxx  ssssssssssss  one two three four",
    ]
    assert text.table(header, [row], spare=(2,), width=40) == [
        "A           LAST",
        "xxxxxxxxxx  one two three four",
        "(no room for SPARE)",
    ]
    long = [*row[:3], "one two three four five six seven"]
    assert text.table(header, [long], spare=(2,), width=40)[1:3] == [
        "xxxxxxxxxx  one two three four five six",
        "            seven",
    ]
    assert text.table(header, [long], spare=(2,), width=30)[:3] == [
        "A",
        "    LAST",
        "xxxxxxxxxx",
    ]


def test_instants_become_wall_times() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    then = text.wall_time(7_000_000_000, 10_500_000_000, now)
    assert (now - then).total_seconds() == pytest.approx(3.5)


def gpus(count: int) -> list[GpuInfo]:
    return [facts(f"GPU-{index}aaa-{index}", index).info for index in range(count)]


@pytest.mark.parametrize(
    ("said", "indices"),
    [
        ("all", [0, 1, 2, 3]),
        ("2", [2]),
        ("3,1", [1, 3]),
        ("1-2", [1, 2]),
        ("0-1,1,3", [0, 1, 3]),
        ("GPU-2aaa-2", [2]),
        ("gpu-3", [3]),
        ("00000000:01:00.0", [1]),
        ("01:00.0", [1]),
    ],
)
def test_gpus_by_what_a_person_says(said: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in select(said, gpus(4))] == indices


@pytest.mark.parametrize(
    "said", ["4", "2-5", "3-1", "x", "", "1,", "GPU-", "-1", "GPU-9", "0.0", "²"]
)
def test_gpus_that_are_not_there(said: str) -> None:
    with pytest.raises(CommandError, match="name one of 0, 1, 2, 3") as raised:
        select(said, gpus(4))
    assert raised.value.exit_code == Exit.UNKNOWN


def test_a_field_is_in_the_unit_of_its_name_whatever_the_reply_has() -> None:
    class Sample(Entity):
        limit_w: float = column()
        energy_j: float = column()
        ttl_s: float = column()
        patience_s: float = column(source="wait_ms")

    reply = SimpleNamespace(limit_mw=300_500, energy_uj=2_500_000, ttl_ms=15_000, wait_ms=500)
    read = Sample.of(reply)
    assert (read.limit_w, read.energy_j, read.ttl_s, read.patience_s) == (300.5, 2.5, 15, 0.5)

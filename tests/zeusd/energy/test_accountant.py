"""One GPU's account over time: conservation, buckets, and late information."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from zeus_common.units import SECOND_NS
from zeusd.energy.accountant import (
    BUCKET_NS,
    NEVER_NS,
    Accountant,
    Fact,
    FactSpan,
    Position,
    Settlement,
)
from zeusd.energy.split import IDLE, NO_HOLDER, Account, Claim, Kind, unattributed

ALICE, BOB = Account(Kind.JOB, "7", uid=1000), Account(Kind.JOB, "8", uid=1001)


def steady(watts: int) -> Callable[[int], int]:
    return lambda t_ns: watts * t_ns // 1000


def holder(account: Account, begin_s: int, end_s: int | None = None, weight: int = 1) -> FactSpan:
    end_ns = NEVER_NS if end_s is None else end_s * SECOND_NS
    return FactSpan(Fact.HOLDER, begin_s * SECOND_NS, end_ns, Claim(account, weight))


def charged(settlement: Settlement) -> dict[Account, int]:
    """Energy by account."""
    found: dict[Account, int] = defaultdict(int)
    for key, row in settlement.rows.items():
        found[key.account] += row.active_uj + row.idle_uj
    return dict(found)


def test_each_holder_is_charged_for_its_time() -> None:
    accountant = Accountant(Position(0, 0))
    accountant.add(holder(ALICE, 10, 20))
    accountant.add(holder(BOB, 15))
    found = accountant.settle(30 * SECOND_NS, steady(100), offset_ns=0)
    assert charged(found) == {
        unattributed(NO_HOLDER): 1_000_000_000,
        ALICE: 750_000_000,
        BOB: 1_250_000_000,
    }
    assert found.position == (30 * SECOND_NS, 3_000_000_000)
    assert [span.claim for span in accountant.spans] == [Claim(BOB)]


def test_settled_energy_is_never_charged_again() -> None:
    accountant = Accountant(Position(0, 0))
    accountant.add(holder(ALICE, 0))
    accountant.settle(10 * SECOND_NS, steady(100), 0)
    accountant.add(holder(BOB, 5, 12))  # too late for its first half
    later = accountant.settle(20 * SECOND_NS, steady(100), 0)
    assert charged(later) == {ALICE: 900_000_000, BOB: 100_000_000}
    again = accountant.settle(20 * SECOND_NS, steady(100), 0)
    assert (again.rows, sum(again.metered.values())) == ({}, 0)


def test_idle_seconds_of_a_holder_are_their_own_figure() -> None:
    accountant = Accountant(Position(0, 0))
    accountant.add(holder(ALICE, 0))
    idle = [FactSpan(Fact.IDLE, 4 * SECOND_NS, 7 * SECOND_NS)]
    found = accountant.settle(10 * SECOND_NS, steady(100), 0, idle)
    (row,) = found.rows.values()
    assert (row.active_uj, row.idle_uj, row.ns) == (700_000_000, 300_000_000, 10 * SECOND_NS)
    assert row.lower_uj == row.upper_uj == 1_000_000_000


def test_a_settlement_ends_at_each_bucket_of_the_wall_clock() -> None:
    accountant = Accountant(Position(100 * SECOND_NS, steady(100)(100 * SECOND_NS)))
    accountant.add(holder(ALICE, 0))
    offset_ns = 7 * BUCKET_NS - 400 * SECOND_NS
    found = accountant.settle(1400 * SECOND_NS, steady(100), offset_ns)
    assert {key.bucket: row.ns // SECOND_NS for key, row in found.rows.items()} == {
        6: 300,
        7: 900,
        8: 100,
    }
    assert found.metered == {6: 30_000_000_000, 7: 90_000_000_000, 8: 10_000_000_000}


def test_a_step_of_the_clock_moves_later_rows_only() -> None:
    accountant = Accountant(Position(0, 0))
    accountant.add(holder(ALICE, 0))
    total: dict[int, int] = defaultdict(int)
    hour_ns = 3600 * SECOND_NS
    for second, offset_ns in ((60, 10 * hour_ns), (120, 9 * hour_ns), (180, 11 * hour_ns)):
        found = accountant.settle(second * SECOND_NS, steady(100), offset_ns)
        for key, row in found.rows.items():
            assert row.active_uj > 0
            total[key.bucket] += row.active_uj
    assert total == {40: 6_000_000_000, 36: 6_000_000_000, 44: 6_000_000_000}


def test_a_meter_that_is_reinterpolated_charges_nothing_negative() -> None:
    accountant = Accountant(Position(10 * SECOND_NS, 1_000_000_000))
    accountant.add(holder(ALICE, 0, 11))
    accountant.add(holder(BOB, 11))
    below = {11 * SECOND_NS: 900_000_000, 12 * SECOND_NS: 1_050_000_000}
    found = accountant.settle(12 * SECOND_NS, below.__getitem__, 0)
    assert charged(found) == {ALICE: 0, BOB: 50_000_000}


def test_processes_that_may_not_be_charged_are_excluded() -> None:
    accountant = Accountant(Position(0, 0))
    accountant.add(holder(ALICE, 0))
    accountant.add(FactSpan(Fact.EXCLUDED, 3 * SECOND_NS, 5 * SECOND_NS, reason="suspend"))
    found = charged(accountant.settle(10 * SECOND_NS, steady(100), 0))
    assert found == {ALICE: 800_000_000, unattributed("suspend"): 200_000_000}


def test_a_list_without_processes_is_idleness_and_no_list_is_not() -> None:
    accountant = Accountant(Position(0, 0))
    accountant.add(FactSpan(Fact.LISTED, 2 * SECOND_NS, 8 * SECOND_NS))
    accountant.add(FactSpan(Fact.PRESENT, 4 * SECOND_NS, 6 * SECOND_NS, Claim(BOB)))
    accountant.add(FactSpan(Fact.UNKNOWN, 8 * SECOND_NS, reason="down"))
    found = charged(accountant.settle(10 * SECOND_NS, steady(100), 0))
    assert found == {
        unattributed(NO_HOLDER): 200_000_000,
        IDLE: 400_000_000,
        BOB: 200_000_000,
        unattributed("down"): 200_000_000,
    }


@settings(deadline=None)
@given(st.integers(0, 2**32))
def test_every_schedule_adds_up_to_the_meter_whenever_it_is_settled(seed: int) -> None:
    """Holders, processes, idleness, lists, suspends and steps of the clock, in any order."""
    rng = random.Random(seed)
    edges = sorted(rng.sample(range(1, 4000), 60))
    readings = [0]
    for _ in range(4000):
        readings.append(readings[-1] + rng.randrange(10**9))

    def meter(t_ns: int) -> int:
        second, rest = divmod(t_ns, SECOND_NS)
        drawn = readings[min(second + 1, 4000)] - readings[second]
        return readings[second] + drawn * rest // SECOND_NS

    accountant = Accountant(Position(0, 0))
    rows = metered = time_ns = now_ns = 0
    open_spans: list[FactSpan] = []
    for edge in edges:
        t_ns = edge * SECOND_NS + rng.randrange(SECOND_NS)
        choice = rng.random()
        if choice < 0.5 or not open_spans:
            fact = rng.choice([*Fact])
            claim = Claim(rng.choice([ALICE, BOB]), rng.randrange(4), rng.random() < 0.5)
            open_spans.append(accountant.add(FactSpan(fact, t_ns, claim=claim, reason="down")))
        elif choice < 0.8:
            open_spans.pop(rng.randrange(len(open_spans))).end_ns = t_ns
        else:
            offset_ns = rng.randrange(10) * 3600 * SECOND_NS + rng.randrange(SECOND_NS)
            begin_ns = rng.randrange(now_ns, t_ns + 1)
            idle = FactSpan(Fact.IDLE, begin_ns, t_ns)
            found = accountant.settle(t_ns, meter, offset_ns, [idle])
            now_ns = t_ns
            rows += sum(row.active_uj + row.idle_uj for row in found.rows.values())
            time_ns += sum(row.ns for row in found.rows.values())
            metered += sum(found.metered.values())
            assert rows == metered == found.position.energy_uj == meter(t_ns)
            assert time_ns == t_ns
            for row in found.rows.values():
                assert 0 <= row.lower_uj <= row.active_uj + row.idle_uj <= row.upper_uj

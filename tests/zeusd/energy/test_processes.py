"""The charge of an account, by process."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zeus_common.units import SECOND_NS
from zeus_ipc.charging import Method
from zeusd.energy.accountant import MAX_PROCESSES, Accountant, Fact, FactSpan, Position
from zeusd.energy.split import Account, Charge, ChargedProcess, Claim, Kind, divide

ALICE = Account(Kind.USER, uid=1000)
ONE, TWO, THREE = (ChargedProcess(pid, 7) for pid in (1, 2, 3))
CHARGE = Charge(ALICE, Method.EXCLUSIVE, 90, 10, 100, 100, 30)


def amounts(parts: list[tuple[ChargedProcess, Charge]]) -> list[tuple[int, int, int]]:
    return [(one.active_uj + one.idle_uj, one.lower_uj, one.upper_uj) for _, one in parts]


def test_a_process_that_is_alone_is_all_of_its_account() -> None:
    assert divide(CHARGE, [ONE], {}, {}) == [(ONE, CHARGE)]


def test_several_share_by_use_and_what_used_nothing_has_nothing() -> None:
    found = divide(CHARGE, [ONE, TWO, THREE], {ONE: 1, TWO: 3}, {THREE: 5})
    assert amounts(found) == [(26, 0, 100), (74, 0, 100), (0, 0, 0)]
    assert {one.method for _, one in found} == {Method.UTILIZATION}
    only = divide(CHARGE, [ONE, TWO], {TWO: 3}, {})
    assert amounts(only) == [(0, 0, 0), (100, 100, 100)]


def test_instances_and_else_equal_parts() -> None:
    found = divide(CHARGE, [ONE, TWO], {}, {ONE: 3, TWO: 1})
    assert {one.method for _, one in found} == {Method.SLICES}
    assert [one.active_uj for _, one in found] == [68, 22]
    found = divide(CHARGE, [ONE, TWO], {}, {})
    assert {one.method for _, one in found} == {Method.EQUAL}
    assert amounts(found) == [(50, 0, 100), (50, 0, 100)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 2**40), st.booleans())
def test_the_parts_add_up_to_the_charge(uses: list[int], uj: int, known: bool) -> None:
    present = [ChargedProcess(pid, 1) for pid in range(len(uses))]
    charge = Charge(ALICE, Method.UTILIZATION, uj, uj // 3, uj // 2, 3 * uj, uj + 1)
    used = dict(zip(present, uses, strict=True)) if known else {}
    parts = [part for _, part in divide(charge, present, used, {})]
    for amount in ("active_uj", "idle_uj", "ns"):
        assert sum(getattr(part, amount) for part in parts) == getattr(charge, amount)
    for part in parts:
        assert 0 <= part.lower_uj <= part.active_uj + part.idle_uj <= part.upper_uj


def test_processes_without_end_fill_no_disk() -> None:
    """Energy of those beyond the bound is their account's, as always."""
    accountant = Accountant(Position(0, 0))
    for pid in range(MAX_PROCESSES + 50):
        begin_ns = pid * SECOND_NS
        span = FactSpan(Fact.PRESENT, begin_ns, begin_ns + SECOND_NS, Claim(ALICE))
        span.process = ChargedProcess(pid, pid)
        accountant.add(span)
    found = accountant.settle(400 * SECOND_NS, lambda t_ns: t_ns // 1000, 0)
    assert len({key.process for key in found.processes}) == MAX_PROCESSES
    (divided,) = found.divided.values()
    (whole,) = (row for key, row in found.rows.items() if key.account == ALICE)
    assert divided.active_uj == MAX_PROCESSES * 1_000_000
    assert whole.active_uj == (MAX_PROCESSES + 50) * 1_000_000

"""How one amount of energy is shared."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zeusd.energy.split import (
    IDLE,
    NO_HOLDER,
    Account,
    Charge,
    Claim,
    Kind,
    Method,
    Situation,
    shares,
    split,
    unattributed,
)

ALICE, BOB = Account(Kind.USER, uid=1000), Account(Kind.USER, uid=1001)
MONITOR = Account(Kind.SERVICE, "dcgm.service")
JOB = Account(Kind.JOB, "7", uid=1000)

amounts = st.integers(0, 2**62)
weights = st.lists(st.integers(0, 2**40), min_size=1, max_size=12)


@settings(deadline=None)
@given(amounts, weights)
def test_shares_add_up_and_are_within_one_unit_of_their_part(total: int, parts: list[int]) -> None:
    found = shares(total, parts)
    assert sum(found) == total
    whole = sum(parts)
    for part, share in zip(parts, found, strict=True):
        ideal = total * part if whole else total
        assert abs(share * (whole or len(parts)) - ideal) < (whole or len(parts))


def test_the_rest_goes_to_the_largest_remainders() -> None:
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(10, [1, 2, 4]) == [1, 3, 6]
    assert shares(2**62 + 1, [1, 1]) == [2**61 + 1, 2**61]


def test_a_holder_pays_for_all_that_its_gpu_draws() -> None:
    strangers = [Claim(BOB), Claim(MONITOR)]
    for idle in (False, True):
        situation = Situation([Claim(JOB)], strangers, listed=True, idle=idle, unknown="down")
        (charge,) = split(100, 5, situation)
        assert charge == Charge(JOB, Method.ALLOCATED, 100 * (not idle), 100 * idle, 100, 100, 5)


def test_holders_share_by_weight_and_nobody_knows_better() -> None:
    first, second = split(101, 4, Situation([Claim(ALICE, 3), Claim(BOB, 1)]))
    assert (first.account, first.active_uj, second.active_uj) == (ALICE, 76, 25)
    assert {first.method, second.method} == {Method.WEIGHTS}
    assert (first.lower_uj, first.upper_uj) == (0, 101)
    assert (first.ns, second.ns) == (3, 1)


def test_an_idle_gpu_is_shared_by_rule_without_doubt() -> None:
    first, second = split(100, 4, Situation([Claim(ALICE), Claim(BOB)], idle=True))
    assert first.idle_uj == first.lower_uj == first.upper_uj == 50
    assert first.active_uj == second.active_uj == 0


def test_processes_decide_where_nobody_holds_the_gpu() -> None:
    (alone,) = split(100, 4, Situation(present=[Claim(ALICE), Claim(ALICE)], listed=True))
    assert (alone.account, alone.method, alone.lower_uj) == (ALICE, Method.EXCLUSIVE, 100)
    equal = split(100, 4, Situation(present=[Claim(ALICE), Claim(BOB)], listed=True))
    assert [one.method for one in equal] == [Method.EQUAL] * 2
    used = split(
        100, 4, Situation(present=[Claim(ALICE, 90, measured=True), Claim(BOB, 0, measured=True)])
    )
    assert [(one.method, one.active_uj, one.upper_uj) for one in used] == [
        (Method.UTILIZATION, 100, 100),
        (Method.UTILIZATION, 0, 100),
    ]


def test_a_service_pays_only_where_it_is_alone() -> None:
    watched = split(100, 4, Situation(present=[Claim(ALICE), Claim(MONITOR, 0)], listed=True))
    assert [(one.account, one.method) for one in watched] == [(ALICE, Method.EXCLUSIVE)]
    (alone,) = split(100, 4, Situation(present=[Claim(MONITOR, 0)], listed=True))
    assert (alone.account, alone.active_uj) == (MONITOR, 100)


def test_without_holder_or_process_it_is_idle_or_unattributed_with_its_reason() -> None:
    cases = [
        (Situation(listed=True), IDLE),
        (Situation(idle=True), IDLE),
        (Situation(idle=True, unknown="down"), IDLE),
        (Situation(), unattributed(NO_HOLDER)),
        (Situation(unknown="down"), unattributed("down")),
        (Situation([Claim(JOB)], excluded="suspend"), unattributed("suspend")),
    ]
    for situation, account in cases:
        (charge,) = split(100, 4, situation)
        assert (charge.account, charge.active_uj + charge.idle_uj, charge.ns) == (account, 100, 4)
        assert (charge.idle_uj == 100) == (account == IDLE)


situations = st.builds(
    Situation,
    st.lists(st.builds(Claim, st.sampled_from([JOB, ALICE, BOB]), st.integers(0, 8)), max_size=4),
    st.lists(
        st.builds(
            Claim, st.sampled_from([ALICE, BOB, MONITOR]), st.integers(0, 100), st.booleans()
        ),
        max_size=5,
    ),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "down"]),
    st.sampled_from(["", "suspend"]),
)


@settings(deadline=None)
@given(amounts, amounts, situations)
def test_charges_add_up_and_lie_within_their_bounds(
    energy_uj: int, ns: int, situation: Situation
) -> None:
    charges = split(energy_uj, ns, situation)
    assert sum(one.active_uj + one.idle_uj for one in charges) == energy_uj
    assert sum(one.ns for one in charges) == ns
    assert len({one.account for one in charges}) == len(charges)
    for one in charges:
        assert 0 <= one.lower_uj <= one.active_uj + one.idle_uj <= one.upper_uj <= energy_uj

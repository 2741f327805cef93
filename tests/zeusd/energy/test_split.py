"""How one amount of energy is shared."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zeus_ipc.charging import BOUNDS, REASONS, ChargeBasis, Method, bounds_of, reason_of
from zeusd.energy.split import (
    IDLE,
    NO_HOLDER,
    Account,
    Charge,
    Claim,
    Kind,
    Situation,
    shares,
    split,
    unattributed,
)

ALICE, BOB = Account(Kind.USER, uid=1000), Account(Kind.USER, uid=1001)
MONITOR = Account(Kind.SERVICE, "dcgm.service")
JOB = Account(Kind.JOB, "7", uid=1000)

Figures = tuple[Account, Method, int, int, int]


def figures(charges: list[Charge]) -> list[Figures]:
    return [(one.account, one.method, one.active_uj, one.lower_uj, one.upper_uj) for one in charges]


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
    third = (2**62 - 1) // 3  # with more digits than a float has
    assert shares(2**62 - 1, [1, 2]) == [third, 2 * third]


def test_a_holder_is_charged_everything_that_its_gpu_draws() -> None:
    strangers = [Claim(BOB), Claim(MONITOR)]
    for idle in (False, True):
        situation = Situation([Claim(JOB)], strangers, listed=True, idle=idle, unknown="down")
        (charge,) = split(100, 5, situation)
        assert charge == Charge(JOB, Method.ALLOCATED, 100 * (not idle), 100 * idle, 100, 100, 5)


def test_holders_share_by_weight_and_nobody_knows_better() -> None:
    charges = split(101, 4, Situation([Claim(ALICE, 3), Claim(BOB, 1)]))
    by_weight = Method.WEIGHTS
    assert figures(charges) == [(ALICE, by_weight, 76, 0, 101), (BOB, by_weight, 25, 0, 101)]
    assert [one.ns for one in charges] == [3, 1]


def test_an_idle_gpu_is_shared_by_rule_without_doubt() -> None:
    first, second = split(100, 4, Situation([Claim(ALICE), Claim(BOB)], idle=True))
    assert first.idle_uj == first.lower_uj == first.upper_uj == 50
    assert first.active_uj == second.active_uj == 0


def test_processes_decide_where_nobody_holds_the_gpu() -> None:
    alone = split(100, 4, Situation(present=[Claim(ALICE), Claim(ALICE)], listed=True))
    assert figures(alone) == [(ALICE, Method.EXCLUSIVE, 100, 100, 100)]
    equal = split(100, 4, Situation(present=[Claim(ALICE), Claim(BOB)], listed=True))
    assert [one.method for one in equal] == [Method.EQUAL] * 2


def test_several_share_by_use_and_its_bounds_are_those_of_activity() -> None:
    present = [Claim(ALICE), Claim(BOB)]
    both = Situation(present=present, used=[Claim(ALICE, 30), Claim(ALICE, 45), Claim(BOB, 25)])
    by_use = Method.UTILIZATION
    assert figures(split(100, 4, both)) == [(ALICE, by_use, 75, 0, 100), (BOB, by_use, 25, 0, 100)]
    # Who used nothing while another did is charged nothing, and that is certain.
    alone = Situation(present=present, used=[Claim(ALICE, 1), Claim(MONITOR, 90)])
    found = figures(split(100, 4, alone))
    assert found == [(ALICE, by_use, 100, 100, 100), (BOB, by_use, 0, 0, 0)]
    nobody = Situation(present=present, used=[Claim(MONITOR, 90)])
    assert {one.method for one in split(100, 4, nobody)} == {Method.EQUAL}


def test_idle_power_is_shared_by_rule_and_the_rest_by_use() -> None:
    situation = Situation(
        present=[Claim(ALICE), Claim(BOB)], used=[Claim(ALICE, 100)], idle_uw=40_000_000
    )
    first, second = figures(split(200_000_000, 10**9, situation))
    assert first[2:] == (180_000_000,) * 3
    assert second[2:] == (20_000_000,) * 3
    (low, _) = split(30_000_000, 10**9, situation)
    assert low.active_uj == 15_000_000


def test_a_mig_instance_never_gets_the_whole_gpus_figure_as_its_own() -> None:
    """One instance of three slices is held, the other four slices by nobody."""
    holder = [Claim(JOB, 3, of=7)]
    job, rest = split(700, 7, Situation(holder))
    assert figures([job]) == [(JOB, Method.WEIGHTS, 300, 0, 700)]
    assert (rest.account, rest.idle_uj, rest.ns) == (IDLE, 400, 4)
    assert split(700, 7, Situation([Claim(JOB, 6, of=7)]))[1].idle_uj == 100
    # Measured, it is charged what is drawn beyond idle, and its slices' part of that.
    measured = Situation(holder, used=[Claim(JOB, 5)], idle_uw=210, unknown="down")
    job, rest = split(700, 10**9, measured)
    assert figures([job]) == [(JOB, Method.UTILIZATION, *(490 + 90,) * 3)]
    assert (rest.account, rest.idle_uj) == (IDLE, 120)


def test_instances_whose_use_is_not_known_share_by_size() -> None:
    situation = Situation(
        present=[Claim(ALICE), Claim(BOB)], slices=[Claim(ALICE, 1), Claim(BOB, 3)]
    )
    by_size = Method.SLICES
    found = figures(split(100, 4, situation))
    assert found == [(ALICE, by_size, 25, 0, 100), (BOB, by_size, 75, 0, 100)]


def test_every_method_says_what_its_bounds_are() -> None:
    assert {*BOUNDS} == {*Method}
    assert {one for one in Method if BOUNDS[one] is not ChargeBasis.EXACT} == {*REASONS}
    assert bounds_of([]) is bounds_of(["allocated", "exclusive", "none"]) is ChargeBasis.EXACT
    assert bounds_of(["allocated", "equal"]) is ChargeBasis.PRESENCE
    # True only if the driver's samples are complete, with any other methods in the sum.
    assert bounds_of(["weights", "utilization"]) is ChargeBasis.ACTIVITY
    assert bounds_of(["allocated", "of a later version"]) is ChargeBasis.ACTIVITY
    # By rule, and nobody's doing.
    assert bounds_of(["weights"], meet=True) is ChargeBasis.EXACT
    assert bounds_of(["weights", "utilization"], meet=True) is ChargeBasis.ACTIVITY
    assert reason_of(["allocated", "none"]) == ""
    assert reason_of(["weights", "utilization"]).count(";") == 1
    assert "," not in reason_of([one.value for one in Method])


def test_a_service_is_charged_only_if_it_is_alone() -> None:
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


uses = st.builds(Claim, st.sampled_from([ALICE, BOB, MONITOR, JOB]), st.integers(0, 100_000))
situations = st.builds(
    Situation,
    st.lists(
        st.builds(
            Claim,
            st.sampled_from([JOB, ALICE, BOB]),
            st.integers(0, 8),
            st.sampled_from([0, 0, 7]),
        ),
        max_size=4,
    ),
    st.lists(
        st.builds(Claim, st.sampled_from([ALICE, BOB, MONITOR]), st.integers(0, 1)), max_size=5
    ),
    st.lists(uses, max_size=4),
    st.lists(uses, max_size=4),
    st.integers(0, 2**40),
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

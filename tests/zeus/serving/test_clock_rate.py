"""The bound on changes of clocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zeus.serving.clock_margin import RateBound

CLOCKS = [1980, 1500, 1200, 900]


@settings(deadline=None)
@given(
    st.integers(2, 20),
    st.lists(st.tuples(st.floats(0, 3), st.sampled_from(CLOCKS)), max_size=200),
)
def test_the_bound_holds_and_the_highest_clock_is_always_in_reach(
    most: int, wishes: list[tuple[float, int]]
) -> None:
    bound = RateBound(1980, most)
    now, present = 0.0, 1980
    times: list[float] = []
    for passed, wanted in wishes:
        now += passed
        clock = bound.allowed(now, present, wanted)
        assert clock in (present, wanted, 1980)
        assert clock >= min(present, wanted)
        if wanted == 1980:
            assert clock == 1980, "what is wanted in need is never refused"
        if clock != present:
            bound.changed(now)
            times.append(now)
            present = clock
        assert sum(time > now - 60.0 for time in times) <= most


def test_changes_are_allowed_again_after_a_minute() -> None:
    bound = RateBound(1980, 2)
    assert bound.allowed(0.0, 1980, 900) == 900
    bound.changed(0.0)
    assert bound.allowed(1.0, 900, 1500) == 1980
    bound.changed(1.0)
    assert bound.allowed(2.0, 1980, 900) == 1980
    assert bound.allowed(62.0, 1980, 900) == 900

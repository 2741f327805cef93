"""The bound on changes of clocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus.serving import ClockPolicy, Queue, Step
from zeus.serving.clock_load import RateBound

CLOCKS = [1980, 1500, 1200, 900]
passed = st.one_of(st.floats(0, 3), st.sampled_from([-0.5, -100.0, 70.0]))


@settings(deadline=None)
@given(st.integers(2, 20), st.lists(st.tuples(passed, st.sampled_from(CLOCKS)), max_size=200))
def test_the_bound_holds_and_the_highest_clock_is_always_in_reach(
    most: int, wishes: list[tuple[float, int]]
) -> None:
    bound = RateBound(1980, most)
    now, elapsed, present = 0.0, 0.0, 1980
    times: list[float] = []
    for passed_s, wanted in wishes:
        now += passed_s
        elapsed += max(0.0, passed_s)
        clock = bound.allowed(now, present, wanted)
        assert clock in (present, wanted, 1980)
        assert clock >= min(present, wanted)
        if wanted == 1980:
            assert clock == 1980, "what is wanted in need is never refused"
        if clock != present:
            times.append(elapsed)
            present = clock
        assert sum(time > elapsed - 59.999 for time in times) <= most


def test_changes_are_allowed_again_after_a_minute() -> None:
    bound = RateBound(1980, 2)
    assert bound.allowed(0.0, 1980, 900) == 900
    assert bound.allowed(1.0, 900, 1500) == 1980
    assert bound.allowed(2.0, 1980, 900) == 1980
    assert bound.allowed(62.0, 1980, 900) == 900


@pytest.mark.parametrize("jump_s", [0.0, -5.0, -2000.0, 30.0])
def test_a_policy_keeps_the_bound_under_any_load_and_clock(jump_s: float) -> None:
    """Bursts five times a second, by a clock that jumps now and then."""
    policy = ClockPolicy(CLOCKS, 0.5, 0.025, stretch=dict.fromkeys(CLOCKS, 1.0))
    now, elapsed, present = 1e4, 0.0, 1980
    times: list[float] = []
    for number in range(40_000):
        jump = jump_s if number % 1000 == 999 else 0.0
        begin, now = now + jump, now + jump + 0.005
        burst = number % 40 == 39
        elapsed += max(0.0, now - (begin - jump))
        queue = Queue(1, 1, 0.45) if burst else Queue(0, 0, 0.0)
        clock = policy.step(Step(begin, now, 0, 8, 4000, present), queue)
        if clock != present:
            times.append(elapsed)
            present = clock
    assert present in CLOCKS
    assert len(times) >= 450, "the load asks for more than is allowed"
    for first, last in zip(times, times[200:], strict=False):
        assert last - first >= 59.999, "201 changes take more than a minute"

"""The power that a serving instance needs of a budget."""

from __future__ import annotations

import math

import pytest

from zeus.serving.clock_fleet import MARGIN, MORE, Needs, needed_w


def test_a_need_is_what_is_drawn_and_a_margin_unless_a_limit_cuts_it_off() -> None:
    assert needed_w([]) == 0
    assert needed_w([(100.0, 200.0), (140.0, 200.0)]) == pytest.approx(140 * MARGIN)
    assert needed_w([(199.0, 200.0)]) == pytest.approx(199 * MORE)


def test_a_need_that_is_granted_does_not_grow() -> None:
    """Under any limit, it settles above what the GPU would draw without one."""
    for wish in (90.0, 180.0, 240.0):
        need, limit = Needs([], 1.0), 100.0
        for second in range(60):
            need.seen(float(second), 0.0, needed_w([(min(wish, limit), limit)]))
            limit = min(250.0, max(100.0, need.power_w))
        assert limit > wish
        settled = limit
        for second in range(60, 2000):
            need.seen(float(second), 0.0, needed_w([(min(wish, limit), limit)]))
            limit = min(250.0, max(100.0, need.power_w))
            assert wish < limit <= settled


def test_needed_power_is_forgotten_after_some_minutes() -> None:
    needs = Needs([], 1.0)
    assert math.isnan(needs.power_w)
    needs.seen(0.0, 1980, 500.0)
    needs.seen(200.0, 1200, math.nan)
    assert (needs.clock_mhz, needs.power_w) == (1980, 500.0)
    needs.seen(400.0, 1300, 300.0)
    assert (needs.clock_mhz, needs.power_w) == (1980, 500.0)
    needs.seen(800.0, 1250, 280.0)
    assert (needs.clock_mhz, needs.power_w) == (1300, 300.0)

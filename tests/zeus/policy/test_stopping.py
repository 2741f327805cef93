"""What another epoch will take a run to."""

from __future__ import annotations

import pytest

from zeus.policy.stopping import Used, after_another_epoch


def test_another_epoch_is_as_those_before() -> None:
    assert after_another_epoch(Used(time=3.0, energy=300.0), 3) == (400.0, 4.0)
    assert after_another_epoch(Used(time=3.0, energy=300.0), 0) == (600.0, 6.0)


def test_the_cost_of_finding_the_limit_is_not_expected_again() -> None:
    used = Used(time=3.2, energy=330.0, overhead_time=0.2, overhead_energy=30.0)
    assert after_another_epoch(used, 3) == pytest.approx((430.0, 4.2))

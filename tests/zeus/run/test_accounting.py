"""What a run costs, and when it ends."""

from __future__ import annotations

import math

import pytest

from zeus.policy.stopping import Verdict
from zeus.run.accounting import Account, Epoch, Reading, Spent

ETA, MAX_POWER = 0.5, 100.0
"""An epoch of 100 J and 1 s costs 100 J."""
ONE = Epoch(Spent(100.0, 1.0), Spent(80.0, 0.8), 10, settled=True)
GO_ON, REACHED, NOT_REACHED = Verdict(False), Verdict(True, True), Verdict(True)


def account(epochs: int, cost_thresh: float = math.inf, max_epochs: int = 100) -> Account:
    made = Account(ETA, MAX_POWER, max_epochs, cost_thresh)
    made.epochs = [ONE] * epochs
    return made


def test_a_run_that_reached_its_target_is_reached_whatever_it_cost() -> None:
    assert account(5, cost_thresh=1.0).judge(True, False, None) == REACHED
    assert account(5, max_epochs=5).judge(True, False, None) == REACHED
    assert account(5, cost_thresh=1.0).result(REACHED, None).reached


def test_epochs_are_counted() -> None:
    assert account(4, max_epochs=5).judge(False, False, None) == GO_ON
    assert account(5, max_epochs=5).judge(False, False, None) == NOT_REACHED
    assert account(5, max_epochs=5).judge(False, True, None) == NOT_REACHED


def test_an_epoch_is_not_begun_that_would_cost_too_much() -> None:
    assert account(3, cost_thresh=400.1).judge(False, False, None) == GO_ON
    for thresh in (400.0, 350.0):
        verdict = account(3, cost_thresh=thresh).judge(False, False, None)
        assert verdict == Verdict(True, False, pytest.approx(400.0))
    result = account(3, cost_thresh=350.0).result(verdict, None)
    assert result.model_dump() == {
        "energy": 300.0,
        "time": 3.0,
        "cost": 300.0,
        "num_epochs": 3,
        "reached": False,
        "overhead": 0.0,
        "stopped_by_cost": True,
        "stopped_by_curve": False,
        "next_cost": 400.0,
        "max_power": MAX_POWER,
    }
    assert account(10_000).judge(False, False, None).stop  # by epochs
    assert account(99, cost_thresh=math.inf).judge(False, False, None) == GO_ON


def test_no_cost_interrupts_profiling() -> None:
    assert account(3, cost_thresh=10.0).judge(False, True, None) == GO_ON


def test_the_next_epoch_is_predicted_at_the_limit_it_will_have() -> None:
    made = Account(ETA, MAX_POWER, 100, math.inf)
    assert made.next_epoch(None) is None
    made.epochs.append(Epoch(Spent(500.0, 5.0), Spent(400.0, 4.0), 10, settled=False))
    # Ten iterations at 20 a second and 60 W, and what the epoch had besides training.
    assert made.next_epoch(Reading(60.0, 20.0)) == Spent(100.0 + 30.0, 1.0 + 0.5)
    assert made.next_epoch(None) == Spent(500.0, 5.0)
    made.epochs.append(ONE)
    assert made.next_epoch(Reading(60.0, 20.0)) == ONE.total


def test_what_finding_the_limit_cost_is_told_apart() -> None:
    made = Account(ETA, MAX_POWER, 100, math.inf)
    made.epochs = [Epoch(Spent(130.0, 1.2), Spent(110.0, 1.0), 10, settled=False), ONE, ONE]
    # 0.5 * 130 + 0.5 * 100 * 1.2 = 125 J instead of 100.
    assert made.result(REACHED, None).overhead == pytest.approx(25.0)
    made.epochs[0] = Epoch(Spent(90.0, 0.9), Spent(), 10, settled=False)
    assert made.result(REACHED, None).overhead == 0.0
    assert account(3).result(REACHED, None).overhead == 0.0

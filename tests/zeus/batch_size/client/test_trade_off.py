"""Runs whose eta follows a signal or a deadline, with a file that keeps their trials."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.zeus.batch_size.client.conftest import Optimize
from tests.zeus.batch_size.client.fakes import Between, FakeMonitor, epochs
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError
from zeus.policy.signal import eta_of


def dear_now(path: Path) -> str:
    """A file by which this hour and its neighbors are expensive, so that none ends meanwhile."""
    hour = datetime.now(timezone.utc).hour
    dear = {(hour + n) % 24 for n in (-1, 0, 1)}
    rows = (f"{n:02}:00+00:00,{4 if n in dear else 1}" for n in range(24))
    path.write_text("\n".join(rows))
    return str(path)


def test_a_run_says_its_eta_and_is_judged_with_it_also_while_nobody_answers(
    optimize: Optimize, monitor: FakeMonitor, kept: Between, tmp_path: Path
) -> None:
    follows = {"eta_knob": 0.5, "signal": dear_now(tmp_path / "price.csv")}
    eta = eta_of(0.5, 4 * 24 / 33)
    for _ in range(2):
        optimizer = optimize(**follows)
        assert optimizer.eta_knob == 0.5
        optimizer.get_batch_size()
        assert optimizer.eta_knob == pytest.approx(eta)
        with optimizer:
            assert epochs(optimizer, monitor, 0.1, 0.9) == 2
        assert optimizer.converged
    assert [trial.eta_knob for trial in kept.trials()] == pytest.approx([eta, eta])
    optimizer = optimize(**follows)
    optimizer.get_batch_size()
    kept.away()
    bound = kept.trials()[-1].cost_bound or 0.0
    with optimizer:  # of time nothing is used, so an epoch costs eta times its energy
        for share in (0.3, 0.6):
            monitor.use(0.0, 0.3 * bound / eta)
            optimizer.on_evaluate(0.1)
            assert not optimizer.training_finished, share
        monitor.use(0.0, 0.3 * bound / eta)
        optimizer.on_evaluate(0.1)
    assert optimizer.training_finished
    assert not optimizer.converged


def test_a_run_whose_trial_nobody_keeps_has_the_jobs_eta(
    optimize: Optimize, kept: Between, tmp_path: Path
) -> None:
    optimizer = optimize(eta_knob=0.5, signal=dear_now(tmp_path / "price.csv"))
    kept.away()
    optimizer.get_batch_size()
    assert (optimizer.trial_number, optimizer.eta_knob) == (None, 0.5)


def test_a_signal_that_cannot_be_read_is_reported_before_training(optimize: Optimize) -> None:
    with pytest.raises(ZeusBSORuntimeError, match=r"the signal cannot be read: .*nowhere"):
        optimize(signal="/nowhere/price.csv")


def test_a_deadline_begins_with_time_alone(optimize: Optimize, monitor: FakeMonitor) -> None:
    optimizer = optimize(done_by="08:00")
    optimizer.get_batch_size()
    assert optimizer.eta_knob == 0.0

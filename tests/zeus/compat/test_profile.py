"""Energy of an iteration from trials that begin with a GPU that has cooled down."""

from __future__ import annotations

import types

import pytest

from tests.zeus.node import VirtualNode
from zeus import profile
from zeus.profile import (
    measure,
    profile_cooldown_duration,
    profile_measurement_duration,
    profile_parameters,
)
from zeusd.devices.simulated import Work


@pytest.fixture
def slept(node: VirtualNode, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long trials wait, in the node's time."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        node.clock.sleep(seconds)

    time = types.SimpleNamespace(sleep=sleep, monotonic=lambda: node.clock() / 1e9)
    monkeypatch.setattr(profile, "time", time)
    return slept


def test_a_trial_measures_an_iteration(node: VirtualNode, work: Work, slept: list[float]) -> None:
    calls = 0

    def iteration() -> None:
        nonlocal calls
        calls += 1
        work.run(1)
        work.wait()

    trial = measure(
        iteration,
        node.monitor(),
        measurement_duration=2.0,
        cooldown_duration=7.0,
        num_warmup_iterations=3,
        num_calibration_iterations=10,
    )
    assert slept == [7.0]
    assert trial.iterations in (20, 21)  # of 0.1 s, or a rounding error more
    assert calls == 3 + 10 + 3 + trial.iterations
    assert trial.time_per_iter == pytest.approx(0.1, rel=0.05)
    assert trial.energy_per_iter == pytest.approx(24, rel=0.1)
    assert trial.total_energy == pytest.approx(trial.iterations * trial.energy_per_iter)
    assert 20 <= trial.temperature_before <= trial.temperature_after < 90
    with pytest.raises(ValueError, match="must not be negative"):
        measure(iteration, node.monitor(), 1.0, 0.0, warmup_settle_duration=-1.0)
    with pytest.raises(ValueError, match="at least 1"):
        measure(iteration, node.monitor(), 1.0, 0.0, num_calibration_iterations=0)


def test_sweeps_hold_the_other_duration_at_its_most(
    node: VirtualNode, work: Work, slept: list[float]
) -> None:
    few = {"num_trials": 2, "num_warmup_trials": 1, "num_calibration_iterations": 5}

    def iteration() -> None:
        work.run(1)
        work.wait()

    measured, waited = profile_parameters(
        iteration, node.monitor(), [1.0, 2.0], [0.5, 3.0], trial_stddev_threshold=100.0, **few
    )
    assert measured.sweep_param == ("measurement_duration", [1.0, 2.0])
    assert measured.fixed_param == ("cooldown_duration", 3.0)
    assert waited.sweep_param == ("cooldown_duration", [0.5, 3.0])
    assert waited.fixed_param == ("measurement_duration", 2.0)
    assert slept == [3.0] * 4 + [0.5] * 2 + [3.0] * 2  # warming up does not wait
    for entry in (*measured.entries, *waited.entries):
        assert len(entry.trials) == 2
        assert entry.is_valid
        assert entry.energy_mean == pytest.approx(24, rel=0.1)
    assert str(measured).splitlines()[0] == "measurement_duration, with cooldown_duration 3.0 s:"
    assert "valid" in str(measured.entries[0])
    strict = profile_measurement_duration(
        iteration, node.monitor(), [1.0], 0.5, trial_stddev_threshold=0.0, **few
    )
    assert not strict.entries[0].is_valid
    strict = profile_cooldown_duration(
        iteration, node.monitor(), [0.5], 1.0, trial_stddev_threshold=0.0, **few
    )
    assert strict.entries[0].cooldown_duration == 0.5

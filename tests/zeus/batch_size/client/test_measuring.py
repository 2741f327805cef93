"""The cost of a run, by the monitor of a simulated node, also during a power limit search."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zeus.batch_size.client.conftest import Optimize
from tests.zeus.batch_size.client.fakes import Between
from tests.zeus.node import VirtualNode
from zeus.callback import CallbackSet
from zeus.optimizer.power_limit import Done, GlobalPowerLimitOptimizer, ZeusCost
from zeus.utils.metric import zeus_cost
from zeusd.devices.simulated import Work


def test_the_cost_is_what_the_monitors_windows_measure(
    begin: Optimize, kept: Between, node: VirtualNode, work: Work
) -> None:
    monitor = node.monitor()
    optimizer = begin(like=monitor)
    registered = optimizer.job.model_dump()
    assert (registered["max_power"], registered["number_of_gpus"]) == (250, 1)
    work.run(5)
    time_s = energy_j = 0.0
    with optimizer:
        for _ in range(3):
            with monitor.window("epoch") as window:
                work.run(20)
                node.clock.sleep(1)  # an evaluation belongs to it
            optimizer.on_evaluate(0.1)
            time_s, energy_j = time_s + window.time, energy_j + window.total_energy
            node.clock.sleep(0)
    (trial,) = kept.trials()
    assert trial.time == pytest.approx(time_s, rel=0.02)
    assert trial.energy == pytest.approx(energy_j, rel=0.02)
    assert trial.overhead_time == trial.overhead_energy == 0


def test_the_power_limit_search_counts_as_overhead(
    optimize: Optimize, kept: Between, node: VirtualNode, work: Work, tmp_path: Path
) -> None:
    def run(profile: Path) -> tuple[float, float]:
        """Costs of what is said to be overhead, and of what four epochs take beyond four of the
        last, with eta 0.5."""
        monitor = node.monitor()
        search = GlobalPowerLimitOptimizer(
            monitor, ZeusCost(0.5), 1, 5, 20, 50, profile, search="exhaustive"
        )
        optimizer = optimize(like=monitor)
        optimizer.power_limit_optimizer = search
        optimizer.get_batch_size()
        both = CallbackSet([search, optimizer])
        seen = []
        with both:
            for _ in range(4):
                for _ in both.steps(range(100)):
                    work.run(1)
                both.on_evaluate(0.1)
                trial = kept.trials()[-1]
                seen.append((trial.time, trial.energy))
            assert isinstance(search.state, Done)
        beyond = [seen[3][n] - 4 * (seen[3][n] - seen[2][n]) for n in range(2)]
        said = trial.overhead_time, trial.overhead_energy
        assert all(0 <= part < whole for part, whole in zip(said, seen[3], strict=True))
        return zeus_cost(said[1], said[0], 0.5, 250), zeus_cost(beyond[1], beyond[0], 0.5, 250)

    profile = tmp_path / "profile.json"
    said, beyond = run(profile)
    assert 0.5 * beyond < said < 1.2 * beyond  # steps that were cut short are not in it
    assert beyond > 100
    assert run(profile)[0] == 0  # the next run has the choice from the file


def test_no_cost_stops_a_run_while_a_limit_is_searched_for(
    optimize: Optimize, begin: Optimize, kept: Between, node: VirtualNode, work: Work
) -> None:
    monitor = node.monitor()
    with begin(like=monitor) as cheap:
        work.run(1)
        cheap.on_evaluate(0.9)
    search = GlobalPowerLimitOptimizer(monitor, ZeusCost(0.5), 1, 5, 20, 50, search="exhaustive")
    optimizer = optimize(like=monitor)
    optimizer.power_limit_optimizer = search
    optimizer.get_batch_size()
    assert kept.trials()[-1].cost_bound is not None
    both = CallbackSet([search, optimizer])
    epochs = 0
    with both:
        while not optimizer.training_finished:
            epochs += 1
            before = isinstance(search.state, Done)
            for _ in both.steps(range(50)):
                work.run(1)
            both.on_evaluate(0.1)
    assert not before  # it went on until the limit was found, and not further
    assert epochs > 1
    assert kept.trials()[-1].stopped_by_cost

"""A run from `get_batch_size` to its end, with trials that someone keeps."""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import Any

import pytest

from tests.zeus.batch_size.client.conftest import Optimize
from tests.zeus.batch_size.client.fakes import JOB_ID, Between, FakeMonitor, epochs, job
from zeus.callback import CallbackSet
from zeus.optimizer import BatchSizeOptimizer
from zeus.optimizer.batch_size.exceptions import (
    ZeusBSOBadOperationError,
    ZeusBSOConfigError,
    ZeusBSOOperationOrderError,
    ZeusBSORuntimeError,
    ZeusBSORuntimError,
    ZeusBSOTrainFailError,
)

# -------------------------------------------------------------------------------- the usual course


def test_a_run_that_reaches_its_target(
    optimize: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    optimizer = optimize()
    assert (optimizer.current_batch_size, optimizer.trial_number) == (0, None)
    size = optimizer.get_batch_size()
    assert size == optimizer.get_batch_size() == optimizer.current_batch_size == 64
    monitor.use(100, 100)  # before training begins: not the run's
    optimizer.on_train_begin()
    monitor.use(2, 300)
    optimizer.on_evaluate(0.2)
    assert (optimizer.training_finished, optimizer.cur_epoch) == (False, 1)
    monitor.use(3, 400)
    optimizer.on_evaluate(0.5)
    assert optimizer.training_finished
    assert optimizer.converged
    monitor.use(50, 50)
    optimizer.on_evaluate(0.1)  # a loop that does not stop at once
    optimizer.on_train_end()
    assert optimizer.get_batch_size() == 64
    assert optimizer.cur_epoch == 2
    (trial,) = kept.trials()
    assert (trial.status, trial.converged, trial.epochs) == ("ok", True, 2)
    assert (trial.time, trial.energy, trial.metric) == (5, 700, 0.5)
    assert not monitor.measurement_states
    assert kept.asked == ["register", "begin_trial", "report", "report"]
    assert kept.open == 0


def test_waiting_for_the_trials_store_does_not_count(
    begin: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    optimizer = begin()
    link = optimizer._run._link
    send = link.report

    def slowly(result: Any) -> Any:
        monitor.use(60, 5000)
        return send(result)

    link.report = slowly
    with optimizer:
        epochs(optimizer, monitor, 0.1, 0.2, 0.9)
    (trial,) = kept.trials()
    assert (trial.time, trial.energy) == (6, 300)


def test_a_run_stops_before_it_spends_more_than_its_bound(
    begin: Optimize, monitor: FakeMonitor, kept: Between, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with begin() as optimizer:
            assert epochs(optimizer, monitor, 0.1, 0.9, 0.9) == 2
    optimizer = begin()
    bound = kept.trials()[-1].cost_bound
    assert bound is not None
    with optimizer:
        trained = epochs(optimizer, monitor, *[0.1] * 10, joules=bound * 0.3)
    assert trained == 3  # 90 %: another would be too much
    assert not optimizer.converged
    trial = kept.trials()[-1]
    assert (trial.status, trial.stopped_by_cost) == ("ok", True)
    assert "would have cost" in caplog.text


def test_raise_on_failure_reports_a_failure_by_an_error(
    begin: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    optimizer = begin(max_epochs=2, raise_on_failure=True)
    with pytest.raises(ZeusBSOTrainFailError, match=r"64 is given up: .*max_epochs 2"):
        with optimizer:
            epochs(optimizer, monitor, 0.1, 0.1)
    assert kept.trials()[0].status == "ok"  # it is no crash


# ------------------------------------------------------------------------------------- mistakes


def test_calls_out_of_order(optimize: Optimize) -> None:
    optimizer = optimize()
    with pytest.raises(ZeusBSOOperationOrderError, match="get_batch_size before on_train_begin"):
        optimizer.on_train_begin()
    with pytest.raises(ZeusBSOOperationOrderError, match="get_batch_size before on_evaluate"):
        optimizer.on_evaluate(0.1)
    optimizer.get_batch_size()
    with pytest.raises(ZeusBSOOperationOrderError, match="on_train_begin"):
        optimizer.on_evaluate(0.1)
    optimizer.on_train_end()


def test_other_ranks_get_the_answer_from_rank_0(
    optimize: Optimize, kept: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    for optimizer in (optimize(rank=1), optimize()):
        with pytest.raises(ZeusBSOBadOperationError, match=r"rank 0.*all_reduce"):
            optimizer.get_batch_size()
        with optimizer:  # and all else may be called
            for _ in optimizer.steps(range(3)):
                pass
            optimizer.on_evaluate(0.9)
        assert not optimizer.training_finished
    assert kept.asked == []
    assert optimize(rank=0).get_batch_size() == 64


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"store": None}, "either server_url"),
        ({"server_url": "http://here:1"}, "either server_url"),
        ({"server_url": "here:1", "store": None}, "such as http://"),
        ({"run_id": ""}, "run_id"),
        ({"run_id": "a\nb"}, "run_id"),
        ({"run_id": "x" * 181}, "1 to 180"),
        ({"like": FakeMonitor("Tesla V100", "A40")}, r"several models \(A40, Tesla V100\)"),
    ],
)
def test_arguments_that_cannot_work_are_reported_at_once(
    optimize: Optimize, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ZeusBSOConfigError, match=says):
        optimize(**options)


def test_a_job_has_to_be_given(monitor: Any) -> None:
    with pytest.raises(ZeusBSOConfigError, match="JobSpec"):
        BatchSizeOptimizer(monitor, "http://here:1")


@pytest.mark.parametrize(
    ("package", "module", "options", "extra"),
    [
        ("httpx", "http", {"server_url": "http://here:1", "store": None}, r"zeusd\[bso\]"),
        ("sqlalchemy", "database", {}, r"zeusd\[bso-server\]"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    optimize: Optimize,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    module: str,
    options: dict[str, Any],
    extra: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in (module, "store"):
        monkeypatch.delitem(sys.modules, f"zeus.optimizer.batch_size.{name}", raising=False)
    with pytest.raises(ImportError, match=extra):
        optimize(**options)


def test_a_gpu_without_a_limit_has_no_cost(optimize: Optimize, monitor: FakeMonitor) -> None:
    monitor.gpus[0].info.power_limit_max_mw = None
    with pytest.raises(ZeusBSOConfigError, match="Tesla V100 has no power limit"):
        optimize()


def test_a_job_that_is_registered_otherwise_is_refused(optimize: Optimize, kept: Between) -> None:
    optimize()
    with pytest.raises(ZeusBSORuntimError, match="target_metric") as refused:
        optimize(target_metric=0.6)
    assert refused.value.status == 409
    assert kept.open == 1  # the first one's


def test_jobs_know_what_they_train_on(optimize: Optimize) -> None:
    optimizer = optimize(like=FakeMonitor("A40", "A40"))
    registered = optimizer.job.model_dump()
    assert registered["gpu_model"] == "A40"
    assert (registered["number_of_gpus"], registered["max_power"]) == (2, 500)


def test_a_job_without_a_name_is_given_one(
    optimize: Optimize, kept: Between, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = optimize(job_id=None), optimize(job_id=None, job_id_prefix="x" * 400)
    assert first.job.job_id is not None
    assert first.job.job_id.startswith("cifar-")
    assert f"JobSpec(job_id='{first.job.job_id}')" in caplog.text
    assert second.job.job_id is not None
    assert len(second.job.job_id) == 400
    assert second.get_batch_size() == 64
    second.on_train_end()


# -------------------------------------------------------------------------------------- metrics


class Tensor:
    """As torch's and NumPy's scalars are."""

    def __float__(self) -> float:
        return 0.75


@pytest.mark.parametrize("metric", [math.nan, math.inf, -math.inf, None, "good"])
def test_a_metric_that_is_not_finite_does_not_reach_the_target(
    begin: Optimize,
    monitor: FakeMonitor,
    kept: Between,
    caplog: pytest.LogCaptureFixture,
    metric: Any,
) -> None:
    with begin() as optimizer:
        epochs(optimizer, monitor, metric, metric)
        assert not optimizer.training_finished
        assert kept.trials()[0].epochs == 2
        assert kept.trials()[0].metric is None
        assert caplog.text.count("not a finite number") == 1
        epochs(optimizer, monitor, Tensor())
    assert optimizer.converged


# --------------------------------------------------------------------------------------- epochs


def test_epochs_without_an_evaluation_count(
    begin: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    optimizer = begin(max_epochs=5)
    seen = []
    with optimizer:
        for epoch in range(1, 6):
            for _ in optimizer.steps(range(2)):
                monitor.use(1, 50)
            if epoch == 3:
                optimizer.on_evaluate(0.1)
            assert not optimizer.training_finished
            seen.append((kept.trials()[0].epochs, kept.trials()[0].energy))
    # An epoch that nobody evaluates is reported when the next begins, and the last at the end.
    assert seen == [(0, 0), (1, 100), (3, 300), (3, 300), (4, 400)]
    assert optimizer.training_finished
    (trial,) = kept.trials()
    assert (trial.status, trial.converged, trial.epochs, trial.energy) == ("ok", False, 5, 500)


def test_epochs_may_be_reported_by_their_ends_only(
    begin: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    with begin() as optimizer:
        for _ in range(3):
            optimizer.on_epoch_end()
        optimizer.on_evaluate(0.1)
        assert kept.trials()[0].epochs == 3


def test_evaluations_within_an_epoch(begin: Optimize, monitor: FakeMonitor, kept: Between) -> None:
    with begin() as optimizer:
        for _ in range(2):
            for step in optimizer.steps(range(4)):
                monitor.use(1, 50)
                if step % 2:
                    optimizer.on_evaluate(0.1)
        assert kept.trials()[0].epochs == 2
        assert kept.trials()[0].energy == 400
        optimizer.on_evaluate(0.9)
    assert kept.trials()[0].converged


# ------------------------------------------------------------------------------------- restarts


def stopped(optimizer: BatchSizeOptimizer, monitor: FakeMonitor, *metrics: float) -> None:
    """Trains a number of epochs; then the process is terminated."""
    optimizer.get_batch_size()
    with pytest.raises(KeyboardInterrupt), optimizer:
        epochs(optimizer, monitor, *metrics)
        monitor.use(1, 50)
        raise KeyboardInterrupt


def test_a_run_that_was_stopped_continues(
    optimize: Optimize,
    begin: Optimize,
    monitor: FakeMonitor,
    kept: Between,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = optimize(run_id="slurm-17")
    stopped(first, monitor, 0.1, 0.2)
    assert kept.trials()[0].running
    assert "goes on from there" in caplog.text
    other = optimize(run_id="slurm-18")
    assert other.get_batch_size() != 0
    assert other.trial_number == 2
    other.on_train_end()

    monkeypatch.setenv("ZEUS_BSO_RUN_ID", "slurm-17")
    again = optimize()
    assert again.get_batch_size() == first.current_batch_size
    assert (again.trial_number, again.cur_epoch) == (1, 2)
    with again:
        epochs(again, monitor, 0.3, 0.9)
    trial = kept.trials()[0]
    assert (trial.status, trial.epochs, trial.time, trial.energy) == ("ok", 4, 8, 400)

    # The same name once more: that trial has ended, so this is another run.
    third = begin()
    assert (third.trial_number, third.cur_epoch) == (3, 0)
    stopped(third, monitor, 0.1)
    fourth = begin()
    assert (fourth.trial_number, fourth.cur_epoch) == (3, 1)
    fourth.on_train_end()


def test_a_run_that_crashed_has_ended_under_any_name(
    begin: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    optimizer = begin(run_id="a")
    with pytest.raises(ZeroDivisionError), optimizer:
        epochs(optimizer, monitor, 0.1)
        raise ZeroDivisionError
    assert kept.trials()[0].status == "failed"
    again = begin(run_id="a")
    assert (again.trial_number, again.cur_epoch) == (2, 0)


# ----------------------------------------------------------------------------------------- ends


class OutOfMemoryError(RuntimeError):
    """As torch's."""


@pytest.mark.parametrize("in_set", [False, True])
def test_a_size_for_which_memory_does_not_suffice_is_not_tried_again(
    optimize: Optimize, kept: Between, in_set: bool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = optimize()
    assert optimizer.get_batch_size() == 64
    with pytest.raises(OutOfMemoryError):
        with CallbackSet([optimizer]) if in_set else optimizer:
            raise OutOfMemoryError("CUDA out of memory")
    assert kept.trials()[0].status == "oom"
    assert "64 and larger ones will not" in caplog.text
    # The same process may try the next size at once.
    assert optimizer.get_batch_size() == 32
    assert optimizer.trial_number == 2
    assert not optimizer.training_finished
    optimizer.on_train_end()


def test_a_crash_counts_once_and_a_retry_after_it_does_not(
    begin: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    optimizer = begin()
    try:
        with optimizer:
            raise ZeroDivisionError
    except ZeroDivisionError:
        optimizer.get_batch_size()
        with optimizer:  # within the except clause
            epochs(optimizer, monitor, 0.1)
    assert [trial.status for trial in kept.trials()] == ["failed", "cancelled"]


def test_a_run_that_ends_early_gives_no_information(
    begin: Optimize, monitor: FakeMonitor, kept: Between, caplog: pytest.LogCaptureFixture
) -> None:
    with begin() as optimizer:
        epochs(optimizer, monitor, 0.1, 0.2)
    assert kept.trials()[0].status == "cancelled"
    assert "after 2 epochs, before its target or max_epochs 10" in caplog.text
    assert not monitor.measurement_states


def test_a_child_of_fork_does_not_affect_the_run(
    begin: Optimize, kept: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = begin()
    optimizer.on_train_begin()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        optimizer.on_epoch_end()
        optimizer.on_epoch_begin()
        optimizer.on_evaluate(0.9)
        optimizer.on_train_end()
    assert kept.trials()[0].running
    assert kept.trials()[0].epochs == 0


# ------------------------------------------------------------------------------------ measuring


def test_an_energy_that_is_known_later_is_reported_later(
    begin: Optimize, monitor: FakeMonitor, kept: Between, caplog: pytest.LogCaptureFixture
) -> None:
    with begin() as optimizer:
        monitor.gone = True
        epochs(optimizer, monitor, 0.1, 0.1)
        assert kept.trials()[0].epochs == 0
        assert caplog.text.count("not known yet (zeusd is away; start it)") == 1
        monitor.gone = False
        epochs(optimizer, monitor, 0.9)
    trial = kept.trials()[0]
    assert (trial.converged, trial.epochs, trial.time, trial.energy) == (True, 3, 6, 300)


@pytest.mark.parametrize("joules", [100.0, math.nan])
def test_a_run_whose_energy_stays_unknown_does_not_count(
    begin: Optimize,
    monitor: FakeMonitor,
    kept: Between,
    caplog: pytest.LogCaptureFixture,
    joules: float,
) -> None:
    with begin() as optimizer:
        monitor.gone = not math.isnan(joules)
        assert (
            epochs(optimizer, monitor, 0.1, 0.9, 0.9, joules=joules) == 2
        )  # its target is known, though
    assert optimizer.converged
    assert kept.trials()[0].status == "cancelled"
    assert "so the run does not count" in caplog.text


def test_windows_that_someone_closed(
    begin: Optimize, monitor: FakeMonitor, kept: Between, caplog: pytest.LogCaptureFixture
) -> None:
    with begin(max_epochs=3) as optimizer:
        epochs(optimizer, monitor, 0.1)
        monitor.measurement_states.clear()
        assert epochs(optimizer, monitor, 0.1, 0.1, 0.1) == 2
    assert optimizer.training_finished
    assert kept.trials()[0].status == "cancelled"
    assert caplog.text.count("cannot be measured") == 1


class Broken:
    """A metric on a GPU that has failed."""

    def __float__(self) -> float:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("metric", "more"), [(0.1, 3), (Broken(), 4)], ids=["the monitor", "a metric"]
)
def test_internal_errors_do_not_end_training(
    begin: Optimize,
    monitor: FakeMonitor,
    kept: Between,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    metric: Any,
    more: int,
) -> None:
    caplog.set_level(logging.WARNING)
    with begin(max_epochs=4) as optimizer:
        epochs(optimizer, monitor, 0.1)
        if metric == 0.1:
            monkeypatch.setattr(monitor, "end_window", lambda *args, **more: 1 / 0)
        assert epochs(optimizer, monitor, *[metric] * 9) == more  # no loop without an end
        assert (optimizer.cur_epoch, optimizer.training_finished) == (4, True)
    assert caplog.text.count("Please report this") == 1
    assert "ZeroDivisionError" in caplog.text
    assert kept.trials()[0].status == "cancelled"


def test_a_deleted_job_is_registered_again(optimize: Optimize, kept: Between) -> None:
    optimizer = optimize()
    store = kept.store()
    store.delete(JOB_ID)
    store.close()
    assert optimizer.get_batch_size() == 64
    assert kept.trials()[0].running
    optimizer.on_train_end()


def test_no_size_is_left(
    optimize: Optimize, begin: Optimize, kept: Between, caplog: pytest.LogCaptureFixture
) -> None:
    only = {"batch_sizes": [64], "job_id": "cifar-one"}
    optimizer = begin(**only)
    with pytest.raises(OutOfMemoryError), optimizer:
        raise OutOfMemoryError
    assert optimize(**only).get_batch_size() == 64  # a run is not ours to forbid
    assert "no batch size of job cifar-one is left" in caplog.text
    assert "does not count" in caplog.text
    with pytest.raises(ZeusBSORuntimeError, match="is left"):
        optimize(**only, raise_on_failure=True).get_batch_size()
    assert len(kept.trials("cifar-one")) == 1
    assert job(**only).default_batch_size == 64


def test_another_range_of_power_limits_is_another_job_of_the_family(
    optimize: Optimize, monitor: FakeMonitor, kept: Between
) -> None:
    for range_mw, name in (
        ((100_000, 250_000), JOB_ID),
        ((100_000, 180_000), f"{JOB_ID} on 1 x Tesla V100, 100 to 180 W"),
        ((100_000, 250_000), JOB_ID),
    ):
        monitor.range_mw = range_mw
        optimizer = optimize(family="cifar")
        assert optimizer.job.job_id == name
        optimizer.get_batch_size()
        with optimizer:
            assert epochs(optimizer, monitor, 0.1, 0.9) == 2
        assert kept.trials(name)[-1].converged
    assert [len(kept.trials(name)) for name in (JOB_ID, optimizer.job.job_id)] == [2, 2]
    monitor.range_mw = 100_000, 180_000
    assert optimize(job_id="cifar-alone").job.model_dump()["power_limits"] is None

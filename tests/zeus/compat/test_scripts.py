"""The calls of ml-energy/zeus's example scripts, in their order, with tiny work.

Its data parallel, Hugging Face, pipeline, trace-driven and ZeusMaster scripts have counterparts in
examples/, which tests/examples starts with the published command lines.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import RunningDaemon, running_daemon
from tests.zeus.batch_size.server.running import RunningServer, running_server
from tests.zeus.node import VirtualNode
from zeusd.devices.simulated import Work

STEPS = 400
EPOCHS = 4


@pytest.fixture(autouse=True)
def virtual_monitors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Monitors that the scripts make count the node's time."""
    if "node" in request.fixturenames:
        node = request.getfixturevalue("node")
        monkeypatch.setattr("zeus.monitor.ZeusMonitor", node.monitor)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, f"sqlite:///{folder}/bso.sqlite") as running:
        yield running


@pytest.mark.parametrize("release", ["0.8.2", "0.16"])
def test_imagenet_on_one_gpu(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    if release == "0.8.2":
        from zeus.util.env import get_env

        from zeus.monitor import ZeusMonitor
        from zeus.optimizer import GlobalPowerLimitOptimizer
        from zeus.optimizer.power_limit import MaxSlowdownConstraint
    else:
        from zeus.utils.env import get_env

        from zeus.monitor import ZeusMonitor
        from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer, MaxSlowdownConstraint

    monkeypatch.setenv("ZEUS_MAX_SLOWDOWN", "1.2")
    monitor = ZeusMonitor(gpu_indices=[0])
    plo = GlobalPowerLimitOptimizer(
        monitor=monitor,
        optimum_selector=MaxSlowdownConstraint(factor=get_env("ZEUS_MAX_SLOWDOWN", float, 1.1)),
        warmup_steps=10,
        profile_steps=40,
        pl_step=25,
    )
    for _ in range(EPOCHS):
        plo.on_epoch_begin()
        for _ in range(STEPS):
            plo.on_step_begin()
            work.run(1)
            plo.on_step_end()
        plo.on_epoch_end()
        node.clock.sleep(20)  # validate
        plo.on_evaluate(0.5)
    assert type(plo.state).__name__ == "Done"
    assert node.limit_w() < 250
    plo.close()


def test_fsdp_with_long_profiles(node: VirtualNode, work: Work) -> None:
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

    monitor = ZeusMonitor(gpu_indices=[0])
    plo = GlobalPowerLimitOptimizer(monitor, profile_steps=200)
    for _ in range(EPOCHS):
        plo.on_epoch_begin()
        for _ in range(STEPS):
            plo.on_step_begin()
            work.run(1)
            plo.on_step_end()
        plo.on_epoch_end()
    assert not plo.disabled
    plo.close()


def train_mnist(
    node: VirtualNode, work: Work, monitor: Any, callbacks: Any, bso: Any, rank: int = 0
) -> int:
    """Three epochs reach the target. Returns how many were trained."""
    callbacks.on_train_begin()
    for epoch in range(1, 11):
        callbacks.on_epoch_begin()
        for _ in range(20):
            callbacks.on_step_begin()
            work.run(1)
            callbacks.on_step_end()
        callbacks.on_epoch_end()
        node.clock.sleep(5)  # test
        callbacks.on_evaluate(0.3 * epoch)
        if rank == 0 and bso.training_finished:
            return epoch
    return 10


def test_mnist_finds_its_batch_size(
    node: VirtualNode, work: Work, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_SERVER_URL", server.url)
    from zeus.utils.lr_scaler import LinearScaler

    from zeus.callback import CallbackSet
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

    monitor = ZeusMonitor(gpu_indices=[0])
    plo = GlobalPowerLimitOptimizer(monitor)
    bso = BatchSizeOptimizer(
        monitor=monitor,
        server_url=os.environ["ZEUS_SERVER_URL"],
        job=JobSpec(
            job_id=os.environ.get("ZEUS_JOB_ID", None),
            job_id_prefix="mnist-dev",
            default_batch_size=256,
            batch_sizes=[32, 64, 256, 512, 1024, 4096, 2048],
            max_epochs=10,
            target_metric=0.8,
        ),
    )
    batch_size = bso.get_batch_size()
    assert batch_size == 256
    assert LinearScaler(bs=64, lr=0.01).compute_lr(new_bs=batch_size) == pytest.approx(0.04)
    assert train_mnist(node, work, monitor, CallbackSet([plo, bso]), bso) == 3
    assert bso.converged
    plo.close()


def test_mnist_on_several_ranks(node: VirtualNode, work: Work, server: RunningServer) -> None:
    from zeus.callback import Callback, CallbackSet
    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

    monitor = ZeusMonitor(gpu_indices=None)
    job = JobSpec(
        job_id="mnist-dp",
        job_id_prefix="mnist",
        default_batch_size=64,
        batch_sizes=[32, 64, 128],
        max_epochs=10,
        target_metric=0.8,
    )
    ranks = [BatchSizeOptimizer(monitor, server.url, job, rank=rank) for rank in range(2)]
    first: list[Callback] = [GlobalPowerLimitOptimizer(monitor), ranks[0]]
    told = [ranks[0].get_batch_size(), ranks[0].trial_number]
    assert told == [64, 1]
    for bso in ranks:  # after a broadcast
        bso.current_batch_size, bso.trial_number = told
    assert train_mnist(node, work, monitor, CallbackSet(first), ranks[0]) == 3
    assert train_mnist(node, work, monitor, CallbackSet([ranks[1]]), ranks[1], rank=1) == 10
    assert ranks[0].training_finished
    first[0].on_train_end()


# -------------------------------------------------------------------------------- measuring


def _measure_in_a_child(socket: str, queue: Any) -> None:
    os.environ["ZEUSD_SOCK_PATH"] = socket
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=[0])
    monitor.begin_window("p2p")
    measurement = monitor.end_window("p2p")
    queue.put((measurement.time, measurement.total_energy, str(measurement)))


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "v100", gpus=1) as running:
        yield running


def test_waiting_for_a_peer_is_measured_in_a_process_that_was_forked(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_measure_in_a_child, args=(daemon.socket, queue))
    process.start()
    seconds, joules, text = queue.get(timeout=60)
    process.join(60)
    assert seconds > 0
    assert joules >= 0
    assert text.startswith("Measurement(time=")


def test_jax_is_not_imported_for_a_monitor_of_its_work(node: VirtualNode) -> None:
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=[0], sync_execution_with="jax")
    monitor.begin_window("all_computations")
    node.clock.sleep(2)
    measurement = monitor.end_window("all_computations")
    assert [index for index, joules in measurement.gpu_energy.items() if joules > 0] == [0]


# --------------------------------------------------------------------------------- simulating


@pytest.mark.parametrize("home", ["0.8.2", "0.16"])
def test_a_recurring_job_is_simulated(home: str) -> None:
    import pandas as pd

    from zeus.simulate.study import _traces

    if home == "0.8.2":
        from zeus.policy.optimizer import JITPowerLimitOptimizer, PruningGTSBatchSizeOptimizer

        from zeus.analyze import HistoryEntry
        from zeus.job import Job
        from zeus.simulate import Simulator
    else:
        from zeus._legacy.job import Job
        from zeus._legacy.policy.optimizer import (
            JITPowerLimitOptimizer,
            PruningGTSBatchSizeOptimizer,
        )
        from zeus._legacy.simulate import HistoryEntry, Simulator

    train_csv, power_csv = _traces("v100", "", "")
    train_df, power_df = (pd.DataFrame(pd.read_csv(path)) for path in (train_csv, power_csv))
    job = Job("librispeech", "deepspeech2", "adamw", 40.0, 16, 192)
    plo = JITPowerLimitOptimizer(verbose=True)
    bso = PruningGTSBatchSizeOptimizer(seed=1, verbose=True)
    simulator = Simulator(train_df, power_df, bso, plo, seed=1, verbose=True)
    job_df = job.filter_df(train_df.merge(power_df, how="inner"))
    runs = 2 * len(job_df.batch_size.unique()) * len(job_df.power_limit.unique())
    assert runs == 210
    history = simulator.simulate_one_job(job, 20, 2.0, 0.5)
    assert all(isinstance(entry, HistoryEntry) for entry in history)
    assert [entry.bs for entry in history[:5]] == [192, 156, 128, 96, 72]


def test_a_group_of_recurring_jobs_is_simulated() -> None:
    import pandas as pd
    from zeus._legacy.job import Job
    from zeus._legacy.policy import JITPowerLimitOptimizer, PruningGTSBatchSizeOptimizer
    from zeus._legacy.simulate import Simulator

    from zeus.simulate.study import _traces

    train_csv, power_csv = _traces("v100", "", "")
    group = pd.DataFrame(
        {"start_time": [0, 10, 20], "end_time": [5, 30, 40], "runtime_ratio": [1.0, 0.5, 2.0]}
    )
    simulator = Simulator(
        pd.read_csv(train_csv),
        pd.read_csv(power_csv),
        PruningGTSBatchSizeOptimizer(seed=1, concurrency=True, verbose=False),
        JITPowerLimitOptimizer(verbose=False),
        seed=1,
        verbose=False,
    )
    job = Job("librispeech", "deepspeech2", "adamw", 40.0, 16, 192)
    history = simulator.simulate_one_alibaba_group(job, group, beta_knob=2.0, eta_knob=0.5)
    assert len(history) >= 3
    assert history[0].bs == 192

"""The calls of ml-energy/zeus's example scripts, in their order, with tiny work.

Its data parallel, Hugging Face, pipeline, trace-driven and ZeusMaster scripts have counterparts in
examples/, which tests/examples starts with the published command lines.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support import TIMEOUT_S
from tests.zeus.batch_size.server.running import RunningServer, running_server
from tests.zeus.gateway import Double, Series
from tests.zeus.measure.service import recorded_service
from tests.zeus.node import VirtualNode
from zeusd.devices.simulated import Work

STEPS = 150
EPOCHS = 3


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


def test_imagenet_on_one_gpu(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
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
            job_id=os.environ.get("ZEUS_JOB_ID"),
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


def test_capriccio_is_marked_by_hand(
    node: VirtualNode, work: Work, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch size optimizer gets only the beginning and evaluations."""
    monkeypatch.setenv("ZEUS_SERVER_URL", server.url)
    from zeus.utils.lr_scaler import SquareRootScaler

    from zeus.monitor import ZeusMonitor
    from zeus.optimizer.batch_size import BatchSizeOptimizer, JobSpec
    from zeus.optimizer.power_limit import GlobalPowerLimitOptimizer

    monitor = ZeusMonitor(gpu_indices=[0])
    plo = GlobalPowerLimitOptimizer(monitor)
    bso = BatchSizeOptimizer(
        monitor=monitor,
        server_url=os.environ["ZEUS_SERVER_URL"],
        job=JobSpec(
            job_id=os.environ.get("ZEUS_JOB_ID"),
            job_id_prefix="capriccio",
            default_batch_size=128,
            batch_sizes=[8, 16, 32, 64, 128],
            max_epochs=10,
            target_metric=0.84,
        ),
    )
    batch_size = bso.get_batch_size()
    assert SquareRootScaler(bs=128, lr=4e-7).compute_lr(batch_size) == pytest.approx(4e-7)
    bso.on_train_begin()
    for epoch in range(10):
        plo.on_epoch_begin()
        for _ in range(30):
            plo.on_step_begin()
            work.run(1)
            plo.on_step_end()
        plo.on_epoch_end()
        node.clock.sleep(5)  # evaluate
        bso.on_evaluate(0.3 * (epoch + 1))
        if bso.training_finished:
            break
    assert epoch == 2
    assert bso.converged
    plo.close()


# --------------------------------------------------------------------------- recurring jobs


def test_recurring_jobs_are_started_with_the_published_command_lines() -> None:
    """ImageNet and Capriccio of 0.8.2: what ZeusMaster fills into their templates."""
    from zeus.job import Job

    imagenet = Job(
        dataset="imagenet",
        network="resnet18",
        optimizer="sgd",
        target_metric=0.50,
        max_epochs=100,
        default_bs=256,
        default_lr=0.1,
        workdir="/workspace/zeus/examples/imagenet",
        command=[
            *("torchrun", "--nnodes", "1", "--nproc_per_node", "gpu", "train.py", "/data"),
            *("--zeus", "--arch", "resnet18", "--batch_size", "{batch_size}"),
            *("--learning_rate", "{learning_rate}", "--epochs", "{epochs}", "--seed", "{seed}"),
            "--torchrun",
        ],
    )
    assert imagenet.scale_lr(1024) == pytest.approx(0.4)
    assert " ".join(imagenet.gen_command(1024, 0.4, 3, 2)) == (
        "torchrun --nnodes 1 --nproc_per_node gpu train.py /data --zeus --arch resnet18 "
        "--batch_size 1024 --learning_rate 0.4 --epochs 100 --seed 3 --torchrun"
    )
    capriccio = Job(
        dataset="capriccio",
        network="bert_base_uncased",
        optimizer="adamw",
        target_metric=0.84,
        max_epochs=10,
        default_bs=128,
        default_lr=4.00e-7,
        workdir="/workspace/zeus/examples/capriccio",
        command=[
            *("python", "train.py", "--zeus", "--slice_number", "{slice_number}"),
            *("--batch_size", "{batch_size}", "--learning_rate", "{learning_rate}"),
            *("--num_train_epochs", "{epochs}", "--seed", "{seed}"),
        ],
    )
    assert capriccio.scale_lr(32) == pytest.approx(2e-7)
    assert " ".join(capriccio.gen_command(32, 2e-7, 124, 9)) == (
        "python train.py --zeus --slice_number 9 --batch_size 32 --learning_rate 2e-07 "
        "--num_train_epochs 10 --seed 124"
    )


# -------------------------------------------------------------------------------- measuring


def test_emissions_of_training_and_of_its_evaluation(
    node: VirtualNode, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeus.utils.lat_lon import get_ip_lat_long

    from zeus.monitor.carbon import CarbonEmissionMonitor, ElectrictyMapsClient

    hour = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    hours = [hour - timedelta(hours=1), hour, hour + timedelta(hours=1)]
    history = [{"datetime": one.isoformat(), "carbonIntensity": 500} for one in hours]
    answers: dict[str, tuple[int, Any]] = {
        "/json": (200, {"loc": "42.28,-83.74"}),
        "/carbon-intensity/history": (200, {"history": history}),
    }
    monkeypatch.setattr(
        "zeus.monitor.rates.ZeusMonitor",
        lambda gpus, cpus, **more: node.monitor(gpu_indices=gpus, cpu_indices=cpus, **more),
    )
    monkeypatch.setenv("ELECTRICITYMAPS_TOKEN", "key")
    # Amounts wait for the service's answer, which a busy machine may delay by more than a second.
    monkeypatch.setattr("zeus.monitor.rates.FIRST_WAIT_S", 60.0)
    with recorded_service(answers) as service:
        monkeypatch.setattr(get_ip_lat_long, "__defaults__", (f"{service.url}/json", 5.0))
        monkeypatch.setitem(ElectrictyMapsClient.__init__.__kwdefaults__, "url", service.url)

        ip_latlong = get_ip_lat_long()
        provider = ElectrictyMapsClient(ip_latlong, estimate=True)
        monitor = CarbonEmissionMonitor(provider)
        monitor.offset_ns = lambda: int(hour.timestamp() * 1e9) - node.clock()
        taken = []
        for name, steps in (("train", 40), ("eval", 10)):
            monitor.begin_window(name)
            work.run(steps)
            taken.append(monitor.end_window(name))
        for one in taken:
            assert one.gpu_carbon_emission[0] == pytest.approx(one.gpu_energy[0] / 3.6e6 * 500)
            assert str(one).startswith("CarbonEmissionMeasurement(time=")
    assert taken[0].gpu_energy[0] > 2 * taken[1].gpu_energy[0] > 0
    asked = [query for path, query, _ in service.asked if path.endswith("history")]
    assert asked[0]["disableEstimations"] == "false"
    assert (asked[0]["lat"], asked[0]["lon"]) == ("42.28", "-83.74")


def test_metrics_of_training_for_prometheus(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeus import metric
    from zeus.metric import EnergyCumulativeCounter, EnergyHistogram, PowerGauge

    monkeypatch.setattr(metric, "CLOSE_S", TIMEOUT_S)
    monkeypatch.setattr(metric, "ZeusMonitor", lambda gpus, cpus: node.monitor(gpu_indices=gpus))
    gateway = Double()
    common: dict[str, Any] = {"gpu_indices": [0], "pushgateway_url": gateway.address}
    histogram = EnergyHistogram(cpu_indices=[], job="training_energy_histogram", **common)
    power = PowerGauge(update_period=2, job="training_power_gauge", **common)
    counter = EnergyCumulativeCounter(
        cpu_indices=[], update_period=2, job="training_energy_counter", **common
    )
    power.begin_window("epoch_power")
    counter.begin_window("epoch_energy")
    for _ in range(3):
        node.clock.sleep(2)  # validate
        histogram.begin_window("training_energy")
        node.clock.sleep(3)  # train
        histogram.end_window("training_energy")
    counter.end_window("epoch_energy")
    power.end_window("epoch_power")
    for one in (histogram, power, counter):
        one.close()
    newest = {path.split("/")[3]: Series(body) for path, body in gateway.pushes}
    gateway.close()
    energy = "energy_monitor_gpu_energy_joules"
    assert newest["training_energy_histogram"].of(f"{energy}_count", index="0") == [3]
    (of_epochs,) = newest["training_energy_histogram"].of(f"{energy}_sum", index="0")
    (of_all,) = newest["training_energy_counter"].of(f"{energy}_total", index="0")
    assert of_all == pytest.approx(of_epochs * 15 / 9, rel=0.05)
    assert "training_power_gauge" in newest


def test_jax_is_not_imported_for_a_monitor_of_its_work(node: VirtualNode) -> None:
    from zeus.monitor import ZeusMonitor

    monitor = ZeusMonitor(gpu_indices=[0], sync_execution_with="jax")
    monitor.begin_window("all_computations")
    node.clock.sleep(2)
    measurement = monitor.end_window("all_computations")
    assert [index for index, joules in measurement.gpu_energy.items() if joules > 0] == [0]


# --------------------------------------------------------------------------------- simulating


def published_traces(folder: Path) -> list[Path]:
    """The measured tables of train and power as ml-energy/zeus has them: a row in each line."""
    from zeus.simulate.study import _traces
    from zeus_common.tables import rows

    paths = [folder / "summary_train.csv", folder / "summary_power.csv"]
    for path, shipped in zip(paths, _traces("v100", "", ""), strict=True):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows(shipped))
    return paths


def test_a_recurring_job_is_simulated(tmp_path: Path) -> None:
    import pandas as pd
    from zeus._legacy.job import Job
    from zeus._legacy.policy.optimizer import (
        JITPowerLimitOptimizer,
        PruningGTSBatchSizeOptimizer,
    )
    from zeus._legacy.simulate import HistoryEntry, Simulator

    train_csv, power_csv = published_traces(tmp_path)
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

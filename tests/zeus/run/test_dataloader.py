"""`ZeusDataLoader` in training loops, and in a job of two processes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import snippets
from tests.examples.programs import environment, limits_set, limits_w, with_torch
from tests.late import late
from tests.support import running_daemon, wait_for
from tests.zeus.node import VirtualNode
from zeus import run as zeus_run
from zeus.job import Job
from zeus.run import session as session_module
from zeusd.devices.simulated import Work

torch = late("torch")
data = late("torch.utils.data")

ROOT = Path(__file__).parents[3]
ITERATIONS = 60


def samples(count: int = 4 * ITERATIONS) -> data.TensorDataset:
    return data.TensorDataset(torch.arange(count))


def eval_samples() -> data.TensorDataset:
    return samples(40)


@pytest.fixture
def folder(node: VirtualNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a job's files go whose target is 0.5."""
    monkeypatch.setattr(session_module, "ZeusMonitor", node.monitor)
    for name, value in {
        "ZEUS_TARGET_METRIC": "0.5",
        "ZEUS_LOG_DIR": str(tmp_path),
        "ZEUS_JOB_ID": "rec01+try01",
        "ZEUS_PROFILE_PARAMS": "2,8",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def loaders(**options: Any) -> tuple[zeus_run.ZeusDataLoader, zeus_run.ZeusDataLoader]:
    """To train and to evaluate with; 60 and 10 iterations."""
    given = {"batch_size": 4, "max_epochs": 10, **options}
    train = zeus_run.ZeusDataLoader(samples(), **given)
    return train, zeus_run.ZeusDataLoader(eval_samples(), batch_size=4)


def epoch(
    train: zeus_run.ZeusDataLoader, evaluate: zeus_run.ZeusDataLoader, step: Callable[[], object]
) -> int:
    """Trains an epoch and evaluates. Returns how many batches of training there were."""
    trained = 0
    for (samples,) in train:
        assert len(samples) == 4
        trained += 1
        step()
    assert sum(1 for _ in (step() for _ in evaluate)) == 10
    return trained


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "rec01+try01+bs4.train.json").read_text())
    return found


def test_a_job_trains_until_its_target(node: VirtualNode, work: Work, folder: Path) -> None:
    train, evaluate = loaders()
    assert sum(1 for _ in train) == ITERATIONS  # before training begins nothing is measured
    limits: list[float] = []

    def step() -> None:
        limits.append(node.limit_w())
        work.run(1)

    numbers = []
    for number in train.epochs():
        numbers.append(number)
        assert epoch(train, evaluate, step) == ITERATIONS
        train.report_metric(torch.tensor(0.2 * (number + 1)), higher_is_better=True)
    assert numbers == [0, 1, 2]
    assert len(set(limits)) == 7
    assert node.limit_w() == 250
    assert node.client.leases() == []
    found = result(folder)
    assert (found["num_epochs"], found["reached"]) == (3, True)
    seconds = node.clock() / 1e9
    assert 0 < found["time"] <= seconds
    profile = json.loads((folder / "bs4.power.json").read_text())
    assert profile["job_id"] == "rec01+try01"
    assert list(profile["eval_power"]) == [str(profile["optimal_pl"])]
    assert limits[-1] == profile["optimal_pl"] / 1000


@pytest.mark.parametrize(("max_epochs", "reached"), [(2, False), (3, True)])
def test_lower_may_be_better_and_epochs_end(
    work: Work, folder: Path, max_epochs: int, reached: bool
) -> None:
    train, evaluate = loaders(max_epochs=max_epochs)
    for number in train.epochs():
        epoch(train, evaluate, lambda: work.run(1))
        train.report_metric(0.7 - 0.1 * number, higher_is_better=False)
    found = result(folder)
    assert (found["num_epochs"], found["reached"]) == (max_epochs, reached)


def test_a_metric_counts_for_its_epoch_only(work: Work, folder: Path) -> None:
    train, evaluate = loaders(max_epochs=2)
    train.report_metric(0.9, higher_is_better=True)  # of the model before training
    for number in train.epochs():
        epoch(train, evaluate, lambda: work.run(1))
        if number == 1:
            train.report_metric(0.9, higher_is_better=True)
            train.report_metric(float("nan"), higher_is_better=True)
    assert (result(folder)["num_epochs"], result(folder)["reached"]) == (2, False)


def test_a_run_that_would_cost_too_much_is_given_up(
    node: VirtualNode, work: Work, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUS_COST_THRESH", "1")
    train, evaluate = loaders()
    with pytest.raises(
        zeus_run.ZeusCostThresholdExceededError, match="training was given up"
    ) as raised:
        for _ in train.epochs():
            epoch(train, evaluate, lambda: work.run(1))
    found = result(folder)
    assert (found["num_epochs"], found["reached"]) == (2, False)  # both to measure limits in
    assert found["stopped_by_cost"]
    error = raised.value
    assert (error.time_consumed, error.energy_consumed) == (found["time"], found["energy"])
    assert error.cost == found["cost"] < error.next_cost
    assert error.cost_thresh == 1
    assert node.limit_w() == 250


def test_limits_are_restored_when_training_fails(
    node: VirtualNode, work: Work, folder: Path
) -> None:
    train, evaluate = loaders()

    def training() -> None:
        for _ in train.epochs():
            epoch(train, evaluate, lambda: work.run(1))
            if node.limit_w() < 250:
                raise KeyError("oops")

    with pytest.raises(KeyError):
        training()
    assert node.limit_w() == 250
    assert node.client.leases() == []
    assert not list(folder.glob("*.train.json"))


def test_a_data_set_need_not_know_its_length(work: Work, folder: Path) -> None:
    class Stream(data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(samples())

    train = zeus_run.ZeusDataLoader(Stream(), batch_size=4, max_epochs=4)
    for _ in train.epochs():
        for _ in train:
            work.run(1)
    assert len(json.loads((folder / "bs4.power.json").read_text())["train_power"]) == 7


def test_loaders_are_distinguished(work: Work, folder: Path) -> None:
    train, evaluate = loaders()
    with pytest.raises(ValueError, match="Specify max_epochs only to the train dataloader"):
        loaders()
    with pytest.raises(RuntimeError, match=r"epochs\(\) is for the train loader"):
        evaluate.epochs()
    with pytest.raises(RuntimeError, match=r"report_metric\(\) is for the train loader"):
        evaluate.report_metric(1.0, higher_is_better=True)
    for _ in train.epochs():
        epoch(train, evaluate, lambda: work.run(1))
        break
    with pytest.raises(RuntimeError, match=r"epochs\(\) was used already"):
        train.epochs()
    loaders()  # that training has ended
    del train
    loaders()


def test_an_evaluation_alone_needs_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZEUS_TARGET_METRIC", raising=False)
    assert sum(1 for _ in zeus_run.ZeusDataLoader(eval_samples(), batch_size=4)) == 10
    with pytest.raises(ValueError, match="ZEUS_TARGET_METRIC is missing"):
        zeus_run.ZeusDataLoader(eval_samples(), batch_size=4, max_epochs=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_epochs": 0}, ValueError, "max_epochs must be at least 1"),
        ({"distributed": "ddp"}, ValueError, "distributed must be None or 'dp'"),
        ({"distributed": "dp"}, RuntimeError, "needs a process group"),
    ],
)
def test_invalid_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zeus_run.ZeusDataLoader(samples(), batch_size=4, **options)


def test_the_code_in_the_docs_runs(
    node: VirtualNode, work: Work, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, starts = snippets.of(ROOT / "docs" / "train" / "zeus_run.md")
    metrics = iter([0.1, 0.2, 0.3, 0.9])
    script.run(
        train_set=samples(),
        eval_set=eval_samples(),
        batch_size=4,
        train_step=lambda batch: work.run(1),
        evaluate=lambda batch: work.run(0.3),
        accuracy=lambda: next(metrics),
    )
    assert (result(folder)["num_epochs"], result(folder)["reached"]) == (4, True)

    def run_job(self: zeus_run.ZeusMaster, job: Job, batch_size: int, **run: Any) -> Any:
        assert job.gen_command(batch_size, 0.1, 1, 1)[2:4] == ["--batch_size", str(batch_size)]
        return 1000.0 + abs(batch_size - 512), 1.0, True

    monkeypatch.setattr(zeus_run.ZeusMaster, "run_job", run_job)
    monkeypatch.setattr(zeus_run.ZeusMaster, "build_logdir", lambda *given: str(folder))
    history = starts.run()["history"]
    assert len(history) == 100
    assert history == zeus_run.read_history(folder)


def test_two_processes_train_as_one_job(tmp_path: Path) -> None:
    with running_daemon("--simulate", "2xv100-pcie:setter_ms=0", gpus=2) as daemon:
        script = Path(__file__).with_name("data_parallel_job.py")
        env = environment(
            daemon.socket,
            ROOT,
            ZEUS_TARGET_METRIC="0.5",
            ZEUS_LOG_DIR=str(tmp_path),
            ZEUS_JOB_ID="job",
            ZEUS_PROFILE_PARAMS="2,4",
        )
        errors = [tmp_path / f"errors-{rank}" for rank in (0, 1)]
        processes = [
            subprocess.Popen(
                with_torch(script, tmp_path, str(rank)), env=env, stderr=path.open("wb")
            )
            for rank, path in enumerate(errors)
        ]

        def ended() -> bool:
            codes = [process.poll() for process in processes]
            return None not in codes or any(codes)  # one that fails leaves the other waiting

        try:
            wait_for(ended, "both processes", 60)
        finally:
            for process in processes:
                process.kill()
            codes = [process.wait() for process in processes]
            said = [path.read_text() for path in errors]
            assert codes == [0, 0], said
        silent = ("No power limit is chosen", "power limit optimizer stopped")
        assert not any(sentence in one for one in said for sentence in silent)
        first, second = limits_set(daemon, 2)
        assert limits_w(daemon, 2) == [250, 250]
    assert first == second
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    assert {tuple(one["refused"]) for one in seen} == {
        (
            "ValueError: distributed='dp' needs sampler",
            "ValueError: the DistributedSampler is that of process 7 of 8",
            "ValueError: 2 processes train together",
        )
    }
    # The first process's metric decides; all stop after the same epoch.
    assert [one["epochs"] for one in seen] == [[0, 1, 2], [0, 1, 2]]
    # Batches of 4 in each of two processes.
    result = json.loads((tmp_path / "job+bs8.train.json").read_text())
    assert (result["num_epochs"], result["reached"]) == (3, True)
    assert result["cost"] == pytest.approx(0.5 * result["energy"] + 0.5 * 500 * result["time"])
    profile = json.loads((tmp_path / "bs8.power.json").read_text())
    assert len(profile["train_power"]) == 7
    assert profile["train_power"]["250000"] > 300  # of both GPUs
    assert f"{profile['optimal_pl'] // 1000} W" == first[-1]
    assert profile["gpus"] == ["Tesla V100-PCIE-16GB"] * 2
    # A second job costs too much, and both processes say so.
    assert [one["given_up"] for one in seen] == [True, True]
    result = json.loads((tmp_path / "dear+bs8.train.json").read_text())
    assert (result["num_epochs"], result["stopped_by_cost"]) == (1, True)
    assert not list(tmp_path.glob("*bs4*"))

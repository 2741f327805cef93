"""A run on simulated GPUs whose sensors, limits or files fail: training continues."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support import for_users, wait_for
from tests.zeus.in_trainers import WORKLOAD
from tests.zeus.run.sessions import ITERATIONS, Job, OpenNode
from zeus.run import files
from zeus_ipc.errors import DaemonUnavailable, OutOfRange
from zeusd.restore_rule import SETTLE_S


def test_a_limit_that_may_not_be_set_ends_only_the_search(
    virtual_node: OpenNode, tmp_path: Path
) -> None:
    node = virtual_node("v100:setter_ms=0:unprivileged")
    job = Job(node, node.nvml.open_work([0], WORKLOAD), tmp_path)
    run = job.run()
    with pytest.warns(UserWarning, match="optimizer stopped.*: the power limit cannot be set"):
        job.train(run, epochs=3)
    found = job.result()
    assert found["reached"]
    assert found["energy"] > 0
    assert not job.profile.exists()


def away(*args: Any) -> Any:
    raise DaemonUnavailable("zeusd is away")


@pytest.mark.parametrize("call", ["set_power_limit", "sensors"])
def test_a_gpu_that_fails_while_limits_are_measured_ends_only_the_search(
    job: Job, call: str
) -> None:
    run = job.run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.train_epoch(run)
        job.node.nvml.inject(0, call, 999)
        job.train_epoch(run)
        job.node.nvml.clear_faults()
        wait_for(lambda: job.node.limit_w() == 250, "zeusd to put the limit back, in real time")
        # A write that failed may still take effect until then.
        job.node.clock.sleep(SETTLE_S)
        wait_for(lambda: not job.node.client.leases(), "the restore to be over")
        verdict = job.train_epoch(run, reached=True)
        run.end(verdict)
    assert sum("The power limit optimizer stopped" in str(one.message) for one in caught) == 1
    assert job.result()["reached"]
    assert job.result()["num_epochs"] == 3
    assert len(job.power(".partial")["train_power"]) >= 4


def test_a_window_of_zero_joules_ends_only_the_search(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = job.node.client.windows

    def nothing(*args: Any) -> Any:
        return {
            name: found.model_copy(update={"energy_uj": [0] * len(found.energy_uj)})
            for name, found in real(*args).items()
        }

    run = job.run()
    monkeypatch.setattr(job.node.client, "windows", nothing)
    with pytest.warns(UserWarning, match="8 steps at 250 W were measured as 0 J"):
        job.train(run, epochs=2)
    assert job.result()["reached"]


def test_a_limit_that_the_gpu_refuses_is_left_out(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = job.node.client.set_power_limit

    def some(gpu: Any, power_limit_mw: int, **options: Any) -> Any:
        if power_limit_mw in (150_000, 125_000):
            raise OutOfRange(f"{power_limit_mw} mW is not taken today")
        return real(gpu, power_limit_mw, **options)

    monkeypatch.setattr(job.node.client, "set_power_limit", some)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.train(job.run(), epochs=4)
    limits = [int(limit) // 1000 for limit in job.power()["train_power"]]
    assert limits == [250, 225, 200, 175, 100]


def test_energy_that_cannot_be_known_is_assumed_and_training_continues(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job.run()
    totals = [run.used]
    for _ in range(3):
        job.train_epoch(run)
        totals.append(run.used)

    monkeypatch.setattr(job.node.client, "windows", away)
    with pytest.warns(UserWarning, match=r"zeusd is away\), and \d+ W are assumed for") as told:
        job.train_epoch(run)
        totals.append(run.used)
        run.end(job.train_epoch(run, reached=True))
    assert len(for_users(told)) == 1
    found = job.result()
    assert found["num_epochs"] == 5
    known, third = totals[3], totals[3].time - totals[2].time
    fourth = totals[4].energy - known.energy, totals[4].time - known.time
    assert fourth[1] == pytest.approx(third, rel=0.01)
    assert fourth[0] / fourth[1] == pytest.approx(known.energy / known.time, rel=0.01)


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_whose_energy_stays_unknown_hides_no_later_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job.run()
    for _ in range(3):
        job.train_epoch(run)
    known, real, lost_ns = run.used, job.node.client.windows, job.node.clock() + 10**15

    def gone(sources: Any, windows: Any, **more: Any) -> Any:
        found = real(sources, windows, **more)
        for one in found.values():
            for at, (begin_ns, *_) in enumerate(windows):
                if begin_ns < lost_ns:
                    one.energy_uj[at] = None
        return found

    monkeypatch.setattr(job.node.client, "windows", gone)
    job.train_epoch(run)
    four, before_j = run.used, job.node.nvml.true_energy_j(0)
    lost_ns = job.node.clock()
    job.train_epoch(run, each=lambda _: job.node.clock.sleep(1))  # at another mean power
    last_s, last_j = run.used.time - four.time, job.node.nvml.true_energy_j(0) - before_j
    assert last_j / last_s != pytest.approx(known.energy / known.time, rel=0.1)
    mean_w = (known.energy + last_j) / (known.time + last_s)
    assert run.used.energy / run.used.time == pytest.approx(mean_w, rel=0.005)
    run.close()


@pytest.mark.filterwarnings("ignore")
def test_no_unknown_cost_ends_a_run_and_energy_may_be_known_later(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = job.run(cost_thresh=1.0)
    before = job.node.nvml.true_energy_j(0)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(job.node.client, "windows", away)
        for _ in range(3):
            assert not job.train_epoch(run).stop
    assert run.used.energy == pytest.approx(250 * run.used.time)
    verdict = job.train_epoch(run)
    assert verdict.by_cost
    run.end(verdict)
    truth = job.node.nvml.true_energy_j(0) - before
    assert job.result()["energy"] == pytest.approx(truth, rel=0.02)


def test_files_that_cannot_be_written_cost_a_warning(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    run = job.run()
    monkeypatch.setattr(files, "save", full)
    with pytest.warns(UserWarning, match="cannot be written") as told:
        job.train(run, epochs=3)
    assert [str(one.message)[:30] for one in for_users(told)] == [
        "The power profile cannot be wr",
        "The run's result cannot be wri",
    ]
    assert job.node.limit_w() == 250


def test_a_folder_that_cannot_be_made_is_reported_before_training(job: Job) -> None:
    (job.folder / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be made .*; set ZEUS_LOG_DIR to another"):
        job.run(log_dir=str(job.folder / "file/logs"))


def test_nothing_is_left_of_a_run_that_ends_amid_a_window(job: Job) -> None:
    run = job.run()
    run.begin_epoch()
    steps = run.steps(range(ITERATIONS), ITERATIONS)
    for _ in range(15):
        next(steps)
        job.work.run(1)
    assert job.node.limit_w() < 250
    run.close()
    assert job.node.limit_w() == 250
    assert job.node.client.leases() == []
    assert run._monitor.measurement_states == {}

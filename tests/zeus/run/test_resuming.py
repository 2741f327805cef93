"""`ZeusMaster` is killed at some moment, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import ended, forked, wait_for
from tests.zeus.run.masters import Jobs, Scripted, result
from zeus.analyze import HistoryEntry
from zeus.job import Job
from zeus.policy import BatchSizeOptimizer, make_policy
from zeus.run.child import still_trains
from zeus.run.job_file import JOB, JobFile

SIZES = [16, 32, 64, 128]


def train(jobs: Jobs, policy: BatchSizeOptimizer, job: Job, times: int = 3) -> list[HistoryEntry]:
    return jobs.master(policy, seed=5).run(job, times, SIZES, 2.0, 0.5)


def test_knowledge_is_for_these_gpus_and_power_limits(jobs: Jobs) -> None:
    path = jobs.folder / "knowledge.json"
    does = {size: result(900.0 if size > 32 else 100.0 + size, max_power=250.0) for size in SIZES}
    job = jobs.job(does)
    for first in (64, 16):
        jobs.master(make_policy("gp", verbose=False), knowledge=str(path)).run(
            job, 6, SIZES, 2.0, 0.5
        )
        assert int(jobs.calls[-6]["argv"][0]) == first
    assert json.loads(path.read_text())["place"] == {
        "gpu_model": "Tesla V100-PCIE-16GB",
        "power_limits": [100, 250],
    }


def killed_by(number: int, jobs: Jobs, job: Job) -> int:
    """Trains in a separate process, which is killed once a script sleeps; returns the script."""
    master = jobs.master(Scripted(64, 32, 16), seed=5)
    child = forked(lambda: master.run(job, 3, SIZES, 2.0, 0.5))
    pid = jobs.folder / "pid"
    wait_for(lambda: pid.exists() and pid.read_text(), "the script to run")
    os.kill(child, number)
    assert ended(child) == -number
    return int(pid.read_text())


def reopened(folder: Path) -> None:
    """As if the job's master had been killed just before it was over."""
    file = folder / JOB
    file.write_text(json.dumps({**json.loads(file.read_text()), "over": False}))


def end(script: int) -> None:
    """Asks a script to end."""
    os.kill(script, signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_continues_and_waits_for_the_orphan(
    jobs: Jobs, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    does = {64: result(100.0), 32: {**result(60.0), "sleeps": True}, 16: result(50.0)}
    script = killed_by(number, jobs, jobs.job(does))
    run = jobs.logdir / "rec02+try01.train.log"
    assert still_trains(run)  # it outlives its master
    log = jobs.logdir / "master.log"
    threading.Thread(
        target=lambda: (
            wait_for(lambda: "still trains" in log.read_text(), "the orphan to be found"),
            end(script),
        )
    ).start()
    history = train(jobs, Scripted(64, 32, 16), jobs.job(does))
    assert [entry.bs for entry in history] == [64, 32, 16]
    assert [call["argv"][0] for call in jobs.calls] == ["64", "32", "16"]  # none of them twice
    assert [run.cost for run in Scripted.observed] == [100.0, 60.0, 50.0]
    assert f"its script still trains, see {run}" in capsys.readouterr().out
    assert not still_trains(run)


def test_an_orphan_that_has_ended_without_a_result_is_run_again(jobs: Jobs) -> None:
    script = killed_by(signal.SIGKILL, jobs, jobs.job({64: result(9.0), 32: {"sleeps": True}}))
    end(script)
    wait_for(lambda: not still_trains(jobs.logdir / "rec02+try01.train.log"), "the script to end")
    does = {64: result(9.0), 32: result(8.0), 16: result(7.0)}
    history = train(jobs, Scripted(64, 32, 16), jobs.job(does))
    assert [entry.bs for entry in history] == [64, 32, 16]
    assert [call["argv"][0] for call in jobs.calls] == ["64", "32", "32", "16"]


def test_knowledge_is_used_again_and_the_first_run_does_not_use_the_default(jobs: Jobs) -> None:
    """The sizes are those of a master that was never interrupted."""
    does = {size: result(10.0 + size, epochs=10) for size in SIZES}
    job = jobs.job(does)
    whole = [entry.bs for entry in train(jobs, make_policy("gp", seed=3), job, times=6)]
    reopened(jobs.logdir)
    for later in sorted(jobs.logdir.glob("*.train.json"))[3:]:  # as if it had been killed then
        later.unlink()
    (jobs.folder / "calls.jsonl").unlink()
    again = [entry.bs for entry in train(jobs, make_policy("gp", seed=3), job, times=6)]
    assert again == whole
    assert [int(call["argv"][0]) for call in jobs.calls] == whole[3:]


def test_a_job_that_is_done_or_is_another_starts_over(jobs: Jobs) -> None:
    job = jobs.job({64: result(9.0)})
    for _ in range(2):
        assert len(train(jobs, Scripted(64), job, times=1)) == 1
    folders = sorted((jobs.folder / "logs").iterdir())
    reopened(folders[-1])
    # Another policy, or another process that has it.
    assert len(train(jobs, make_policy("gp"), job, times=1)) == 1
    with contextlib.closing(JobFile(folders[-1])):
        assert len(train(jobs, Scripted(64), job, times=1)) == 1
    assert len(jobs.calls) == 4
    train(jobs, Scripted(64), job, times=1)
    assert len(jobs.calls) == 4  # nothing was left to train


@pytest.mark.parametrize("dataset", ["/data/cifar", "../cifar", "org/cifar"])
def test_a_job_with_slashes_in_its_names_stays_in_its_folder_and_is_continued(
    jobs: Jobs, dataset: str
) -> None:
    dataset = dataset.replace("/data", str(jobs.folder))
    job = jobs.job({64: result(9.0)}, dataset=dataset, network="org/net")
    for _ in range(2):
        assert len(train(jobs, Scripted(64), job, times=1)) == 1
        reopened(jobs.logdir)  # the only one
    assert len(jobs.calls) == 1


def test_a_result_that_cannot_be_read_is_trained_again(jobs: Jobs) -> None:
    with pytest.raises(RuntimeError, match=r"is not a result of a run: .*; run the job again"):
        train(jobs, Scripted(64), jobs.job({64: {"result": {"energy": "much"}}}), times=1)
    assert len(train(jobs, Scripted(64), jobs.job({64: result(9.0)}), times=1)) == 1
    assert [call["env"]["ZEUS_LOG_DIR"] for call in jobs.calls] == [str(jobs.logdir)] * 2


def test_a_target_out_of_reach_is_not_gone_on_with(jobs: Jobs) -> None:
    job = jobs.job({64: result(9.0, reached=False)})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="64 did not converge"):
            train(jobs, Scripted(64), job)
    assert len(jobs.calls) == 2


@pytest.mark.parametrize("name", ["gp", "gts", "pruning-gts"])
def test_a_size_without_memory_excludes_larger_ones(jobs: Jobs, name: str) -> None:
    large = {"code": 1, "says": ["torch.OutOfMemoryError: CUDA out of memory. Tried to ..."]}
    does: dict[int, dict[str, Any]] = {16: result(30.0), 32: result(20.0), 64: result(9.0)}
    job = jobs.job({**does, 128: large, 256: large}, default_bs=32)
    sizes = [16, 32, 64, 128, 256]
    policy = make_policy(name, seed=2)
    history = jobs.master(policy).run(job, 14, sizes, 2.0, 0.5)
    tried = [int(call["argv"][0]) for call in jobs.calls]
    first = next((at for at, size in enumerate(tried) if size >= 128), len(tried) - 1)
    assert not any(size >= tried[first] for size in tried[first + 1 :] if tried[first] >= 128)
    assert {entry.bs for entry in history} <= {16, 32, 64}
    assert len([entry for entry in history if entry.reached]) == 14
    reopened(jobs.logdir)
    assert jobs.master(policy).run(job, 14, sizes, 2.0, 0.5) == history
    assert len(jobs.calls) == len(tried)  # what failed is not tried again, either

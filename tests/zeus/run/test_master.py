"""`ZeusMaster`, with scripts that report what they would have trained."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support import wait_for
from tests.zeus.node import VirtualNode
from tests.zeus.run.masters import Jobs, Scripted, result
from zeus.analyze import HistoryEntry
from zeus.job import Job
from zeus.policy import PruningGTSBatchSizeOptimizer, Run
from zeus.run import ZeusMaster, read_history


def test_recurrences_and_tries(
    jobs: Jobs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "kept")
    stopped = {"stopped_by_cost": True, "num_epochs": 3}
    job = jobs.job(
        {
            64: result(100.0, overhead=7.0),
            128: {**result(150.0, False, **stopped), "code": 1},
            32: result(40.0),
            16: result(20.0, num_epochs=5),
        }
    )
    master = jobs.master(Scripted(64, 128, 32, 16), seed=7, profile_warmup_iters=3)
    history = master.run(job, 3, [16, 32, 64, 128], beta_knob=2.0, eta_knob=0.25)
    assert not master.batch_size_optimizer.registered  # each job has a copy
    assert history == [
        HistoryEntry(64, None, 400.0, True, 2.0),
        HistoryEntry(128, None, 600.0, False, 2.0),
        HistoryEntry(32, None, 160.0, True, 2.0),
        HistoryEntry(16, None, 80.0, True, 2.0),
    ]
    # 150 + 40 of the second recurrence is not less than 100 of the first.
    assert Scripted.observed == [
        Run(64, 100.0, True, 10, 7.0, None, False),
        Run(128, 150.0, False, 3, 0.0, 200.0, True),
        Run(32, 40.0, True, 10, 0.0, 200.0, False),
        Run(16, 20.0, True, 5, 0.0, 200.0, False),
    ]

    log_dir = jobs.logdir
    assert log_dir.name.startswith("cifar+net+bs64+sgd+lr0.1+tm0.6+me10+x3+eta0.25+beta2.0+20")
    tried = ["rec01+try01", "rec02+try01", "rec02+try02", "rec03+try01"]
    assert [call["env"]["ZEUS_JOB_ID"] for call in jobs.calls] == tried
    assert [call["argv"] for call in jobs.calls] == [
        ["64", "0.1", "7", "10", "1", "0.6", "--b={bs}"],
        ["128", "0.2", "8", "10", "2", "0.6", "--b={bs}"],
        ["32", "0.05", "9", "10", "2", "0.6", "--b={bs}"],
        ["16", "0.025", "10", "10", "3", "0.6", "--b={bs}"],
    ]
    assert [call["env"]["ZEUS_COST_THRESH"] for call in jobs.calls] == ["inf", *["200.0"] * 3]
    first = jobs.calls[0]
    assert first["cwd"] == str(jobs.folder / "work")
    assert first["mine"] == "kept"
    assert {**first["env"], "ZEUS_COST_THRESH": ""} == {
        "ZEUS_TARGET_METRIC": "0.6",
        "ZEUS_LOG_DIR": str(log_dir),
        "ZEUS_JOB_ID": "rec01+try01",
        "ZEUS_COST_THRESH": "",
        "ZEUS_ETA_KNOB": "0.25",
        "ZEUS_MONITOR_PATH": "/opt/zeus_monitor",
        "ZEUS_PROFILE_PARAMS": "3,40",
        "ZEUS_USE_OPTIMAL_PL": "True",
    }
    assert not any(name.startswith("ZEUS_JOB") for name in os.environ)

    assert read_history(log_dir / "history.json") == history
    assert read_history(log_dir / "history.py") == history
    logs = [(log_dir / f"{job_id}.train.log").read_text() for job_id in tried]
    assert logs[1] == "training with batch size 128 ü\n"
    shown = capsys.readouterr().out
    assert all(log in shown for log in logs)
    assert (log_dir / "master.log").read_text() == shown
    assert "rec02+try01: batch size 128 was given up for its cost after 3 epochs" in shown
    assert "but its result was written before" not in shown


def test_observers_and_the_policys_own_bound(jobs: Jobs) -> None:
    job = jobs.job({64: result(100.0), 32: result(50.0)})
    master = jobs.master(Scripted(64, 32, bound=123.5), observer_mode=True, profile_measure_iters=9)
    master.run(job, 2, [64], beta_knob=math.inf, eta_knob=0.5)
    env = jobs.calls[1]["env"]
    assert env["ZEUS_USE_OPTIMAL_PL"] == "False"
    assert env["ZEUS_PROFILE_PARAMS"] == "10,9"
    assert env["ZEUS_COST_THRESH"] == "123.5"


def test_the_first_run_must_reach_its_target(jobs: Jobs) -> None:
    job = jobs.job({64: result(100.0, False)})
    with pytest.raises(RuntimeError, match="The default batch size 64 did not converge"):
        jobs.master(Scripted(64)).run(job, 2, [64], 2.0, 0.5)
    assert len(read_history(jobs.logdir)) == 1


def test_a_target_that_is_out_of_reach(jobs: Jobs) -> None:
    job = jobs.job({64: result(100.0), 32: result(50.0, False)})
    with pytest.raises(RuntimeError, match="Unreachable target metric"):
        jobs.master(Scripted(64, *[32] * 30)).run(job, 2, [32, 64], 2.0, 0.5)
    assert len(read_history(jobs.logdir)) == 21
    assert jobs.calls[-1]["env"]["ZEUS_JOB_ID"] == "rec02+try20"


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (
            {"code": 3, "says": ["Traceback", "MemoryError: no room ü"]},
            r"script of rec01\+try01 with batch size 64 ended with exit code 3 before it had a "
            r"result\. The end of its log, .*rec01\+try01\.train\.log:\n"
            r"    training with batch size 64 ü\n    Traceback\n    MemoryError: no room ü$",
        ),
        ({"says": [str(line) for line in range(99)]}, r"log:\n    84\n(.*\n)*    98$"),
        ({}, "ended with exit code 0 before it had a result; its training loop must be `for epoch"),
        ({"killed": True}, r"was killed by SIGKILL \(perhaps out of memory\) before"),
        (
            {"result": {"energy": "much"}},
            r"rec01\+try01\+bs64\.train\.json is not a result of a run",
        ),
    ],
)
def test_a_script_that_fails_is_reported_with_the_end_of_its_log(
    jobs: Jobs, does: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        jobs.master(Scripted(64)).run(jobs.job({64: does}), 1, [64], 2.0, 0.5)


def test_a_size_that_never_trains_counts_as_a_miss_if_others_train(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"code": 1, "says": ["torch.OutOfMemoryError: CUDA out of memory"]}
    job = jobs.job({64: result(100.0, max_power=500.0), 128: full, 32: result(40.0)})
    history = jobs.master(Scripted(64, 128, 32)).run(job, 2, [32, 64, 128], 2.0, 0.5)
    assert [(entry.bs, entry.reached) for entry in history] == [(64, True), (32, True)]
    assert Scripted.observed[1] == Run(128, 0.0, converged=False)
    assert Scripted.observed[0].utilization == 400 / 2 / 500
    said = capsys.readouterr().out
    assert "CUDA out of memory" in said
    assert "batch size 128 counts as one that does not reach the target" in said
    assert [call["argv"][2] for call in jobs.calls] == ["123456", "123457", "123458"]


def test_a_size_that_trained_before_and_fails_ends_it(jobs: Jobs) -> None:
    job = jobs.job({64: result(100.0)})
    master = jobs.master(Scripted(64, 64))
    run_job = master.run_job

    def fails_later(*args: Any, **more: Any) -> tuple[float, float, bool]:
        if Scripted.observed:
            jobs.job({64: {"code": 3}})
        return run_job(*args, **more)

    master.run_job = fails_later
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        master.run(job, 2, [64], 2.0, 0.5)


def test_a_command_that_cannot_be_started(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setenv("PATH", f"{closed}:{os.environ['PATH']}")
    job = jobs.job({}, command=["no-such-command"])
    with pytest.raises(RuntimeError, match=r"\(command not found: no-such-command\)"):
        jobs.master(Scripted(64)).run(job, 1, [64], 2.0, 0.5)
    job = jobs.job({}, command=["/nowhere/python", "{bs}"])
    with pytest.raises(RuntimeError, match=r"'/nowhere/python 64' cannot be started in .*No such"):
        jobs.master(Scripted(64)).run(job, 1, [64], 2.0, 0.5)
    job = jobs.job({}, workdir="/nowhere")
    with pytest.raises(RuntimeError, match=r"cannot be started in /nowhere \(No such file"):
        jobs.master(Scripted(64)).run(job, 1, [64], 2.0, 0.5)


def test_a_script_that_fails_after_its_result_counts(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    job = jobs.job({64: {**result(100.0), "code": 2}})
    assert jobs.master(Scripted(64)).run(job, 1, [64], 2.0, 0.5)[0].reached
    assert "ended with exit code 2, but its result was written before" in capsys.readouterr().out


def test_an_earlier_result_does_not_count_for_this_run(jobs: Jobs) -> None:
    master = jobs.master(Scripted(64))
    logdir = master.build_logdir(jobs.job({}), 1, 0.5, 2.0)
    arguments: dict[str, Any] = {
        "batch_size": 64,
        "learning_rate": 0.1,
        "seed": 1,
        "logdir": logdir,
        "rec_i": 1,
        "tries": 1,
        "eta_knob": 0.5,
        "cost_ub": math.inf,
    }
    assert master.run_job(jobs.job({64: result(9.0)}), **arguments) == (36.0, 2.0, True)
    with pytest.raises(RuntimeError, match="before it had a result"):
        master.run_job(jobs.job({64: {"code": 1}}), **arguments)


def test_a_master_that_is_interrupted_leaves_no_script_behind(jobs: Jobs) -> None:
    job = jobs.job({64: {"sleeps": True}})
    pid = jobs.folder / "pid"

    def interrupt() -> None:
        wait_for(lambda: pid.exists() and pid.read_text(), "the script to run")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # A shell's background process, such as these tests, may ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            jobs.master(Scripted(64)).run(job, 1, [64], 2.0, 0.5)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert (jobs.folder / "asked").exists()  # to end, before it was killed


def test_a_subclass_may_run_jobs_in_its_own_way(jobs: Jobs, node: VirtualNode) -> None:
    class Mine(ZeusMaster):
        def run_job(self, job: Job, *args: Any, **options: Any) -> tuple[float, float, bool]:
            return 1000.0, 10.0, True

    master = Mine(Scripted(64), str(jobs.folder / "logs"), "/m")
    history = master.run(jobs.job({}), 1, [64], 2.0, 0.5)
    assert history == [HistoryEntry(64, None, 1000.0, True, 10.0)]
    # 0.5 * 1000 J + 0.5 * 250 W * 10 s
    assert [one.cost for one in Scripted.observed] == [1750.0]


@pytest.mark.parametrize(
    ("job", "arguments", "error", "message"),
    [
        ({"default_bs": None}, {}, ValueError, "no default batch size"),
        ({"command": None}, {}, ValueError, "no command to run"),
        ({"default_lr": None}, {}, ValueError, "needs default_bs and default_lr"),
        ({"optimizer": "lion"}, {}, NotImplementedError, "lion's learning rate"),
        ({}, {"eta_knob": 1.01}, ValueError, "eta_knob must be between 0 and 1"),
        ({}, {"beta_knob": 0.0}, ValueError, "beta_knob must be positive"),
        ({}, {"batch_sizes": [32, 128]}, ValueError, "64"),
    ],
)
def test_invalid_arguments(
    jobs: Jobs,
    job: dict[str, Any],
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    given: dict[str, Any] = {"num_recurrence": 1, "batch_sizes": [64], "beta_knob": 2.0}
    master = jobs.master(PruningGTSBatchSizeOptimizer(verbose=False))
    with pytest.raises(error, match=message):
        master.run(jobs.job({}, **job), **{**given, "eta_knob": 0.5, **arguments})
    assert not (jobs.folder / "logs").exists()
    for name in ("log_base", "monitor_path"):
        with pytest.raises(ValueError, match=f"{name} must be an absolute path"):
            ZeusMaster(Scripted(), **{"log_base": "/logs", "monitor_path": "/m", name: "here"})

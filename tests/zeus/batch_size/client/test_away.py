"""The trials' store is unreachable: training continues, and is reported later if possible."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import tenacity

from tests.support import wait_for
from tests.zeus.batch_size.client.conftest import Optimize
from tests.zeus.batch_size.client.fakes import JOB_ID, Between, FakeMonitor, epochs
from zeus.optimizer.batch_size import link
from zeus.optimizer.batch_size.exceptions import ZeusBSORuntimeError


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short, and between attempts no other time passes, however busy the machine."""
    monkeypatch.setattr(link, "BACKOFF_S", (0.01, 0.02))
    waited_s = [0.0]

    def pausing(event: threading.Event) -> Callable[[float], None]:
        def pause(seconds: float) -> None:
            event.wait(seconds)
            waited_s[0] += seconds

        return pause

    monkeypatch.setattr(tenacity, "sleep_using_event", pausing)
    monkeypatch.setattr(tenacity, "time", SimpleNamespace(monotonic=lambda: waited_s[0]))


def threads() -> int:
    return sum(thread.name == "zeus-trial" for thread in threading.enumerate())


def test_away_from_the_start(
    optimize: Optimize,
    begin: Optimize,
    kept: Between,
    monitor: FakeMonitor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept.away()
    optimizer = optimize(max_epochs=3)
    assert optimizer.get_batch_size() == 64
    assert optimizer.trial_number is None
    assert "nobody answers; start it; this run takes batch size 64, the default" in caplog.text
    kept.fails = None
    with optimizer:  # there again, but this run has no trial
        assert epochs(optimizer, monitor, *[0.1] * 9) == 3
    assert optimizer.training_finished
    assert not optimizer.converged
    other = optimize()
    assert kept.trials() == []

    kept.changed = {"best_batch_size": 16}
    with begin() as optimizer:
        epochs(optimizer, monitor, 0.9)
    kept.changed = {}
    kept.away()
    caplog.clear()
    assert optimize().get_batch_size() == 16
    assert "batch size 16, the best that is known" in caplog.text
    # The best size is no longer among the sizes, or was found on other GPUs.
    assert optimize(batch_sizes=[32, 64]).get_batch_size() == 64
    assert optimize(like=FakeMonitor("A40")).get_batch_size() == 64
    assert optimize(job_id="cifar-other").get_batch_size() == 64
    assert other.get_batch_size() == 16  # away only since it was made


def test_the_start_waits_once(optimize: Optimize, kept: Between) -> None:
    kept.away()
    optimizer = optimize(wait_s=0.1, raise_on_failure=True)
    tried = len(kept.asked)
    assert tried >= 3
    assert optimizer.get_batch_size() == 64  # an unreachable store is no failure of the run
    assert len(kept.asked) == tried + 1


def test_the_first_run_that_converges_is_the_best_that_is_known(
    optimize: Optimize, begin: Optimize, kept: Between, monitor: FakeMonitor, tmp_path: Path
) -> None:
    path = tmp_path / "elsewhere" / "best.json"
    with begin(cache=path, default_batch_size=128) as optimizer:
        epochs(optimizer, monitor, 0.9)
    assert list(json.loads(path.read_text()).values()) == [128]
    kept.away()
    assert optimize(cache=path, default_batch_size=64).get_batch_size() == 128
    for garbage in ("", "[]", "{", '{"a": "b"}'):
        path.write_text(garbage)
        assert optimize(cache=path).get_batch_size() == 64


def test_a_cache_that_cannot_be_written(
    begin: Optimize, monitor: FakeMonitor, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with begin(cache=tmp_path / "file" / "best.json") as optimizer:
        epochs(optimizer, monitor, 0.9)
    assert optimizer.converged


def test_away_in_between(
    begin: Optimize, kept: Between, monitor: FakeMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    with begin() as optimizer:
        epochs(optimizer, monitor, 0.1)
        kept.away()
        epochs(optimizer, monitor, 0.2, 0.3)
        assert not optimizer.training_finished
        assert kept.trials()[0].epochs == 1
        kept.fails = None
        # Nobody has to train on for that: the newest report is sent behind training's back.
        wait_for(lambda: kept.trials()[0].epochs == 3, "the newest report")
        assert (kept.trials()[0].energy, kept.trials()[0].metric) == (300, 0.3)
        wait_for(lambda: "received again" in caplog.text, "that to be said")
        epochs(optimizer, monitor, 0.9)
    assert optimizer.converged
    assert kept.trials()[0].converged
    assert caplog.text.count("reports are sent later") == 1
    assert threads() == 0


def test_training_waits_once_and_not_again(
    begin: Optimize, kept: Between, monitor: FakeMonitor
) -> None:
    with begin(wait_s=0.1) as optimizer:
        kept.away()
        epochs(optimizer, monitor, 0.1)
        before = len(kept.asking)
        assert kept.asking.count("MainThread") >= 4  # it tried more than once
        epochs(optimizer, monitor, *[0.1] * 5)
        wait_for(lambda: len(kept.asking) > before + 3, "more attempts")
        assert set(kept.asking[before:]) == {"zeus-trial"}
        kept.fails = None


def test_while_away_the_same_rules_hold(
    begin: Optimize, kept: Between, monitor: FakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeus.optimizer.batch_size.run.EXIT_S", 0.1)
    kept.changed = {"cost_bound": 1000.0}
    with begin() as optimizer:
        kept.away()
        assert epochs(optimizer, monitor, *[0.1] * 9, joules=300) == 3
        assert optimizer.training_finished
        assert not optimizer.converged


def test_a_run_that_ends_while_nobody_answers(
    optimize: Optimize,
    begin: Optimize,
    kept: Between,
    monitor: FakeMonitor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("zeus.optimizer.batch_size.run.EXIT_S", 0.1)
    with begin() as optimizer:
        kept.away()
        epochs(optimizer, monitor, 0.9)
    assert optimizer.converged
    assert "the end of this run could not be reported" in caplog.text
    assert kept.trials()[0].running
    wait_for(lambda: threads() == 0, "its thread to end")

    optimizer = optimize()
    kept.fails = None
    optimizer.get_batch_size()
    monkeypatch.setattr("zeus.optimizer.batch_size.run.EXIT_S", 60)
    with optimizer:
        kept.away()
        threading.Timer(0.1, lambda: setattr(kept, "fails", None)).start()
        epochs(optimizer, monitor, 0.9)
    assert kept.trials()[1].converged  # they came back in time


def test_a_server_that_does_not_know_the_run_any_more_gets_no_reports(
    begin: Optimize, kept: Between, monitor: FakeMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    with begin() as optimizer:
        epochs(optimizer, monitor, 0.1)
        store = kept.store()
        store.delete(JOB_ID)
        store.close()
        epochs(optimizer, monitor, 0.1, 0.1)
        asked = len(kept.asked)
        epochs(optimizer, monitor, 0.1, 0.9)
        assert optimizer.converged
    assert len(kept.asked) == asked
    assert caplog.text.count("is not reported any more") == 1


def test_an_error_of_the_store_counts_as_unreachable(
    optimize: Optimize,
    begin: Optimize,
    kept: Between,
    monitor: FakeMonitor,
    caplog: pytest.LogCaptureFixture,
) -> None:
    optimizer = optimize()
    kept.fails = ZeroDivisionError("division by zero")
    assert optimizer.get_batch_size() == 64
    assert "keeping trials failed (ZeroDivisionError: division by zero)" in caplog.text
    with optimizer:
        assert epochs(optimizer, monitor, 0.1, 0.9, 0.9) == 2
    assert optimizer.converged
    kept.fails = None
    with begin() as optimizer:
        kept.fails = ZeroDivisionError("division by zero")
        epochs(optimizer, monitor, 0.1)
        kept.fails = None
        wait_for(lambda: kept.trials()[0].epochs == 1, "the report")
        epochs(optimizer, monitor, 0.9)
    assert optimizer.converged


def test_a_short_absence_is_waited_for(
    begin: Optimize, kept: Between, monitor: FakeMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    def back_soon(status: int) -> None:
        kept.fails = ZeusBSORuntimeError("in trouble", status)
        threading.Timer(0.1, lambda: setattr(kept, "fails", None)).start()

    back_soon(503)
    with begin(wait_s=60) as optimizer:
        back_soon(0)
        epochs(optimizer, monitor, 0.1)
        assert kept.trials()[0].epochs == 1
        back_soon(500)
        epochs(optimizer, monitor, 0.9)
    assert kept.trials()[0].converged
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_run_is_kept_alive_until_it_ends(
    begin: Optimize, kept: Between, monitor: FakeMonitor
) -> None:
    kept.lease_s = 0.4
    optimizer = begin()
    wait_for(lambda: kept.asked.count("heartbeat") >= 3, "heartbeats")
    assert kept.trials()[0].heard_s > kept.trials()[0].began_s
    with optimizer:
        epochs(optimizer, monitor, 0.9)
    asked = len(kept.asked)
    assert threads() == 0
    assert len(kept.asked) == asked


def test_a_refusal_does_not_end_what_has_begun_and_is_not_waited_for(
    optimize: Optimize, begin: Optimize, kept: Between, monitor: FakeMonitor
) -> None:
    with begin() as optimizer:
        kept.fails = ZeusBSORuntimeError("the token is wrong", 401)
        assert epochs(optimizer, monitor, 0.1, 0.9) == 2
    assert optimizer.converged
    kept.fails = None
    kept.asked.clear()
    refused = optimize(wait_s=60)
    kept.fails = ZeusBSORuntimeError("no size is left", 409)
    refused.get_batch_size()
    assert kept.asked == ["register", "begin_trial"]  # refused requests are not repeated

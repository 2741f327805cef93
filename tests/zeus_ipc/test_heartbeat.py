"""The thread that sends the application's heartbeats."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import ended, forked, wait_for
from zeus_ipc import Client, errors
from zeus_ipc.heartbeat import HeartbeatThread
from zeus_ipc.replies import HeartbeatResult


class Daemon:
    """A transport that answers by itself, and records the callers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.lost: list[list[str]] = []
        self.deferred: dict[str, Any] | None = None
        self.ttl_ms = 150
        self.leases = 1
        self.used = True

    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.asked.append((message["op"], threading.current_thread().name))
        reply: dict[str, Any] = {"id": 1}
        if message["op"] == "heartbeat":
            reply["result"] = {"leases": self.leases, "ttl_ms": self.ttl_ms, "lost": self.lost}
        elif message["op"].startswith("set"):
            reply["result"] = {"gpus": {gpu: {} for gpu in message["gpus"]}}
        else:
            reply["result"] = {"released": 0}
        if self.deferred is not None:
            reply["deferred"], self.deferred = self.deferred, None
        return reply

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        self.asked.append((message["op"], threading.current_thread().name))

    def close(self) -> None:
        self.asked.append(("close", ""))

    def beats(self) -> int:
        return sum(op == "heartbeat" for op, _ in self.asked)


def heartbeats() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "zeus-heartbeat"}


def test_it_begins_with_the_first_lease_and_ends_with_the_client() -> None:
    others = heartbeats()
    daemon = Daemon()
    client = Client(transport=daemon)
    client.release()
    assert not heartbeats() - others
    client.set_power_limit("GPU-x", 1)
    wait_for(lambda: daemon.beats() >= 5, "heartbeats")
    assert {name for op, name in daemon.asked if op == "heartbeat"} == {"zeus-heartbeat"}
    client.close()
    wait_for(lambda: not heartbeats() - others, "the thread to end")


@pytest.mark.parametrize("block", [True, False])
def test_any_set_begins_it(block: bool) -> None:
    daemon = Daemon()
    with Client(transport=daemon) as client:
        client.set_gpu_clocks("GPU-x", 1, 2, block=block)
        wait_for(daemon.beats, "a heartbeat")


def test_a_forgotten_client_ends_its_thread() -> None:
    others = heartbeats()
    daemon = Daemon()
    client = Client(transport=daemon)
    client.set_power_limit("GPU-x", 1)
    wait_for(daemon.beats, "a heartbeat")
    del client
    wait_for(lambda: not heartbeats() - others, "the thread to end")


def test_without_the_thread_the_program_sends_heartbeats_itself() -> None:
    daemon = Daemon()
    with Client(transport=daemon, heartbeat=False) as client:
        client.set_power_limit("GPU-x", 1)
        assert client.heartbeat() == 1
        assert daemon.beats() == 1


def test_a_deferred_failure_is_raised_at_the_next_call() -> None:
    """The thread gets the reply that reports it; the program must still learn of it."""
    daemon = Daemon()
    with Client(transport=daemon) as client:
        client.set_power_limit("GPU-x", 1)
        last = {"code": "lease_expired", "message": "gone"}
        for count in (2, 3):
            daemon.deferred = {"count": count, "last": last}
            wait_for(lambda: daemon.deferred is None, "a heartbeat to bring it")
        beats = daemon.beats()
        wait_for(lambda: daemon.beats() > beats, "the one before to be noted")
        with pytest.raises(errors.DeferredSetFailed) as caught:
            client.set_power_limit("GPU-x", 1)
        assert caught.value.count == 5
        assert isinstance(caught.value.last, errors.LeaseExpired)
        client.set_power_limit("GPU-x", 1)


def test_a_loss_is_reported_once_and_a_release_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """A heartbeat may find fewer leases: another thread or client of the process released one."""
    daemon = Daemon()
    with Client(transport=daemon) as client:
        client.set_power_limit("GPU-x", 1)
        for leases, lost, counted in ((2, [], 0), (1, [], 0), (0, [["GPU-x", "power_limit"]], 1)):
            daemon.leases, daemon.lost = leases, lost
            before = daemon.beats()
            wait_for(lambda before=before: daemon.beats() > before + 3, "more heartbeats")
            assert client.leases_lost == counted
    told = [
        one for one in caplog.records if "lost its lease on power_limit of GPU-x" in one.message
    ]
    assert len(told) == 1


def test_heartbeats_stop_when_progress_ends_and_resume_with_it() -> None:
    daemon = Daemon()
    with Client(transport=daemon, stall_timeout_s=0.3) as client:
        client.set_power_limit("GPU-x", 1)

        def spoken(more_than: int) -> bool:
            """With progress: a busy machine may run the thread only after it would stall again."""
            client.progress()
            return daemon.beats() > more_than

        wait_for(lambda: spoken(0), "a heartbeat")
        silent = threading.Event()
        wait_for(lambda: _unchanged(daemon, silent), "silence")
        before = daemon.beats()
        wait_for(lambda: spoken(before), "it to speak again")


def _unchanged(daemon: Daemon, event: threading.Event) -> bool:
    before = daemon.beats()
    event.wait(0.4)
    return daemon.beats() == before


def test_a_child_of_fork_has_its_own_thread() -> None:
    daemon = Daemon()
    with Client(transport=daemon) as client:
        client.set_power_limit("GPU-x", 1)
        wait_for(daemon.beats, "a heartbeat")

        def beats() -> None:
            before = daemon.beats()
            client.set_power_limit("GPU-x", 1)
            wait_for(lambda: daemon.beats() > before, "a heartbeat of the child")

        assert ended(forked(beats)) == 0


def test_five_heartbeats_come_within_a_ttl_and_one_a_second_while_none_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    answers: list[HeartbeatResult | None] = [
        *(HeartbeatResult(leases=1, ttl_ms=ttl_ms, lost=[]) for ttl_ms in (15_000, 10)),
        *(None, HeartbeatResult(leases=1, ttl_ms=5000, lost=[])),
    ]

    class Answers:
        def beat(self) -> HeartbeatResult:
            if (answer := answers.pop(0)) is None:
                raise errors.DaemonUnavailable("away")
            return answer

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) > 6

    asked = Answers()
    thread = HeartbeatThread(asked.beat, 1.5)
    now_s = 1001.5
    monkeypatch.setattr("zeus_ipc.heartbeat.time", SimpleNamespace(monotonic=lambda: now_s))
    thread._progress_at = 1000.0
    stop: Any = SimpleNamespace(wait=lambda pause_s: wait(pause_s) or not answers)
    thread._run(stop)
    assert pauses == [0.0, 3.0, 0.05, 1.0, 1.0]
    now_s, answers[:] = 1001.6, [None]
    pauses.clear()
    thread._run(stop)
    assert (pauses, answers) == ([0.0, *[0.5] * 6], [None]), "it stalls"


def test_a_daemon_that_is_away_is_asked_again() -> None:
    calls = []

    class Away:
        def beat(self) -> dict[str, Any]:
            calls.append(1)
            raise errors.DaemonUnavailable("away")

    away = Away()
    heartbeat = HeartbeatThread(away.beat, None)
    heartbeat.start()
    wait_for(lambda: len(calls) >= 2, "another attempt")
    heartbeat.stop()

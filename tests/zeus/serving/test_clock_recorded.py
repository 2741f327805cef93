"""Clock control fed by the recorders in engines."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.zeus.serving.test_clock_requests import Sink
from zeus.serving import Queue, RequestFeed, Step
from zeus.serving.receiver import Receiver
from zeus.serving.recorder import Recorder
from zeus.serving.wire import Arrival, EngineStep, Finish, Owner

S = 10**9


def test_the_policy_gets_arrivals_steps_and_ends() -> None:
    sink = Sink()
    feed = RequestFeed(sink)
    assert feed.take(Arrival("1", "a", 1 * S, 100))
    assert feed.take(Arrival("1", "b", 2 * S, 50))
    assert not feed.take(Arrival("0", "c", 2 * S, 50))  # another engine's
    assert feed.take(Owner("a", "someone"))
    # 60 of a's tokens are in the prefix cache.
    assert feed.take(EngineStep("1", 1, 2 * S, 3 * S, ["a"], [True], [40], [60]))
    assert feed.take(EngineStep("1", 2, 3 * S, 4 * S, ["a"], [False], [1], [100]))
    assert feed.take(Finish("1", "a"))

    assert sink.steps == [
        (Step(2.0, 3.0, 40, 0, 0, 0.0), Queue(1, 50, pytest.approx(1.0))),
        (Step(3.0, 4.0, 0, 1, 100, 0.0), Queue(1, 50, pytest.approx(2.0))),
    ]
    assert sink.requests == [(pytest.approx(2.0), pytest.approx(1.0))]
    assert sink.drains == 0


def test_a_recorder_sends_to_the_ledger_and_to_clock_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = [Sink(), Sink()]
    paths = [str(tmp_path / "ledger"), str(tmp_path / "clocks")]
    receivers = [
        Receiver(path, RequestFeed(sink).take) for path, sink in zip(paths, sinks, strict=True)
    ]
    monkeypatch.setenv("ZEUS_SERVING_SOCKET", ":".join(paths))
    recorder = Recorder()
    now_ns = time.monotonic_ns() - 10_000
    recorder.arrived("a", now_ns, 5)
    recorder.step(now_ns, now_ns + 1000, ["a"], [True], [5], [0])
    recorder.finish("a")
    for receiver in receivers:
        receiver.receive()
        receiver.close()
    assert [sink.drains for sink in sinks] == [1, 1]
    assert [len(sink.steps) for sink in sinks] == [1, 1]
    assert (recorder.sent, recorder.dropped) == (6, 0)
    assert not any(Path(path).exists() for path in paths)

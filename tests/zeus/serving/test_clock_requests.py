"""Requests followed from arrival to end."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus.serving import Arrival, ClockPolicy, EngineStep, Finish, Queue, RequestFeed, Step
from zeus.serving.receiver import Receiver
from zeus.serving.recorder import Recorder
from zeus.serving.wire import Owner

S = 10**9


class Sink:
    """Records the calls."""

    def __init__(self) -> None:
        self.steps: list[tuple[Step, Queue]] = []
        self.requests: list[tuple[float, float]] = []
        self.drains = 0

    def step(self, step: Step, queue: Queue) -> None:
        self.steps.append((step, queue))

    def finished(self, ttft_s: float, tpot_s: float) -> None:
        self.requests.append((ttft_s, tpot_s))

    def drained(self) -> None:
        self.drains += 1


class Feed:
    """A feed of one engine, in seconds."""

    def __init__(self, sink: Sink) -> None:
        self.take = RequestFeed(sink).take

    def arrived(self, request: str, at_s: float, prompt: int) -> None:
        assert self.take(Arrival("0", request, round(at_s * S), prompt))

    def step(self, begin_s: float, end_s: float, *rows: list[Any]) -> None:
        assert self.take(EngineStep("0", 1, round(begin_s * S), round(end_s * S), *rows))

    def finish(self, request: str) -> None:
        assert self.take(Finish("0", request))


def test_requests_from_their_arrivals_to_their_ends() -> None:
    sink = Sink()
    feed = Feed(sink)
    feed.arrived("a", 1.0, 100)
    feed.arrived("b", 1.5, 50)
    assert feed.take(Owner("a", "someone"))
    assert not feed.take(Arrival("1", "c", 2 * S, 50)), "another engine's"
    feed.step(2.0, 2.1, ["a"], [True], [60], [0])
    feed.step(2.1, 2.2, ["a", "b"], [True, True], [40, 10], [60, 0])  # a's first token
    feed.step(2.2, 2.3, ["a", "b"], [False, True], [1, 40], [100, 10])  # a's second, b's first
    feed.finish("a")
    feed.step(2.3, 2.4, ["b"], [False], [1], [50])
    feed.finish("b")
    feed.arrived("c", 2.4, 100)
    feed.step(2.5, 2.6, ["c"], [True], [40], [60])  # the rest is in the prefix cache
    assert sink.steps == [
        (
            Step(pytest.approx(2.0), pytest.approx(2.1), 60, 0, 0, 0.0),
            Queue(2, 90, pytest.approx(1.1)),
        ),
        (
            Step(pytest.approx(2.1), pytest.approx(2.2), 50, 0, 0, 0.0),
            Queue(1, 40, pytest.approx(0.7)),
        ),
        (Step(pytest.approx(2.2), pytest.approx(2.3), 40, 1, 100, 0.0), Queue(0, 0, 0.0)),
        (Step(pytest.approx(2.3), pytest.approx(2.4), 0, 1, 50, 0.0), Queue(0, 0, 0.0)),
        (Step(pytest.approx(2.5), pytest.approx(2.6), 40, 0, 0, 0.0), Queue(0, 0, 0.0)),
    ]
    assert sink.requests == [
        (pytest.approx(1.2), pytest.approx(0.1)),
        (pytest.approx(0.8), pytest.approx(0.1)),
    ]
    assert sink.drains == 1


def test_a_request_that_is_dropped_has_no_latency() -> None:
    sink = Sink()
    feed = Feed(sink)
    feed.arrived("a", 1.0, 100)
    feed.finish("a")
    feed.finish("a")
    assert len(sink.requests) == 1
    assert math.isnan(sink.requests[0][0])
    feed.step(2.0, 2.1, ["b"], [False], [1], [10])
    assert sink.steps[-1][1] == Queue(0, 0, 0.0), "what was dropped waits no more"
    ClockPolicy([1000], 0.5, 0.025).finished(*sink.requests[0])


names = st.sampled_from("abcde")


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("arrived"), names, st.integers(0, 50)),
            st.tuples(st.just("prefill"), names, st.integers(1, 60)),
            st.tuples(st.just("decode"), names, st.just(1)),
            st.tuples(st.just("finish"), names, st.just(0)),
        ),
        max_size=60,
    )
)
def test_the_queue_is_what_is_left(calls: list[tuple[str, str, int]]) -> None:
    sink = Sink()
    feed = Feed(sink)
    left: dict[str, int] = {}
    now = 0.0
    for what, name, count in calls:
        now += 1.0
        if what == "arrived":
            feed.arrived(name, now, count)
            left[name] = count
        elif what == "finish":
            feed.finish(name)
            left.pop(name, None)
        else:
            feed.step(now - 0.5, now, [name], [what == "prefill"], [count], [0])
            waiting = what == "prefill" and left.get(name, 0) > count
            left[name] = left[name] - count if waiting else -1
            queue = sink.steps[-1][1]
            assert queue.waiting == sum(one >= 0 for one in left.values())
            assert queue.backlog_tokens == sum(one for one in left.values() if one > 0)
            assert queue.oldest_wait_s >= 0


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

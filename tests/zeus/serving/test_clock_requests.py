"""Requests followed from arrival to end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeus.serving import Arrival, ClockPolicy, EngineStep, Finish, Queue, RequestFeed, Step

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
        self._feed = RequestFeed(sink)

    def arrived(self, request: str, at_s: float, prompt: int) -> None:
        assert self._feed.take(Arrival("0", request, round(at_s * S), prompt))

    def step(self, begin_s: float, end_s: float, *rows: list[Any]) -> None:
        assert self._feed.take(EngineStep("0", 1, round(begin_s * S), round(end_s * S), *rows))

    def finish(self, request: str) -> None:
        assert self._feed.take(Finish("0", request))


def test_two_requests() -> None:
    sink = Sink()
    feed = Feed(sink)
    feed.arrived("a", 1.0, 100)
    feed.arrived("b", 1.5, 50)
    feed.step(2.0, 2.1, ["a"], [True], [60], [0])
    feed.step(2.1, 2.2, ["a", "b"], [True, True], [40, 10], [60, 0])  # a's first token
    feed.step(2.2, 2.3, ["a", "b"], [False, True], [1, 40], [100, 10])  # a's second, b's first
    feed.finish("a")
    feed.step(2.3, 2.4, ["b"], [False], [1], [50])
    feed.finish("b")
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

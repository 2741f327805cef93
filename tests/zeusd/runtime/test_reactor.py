from __future__ import annotations

import logging
import os
import threading

import pytest

from tests.support import TIMEOUT_S
from zeusd.runtime.reactor import Reactor


def run(reactor: Reactor) -> None:
    reactor.run(lambda: None, lambda: None)


def test_calls_come_from_descriptors_other_threads_and_time() -> None:
    reactor = Reactor()
    readable, writable = os.pipe()
    seen: list[str] = []

    def read() -> None:
        seen.append(os.read(readable, 10).decode())
        reactor.call_later(0.0, later)

    def later() -> None:
        seen.append("later")
        reactor.remove(readable)
        threading.Thread(target=lambda: reactor.post(posted)).start()

    def posted() -> None:
        seen.append("posted")
        reactor.stop()

    reactor.add_reader(readable, read)
    os.write(writable, b"read")
    run(reactor)
    assert seen == ["read", "later", "posted"]
    os.close(readable)
    os.close(writable)
    reactor.close()


def test_timers_fire_in_the_order_of_their_times() -> None:
    reactor = Reactor()
    seen: list[int] = []
    for number, delay_s in ((2, 0.02), (1, 0.01), (3, 0.03)):
        reactor.call_later(delay_s, lambda number=number: seen.append(number))
    reactor.call_later(0.04, reactor.stop)
    run(reactor)
    assert seen == [1, 2, 3]
    reactor.close()


def test_what_has_the_same_period_wakes_the_loop_once() -> None:
    now_ns = 123_456_789
    reactor = Reactor(lambda: now_ns)
    calls: dict[str, list[int]] = {"first": [], "second": []}

    def pass_time() -> int:
        nonlocal now_ns
        now_ns += 5_000_000
        return now_ns

    def begin(name: str) -> None:
        reactor.every(0.1, lambda: calls[name].append(now_ns))

    begin("first")
    reactor.call_later(0.03, lambda: begin("second"))
    reactor.call_later(1.0, reactor.stop)
    reactor.run(pass_time, lambda: None)
    assert len(calls["first"]) == pytest.approx(11, abs=1)
    assert calls["first"][1:] == calls["second"][1:]
    reactor.close()


def test_a_timer_may_be_ages_away() -> None:
    reactor = Reactor()
    reactor.call_later(2**63 / 1e9, reactor.stop)
    threading.Timer(0.01, reactor.stop).start()
    run(reactor)
    reactor.close()


def test_the_deadline_of_the_core_is_kept() -> None:
    import time

    reactor = Reactor()
    due_ns = time.monotonic_ns() + 10_000_000
    came: list[int] = []

    def on_time() -> None:
        came.append(time.monotonic_ns())
        reactor.stop()

    reactor.run(lambda: due_ns, on_time)
    assert came[0] >= due_ns
    reactor.close()


def test_a_descriptor_whose_handler_always_fails_delays_nothing_else() -> None:
    reactor = Reactor()
    readable, writable = os.pipe()
    os.write(writable, b"never read")

    def fail() -> None:
        raise KeyError("a bug")

    reactor.add_reader(readable, fail)
    reactor.call_later(0.005, lambda: reactor.call_soon(lambda: reactor.post(reactor.stop)))
    run(reactor)
    os.close(readable)
    os.close(writable)
    reactor.close()


def test_an_event_that_fails_is_logged_and_the_loop_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reactor = Reactor()

    def fail() -> None:
        raise KeyError("a bug")

    reactor.post(fail)
    reactor.call_later(0.0, fail)
    reactor.call_later(0.001, reactor.stop)
    with caplog.at_level(logging.ERROR):
        run(reactor)
    assert len(caplog.records) == 2
    assert "a bug" in caplog.text
    reactor.close()


def test_posts_of_a_thread_after_the_end_reach_no_other_file() -> None:
    reactor = Reactor()
    before = set(os.listdir("/proc/self/fd"))
    reactor.close()
    readable, writable = os.pipe2(os.O_NONBLOCK)
    numbers = {str(readable), str(writable)}
    assert numbers & before, "the test needs a number that the reactor had"
    thread = threading.Thread(target=lambda: reactor.post(lambda: None))
    thread.start()
    thread.join(TIMEOUT_S)
    os.close(writable)
    assert os.read(readable, 8) == b""
    os.close(readable)

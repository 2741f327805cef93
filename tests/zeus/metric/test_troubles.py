"""Gateways that do not work, and energies that are not known yet."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
import time
from typing import Any

import pytest

from tests.support import TIMEOUT_S, free_port, wait_for
from tests.zeus.gateway import Double, Series
from tests.zeus.metric.metrics import (
    GPU_J,
    IDLE_W,
    counter,
    histogram,
    pushed,
    spend,
    threads,
    told,
)
from tests.zeus.node import VirtualNode
from zeus import _pushgateway, metric
from zeus.exceptions import ZeusdError
from zeus.metric import EnergyCumulativeCounter, Metric
from zeus.monitor import Measurement
from zeus.monitor.lookup import TICK_NS, WindowLookup
from zeus_ipc import circuit
from zeus_ipc.errors import RequestTimeout


def test_a_gateway_that_is_down_is_reported_once_and_nothing_is_lost(
    node: VirtualNode, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    ones = histogram(f"127.0.0.1:{port}"), counter(f"127.0.0.1:{port}")
    failures = _count_failures(ones[0])
    for _ in range(3):
        for one in ones:
            spend(node, one, "step", 1)
        before = len(failures)
        wait_for(lambda: len(failures) > before, "another failure")
    wait_for(lambda: len(told(caplog)) == 2, "one warning of each metric")
    assert "Connection refused" in told(caplog)[0]
    assert "training continues" in told(caplog)[0]
    double = Double(port)
    try:
        # No window ends any more, but the push is retried.
        # The energy of the last window may be known after the first push that arrives.
        counts = f"{GPU_J}_count"
        wait_for(
            lambda: Series(pushed(double, "energy_histogram")).of(counts) == [3, 3], "the histogram"
        )
        wait_for(lambda: totals(double) == [pytest.approx(3 * IDLE_W, rel=0.02)] * 2, "the counter")
        double.does = "refuse"
        spend(node, ones[0], "step", 1)
        wait_for(lambda: len(told(caplog)) == 3, "the next trouble to be told of")
        assert "507" in told(caplog)[2]
    finally:
        double.close()


def totals(double: Double) -> list[float]:
    text = pushed(double, "energy_counter")
    return Series(text).of(f"{GPU_J}_total") if text else []


def _count_failures(one: Metric) -> list[bool]:
    failures: list[bool] = []
    push = one.group.push

    def counted() -> bool:
        worked = push()
        if not worked:
            failures.append(worked)
        return worked

    one.group.push = counted
    return failures


def test_a_gateway_that_hangs_delays_neither_windows_nor_the_end_for_long(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    others = threads()  # of earlier tests
    monkeypatch.setattr(metric, "CLOSE_S", 0.2)
    monkeypatch.setattr(_pushgateway, "TIMEOUT_S", 10 * TIMEOUT_S)
    double.does = "hang"
    ones: list[Metric] = [histogram(double.address), counter(double.address)]
    for one in ones:
        spend(node, one, "step", 1)
    wait_for(lambda: double.asked == 2, "both to hang")
    for number in range(1000):
        for one in ones:
            one.begin_window(f"step {number % 3}", sync_execution=False)
            one.end_window(f"step {number % 3}", sync_execution=False)
    assert double.asked == 2  # all of that while the gateway kept both
    assert len(threads() - others) == 2
    deadlines_s: list[float] = []
    awaits = Metric._await_end

    def awaited(one: Metric, deadline_s: float) -> None:
        deadlines_s.append(deadline_s)
        awaits(one, deadline_s)

    monkeypatch.setattr(Metric, "_await_end", awaited)
    begun_s = time.monotonic()
    metric.close_all()
    assert time.monotonic() - begun_s >= 0.2
    first_s, second_s = deadlines_s
    assert first_s == second_s  # together, not each
    assert [one for one in told(caplog) if "not pushed within 0.2 s" in one] == told(caplog)
    assert len(told(caplog)) == 2


def test_a_silent_gateway_is_abandoned_after_a_while(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(_pushgateway, "TIMEOUT_S", 0.05)
    double.does = "hang"
    one = histogram(double.address)
    spend(node, one, "step", 1)
    wait_for(lambda: double.asked >= 3, "it to be tried again")
    double.does = "take"
    wait_for(lambda: double.series().of(f"{GPU_J}_count") == [1, 1], "the observation")
    assert len(told(caplog)) == 1
    assert "timed out" in told(caplog)[0]


def test_a_gateway_that_trickles_holds_a_push_no_longer(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each byte comes within the time limit; so did the push, for as long as they came."""
    monkeypatch.setattr(_pushgateway, "TIMEOUT_S", 0.2)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-Filler: ")
                while not ended.wait(0.05):
                    connection.sendall(b"x")

        threading.Thread(target=trickle, daemon=True).start()
        one = histogram(f"127.0.0.1:{server.getsockname()[1]}")
        spend(node, one, "step", 1)
        wait_for(lambda: told(caplog), "the push to be given up")
        assert "timed out" in told(caplog)[0]
        ended.set()
        one.close()


@pytest.mark.parametrize(
    ("given", "sent"), [("alice:p%40ss:w", b"alice:p@ss:w"), ("p%40ss", b"p@ss:")]
)
def test_a_user_and_password_reach_the_gateway_and_no_log(
    node: VirtualNode, double: Double, caplog: pytest.LogCaptureFixture, given: str, sent: bytes
) -> None:
    one = histogram(double.address.replace("http://", f"http://{given}@"))
    spend(node, one, "step", 1)
    wait_for(lambda: double.authorizations, "a push")
    assert base64.b64decode(double.authorizations[0].removeprefix("Basic ")) == sent
    double.does = "refuse"
    spend(node, one, "step", 1)
    wait_for(lambda: told(caplog), "a warning")
    assert f"gateway at {double.address} takes no metrics" in told(caplog)[0]
    with pytest.raises(ValueError, match="such as http://gateway:9091") as raised:
        histogram("ftp://alice:secret@gateway")
    assert not any("p%40ss" in one or "alice" in one for one in [caplog.text, str(raised.value)])


def test_a_server_that_is_no_gateway_ends_nothing(
    node: VirtualNode, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.recv(65536)
                    connection.sendall(b"220 mail.example.org\r\n\r\n")
                    connection.close()

        threading.Thread(target=talk, daemon=True).start()
        one = histogram(f"127.0.0.1:{server.getsockname()[1]}")
        spend(node, one, "step", 1)
        wait_for(lambda: told(caplog), "a warning")
        failures = _count_failures(one)
        wait_for(lambda: failures, "another attempt")
        one.close()
    assert len(told(caplog)) == 1
    assert "takes no metrics (220 mail.example.org" in told(caplog)[0]


def test_an_error_of_its_own_does_not_end_the_thread(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = histogram(double.address)
    tried: list[None] = []

    def fail(final: bool) -> bool:
        tried.append(None)
        raise KeyError("a mishap")

    with monkeypatch.context() as patch:
        patch.setattr(one, "_update", fail)
        spend(node, one, "step", 1)
        wait_for(lambda: len(tried) > 2, "some attempts")
    wait_for(lambda: double.series().of(f"{GPU_J}_count") == [1, 1], "the observation")
    assert told(caplog) == ["EnergyHistogram could not be updated"]


def test_windows_that_end_while_zeusd_is_away_are_counted_later(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ones: list[Metric] = [histogram(double.address), counter(double.address)]
    asked: list[None] = []

    def gone(*args: object) -> None:
        asked.append(None)
        raise RequestTimeout("zeusd did not answer")

    with monkeypatch.context() as away:
        away.setattr(node.client, "windows", gone)
        for one in ones:
            for _ in range(3):
                spend(node, one, "step", 1)
        ones[1].begin_window("open")
        node.clock.sleep(1)
        before = len(asked)
        wait_for(lambda: len(asked) > before + 20, "many attempts")
    wait_for(
        lambda: Series(pushed(double, "energy_histogram")).of(f"{GPU_J}_count") == [3, 3],
        "the observations",
    )

    def counted() -> bool:
        found = Series(pushed(double, "energy_counter"))
        ended, still_open = (found.of(f"{GPU_J}_total", window=name) for name in ("step", "open"))
        whole = ended == [pytest.approx(3 * IDLE_W, rel=0.02)] * 2
        return whole and len(still_open) == 2 and min(still_open) > 0.95 * IDLE_W

    wait_for(counted, "both windows of the counter")
    assert [one for one in told(caplog) if "windows for j cannot be looked up now" in one] == [
        "the energy of windows for j cannot be looked up now: zeusd did not answer"
    ] * 2


def test_of_windows_that_end_while_zeusd_is_away_an_update_asks_for_one(
    node: VirtualNode, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that neither an update nor the end takes longer, the more there are."""
    monkeypatch.setattr(metric, "PUSH_EVERY_S", 60.0)
    one = histogram(double.address)
    asked: list[Measurement] = []

    def gone(measurement: Measurement) -> None:
        asked.append(measurement)
        raise ZeusdError("zeusd did not answer") from RequestTimeout("zeusd did not answer")

    with monkeypatch.context() as away:
        away.setattr(Measurement, "look_up", gone)
        for _ in range(50):
            spend(node, one, "step", 1)
        node.clock.sleep(1)
        one.close()
    assert len(asked) == 1


@pytest.mark.parametrize("answers", [True, False])
def test_the_end_waits_longer_for_energies_than_training(
    node: VirtualNode,
    double: Double,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answers: bool,
) -> None:
    monkeypatch.setattr(metric, "PUSH_EVERY_S", 60.0)
    monkeypatch.setattr(metric, "CLOSE_S", 2 * TIMEOUT_S if answers else 0.2)
    ones: list[Metric] = [
        histogram(double.address),
        EnergyCumulativeCounter([], None, 60.0, double.address, "j"),
    ]
    windows = node.client.windows

    def late(*args: Any, **more: Any) -> Any:
        if not answers or circuit._limit_s.get() is not None:
            raise RequestTimeout("zeusd did not answer")
        return windows(*args, **more)

    monkeypatch.setattr(node.client, "windows", late)
    for one, monitor in zip(ones, node.monitors[-2:], strict=True):
        lookup = monitor._lookup

        def passes(lookup: WindowLookup = lookup) -> None:
            node.clock.sleep(0.2)  # while the thread waits
            lookup.round(node.clock() - TICK_NS)

        lookup.wake = passes
        spend(node, one, "step", 1)
        one.begin_window("open")
        node.clock.sleep(2)
        one.close()

    def missing() -> list[str]:
        found = (one.partition("lacks the energy of ")[2] for one in told(caplog))
        return [*filter(None, found)]

    if answers:
        assert missing() == []
        assert Series(pushed(double, "energy_histogram")).of(f"{GPU_J}_count") == [1, 1]
        found = Series(pushed(double, "energy_counter"))
        for name, seconds in (("step", 1), ("open", 2)):
            joules = pytest.approx(seconds * IDLE_W, rel=0.05)
            assert found.of(f"{GPU_J}_total", window=name) == [joules] * 2
    else:
        some = [f"{each}: zeusd did not answer in time" for each in ("1 window", "2 windows")]
        wait_for(lambda: missing() == some, "both to be told of")


def test_unknowable_energies_are_left_out_and_the_rest_continues(
    node: VirtualNode, double: Double, caplog: pytest.LogCaptureFixture
) -> None:
    node.clock.sleep(100)
    one, total = histogram(double.address), counter(double.address)
    one.begin_window("a")
    node.monitors[-2].measurement_states["a"].t_ns -= 50_000_000_000
    one.end_window("a")
    spend(node, one, "a", 1)
    total.begin_window("b")
    node.monitors[-1].measurement_states["b"].t_ns -= 50_000_000_000
    wait_for(lambda: len(told(caplog)) == 2, "both to be told of")
    assert all("left out" in one and "before what zeusd remembers" in one for one in told(caplog))
    wait_for(
        lambda: Series(pushed(double, "energy_histogram")).of(f"{GPU_J}_count") == [1, 1],
        "the other window",
    )
    node.clock.sleep(10)
    total.end_window("b")
    total.close()
    totals = Series(pushed(double, "energy_counter")).of(f"{GPU_J}_total")
    assert totals == [pytest.approx(10 * IDLE_W, rel=0.05)] * 2

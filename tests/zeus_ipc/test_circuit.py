"""How long a program waits for a daemon that does not answer, by the waits that it requests."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import wait_for
from zeus_ipc import Client, circuit
from zeus_ipc.circuit import PROMPT_S, REFILL_S, WAIT_S, bounded, not_before, unanswered
from zeus_ipc.errors import (
    DaemonUnavailable,
    DeadlineExceeded,
    LeaseHeld,
    RequestTimeout,
    SeveralGpusFailed,
)


class Daemon:
    """A fake transport. While it is silent, requests wait without an answer: no time passes."""

    used = True

    def __init__(self) -> None:
        self.silent = threading.Event()
        self.waits: list[tuple[str, float]] = []
        self.threads: set[threading.Thread] = set()

    def request(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self.waits.append((threading.current_thread().name, timeout_s))
        self.threads.add(threading.current_thread())
        if self.silent.is_set():
            raise RequestTimeout("zeusd did not answer")
        return {"result": {"leases": [], "released": 0}}

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        self.request(message, timeout_s)

    def subscribe(self, names: Any, path: Any, buffer: int) -> Any:
        raise NotImplementedError("no test here subscribes")

    def close(self) -> None:
        pass

    def waited_here(self) -> list[float]:
        """How long this thread was ready to wait, each time."""
        here = threading.current_thread().name
        return [wait_s for name, wait_s in self.waits if name == here]


def asking(daemon: Daemon) -> bool:
    """Whether a thread still asks this daemon in the background."""
    return any(one.is_alive() for one in daemon.threads - {threading.current_thread()})


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    monkeypatch.setattr(circuit, "PROBE_S", 0.01)
    return Daemon()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with Client(transport=daemon) as client:
        yield client
        daemon.silent.clear()


def test_only_the_first_of_all_bounded_calls_waits(daemon: Daemon, client: Client) -> None:
    daemon.silent.set()
    for _ in range(20):
        with bounded(), pytest.raises((RequestTimeout, DaemonUnavailable)):
            client.leases()
        with bounded(), pytest.raises((RequestTimeout, DaemonUnavailable)):
            client.set_power_limit("GPU-0", 100_000, block=False)
    assert daemon.waited_here() == [WAIT_S]
    assert not client.answers


def late(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, takes_s: float
) -> tuple[list[float], list[float]]:
    """Makes answers take so long, at most until the deadline. Returns the time, and how long they
    take from now on, to be changed in place, s."""
    clock_s, takes = [1000.0], [takes_s]
    monkeypatch.setattr(circuit.time, "monotonic", lambda: clock_s[0])
    prompt = daemon.request

    def answer(message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        clock_s[0] += min(takes[0], timeout_s)
        return prompt(message, timeout_s)

    monkeypatch.setattr(daemon, "request", answer)
    return clock_s, takes


def test_answers_that_come_late_draw_on_one_budget(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a driver that hangs: zeusd reports it at each request's deadline."""
    clock_s, _ = late(daemon, monkeypatch, math.inf)
    for _ in range(3):
        with bounded():
            client.leases()
    assert daemon.waited_here() == [WAIT_S, PROMPT_S, PROMPT_S]
    clock_s[0] += REFILL_S
    with bounded():
        client.leases()
    assert daemon.waited_here()[-1] == pytest.approx(WAIT_S)


def test_waiting_for_the_next_update_is_no_delay(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the energy of a window that has just ended, which a sensor's next tick brings."""
    clock_s, takes_s = late(daemon, monkeypatch, 0.1)
    for _ in range(10):
        with bounded(), not_before(clock_s[0] + 0.15):
            client.leases()
    assert daemon.waited_here() == [WAIT_S] * 10
    takes_s[0] = 1.0
    for _ in range(2):
        with bounded(), not_before(clock_s[0] + 0.15):
            client.leases()
    assert daemon.waited_here()[-2:] == [WAIT_S, pytest.approx(PROMPT_S + 0.15)]
    with bounded():
        client.leases()
    assert daemon.waited_here()[-1] == pytest.approx(WAIT_S - 0.15, abs=0.01)


def test_it_closes_when_the_daemon_answers_again(daemon: Daemon, client: Client) -> None:
    daemon.silent.set()
    with bounded(), pytest.raises(RequestTimeout):
        client.leases()
    wait_for(lambda: len(daemon.waits) > 3, "the thread to ask")
    assert not client.answers
    daemon.silent.clear()
    wait_for(lambda: client.answers, "the circuit to close")
    with bounded():
        assert client.leases() == []
    wait_for(lambda: not asking(daemon), "the thread to end")


def test_without_another_thread_it_stays_open_until_an_answer(
    daemon: Daemon, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the interpreter, Python 3.12 and later start none."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    daemon.silent.set()
    for error in (RequestTimeout, DaemonUnavailable):
        with bounded(), pytest.raises(error):
            client.leases()
    daemon.silent.clear()
    assert client.leases() == []
    assert client.answers


def test_a_request_outside_of_bounded_waits_its_full_time(daemon: Daemon, client: Client) -> None:
    daemon.silent.set()
    for _ in range(2):
        with pytest.raises(RequestTimeout):
            client.leases()
    assert daemon.waited_here() == [5.0, 5.0]


def test_a_client_that_is_forgotten_ends_the_thread(daemon: Daemon) -> None:
    client = Client(transport=daemon)
    daemon.silent.set()
    with bounded(), pytest.raises(RequestTimeout):
        client.leases()
    del client

    def ended() -> bool:
        gc.collect()  # the error's frames refer to it
        return not asking(daemon)

    wait_for(ended, "the thread to end")


def test_errors_that_count_as_no_answer() -> None:
    assert unanswered(RequestTimeout("..."))
    assert unanswered(DeadlineExceeded("..."))
    assert unanswered(SeveralGpusFailed({"a": LeaseHeld("..."), "b": DeadlineExceeded("...")}))
    assert not unanswered(SeveralGpusFailed({"a": LeaseHeld("..."), "b": LeaseHeld("...")}))
    assert not unanswered(LeaseHeld("..."))
    assert not unanswered(None)

"""Forward-pass metrics as a feed: messages, and the command beside an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import TIMEOUT_S, as_nobody, public_directory, running_daemon, wait_for
from zeus.serving import Queue, Step
from zeus.serving.clock_requests import ClockPasses
from zeus.serving.command import main
from zeus.serving.forward_pass import ForwardPass, decode, in_turn
from zeus_ipc.errors import RequestRejected

ROOT = Path(__file__).resolve().parents[3]


def message(seconds: float = 0.01, waiting: int = 0, worker: str = "w", **more: int) -> bytes:
    scheduled = [1, more.get("prefill", 0), 0.0, 0, more.get("decoding", 8), 4000, 0.0]
    queued = [waiting, 100 * waiting, 0.0, 0, 0, 0.0]
    fields: list[Any] = [1, worker, more.get("rank", 0), 7, seconds, scheduled, queued]
    return bytes(msgpack.packb(fields))


def passed(now_s: float, *arguments: Any, **more: Any) -> ForwardPass:
    return decode(message(*arguments, **more), round(now_s * 1e9))


class Sink:
    """Records the messages."""

    def __init__(self) -> None:
        self.told: list[tuple[Step, Queue] | None] = []
        self.requests: list[tuple[float, float]] = []

    def step(self, step: Step, queue: Queue) -> None:
        self.told.append((step, queue))

    def seen(self, ttft_s: float, tpot_s: float) -> None:
        self.requests.append((ttft_s, tpot_s))

    def drained(self) -> None:
        self.told.append(None)


def test_a_message_is_a_step() -> None:
    sink = Sink()
    feed = ClockPasses(sink)
    feed(passed(100.0, 0.010, waiting=2, prefill=64))
    feed(passed(100.005, 0.010, waiting=1))  # steps do not overlap
    feed(passed(101.0, 0.0, decoding=0))
    assert sink.told == [
        (Step(99.99, 100.0, 64, 8, 4000, 0.0), Queue(2, 200, 0.0)),
        (Step(100.0, 100.005, 0, 8, 4000, 0.0), Queue(1, 100, pytest.approx(0.005))),
        None,
    ]


def test_the_newer_layout_says_what_was_timed() -> None:
    fields = msgpack.unpackb(message(0.02))
    found = decode(msgpack.packb([*fields[:4], "execute_model", *fields[4:]]), 10**9)
    assert found == decode(message(0.02), 10**9)


def test_only_one_worker_is_accepted() -> None:
    sink = Sink()
    feed = ClockPasses(sink, "1")
    feed(passed(1.0, rank=0))
    feed(passed(2.0, rank=1, worker="a"))
    feed(passed(3.0, rank=1, worker="b"))
    assert [step.end_s for step, _ in filter(None, sink.told)] == [2.0]


values = st.recursive(
    st.one_of(st.integers(-(2**63), 2**63), st.floats(), st.text(max_size=5), st.none()),
    lambda inner: st.lists(inner, max_size=8),
)


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.lists(values, max_size=9).map(msgpack.packb)))
def test_anything_else_is_rejected_or_a_step(data: bytes) -> None:
    sink = Sink()
    try:
        ClockPasses(sink)(decode(data, 10**9))
    except RequestRejected:
        with pytest.raises(RequestRejected, match="not a message"):
            decode(data, 10**9)
    assert len(sink.told) <= 1


def test_the_waits_of_a_queue_are_those_of_first_in_first_out() -> None:
    sink = Sink()
    feed = ClockPasses(sink)
    for second, waiting in ((1, 0), (2, 2), (3, 3), (4, 1), (5, 0)):
        feed(passed(second, 0.01, waiting))
    assert [queue.oldest_wait_s for _, queue in filter(None, sink.told)] == [0, 0, 1, 1, 0]
    assert [wait for wait, _ in sink.requests] == [2, 2, 2]


def test_the_latencies_of_requests_are_estimated() -> None:
    sink = Sink()
    feed = ClockPasses(sink)
    for first in range(0, 64, 4):  # read together, some of them late
        now_s = 1.03 + 0.010 * first + 0.005 * (first % 8 > 0)
        read = [passed(now_s, 0.010, waiting=int(first + n < 10)) for n in range(4)]
        for one in in_turn(read, round((now_s - 0.04) * 1e9)):
            feed(one)
    assert sink.requests[0] == (pytest.approx(0.1), 0.0), "left the queue after ten steps"
    assert sink.requests[1] == (0.0, pytest.approx(0.010))


@pytest.mark.parametrize(
    "option",
    [
        "clocks --state {}",
        "tune --out {}",
        "tune --picture {}",
        "clocks --metrics-port 65536",
        "clocks --rank -1",
    ],
)
def test_what_cannot_be_used_ends_the_command_at_once(tmp_path: Path, option: str) -> None:
    command, *rest = option.format(tmp_path / "no" / "file").split()
    needed = f"{command} --slo-ttft 0.5 --slo-tpot 0.025 --gpu 0 --feed x".split()
    result = CliRunner().invoke(main, [*needed, *rest])
    assert result.exit_code == 2
    assert f"Invalid value for '{rest[0]}'" in result.output


def test_the_command_beside_an_engine() -> None:
    """The engine publishes, is cut off and returns; then the command is killed."""
    with (
        public_directory() as directory,
        running_daemon("--simulate", "v100-pcie", "--socket-mode", "0666", gpus=1) as daemon,
        zmq.Context.instance().socket(zmq.PUB) as engine,
    ):
        engine.setsockopt(zmq.LINGER, 0)
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        state = directory / "step-times.json"
        options: dict[str, Any] = as_nobody()
        directory.chmod(0o777)

        def begin() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [sys.executable, "-m", "zeus.serving", "clocks"]
                + f"--slo-ttft 0.5 --slo-tpot 0.025 --gpu 0 --state {state}".split()
                + ["--feed", f"tcp://127.0.0.1:{port}"],
                env={**os.environ, "ZEUSD_SOCK_PATH": daemon.socket},
                cwd=ROOT,
                **options,
            )

        def clock() -> int:
            with daemon.client() as client:
                (found,) = client.state(client.node().gpus[0].uuid).values()
            return found.locked_gpu_clocks_mhz[1] if found.locked_gpu_clocks_mhz else 0

        def serving_until_lower(what: str) -> None:
            end = time.monotonic() + 60
            while True:
                for _ in range(50):
                    time.sleep(0.004)
                    engine.send(message(0.004))
                if 0 < clock() < 1200:
                    return
                assert time.monotonic() < end, what

        command = begin()
        try:
            serving_until_lower("a lower clock")
            wait_for(lambda: clock() == 0, "the highest clock when messages stop", 5.0)
            serving_until_lower("a lower clock again")
            command.send_signal(signal.SIGTERM)
            assert command.wait(TIMEOUT_S) == 0
            assert clock() == 0
            assert len(json.loads(state.read_text())["stretch"]) >= 3
            command = begin()
            serving_until_lower("a lower clock")
            command.kill()
            wait_for(lambda: clock() == 0, "the clock to be unlocked", 5.0)
        finally:
            command.kill()
            command.wait()

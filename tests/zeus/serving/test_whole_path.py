"""A real zeusd, a real socket, and kills in the middle."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import RunningDaemon, running_daemon, wait_for
from zeus.serving.columns import Updates
from zeus.serving.ledger import Ledger
from zeus.serving.recorder import Recorder
from zeus.serving.service import SampleReceiver, Service, StoredWeights
from zeus_common.simulation import SimulatedWork
from zeus_ipc import Client

WEIGHTS = {0.0: [0.5, *[0.0] * 10, 50.0]}
"""Plausible weights, with which twenty updates are enough: these tests are about sums."""


def serve(daemon: RunningDaemon, path: Path, log: Path) -> list[str]:
    """The command that keeps the ledger of the daemon's GPU."""
    with daemon.client() as client:
        name = client.node().gpus[0].name
    weights = log.with_suffix(".weights")
    StoredWeights(weights={f"{name}|1|": WEIGHTS}).write(weights)
    command = [sys.executable, "-m", "zeus.serving", "serve", "--weights", str(weights)]
    return [*command, "--socket", str(path), "--log", str(log)]


def work_until(daemon: RunningDaemon, condition: Callable[[], bool]) -> None:
    """Keeps the simulated GPU busy."""
    with daemon.client() as client:
        node = client.node()
    assert node.simulated is not None
    with SimulatedWork(node.simulated, [node.gpus[0].uuid], "model/compute") as work:
        work.launch(10_000)
        wait_for(condition, "updates of the sensor")


class Engine:
    """Runs steps of 10 ms until it is stopped, even if everything else has ended."""

    def __init__(self, path: str) -> None:
        self.steps = 0
        self.recorder = Recorder(path=path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Engine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def goes_on(self, steps: int = 20) -> None:
        before = self.steps
        wait_for(lambda: self.steps >= before + steps, "the engine to go on")

    def _run(self) -> None:
        end_ns = time.monotonic_ns()
        while not self._stop.is_set():
            begin_ns, end_ns = end_ns, end_ns + 10_000_000  # alike, however late they are sent
            time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)
            name = f"r{self.steps // 50}"
            self.recorder.step(begin_ns, end_ns, [name], [False], [1], [100])
            self.steps += 1
            if self.steps % 50 == 0:
                self.recorder.finish(name)


def test_a_killed_zeusd_leaves_a_gap_and_the_rest_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_daemon("--simulate", "a100:setter_ms=0", gpus=1) as daemon:
        with daemon.client() as client:
            gpu = client.node().gpus[0].uuid
        ledger = Ledger([gpu], prior=WEIGHTS)
        sensors = SampleReceiver(lambda: Client(daemon.socket), [gpu])
        path = str(tmp_path / "steps.sock")
        taken: list[float] = []
        updates = ledger.meter.updates

        def spy() -> Updates | None:
            found = updates()
            taken.extend([] if found is None else found.joules.tolist())
            return found

        monkeypatch.setattr(ledger.meter, "updates", spy)
        service = Service(path, {"0": ledger}, sensors, tmp_path / "log.jsonl")
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            wait_for(Path(path).exists, "the ledger's socket")
            with Engine(path) as engine:
                work_until(daemon, lambda: len(taken) > 25 and engine.recorder.sent > 20)
                daemon.kill()
                engine.goes_on()
                before = len(taken)
                attributed_j = ledger.phases["shared"]
                daemon.start_again()
                daemon.wait_until_serving(1)
                # Until it works again the GPU draws less than such steps do; more updates outweigh
                # that.
                work_until(
                    daemon,
                    lambda: len(taken) > before + 25 and ledger.phases["shared"] > attributed_j,
                )
        finally:
            service.stop()
            thread.join()
    totals = ledger.totals
    parts = totals.requests_j + totals.idle_j + totals.unattributed_j
    assert parts == pytest.approx(totals.measured_j, rel=1e-9)
    assert totals.measured_j == pytest.approx(math.fsum(taken))
    assert totals.requests_j > 0
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["settled"]["measured_j"] == pytest.approx(totals.measured_j)


def test_a_killed_ledger_is_found_again_by_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "steps.sock", tmp_path / "log.jsonl"
    with running_daemon("--simulate", "a100:setter_ms=0", gpus=1) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        command = serve(daemon, path, log)
        first = subprocess.Popen(command)
        wait_for(path.exists, "the ledger's socket")
        with Engine(str(path)) as engine:
            wait_for(lambda: engine.recorder.sent > 20, "steps to be sent")
            first.kill()
            first.wait()
            engine.goes_on()
            second = subprocess.Popen(command)
            before = engine.recorder.sent
            wait_for(lambda: engine.recorder.sent > before + 100, "steps to the new ledger")
        second.send_signal(signal.SIGTERM)
        assert second.wait() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    totals = lines.pop()["settled"]
    names = [line["request"] for line in lines]
    assert len(set(names)) == len(names) > 0
    assert sum(totals[name] for name in ("requests_j", "idle_j", "unattributed_j")) == (
        pytest.approx(totals["measured_j"])
    )


ENGINE = """
import sys, time
from zeus.serving.recorder import Recorder
from zeus.serving.wire import pack_request

recorder = Recorder(path=sys.argv[1], hold=True)
number, end_ns = 0, time.monotonic_ns()
while True:
    name = f"{sys.argv[2]}{number}"
    roster = pack_request(name, 1)
    for step in range(50):
        begin_ns, end_ns = end_ns, end_ns + 5_000_000  # alike, however late they are sent
        time.sleep(max(0, end_ns - time.monotonic_ns()) / 1e9)
        rows = () if step and not recorder.starts else ([], roster, [step + 1], [1])
        recorder.batch(begin_ns, end_ns, *rows, whole=bool(rows))
    recorder.finish(name)
    recorder.flush()
    print(recorder.sent, flush=True)
    number += 1
"""
"""Serves one request of 50 steps after the other."""


def test_a_killed_engine_and_the_next_one_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "steps.sock", tmp_path / "log.jsonl"
    with running_daemon("--simulate", "a100:setter_ms=0", gpus=1) as daemon:
        monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
        ledger = subprocess.Popen(serve(daemon, path, log))
        wait_for(path.exists, "the ledger's socket")
        for name in ("a", "b"):
            engine = subprocess.Popen(
                [sys.executable, "-c", ENGINE, str(path), name], stdout=subprocess.PIPE, text=True
            )
            assert engine.stdout is not None
            with engine.stdout as told:
                for _ in range(6):
                    assert int(told.readline()) > 0
                engine.kill()  # in the middle of the next request
            engine.wait()
        ledger.send_signal(signal.SIGTERM)
        assert ledger.wait() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    totals = lines.pop()["settled"]
    names = [line["request"] for line in lines]
    assert len(set(names)) == len(names)
    assert {f"{engine}{number}" for engine in "ab" for number in range(6)} <= set(names)
    assert sum(totals[name] for name in ("requests_j", "idle_j", "unattributed_j")) == (
        pytest.approx(totals["measured_j"])
    )
    known = [line["joules"] for line in lines if line["joules"] is not None]
    assert math.fsum(known) == pytest.approx(totals["requests_j"])
    assert len(known) > 6

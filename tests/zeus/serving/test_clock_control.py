"""Clock control end to end: an engine as an ordinary user, zeusd with two simulated GPUs."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from tests import snippets
from tests.support import (
    TIMEOUT_S,
    RunningDaemon,
    as_nobody,
    configuration,
    running_daemon,
    wait_for,
)
from zeus.serving import ClockControl, Queue, Step
from zeus.serving import gpus as gpus_module
from zeus.serving.clock_command import tune
from zeus.serving.clock_control import IDLE_S
from zeus.serving.clock_policy import ClockPolicy
from zeus.serving.gpus import shared_by
from zeus_ipc import Client
from zeus_ipc.replies import GpuProcesses, GpuState, ProcessInfo

ENGINE = Path(__file__).with_name("engine.py")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", "2xv100-pcie", "--socket-mode", "0666", gpus=2) as running:
        yield running


class EngineProcess:
    """`engine.py`, and its last output."""

    def __init__(self, daemon: RunningDaemon, *arguments: str) -> None:
        options: dict[str, Any] = as_nobody()
        self.process = subprocess.Popen(
            # By its text: another user may not be let into the folder in which it lies.
            [sys.executable, "-c", ENGINE.read_text(), daemon.socket, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            **options,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def numbers(self) -> list[int]:
        """Steps, clock wanted, changes, whether it works."""
        return [int(word) for word in self.lines[-1].split()] if self.lines else [0, 0, 0, 0]

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def serves(self) -> None:
        """Waits until it has run further steps."""
        before = self.numbers()[0]
        wait_for(lambda: self.numbers()[0] > before + 20, "further steps")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def engine(daemon: RunningDaemon) -> Iterator[EngineProcess]:
    process = EngineProcess(daemon)
    yield process
    process.end()
    wait_for(lambda: restored(daemon), "the clocks to be unlocked")


def gpus(daemon: RunningDaemon) -> list[str]:
    with daemon.client() as client:
        return [gpu.uuid for gpu in client.node().gpus]


def locked(daemon: RunningDaemon) -> list[list[int] | None]:
    with daemon.client() as client:
        states = client.state([gpu.uuid for gpu in client.node().gpus]).values()
        return [state.locked_gpu_clocks_mhz for state in states]


def lowered(daemon: RunningDaemon) -> bool:
    """Whether both GPUs have the same lower clock."""
    clocks = locked(daemon)
    return clocks[0] is not None and clocks[0] == clocks[1] and clocks[0][1] < 1380


def restored(daemon: RunningDaemon) -> bool:
    with daemon.client() as client:
        return not client.leases() and locked(daemon) == [None, None]


def test_a_killed_engine(daemon: RunningDaemon, engine: EngineProcess) -> None:
    wait_for(lambda: lowered(daemon), "lower clocks on both GPUs")
    with daemon.client() as client:
        assert [one.ttl_ms for one in client.leases()] == [2000, 2000], "of one that is silent"
    engine.process.kill()
    wait_for(lambda: restored(daemon), "the clocks to be unlocked")


def test_an_engine_that_hangs_falls_silent_and_ends(
    daemon: RunningDaemon, engine: EngineProcess
) -> None:
    wait_for(lambda: lowered(daemon), "lower clocks on both GPUs")
    engine.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: locked(daemon) == [None, None], "the clocks to be unlocked")
    engine.process.send_signal(signal.SIGCONT)
    wait_for(lambda: lowered(daemon), "lower clocks again")
    engine.say("stop")
    wait_for(lambda: locked(daemon) == [None, None], "the clocks to be unlocked")
    with daemon.client() as client:
        assert len(client.leases()) == 2, "the lease is kept"
    engine.say("go")
    wait_for(lambda: lowered(daemon), "lower clocks again")
    engine.say("quit")
    assert engine.process.wait(TIMEOUT_S) == 0
    assert restored(daemon)


def test_a_dry_run_changes_nothing(daemon: RunningDaemon) -> None:
    engine = EngineProcess(daemon, "dry")
    try:
        wait_for(lambda: 0 < engine.numbers()[1] < 1380, "a lower clock that it would set")
        wait_for(lambda: engine.numbers()[2] >= 1, "the change that it would make")
        assert restored(daemon), "no lease, no change"
    finally:
        engine.end()


def test_zeusd_that_hangs_or_dies_stops_no_engine() -> None:
    with running_daemon("--simulate", "2xv100-pcie", "--socket-mode", "0666", gpus=2) as daemon:
        engine = EngineProcess(daemon)
        try:
            wait_for(lambda: lowered(daemon), "lower clocks on both GPUs")
            daemon.process.send_signal(signal.SIGSTOP)
            wait_for(lambda: engine.numbers()[3] == 0, "the control to stop")
            engine.serves()
            daemon.process.send_signal(signal.SIGCONT)
            wait_for(lambda: engine.numbers()[3] == 1 and lowered(daemon), "lower clocks again")
            daemon.kill()
            wait_for(lambda: engine.numbers()[3] == 0, "the control to stop")
            engine.serves()
            assert engine.process.poll() is None
            daemon.start_again()
            daemon.wait_until_serving(2)
            wait_for(lambda: engine.numbers()[3] == 1 and lowered(daemon), "lower clocks again")
            engine.process.kill()
            wait_for(lambda: restored(daemon), "the clocks to be unlocked")
        finally:
            engine.end()


def test_clocks_that_another_process_holds_are_not_touched(daemon: RunningDaemon) -> None:
    with daemon.client() as other:
        other.set_gpu_clocks(gpus(daemon)[1], 600, 900)
        engine = EngineProcess(daemon)
        try:
            engine.serves()
            assert engine.numbers()[3] == 0
            assert locked(daemon) == [None, [600, 900]]
        finally:
            engine.end()
    wait_for(lambda: restored(daemon), "the clocks to be unlocked")


def _listed(*tenants: tuple[int | None, str | None, bool]) -> GpuProcesses:
    """Processes by user, job and whether they compute."""
    return GpuProcesses(
        t_ns=0,
        processes=[
            ProcessInfo(pid=None, uid=uid, command=None, job=job, memory_mib=None, compute=compute)
            for uid, job, compute in tenants
        ],
    )


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ([], None),
        ([(5, None, True), (5, None, True), (None, None, True)], None),
        ([(5, "slurm 1", True), (5, "slurm 1", True), (0, None, False)], None),
        ([(7, None, True), (5, "slurm 1", True)], "u5 (slurm 1) and of u7 compute on b"),
        ([(5, "slurm 2", True), (5, "slurm 1", True)], "u5 (slurm 1) and of u5 (slurm 2)"),
    ],
)
def test_a_tenant_is_a_user_or_one_of_its_jobs(
    listed: list[tuple[int | None, str | None, bool]], expected: str | None
) -> None:
    found = shared_by({"a": _listed((5, None, True)), "b": _listed(*listed)}, lambda uid: f"u{uid}")
    assert found is None if expected is None else expected in str(found)


def test_a_tenant_that_zeusd_lists_or_the_caller_names_is_refused(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[tuple[int | None, str | None, bool]] = []

    def processes(client: Client, asked: Sequence[str]) -> dict[str, GpuProcesses]:
        return {gpu: _listed((5, None, True), *others) for gpu in asked}

    monkeypatch.setattr(Client, "processes", processes)
    monkeypatch.setattr(gpus_module, "EVERY_S", 0.0)
    control = ClockControl(gpus(daemon), 0.5, 0.025, path=daemon.socket)
    try:
        wait_for(lambda: control.status().working, "the control to work")
        others.append((7, None, True))
        wait_for(lambda: "another tenant uses a GPU" in control.status().trouble, "the refusal")
        wait_for(lambda: restored(daemon), "the lease to be released")
        others.clear()
        wait_for(lambda: control.status().working, "the control to work again")
        control.refuse("one that zeusd cannot see")
        wait_for(lambda: restored(daemon), "the lease to be released")
        assert "another tenant uses a GPU: one that" in control.status().trouble
        control.refuse(None)
        wait_for(lambda: control.status().working, "the control to work again")
    finally:
        control.close()
    assert restored(daemon)


def test_wrong_arguments_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match="gpus"):
        ClockControl([], 0.5, 0.025)
    with pytest.raises(ValueError, match="tpot_s"):
        ClockControl(["GPU-1"], 0.5, -1)
    with pytest.raises(ValueError, match="ttl_s"):
        ClockControl(["GPU-1"], 0.5, 0.025, ttl_s=0)


def test_without_zeusd_it_says_why(tmp_path: Path) -> None:
    control = ClockControl(["GPU-1"], 0.5, 0.025, path=tmp_path / "none.sock")
    try:
        wait_for(lambda: control.status().trouble, "a reason")
        assert not control.status().working
    finally:
        control.close()


def test_a_control_thread_that_hangs_loses_the_lease(tmp_path: Path) -> None:
    """Heartbeats come from the thread that sets clocks, from no other."""
    # This process computes or waits for a CPU meanwhile, which must not count as a heartbeat.
    strict = configuration(tmp_path, "[lease]\nbusy_ttl_s = 0\n")
    with (
        running_daemon("--simulate", "2xv100-pcie", *strict, gpus=2) as daemon,
        daemon.client() as client,  # one for all: a new connection is a heartbeat, too
    ):
        both = gpus(daemon)

        def clocks() -> list[list[int] | None]:
            return [state.locked_gpu_clocks_mhz for state in client.state(both).values()]

        runs = threading.Event()
        runs.set()

        class Hangs(ClockPolicy):
            def idle(self, now_s: float) -> int:  # the thread asks when no step comes any more
                assert runs.wait(TIMEOUT_S)
                return super().idle(now_s)

        control = ClockControl(both, 0.5, 0.025, path=daemon.socket, policy=Hangs)

        def serve() -> bool:
            begin = time.monotonic()
            time.sleep(0.005)  # a busy machine may take longer, and no clock would be low enough
            control.step(Step(begin, begin + 0.005, 0, 1, 100, 0.0), Queue(0, 0, 0.0))
            return 0 < control.status().set_mhz < 1200

        try:
            wait_for(serve, "a lower clock")
            runs.clear()
            wait_for(lambda: None not in clocks(), "the clocks to be locked")
            wait_for(lambda: clocks() == [None, None], "the clocks to be unlocked", 10.0)
            runs.set()
            wait_for(lambda: not control.status().working, "the loss to be noticed")
            wait_for(lambda: control.status().working, "the control to begin again")
        finally:
            runs.set()
            control.close()
        assert restored(daemon)


class States:
    """A client whose one GPU has this clock."""

    def __init__(self, mhz: int | None, reasons: int | None) -> None:
        self._mhz, self._reasons = mhz, reasons

    def state(self, asked: list[str]) -> dict[str, GpuState]:
        fields = GpuState.model_fields.items()
        absent = {name: None for name, field in fields if field.is_required()}
        state = {
            **absent,
            "controls": {},
            "t_ns": 0,
            "gpu_clock_mhz": self._mhz,
            "throttle_reasons": self._reasons,
        }
        return {gpu: GpuState.model_validate(state) for gpu in asked}


def test_a_policy_hears_of_requests_and_of_the_effective_clock(daemon: RunningDaemon) -> None:
    gpu = gpus(daemon)[0]
    seen_mhz, stepped_s = [math.nan], [-math.inf]
    heard: list[object] = []

    class Seen(ClockPolicy):
        def step(self, step: Step, queue: Queue) -> int:
            seen_mhz[0], stepped_s[0] = step.clock_mhz, time.monotonic()
            return super().step(step, queue)

        def seen(self, ttft_s: float, tpot_s: float) -> None:
            heard.append((ttft_s, tpot_s))

        def drained(self) -> None:
            heard.append("drained")

    control = ClockControl([gpu], 0.5, 0.025, path=daemon.socket, ttl_s=60.0, policy=Seen)
    capped = States(1000, 0)
    others = (
        States(1375, None),
        States(210, 1),  # idle: the GPU lowered its clock by itself
        States(None, None),
    )
    queue = Queue(0, 0, 0.0)

    def becomes(states: States, expected_mhz: float) -> None:
        """A sample is believed after a while of steps without a pause."""
        began = time.monotonic()
        while seen_mhz[0] != expected_mhz:
            now = time.monotonic()
            assert now < began + TIMEOUT_S
            control.step(Step(now - 0.005, now, 0, 1, 100, 0.0), queue)
            control._sample(cast("Client", states))
            time.sleep(0.005)

    try:
        wait_for(lambda: control.status().working, "the control to work")
        control.seen(0.1, 0.02)
        control.drained()
        assert heard == [(0.1, 0.02), "drained"]
        assert (control.status().seen_ttft_s, control.status().seen_tpot_s) == (0.1, 0.02)
        for states in others:
            becomes(capped, 1000.0)
            becomes(states, 1380.0)
        wait_for(lambda: time.monotonic() > stepped_s[0] + 2 * IDLE_S, "a pause")
        control._sample(cast("Client", capped))
        assert control._effective() == 1380.0, "nothing serves: the clock may be any"
    finally:
        control.close()
    wait_for(lambda: restored(daemon), "the lease to be released")


def published(client: Client) -> set[int | None]:
    return {one.needs_mw for one in client.leases() if one.control == "power_limit"}


def test_an_instance_publishes_the_power_it_needs_where_there_is_a_budget(
    daemon: RunningDaemon,
) -> None:
    both = gpus(daemon)
    with daemon.client() as client:
        control = ClockControl(both, 0.5, 0.025, path=daemon.socket)
        try:
            wait_for(lambda: not math.isnan(control.status().needed_w), "a reading")
            assert published(client) == set(), "nothing without a ceiling of the fleet"
            client.set_ceiling(both, "fleet", 200_000)
            # The lease is there a moment before the need is.
            wait_for(lambda: published(client) - {None}, "the need to be published", 30.0)
            (needs,) = published(client)
            assert needs is not None
            assert 20_000 < needs < 200_000
        finally:
            control.close()
        wait_for(lambda: published(client) == set(), "the leases to be released")
        client.set_ceiling(both, "fleet", None)


def test_a_tuning_without_load_ends_in_time_and_says_so(
    daemon: RunningDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    options = f"--slo-ttft 1 --slo-tpot 1 --gpu 0 --minutes 0.005 --feed {tmp_path}/feed"
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):  # whose handlers the command sets
            stack.callback(signal.signal, number, signal.getsignal(number))
        out = str(tmp_path / "clocks.json")
        result = CliRunner().invoke(tune, [*options.split(), "--out", out])
    assert result.exit_code == 1
    assert "no step times were learned: no request ended; check --feed" in result.output
    assert restored(daemon)


def test_the_python_of_the_page_runs(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = snippets.of(snippets.ROOT / "docs/serve/clocks.md")
    monkeypatch.setenv("ZEUSD_SOCK_PATH", daemon.socket)
    now = time.monotonic()
    control = block.run(
        gpu_uuids=gpus(daemon),
        begin_s=now - 0.01,
        end_s=now,
        prefill_tokens=0,
        decode_sequences=1,
        decode_context=100,
        waiting=0,
        backlog_tokens=0,
        oldest_wait_s=0.0,
        ttft_s=0.1,
        tpot_s=0.01,
    )["control"]
    try:
        wait_for(lambda: control.status().working, "the dry run to begin")
        assert control.status().wanted_mhz == 1380
    finally:
        control.close()

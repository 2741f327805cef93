from __future__ import annotations

import os
import queue
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import TIMEOUT_S
from zeus_ipc.controls import Control
from zeusd.core.effects import Read, ReadingMade, Write
from zeusd.core.entries import PendingRestore
from zeusd.core.model import Failure, ProcessIdentity
from zeusd.devices.port import CallOutcome
from zeusd.devices.simulated import SimulatedBackend
from zeusd.devices.simulated.gpu import Quirks
from zeusd.restore_rule import Holds, Unknown, WriteRefused
from zeusd.runtime.processes import command_of
from zeusd.runtime.workers import MAX_QUEUED, GpuWorker

RECORD = PendingRestore("GPU-x", Control.POWER_LIMIT, ProcessIdentity(1, 1), 0, "", 0, 0, (), ())


class Worker:
    """A worker on a simulated GPU, asked one thing after another."""

    def __init__(self) -> None:
        self.nvml = SimulatedBackend("1xv100-pcie:setter_ms=0")
        self.nvml.init()
        self.gpu = self.nvml.device_handle(0)
        self._done: queue.Queue[tuple[int, object]] = queue.Queue()
        self.worker = GpuWorker(
            self.nvml, "GPU-x", self.gpu, lambda *result: self._done.put(result)
        )

    def ask(self, call: Read | Write) -> Any:
        self.worker.submit(call)
        ticket, result = self._done.get(timeout=TIMEOUT_S)
        assert ticket == call.ticket
        return result

    def next(self) -> tuple[int, object]:
        return self._done.get(timeout=TIMEOUT_S)

    def write(self, watts: float, *expected_w: int) -> Any:
        expected = tuple((one * 1000,) for one in expected_w)
        control = Control.POWER_LIMIT
        return self.ask(Write(1, "GPU-x", control, (round(watts * 1000),), RECORD, expected))

    def write_over(self, before_w: int, watts: int) -> Any:
        """A write that knows the value before, so that it reads only back."""
        write = Write(1, "GPU-x", Control.POWER_LIMIT, (watts * 1000,), RECORD)
        write.before = (before_w * 1000,)
        return self.ask(write)


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.worker.stop()


def test_a_write_touches_nothing_if_it_finds_what_it_did_not_expect(worker: Worker) -> None:
    assert worker.write(200, 250) == Holds((200_000,))
    assert worker.nvml.power_limit_mw(worker.gpu) == 200_000
    assert worker.write(150, 250, 180) == WriteRefused(None, (200_000,))
    assert worker.nvml.power_limit_mw(worker.gpu) == 200_000
    assert worker.write(150, 250, 200) == Holds((150_000,))
    assert worker.write(120) == Holds((120_000,)), "without an expectation it writes"
    assert worker.nvml.power_limit_mw(worker.gpu) == 120_000


@pytest.mark.parametrize(
    ("doubt", "made"),
    [(300_000, True), (240_000, False), (90_000, False)],
)
def test_what_the_driver_made_of_an_unconfirmed_write_may_be_overwritten(
    worker: Worker, doubt: int, made: bool
) -> None:
    """It moves what is above its range to the upper end, which is what is found."""
    control, asked = Control.POWER_LIMIT, (150_000,)
    write = Write(1, "GPU-x", control, asked, RECORD, ((200_000,),), doubts=((doubt,),))
    assert worker.ask(write) == (Holds(asked) if made else WriteRefused(None, (250_000,)))


def test_what_it_holds_is_written_again_while_another_write_may_take_effect(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    monkeypatch.setattr(worker.nvml, "set_power_limit", lambda _, value: written.append(value))
    value = (250_000,)
    write = Write(1, "GPU-x", Control.POWER_LIMIT, value, RECORD, others=True)
    assert worker.ask(write) == Holds(value, late=(value,))
    assert written == [*value]


def test_locked_clocks_cannot_be_read_and_so_are_not_compared(worker: Worker) -> None:
    write = Write(2, "GPU-x", Control.GPU_CLOCKS, (300, 900), RECORD, ((1, 2),))
    assert worker.ask(write) == Holds((300, 900))


def test_limits_and_failures(worker: Worker) -> None:
    assert worker.ask(Read(3, "GPU-x", ReadingMade.LIMITS)) == (100_000, 250_000)
    assert worker.ask(Read(4, "GPU-x", ReadingMade.COMPUTE_UIDS)) == frozenset()
    refused = worker.write(999)
    assert refused.invalid
    failure = refused.trouble
    assert failure.outcome is CallOutcome.INVALID
    assert failure.details["device_code"] == 2
    for call in ("sensors", "power_limit_mw", "gpu_clock_mhz", "temperature_c"):
        worker.nvml.inject(0, call, code=15)
    state = worker.ask(Read(5, "GPU-x", ReadingMade.STATE))
    assert "fallen off the bus (NVML 15)" in state.failure


@pytest.mark.parametrize(
    ("quirks", "asked_w", "holds_mw"),
    [
        (Quirks(round_to_mw=1000), 150.5, 150_000),
        (Quirks(round_to_mw=5000), 153.2, 150_000),
        (Quirks(round_to_mw=1000, round_up=True), 150.5, 150_000),
        (Quirks(round_to_mw=4000, round_up=True), 100.5, 100_000),
        (Quirks(clamp_mw=(180_000, 220_000)), 120, 180_000),
        (Quirks(clamp_mw=(180_000, 220_000)), 240, 220_000),
        (Quirks(delay_s=0.5), 150, 150_000),
        (Quirks(stale_reads=1), 150, 150_000),
        (Quirks(delay_s=0.3, stale_reads=1, round_to_mw=1000), 150.5, 150_000),
    ],
)
def test_a_write_is_read_back_until_it_is_clear_what_the_device_holds(
    worker: Worker, quirks: Quirks, asked_w: float, holds_mw: int
) -> None:
    worker.nvml.misbehave(0, quirks)
    assert worker.write(asked_w, 250) == Holds((holds_mw,))


def test_a_write_that_shows_no_effect_may_still_take_effect(worker: Worker) -> None:
    worker.nvml.misbehave(0, Quirks(ignored_sets=-1))
    assert worker.write(150, 250) == Unknown(None, (250_000,))


@pytest.mark.parametrize("code", [2, 3, 4, 13, 25, 10, 999])
def test_one_failed_reading_back_proves_nothing(worker: Worker, code: int) -> None:
    """The error is the getter's: the setter has worked."""
    worker.nvml.inject(0, "power_limit_mw", code=code, count=1)
    assert worker.write_over(250, 150) == Holds((150_000,))
    worker.nvml.inject(0, "power_limit_mw", code=code)
    assert isinstance(worker.write_over(150, 160), Unknown)
    worker.nvml.inject(0, "set_power_limit", code=code)
    refused = code in (2, 3, 4, 13, 25)
    assert isinstance(worker.write_over(160, 170), WriteRefused if refused else Unknown)


def test_one_stale_reading_is_no_change_by_someone_else(worker: Worker) -> None:
    worker.nvml.misbehave(0, Quirks(stale_reads=3))
    assert worker.write(200, 250) == Holds((200_000,))  # two of the three are used up here
    assert worker.write(150, 200) == Holds((150_000,))
    worker.nvml.misbehave(0, Quirks(stale_reads=1))
    worker.nvml.set_power_limit(worker.gpu, 120_000)
    assert worker.ask(Read(9, "GPU-x", ReadingMade.CONTROL, Control.POWER_LIMIT)) == (120_000,)


def test_a_restore_is_not_queued_behind_readers_and_equal_reads_are_one_call(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_wait, sensors = threading.Event(), worker.nvml.sensors

    def gated(gpu: Any) -> Any:
        assert all_wait.wait(TIMEOUT_S)
        return sensors(gpu)

    monkeypatch.setattr(worker.nvml, "sensors", gated)
    reads = [Read(100 + number, "GPU-x", ReadingMade.ENERGY) for number in range(MAX_QUEUED)]
    for read in reads:
        worker.worker.submit(read)
    worker.worker.submit(Read(1, "GPU-x", ReadingMade.CONTROL, Control.POWER_LIMIT))
    worker.worker.submit(Write(2, "GPU-x", Control.POWER_LIMIT, (150_000,), RECORD))
    worker.worker.submit(Read(3, "GPU-x", ReadingMade.ENERGY))
    all_wait.set()
    done = [worker.next() for _ in range(len(reads) + 3)]
    order = [ticket for ticket, _ in done]
    assert order.index(2) <= order.index(1) + 1, "one after another, before the reads that wait"
    before = {id(result) for ticket, result in done[: order.index(2)] if ticket != 1}
    assert len(before) <= 1, "at most one reading was under way before"
    refused = [ticket for ticket, result in done if isinstance(result, Failure)]
    assert set(refused) <= {3, 100 + MAX_QUEUED - 1}, "only readings can be refused"
    answers = {id(result) for ticket, result in done if ticket >= 100 and ticket not in refused}
    assert len(answers) <= 3, "readings of the same thing that wait are one call"


def test_processes_are_read_with_their_user_and_command(worker: Worker) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    work = worker.nvml.open_work([0], "model/compute", pid=os.getpid())
    (process,) = worker.ask(Read(1, "GPU-x", ReadingMade.PROCESSES)).processes
    assert (process.pid, process.uid) == (os.getpid(), os.geteuid())
    assert process.memory_mib > 1000
    assert process.command == command_of(os.getpid()) != ""
    assert worker.ask(Read(3, "GPU-x", ReadingMade.PIDS)).pids == (os.getpid(),)
    worker.nvml.inject(0, "processes", 999)
    assert worker.ask(Read(4, "GPU-x", ReadingMade.PIDS)).pids is None, "that is an answer, too"
    worker.nvml.clear_faults()
    work.close()
    worker.nvml.open_work([0], "model/compute", pid=gone.pid)
    (process,) = worker.ask(Read(2, "GPU-x", ReadingMade.PROCESSES)).processes
    assert (process.uid, process.command, process.job) == (None, None, None)


def test_a_bug_is_an_answer_and_says_what_to_do(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in ("sensors", "set_power_limit"):
        monkeypatch.setattr(worker.nvml, call, lambda *_: 1 / 0)
    failure = worker.ask(Read(1, "GPU-x", ReadingMade.ENERGY))
    assert "zeusd failed while it served GPU-x (ZeroDivisionError); please" in failure.message
    assert worker.write(150) == Unknown(failure)
    monkeypatch.undo()
    assert worker.write(150) == Holds((150_000,))

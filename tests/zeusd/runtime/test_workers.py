from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from zeus_ipc.messages import Control
from zeusd.core.effects import Read, Reading, Write
from zeusd.core.model import Changed, Failure
from zeusd.devices.simulated import SimulatedBackend
from zeusd.runtime.workers import GpuWorker


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
        ticket, result = self._done.get(timeout=30)
        assert ticket == call.ticket
        return result

    def write(self, watts: int, *expected_w: int) -> Any:
        expected = tuple((one * 1000,) for one in expected_w)
        control = Control.POWER_LIMIT
        return self.ask(Write(1, "GPU-x", control, (watts * 1000,), "key", {}, expected))


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.worker.stop()


def test_a_write_touches_nothing_if_it_finds_what_it_did_not_expect(worker: Worker) -> None:
    assert worker.write(200, 250) is None
    assert worker.nvml.power_limit_mw(worker.gpu) == 200_000
    assert worker.write(150, 250, 180) == Changed((200_000,))
    assert worker.nvml.power_limit_mw(worker.gpu) == 200_000
    assert worker.write(150, 250, 200) is None
    assert worker.write(120) is None, "without an expectation it writes"
    assert worker.nvml.power_limit_mw(worker.gpu) == 120_000


def test_locked_clocks_cannot_be_read_and_so_are_not_compared(worker: Worker) -> None:
    write = Write(2, "GPU-x", Control.GPU_CLOCKS, (300, 900), "key", {}, ((1, 2),))
    assert worker.ask(write) is None


def test_limits_and_failures(worker: Worker) -> None:
    assert worker.ask(Read(3, "GPU-x", Reading.LIMITS)) == (100_000, 250_000)
    assert worker.ask(Read(4, "GPU-x", Reading.COMPUTE_UIDS)) == frozenset()
    failure = worker.write(999)
    assert isinstance(failure, Failure)
    assert failure.nvml_code == 2

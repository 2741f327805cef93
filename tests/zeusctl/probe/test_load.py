"""Bursts of load: the waves, and PyTorch's part with a module that stands in for it."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.zeusctl.probe.stand_in import NotedLoad
from zeusctl.probe import main
from zeusctl.probe.backend import ProbedNode
from zeusctl.probe.driver import CallError, Question
from zeusctl.probe.load import WAVES, TorchLoad, Wave, torch_loads


class _Torch:
    """As much of PyTorch as a load needs, on a clock that passes while a stream is waited for."""

    __version__ = "0"
    float16 = "float16"

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.busy_until_s = 0.0
        torch = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.s = 0.0

            def record(self, stream: object) -> None:
                self.s = max(torch.busy_until_s, torch.now_s)

            def synchronize(self) -> None:
                torch.now_s = max(torch.now_s, self.s)

            def elapsed_time(self, other: Event) -> float:
                return (other.s - self.s) * 1000

        class Stream:
            def synchronize(self) -> None:
                torch.now_s = max(torch.now_s, torch.busy_until_s)

        self.cuda = SimpleNamespace(
            Event=Event,
            Stream=lambda device: Stream(),
            stream=contextlib.nullcontext,
            empty_cache=lambda: None,
        )

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def device(self, kind: str, index: int) -> tuple[str, int]:
        return kind, index

    def randn(self, rows: int, columns: int, **_: Any) -> int:
        return rows

    def empty_like(self, matrix: int) -> int:
        return matrix

    def mm(self, a: int, b: int, out: int) -> None:
        took_s = 0.004 * (a / 8192) ** 3
        self.busy_until_s = max(self.busy_until_s, self.now_s) + took_s


def test_bursts_of_torch_begin_and_end_when_the_stream_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = _Torch()
    monkeypatch.setattr("zeusctl.probe.load.time", torch)
    load = TorchLoad(0, torch)
    begin_ns = torch.monotonic_ns()
    assert "4096 x 4096" in load.name  # larger ones take too long each
    load.burst(0.02)
    load.burst(0.05)
    first, second = load.bursts()
    load.close()
    assert first == pytest.approx((begin_ns, begin_ns + 20e6), abs=1e3)
    assert second == pytest.approx((begin_ns + 20e6, begin_ns + 70e6), abs=1e3)


def test_torch_numbers_are_found_by_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    boards = [
        SimpleNamespace(pci_domain_id=0, pci_bus_id=0x8A, pci_device_id=0),
        SimpleNamespace(pci_domain_id=1, pci_bus_id=7, pci_device_id=0),
    ]
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda number: boards[number],
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    addresses = ["00000001:07:00.0", None, "00000000:8a:00.0"]
    assert torch_loads(addresses) == {0: 1, 2: 0}
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_loads(addresses) == {}


def test_only_a_gpu_on_which_no_other_process_computes_gets_a_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gpu(*pids: int) -> Any:
        listed = [(pid, None) for pid in pids]
        asks = {"pci_address": "00000000:07:00.0", "compute_processes": listed}
        return SimpleNamespace(
            questions={name: Question(name, partial(asks.get, name)) for name in asks}
        )

    gpus = {0: gpu(), 1: gpu(os.getpid(), 1), 2: CallError(4, "no permission"), 3: gpu(os.getpid())}
    load_on = main.torch_on(cast("ProbedNode", SimpleNamespace(gpus=lambda: gpus)))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert [load_on(index) for index in gpus] == [None] * 4
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setattr(main, "torch_loads", lambda addresses: {0: 7})
    monkeypatch.setattr(main, "TorchLoad", lambda number, torch: number)
    assert [load_on(index) for index in gpus] == [7, None, None, 7]


def test_waves_follow_one_another_at_their_own_pace() -> None:
    load = NotedLoad()
    wave = Wave(load, 0)
    for now_ns in range(0, round(Wave.seconds() * 1e9), 1_000_000):
        wave.drive(now_ns)
    for on_s, off_s, lasts_s in WAVES:
        assert load.asked.count(on_s) == pytest.approx(lasts_s / (on_s + off_s), abs=1.1)
    seconds = [one for one in load.asked if isinstance(one, float)]
    assert load.asked == sorted(seconds, reverse=True)

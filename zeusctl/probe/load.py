"""Known bursts of load, which show how much of the time a sensor sees.

A load is asynchronous, as work on a GPU is: `drive` is called between readings and queues the next
burst when its time has come; `bursts` returns afterwards when each began and ended. The lengths of
bursts and pauses share no common measure with any update period that is known, or every update
would see the same part of a burst.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from zeus_ipc.overriding import override

if TYPE_CHECKING:
    from zeus_ipc.replies import GpuInfo

BURST_S = 0.2
"""A load that is kept up is queued one such burst ahead, so that it ends soon."""

WAVES: tuple[tuple[float, float, float], ...] = (
    (2.0, 1.7, 7.5),
    (0.47, 0.39, 5.0),
    (0.11, 0.097, 5.0),
    (0.053, 0.044, 5.0),
    (0.031, 0.042, 5.0),
    (0.020, 0.023, 4.0),
)
"""Seconds of load and of pause, and how long each square wave lasts."""


class ProbeLoad(Protocol):
    """A load that draws power on one GPU on request."""

    name: str

    def burst(self, seconds: float) -> None:
        """Queues a burst of about this length, which begins at once."""

    def bursts(self) -> list[tuple[int, int]]:
        """Start and end of each burst, ns on the probe's clock; after the last one."""

    def close(self) -> None:
        """Frees the GPU."""


class Wave:
    """Drives a load through `WAVES`, one after another.

    Args:
        begin_ns: When the first begins, on the probe's clock.
        scale: Factor for the length of each wave.
    """

    def __init__(self, load: ProbeLoad, begin_ns: int, scale: float = 1.0) -> None:
        self._load = load
        self._next_ns = begin_ns
        self._ends: list[tuple[int, float, float]] = []
        end_ns = begin_ns
        for on_s, off_s, lasts_s in WAVES:
            end_ns += round(lasts_s * scale * 1e9)
            self._ends.append((end_ns, on_s, off_s))

    @staticmethod
    def seconds(scale: float = 1.0) -> float:
        """How long all of them last."""
        return sum(lasts_s for _, _, lasts_s in WAVES) * scale

    def drive(self, now_ns: int) -> None:
        """Queues the next burst if it is due."""
        if now_ns < self._next_ns:
            return
        for end_ns, on_s, off_s in self._ends:
            if now_ns < end_ns:
                if now_ns + on_s * 1e9 > end_ns:  # it would overlap the next wave
                    self._next_ns = end_ns
                    return
                self._load.burst(on_s)
                self._next_ns = min(end_ns, now_ns + round((on_s + off_s) * 1e9))
                return


class TorchLoad(ProbeLoad):
    """Matrix products on one GPU, by PyTorch with CUDA or HIP. It ran on an H100 and an H200.

    Bursts are dated by stream events, against an event that was recorded while the device was idle
    and the clock had just been read. A thread queues them: a full queue must not delay readings.
    """

    _SIZES = (8192, 4096, 2048)
    _LONGEST_S = 0.0025
    """Of one product: bursts are made of whole ones."""
    _CALIBRATION = 20

    def __init__(self, index: int, torch: Any) -> None:
        self._torch = torch
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._each_s = 0.0
        for size in self._SIZES:
            self._a = torch.randn(size, size, device=self._device, dtype=torch.float16)
            self._out = torch.empty_like(self._a)
            self._multiply(5)
            self._stream.synchronize()
            begin_ns = time.monotonic_ns()
            self._multiply(self._CALIBRATION)
            self._stream.synchronize()
            self._each_s = (time.monotonic_ns() - begin_ns) / 1e9 / self._CALIBRATION
            self.name = f"PyTorch {torch.__version__}, products of {size} x {size} matrices"
            if self._each_s <= self._LONGEST_S:
                break
        self._base = torch.cuda.Event(enable_timing=True)
        before_ns = time.monotonic_ns()
        self._base.record(self._stream)
        self._base.synchronize()
        self._base_ns = (before_ns + time.monotonic_ns()) // 2
        self._wanted: queue.Queue[float | None] = queue.Queue()
        self._queued: list[tuple[Any, Any]] = []
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _multiply(self, times: int) -> None:
        with self._torch.cuda.stream(self._stream):
            for _ in range(times):
                self._torch.mm(self._a, self._a, out=self._out)

    def _work(self) -> None:
        while (seconds := self._wanted.get()) is not None:
            event = self._torch.cuda.Event
            begin, end = event(enable_timing=True), event(enable_timing=True)
            begin.record(self._stream)
            self._multiply(max(1, round(seconds / self._each_s)))
            end.record(self._stream)
            self._queued.append((begin, end))

    @override
    def burst(self, seconds: float) -> None:
        self._wanted.put(seconds)

    @override
    def bursts(self) -> list[tuple[int, int]]:
        self._wanted.put(None)
        self._thread.join()
        self._stream.synchronize()
        return [(self._at_ns(begin), self._at_ns(end)) for begin, end in self._queued]

    def _at_ns(self, event: Any) -> int:
        return self._base_ns + int(self._base.elapsed_time(event) * 1e6)

    @override
    def close(self) -> None:
        self._wanted.put(None)
        self._a = self._out = None
        self._torch.cuda.empty_cache()


class SimulatedLoad(ProbeLoad):
    """Work on one GPU of a simulated node."""

    name = "simulated work"

    def __init__(self, work: Any, rate: float, now_ns: Any) -> None:
        self._work = work
        self._rate = rate
        self._now_ns = now_ns
        self._bursts: list[tuple[int, int]] = []

    @override
    def burst(self, seconds: float) -> None:
        begin_ns = self._now_ns()
        self._work.launch(seconds * self._rate)
        _, end_ns = self._work.progress()
        self._bursts.append((begin_ns, end_ns))

    @override
    def bursts(self) -> list[tuple[int, int]]:
        return self._bursts

    @override
    def close(self) -> None:
        self._work.close()


def torch_loads(bus_ids: Sequence[str | None]) -> dict[int, int]:
    """PyTorch's number of each GPU that it sees, by NVML index; empty without CUDA or HIP.

    Args:
        bus_ids: PCI address of each GPU, by NVML index: PyTorch may number them differently, or
            hide some.
    """
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    numbers = {}
    for number in range(torch.cuda.device_count()):
        one: Any = torch.cuda.get_device_properties(number)
        if getattr(one, "pci_bus_id", None) is None:
            continue
        address = f"{one.pci_domain_id:08X}:{one.pci_bus_id:02X}:{one.pci_device_id:02X}.0"
        for index, known in enumerate(bus_ids):
            if known is not None and known.upper() == address:
                numbers[index] = number
    return numbers


@contextlib.contextmanager
def load(simulated: str | None, gpu: GpuInfo) -> Iterator[bool]:
    """Puts load on a GPU that nobody uses. Yields whether there is one.

    Args:
        simulated: Socket of the simulated devices; None on a real node.
    """
    if simulated is not None:
        from zeus_common.simulation import SimulatedWork  # the probe runs without any package

        work = SimulatedWork(simulated, [gpu.uuid], "model/compute")
        try:
            work.launch(1e8)
            yield True
        finally:
            work.close()
        return
    number = torch_loads([gpu.pci_address]).get(0)
    if number is None:
        yield False
        return
    import torch

    with kept_up(TorchLoad(number, torch)):
        yield True


@contextlib.contextmanager
def kept_up(bursts: ProbeLoad) -> Iterator[None]:
    """Queues one burst after another, and waits for their end."""
    over = threading.Event()

    def queue() -> None:
        while not over.wait(BURST_S):
            bursts.burst(BURST_S)

    thread = threading.Thread(target=queue, daemon=True)
    bursts.burst(2 * BURST_S)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        bursts.bursts()
        bursts.close()

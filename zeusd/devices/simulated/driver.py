"""The simulated driver: GPUs, time, and the behaviour that all calls share."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

from zeus_ipc.overriding import override
from zeusd.devices.control_calls import TabledControls
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import Handle
from zeusd.devices.simulated.gpu import SimulatedGpu
from zeusd.devices.simulated.physics import LIMIT_TAU_S
from zeusd.devices.simulated.spec import GpuSpec
from zeusd.devices.simulated.work import Work


@dataclass(slots=True)
class Fault:
    """A fault of a call.

    Attributes:
        code: The code that it returns instead; None: it works.
        count: How many calls it affects; None: all.
        latency_s: Additional time of each call, s.
    """

    code: int | None
    count: int | None
    latency_s: float


class SimulatedDriver(TabledControls):
    """The driver's part of `zeusd.devices.port.Backend`.

    Args:
        specs: The GPUs, by index.
        clock_ns: The time.
        sleep: Called by calls that take time.
    """

    def __init__(
        self,
        specs: tuple[GpuSpec, ...],
        clock_ns: Callable[[], int],
        sleep: Callable[[float], None],
    ) -> None:
        self._specs = specs
        self._clock_ns = clock_ns
        self.sleep = sleep
        self.lock = threading.RLock()
        self._boot = 0
        self._initialised = 0
        self._driver_code: int | None = None
        self._faults: dict[tuple[int | None, str], list[Fault]] = {}
        self._lost: dict[int, int] = {}
        self._work: list[Work] = []
        self._load_driver()

    @property
    def specs(self) -> tuple[GpuSpec, ...]:
        """The GPUs of this node, by index."""
        return self._specs

    @override
    def init(self) -> None:
        self._meet_fault(None, "init", "nvmlInit_v2")
        with self.lock:
            if self._driver_code is not None:
                raise nvml_error(self._driver_code, "nvmlInit_v2")
            self._initialised += 1

    @override
    def shutdown(self) -> None:
        self._meet_fault(None, "shutdown", "nvmlShutdown")
        with self.lock:
            if not self._initialised:
                raise nvml_error(Return.UNINITIALIZED, "nvmlShutdown")
            self._initialised -= 1
            self.forget_settings(self.advance())

    def forget_settings(self, now_s: float) -> None:
        """Resets the settings of a GPU that no client has open, unless persistence mode is on."""
        for gpu in self._gpus:
            if not (self._initialised or gpu.contexts or gpu.persistence):
                gpu.reset_settings(now_s)

    @override
    def driver_version(self) -> str:
        self._check_initialised("nvmlSystemGetDriverVersion")
        self._meet_fault(None, "driver_version", "nvmlSystemGetDriverVersion")
        return self._specs[0].driver_version

    @override
    def device_count(self) -> int:
        self._check_initialised("nvmlDeviceGetCount_v2")
        self._meet_fault(None, "device_count", "nvmlDeviceGetCount_v2")
        return len(self._specs)

    @override
    def device_handle(self, index: int) -> Handle:
        call = "nvmlDeviceGetHandleByIndex_v2"
        self._check_initialised(call)
        if not 0 <= index < len(self._specs):
            raise nvml_error(Return.INVALID_ARGUMENT, call)
        self._meet_fault(index, "device_handle", call)
        if index in self._lost:
            raise nvml_error(self._lost[index], call)
        return index

    def advance(self, now_ns: int | None = None) -> float:
        """Finishes work that ended by now. The caller holds the lock. Returns the time, s."""
        now_s = (self._clock_ns() if now_ns is None else now_ns) / 1e9
        while self._work:
            ending = [(work.ends_s(), work) for work in self._work if work.active]
            due = min((end_s for end_s, _ in ending), default=math.inf)
            if due > now_s + 1e-9:
                return now_s
            for end_s, work in ending:
                if end_s == due:
                    work.finish(due)
        return now_s

    # -------------------------------------------------------------------------------- internals

    def _existing(self, gpu: int) -> SimulatedGpu:
        if not 0 <= gpu < len(self._gpus):
            raise ValueError(f"there is no simulated GPU {gpu}")
        return self._gpus[gpu]

    def _meet_fault(self, gpu: int | None, method: str, call: str) -> None:
        """Applies the fault, if any, of a call that `_enter` does not handle."""
        with self.lock:
            fault = self._take_fault(gpu, method)
        if fault is not None:
            if fault.latency_s:
                self.sleep(fault.latency_s)
            if fault.code is not None:
                raise nvml_error(fault.code, call)

    def _load_driver(self) -> None:
        now_s = self._clock_ns() / 1e9
        self._boot += 1
        gpus: list[SimulatedGpu] = []
        for spec in reversed(self._specs):
            second = gpus[-1] if gpus and gpus[-1].spec.die == spec.die + 1 else None
            gpus.append(SimulatedGpu(spec, now_s, self._boot, second))
        self._gpus = gpus[::-1]
        self._work = []

    def _check_initialised(self, call: str) -> None:
        if not self._initialised:
            raise nvml_error(Return.UNINITIALIZED, call)

    def _enter(self, gpu: Handle, call: str, setter: bool = False) -> SimulatedGpu:
        """What all calls on a GPU share: faults, latency and losses. Sleeps without the lock."""
        self._check_initialised(call)
        with self.lock:
            if not isinstance(gpu, int) or not 0 <= gpu < len(self._gpus):
                raise nvml_error(Return.INVALID_ARGUMENT, call)
            lost = self._lost.get(gpu)
            fault = self._take_fault(gpu, call) if self._faults else None
            state = self._gpus[gpu]
            spec = state.spec
            delay_s = fault.latency_s if fault is not None else 0.0
            if setter and spec.setter_ms:
                mean_s = spec.setter_ms / 1000
                # Standard deviation of a setter's time, as a share of its mean: 12 ms +/- 4 ms.
                delay_s += max(mean_s / 4, state.chance.gauss(mean_s, mean_s / 3))
            if not delay_s and self._work:
                self.advance()
        if delay_s:
            self.sleep(delay_s)
            with self.lock:
                self.advance()
        if lost is not None:
            raise nvml_error(lost, call)
        if fault is not None and fault.code is not None:
            raise nvml_error(fault.code, call)
        if setter and spec.unprivileged:
            raise nvml_error(Return.NO_PERMISSION, call)
        return state

    def _take_fault(self, gpu: int | None, call: str) -> Fault | None:
        waiting = self._faults.get((gpu, call))
        if not waiting:
            return None
        fault = waiting[0]
        if fault.count is not None:
            fault.count -= 1
            if fault.count <= 0:
                waiting.pop(0)
        return fault

    def _settle(self, state: SimulatedGpu) -> None:
        """Applies a delayed limit that is due. The caller holds the lock."""
        if state.limit_next_mw is not None and self._clock_ns() / 1e9 >= state.limit_due_s:
            state.limit_mw, state.limit_next_mw = state.limit_next_mw, None
            self._changed(state, LIMIT_TAU_S)

    def _changed(self, state: SimulatedGpu, tau_s: float) -> None:
        """Adapts the GPU and its work to a changed setting."""
        now_s = self.advance()
        for die in (state,) if state.second is None else (state, state.second):
            die.limit_moved(now_s)
            if die.work is not None and die.work.active:
                die.work.follow(now_s, tau_s)
            else:
                die.retarget(now_s, tau_s)

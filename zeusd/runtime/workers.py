"""One thread per GPU for everything that calls NVML, so that a stuck GPU delays no other."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from zeus_ipc.errors import ErrorCode
from zeus_ipc.messages import Control
from zeusd.core.effects import Read, Reading, Write
from zeusd.core.model import READABLE, Changed, ControlValue, Failure, nvml_failure
from zeusd.devices.port import Handle, Backend, DeviceError
from zeusd.runtime.processes import owner_of

log = logging.getLogger(__name__)

MAX_QUEUED = 256
"""Calls that may wait for one GPU."""


def _optional(call: Callable[[Handle], Any], gpu: Handle) -> Any:
    """A reading of the state; None if this GPU does not give it at the moment."""
    try:
        return call(gpu)
    except DeviceError:
        return None


def read_state(nvml: Backend, gpu: Handle) -> dict[str, Any]:
    """`messages.GpuState` as a map, without what only the core knows."""
    sensors = _optional(nvml.sensors, gpu)
    return {
        "t_ns": time.monotonic_ns(),
        "power_limit_mw": _optional(nvml.power_limit_mw, gpu),
        "enforced_power_limit_mw": _optional(nvml.enforced_power_limit_mw, gpu),
        "gpu_clock_mhz": _optional(nvml.gpu_clock_mhz, gpu),
        "memory_clock_mhz": _optional(nvml.memory_clock_mhz, gpu),
        "locked_gpu_clocks_mhz": None,
        "locked_memory_clocks_mhz": None,
        "persistence_mode": _optional(nvml.persistence_mode, gpu),
        "power_mw": None if sensors is None else sensors.power_instant_mw,
        "energy_mj": None if sensors is None else sensors.energy_mj,
        "temperature_c": _optional(nvml.temperature_c, gpu),
        "throttle_reasons": _optional(nvml.throttle_reasons, gpu),
    }


def read_energy(nvml: Backend, gpu: Handle) -> dict[str, Any]:
    """`messages.EnergyReading` as a map.

    Raises:
        DeviceError: Not supported where the GPU has no energy counter.
    """
    sensors = nvml.sensors(gpu)
    if sensors.energy_mj is None:
        raise nvml_error(3, "nvmlDeviceGetTotalEnergyConsumption")
    return {"t_ns": sensors.t_ns, "energy_mj": sensors.energy_mj}


def read_power(nvml: Backend, gpu: Handle) -> dict[str, Any]:
    """`messages.PowerReading` as a map."""
    sensors = nvml.sensors(gpu)
    return {
        "t_ns": sensors.t_ns,
        "instant_mw": sensors.power_instant_mw,
        "average_mw": sensors.power_average_mw,
        "memory_average_mw": sensors.memory_power_average_mw,
    }


def read_clocks(nvml: Backend, gpu: Handle) -> dict[str, Any]:
    """`messages.SupportedClocks` as a map."""
    memory = nvml.supported_memory_clocks(gpu)
    return {
        "memory_mhz": memory,
        "gpu_mhz": {str(mhz): nvml.supported_gpu_clocks(gpu, mhz) for mhz in memory},
    }


def read_limits(nvml: Backend, gpu: Handle) -> tuple[int, int]:
    """Smallest and largest power limit that the device takes at this moment, mW."""
    limits = nvml.power_limits(gpu)
    return limits.min_mw, limits.max_mw


def read_compute_uids(nvml: Backend, gpu: Handle) -> frozenset[int]:
    """Users who have a compute process on the GPU."""
    owners = {owner_of(pid) for pid in nvml.compute_pids(gpu)}
    return frozenset(uid for uid in owners if uid is not None)


_READERS: dict[Reading, Callable[[Backend, Handle], object]] = {
    Reading.STATE: read_state,
    Reading.ENERGY: read_energy,
    Reading.POWER: read_power,
    Reading.LIMITS: read_limits,
    Reading.COMPUTE_UIDS: read_compute_uids,
}


def read_control(nvml: Backend, gpu: Handle, control: Control) -> ControlValue:
    """The present value of a readable control."""
    if control is Control.POWER_LIMIT:
        return (nvml.power_limit_mw(gpu),)
    assert control is Control.PERSISTENCE_MODE
    return (int(nvml.persistence_mode(gpu)),)


def write_control(nvml: Backend, gpu: Handle, control: Control, value: ControlValue) -> None:
    """Writes a control."""
    if control is Control.POWER_LIMIT:
        nvml.set_power_limit(gpu, value[0])
    elif control is Control.PERSISTENCE_MODE:
        nvml.set_persistence_mode(gpu, bool(value[0]))
    elif control is Control.GPU_CLOCKS:
        if value:
            nvml.set_gpu_clocks(gpu, value[0], value[1])
        else:
            nvml.reset_gpu_clocks(gpu)
    elif value:
        nvml.set_memory_clocks(gpu, value[0], value[1])
    else:
        nvml.reset_memory_clocks(gpu)


class GpuWorker:
    """Carries out reads and writes of one GPU, one after another, on a thread of its own.

    Args:
        nvml: The library.
        uuid: The GPU's UUID.
        handle: Its handle.
        done: Called on the worker's thread with the ticket and the result of each call.
    """

    def __init__(
        self, nvml: Backend, uuid: str, handle: Handle, done: Callable[[int, object], None]
    ) -> None:
        self._nvml = nvml
        self._uuid = uuid
        self._handle = handle
        self._done = done
        self._clocks: dict[str, Any] | None = None
        self._queue: queue.SimpleQueue[Read | Write | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"gpu-{uuid[:12]}", daemon=True)
        self._thread.start()

    def submit(self, call: Read | Write) -> None:
        """Queues a call; `done` follows in any case."""
        if self._queue.qsize() >= MAX_QUEUED:
            self._done(
                call.ticket,
                Failure(
                    ErrorCode.OVERLOADED,
                    f"{MAX_QUEUED} calls already wait for {self._uuid}; its driver may be stuck, "
                    "look at the kernel log",
                ),
            )
        else:
            self._queue.put(call)

    def stop(self) -> None:
        """Ends the thread when the calls queued before are done. Does not wait."""
        self._queue.put(None)

    def join(self, timeout_s: float | None) -> bool:
        """Waits for the end after `stop`, None: for however long. Returns whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            self._done(call.ticket, self._carry_out(call))

    def _supported_clocks(self) -> dict[str, Any]:
        """They do not change while the driver is loaded, and there may be hundreds."""
        if self._clocks is None:
            self._clocks = read_clocks(self._nvml, self._handle)
        return self._clocks

    def _carry_out(self, call: Read | Write) -> object:
        try:
            if isinstance(call, Write):
                if call.expected and call.control in READABLE:
                    current = read_control(self._nvml, self._handle, call.control)
                    if current not in call.expected:
                        return Changed(current)
                write_control(self._nvml, self._handle, call.control, call.value)
                return None
            if call.reading is Reading.CONTROL:
                assert call.control is not None
                return read_control(self._nvml, self._handle, call.control)
            if call.reading is Reading.CLOCKS:
                return self._supported_clocks()
            return _READERS[call.reading](self._nvml, self._handle)
        except DeviceError as error:
            if isinstance(call, Write):
                what = f"setting {call.control.value}"
            else:
                what = f"reading {call.control.value if call.control else call.reading.value}"
            return nvml_failure(what, self._uuid, error.code)
        except Exception as error:  # a worker must answer whatever happens
            log.exception("device call failed", extra={"event": "bug", "gpu": self._uuid})
            return Failure(
                ErrorCode.INTERNAL,
                f"zeusd failed while it served {self._uuid} ({type(error).__name__}); "
                "please report it with the daemon's log",
            )

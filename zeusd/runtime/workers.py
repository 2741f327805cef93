"""One thread per GPU for everything that calls NVML, so that a stuck GPU delays no other."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from zeus_ipc.controls import SPECS, Control, ControlValue
from zeus_ipc.errors import ErrorCode
from zeus_ipc.replies import (
    EnergyReading,
    GpuProcesses,
    GpuState,
    MigDevice,
    PowerReading,
    ProcessInfo,
    SupportedClocks,
)
from zeusd.core.effects import Read, ReadingMade, Write
from zeusd.core.model import Failure, device_failure, explained
from zeusd.devices.port import Backend, CallOutcome, DeviceError, Handle
from zeusd.restore_rule import (
    Device,
    Holds,
    Unknown,
    WriteRefused,
    WriteResult,
    is_moved,
    is_rounded,
    read_settled,
    refusal,
)
from zeusd.runtime.activity import ActivityReader, Listed
from zeusd.runtime.devices import attempt
from zeusd.runtime.processes import command_of, job_of_process, owner_of
from zeusd.runtime.reactor import Wake

log = logging.getLogger(__name__)

MAX_QUEUED = 256
"""Reads that may wait for one GPU."""

_URGENT = frozenset({ReadingMade.CONTROL, ReadingMade.LIMITS})
"""What a write or a restore needs to know first."""


def read_state(nvml: Backend, gpu: Handle) -> GpuState:
    """The present state, without what only the core knows."""
    failed: list[DeviceError] = []
    sensors = attempt(nvml.sensors, gpu, failed=failed)
    held: dict[str, list[int] | None] = {}
    for control, spec in SPECS.items():
        if spec.readable:
            value = attempt(nvml.read_control, gpu, control, failed=failed)
            held[control.value] = None if value is None else list(value)
    limit, persistence = (
        held[one.value] for one in (Control.POWER_LIMIT, Control.PERSISTENCE_MODE)
    )
    power_mw = None if sensors is None else sensors.power_instant_mw
    gpu_mhz = attempt(nvml.gpu_clock_mhz, gpu, failed=failed)
    temperature_c = attempt(nvml.temperature_c, gpu, failed=failed)
    enforced_mw = None if sensors is None else sensors.current_limit_mw
    if not enforced_mw:  # a few drivers answer 0 if they lack it
        enforced_mw = attempt(nvml.enforced_power_limit_mw, gpu)
    silent = all(one is None for one in (limit, power_mw, gpu_mhz, temperature_c))
    return GpuState(
        t_ns=time.monotonic_ns(),
        controls=held,
        power_limit_mw=None if limit is None else limit[0],
        enforced_power_limit_mw=enforced_mw,
        gpu_clock_mhz=gpu_mhz,
        memory_clock_mhz=attempt(nvml.memory_clock_mhz, gpu),
        locked_gpu_clocks_mhz=None,
        locked_memory_clocks_mhz=None,
        persistence_mode=None if persistence is None else bool(persistence[0]),
        power_mw=power_mw,
        energy_mj=None if sensors is None else sensors.energy_mj,
        temperature_c=temperature_c,
        throttle_reasons=attempt(nvml.throttle_reasons, gpu),
        enforced_power_profiles=_enforced_profiles(nvml, gpu, held),
        memory_power_mw=None if sensors is None else sensors.memory_power_average_mw,
        module_power_mw=None if sensors is None else sensors.module_power_mw,
        utilization_percent=attempt(nvml.utilization_percent, gpu),
        memory_used_mib=attempt(nvml.memory_used_mib, gpu),
        failure=explained(failed[0]) if silent and failed else None,
    )


def _enforced_profiles(
    nvml: Backend, gpu: Handle, held: dict[str, list[int] | None]
) -> list[int] | None:
    """Workload power profiles in force; only GPUs that have some are asked."""
    if held[Control.POWER_PROFILE.value] is None:
        return None
    profiles = attempt(nvml.enforced_power_profiles, gpu)
    return None if profiles is None else list(profiles)


def read_energy(nvml: Backend, gpu: Handle) -> EnergyReading:
    """The energy counter; what it counts is not known here.

    Raises:
        DeviceError: Not supported where the GPU has no energy counter.
    """
    sensors = nvml.sensors(gpu)
    if sensors.energy_mj is None:
        raise DeviceError(CallOutcome.UNSUPPORTED, "the energy counter", "not offered by this GPU")
    return EnergyReading(t_ns=sensors.t_ns, energy_mj=sensors.energy_mj)


def read_power(nvml: Backend, gpu: Handle) -> PowerReading:
    """The power sensors."""
    sensors = nvml.sensors(gpu)
    return PowerReading(
        t_ns=sensors.t_ns,
        instant_mw=sensors.power_instant_mw,
        average_mw=sensors.power_average_mw,
        memory_average_mw=sensors.memory_power_average_mw,
        module_mw=sensors.module_power_mw,
    )


def read_clocks(nvml: Backend, gpu: Handle) -> SupportedClocks:
    """The clocks that can be chosen."""
    memory = nvml.supported_memory_clocks(gpu)
    return SupportedClocks(
        memory_mhz=memory,
        gpu_mhz={str(mhz): nvml.supported_gpu_clocks(gpu, mhz) for mhz in memory},
    )


def read_compute_uids(nvml: Backend, gpu: Handle) -> frozenset[int]:
    """Users who have a compute process on the GPU."""
    owners = {owner_of(process.pid) for process in nvml.processes(gpu) if process.compute}
    return frozenset(uid for uid in owners if uid is not None)


def read_processes(nvml: Backend, gpu: Handle) -> GpuProcesses:
    """The processes that have a context on the GPU."""
    t_ns = time.monotonic_ns()
    processes = []
    for process in nvml.processes(gpu):
        memory = process.memory_bytes
        processes.append(
            ProcessInfo(
                pid=process.pid,
                uid=owner_of(process.pid),
                command=command_of(process.pid) or None,
                job=job_of_process(process.pid) or None,
                memory_mib=None if memory is None else memory // (1024 * 1024),
                compute=process.compute,
                gpu_instance=process.gpu_instance,
            )
        )
    parts = nvml.mig_instances(gpu) if nvml.mig_enabled(gpu) else []
    devices = [
        MigDevice(uuid=part.uuid, gpu_instance=part.gpu_instance, slices=part.slices, of=part.of)
        for part in parts
    ]
    return GpuProcesses(t_ns=t_ns, processes=processes, mig_devices=devices)


_READERS: dict[ReadingMade, Callable[[Backend, Handle], object]] = {
    ReadingMade.STATE: read_state,
    ReadingMade.ENERGY: read_energy,
    ReadingMade.POWER: read_power,
    ReadingMade.COMPUTE_UIDS: read_compute_uids,
    ReadingMade.PROCESSES: read_processes,
    ReadingMade.SPLIT: lambda nvml, gpu: nvml.mig_enabled(gpu),
}


def write_checked(
    call: Write, device: Device, limits: Callable[[], tuple[int, int]]
) -> WriteResult:
    """Compares, writes and reads back, as far as the control can be read."""
    spec = SPECS[call.control]
    if not spec.readable:
        return device.attempt(call.value) or Holds(call.value)
    if spec.merges:
        earlier = call.expected or (() if call.before is None else (call.before,))
        return device.write_merged(call.value, earlier, call.sure)
    before = call.before
    try:
        if before is None:
            before = device.read()
            if before == call.value or (call.expected and before not in call.expected):
                before = read_settled(device.read)
            if call.expected and before not in call.expected and not _is_ours(call, before, limits):
                return WriteRefused(None, before)
    except DeviceError as error:
        return refusal(error)
    return device.write_verified(call.value, before, call.sure, call.others)


def _is_ours(call: Write, current: ControlValue, limits: Callable[[], tuple[int, int]]) -> bool:
    """Whether the driver may have made this of an earlier write that was never confirmed."""
    spec = SPECS[call.control]
    if is_rounded(current, call.doubts, spec.rounding):
        return True
    if not call.doubts or spec.refused_target != "nearest":
        return False
    return is_moved(current, call.doubts, limits())


class GpuWorker:
    """One GPU's thread. Writes and what restores need come before all other reads."""

    def __init__(
        self, nvml: Backend, uuid: str, handle: Handle, done: Callable[[int, object], None]
    ) -> None:
        self._nvml = nvml
        self._uuid = uuid
        self._handle = handle
        self._activity = ActivityReader(nvml, handle)
        self._done = done
        self._devices: dict[Control, Device] = {}
        self._clocks: SupportedClocks | None = None
        self._guard = threading.Lock()
        self._wake = Wake(os.EFD_SEMAPHORE)  # once for each call, and once for the end
        self._urgent: deque[Read | Write] = deque()
        self._reads: dict[ReadingMade, list[int]] = {}
        self._waiting = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"gpu-{uuid[:12]}", daemon=True)
        self._thread.start()

    def submit(self, call: Read | Write) -> None:
        """Queues a call; `done` follows in any case.

        Reads of the same thing that wait are one call to the device. Only they can be refused: a
        control has one call in flight, so what is urgent is bounded by itself.
        """
        full = False
        if isinstance(call, Write) or call.reading in _URGENT:
            self._urgent.append(call)
        else:
            with self._guard:
                full = self._waiting >= MAX_QUEUED
                if not full:
                    self._reads.setdefault(call.reading, []).append(call.ticket)
                    self._waiting += 1
        if not full:
            self._wake.signal()
        else:
            self._done(
                call.ticket,
                Failure(
                    ErrorCode.OVERLOADED,
                    f"{MAX_QUEUED} reads already wait for {self._uuid}; its driver may be stuck, "
                    "look at the kernel log",
                ),
            )

    def stop(self) -> None:
        """Ends the thread when the calls queued before are done. Does not wait."""
        self._stopped = True
        self._wake.signal()

    def join(self, timeout_s: float | None) -> bool:
        """Waits for the end after `stop`, None: for however long. Returns whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            call, tickets = taken
            result = self._carry_out(call)
            for ticket in tickets:
                self._done(ticket, result)
        self._wake.close()

    def _take(self) -> tuple[Read | Write, list[int]] | None:
        """The next call, and who waits for it; None: the end."""
        while True:
            self._wake.wait()
            if self._urgent:
                call = self._urgent.popleft()
                return call, [call.ticket]
            with self._guard:
                if self._reads:
                    reading = next(iter(self._reads))
                    tickets = self._reads.pop(reading)
                    self._waiting -= len(tickets)
                    return Read(tickets[0], self._uuid, reading), tickets
            if self._stopped:
                return None

    def _supported_clocks(self) -> SupportedClocks:
        """They do not change while the driver is loaded, and there may be hundreds."""
        if self._clocks is None:
            self._clocks = read_clocks(self._nvml, self._handle)
        return self._clocks

    def _list(self) -> Listed:
        """Its processes. That they cannot be listed is an answer too."""
        try:
            processes = self._nvml.processes(self._handle)
        except DeviceError:
            return Listed(self._uuid, time.monotonic_ns(), None)
        pids = tuple(sorted({process.pid for process in processes}))
        t_ns = time.monotonic_ns()
        return Listed(self._uuid, t_ns, pids, self._activity.read(processes))

    def _write(self, call: Write) -> WriteResult:
        device = self._devices.get(call.control)
        if device is None:
            device = self._devices[call.control] = Device(
                partial(self._nvml.read_control, self._handle, call.control),
                partial(self._nvml.write_control, self._handle, call.control),
                time.sleep,
                SPECS[call.control].rounding,
            )
        limits = partial(self._nvml.control_range, self._handle, call.control)
        outcome = write_checked(call, device, limits)
        if isinstance(outcome, Holds) or not isinstance(outcome.trouble, DeviceError):
            return outcome
        what = f"setting {call.control.value}"
        return replace(outcome, trouble=device_failure(what, self._uuid, outcome.trouble))

    def _carry_out(self, call: Read | Write) -> object:
        try:
            if isinstance(call, Write):
                return self._write(call)
            if call.reading in (ReadingMade.CONTROL, ReadingMade.LIMITS):
                control = call.control or Control.POWER_LIMIT
                if call.reading is ReadingMade.LIMITS:
                    return self._nvml.control_range(self._handle, control)
                return read_settled(partial(self._nvml.read_control, self._handle, control))
            if call.reading is ReadingMade.CLOCKS:
                return self._supported_clocks()
            if call.reading is ReadingMade.PIDS:
                return self._list()
            return _READERS[call.reading](self._nvml, self._handle)
        except DeviceError as error:
            assert isinstance(call, Read)
            what = f"reading {call.control.value if call.control else call.reading.value}"
            return device_failure(what, self._uuid, error)
        except Exception as error:  # a worker must answer whatever happens
            log.exception("device call failed", extra={"event": "bug", "gpu": self._uuid})
            failure = Failure(
                ErrorCode.INTERNAL,
                f"zeusd failed while it served {self._uuid} ({type(error).__name__}); "
                "please report it with zeusd's log",
            )
            return Unknown(failure) if isinstance(call, Write) else failure

"""NVML of this machine, through nvidia-ml-py.

nvidia-ml-py checks most return codes, but not that of nvmlDeviceSetPowerManagementLimit_v2, so this
module uses the older call. nvidia-ml-py is imported when NVML is first initialised.
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.overriding import override
from zeusd.devices.control_calls import ControlCalls, TabledControls
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.nvml.instances import Instances
from zeusd.devices.nvml.profiles import ProfileTable
from zeusd.devices.port import (
    DeviceError,
    GpuProcess,
    Handle,
    MigInstance,
    PowerLimitRange,
    ProcessUse,
    SensorValues,
    WorkloadProfile,
    driver_text,
)

_ENERGY, _INSTANT, _AVERAGE = 83, 186, 185
"""Field ids of nvml.h: TOTAL_ENERGY_CONSUMPTION, POWER_INSTANT, POWER_AVERAGE."""

_GPU, _MODULE, _MEMORY = 0, 1, 2
"""Power scopes of nvml.h."""

_GIVE_UP_AFTER = 3
"""Readings between requests for a field that was never available. One that was is always requested:
fields occasionally return NOT_SUPPORTED when they are read fast."""

_ABSENT = (Return.NOT_SUPPORTED, Return.FUNCTION_NOT_FOUND)
"""Codes of a driver that does not offer a call on this GPU."""

_REFUSALS = (*_ABSENT, Return.INVALID_ARGUMENT, Return.NOT_FOUND)
"""Codes of a field that a GPU or its driver does not have. Any other code is a temporary
failure."""

_SUPERCHIP = re.compile(r"\bG[A-Z]\d")
"""In the name of a product with a Grace CPU, such as GH200 or GB200. Only these have a module."""

_LOST = (Return.GPU_IS_LOST, Return.RESET_REQUIRED)

_VOLTA, _AMPERE, _HOPPER, _BLACKWELL = 5, 7, 9, 10
"""First architectures with locked graphics clocks, locked memory clocks, and profiles; and the one
after Ampere without locked memory clocks."""

_SAMPLE = struct.Struct("QI4x")
"""nvmlSample_t: time of day, microseconds, and power, mW."""

_MOST_SAMPLES = 512
"""More than any driver keeps (119)."""

_APART_NS = 1_000_000
"""Less than the time between two samples, which is 6 ms at least."""

_NONE = 0xFFFFFFFF
"""Architecture of a GPU newer than the driver's table; instances on a GPU that is not split."""

_TOO_MUCH_MW, _TOO_MUCH_MJ = 20_000_000, 1 << 63
"""More than any power and energy: NVML_VALUE_NOT_AVAILABLE is all ones."""

_UNION = ("d", "I4x", "Q", "Q", "q", "i4x", "H6x")
"""Layout of the value by nvmlValueType_t: double, unsigned int, unsigned long, and so on."""

_LIMITED = ((74,), (75, 252, 270), (77, 253, 271), (76,), (79,))
"""Field ids of the times in which the clocks were limited, ns, for each of `REASONS`: perf policy
power, thermal, board limit, sync boost and reliability, with the hardware's thermal slowdown and
power brake, which have a counter of their own."""

_RENUMBERED = (580, 82)
"""First driver that has these two at 270 and 271."""

_REQUESTED_LIMIT, _CURRENT_LIMIT = 192, 190

_PLACES = 8 + len(_LIMITED)
"""Of what is read: energy, instant and average power, the memory's average, the module's instant
and average, requested and current limit, and the times limited."""

_NOT_LIMITED = (None,) * len(_LIMITED)


@dataclass(slots=True)
class _Field:
    """A field of nvml.h that is wanted of one GPU.

    Attributes:
        place: Its place in what is read; fields of one place add up.
        whole: The place of the same field of the whole GPU, if its scope is another.
        slow: Whether it is read about once a second.
        most: Values from this one on are too much for it.
        served: Whether it was ever available.
        refusals: How often it was not.
    """

    number: int
    scope: int
    place: int
    whole: int | None = None
    slow: bool = False
    most: int = _TOO_MUCH_MW
    served: bool = False
    refusals: int = 0


def _wanted(superchip: bool, renumbered: bool) -> list[_Field]:
    fields = [
        _Field(_ENERGY, _GPU, 0, most=_TOO_MUCH_MJ),
        _Field(_INSTANT, _GPU, 1),
        _Field(_AVERAGE, _GPU, 2, slow=True),
        _Field(_AVERAGE, _MEMORY, 3, 2, slow=True),
    ]
    if superchip:
        fields += [_Field(_INSTANT, _MODULE, 4, 1), _Field(_AVERAGE, _MODULE, 5, 2)]
    fields += [_Field(_REQUESTED_LIMIT, _GPU, 6, slow=True)]
    fields += [_Field(_CURRENT_LIMIT, _GPU, 7, slow=True)]
    unused = (252, 253) if renumbered else (270, 271)
    for place, numbers in enumerate(_LIMITED, 8):
        used = (number for number in numbers if number not in unused)
        fields += [_Field(number, _GPU, place, slow=True, most=_TOO_MUCH_MJ) for number in used]
    return fields


class _FieldPlan:
    """Which fields to request from a GPU, learnt from its replies.

    Attributes:
        fields: The fields of the next batch.
        batch: Whether the driver has the batched call at all.
        values: The structures of the batch, reused for each call.
        types: The types of their values, as the driver last returned them.
        layout: Reads type, code and value of each.
        guard: Lock held while the structures are in use.
        profiles: The GPU's workload power profiles, once they are known.
    """

    def __init__(self, fields: Iterable[_Field]) -> None:
        self.fields = [*fields]
        self._parts: dict[tuple[bool, bool], _FieldPlan] = {}
        self.batch = True
        self.values: Any = ()
        self.types: tuple[int, ...] = ()
        self.layout = struct.Struct("")
        self.guard = threading.Lock()
        self.profiles: ProfileTable | None = None
        self._batch_refused = 0

    def serves(self, *places: int) -> bool:
        """Whether a field of one of these places was ever available."""
        return any(field.served and field.place in places for field in self.fields)

    def part(self, counter: bool, averages: bool) -> _FieldPlan:
        """The plan of readings without the counter, or without averages over time."""
        plan = self._parts.get((counter, averages))
        if plan is not None:
            return plan
        if counter and not self.serves(1):
            return self  # there may be no other power
        plan = _FieldPlan(
            field
            for field in self.fields
            if (counter or field.number != _ENERGY) and (averages or not field.slow)
        )
        self._parts[counter, averages] = plan
        return plan

    def serve(self, field: _Field) -> None:
        field.served = True
        if field.place == 4:
            self.fields = [other for other in self.fields if other.place != 5]

    def refuse(self, field: _Field) -> None:
        field.refusals += 1
        if not field.served and field.refusals >= _GIVE_UP_AFTER:
            self.fields = [other for other in self.fields if other is not field]

    def batch_failed(self, code: int) -> None:
        self._batch_refused += 1
        served = any(field.served for field in self.fields)
        if code == Return.FUNCTION_NOT_FOUND or (
            not served and self._batch_refused >= _GIVE_UP_AFTER
        ):
            self.batch = False


class NvmlBackend(TabledControls):
    """Implements `zeusd.devices.port.Backend`.

    Args:
        library: The libnvidia-ml to load; None: libnvidia-ml.so.1 as the system finds it.
        sysfs: Where sysfs is mounted.
    """

    def __init__(self, library: str | None = None, sysfs: str = "/sys") -> None:
        self._library = library
        self._sysfs = sysfs
        self._pynvml: Any = None
        self._plans: dict[int | None, _FieldPlan] = {}
        self._plan_of: dict[int, tuple[Handle, _FieldPlan]] = {}
        self._get_field_values: Any = None
        self._inits = 0
        self._guard = threading.Lock()
        self._instances = Instances(self.call, lambda: self._pynvml)
        self.controls = self._control_calls()

    def _control_calls(self) -> dict[Control, ControlCalls]:
        def reset_or_set(
            reset: Callable[[Handle], None], lock: Callable[[Handle, int, int], None]
        ) -> Callable[[Handle, ControlValue], None]:
            return lambda gpu, value: lock(gpu, *value) if value else reset(gpu)

        return {
            Control.POWER_LIMIT: ControlCalls(
                offered=lambda gpu: bool(self.power_limits(gpu)),
                write=lambda gpu, value: self.set_power_limit(gpu, value[0]),
                read=lambda gpu: (self.power_limit_mw(gpu),),
                range=lambda gpu: self.power_limits(gpu)[:2],
            ),
            Control.GPU_CLOCKS: ControlCalls(
                offered=lambda gpu: self.architecture(gpu) >= _VOLTA,
                write=reset_or_set(self.reset_gpu_clocks, self.set_gpu_clocks),
            ),
            Control.MEMORY_CLOCKS: ControlCalls(
                # No call tells: Hopper's driver refuses them.
                offered=lambda gpu: (
                    self.architecture(gpu) >= _AMPERE and self.architecture(gpu) != _HOPPER
                ),
                write=reset_or_set(self.reset_memory_clocks, self.set_memory_clocks),
            ),
            Control.PERSISTENCE_MODE: ControlCalls(
                offered=lambda gpu: self.persistence_mode(gpu) in (True, False),
                write=lambda gpu, value: self.set_persistence_mode(gpu, bool(value[0])),
                read=lambda gpu: (int(self.persistence_mode(gpu)),),
            ),
            Control.POWER_PROFILE: ControlCalls(
                offered=lambda gpu: bool(self.power_profiles(gpu)),
                write=lambda gpu, value: self._profiles(gpu).write(value),
                read=lambda gpu: self._profiles(gpu).requested(),
            ),
        }

    # ------------------------------------------------------------------------------ the driver

    @override
    def init(self) -> None:
        with self._guard:
            if self._pynvml is None:
                import pynvml

                self._pynvml = pynvml
            if self._library is not None:
                self._load(self._library)
        self.call("nvmlInit")
        with self._guard:
            if self._inits == 0:
                # The driver may have changed, and handles are addresses that may be reused.
                self._plans.clear()
                self._plan_of.clear()
                self._instances = Instances(self.call, lambda: self._pynvml)
            self._inits += 1

    @override
    def shutdown(self) -> None:
        with self._guard:  # also if it fails: a session that has died is over
            self._inits = max(0, self._inits - 1)
        self.call("nvmlShutdown")

    @override
    def driver_version(self) -> str:
        return driver_text(self.call("nvmlSystemGetDriverVersion"))

    @override
    def device_count(self) -> int:
        return int(self.call("nvmlDeviceGetCount"))

    @override
    def device_handle(self, index: int) -> Handle:
        return self.call("nvmlDeviceGetHandleByIndex", index)

    # ----------------------------------------------------------------------------- identity

    @override
    def uuid(self, gpu: Handle) -> str:
        return driver_text(self.call("nvmlDeviceGetUUID", gpu))

    @override
    def name(self, gpu: Handle) -> str:
        return driver_text(self.call("nvmlDeviceGetName", gpu))

    @override
    def vbios(self, gpu: Handle) -> str:
        return driver_text(self.call("nvmlDeviceGetVbiosVersion", gpu))

    @override
    def pci_address(self, gpu: Handle) -> str:
        return driver_text(self.call("nvmlDeviceGetPciInfo", gpu).busId)

    @override
    def device_file(self, gpu: Handle) -> str:
        return f"/dev/nvidia{int(self.call('nvmlDeviceGetMinorNumber', gpu))}"

    @override
    def architecture(self, gpu: Handle) -> int:
        """Drivers that do not report it: derived from the CUDA compute capability.

        Raises:
            DeviceError: With `NOT_SUPPORTED` if neither is available.
        """
        call = "nvmlDeviceGetArchitecture"
        try:
            architecture = int(self.call(call, gpu))
        except DeviceError as error:
            if error.code != Return.FUNCTION_NOT_FOUND:
                raise
        else:
            if architecture != _NONE:
                return architecture
        major, minor = self.call("nvmlDeviceGetCudaComputeCapability", gpu)
        if major == 7:
            return 6 if minor >= 5 else 5
        if major == 8:
            return 8 if minor == 9 else 7
        known = {3: 2, 5: 3, 6: 4, 9: 9, 10: 10, 11: 10, 12: 10}.get(major)
        if known is None:
            raise nvml_error(
                Return.NOT_SUPPORTED, call, f"compute capability {major}.{minor} is not known"
            )
        return known

    @override
    def memory_mib(self, gpu: Handle) -> int:
        return int(self.call("nvmlDeviceGetMemoryInfo", gpu).total) // (1024 * 1024)

    @override
    def mig_enabled(self, gpu: Handle) -> bool:
        try:
            current, _pending = self.call("nvmlDeviceGetMigMode", gpu)
        except DeviceError as error:
            if error.code in _ABSENT:
                return False
            raise
        return bool(current)

    @override
    def runtime_indices(self, gpu: Handle) -> list[int]:
        """Empty: CUDA_DEVICE_ORDER sets CUDA's order in each process."""
        return []

    @override
    def power_domain(self, gpu: Handle) -> list[int]:
        """Empty: every NVIDIA GPU has its own power limit."""
        self.uuid(gpu)
        return []

    @override
    def module(self, gpu: Handle) -> int | None:
        """NVML has no id for a superchip; GPUs of one share a NUMA node."""
        if self.sensors(gpu).module_power_mw is None:
            return None
        domain, rest = self.pci_address(gpu).lower().split(":", 1)
        device = Path(self._sysfs, "bus/pci/devices", f"{domain[-4:]}:{rest}")
        try:
            node = int((device / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    # --------------------------------------------------------------------------- power limits

    @override
    def power_limits(self, gpu: Handle) -> PowerLimitRange:
        low, high = self.call("nvmlDeviceGetPowerManagementLimitConstraints", gpu)
        default = self.call("nvmlDeviceGetPowerManagementDefaultLimit", gpu)
        return PowerLimitRange(int(low), int(high), int(default))

    def power_limit_mw(self, gpu: Handle) -> int:
        """The power limit, mW."""
        return int(self.call("nvmlDeviceGetPowerManagementLimit", gpu))

    @override
    def enforced_power_limit_mw(self, gpu: Handle) -> int:
        return int(self.call("nvmlDeviceGetEnforcedPowerLimit", gpu))

    def set_power_limit(self, gpu: Handle, power_limit_mw: int) -> None:
        """Sets the power limit, mW."""
        self.call("nvmlDeviceSetPowerManagementLimit", gpu, power_limit_mw)

    # ------------------------------------------------------------------------------- profiles

    @override
    def power_profiles(self, gpu: Handle) -> list[WorkloadProfile]:
        if self.architecture(gpu) < _BLACKWELL:
            return []
        return self._profiles(gpu).profiles

    @override
    def enforced_power_profiles(self, gpu: Handle) -> ControlValue:
        return self._profiles(gpu).enforced()

    def _profiles(self, gpu: Handle) -> ProfileTable:
        """The GPU's table of profiles, read once. Only GPUs that have one are asked which are
        requested."""
        plan = self._plan(gpu)
        if plan.profiles is None:
            if self.architecture(gpu) < _BLACKWELL:
                raise nvml_error(Return.NOT_SUPPORTED, "workload power profiles")
            plan.profiles = ProfileTable(self._call_library, gpu)
        return plan.profiles

    # --------------------------------------------------------------------------------- clocks

    @override
    def supported_memory_clocks(self, gpu: Handle) -> list[int]:
        clocks = self.call("nvmlDeviceGetSupportedMemoryClocks", gpu)
        return sorted((int(mhz) for mhz in clocks), reverse=True)

    @override
    def supported_gpu_clocks(self, gpu: Handle, memory_clock_mhz: int) -> list[int]:
        clocks = self.call("nvmlDeviceGetSupportedGraphicsClocks", gpu, memory_clock_mhz)
        return sorted((int(mhz) for mhz in clocks), reverse=True)

    def set_gpu_clocks(self, gpu: Handle, min_mhz: int, max_mhz: int) -> None:
        """Locks the graphics clock to a range, MHz."""
        self.call("nvmlDeviceSetGpuLockedClocks", gpu, min_mhz, max_mhz)

    def reset_gpu_clocks(self, gpu: Handle) -> None:
        """Unlocks the graphics clock."""
        self.call("nvmlDeviceResetGpuLockedClocks", gpu)

    def set_memory_clocks(self, gpu: Handle, min_mhz: int, max_mhz: int) -> None:
        """Locks the memory clock to a range, MHz."""
        self.call("nvmlDeviceSetMemoryLockedClocks", gpu, min_mhz, max_mhz)

    def reset_memory_clocks(self, gpu: Handle) -> None:
        """Unlocks the memory clock."""
        self.call("nvmlDeviceResetMemoryLockedClocks", gpu)

    @override
    def gpu_clock_mhz(self, gpu: Handle) -> int:
        return int(self.call("nvmlDeviceGetClockInfo", gpu, self._pynvml.NVML_CLOCK_SM))

    @override
    def memory_clock_mhz(self, gpu: Handle) -> int:
        return int(self.call("nvmlDeviceGetClockInfo", gpu, self._pynvml.NVML_CLOCK_MEM))

    # ------------------------------------------------------------------------------ the state

    def persistence_mode(self, gpu: Handle) -> bool:
        """Whether persistence mode is on."""
        return bool(self.call("nvmlDeviceGetPersistenceMode", gpu))

    def set_persistence_mode(self, gpu: Handle, enabled: bool) -> None:
        """Turns persistence mode on or off."""
        self.call("nvmlDeviceSetPersistenceMode", gpu, int(enabled))

    @override
    def sensors(self, gpu: Handle, counter: bool = True, averages: bool = True) -> SensorValues:
        """Makes one call per value on drivers without field values."""
        plan = self._plan(gpu)
        if plan.batch and not (counter and averages):
            plan = plan.part(counter, averages)
        with plan.guard:
            if plan.batch and plan.fields:
                try:
                    return self._read_fields(gpu, plan)
                except DeviceError as error:
                    if error.code not in _ABSENT:
                        raise
                    plan.batch_failed(error.code)
            return self._sensors_one_by_one(gpu)

    @override
    def power_samples(self, gpu: Handle, since_ns: int) -> list[tuple[int, int]]:
        call = "nvmlDeviceGetSamples"
        kind, count = ctypes.c_uint(), ctypes.c_uint(_MOST_SAMPLES)
        samples = ctypes.create_string_buffer(_SAMPLE.size * _MOST_SAMPLES)
        epoch_ns = time.time_ns() - time.monotonic_ns()  # the driver's times are of day
        since_us = (since_ns + epoch_ns) // 1000 if since_ns else 0
        code = self._function(call)(
            gpu, 0, ctypes.c_ulonglong(since_us), ctypes.byref(kind), ctypes.byref(count), samples
        )
        if code not in (Return.SUCCESS, Return.NOT_FOUND):
            raise nvml_error(int(code), call)
        number = count.value if code == Return.SUCCESS else 0
        records = _SAMPLE.iter_unpack(memoryview(samples)[: _SAMPLE.size * number])
        timed = ((t_us * 1000 - epoch_ns, power_mw) for t_us, power_mw in records)
        # Times are rounded, so the first sample may be the last one that is known.
        low_ns = since_ns + _APART_NS
        return [(t_ns, mw) for t_ns, mw in timed if t_ns > low_ns and mw < _TOO_MUCH_MW]

    @override
    def temperature_c(self, gpu: Handle) -> int:
        sensor = self._pynvml.NVML_TEMPERATURE_GPU
        try:
            return int(self.call("nvmlDeviceGetTemperatureV", gpu, sensor))
        except DeviceError as error:
            if error.code not in (*_ABSENT, Return.ARGUMENT_VERSION_MISMATCH):
                raise
        return int(self.call("nvmlDeviceGetTemperature", gpu, sensor))

    @override
    def processes(self, gpu: Handle) -> list[GpuProcess]:
        """Only compute processes if the driver cannot list graphics processes."""
        computing = self.call("nvmlDeviceGetComputeRunningProcesses", gpu)
        try:
            drawing = self.call("nvmlDeviceGetGraphicsRunningProcesses", gpu)
        except DeviceError as error:
            if error.code not in _ABSENT:
                raise
            drawing = []
        processes: dict[tuple[int, int | None, int | None], GpuProcess] = {}
        for compute, listed in ((False, drawing), (True, computing)):
            for one in listed:
                key = (
                    int(one.pid),
                    _instance(getattr(one, "gpuInstanceId", None)),
                    _instance(getattr(one, "computeInstanceId", None)),
                )
                memory, known = one.usedGpuMemory, processes.get(key)
                if known is not None and known.memory_bytes is not None:
                    memory = max(known.memory_bytes, memory or 0)
                processes[key] = GpuProcess(key[0], memory, compute, *key[1:])
        return [processes[key] for key in sorted(processes, key=lambda key: key[0])]

    @override
    def process_utilization(self, gpu: Handle, since_us: int) -> list[ProcessUse]:
        try:
            samples = self.call("nvmlDeviceGetProcessUtilization", gpu, since_us)
        except DeviceError as error:
            # nvidia-ml-py also raises "success": there is no sample.
            if error.code in (Return.NOT_FOUND, Return.SUCCESS):
                return []
            raise
        return [
            ProcessUse(int(sample.pid), int(sample.timeStamp), int(sample.smUtil))
            for sample in samples
            if sample.smUtil <= 100  # others were never filled
        ]

    @override
    def mig_instances(self, gpu: Handle, measure: bool = False) -> list[MigInstance]:
        return self._instances.of(gpu, measure)

    @override
    def utilization_percent(self, gpu: Handle) -> int:
        return int(self.call("nvmlDeviceGetUtilizationRates", gpu).gpu)

    @override
    def memory_used_mib(self, gpu: Handle) -> int:
        return int(self.call("nvmlDeviceGetMemoryInfo", gpu).used) // (1024 * 1024)

    @override
    def throttle_reasons(self, gpu: Handle) -> int:
        try:
            return int(self.call("nvmlDeviceGetCurrentClocksEventReasons", gpu))
        except DeviceError as error:
            if error.code != Return.FUNCTION_NOT_FOUND:
                raise
        return int(self.call("nvmlDeviceGetCurrentClocksThrottleReasons", gpu))

    # -------------------------------------------------------------------------------- internals

    def _load(self, library: str) -> None:
        """Makes nvidia-ml-py use exactly this file: it only loads a library if it has none."""
        if getattr(self._pynvml.nvmlLib, "_name", None) == library:
            return
        try:
            loaded = ctypes.CDLL(library)
        except OSError as error:
            raise nvml_error(
                Return.LIBRARY_NOT_FOUND, "nvmlInit_v2", f"cannot load {library} ({error})"
            ) from None
        self._pynvml.nvmlLib = loaded
        self._pynvml._nvmlGetFunctionPointer_cache.clear()
        self._get_field_values = None

    def call(self, name: str, *args: Any) -> Any:
        """Calls nvidia-ml-py, and converts its exceptions to `DeviceError`."""
        if self._pynvml is None:
            raise nvml_error(Return.UNINITIALIZED, name)
        function: Callable[..., Any] | None = getattr(self._pynvml, name, None)
        if function is None:
            raise nvml_error(Return.FUNCTION_NOT_FOUND, name, "this nvidia-ml-py is too old")
        try:
            return function(*args)
        except self._pynvml.NVMLError as error:
            raise nvml_error(int(error.value), name) from None
        except UnicodeDecodeError as error:
            return error.object  # the text's bytes

    def _call_library(self, name: str, *args: Any) -> None:
        """Calls a function of the library that older nvidia-ml-py does not know."""
        code = int(self._function(name)(*args))
        if code != Return.SUCCESS:
            raise nvml_error(code, name)

    def _plan(self, gpu: Handle) -> _FieldPlan:
        known = self._plan_of.get(id(gpu))
        if known is not None:
            return known[1]
        key = ctypes.cast(gpu, ctypes.c_void_p).value
        plan = self._plans.get(key)
        if plan is None:
            version = re.match(r"(\d+)\.(\d+)", self.driver_version())
            renumbered = version is None or tuple(map(int, version.groups())) >= _RENUMBERED
            superchip = _SUPERCHIP.search(self.name(gpu)) is not None
            plan = self._plans.setdefault(key, _FieldPlan(_wanted(superchip, renumbered)))
        # Keeps the handle too, so that no other object can have its id.
        self._plan_of[id(gpu)] = gpu, plan
        return plan

    def _read_fields(self, gpu: Handle, plan: _FieldPlan) -> SensorValues:
        """One batched reading, from which the plan learns.

        Raises:
            DeviceError: The call failed, the GPU is lost, or every field failed temporarily.
        """
        call = "nvmlDeviceGetFieldValues"
        fields = plan.fields
        if len(plan.values) != len(fields):
            plan.values = self._field_array(fields)
            plan.types, plan.layout = _layout((0,) * len(fields))
        if self._get_field_values is None:
            self._get_field_values = self._function(call)
        before_ns = time.monotonic_ns()
        code = self._get_field_values(gpu, len(fields), plan.values)
        took_ns = time.monotonic_ns() - before_ns
        if code:
            raise nvml_error(int(code), call)
        values = plan.layout.unpack(plan.values)
        if values[::3] != plan.types:
            plan.types, plan.layout = _layout(values[::3])
            values = plan.layout.unpack(plan.values)
        read: list[int | None] = [None] * _PLACES
        mishap = served = 0
        for field, code, number in zip(fields, values[1::3], values[2::3], strict=True):
            if code == 0:
                # Boards that do not measure the power of their memory or module return zero without
                # an error, and drivers that know no scopes return the GPU's.
                if field.whole is not None and number in (0, read[field.whole]):
                    plan.refuse(field)
                    continue
                served += 1
                if not field.served:
                    plan.serve(field)
                if number < field.most:
                    before = read[field.place]
                    read[field.place] = int(number) if before is None else before + int(number)
            elif code in _LOST:
                raise nvml_error(code, call)
            elif code in _REFUSALS:
                plan.refuse(field)
            else:
                mishap = code
        if mishap and not served:
            raise nvml_error(mishap, call)
        energy_mj, instant_mw, average_mw, memory_mw, module_mw, module_average_mw = read[:6]
        if instant_mw is None and not plan.serves(1, 2, 4, 5):
            # Drivers before R530 have a field for the energy, but only a call for the power.
            instant_mw = self._or_none("nvmlDeviceGetPowerUsage", gpu, _TOO_MUCH_MW)
        limited_ns = tuple(read[8:])
        return SensorValues(
            before_ns + took_ns // 2,
            energy_mj,
            instant_mw,
            average_mw,
            memory_mw,
            module_average_mw if module_mw is None else module_mw,
            took_ns,
            () if limited_ns == _NOT_LIMITED else limited_ns,
            read[6],
            read[7],
        )

    def _function(self, name: str) -> Any:
        """The library's own function: nvidia-ml-py's wrapper rebuilds all structures for each call.

        Raises:
            DeviceError: This library lacks it.
        """
        if self._pynvml is None:
            raise nvml_error(Return.UNINITIALIZED, name)
        try:
            return self._pynvml._nvmlGetFunctionPointer(name)
        except self._pynvml.NVMLError as error:
            raise nvml_error(int(error.value), name) from None

    def _field_array(self, fields: Sequence[_Field]) -> Any:
        array = (self._pynvml.c_nvmlFieldValue_t * len(fields))()
        for value, field in zip(array, fields, strict=True):
            value.fieldId, value.scopeId = field.number, field.scope
        return array

    def _sensors_one_by_one(self, gpu: Handle) -> SensorValues:
        before_ns = time.monotonic_ns()
        energy = self._or_none("nvmlDeviceGetTotalEnergyConsumption", gpu, _TOO_MUCH_MJ)
        power = self._or_none("nvmlDeviceGetPowerUsage", gpu, _TOO_MUCH_MW)
        took_ns = time.monotonic_ns() - before_ns
        t_ns = before_ns + took_ns // 2
        return SensorValues(t_ns, energy, power, None, None, took_ns=took_ns)

    def _or_none(self, name: str, gpu: Handle, too_much: int) -> int | None:
        try:
            number = int(self.call(name, gpu))
            return number if number < too_much else None
        except DeviceError as error:
            if error.code in _ABSENT:
                return None
            raise


def _layout(types: tuple[int, ...]) -> tuple[tuple[int, ...], struct.Struct]:
    """Reads fields whose values have these types."""
    unions = (_UNION[kind] if 0 <= kind < len(_UNION) else "Q" for kind in types)
    return types, struct.Struct("".join(f"24xii{union}" for union in unions))


def _instance(number: int | None) -> int | None:
    """A MIG instance's id; None: no instance."""
    return None if number in (None, _NONE) else int(number)

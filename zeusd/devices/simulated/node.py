"""The simulated driver, the work that runs on its GPUs, and faults on demand."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.overriding import override
from zeusd.devices.control_calls import ControlCalls, TabledControls
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import (
    Backend,
    GpuProcess,
    Handle,
    MigInstance,
    PowerLimits,
    PowerProfile,
    ProcessUse,
    Sensors,
)
from zeusd.devices.simulated import tenants
from zeusd.devices.simulated.gpu import SimulatedGpu
from zeusd.devices.simulated.instructions import Instructions, find_instructions
from zeusd.devices.simulated.models import AMD, AMPERE, VOLTA
from zeusd.devices.simulated.physics import CLOCK_TAU_S, LIMIT_TAU_S
from zeusd.devices.simulated.quirks import Quirks
from zeusd.devices.simulated.spec import GpuSpec, parse_spec
from zeusd.devices.simulated.superchip import with_module
from zeusd.devices.simulated.tenants import Tenant
from zeusd.devices.simulated.work import Work
from zeusd.devices.simulated.workloads import Workload, find_workload

_LATENCY_SPREAD = 1 / 3
"""Standard deviation of a setter's time over its mean: 12 ms give or take 4."""


_LONGEST_LATENCY_S = 86_400.0

_GENERIC = frozenset(name for name in vars(TabledControls) if not name.startswith("_"))
CALLS = (frozenset(name for name in vars(Backend) if not name.startswith("_")) - _GENERIC) | {
    *("power_limit_mw", "set_power_limit", "persistence_mode", "set_persistence_mode"),
    *("requested_power_profiles", "set_power_profiles"),
    *("set_gpu_clocks", "reset_gpu_clocks", "set_memory_clocks", "reset_memory_clocks"),
}
"""What can fail: the calls that the table of controls is made of, and all others of the port."""

_NODE_CALLS = frozenset({"init", "shutdown", "driver_version", "device_count"})


@dataclass(slots=True)
class _Fault:
    code: int | None
    count: int | None
    latency_s: float


class SimulatedBackend(TabledControls):
    """Implements `zeusd.devices.port.Backend` without hardware. Thread-safe.

    Args:
        spec: What the node has, see `spec.parse_spec`, or the GPUs themselves.
        clock_ns: The time; a `VirtualClock` in tests.
        sleep: How a call that takes time lets it pass.

    Raises:
        ValueError: The spec names no node.
    """

    def __init__(
        self,
        spec: str | Sequence[GpuSpec],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._specs = parse_spec(spec) if isinstance(spec, str) else tuple(spec)
        self._clock_ns = clock_ns
        self.sleep = sleep
        self.lock = threading.RLock()
        self._boot = 0
        self._initialised = 0
        self._driver_code: int | None = None
        self._faults: dict[tuple[int | None, str], list[_Fault]] = {}
        self._lost: dict[int, int] = {}
        self._work: list[Work] = []
        self.controls = self._control_calls()
        self._load_driver()

    def _control_calls(self) -> dict[Control, ControlCalls]:
        def limits(gpu: Handle) -> tuple[int, int]:
            found = self.power_limits(gpu)
            return found.min_mw, found.max_mw

        def since(first: int) -> Callable[[Handle], bool]:
            return lambda gpu: self.architecture(gpu) in (*range(first, 1000), AMD)

        def lock_gpu(gpu: Handle, value: ControlValue) -> None:
            self.set_gpu_clocks(gpu, *value) if value else self.reset_gpu_clocks(gpu)

        def lock_memory(gpu: Handle, value: ControlValue) -> None:
            self.set_memory_clocks(gpu, *value) if value else self.reset_memory_clocks(gpu)

        return {
            Control.POWER_LIMIT: ControlCalls(
                offered=lambda gpu: bool(limits(gpu)),
                write=lambda gpu, value: self.set_power_limit(gpu, value[0]),
                read=lambda gpu: (self.power_limit_mw(gpu),),
                range=limits,
            ),
            Control.GPU_CLOCKS: ControlCalls(offered=since(VOLTA), write=lock_gpu),
            Control.MEMORY_CLOCKS: ControlCalls(offered=since(AMPERE), write=lock_memory),
            Control.PERSISTENCE_MODE: ControlCalls(
                offered=lambda gpu: (
                    self._gpus[gpu].model.persistence
                    and self.persistence_mode(gpu) in (True, False)
                ),
                write=lambda gpu, value: self.set_persistence_mode(gpu, bool(value[0])),
                read=lambda gpu: (int(self.persistence_mode(gpu)),),
            ),
            Control.POWER_PROFILE: ControlCalls(
                offered=lambda gpu: bool(self.power_profiles(gpu)),
                write=self.set_power_profiles,
                read=self.requested_power_profiles,
            ),
        }

    @property
    def specs(self) -> tuple[GpuSpec, ...]:
        """The GPUs of this node, by index."""
        return self._specs

    # ------------------------------------------------------------------------------ the driver

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
        """Settings of a GPU last while a client has it open, or persistence mode is on."""
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

    # ----------------------------------------------------------------------------- what it is

    @override
    def uuid(self, gpu: Handle) -> str:
        return self._enter(gpu, "uuid").spec.uuid

    @override
    def name(self, gpu: Handle) -> str:
        return self._enter(gpu, "name").model.name

    @override
    def pci_address(self, gpu: Handle) -> str:
        return self._enter(gpu, "pci_address").spec.pci_address

    @override
    def architecture(self, gpu: Handle) -> int:
        return self._enter(gpu, "architecture").model.architecture

    @override
    def memory_mib(self, gpu: Handle) -> int:
        return self._enter(gpu, "memory_mib").model.memory_mib

    @override
    def mig_enabled(self, gpu: Handle) -> bool:
        spec = self._enter(gpu, "mig_enabled").spec
        return spec.partitions > 1 or bool(spec.mig)

    @override
    def runtime_indices(self, gpu: Handle) -> list[int]:
        """HIP's are in the order of PCI addresses here."""
        own = self._enter(gpu, "runtime_indices").spec
        if own.model.architecture != AMD:
            return []
        before = sum(
            one.partitions for one in self._specs[: own.index] if one.model.architecture == AMD
        )
        return list(range(before, before + own.partitions))

    @override
    def power_domain(self, gpu: Handle) -> list[int]:
        first = self._enter(gpu, "power_domain").first
        if first.second is None:
            return []
        return [first.spec.index, first.second.spec.index]

    @override
    def module(self, gpu: Handle) -> int | None:
        return self._enter(gpu, "module").spec.module

    # --------------------------------------------------------------------------- power limits

    @override
    def power_limits(self, gpu: Handle) -> PowerLimits:
        state = self._limited(gpu, "power_limits")
        return PowerLimits(state.limit_min_mw, state.limit_max_mw, state.limit_default_mw)

    def power_limit_mw(self, gpu: Handle) -> int:
        """The power limit, mW."""
        state = self._limited(gpu, "power_limit_mw")
        with self.lock:
            self._settle(state)
            if state.stale_reads:
                state.stale_reads -= 1
                return state.limit_before_mw
            return state.limit_mw

    @override
    def enforced_power_limit_mw(self, gpu: Handle) -> int:
        state = self._enter(gpu, "enforced_power_limit_mw")
        with self.lock:
            self._settle(state)
            return state.enforced_limit_mw

    def set_power_limit(self, gpu: Handle, power_limit_mw: int) -> None:
        """Sets the power limit, mW."""
        state = self._limited(gpu, "set_power_limit", setter=True)
        low, high, quirks = state.limit_min_mw, state.limit_max_mw, state.quirks
        if quirks.clamp_mw is None and not low <= power_limit_mw <= high:
            raise nvml_error(Return.INVALID_ARGUMENT, "nvmlDeviceSetPowerManagementLimit")
        with self.lock:
            self._settle(state)
            if quirks.ignores():
                return
            state.limit_before_mw, state.stale_reads = state.limit_mw, quirks.stale_reads
            state.limit_due_s = self._clock_ns() / 1e9 + quirks.delay_s
            taken_mw = quirks.taken(power_limit_mw)
            state.limit_next_mw = taken_mw - taken_mw % state.model.limit_step_mw
            self._settle(state)

    # ------------------------------------------------------------------------------- profiles

    @override
    def power_profiles(self, gpu: Handle) -> list[PowerProfile]:
        profiles = self._enter(gpu, "power_profiles").model.profiles
        return [PowerProfile(one.profile, one.profile, one.conflicts) for one in profiles]

    def requested_power_profiles(self, gpu: Handle) -> ControlValue:
        """What anybody has requested."""
        return tuple(sorted(self._profiled(gpu, "requested_power_profiles").profiles))

    @override
    def enforced_power_profiles(self, gpu: Handle) -> ControlValue:
        return self._profiled(gpu, "enforced_power_profiles").enforced_profiles

    def set_power_profiles(self, gpu: Handle, profiles: ControlValue) -> None:
        """Requests these, and no others."""
        state = self._profiled(gpu, "set_power_profiles", setter=True)
        if not set(profiles) <= {one.profile for one in state.model.profiles}:
            raise nvml_error(
                Return.INVALID_ARGUMENT, "nvmlDeviceWorkloadPowerProfileUpdateProfiles"
            )
        with self.lock:
            if not state.quirks.ignores():
                state.profiles = frozenset(profiles)
                self._changed(state, LIMIT_TAU_S)

    # --------------------------------------------------------------------------------- clocks

    @override
    def supported_memory_clocks(self, gpu: Handle) -> list[int]:
        return list(self._enter(gpu, "supported_memory_clocks").model.memory_clocks_mhz)

    @override
    def supported_gpu_clocks(self, gpu: Handle, memory_clock_mhz: int) -> list[int]:
        model = self._enter(gpu, "supported_gpu_clocks").model
        if memory_clock_mhz not in model.memory_clocks_mhz:
            raise nvml_error(Return.NOT_FOUND, "nvmlDeviceGetSupportedGraphicsClocks")
        return list(model.clocks_at(memory_clock_mhz))

    def set_gpu_clocks(self, gpu: Handle, min_mhz: int, max_mhz: int) -> None:
        """Locks the graphics clock to a range, MHz. The range snaps to the clocks there are."""
        state = self._enter(gpu, "set_gpu_clocks", setter=True)
        call = "nvmlDeviceSetGpuLockedClocks"
        if not state.model.gpu_clocks:
            raise nvml_error(Return.NOT_SUPPORTED, call)
        if min_mhz > max_mhz:
            raise nvml_error(Return.INVALID_ARGUMENT, call)
        grid = state.model.clocks_mhz
        with self.lock:
            state.gpu_lock_mhz = (_nearest(grid, min_mhz), _nearest(grid, max_mhz))
            self._changed(state, CLOCK_TAU_S)

    def reset_gpu_clocks(self, gpu: Handle) -> None:
        """Unlocks the graphics clock."""
        state = self._enter(gpu, "reset_gpu_clocks", setter=True)
        if not state.model.gpu_clocks:
            raise nvml_error(Return.NOT_SUPPORTED, "nvmlDeviceResetGpuLockedClocks")
        with self.lock:
            state.gpu_lock_mhz = None
            self._changed(state, CLOCK_TAU_S)

    def set_memory_clocks(self, gpu: Handle, min_mhz: int, max_mhz: int) -> None:
        """Locks the memory clock to a range, MHz."""
        state = self._enter(gpu, "set_memory_clocks", setter=True)
        call = "nvmlDeviceSetMemoryLockedClocks"
        if not state.model.memory_clocks:
            raise nvml_error(Return.NOT_SUPPORTED, call)
        if min_mhz > max_mhz:
            raise nvml_error(Return.INVALID_ARGUMENT, call)
        grid = state.model.memory_clocks_mhz
        with self.lock:
            state.memory_lock_mhz = (_nearest(grid, min_mhz), _nearest(grid, max_mhz))
            self._changed(state, CLOCK_TAU_S)

    def reset_memory_clocks(self, gpu: Handle) -> None:
        """Unlocks the memory clock."""
        state = self._enter(gpu, "reset_memory_clocks", setter=True)
        if not state.model.memory_clocks:
            raise nvml_error(Return.NOT_SUPPORTED, "nvmlDeviceResetMemoryLockedClocks")
        with self.lock:
            state.memory_lock_mhz = None
            self._changed(state, CLOCK_TAU_S)

    @override
    def gpu_clock_mhz(self, gpu: Handle) -> int:
        return self._enter(gpu, "gpu_clock_mhz").point.clock_mhz

    @override
    def memory_clock_mhz(self, gpu: Handle) -> int:
        return self._enter(gpu, "memory_clock_mhz").memory_clock_mhz

    # ------------------------------------------------------------------------------ the state

    def persistence_mode(self, gpu: Handle) -> bool:
        """Whether persistence mode is on."""
        return self._persistent(gpu, "persistence_mode").persistence

    def set_persistence_mode(self, gpu: Handle, enabled: bool) -> None:
        """Turns persistence mode on or off."""
        state = self._persistent(gpu, "set_persistence_mode", setter=True)
        if not state.quirks.ignores():
            state.persistence = enabled

    @override
    def sensors(self, gpu: Handle) -> Sensors:
        state = self._enter(gpu, "sensors")
        with self.lock:
            now_ns = self._clock_ns()
            now_s = self.advance(now_ns)
            model = state.model
            if state.first is not state:
                return Sensors(now_ns, None, None, None, None)
            found = Sensors(
                t_ns=now_ns,
                energy_mj=state.sensor.energy_mj(now_s) if model.energy_counter else None,
                power_instant_mw=state.sensor.instant_mw(now_s),
                power_average_mw=state.sensor.average_mw(now_s) if model.sensor.average else None,
                memory_power_average_mw=None,
            )
            if model.superchip is None:
                return found
            module = (other for other in self._gpus if other.spec.module == state.spec.module)
            return with_module(found, state, module, now_s)

    @override
    def temperature_c(self, gpu: Handle) -> int:
        state = self._enter(gpu, "temperature_c")
        with self.lock:
            return round(state.temperature_c(self.advance()))

    @override
    def throttle_reasons(self, gpu: Handle) -> int:
        return self._enter(gpu, "throttle_reasons").reasons()

    @override
    def processes(self, gpu: Handle) -> list[GpuProcess]:
        state = self._enter(gpu, "processes")
        work = state.work
        if state.tenants:
            return tenants.processes(state.tenants, state.work_memory_mib * 1024 * 1024)
        if not isinstance(work, Work) or work.pid is None:
            return []
        return [GpuProcess(work.pid, state.work_memory_mib * 1024 * 1024, compute=True)]

    @override
    def process_utilization(self, gpu: Handle, since_us: int) -> list[ProcessUse]:
        state = self._enter(gpu, "process_utilization")
        now_us = time.time_ns() // 1000
        return tenants.process_uses(state.spec, state.tenants, state.busy, since_us, now_us)

    @override
    def mig_instances(self, gpu: Handle, measure: bool = False) -> list[MigInstance]:
        state = self._enter(gpu, "mig_instances")
        return tenants.mig_instances(state.spec, state.tenants, state.busy, measure)

    def share(self, gpu: int, processes: Iterable[Tenant]) -> None:
        """Says which processes the work on a GPU is of, and how much of it each does."""
        with self.lock:
            self._existing(gpu).tenants = tuple(processes)

    @override
    def utilization_percent(self, gpu: Handle) -> int:
        return 100 if self._enter(gpu, "utilization_percent").busy else 0

    @override
    def memory_used_mib(self, gpu: Handle) -> int:
        return self._enter(gpu, "memory_used_mib").memory_used_mib

    # ----------------------------------------------------------------------- what runs on it

    def open_work(
        self,
        gpus: Sequence[int],
        workload: str | Workload | Instructions,
        pid: int | None = None,
    ) -> Work:
        """Opens a context on each of these GPUs, for one stream of work.

        Args:
            gpus: NVML indices.
            workload: See `workloads.find_workload` and `instructions.find_instructions`.
            pid: The process whose work it is, if it is another's.

        Raises:
            ValueError: No such GPU or workload, or a GPU is busy with other work.
        """
        with self.lock:
            now_s = self.advance()
            states = []
            for index in gpus:
                if not 0 <= index < len(self._gpus):
                    raise ValueError(f"there is no simulated GPU {index}")
                if self._gpus[index].work is not None:
                    raise ValueError(f"the simulated GPU {index} already runs other work")
                states.append(self._gpus[index])
            if not states:
                raise ValueError("work needs at least one GPU")
            if len(set(gpus)) < len(states):
                raise ValueError("work names a simulated GPU twice")
            if isinstance(workload, str):
                found = [
                    find_instructions(workload, state.model) or find_workload(workload, state.model)
                    for state in states
                ]
                workload = found[0]
            work = Work(self, states, workload, now_s, pid)
            for state in states:
                state.contexts += 1
                state.work = work
                state.retarget(now_s, 0.0)
            self._work = [other for other in self._work if not other.closed] + [work]
            return work

    def true_energy_j(self, gpu: int) -> float:
        """Energy really drawn by a GPU until now."""
        with self.lock:
            now_s = self.advance()
            return self._existing(gpu).true_energy_j(now_s)

    def advance(self, now_ns: int | None = None) -> float:
        """Lets finish what has finished until now. Lock held. Returns the time in seconds."""
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

    # ------------------------------------------------------------------------ what goes wrong

    def inject(
        self,
        gpu: int | None,
        call: str,
        code: int | None = None,
        *,
        count: int | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """Makes a call fail, or take long, on one GPU.

        Args:
            gpu: NVML index; None for `init`, `shutdown`, `driver_version`, `device_count`.
            call: Name of the method, such as `sensors` or `set_power_limit`.
            code: What it returns instead; None: it works, after `latency_s`.
            count: How many times; None: until `clear_faults`.
            latency_s: Further time it takes.

        Raises:
            ValueError: No such GPU or method, or a time that cannot pass.
        """
        if call not in CALLS or (gpu is None) != (call in _NODE_CALLS):
            raise ValueError(f"{call!r} is no call that can fail on GPU {gpu}")
        if gpu is not None:
            self._existing(gpu)
        if not 0 <= latency_s <= _LONGEST_LATENCY_S:
            raise ValueError(f"a call takes from 0 to {_LONGEST_LATENCY_S:g} s, not {latency_s}")
        with self.lock:
            self._faults.setdefault((gpu, call), []).append(_Fault(code, count, latency_s))

    def misbehave(self, gpu: int, quirks: Quirks) -> None:
        """The driver does not do quite what it is told on one GPU, until `clear_faults`."""
        with self.lock:
            self._existing(gpu).quirks = quirks

    def clear_faults(self) -> None:
        """Everything works again, lost GPUs and an absent driver included."""
        with self.lock:
            self._faults.clear()
            for gpu in self._gpus:
                gpu.quirks = Quirks()
            self._lost.clear()
            self._driver_code = None

    def lose(self, gpu: int, code: int = Return.GPU_IS_LOST) -> None:
        """The GPU falls off the bus: every call on it fails."""
        with self.lock:
            self._existing(gpu)
            self._lost[gpu] = code

    def remove_driver(self, code: int = Return.DRIVER_NOT_LOADED) -> None:
        """Initialising fails from now on."""
        with self.lock:
            self._driver_code = code

    def reload_driver(self) -> None:
        """Counters start again and all settings are lost."""
        with self.lock:
            self.advance()
            for work in list(self._work):
                work.close()
            self._load_driver()

    def set_outside(self, gpu: int, power_limit_mw: int) -> None:
        """Someone else sets a power limit, as `nvidia-smi -pl` would."""
        with self.lock:
            state = self._existing(gpu)
            if not state.limit_min_mw <= power_limit_mw <= state.limit_max_mw:
                raise ValueError(
                    f"{power_limit_mw} mW is not between {state.limit_min_mw} and "
                    f"{state.limit_max_mw} mW"
                )
            state.limit_mw, state.limit_next_mw = power_limit_mw, None
            self._changed(state, LIMIT_TAU_S)

    def set_profiles_outside(self, gpu: int, profiles: ControlValue) -> None:
        """Someone else changes what is requested, as `nvidia-smi power-profiles` would."""
        with self.lock:
            state = self._existing(gpu)
            state.profiles = frozenset(profiles)
            self._changed(state, LIMIT_TAU_S)

    def set_board_limit(self, gpu: int, power_limit_mw: int | None) -> None:
        """The board's controller caps the GPU out of band; None: no longer."""
        with self.lock:
            state = self._existing(gpu)
            state.board_limit_mw = power_limit_mw
            self._changed(state, LIMIT_TAU_S)

    def shrink_maximum(self, gpu: int, power_limit_mw: int) -> None:
        """A driver update lowers the largest limit."""
        with self.lock:
            state = self._existing(gpu)
            state.limit_max_mw = power_limit_mw
            state.limit_mw = min(state.limit_mw, power_limit_mw)
            self._changed(state, LIMIT_TAU_S)

    # -------------------------------------------------------------------------------- internals

    def _existing(self, gpu: int) -> SimulatedGpu:
        if not 0 <= gpu < len(self._gpus):
            raise ValueError(f"there is no simulated GPU {gpu}")
        return self._gpus[gpu]

    def _meet_fault(self, gpu: int | None, method: str, call: str) -> None:
        """For calls that `_enter` does not serve."""
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
        """Everything a call on a GPU has in common; sleeps outside the lock."""
        self._check_initialised(call)
        with self.lock:
            if not isinstance(gpu, int) or not 0 <= gpu < len(self._gpus):
                raise nvml_error(Return.INVALID_ARGUMENT, call)
            lost = self._lost.get(gpu)
            fault = self._take_fault(gpu, call)
            state = self._gpus[gpu]
            spec = state.spec
            delay_s = fault.latency_s if fault is not None else 0.0
            if setter and spec.setter_ms:
                mean_s = spec.setter_ms / 1000
                delay_s += max(mean_s / 4, state.chance.gauss(mean_s, mean_s * _LATENCY_SPREAD))
            if not delay_s:
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

    def _limited(self, gpu: Handle, call: str, setter: bool = False) -> SimulatedGpu:
        """For calls about the power limit, which the second die of a card has no part in."""
        state = self._enter(gpu, call, setter)
        if state.first is not state:
            raise nvml_error(Return.NOT_SUPPORTED, call, "the card's first GPU has its power limit")
        return state

    def _profiled(self, gpu: Handle, call: str, setter: bool = False) -> SimulatedGpu:
        """For calls about workload power profiles."""
        state = self._enter(gpu, call, setter)
        if not state.model.profiles:
            raise nvml_error(Return.NOT_SUPPORTED, call)
        return state

    def _persistent(self, gpu: Handle, call: str, setter: bool = False) -> SimulatedGpu:
        """For calls about persistence mode."""
        state = self._enter(gpu, call, setter)
        if not state.model.persistence:
            raise nvml_error(Return.NOT_SUPPORTED, call)
        return state

    def _take_fault(self, gpu: int | None, call: str) -> _Fault | None:
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
        """A limit whose time has come takes effect. Lock held."""
        if state.limit_next_mw is not None and self._clock_ns() / 1e9 >= state.limit_due_s:
            state.limit_mw, state.limit_next_mw = state.limit_next_mw, None
            self._changed(state, LIMIT_TAU_S)

    def _changed(self, state: SimulatedGpu, tau_s: float) -> None:
        """A setting changed: the GPU, and whatever runs on it, adapts."""
        now_s = self.advance()
        for die in (state,) if state.second is None else (state, state.second):
            die.limit_moved(now_s)
            if die.work is not None and die.work.active:
                die.work.follow(now_s, tau_s)
            else:
                die.retarget(now_s, tau_s)


def _nearest(grid: Sequence[int], mhz: int) -> int:
    return min(grid, key=lambda clock: abs(clock - mhz))

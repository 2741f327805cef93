"""A simulated node: the driver, the work on its GPUs, and injected faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from zeus_ipc.controls import ControlValue
from zeus_ipc.limited import REASONS
from zeusd.devices.control_calls import TabledControls
from zeusd.devices.nvml.codes import Return
from zeusd.devices.port import Backend
from zeusd.devices.simulated.driver import Fault
from zeusd.devices.simulated.gpu import Quirks
from zeusd.devices.simulated.instructions import Instructions, find_instructions
from zeusd.devices.simulated.physics import LIMIT_TAU_S
from zeusd.devices.simulated.readings import SimulatedReadings
from zeusd.devices.simulated.settings import SimulatedSettings
from zeusd.devices.simulated.spec import GpuSpec, parse_spec
from zeusd.devices.simulated.tenants import Tenant
from zeusd.devices.simulated.work import Work
from zeusd.devices.simulated.workloads import SimulatedWorkload, find_workload

_LONGEST_LATENCY_S = 86_400.0

_GENERIC = frozenset(name for name in vars(TabledControls) if not name.startswith("_"))
CALLS = (frozenset(name for name in vars(Backend) if not name.startswith("_")) - _GENERIC) | {
    *("power_limit_mw", "set_power_limit", "persistence_mode", "set_persistence_mode"),
    *("requested_power_profiles", "set_power_profiles"),
    *("set_gpu_clocks", "reset_gpu_clocks", "set_memory_clocks", "reset_memory_clocks"),
}
"""Calls that can fail: those of the table of controls, and all others of the port."""

_NODE_CALLS = frozenset({"init", "shutdown", "driver_version", "device_count"})


class SimulatedBackend(SimulatedSettings, SimulatedReadings):
    """Implements `zeusd.devices.port.Backend` without hardware. Thread-safe.

    Args:
        spec: The GPUs, or their specification (see `spec.parse_spec`).
        clock_ns: The time; a `VirtualClock` in tests.
        sleep: Called by calls that take time.

    Raises:
        ValueError: The specification is not valid.
    """

    def __init__(
        self,
        spec: str | Sequence[GpuSpec],
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        specs = parse_spec(spec) if isinstance(spec, str) else tuple(spec)
        super().__init__(specs, clock_ns, sleep)
        self.controls = self._control_calls()

    def share(self, gpu: int, processes: Iterable[Tenant]) -> None:
        """Sets the processes that the work on a GPU belongs to, and each one's share."""
        with self.lock:
            self._existing(gpu).tenants = tuple(processes)

    def open_work(
        self,
        gpus: Sequence[int],
        workload: str | SimulatedWorkload | Instructions,
        pid: int | None = None,
    ) -> Work:
        """Opens a context on each of these GPUs for one stream of work.

        Args:
            gpus: NVML indices.
            workload: See `workloads.find_workload` and `instructions.find_instructions`.
            pid: The process that the work belongs to, if not this one.

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
                workloads = [
                    find_instructions(workload, state.model) or find_workload(workload, state.model)
                    for state in states
                ]
                workload = workloads[0]
            work = Work(self, states, workload, now_s, pid)
            for state in states:
                state.contexts += 1
                state.work = work
                state.retarget(now_s, 0.0)
            self._work = [other for other in self._work if not other.closed] + [work]
            return work

    def true_energy_j(self, gpu: int) -> float:
        """True energy drawn by a GPU until now."""
        with self.lock:
            now_s = self.advance()
            return self._existing(gpu).true_energy_j(now_s)

    # ------------------------------------------------------------------------- fault injection

    def inject(
        self,
        gpu: int | None,
        call: str,
        code: int | None = None,
        *,
        count: int | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """Makes a call on one GPU fail or take long.

        Args:
            gpu: NVML index; None for `init`, `shutdown`, `driver_version`, `device_count`.
            call: Name of the method, such as `sensors` or `set_power_limit`.
            code: The code that it returns instead; None: it works, after `latency_s`.
            count: How many times; None: until `clear_faults`.
            latency_s: Additional time that it takes, s.

        Raises:
            ValueError: No such GPU or method, or an invalid time.
        """
        if call not in CALLS or (gpu is None) != (call in _NODE_CALLS):
            raise ValueError(f"{call!r} is not a call that can fail on GPU {gpu}")
        if gpu is not None:
            self._existing(gpu)
        if not 0 <= latency_s <= _LONGEST_LATENCY_S:
            raise ValueError(f"a call takes from 0 to {_LONGEST_LATENCY_S:g} s, not {latency_s}")
        with self.lock:
            self._faults.setdefault((gpu, call), []).append(Fault(code, count, latency_s))

    def misbehave(self, gpu: int, quirks: Quirks) -> None:
        """Makes the driver deviate from requests on one GPU until `clear_faults`."""
        with self.lock:
            self._existing(gpu).quirks = quirks

    def clear_faults(self) -> None:
        """Ends all faults, including lost GPUs and an absent driver."""
        with self.lock:
            self._faults.clear()
            for gpu in self._gpus:
                gpu.quirks = Quirks()
            self._lost.clear()
            self._driver_code = None

    def lose(self, gpu: int, code: int = Return.GPU_IS_LOST) -> None:
        """Drops the GPU off the bus: every call on it fails."""
        with self.lock:
            self._existing(gpu)
            self._lost[gpu] = code

    def remove_driver(self, code: int = Return.DRIVER_NOT_LOADED) -> None:
        """Makes initialising fail from now on."""
        with self.lock:
            self._driver_code = code

    def reload_driver(self) -> None:
        """Reloads the driver: counters start again and all settings are lost."""
        with self.lock:
            self.advance()
            for work in list(self._work):
                work.close()
            self._load_driver()

    def set_outside(self, gpu: int, power_limit_mw: int) -> None:
        """Sets a power limit from outside zeusd, as `nvidia-smi -pl` would."""
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
        """Changes the requested profiles from outside zeusd, as `nvidia-smi power-profiles`
        would."""
        with self.lock:
            state = self._existing(gpu)
            state.profiles = frozenset(profiles)
            self._changed(state, LIMIT_TAU_S)

    def reset_clocks_outside(self, gpu: int) -> None:
        """Unlocks both clocks from outside zeusd, which no driver call shows."""
        with self.lock:
            state = self._existing(gpu)
            state.gpu_lock_mhz = state.memory_lock_mhz = None
            self._changed(state, LIMIT_TAU_S)

    def set_board_limit(self, gpu: int, power_limit_mw: int | None) -> None:
        """Caps the GPU out of band, as the board's controller would; None: ends the cap."""
        with self.lock:
            state = self._existing(gpu)
            state.board_limit_mw = power_limit_mw
            self._changed(state, LIMIT_TAU_S)

    def limit_clocks(self, gpu: int, reasons: Sequence[str]) -> None:
        """Limits the clocks of a GPU that works for these reasons too, of `limited.REASONS`; the
        simulated work is as fast as before.

        Raises:
            ValueError: No such GPU or reason.
        """
        if unknown := set(reasons) - set(REASONS):
            raise ValueError(f"{min(unknown)!r} is not one of {', '.join(REASONS)}")
        with self.lock:
            state = self._existing(gpu)
            state.also_limited = frozenset(reasons)
            self._changed(state, LIMIT_TAU_S)

    def shrink_maximum(self, gpu: int, power_limit_mw: int) -> None:
        """Lowers the largest limit, as a driver update may."""
        with self.lock:
            state = self._existing(gpu)
            state.limit_max_mw = power_limit_mw
            state.limit_mw = min(state.limit_mw, power_limit_mw)
            self._changed(state, LIMIT_TAU_S)

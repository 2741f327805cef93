"""Controls of the GPUs of a simulated node: power limits, profiles, clocks, persistence mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.overriding import override
from zeusd.devices.control_calls import ControlCalls
from zeusd.devices.nvml.codes import Return, nvml_error
from zeusd.devices.port import (
    Handle,
    PowerLimitRange,
    WorkloadProfile,
)
from zeusd.devices.simulated.driver import SimulatedDriver
from zeusd.devices.simulated.gpu import SimulatedGpu
from zeusd.devices.simulated.models import AMD, VOLTA
from zeusd.devices.simulated.physics import CLOCK_TAU_S, LIMIT_TAU_S


class SimulatedSettings(SimulatedDriver):
    """The controls part of `zeusd.devices.port.Backend`."""

    def _control_calls(self) -> dict[Control, ControlCalls]:
        def limits(gpu: Handle) -> tuple[int, int]:
            current = self.power_limits(gpu)
            return current.min_mw, current.max_mw

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
            Control.MEMORY_CLOCKS: ControlCalls(
                offered=lambda gpu: self._gpus[gpu].model.memory_clocks, write=lock_memory
            ),
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

    @override
    def power_limits(self, gpu: Handle) -> PowerLimitRange:
        state = self._limited(gpu, "power_limits")
        return PowerLimitRange(state.limit_min_mw, state.limit_max_mw, state.limit_default_mw)

    def power_limit_mw(self, gpu: Handle) -> int:
        """The power limit, mW."""
        state = self._limited(gpu, "power_limit_mw")
        with self.lock:
            self._settle(state)
            if state.stale_reads:
                state.stale_reads -= 1
                return state.limit_before_mw
            return state.limit_mw

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

    @override
    def power_profiles(self, gpu: Handle) -> list[WorkloadProfile]:
        profiles = self._enter(gpu, "power_profiles").model.profiles
        return [
            WorkloadProfile(profile.profile, profile.profile, profile.conflicts)
            for profile in profiles
        ]

    def requested_power_profiles(self, gpu: Handle) -> ControlValue:
        """Profiles that any program has requested."""
        return tuple(sorted(self._profiled(gpu, "requested_power_profiles").profiles))

    @override
    def enforced_power_profiles(self, gpu: Handle) -> ControlValue:
        return self._profiled(gpu, "enforced_power_profiles").enforced_profiles

    def set_power_profiles(self, gpu: Handle, profiles: ControlValue) -> None:
        """Requests exactly these profiles."""
        state = self._profiled(gpu, "set_power_profiles", setter=True)
        if not set(profiles) <= {profile.profile for profile in state.model.profiles}:
            raise nvml_error(
                Return.INVALID_ARGUMENT, "nvmlDeviceWorkloadPowerProfileUpdateProfiles"
            )
        with self.lock:
            if not state.quirks.ignores():
                state.profiles = frozenset(profiles)
                self._changed(state, LIMIT_TAU_S)

    def set_gpu_clocks(self, gpu: Handle, min_mhz: int, max_mhz: int) -> None:
        """Locks the graphics clock to a range, MHz. The range is moved to existing clocks."""
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

    def persistence_mode(self, gpu: Handle) -> bool:
        """Whether persistence mode is on."""
        return self._persistent(gpu, "persistence_mode").persistence

    def set_persistence_mode(self, gpu: Handle, enabled: bool) -> None:
        """Turns persistence mode on or off."""
        state = self._persistent(gpu, "set_persistence_mode", setter=True)
        if not state.quirks.ignores():
            state.persistence = enabled

    def _limited(self, gpu: Handle, call: str, setter: bool = False) -> SimulatedGpu:
        """Enters a call about the power limit; fails on the second die of a card, and where
        there is none to set."""
        state = self._enter(gpu, call, setter)
        if state.first is not state:
            raise nvml_error(
                Return.NOT_SUPPORTED, call, "the card's first GPU has the card's power limit"
            )
        if "limit" in state.spec.lacks:
            raise nvml_error(Return.NOT_SUPPORTED, call)
        return state

    def _profiled(self, gpu: Handle, call: str, setter: bool = False) -> SimulatedGpu:
        """Enters a call about workload power profiles."""
        state = self._enter(gpu, call, setter)
        if not state.model.profiles:
            raise nvml_error(Return.NOT_SUPPORTED, call)
        return state

    def _persistent(self, gpu: Handle, call: str, setter: bool = False) -> SimulatedGpu:
        """Enters a call about persistence mode."""
        state = self._enter(gpu, call, setter)
        if not state.model.persistence:
            raise nvml_error(Return.NOT_SUPPORTED, call)
        return state


def _nearest(grid: Sequence[int], mhz: int) -> int:
    return min(grid, key=lambda clock: abs(clock - mhz))

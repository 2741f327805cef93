"""The contract of every backend, of any vendor: the same cases on each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from tests.fake_amdsmi import double as amd
from tests.fake_nvml import double as nvidia
from tests.zeusd.devices.opening import failure
from zeus_ipc.controls import SPECS, UNLOCKED, Control, ControlValue
from zeusd.devices.port import Backend, CallOutcome, Handle
from zeusd.devices.simulated import SimulatedBackend


@dataclass
class Case:
    """A node with two GPUs, and the changes that a test may make to it.

    Attributes:
        backend: Its backend, initialised.
        lose: Takes the first GPU off the bus.
        fail_once: Lets the next reading of the first GPU's power limit answer "not supported".
        domains: GPUs that share the power of each.
        modules: The superchip of each GPU.
    """

    backend: Backend
    lose: Callable[[], None]
    fail_once: Callable[[], None]
    domains: list[list[int]] = field(default_factory=lambda: [[], []])
    modules: list[int | None] = field(default_factory=lambda: [None, None])

    @property
    def gpu(self) -> Handle:
        """The first GPU."""
        return self.backend.device_handle(0)


Opener = Callable[[bool], Case]


def open_nvidia(request: pytest.FixtureRequest, root: bool) -> Case:
    gpu = {"architecture": 10, "profiles_valid": nvidia.mask_of(0, 1, 5, 6, 7)}
    privilege = nvidia.ALWAYS if root else nvidia.NEVER
    backend, double = request.getfixturevalue("open_nvml")(gpu, gpu, privilege=privilege)
    return Case(
        backend,
        lambda: double.inject(0, "*", 15),
        lambda: double.inject(0, "nvmlDeviceGetPowerManagementLimit", 3, count=1),
    )


def open_amd(request: pytest.FixtureRequest, root: bool) -> Case:
    privilege = amd.ALWAYS if root else amd.NEVER
    backend, double, _ = request.getfixturevalue("open_amd")({}, {}, privilege=privilege)
    return Case(
        backend,
        lambda: double.lose(0),
        lambda: double.inject(0, "get_power_cap_info", 2, 1),
    )


def open_simulated(key: str, root: bool) -> Case:
    node = SimulatedBackend(f"2x{key}:setter_ms=0" + ("" if root else ":unprivileged"))
    node.init()
    return Case(
        node,
        lambda: node.lose(0),
        lambda: node.inject(0, "power_limit_mw", 3, count=1),
        modules=[spec.module for spec in node.specs],
    )


@pytest.fixture(params=["nvml", "amd", "a100", "gb200", "mi300x"])
def open_case(request: pytest.FixtureRequest) -> Opener:
    if request.param == "nvml":
        return lambda root: open_nvidia(request, root)
    if request.param == "amd":
        return lambda root: open_amd(request, root)
    return lambda root: open_simulated(request.param, root)


@pytest.fixture
def case(open_case: Opener) -> Case:
    return open_case(True)


def outcome(call: Callable[..., Any], *arguments: Any) -> CallOutcome:
    error = failure(call, *arguments)
    assert error.call
    assert error.text
    return error.outcome


def test_gpus_have_names_that_last(case: Case) -> None:
    backend = case.backend
    assert backend.device_count() == 2
    assert backend.driver_version()
    named = [backend.uuid(backend.device_handle(index)) for index in range(2)]
    assert len(set(named)) == 2
    assert all(re.fullmatch(r"GPU-[0-9a-f-]{16,36}", uuid) for uuid in named)
    addresses = [backend.pci_address(backend.device_handle(index)) for index in range(2)]
    assert addresses == sorted(set(addresses))
    assert all(re.fullmatch(r"[0-9A-F]{8}:[0-9A-F]{2}:[0-9A-F]{2}\.0", one) for one in addresses)
    backend.shutdown()
    backend.init()
    assert [backend.uuid(backend.device_handle(index)) for index in range(2)] == named
    assert backend.name(case.gpu)
    assert backend.vbios(case.gpu)
    assert backend.memory_mib(case.gpu) > backend.memory_used_mib(case.gpu) >= 0
    assert backend.mig_enabled(case.gpu) is False
    assert [
        backend.power_domain(backend.device_handle(index)) for index in range(2)
    ] == case.domains
    assert [backend.module(backend.device_handle(index)) for index in range(2)] == case.modules


def test_numbers_of_the_runtime_are_unknown_or_name_each_gpu_once(case: Case) -> None:
    backend = case.backend
    numbers = [backend.runtime_indices(backend.device_handle(index)) for index in range(2)]
    assert numbers in ([[], []], [[0], [1]])


def test_there_is_no_gpu_beyond_the_last(case: Case) -> None:
    for index in (2, 99):
        assert outcome(case.backend.device_handle, index) is CallOutcome.INVALID


def test_inits_nest(case: Case) -> None:
    backend = case.backend
    backend.init()
    backend.shutdown()
    gpu = case.gpu
    assert backend.power_limits(gpu)
    backend.shutdown()
    assert outcome(backend.power_limits, gpu) is CallOutcome.TRANSIENT
    assert outcome(backend.shutdown) is CallOutcome.TRANSIENT
    backend.init()  # for the fixture to undo


def test_a_power_limit_is_read_as_it_was_set(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    limits = backend.power_limits(gpu)
    assert 0 < limits.min_mw < limits.default_mw <= limits.max_mw
    assert backend.read_control(gpu, Control.POWER_LIMIT) == (limits.default_mw,)
    assert backend.control_range(gpu, Control.POWER_LIMIT) == (limits.min_mw, limits.max_mw)
    wanted_mw = (limits.min_mw + limits.max_mw) // 2000 * 1000
    for limit_mw in (wanted_mw, limits.min_mw, limits.max_mw):
        backend.write_control(gpu, Control.POWER_LIMIT, (limit_mw,))
        assert backend.read_control(gpu, Control.POWER_LIMIT) == (limit_mw,)
        assert backend.enforced_power_limit_mw(gpu) == limit_mw
    other = backend.device_handle(1)
    assert backend.read_control(other, Control.POWER_LIMIT) == (limits.default_mw,)


def test_a_limit_is_never_rounded_up_and_by_less_than_the_table_says(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    limits = backend.power_limits(gpu)
    asked_mw = limits.min_mw + 12_345
    backend.write_control(gpu, Control.POWER_LIMIT, (asked_mw,))
    (holds_mw,) = backend.read_control(gpu, Control.POWER_LIMIT)
    assert asked_mw - SPECS[Control.POWER_LIMIT].rounding < holds_mw <= asked_mw


def test_a_limit_that_a_gpu_does_not_take_changes_nothing(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    low, high = backend.control_range(gpu, Control.POWER_LIMIT)
    before = backend.read_control(gpu, Control.POWER_LIMIT)
    for limit_mw in (0, low - 1000, high + 1000):
        refused = outcome(backend.write_control, gpu, Control.POWER_LIMIT, (limit_mw,))
        assert refused is CallOutcome.INVALID
    assert backend.read_control(gpu, Control.POWER_LIMIT) == before


def values_of(case: Case) -> dict[Control, tuple[ControlValue, ...]]:
    """Values that each control which the GPU offers takes, the last of them as it is at first."""
    backend, gpu = case.backend, case.gpu
    memory_mhz = backend.supported_memory_clocks(gpu)[0]
    gpu_mhz = backend.supported_gpu_clocks(gpu, memory_mhz)
    profiles = [one.profile for one in backend.power_profiles(gpu)]
    limits = backend.power_limits(gpu)
    values: dict[Control, tuple[ControlValue, ...]] = {
        Control.POWER_LIMIT: ((limits.min_mw,), (limits.max_mw,), (limits.default_mw,)),
        Control.GPU_CLOCKS: (
            (gpu_mhz[-1], gpu_mhz[0]),
            (gpu_mhz[1], gpu_mhz[1]),
            (gpu_mhz[-1], gpu_mhz[-1]),
            UNLOCKED,
        ),
        Control.MEMORY_CLOCKS: ((memory_mhz, memory_mhz), UNLOCKED),
        Control.PERSISTENCE_MODE: ((1,), (0,)),
        Control.POWER_PROFILE: (tuple(profiles[:1]), tuple(profiles[:3]), ()),
    }
    return {control: found for control, found in values.items() if backend.offers(gpu, control)}


def test_enforced_power_profiles_are_requested_and_free_of_conflicts(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    profiles = backend.power_profiles(gpu)
    assert backend.offers(gpu, Control.POWER_PROFILE) == bool(profiles)
    if not profiles:
        refused = outcome(backend.write_control, gpu, Control.POWER_PROFILE, (1,))
        assert refused is CallOutcome.UNSUPPORTED
        assert outcome(backend.enforced_power_profiles, gpu) is CallOutcome.UNSUPPORTED
        return
    everything = tuple(one.profile for one in profiles)
    backend.write_control(gpu, Control.POWER_PROFILE, everything)
    enforced = backend.enforced_power_profiles(gpu)
    assert 0 < len(enforced) < len(everything)
    priority = {one.profile: one.priority for one in profiles}
    for one in profiles:
        rivals = [other for other in one.conflicts if other in enforced]
        if one.profile in enforced:
            assert rivals == []
        else:
            assert any(priority[other] < one.priority for other in rivals)
    assert backend.enforced_power_profiles(backend.device_handle(1)) == ()


def test_every_control_that_is_offered_can_be_set_and_reset(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    there = values_of(case)
    assert {Control.POWER_LIMIT, Control.GPU_CLOCKS} <= set(there)
    for control, values in there.items():
        for value in values:
            backend.write_control(gpu, control, value)
            if SPECS[control].readable:
                assert backend.read_control(gpu, control) == value


def test_only_the_privileged_may_set(open_case: Opener) -> None:
    case = open_case(False)
    backend, gpu = case.backend, case.gpu
    for control, values in values_of(case).items():
        readable = SPECS[control].readable
        for value in values[:-1] if readable else values:
            assert outcome(backend.write_control, gpu, control, value) is CallOutcome.DENIED
        assert not readable or backend.read_control(gpu, control) == values[-1]


def test_clocks_are_listed_from_the_highest(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    memory = backend.supported_memory_clocks(gpu)
    lists = [memory, *(backend.supported_gpu_clocks(gpu, mhz) for mhz in memory)]
    for clocks in lists:
        assert clocks
        assert all(high > low > 0 for high, low in pairwise(clocks))
    assert backend.gpu_clock_mhz(gpu) > 0
    assert backend.memory_clock_mhz(gpu) > 0


def test_sensors_say_when_they_were_read_and_never_count_backwards(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    start_ns = time.monotonic_ns()
    read = [backend.sensors(gpu) for _ in range(20)]
    times = [start_ns, *(one.t_ns for one in read), time.monotonic_ns()]
    assert times == sorted(times)
    energies = [one.energy_mj for one in read]
    assert all(isinstance(energy, int) for energy in energies)
    assert energies == sorted(energies, key=lambda energy: energy or 0)
    assert all(one.power_instant_mw and one.power_instant_mw > 1000 for one in read)
    on_module = case.modules[0] is not None
    for one in read:
        assert (one.module_power_mw is not None) == on_module
        assert not on_module or (one.module_power_mw or 0) > 2 * (one.power_instant_mw or 0)


def test_the_state_is_in_the_ports_units(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    assert 10 <= backend.temperature_c(gpu) <= 120
    assert backend.throttle_reasons(gpu) >= 0
    assert 0 <= backend.utilization_percent(gpu) <= 100
    assert backend.processes(gpu) == []


def test_a_lost_gpu_is_reported_and_the_other_still_works(case: Case) -> None:
    backend, gpu, other = case.backend, case.gpu, case.backend.device_handle(1)
    case.lose()
    low, _ = backend.control_range(other, Control.POWER_LIMIT)
    calls = backend.sensors, backend.temperature_c, backend.gpu_clock_mhz, backend.power_limit_mw
    for call in calls:
        assert outcome(call, gpu) is CallOutcome.LOST
    assert outcome(backend.read_control, gpu, Control.POWER_LIMIT) is CallOutcome.LOST
    assert outcome(backend.write_control, gpu, Control.POWER_LIMIT, (low,)) is CallOutcome.LOST
    assert backend.sensors(other).power_instant_mw
    backend.write_control(other, Control.POWER_LIMIT, (low,))


def test_not_supported_once_is_forgotten(case: Case) -> None:
    backend, gpu = case.backend, case.gpu
    case.fail_once()
    assert outcome(backend.read_control, gpu, Control.POWER_LIMIT) is CallOutcome.UNSUPPORTED
    assert backend.read_control(gpu, Control.POWER_LIMIT)
    assert backend.offers(gpu, Control.POWER_LIMIT)


def test_threads_may_ask_at_the_same_time(case: Case) -> None:
    backend = case.backend
    low, high = backend.control_range(case.gpu, Control.POWER_LIMIT)
    backend.write_control(case.gpu, Control.POWER_LIMIT, (low,))

    def ask(index: int) -> set[ControlValue]:
        gpu = backend.device_handle(index % 2)
        return {backend.read_control(gpu, Control.POWER_LIMIT) for _ in range(50)}

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [{(low,)}, {(high,)}] * 2

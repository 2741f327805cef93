"""Builds and drives the C stand-in for libnvidia-ml.

The layouts below are those of nvml_double.c; it refuses a state file of another size.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from tests.stand_in import compiled, mapped

SOURCE = Path(__file__).with_name("nvml_double.c")
BY_EUID, ALWAYS, NEVER = 0, 1, 2

_I64 = ctypes.c_int64
_MAX_BURSTS = 512


_GPU_NUMBERS = (
    *("limit_mw", "limit_min_mw", "limit_max_mw", "limit_default_mw", "board_limit_mw"),
    *("lock_min", "lock_max", "memory_lock_min", "memory_lock_max", "persistence"),
    *("architecture", "memory_mib", "load_mw", "tick_us"),
    *("clock_top", "clock_step", "clock_count", "memory_clock"),
    *("has_energy", "has_average", "module_only", "memory_power_mw", "mig", "capability"),
    *("compute_pid", "graphics_pid", "instance", "memory_used_mib", "utilization"),
    *("start_ns", "updated_ns", "energy_nj", "shown_tick", "shown_nj"),
    *("round_mw", "clamp_min_mw", "clamp_max_mw", "ignored_sets", "delay_ms", "stale_after_set"),
    *("next_mw", "due_ns", "before_mw", "stale_reads"),
    *("idle_mw", "burst_count"),
    *("window_us", "average_us", "jitter_us", "quantum_mw", "counter_quantum_mj"),
    *("counter_windowed", "counter_permille", "counter_stuck_mj", "power_stuck_mw", "module_mw"),
    "ignores_scope",
    *("counter_lag_us", "counter_read_us", "counter_slow_us", "counter_slow_every"),
    *("counter_reads", "counted_nj", "power_on_read", "power_ns", "power_count"),
    *("profiles_valid", "profiles_requested", "profiles_old", "profile_shift"),
    *("compute_percent", "second_pid", "second_instance", "second_percent", "use_age_us"),
    *("mig_slices_1", "mig_slices_2", "mig_percent_1", "mig_percent_2", "counts_limited"),
    *("limited_power_ns", "limited_heat_ns", "limited_board_ns", "limited_sync_ns"),
    *("limited_reliability_ns", "limited_slowdown_ns", "limited_brake_ns"),
    *("bmc_limit_mw", "sample_us"),
)

H100: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "architecture": 9,
    "memory_mib": 81559,
    "limit_mw": 700_000,
    "limit_min_mw": 200_000,
    "limit_max_mw": 700_000,
    "limit_default_mw": 700_000,
    "clock_top": 1980,
    "clock_count": 110,
    "memory_clock": 2619,
    "load_mw": 650_000,
    "idle_mw": 75_000,
    "memory_power_mw": 36_000,
    "has_average": 1,
    "tick_us": 100_000,
    "window_us": 25_000,
    "average_us": 1_000_000,
    "power_on_read": 1,
    "counter_lag_us": 6_000,
    "counter_read_us": 3_000,
    "counter_slow_us": 11_000,
    "counter_slow_every": 4,
    "sample_us": 20_000,
    "counts_limited": 1,
}
"""A GPU whose counter and power are as measured on an H100 (docs/reference/hardware)."""


class _Gpu(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in _GPU_NUMBERS),
        ("name", ctypes.c_char * 96),
        ("uuid", ctypes.c_char * 96),
        ("pci", ctypes.c_char * 32),
        ("bursts", _I64 * 2 * _MAX_BURSTS),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("gpu", _I64),
        ("code", _I64),
        ("count", _I64),
        ("delay_ms", _I64),
        ("symbol", ctypes.c_char * 64),
    ]


class _Node(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in ("count", "privilege", "latency_us", "init_code")),
        *((name, _I64) for name in ("fault_count", "fault_epoch", "clock_ns", "read_us")),
        *((name, _I64) for name in ("session_code", "samples")),
        ("gpus", _Gpu * 16),
        ("faults", _Fault * 32),
    ]


def build() -> Path:
    """The compiled library, in a folder that every user may read."""
    name = "libnvidia-ml.so.1"
    library = compiled(SOURCE, name, "-pthread", f"-Wl,-soname,{name}")
    with contextlib.suppress(FileExistsError):
        (library.parent / "libnvidia-ml.so").symlink_to(name)  # some clients look for this name
    return library


def forget_library() -> None:
    """A process has one NVML for nvidia-ml-py, whichever was loaded last: the next one is fresh."""
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()


def mask_of(*profiles: int) -> int:
    """These workload power profiles as a GPU's state has them."""
    return sum(1 << profile for profile in profiles)


@dataclass(frozen=True)
class Call:
    """One setter call as the library saw it."""

    t_ns: int
    pid: int
    uid: int
    symbol: str
    gpu: int
    arguments: tuple[int, int]
    result: int


class NvmlDouble:
    """A node behind the stand-in for the C library.

    Args:
        directory: Where state and record go; other users must be able to enter it.
        gpus: Overrides of the defaults (those of a V100) for each GPU; `tick_ms` is also taken.
        privilege: Who may set: BY_EUID (root only), ALWAYS, NEVER.
        latency_ms: Time a setter takes.
        clock_ns: The time, which then passes only when a call takes some, or the test says so
            (`pass_time`); None: CLOCK_MONOTONIC.
        read_us: Time that every call on a GPU takes.
    """

    def __init__(
        self,
        directory: Path,
        gpus: Sequence[dict[str, Any]] = ({},),
        *,
        privilege: int = BY_EUID,
        latency_ms: float = 0.0,
        clock_ns: int | None = None,
        read_us: int = 0,
    ) -> None:
        self.library = str(build())
        self.state_path = directory / "nvml-state"
        self.record_path = directory / "nvml-record"
        self.node = mapped(self.state_path, self.record_path, _Node)
        self.node.count = len(gpus)
        self.node.privilege = privilege
        self.node.latency_us = int(latency_ms * 1000)
        self.node.clock_ns = clock_ns or 0
        self.node.read_us = read_us
        for index, changes in enumerate(gpus):
            self._describe(self.node.gpus[index], index, changes)

    def _describe(self, gpu: Any, index: int, changes: dict[str, Any]) -> None:
        now_ns = self.now_ns()
        if "tick_ms" in changes:
            changes = {"tick_us": changes["tick_ms"] * 1000} | changes
            del changes["tick_ms"]
        values: dict[str, Any] = {
            "name": b"Tesla V100-PCIE-16GB",
            "uuid": f"GPU-{index:08d}-0000-0000-0000-000000000000".encode(),
            "pci": f"00000000:{7 + index:02X}:00.0".encode(),
            "limit_mw": 250_000,
            "limit_min_mw": 100_000,
            "limit_max_mw": 250_000,
            "limit_default_mw": 250_000,
            "architecture": 5,
            "memory_mib": 16384,
            "load_mw": 220_000,
            "tick_us": 20_000,
            "clock_top": 1380,
            "clock_step": 15,
            "clock_count": 84,
            "memory_clock": 877,
            "has_energy": 1,
            "has_average": 0,
            "instance": -1,
            "second_instance": -1,
            "start_ns": now_ns,
            "updated_ns": now_ns,
            **changes,
        }
        for name, value in values.items():
            setattr(gpu, name, value.encode() if isinstance(value, str) else value)

    def now_ns(self) -> int:
        """The time on the stand-in's clock."""
        return int(self.node.clock_ns) or time.monotonic_ns()

    def pass_time(self, seconds: float) -> None:
        """Lets time pass on a clock that stands still otherwise."""
        assert self.node.clock_ns, "this stand-in follows CLOCK_MONOTONIC"
        self.node.clock_ns += round(seconds * 1e9)

    @property
    def env(self) -> dict[str, str]:
        """Environment of the process that loads the library."""
        return {
            "NVML_DOUBLE_STATE": str(self.state_path),
            "NVML_DOUBLE_RECORD": str(self.record_path),
            "ZEUSD_LOCK_DIR": f"{self.state_path}.locks",
        }

    def uuid(self, gpu: int) -> str:
        """UUID of a GPU."""
        return str(self.node.gpus[gpu].uuid.decode())

    def limit_mw(self, gpu: int) -> int:
        """The power limit that is set."""
        return int(self.node.gpus[gpu].limit_mw)

    def calls(self, symbol: str | None = None) -> list[Call]:
        """Setter calls so far, in order: all of those whose effect could be seen before."""
        calls = []
        with self.locked():  # a setter's value is there a moment before its record
            text = self.record_path.read_text()
        for line in text.splitlines():
            t_ns, pid, uid, name, gpu, first, second, result = line.split()
            if symbol is None or name == symbol:
                calls.append(
                    Call(
                        int(t_ns),
                        int(pid),
                        int(uid),
                        name,
                        int(gpu),
                        (int(first), int(second)),
                        int(result),
                    )
                )
        return calls

    def set_outside(self, gpu: int, power_limit_mw: int) -> None:
        """Someone else on the node sets a power limit (`nvidia-smi -pl`); it is not recorded."""
        self._set(gpu, "next_mw", 0)
        self._set(gpu, "limit_mw", power_limit_mw)

    def profiles(self, gpu: int) -> set[int]:
        """Workload power profiles that are requested."""
        mask = int(self.node.gpus[gpu].profiles_requested)
        return {profile for profile in range(62) if mask >> profile & 1}

    def request_outside(self, gpu: int, *profiles: int) -> None:
        """Someone else on the node requests exactly these workload power profiles."""
        self._set(gpu, "profiles_requested", mask_of(*profiles))

    def set_limits(self, gpu: int, min_mw: int, max_mw: int) -> None:
        """The driver takes other limits from now on, as after an update."""
        self._set(gpu, "limit_min_mw", min_mw)
        self._set(gpu, "limit_max_mw", max_mw)

    def misbehave(self, gpu: int, **quirks: int) -> None:
        """The driver does not do quite what it is told: `round_mw`, `clamp_min_mw` with
        `clamp_max_mw`, `ignored_sets` (-1: all), `delay_ms`, `stale_after_set` (reads)."""
        for name, value in quirks.items():
            self._set(gpu, name, value)

    def computes(self, gpu: int, pid: int) -> None:
        """This process has a compute context on the GPU; 0: none has."""
        self._set(gpu, "compute_pid", pid)

    def uses(self, gpu: int, **values: int) -> None:
        """Sets the use of processes and MIG instances from now on, by fields of the state."""
        for name, value in values.items():
            self._set(gpu, name, value)

    def draws(self, gpu: int, pid: int) -> None:
        """This process has a graphics context on the GPU; 0: none has."""
        self._set(gpu, "graphics_pid", pid)

    def set_load(self, gpu: int, load_mw: int) -> None:
        """Sets the power that the GPU draws from now on, within its limits: work begins or ends."""
        self._set(gpu, "load_mw", load_mw)

    def burst(self, gpu: int, begin_ns: int, end_ns: int) -> None:
        """A GPU with `idle_mw` draws its load from one instant to another, after all so far."""
        with self.locked():
            state = self.node.gpus[gpu]
            state.bursts[state.burst_count % _MAX_BURSTS][:] = begin_ns, end_ns
            state.burst_count += 1

    def inject(
        self, gpu: int, symbol: str, code: int = 0, *, count: int = -1, delay_ms: int = 0
    ) -> None:
        """Makes a symbol (or `*`) return a code or take time, `count` times (-1: always).

        One field of nvmlDeviceGetFieldValues is called `field.<id>.<scope>`; it takes no delay.
        Of several faults that fit a call, the first injected counts.
        """
        with self.locked():
            fault = self.node.faults[self.node.fault_count]
            fault.gpu, fault.code, fault.count, fault.delay_ms = gpu, code, count, delay_ms
            fault.symbol = symbol.encode()
            self.node.fault_count += 1

    def clear_faults(self) -> None:
        """Removes all faults; calls that an injected delay holds continue at once."""
        with self.locked():
            self.node.fault_count = 0
            self.node.fault_epoch += 1

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the library out, in this process and in all others."""
        with self.state_path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _set(self, gpu: int, name: str, value: int) -> None:
        """Changes one number of a GPU; the energy so far is counted first."""
        library = ctypes.CDLL(self.library)
        offset = getattr(_Gpu, name).offset
        code = library.nvml_double_set(os.fsencode(self.state_path), gpu, _I64(offset), _I64(value))
        assert code == 0, f"nvml_double_set: {code}"

"""Builds and drives the C stand-in for libamd_smi, and a sysfs tree to go with it.

The layouts below are those of amdsmi_double.c; it refuses a state file of another size.
"""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stand_in import compiled, mapped

SOURCE = Path(__file__).with_name("amdsmi_double.c")
BY_EUID, ALWAYS, NEVER = 0, 1, 2
GRAPHICS, MEMORY = 0, 4
MIN, MAX = 0, 1
AUTO, MANUAL = 0, 3

VERSIONS = ((24, 6), (24, 7), (25, 5), (26, 1), (26, 2), (27, 1))
"""ROCm 6.2, 6.3, 6.4, 7.0, 7.2 and 10.1."""

_I64 = ctypes.c_int64

_GPU_NUMBERS = (
    *("bdf", "partitions", "kfd_node"),
    *("cap_uw", "cap_min_uw", "cap_max_uw", "cap_default_uw", "has_cap", "cap_in_watts"),
    *("sclk_low", "sclk_high", "sclk_min", "sclk_max", "mclk_high", "mclk_min", "mclk_max"),
    *("level", "power_w", "power_form", "load_w"),
    *("energy_start_ns", "energy_counts", "energy_bits", "energy_permille", "energy_absent"),
    *("temperature_c", "temperature_scale", "activity", "violations", "no_violations"),
    *("presets", "preset"),
    *("acc_prochot", "acc_power", "acc_socket", "acc_vr", "acc_hbm", "counts_violations"),
    *("refuse", "resetting", "gone", "pid_count"),
)


class _Gpu(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in _GPU_NUMBERS),
        ("pids", _I64 * 256),
        ("name", ctypes.c_char * 64),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [("gpu", _I64), ("code", _I64), ("count", _I64), ("symbol", ctypes.c_char * 64)]


class _Node(ctypes.Structure):
    _fields_ = [
        *((name, _I64) for name in ("count", "privilege", "init_code", "init_ms", "inits")),
        *((name, _I64) for name in ("call_us", "clock_ns", "inside", "overlaps", "fault_count")),
        ("gpus", _Gpu * 16),
        ("faults", _Fault * 32),
    ]


@dataclass(frozen=True)
class Call:
    """One setter call as the library saw it; its name is without the prefix `amdsmi_`."""

    pid: int
    uid: int
    name: str
    gpu: int
    arguments: tuple[int, int, int]
    status: int


MI300X: dict[str, Any] = {}
"""What a GPU of the double is by default."""

MI250X: dict[str, Any] = {
    "name": b"AMD Instinct MI250X",
    "cap_uw": 560_000_000,
    "cap_min_uw": 100_000_000,
    "cap_max_uw": 560_000_000,
    "cap_default_uw": 560_000_000,
    "sclk_low": 500,
    "sclk_high": 1700,
    "sclk_min": 500,
    "sclk_max": 1700,
    "mclk_high": 1600,
    "mclk_min": 400,
    "mclk_max": 1600,
    "power_form": 2,
}
"""The first die of a card."""

MI250X_SECOND = MI250X | {"has_cap": 0, "power_form": 0, "energy_absent": -1}
"""The second die: power, energy and cap are the first one's."""


class AmdSmiDouble:
    """A node behind the stand-in for the C library.

    Args:
        directory: Where state, record, library and sysfs go.
        gpus: Overrides of the defaults (an MI300X) for each GPU; `unique_id` is sysfs's, and None
            leaves it out.
        version: The library's.
        privilege: Who may set: BY_EUID (root only), ALWAYS, NEVER.
        clock_ns: The time, where it only passes when the test says so; 0: CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        directory: Path,
        gpus: Sequence[dict[str, Any]] = ({},),
        *,
        version: tuple[int, int] = (26, 2),
        privilege: int = BY_EUID,
        clock_ns: int = 0,
    ) -> None:
        # A library maps its state once, so each double loads a copy of its own.
        self.library = str(directory / f"libamd_smi.so.{version[0]}")
        major, minor = version
        macros = (f"-DMAJOR={major}", f"-DMINOR={minor}", f"-Wl,-soname,libamd_smi.so.{major}")
        shutil.copy(compiled(SOURCE, f"libamd_smi.so.{major}.{minor}", *macros), self.library)
        self.state_path = directory / "amdsmi-state"
        self.record_path = directory / "amdsmi-record"
        self.node = mapped(self.state_path, self.record_path, _Node)
        self.node.count = len(gpus)
        self.node.privilege = privilege
        self.node.clock_ns = clock_ns
        self.sysfs = directory / "sys"
        (self.sysfs / "module/amdgpu").mkdir(parents=True)
        (self.sysfs / "module/amdgpu/version").write_text("6.12.12\n")
        for index, changes in enumerate(gpus):
            self._describe(index, dict(changes))

    def _describe(self, index: int, changes: dict[str, Any]) -> None:
        unique_id = changes.pop("unique_id", f"{0x5A00_0000_0000_0000 + index:x}")
        values = {
            "name": b"AMD Instinct MI300X",
            "bdf": (5 + 0x10 * index) << 8,
            "partitions": 1,
            "kfd_node": 2 + 8 * index,
            "cap_uw": 750_000_000,
            "cap_max_uw": 750_000_000,
            "cap_default_uw": 750_000_000,
            "has_cap": 1,
            "sclk_low": 132,
            "sclk_high": 2100,
            "sclk_min": 132,
            "sclk_max": 2100,
            "mclk_high": 1300,
            "mclk_min": 900,
            "mclk_max": 1300,
            "power_w": 140,
            "power_form": 1,
            "energy_start_ns": self.now_ns(),
            "energy_counts": 1 << 40,
            "energy_bits": 64,
            "energy_permille": 1000,
            "temperature_c": 45,
            "temperature_scale": 1,
            **changes,
        }
        for name, value in values.items():
            setattr(self.node.gpus[index], name, value)
        card = self.card(index)
        card.mkdir(parents=True)
        (card / "vbios_version").write_text("113-M3000100-102\n")
        if unique_id is not None:
            (card / "unique_id").write_text(f"{unique_id}\n")
        (card / "mem_info_vram_total").write_text(f"{192 << 30}\n")
        (card / "mem_info_vram_used").write_text(f"{1 << 30}\n")

    def card(self, index: int) -> Path:
        """The GPU's folder in sysfs."""
        bdf = self.node.gpus[index].bdf
        return self.sysfs / f"bus/pci/devices/{bdf >> 16:04x}:{bdf >> 8 & 255:02x}:00.0"

    def lose(self, index: int) -> None:
        """The GPU leaves the bus."""
        self.node.gpus[index].gone = 1
        shutil.rmtree(self.card(index))

    def now_ns(self) -> int:
        """The time on the stand-in's clock."""
        return int(self.node.clock_ns) or time.monotonic_ns()

    @property
    def env(self) -> dict[str, str]:
        """Environment of the process that loads the library."""
        return {
            "AMDSMI_DOUBLE_STATE": str(self.state_path),
            "AMDSMI_DOUBLE_RECORD": str(self.record_path),
            "ZEUSD_LOCK_DIR": f"{self.state_path}.locks",
        }

    def calls(self) -> list[Call]:
        """Setter calls so far, in order."""
        found = []
        for line in self.record_path.read_text().splitlines():
            pid, uid, name, gpu, *arguments, status = line.split()
            first, second, third = map(int, arguments)
            found.append(
                Call(int(pid), int(uid), name, int(gpu), (first, second, third), int(status))
            )
        return found

    def written(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Names and arguments of the setter calls that succeeded, in order."""
        return [(call.name, call.arguments) for call in self.calls() if call.status == 0]

    def inject(self, gpu: int, name: str, code: int, count: int = -1) -> None:
        """A call (without the prefix `amdsmi_`) returns a code, `count` times (-1: always)."""
        fault = self.node.faults[self.node.fault_count]
        fault.gpu, fault.code, fault.count, fault.symbol = gpu, code, count, name.encode()
        self.node.fault_count += 1

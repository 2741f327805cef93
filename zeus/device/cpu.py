"""CPU packages and their memory, whose energy zeusd reads for processes without root. Units: mJ."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zeus import _node
from zeus.compat import old_names
from zeus.exceptions import ZeusBaseError, ZeusGPUInitError, from_ipc
from zeus_ipc.errors import ZeusIpcError

if TYPE_CHECKING:
    from zeus_ipc.client import Client
    from zeus_ipc.replies import CpuInfo

_TOPOLOGY = Path("/sys/devices/system/cpu")


class ZeusBaseCPUError(ZeusBaseError):
    """An operation on a CPU failed."""


class ZeusCPUInitError(ZeusBaseCPUError):
    """No CPU's energy can be measured here."""


class ZeusCPUNoPermissionError(ZeusBaseCPUError):
    """The kernel does not allow this process to read a CPU's energy."""


class ZeusCPUNotFoundError(ZeusBaseCPUError):
    """There is no such CPU."""


@dataclass
class CpuDramMeasurement:
    """Energy of a CPU package and its memory.

    Attributes:
        cpu_mj: Energy of the package, mJ.
        dram_mj: Energy of its memory, mJ; None if it is not measured.
    """

    cpu_mj: float
    dram_mj: float | None = None

    def __sub__(self, other: CpuDramMeasurement) -> CpuDramMeasurement:
        """The difference between two readings; for the memory, if both have it."""
        dram_mj = None
        if self.dram_mj is not None and other.dram_mj is not None:
            dram_mj = self.dram_mj - other.dram_mj
        return CpuDramMeasurement(self.cpu_mj - other.cpu_mj, dram_mj)

    def __truediv__(self, divisor: float) -> CpuDramMeasurement:
        """A fraction of it."""
        dram_mj = None if self.dram_mj is None else self.dram_mj / divisor
        return CpuDramMeasurement(self.cpu_mj / divisor, dram_mj)


class CPU:
    """One CPU package.

    Attributes:
        info: Its constant properties.
    """

    def __init__(self, client: Client, info: CpuInfo) -> None:
        self.info = info
        self._client = client
        self._guard = threading.Lock()
        self._since_ns = time.monotonic_ns()
        self._energy_uj = {f"cpu:{info.index}": 0}
        if info.dram:
            self._energy_uj[f"dram:{info.index}"] = 0

    @property
    def cpu_index(self) -> int:
        """Its index."""
        return self.info.index

    def supports_get_dram_energy_consumption(self) -> bool:
        """Whether its memory's energy is measured."""
        return self.info.dram

    def get_total_energy_consumption(self) -> CpuDramMeasurement:
        """Energy since `get_cpus` was first called in this process.

        Raises:
            ZeusBaseGPUError: zeusd does not answer.
        """
        with self._guard:
            now_ns = time.monotonic_ns()
            try:
                by_source = self._client.windows(
                    list(self._energy_uj), [(self._since_ns, now_ns, False)]
                )
            except ZeusIpcError as error:
                raise from_ipc(error) from error
            self._since_ns = now_ns
            for source, one in by_source.items():
                self._energy_uj[source] += one.energy_uj[0] or 0
            total = {name.partition(":")[0]: uj / 1000 for name, uj in self._energy_uj.items()}
        return CpuDramMeasurement(total["cpu"], total.get("dram"))


class CPUs:
    """The CPU packages of this node whose energy is measured.

    Attributes:
        cpus: The packages by index.
    """

    def __init__(self, cpus: Sequence[CPU] = ()) -> None:
        self.cpus = list(cpus)

    def __len__(self) -> int:
        return len(self.cpus)

    def get_total_energy_consumption(self, index: int) -> CpuDramMeasurement:
        """Returns the energy of a package, and of its memory if known."""
        return self._at(index).get_total_energy_consumption()

    def supports_get_dram_energy_consumption(self, index: int) -> bool:
        """Whether the energy of a package's memory is known."""
        return self._at(index).supports_get_dram_energy_consumption()

    def _at(self, index: int) -> CPU:
        if not 0 <= index < len(self.cpus):
            raise ValueError(
                f"There is no CPU {index} whose energy is measured; there are {len(self)}"
            )
        return self.cpus[index]


class EmptyCPUs(CPUs):
    """A node without measurable CPUs."""


_guard = threading.Lock()
_cpus: tuple[object, CPUs] | None = None


def get_cpus() -> CPUs:
    """Returns the CPU packages whose energy zeusd measures, or without zeusd, those that this
    process can measure.

    Raises:
        ZeusCPUInitError: There are none, or zeusd does not answer.
    """
    global _cpus
    try:
        client = _node.get_client()
        infos = client.node().cpus
    except ZeusGPUInitError as error:
        raise ZeusCPUInitError(error.message) from error
    except ZeusIpcError as error:
        raise ZeusCPUInitError(from_ipc(error).message) from error
    if not infos:
        raise ZeusCPUInitError(
            "No CPU's energy can be measured here: the kernel offers no powercap counters "
            "(/sys/class/powercap/intel-rapl:*), or neither zeusd nor this process may read them"
        )
    with _guard:
        if _cpus is None or _cpus[0] is not client:
            _cpus = (client, CPUs([CPU(client, info) for info in infos]))
        return _cpus[1]


def get_current_cpu_index(pid: int | Literal["current"] = "current") -> int:
    """Returns the index of the CPU package that a process last ran on, to measure only that one.

    A process may move to another package; taskset(1) keeps it on one.

    Args:
        pid: The process; "current": this one.

    Raises:
        ZeusCPUInitError: No CPU's energy can be measured.
        ZeusCPUNotFoundError: The energy of that package cannot.
        FileNotFoundError: There is no such process.
    """
    number = os.getpid() if pid == "current" else pid
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    # Field of /proc/PID/stat after the name: the CPU that last ran the process, proc(5).
    topology = _TOPOLOGY / f"cpu{fields[36]}" / "topology"
    package = f"package-{(topology / 'physical_package_id').read_text().strip()}"
    names = [package]
    if (topology / "die_id").exists():
        names.append(f"{package}-die-{(topology / 'die_id').read_text().strip()}")
    for cpu in get_cpus().cpus:
        if cpu.info.name in names:
            return cpu.info.index
    raise ZeusCPUNotFoundError(
        f"The energy of the CPU {package}, which process {number} last ran on, is not measured here"
    )


__getattr__ = old_names(__name__)
__path__: list[str] = []  # makes Python look for zeus.device.cpu.rapl, which zeus.compat finds

"""The device port: what zeusd needs from a GPU of any vendor. Every backend implements it.

Units: milliwatts, millijoules, megahertz, degrees Celsius. A handle is opaque and stays valid until
`shutdown`. Every method may raise `DeviceError`, may block for tens of milliseconds (setters) and
may be called from any thread, even concurrently for one GPU: different threads change settings and
sample.

All backends use the same errors: each is one of the `CallOutcome`s, and carries the vendor's code
and text as detail for people to look up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

from zeus_ipc.controls import Control, ControlValue

Handle: TypeAlias = Any


def printable(text: str, longest: int) -> str:
    """The text without what could affect a terminal or imitate a line of a log, shortened."""
    safe = "".join(one if one.isprintable() else "?" for one in text[: longest + 1])
    return safe if len(safe) <= longest else safe[: longest - 1] + "…"


def driver_text(value: str | bytes) -> str:
    """A driver's text in any encoding, fit to be shown: without control characters."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    # Most characters of a driver's text; a product's name has at most 96.
    return printable(text.strip(), 256)


class CallOutcome(str, Enum):
    """The result of a call to a device, independent of the vendor."""

    UNCHANGED = "unchanged"
    """The driver accepted the value, but the device still has the old one."""
    INVALID = "invalid"
    """The device does not accept this value."""
    BUSY = "busy"
    """The device or its driver is busy; a retry may succeed."""
    LOST = "lost"
    """The device does not respond until it is reset."""
    DENIED = "denied"
    """This process lacks the permission."""
    UNSUPPORTED = "unsupported"
    """The device or its driver does not offer it; a single such result is not proof."""
    TRANSIENT = "transient"
    """Anything else; a retry may succeed."""


class DeviceError(Exception):
    """A call to a device failed.

    Attributes:
        call: The vendor's function, or the backend's operation.
        text: The vendor's message.
        code: The vendor's code; None: there is none.
    """

    def __init__(
        self, outcome: CallOutcome, call: str, text: str, code: int | None = None, command: str = ""
    ) -> None:
        super().__init__(f"{call}: {text}")
        self.outcome = outcome
        self.call = call
        self.text = text
        self.code = code
        self.command = command
        self.written = False

    @property
    def invalid(self) -> bool:
        """Whether the device does not accept the value."""
        return self.outcome is CallOutcome.INVALID and not self.written

    @property
    def refused(self) -> bool:
        """Whether a setter reported that it changed nothing."""
        return self.outcome in _REFUSALS and not self.written


_REFUSALS = frozenset({CallOutcome.INVALID, CallOutcome.UNSUPPORTED, CallOutcome.DENIED})


@contextlib.contextmanager
def after_a_write() -> Iterator[None]:
    """Marks errors raised within: the device was already changed, so they are not refusals."""
    try:
        yield
    except DeviceError as error:
        error.written = True
        raise


class PowerLimitRange(NamedTuple):
    """The valid power limits, in mW."""

    min_mw: int
    max_mw: int
    default_mw: int


class SensorValues(NamedTuple):
    """One batched reading (one nvmlDeviceGetFieldValues call). None: the GPU does not offer it."""

    t_ns: int
    """CLOCK_MONOTONIC time, midway through the call."""
    energy_mj: int | None
    """Energy counter. On a superchip it may count the whole module: see `energy.scope`."""
    power_instant_mw: int | None
    """Instant power of the GPU with its memory, never of its module."""
    power_average_mw: int | None
    """The same, averaged over the last second."""
    memory_power_average_mw: int | None
    """The memory's part of the power."""
    module_power_mw: int | None = None
    """Power of the superchip: CPU, memory and all its GPUs. Each of them reports the same."""
    took_ns: int = 0
    """How long the call took: its values are of some time within."""
    limited_ns: tuple[int | None, ...] = ()
    """Time in which the clocks were limited since the driver was loaded, for each of
    `zeus_ipc.limited.REASONS`; empty: the driver counts none, or was not asked for averages."""
    requested_limit_mw: int | None = None
    """Power limit that software requested; like the next one, read with the averages."""
    current_limit_mw: int | None = None
    """Power limit in force, also where a BMC has set it."""


class WorkloadProfile(NamedTuple):
    """A workload power profile that a GPU offers."""

    profile: int
    """Number, see `zeus_ipc.controls.PROFILES`."""
    priority: int
    """Of two profiles that conflict, the one with the lower number is enforced."""
    conflicts: tuple[int, ...]
    """Profiles that cannot be enforced at the same time."""


class GpuProcess(NamedTuple):
    """A process that has a context on a GPU. One with several contexts may have several entries."""

    pid: int
    """In zeusd's pid namespace, or in the driver's if that is another one."""
    memory_bytes: int | None
    """GPU memory that it uses; None: the driver does not report it, as in some containers."""
    compute: bool
    """Whether it is a compute process, not one that only does graphics."""
    gpu_instance: int | None = None
    """GPU instance (MIG) that it runs on; None: the whole GPU."""
    compute_instance: int | None = None
    """Compute instance within it; None: the whole GPU."""


class ProcessUse(NamedTuple):
    """One process's use of a GPU, from the driver's newest sample."""

    pid: int
    """As in `GpuProcess`."""
    t_us: int
    """When the sample ended, microseconds since the epoch; differs between processes."""
    sm_percent: int
    """Percentage of the time in which its kernels ran."""


class MigInstance(NamedTuple):
    """A MIG device: a compute instance of a GPU instance."""

    uuid: str
    """`MIG-...`"""
    gpu_instance: int
    """As in `GpuProcess`."""
    compute_instance: int
    """As in `GpuProcess`."""
    slices: int
    """Its size in compute slices."""
    of: int
    """Slices of the whole GPU."""
    sm_percent: float | None
    """Percentage of the GPU instance's SMs that were busy; None: not measured."""


class Backend(Protocol):
    """One vendor's devices on this node."""

    def init(self) -> None:
        """Loads and initialises the library. Calls nest; each needs one `shutdown`."""

    def shutdown(self) -> None:
        """Undoes one `init`."""

    def driver_version(self) -> str:
        """Version of the kernel driver, such as `595.58.03`."""

    def device_count(self) -> int:
        """Number of GPUs on the node, including those this process may not open."""

    def device_handle(self, index: int) -> Handle:
        """Handle of the GPU at an NVML index (PCI bus order)."""

    def uuid(self, gpu: Handle) -> str:
        """UUID of the GPU."""

    def name(self, gpu: Handle) -> str:
        """Product name."""

    def vbios(self, gpu: Handle) -> str:
        """Version of its firmware."""

    def pci_address(self, gpu: Handle) -> str:
        """`00000000:07:00.0`."""

    def device_file(self, gpu: Handle) -> str:
        """Its device file, such as `/dev/nvidia3`, by which resource managers know it."""

    def architecture(self, gpu: Handle) -> int:
        """NVML architecture number: 4 Pascal ... 10 Blackwell."""

    def memory_mib(self, gpu: Handle) -> int:
        """Total device memory, MiB."""

    def mig_enabled(self, gpu: Handle) -> bool:
        """Whether MIG mode is on, or the GPU is partitioned. False where neither exists."""

    def runtime_indices(self, gpu: Handle) -> list[int]:
        """The vendor runtime's numbers of the GPU's partitions, in their order, or of the GPU
        itself if it has none. Empty: the runtime counts by PCI address, or its environment
        decides."""

    def power_domain(self, gpu: Handle) -> list[int]:
        """Indices of the GPUs that share one power limit, power and energy, as the dies of a card
        do; the first one reports them for all. Empty: it shares with none."""

    def module(self, gpu: Handle) -> int | None:
        """Number of the superchip that the GPU is part of: the NUMA node of its PCI device.

        None: it reports no module power, or the kernel does not know its NUMA node.
        """

    def offers(self, gpu: Handle, control: Control) -> bool:
        """Whether the GPU has this control.

        Raises:
            DeviceError: This is not known yet; ask again later.
        """

    def read_control(self, gpu: Handle, control: Control) -> ControlValue:
        """The value of a readable control: for the power limit, the requested one."""

    def write_control(self, gpu: Handle, control: Control, value: ControlValue) -> None:
        """Sets a control; needs the privileges that the vendor requires.

        Raises:
            DeviceError: One that is `refused` promises that nothing changed; what fails after a
                setter has worked belongs under `after_a_write`.
        """

    def control_range(self, gpu: Handle, control: Control) -> tuple[int, int]:
        """Smallest and largest integer that a control accepts at the moment.

        Raises:
            DeviceError: With `UNSUPPORTED` if the device has no range.
        """

    def power_limits(self, gpu: Handle) -> PowerLimitRange:
        """Constraints and vendor default of the power limit."""

    def enforced_power_limit_mw(self, gpu: Handle) -> int:
        """The limit in force; the board may have lowered it below the requested one."""

    def power_profiles(self, gpu: Handle) -> list[WorkloadProfile]:
        """Workload power profiles that the GPU offers, by number. Without any, the result is empty
        or `UNSUPPORTED`."""

    def enforced_power_profiles(self, gpu: Handle) -> ControlValue:
        """Workload power profiles in force: conflicts may leave out some of those requested.

        Raises:
            DeviceError: Also `UNSUPPORTED`.
        """

    def supported_memory_clocks(self, gpu: Handle) -> list[int]:
        """Memory clocks, MHz, descending."""

    def supported_gpu_clocks(self, gpu: Handle, memory_clock_mhz: int) -> list[int]:
        """Graphics clocks at a memory clock, MHz, descending."""

    def gpu_clock_mhz(self, gpu: Handle) -> int:
        """Current graphics (SM) clock, MHz."""

    def memory_clock_mhz(self, gpu: Handle) -> int:
        """Current memory clock, MHz."""

    def sensors(self, gpu: Handle, counter: bool = True, averages: bool = True) -> SensorValues:
        """Energy counter and power sensors in one driver call."""

    def power_samples(self, gpu: Handle, since_ns: int) -> list[tuple[int, int]]:
        """The driver's own samples of power after `since_ns`, oldest first, as far as it keeps them
        (2.4 s on Hopper): CLOCK_MONOTONIC time of a sample's end, and mean power since the one
        before, mW.

        Raises:
            DeviceError: Also `UNSUPPORTED`: there are none, or they do not cover all time.
        """
        raise DeviceError(CallOutcome.UNSUPPORTED, "power_samples", "not offered by this vendor")

    def temperature_c(self, gpu: Handle) -> int:
        """GPU temperature, degrees Celsius."""

    def throttle_reasons(self, gpu: Handle) -> int:
        """Bits of nvmlDeviceGetCurrentClocksEventReasons."""

    def processes(self, gpu: Handle) -> list[GpuProcess]:
        """Processes with a context, by pid. Takes milliseconds: read it at most once a second.

        Source: nvmlDeviceGetComputeRunningProcesses and nvmlDeviceGetGraphicsRunningProcesses; a
        process in both lists is one entry, with the larger of its two memories.
        """

    def process_utilization(self, gpu: Handle, since_us: int) -> list[ProcessUse]:
        """The driver's newest sample of each process that used the GPU; empty if none did.

        Raises:
            DeviceError: Also `UNSUPPORTED`, as in MIG mode.
        """

    def mig_instances(self, gpu: Handle, measure: bool = False) -> list[MigInstance]:
        """The MIG devices of a GPU, by their instances; empty if it is not split."""

    def utilization_percent(self, gpu: Handle) -> int:
        """Share of the last sample period (0.17 to 1 s) in which a kernel ran.

        Raises:
            DeviceError: Also `UNSUPPORTED`, as in MIG mode.
        """

    def memory_used_mib(self, gpu: Handle) -> int:
        """Memory in use, MiB, including what the driver reserves for itself."""

"""What zeusd needs of a GPU, whatever its vendor: one protocol that every backend implements.

Units: milliwatts, millijoules, megahertz, degrees Celsius. A handle is opaque and stays valid until
`shutdown`. Every method may raise `DeviceError`, may block for tens of milliseconds (setters) and
may be called from any thread, even for one GPU at the same time: what changes settings and what
samples are different threads.

A backend adds no meaning of its own: an error is one of the `Outcome`s, and the vendor's code and
text travel with it as detail, for people to look up.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

from zeus_ipc.controls import Control, ControlValue

Handle: TypeAlias = Any


class Outcome(str, Enum):
    """What came of a call to a device, in words that no vendor owns."""

    UNCHANGED = "unchanged"
    """The driver accepted the value and the device still holds the old one."""
    CLAMPED = "clamped"
    """The device took another value than asked for: rounded, or moved into its range."""
    INVALID = "invalid"
    """The device does not take this value."""
    BUSY = "busy"
    """The device or its driver is occupied; trying again may help."""
    LOST = "lost"
    """The device does not answer any more until it is reset."""
    DENIED = "denied"
    """This process lacks the right."""
    UNSUPPORTED = "unsupported"
    """The device or its driver does not offer it; one answer alone proves nothing."""
    TRANSIENT = "transient"
    """Anything else; trying again may help."""


class DeviceError(Exception):
    """A call to a device failed.

    Attributes:
        outcome: Which kind of failure.
        call: The vendor's function, or what was asked of the backend.
        text: The vendor's words.
        code: The vendor's number for it; None: there is none.
    """

    def __init__(self, outcome: Outcome, call: str, text: str, code: int | None = None) -> None:
        super().__init__(f"{call}: {text}")
        self.outcome = outcome
        self.call = call
        self.text = text
        self.code = code


class PowerLimits(NamedTuple):
    """What a power limit may be, in mW."""

    min_mw: int
    max_mw: int
    default_mw: int


class Sensors(NamedTuple):
    """One batched reading (one nvmlDeviceGetFieldValues call). None: the GPU does not offer it."""

    t_ns: int
    """CLOCK_MONOTONIC time, midway through the call."""
    energy_mj: int | None
    """The energy counter. On a superchip it may count the whole module: see `energy.scope`."""
    power_instant_mw: int | None
    """Of the GPU with its memory, never of its module."""
    power_average_mw: int | None
    """The same, mean of the last second."""
    memory_power_average_mw: int | None
    """The memory's part of it."""
    module_power_mw: int | None = None
    """Of the superchip: CPU, memory and all its GPUs, each of which reports the same."""


class PowerProfile(NamedTuple):
    """A workload power profile that a GPU offers."""

    profile: int
    """Number, see `zeus_ipc.controls.PROFILES`."""
    priority: int
    """The lower one of two that conflict is enforced."""
    conflicts: tuple[int, ...]
    """Profiles that cannot be enforced beside it."""


class GpuProcess(NamedTuple):
    """A process that has a context on a GPU. One that has several is several."""

    pid: int
    """As zeusd's pid namespace counts, or as the driver does where that is another one."""
    memory_bytes: int | None
    """Memory of the GPU that it uses; None: the driver does not tell, as within some containers."""
    compute: bool
    """Whether it computes; one that only draws does not."""
    gpu_instance: int | None = None
    """MIG instance that it runs on; None: the whole GPU."""
    compute_instance: int | None = None
    """The part of the MIG instance; None: the whole GPU."""


class ProcessUse(NamedTuple):
    """What one process used of a GPU, in the driver's newest sample of it."""

    pid: int
    """As in `GpuProcess`."""
    t_us: int
    """When the sample ended, microseconds since the epoch: each process has its own."""
    sm_percent: int
    """Share of the time in which its kernels ran."""


class MigInstance(NamedTuple):
    """A MIG device: a compute instance of a GPU instance."""

    uuid: str
    """`MIG-...`"""
    gpu_instance: int
    """As in `GpuProcess`."""
    compute_instance: int
    """As in `GpuProcess`."""
    slices: int
    """Its size: compute slices."""
    of: int
    """Slices of the whole GPU."""
    sm_percent: float | None
    """Share of the GPU instance's SMs that were busy; None: not measured."""


class Backend(Protocol):
    """One vendor's devices on this node."""

    def init(self) -> None:
        """Loads the library and initialises it. Calls nest; each needs one `shutdown`."""

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

    def pci_address(self, gpu: Handle) -> str:
        """`00000000:07:00.0`."""

    def architecture(self, gpu: Handle) -> int:
        """NVML architecture number: 4 Pascal ... 10 Blackwell."""

    def memory_mib(self, gpu: Handle) -> int:
        """Total device memory, MiB."""

    def mig_enabled(self, gpu: Handle) -> bool:
        """Whether MIG mode is on, or the GPU is partitioned. False where neither exists."""

    def runtime_indices(self, gpu: Handle) -> list[int]:
        """Numbers by which the vendor's runtime counts the GPU's partitions, in their order; that
        of the GPU itself where it has none. Empty: the runtime counts by PCI address, or its
        environment decides."""

    def power_domain(self, gpu: Handle) -> list[int]:
        """Indices of the GPUs that have one power limit, power and energy together, as the dies of
        a card: it is the first one's, which reports it for all. Alone: empty."""

    def module(self, gpu: Handle) -> int | None:
        """Number of the superchip that the GPU is part of: the NUMA node of its PCI device.

        None: it reports no module power, or the kernel does not know its NUMA node.
        """

    def offers(self, gpu: Handle, control: Control) -> bool:
        """Whether the GPU has this control.

        Raises:
            DeviceError: That cannot be told now; ask again.
        """

    def read_control(self, gpu: Handle, control: Control) -> ControlValue:
        """What a readable control holds: for the power limit, what software requested."""

    def write_control(self, gpu: Handle, control: Control, value: ControlValue) -> None:
        """Sets a control; the privileges that the vendor asks for are needed."""

    def control_range(self, gpu: Handle, control: Control) -> tuple[int, int]:
        """Smallest and largest integer that a control takes at this moment.

        Raises:
            DeviceError: Also `UNSUPPORTED`, where the device knows none.
        """

    def power_limits(self, gpu: Handle) -> PowerLimits:
        """Constraints and vendor default of the power limit."""

    def enforced_power_limit_mw(self, gpu: Handle) -> int:
        """The limit in force, which the board may have lowered below the requested one."""

    def power_profiles(self, gpu: Handle) -> list[PowerProfile]:
        """Workload power profiles that the GPU offers, by number. Where there is no such thing:
        none, or `UNSUPPORTED`."""

    def enforced_power_profiles(self, gpu: Handle) -> ControlValue:
        """Workload power profiles in force: some of those requested may have lost.

        Raises:
            DeviceError: Also `UNSUPPORTED`.
        """

    def supported_memory_clocks(self, gpu: Handle) -> list[int]:
        """Memory clocks, MHz, descending."""

    def supported_gpu_clocks(self, gpu: Handle, memory_clock_mhz: int) -> list[int]:
        """Graphics clocks at a memory clock, MHz, descending."""

    def gpu_clock_mhz(self, gpu: Handle) -> int:
        """Present graphics (SM) clock, MHz."""

    def memory_clock_mhz(self, gpu: Handle) -> int:
        """Present memory clock, MHz."""

    def sensors(self, gpu: Handle) -> Sensors:
        """Energy counter and power sensors in one driver call."""

    def temperature_c(self, gpu: Handle) -> int:
        """GPU temperature, degrees Celsius."""

    def throttle_reasons(self, gpu: Handle) -> int:
        """Bits of nvmlDeviceGetCurrentClocksEventReasons."""

    def processes(self, gpu: Handle) -> list[GpuProcess]:
        """Processes with a context, by pid. Takes milliseconds: read it once a second at most.

        Source: nvmlDeviceGetComputeRunningProcesses and nvmlDeviceGetGraphicsRunningProcesses; a
        process that both name is one, with the larger of its two memories.
        """

    def process_utilization(self, gpu: Handle, since_us: int) -> list[ProcessUse]:
        """The driver's newest sample of each process that used the GPU; none: nobody did.

        Args:
            gpu: The GPU.
            since_us: Only samples after this time, microseconds since the epoch.

        Raises:
            DeviceError: Also `UNSUPPORTED`, as in MIG mode.
        """

    def mig_instances(self, gpu: Handle, measure: bool = False) -> list[MigInstance]:
        """The MIG devices of a GPU, by their instances; none: it is not split.

        Args:
            gpu: The GPU.
            measure: Also measure how busy they were since they were last measured.
        """

    def utilization_percent(self, gpu: Handle) -> int:
        """Share of the last sample period (0.17 to 1 s) in which a kernel ran.

        Raises:
            DeviceError: Also `UNSUPPORTED`, as in MIG mode.
        """

    def memory_used_mib(self, gpu: Handle) -> int:
        """Memory in use, MiB, what the driver reserves for itself included."""

"""What zeusd needs of NVML: one protocol with a real and a simulated implementation.

Names follow NVML; units are NVML's: milliwatts, millijoules, megahertz, degrees Celsius. A handle
is opaque and stays valid until `shutdown`. Every method may raise `DeviceError`, may block for tens
of milliseconds (setters) and may be called from any thread, even for one GPU at the same time: what
changes settings and what samples are different threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

Handle: TypeAlias = Any


class Return:
    """NVML return codes that zeusd acts on (nvml.h, nvmlReturn_t)."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    OPERATING_SYSTEM = 17
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    UNKNOWN = 999


class DeviceError(Exception):
    """An NVML call returned something other than success.

    Attributes:
        code: NVML's return code (`Return`).
        call: The NVML function that returned it.
    """

    def __init__(self, code: int, call: str, text: str = "") -> None:
        super().__init__(f"{call}: {text or RETURN_TEXTS.get(code, 'unknown error')} (NVML {code})")
        self.code = code
        self.call = call


RETURN_TEXTS: dict[int, str] = {
    1: "NVML is not initialised",
    2: "an argument is invalid",
    3: "not supported by this GPU or driver",
    4: "insufficient permissions",
    6: "not found",
    7: "a buffer is too small",
    9: "the NVIDIA driver is not loaded",
    10: "the driver timed out",
    12: "libnvidia-ml.so.1 was not found",
    13: "this driver's libnvidia-ml lacks the function",
    15: "the GPU has fallen off the bus",
    16: "the GPU requires a reset",
    17: "the control device was blocked by the operating system",
    18: "the driver and libnvidia-ml versions differ",
    19: "the GPU is in use",
    20: "out of memory",
    25: "the structure version is not known to this driver",
    26: "the function is deprecated",
    999: "an internal driver error occurred",
}


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
    power_instant_mw: int | None
    power_average_mw: int | None
    memory_power_average_mw: int | None


class Backend(Protocol):
    """The part of NVML that zeusd uses."""

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
        """Whether MIG mode is on. False where MIG does not exist."""

    def power_limits(self, gpu: Handle) -> PowerLimits:
        """Constraints and vendor default of the power limit."""

    def power_limit_mw(self, gpu: Handle) -> int:
        """The limit software requested (nvmlDeviceGetPowerManagementLimit)."""

    def enforced_power_limit_mw(self, gpu: Handle) -> int:
        """The limit in force (nvmlDeviceGetEnforcedPowerLimit)."""

    def set_power_limit(self, gpu: Handle, power_limit_mw: int) -> None:
        """Requests a power limit. Needs CAP_SYS_ADMIN."""

    def supported_memory_clocks(self, gpu: Handle) -> list[int]:
        """Memory clocks, MHz, descending."""

    def supported_gpu_clocks(self, gpu: Handle, memory_clock_mhz: int) -> list[int]:
        """Graphics clocks at a memory clock, MHz, descending."""

    def set_gpu_clocks(self, gpu: Handle, min_mhz: int, max_mhz: int) -> None:
        """Locks the graphics clock to a range. Needs CAP_SYS_ADMIN."""

    def reset_gpu_clocks(self, gpu: Handle) -> None:
        """Unlocks the graphics clock. Needs CAP_SYS_ADMIN."""

    def set_memory_clocks(self, gpu: Handle, min_mhz: int, max_mhz: int) -> None:
        """Locks the memory clock to a range. Needs CAP_SYS_ADMIN."""

    def reset_memory_clocks(self, gpu: Handle) -> None:
        """Unlocks the memory clock. Needs CAP_SYS_ADMIN."""

    def gpu_clock_mhz(self, gpu: Handle) -> int:
        """Present graphics (SM) clock, MHz."""

    def memory_clock_mhz(self, gpu: Handle) -> int:
        """Present memory clock, MHz."""

    def persistence_mode(self, gpu: Handle) -> bool:
        """Whether persistence mode is on."""

    def set_persistence_mode(self, gpu: Handle, enabled: bool) -> None:
        """Turns persistence mode on or off. Needs root."""

    def sensors(self, gpu: Handle) -> Sensors:
        """Energy counter and power sensors in one driver call."""

    def temperature_c(self, gpu: Handle) -> int:
        """GPU temperature, degrees Celsius."""

    def throttle_reasons(self, gpu: Handle) -> int:
        """Bits of nvmlDeviceGetCurrentClocksEventReasons."""

    def compute_pids(self, gpu: Handle) -> list[int]:
        """Processes with a compute context (nvmlDeviceGetComputeRunningProcesses)."""

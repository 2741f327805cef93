"""Names of devices by their vendor, and by the way they are measured."""

from __future__ import annotations

from zeus.device.cpu import (
    CPU,
    CPUs,
    ZeusCPUInitError,
    ZeusCPUNoPermissionError,
    ZeusCPUNotFoundError,
    get_cpus,
    get_current_cpu_index,
)
from zeus.device.gpu import GPU, GPUs, get_gpus
from zeus.exceptions import ZeusGPUInitError

NVIDIAGPU = GPU
ZeusdNVIDIAGPU = GPU
NVIDIAGPUs = GPUs

RAPLCPU = CPU
ZeusdRAPLCPU = CPU
RAPLCPUs = CPUs
ZeusRAPLNotSupportedError = ZeusCPUNotFoundError
ZeusRAPLFileInitError = ZeusCPUInitError
ZeusRAPLPermissionError = ZeusCPUNoPermissionError
get_current_rapl_zone_id = get_current_cpu_index


def nvml_is_available() -> bool:
    """Whether this process can reach NVIDIA GPUs, through zeusd or NVML."""
    try:
        return len(get_gpus()) > 0
    except ZeusGPUInitError:
        return False


def amdsmi_is_available() -> bool:
    """Whether this process can reach AMD GPUs: never."""
    return False


def rapl_is_available() -> bool:
    """Whether the energy of a CPU can be measured, through zeusd or by this process."""
    try:
        return len(get_cpus()) > 0
    except ZeusCPUInitError:
        return False


def emi_is_available() -> bool:
    """Whether the energy of a CPU can be measured on Windows: never."""
    return False

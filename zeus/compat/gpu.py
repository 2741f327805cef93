"""Names of GPU collections by vendor."""

from __future__ import annotations

from zeus.device.gpu import GPU, GPUs, get_gpus
from zeus.exceptions import ZeusGPUInitError

NVIDIAGPU = GPU
ZeusdNVIDIAGPU = GPU
NVIDIAGPUs = GPUs


def nvml_is_available() -> bool:
    """Whether this process can reach NVIDIA GPUs, through zeusd or NVML."""
    try:
        return len(get_gpus()) > 0
    except ZeusGPUInitError:
        return False


def amdsmi_is_available() -> bool:
    """Whether this process can reach AMD GPUs: never."""
    return False

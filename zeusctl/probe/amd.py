"""AMD GPUs, through zeusd's own binding of libamd_smi; it calls getters only."""

from __future__ import annotations

import time

from zeusctl.probe.backend import BackendDriver
from zeusctl.probe.driver import Clock, NoDriverError
from zeusd.devices.amd.backend import AmdBackend
from zeusd.devices.port import DeviceError
from zeusd.devices.vendors import AMD, NVIDIA, SYSFS, has_gpu

LIBRARY = "libamd_smi"


def is_amd(library: str | None, sysfs: str = SYSFS) -> bool:
    """Whether to probe AMD's GPUs: the library is AMD's, or the bus has AMD GPUs and none of
    NVIDIA's.
    """
    if library is not None:
        return LIBRARY in library
    return has_gpu(sysfs, AMD) and not has_gpu(sysfs, NVIDIA)


class AmdDriver(BackendDriver):
    """Implements `zeusctl.probe.driver.Driver`.

    Args:
        library: The libamd_smi to load; None: the one that is found.
        sysfs: Where sysfs is.

    Raises:
        NoDriverError: It cannot be initialised.
    """

    simulated: str | None = None
    binding = "zeusd's"

    def __init__(self, library: str | None = None, sysfs: str = SYSFS) -> None:
        self.clock = Clock(time.monotonic_ns, time.sleep)
        self.backend = AmdBackend(library, sysfs)
        try:
            self.backend.init()
        except DeviceError as error:
            raise NoDriverError(
                f"libamd_smi cannot be initialised: {error.text}; load the amdgpu driver, and "
                "check that `amd-smi list` works as this user"
            ) from None

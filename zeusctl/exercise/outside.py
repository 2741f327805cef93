"""Asks the driver itself for values outside a control's range.

Zeusd refuses such values before it asks the driver, so this process asks, as root, while it holds
the leases. If a driver accepts such a value, it is overwritten through zeusd at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from zeus_ipc.controls import SPECS, Control
from zeusctl.probe.backend import called
from zeusctl.probe.driver import CallError, NoDriverError
from zeusctl.probe.nvml import NvmlDriver

CALLS = {
    Control.POWER_LIMIT: "nvmlDeviceSetPowerManagementLimit",
    Control.GPU_CLOCKS: "nvmlDeviceSetGpuLockedClocks",
    Control.MEMORY_CLOCKS: "nvmlDeviceSetMemoryLockedClocks",
    Control.PERSISTENCE_MODE: "nvmlDeviceSetPersistenceMode",
}


class Setters(NvmlDriver):
    """The driver's own setters, without anything in between.

    Raises:
        NoDriverError: NVML cannot be initialised.
    """

    def ask(self, uuid: str, control: Control, value: Sequence[int]) -> CallError | None:
        """Sets a value; None: the driver accepted it."""
        call = self.backend.call
        try:
            handle = called(call, "nvmlDeviceGetHandleByUUID", uuid)
            called(call, CALLS[control], handle, *value)
        except CallError as error:
            return error
        return None


def setters(simulated: bool, library: str | None) -> Setters:
    """The setters of this machine's driver.

    Raises:
        NoDriverError: There are none for this process; the message says why.
    """
    if simulated:
        raise NoDriverError("the GPUs are simulated")
    if os.geteuid() != 0:
        raise NoDriverError("that needs root; run `sudo zeusctl exercise`")
    return Setters(library)


def values(control: Control, valid: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Returns values beyond both ends of a control's range, and reversed pairs."""
    if SPECS[control].merges:
        return  # a set has no ends, and its setters overwrite nothing
    low, high = min(one[0] for one in valid), max(one[-1] for one in valid)
    if control is Control.PERSISTENCE_MODE:
        yield [high + 1]
    elif control is Control.POWER_LIMIT:
        yield from ([low - 1000], [high + 1000], [0])
    else:
        yield from ([1, 1], [2 * high, 2 * high])
        if low < high:
            yield [high, low]

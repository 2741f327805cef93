"""The power cap: in whole watts, and never 0."""

from __future__ import annotations

from zeusd.devices.amd import layouts
from zeusd.devices.amd.codes import Status, amd_error
from zeusd.devices.amd.library import Library
from zeusd.devices.port import CallOutcome, DeviceError, PowerLimitRange, after_a_write

_SENSOR = 0
"""PPT0, the default cap."""


class Cap:
    """The result of amdsmi_get_power_cap_info, in mW."""

    def __init__(self, library: Library, gpu: int) -> None:
        reply = library.read("get_power_cap_info", gpu, _SENSOR)
        fields = (layouts.CAP, layouts.CAP_MIN, layouts.CAP_MAX, layouts.CAP_DEFAULT)
        cap, low, high, default = (reply.number("<Q", offset) for offset in fields)
        # More than any socket accepts: 10 kW. Guests report all ones.
        if not 0 < high <= 10_000_000_000:
            # The library reports success even if only some of its reads worked.
            raise amd_error(
                Status.NOT_SUPPORTED,
                "amdsmi_get_power_cap_info",
                "this GPU has no power cap of its own (the first die of an MI250 has both dies')",
            )
        # A maximum cap below this many microwatts is in watts, as on virtualisation hosts.
        self.scale = 1 if high < 100_000 else 1_000_000
        watts = [value // self.scale for value in (cap, low, high, default)]
        self.mw, self.min_mw, self.max_mw, self.default_mw = (watt * 1000 for watt in watts)

    @property
    def limits(self) -> PowerLimitRange:
        """The range that zeusd permits: never 0, which the driver treats as no change."""
        # Minimum cap as a share of the maximum, if the driver has none. MI300's driver says 0.
        floor_mw = self.max_mw * 20 // 100_000 * 1000
        low_mw = self.min_mw if self.min_mw > 0 else floor_mw
        default_mw = self.default_mw if 0 < self.default_mw <= self.max_mw else self.max_mw
        return PowerLimitRange(low_mw, self.max_mw, default_mw)


def write_cap(library: Library, gpu: int, power_limit_mw: int) -> None:
    """Sets the cap, rounded down to whole watts.

    Raises:
        DeviceError: The library refuses it, or fails.
    """
    call = "amdsmi_set_power_cap"
    before = Cap(library, gpu)
    low_mw, high_mw, _ = before.limits
    wanted_mw = power_limit_mw // 1000 * 1000
    if not low_mw <= wanted_mw <= high_mw:
        raise amd_error(
            Status.INVALID,
            call,
            f"{power_limit_mw / 1000:g} W is not between {low_mw // 1000} and {high_mw // 1000} W",
        )
    code = library.status("set_power_cap", gpu, _SENSOR, wanted_mw // 1000 * before.scale)
    if code == Status.SUCCESS:
        return  # the caller reads it back, which may take several tries
    if code == Status.NOT_SUPPORTED:
        # A GPU without a cap returns the same code, but this cap was just read; so does one that is
        # in reset or suspended, and a driver that has written it all the same.
        _judge_refusal(library, gpu, wanted_mw, call)
        return
    raise amd_error(code, call)


def _judge_refusal(library: Library, gpu: int, wanted_mw: int, call: str) -> None:
    code = Status.NOT_SUPPORTED
    try:
        with after_a_write():
            holds_mw = Cap(library, gpu).mw
    except DeviceError as error:
        if error.outcome is not CallOutcome.UNSUPPORTED:
            raise
        raise amd_error(code, call, "the GPU is in reset or suspended", CallOutcome.BUSY) from None
    if holds_mw != wanted_mw:
        raise amd_error(code, call, "the driver refused the value", CallOutcome.TRANSIENT)

"""Locks graphics and memory clocks through AMD's driver.

AMD has no lock at one frequency: a graphics range needs a minimum below its maximum. Memory has a
maximum only. One domain cannot be reset alone: performance level `auto` unlocks both, so the limits
of the other domain are written again. The ranges in force are read from the driver each time, so
this also works after a restart and in the helper.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeusd.devices.amd import layouts
from zeusd.devices.amd.codes import Status, amd_error
from zeusd.devices.amd.library import Library
from zeusd.devices.amd.profiles import preset_to_keep, set_preset
from zeusd.devices.port import CallOutcome, DeviceError, after_a_write

GRAPHICS, MEMORY = 0, 4
"""amdsmi_clk_type_t."""

_MIN, _MAX = 0, 1
_AUTO, _MANUAL = 0, 3
_MHZ = 1_000_000

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ClockState:
    """Clock ranges of a GPU, MHz.

    Attributes:
        limits: Lowest and highest clock that each domain accepts.
        now: The range in force of each.
    """

    limits: dict[int, Span]
    now: dict[int, Span]

    def restricted(self, domain: int) -> bool:
        """Whether less than the whole range is permitted."""
        low, high = self.now[domain]
        return low > self.limits[domain][0] or 0 < high < self.limits[domain][1]


def read_clocks(library: Library, gpu: int) -> ClockState:
    """The ranges in force.

    Raises:
        DeviceError: With `UNSUPPORTED` if the GPU does not accept ranges.
    """
    reply = library.read("get_gpu_od_volt_info", gpu)

    def span(offset: int) -> Span:
        low, high = reply.numbers("<QQ", offset)
        return low // _MHZ, high // _MHZ

    limits = {GRAPHICS: span(layouts.SCLK_LIMITS), MEMORY: span(layouts.MCLK_LIMITS)}
    if not 0 < limits[GRAPHICS][1] <= 100_000:
        raise amd_error(
            Status.NOT_SUPPORTED,
            "amdsmi_get_gpu_od_volt_info",
            "the GPU does not report a clock range",
        )
    return ClockState(limits, {GRAPHICS: span(layouts.SCLK), MEMORY: span(layouts.MCLK)})


def lock_graphics(library: Library, gpu: int, low: int, high: int) -> None:
    """Locks graphics clocks to `low` to `high` MHz, moved into the GPU's range.

    A single frequency becomes [f - 1, f].
    """
    state = read_clocks(library, gpu)
    least, most = state.limits[GRAPHICS]
    high = min(max(high, least + 1), most)
    low = min(max(low, least), high - 1)
    # The driver commits each half separately, and the minimum must always be below the maximum.
    if high > state.now[GRAPHICS][0]:
        order = ((_MAX, high), (_MIN, low))
    else:
        order = ((_MIN, low), (_MAX, high))
    _write(library, gpu, GRAPHICS, order)
    _verify(library, gpu, GRAPHICS, high)


def lock_memory(library: Library, gpu: int, high: int) -> None:
    """Locks memory clocks to at most `high` MHz, moved into the GPU's range. There is no
    minimum."""
    state = read_clocks(library, gpu)
    least, most = state.limits[MEMORY]
    if most == 0:
        raise amd_error(
            Status.NOT_SUPPORTED, "amdsmi_set_gpu_clk_limit", "the GPU has only one memory clock"
        )
    high = min(max(high, least), most)
    _write(library, gpu, MEMORY, ((_MAX, high),))
    _verify(library, gpu, MEMORY, high)


def unlock(library: Library, gpu: int, domain: int) -> None:
    """Unlocks one domain; the limits of the other stay in force."""
    other = MEMORY if domain == GRAPHICS else GRAPHICS
    state = read_clocks(library, gpu)
    preset = preset_to_keep(library, gpu)
    library.call("set_gpu_perf_level", gpu, _AUTO)
    with after_a_write():
        try:
            low, high = state.now[other]
            if state.restricted(other) and other == MEMORY:
                lock_memory(library, gpu, high)
            elif state.restricted(other):
                lock_graphics(library, gpu, low, high)
        finally:  # whichever fails, the other one is of another lease
            if preset:
                set_preset(library, gpu, preset)


def relax(library: Library, gpu: int) -> None:
    """Sets level `auto`, which drops a power profile and its level, unless clocks are locked."""
    try:
        state = read_clocks(library, gpu)
    except DeviceError as error:
        if error.outcome is not CallOutcome.UNSUPPORTED:
            raise
    else:
        if state.restricted(GRAPHICS) or state.restricted(MEMORY):
            return
    library.call("set_gpu_perf_level", gpu, _AUTO)


def _write(library: Library, gpu: int, domain: int, order: tuple[Span, ...]) -> None:
    level = library.read("get_gpu_perf_level", gpu).number("<I")
    _write_half(library, gpu, domain, order[0], level)
    with after_a_write():
        for half in order[1:]:
            _write_half(library, gpu, domain, half, level)


def _write_half(library: Library, gpu: int, domain: int, half: Span, level: int) -> None:
    which, mhz = half
    code = library.status("set_gpu_clk_limit", gpu, domain, which, mhz)
    if code == Status.SUCCESS:
        return
    if level != _MANUAL:
        # A refused write leaves the performance level at manual, with the clocks pinned.
        library.status("set_gpu_perf_level", gpu, level)
    if code == Status.NOT_SUPPORTED:
        raise _refused(library, gpu, f"{mhz} MHz")
    raise amd_error(code, "amdsmi_set_gpu_clk_limit")


def _refused(library: Library, gpu: int, what: str) -> DeviceError:
    """The error of a refused write. A GPU in reset returns the same code, but cannot be read
    either."""
    call = "amdsmi_set_gpu_clk_limit"
    try:
        read_clocks(library, gpu)
    except DeviceError:
        return amd_error(
            Status.NOT_SUPPORTED, call, "the GPU is in reset or suspended", CallOutcome.BUSY
        )
    return amd_error(
        Status.NOT_SUPPORTED, call, f"the driver refused {what}", CallOutcome.TRANSIENT
    )


def _verify(library: Library, gpu: int, domain: int, most_mhz: int) -> None:
    """Checks that the driver, which may round to a level it has, permits no more than requested."""
    with after_a_write():
        high = read_clocks(library, gpu).now[domain][1]
    if high > most_mhz:
        raise DeviceError(
            CallOutcome.UNCHANGED,
            "amdsmi_set_gpu_clk_limit",
            f"the driver accepted {most_mhz} MHz but still permits {high} MHz",
        )

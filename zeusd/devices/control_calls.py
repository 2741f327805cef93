"""Table of a backend's device calls, one row per control."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zeus_ipc.controls import Control, ControlValue
from zeus_ipc.overriding import override
from zeusd.devices.port import Backend, CallOutcome, DeviceError, Handle


@dataclass(frozen=True, slots=True)
class ControlCalls:
    """The device calls of one control.

    Attributes:
        offered: Whether a GPU has it; raises `DeviceError` while that is not known.
        write: Sets it.
        read: Reads it; None: the vendor's library cannot read it.
        range: Smallest and largest integer that it accepts now; None: there is no range.
    """

    offered: Callable[[Handle], bool]
    write: Callable[[Handle, ControlValue], None]
    read: Callable[[Handle], ControlValue] | None = None
    range: Callable[[Handle], tuple[int, int]] | None = None


class TabledControls(Backend):
    """The generic part of `port.Backend`, based on a table that a backend fills."""

    controls: Mapping[Control, ControlCalls]

    @override
    def offers(self, gpu: Handle, control: Control) -> bool:
        calls = self.controls.get(control)
        return calls is not None and calls.offered(gpu)

    @override
    def read_control(self, gpu: Handle, control: Control) -> ControlValue:
        calls = self.controls.get(control)
        if calls is None or calls.read is None:
            raise _unsupported("reading", control)
        value = calls.read(gpu)
        # No GPU has a higher power limit: a driver that reports one has not read it.
        if control is Control.POWER_LIMIT and not 0 < value[0] <= 10_000_000:
            # It would become the restore target.
            raise DeviceError(
                CallOutcome.TRANSIENT,
                f"reading {control.value}",
                f"the driver reported success and {value[0] / 1000:g} W",
            )
        return value

    @override
    def write_control(self, gpu: Handle, control: Control, value: ControlValue) -> None:
        calls = self.controls.get(control)
        if calls is None:
            raise _unsupported("setting", control)
        calls.write(gpu, value)

    @override
    def control_range(self, gpu: Handle, control: Control) -> tuple[int, int]:
        calls = self.controls.get(control)
        if calls is None or calls.range is None:
            raise _unsupported("the range of", control)
        return calls.range(gpu)


def _unsupported(what: str, control: Control) -> DeviceError:
    return DeviceError(
        CallOutcome.UNSUPPORTED, f"{what} {control.value}", "not offered by this vendor's library"
    )

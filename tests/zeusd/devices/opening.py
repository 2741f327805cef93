"""Opens devices in this process, and asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_nvml.double import NvmlDouble
from zeusd.core.model import GpuFacts
from zeusd.devices.nvml.backend import NvmlBackend
from zeusd.devices.port import DeviceError
from zeusd.devices.simulated import SimulatedBackend, VirtualClock
from zeusd.runtime.devices import Inspector

Opener = Callable[..., tuple[NvmlBackend, NvmlDouble]]


def failure(call: Callable[..., Any], *arguments: Any) -> DeviceError:
    with pytest.raises(DeviceError) as caught:
        call(*arguments)
    return caught.value


def code_of(call: Callable[..., Any], *arguments: Any) -> int:
    return failure(call, *arguments).code


def news(inspector: Inspector) -> GpuFacts:
    """What another look finds out about a GPU."""
    facts, _ = inspector.look()
    return facts


def simulated(spec: str) -> tuple[SimulatedBackend, VirtualClock]:
    """A simulated node, and the clock by which its time passes."""
    clock = VirtualClock()
    backend = SimulatedBackend(spec, clock_ns=clock, sleep=clock.sleep)
    backend.init()
    return backend, clock

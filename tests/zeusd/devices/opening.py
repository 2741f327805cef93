"""Opens NVML in this process, and queries it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_nvml.double import NvmlDouble
from zeusd.devices.nvml.backend import NvmlBackend
from zeusd.devices.port import DeviceError

Opener = Callable[..., tuple[NvmlBackend, NvmlDouble]]


def code_of(call: Callable[..., Any], *args: Any) -> int:
    with pytest.raises(DeviceError) as caught:
        call(*args)
    return caught.value.code

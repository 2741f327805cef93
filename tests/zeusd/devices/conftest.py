"""Fixtures of tests of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_amdsmi.double import ALWAYS, AmdSmiDouble
from tests.fake_nvml import fixtures
from zeusd.devices.amd.backend import AmdBackend
from zeusd.devices.port import Handle

open_nvml = fixtures.open_nvml


@pytest.fixture
def open_amd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[AmdBackend, AmdSmiDouble, Handle]]]:
    """Opens a double in this process, and its first GPU."""
    opened: list[AmdBackend] = []

    def open_double(
        *gpus: dict[str, Any], **options: Any
    ) -> tuple[AmdBackend, AmdSmiDouble, Handle]:
        options.setdefault("privilege", ALWAYS)
        double = AmdSmiDouble(tmp_path, gpus or ({},), **options)
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        amd = AmdBackend(double.library, str(double.sysfs))
        amd.init()
        opened.append(amd)
        return amd, double, amd.device_handle(0)

    yield open_double
    for amd in opened:
        amd.shutdown()

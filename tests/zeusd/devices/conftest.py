"""Fixtures of tests of devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.fake_nvml.double import ALWAYS, NvmlDouble
from tests.zeusd.devices.opening import Opener
from zeusd.devices.nvml.backend import NvmlBackend


@pytest.fixture
def open_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens a double in this process. The library maps its state once, so it is loaded afresh."""
    opened: list[NvmlBackend] = []

    def open_double(*gpus: dict[str, Any], **options: Any) -> tuple[NvmlBackend, NvmlDouble]:
        options.setdefault("privilege", ALWAYS)
        double = NvmlDouble(tmp_path, gpus or ({},), **options)
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        copy = tmp_path / "libnvidia-ml.so.1"
        copy.write_bytes(Path(double.library).read_bytes())
        nvml = NvmlBackend(str(copy))
        nvml.init()
        opened.append(nvml)
        return nvml, double

    yield open_double
    for nvml in opened:
        nvml.shutdown()
    pynvml.nvmlLib = None
    pynvml._nvmlGetFunctionPointer_cache.clear()

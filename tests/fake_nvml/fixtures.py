"""Doubles: in this process, or for tests whose other processes and users must reach the files.

A test module offers the fixture as its own: `nvml_double = fixtures.nvml_double`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nvml.double import ALWAYS, BY_EUID, NvmlDouble, forget_library
from tests.support import public_directory
from tests.zeusd.devices.opening import Opener
from zeusd.devices.nvml.backend import NvmlBackend

MakeDouble = Callable[..., NvmlDouble]


@pytest.fixture
def nvml_double() -> Iterator[MakeDouble]:
    """Makes doubles, each in its own directory, which every user may enter."""
    with contextlib.ExitStack() as stack:

        def make(
            gpus: Sequence[dict[str, Any]] = ({},),
            *,
            privilege: int = BY_EUID,
            latency_ms: float = 0.0,
        ) -> NvmlDouble:
            directory = stack.enter_context(public_directory())
            return NvmlDouble(directory, gpus, privilege=privilege, latency_ms=latency_ms)

        yield make


@pytest.fixture
def open_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens a double in this process. The library maps its state once, so it is loaded afresh."""
    opened: list[NvmlBackend] = []

    def open_double(
        *gpus: dict[str, Any], sysfs: str = "/sys", **options: Any
    ) -> tuple[NvmlBackend, NvmlDouble]:
        options.setdefault("privilege", ALWAYS)
        double = NvmlDouble(tmp_path, gpus or ({},), **options)
        for name, value in double.env.items():
            monkeypatch.setenv(name, value)
        copy = tmp_path / "libnvidia-ml.so.1"
        copy.write_bytes(Path(double.library).read_bytes())
        nvml = NvmlBackend(str(copy), sysfs)
        nvml.init()
        opened.append(nvml)
        return nvml, double

    yield open_double
    for nvml in opened:
        nvml.shutdown()
    forget_library()

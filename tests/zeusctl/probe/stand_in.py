"""A probe of the C stand-in in this process, on a clock that passes as calls and pauses take time.

Thirty seconds of readings take one second, and how busy the machine is changes nothing.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.fake_nvml.double import NvmlDouble, forget_library
from zeusctl.probe.driver import Clock
from zeusctl.probe.nvml import NvmlDriver
from zeusctl.probe.run import ProbeTiming, probe
from zeusd.energy.probed.report import ProbeReport

START_NS = 5_000_000_000_000
LOAD_MW, IDLE_MW = 220_000, 60_000


class StandInLoad:
    """The stand-in's own load, in bursts."""

    name = "the stand-in's load"

    def __init__(self, double: NvmlDouble, gpu: int) -> None:
        self._double = double
        self._gpu = gpu
        self._bursts: list[tuple[int, int]] = []

    def burst(self, seconds: float) -> None:
        begin_ns = self._double.now_ns()
        self._bursts.append((begin_ns, begin_ns + round(seconds * 1e9)))
        self._double.burst(self._gpu, *self._bursts[-1])

    def bursts(self) -> list[tuple[int, int]]:
        return self._bursts

    def close(self) -> None:
        pass


class NotedLoad:
    """A load that only records the calls."""

    name = "noted"

    def __init__(self) -> None:
        self.asked: list[float | str] = []

    def burst(self, seconds: float) -> None:
        self.asked.append(seconds)

    def bursts(self) -> list[tuple[int, int]]:
        self.asked.append("waited")
        return []

    def close(self) -> None:
        self.asked.append("closed")


@contextlib.contextmanager
def stand_in(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *gpus: dict[str, Any],
    read_us: int = 40,
) -> Iterator[tuple[NvmlDriver, NvmlDouble]]:
    """The stand-in with its own clock and driver; idle until a load begins."""
    idle = {"load_mw": LOAD_MW, "idle_mw": IDLE_MW, "start_ns": START_NS}
    described = [idle | one for one in gpus]
    double = NvmlDouble(folder, described, clock_ns=START_NS + 10**10, read_us=read_us)
    for name, value in double.env.items():
        monkeypatch.setenv(name, value)
    library = folder / "libnvidia-ml-copy.so.1"  # a library has one state for each process
    shutil.copy(double.library, library)
    before = pynvml.nvmlLib
    try:
        driver = NvmlDriver(str(library), Clock(double.now_ns, double.pass_time))
        yield driver, double
        driver.close()
    finally:
        forget_library()  # its cache is filled again
        pynvml.nvmlLib = before


def probed(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *gpus: dict[str, Any],
    plan: ProbeTiming,
    load: bool = False,
    read_us: int = 40,
) -> ProbeReport:
    """The report of a stand-in."""
    with stand_in(folder, monkeypatch, *gpus, read_us=read_us) as (driver, double):
        return probe(
            driver,
            plan,
            load_on=(lambda index: StandInLoad(double, index)) if load else None,
            stand_in=True,
        )

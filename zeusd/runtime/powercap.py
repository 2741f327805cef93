"""Energy of CPU packages and their memory: RAPL, through the kernel's powercap tree.

Since 2020 only root may read it (CVE-2020-8694). The counters, in microjoules, wrap around, on some
CPUs every few minutes; they are read often enough to detect each wrap.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeus_ipc.replies import CpuInfo
from zeusd.devices.port import DeviceError
from zeusd.energy.accountant import never_limited
from zeusd.energy.curve import EnergyCurve
from zeusd.energy.history import History, Slow
from zeusd.energy.meter import Edge

log = logging.getLogger(__name__)

POWERCAP = "/sys/class/powercap"
PERIOD_NS = 50_000_000
RETRY_NS = 5_000_000_000
CEILING_MW = 2_000_000


@dataclass(frozen=True, slots=True)
class Zone:
    """One counter of the tree."""

    path: Path
    range_uj: int


@dataclass(frozen=True, slots=True)
class Package:
    """One CPU package."""

    info: CpuInfo
    zone: Zone
    dram: Zone | None


def find_packages(root: str = POWERCAP) -> list[Package]:
    """The CPU packages whose energy this process may read, sorted by name."""
    packages: list[tuple[str, Zone, Zone | None]] = []
    for path in sorted(Path(root).glob("intel-rapl:*")):
        if path.name.count(":") != 1:
            continue
        name, zone = text_of(path / "name"), _zone(path)
        if zone is None or not name.startswith("package"):
            continue
        subs = sorted(path.glob(f"{path.name}:*"))
        drams = [_zone(sub) for sub in subs if text_of(sub / "name") == "dram"]
        packages.append((name, zone, next((dram for dram in drams if dram), None)))
    packages.sort(key=lambda one: [int(part) for part in one[0].split("-") if part.isdecimal()])
    return [
        Package(CpuInfo(index=index, name=name, dram=dram is not None), zone, dram)
        for index, (name, zone, dram) in enumerate(packages)
    ]


def text_of(path: Path) -> str:
    """A file of sysfs; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _zone(path: Path) -> Zone | None:
    try:
        int((path / "energy_uj").read_text())
        return Zone(path, int((path / "max_energy_range_uj").read_text()))
    except (OSError, ValueError):
        return None


class PolledSource:
    """A device that is read at a fixed period."""

    aligns = False
    limited_ns = staticmethod(never_limited)
    slow = Slow()

    def __init__(
        self, history: History, period_ns: int, ceiling_mw: int, clock_ns: Callable[[], int]
    ) -> None:
        self.history = history
        self.failure: DeviceError | OSError | None = None
        self.period_ns = period_ns
        self.next_read_ns = clock_ns()
        self._ceiling_mw = ceiling_mw
        self._clock_ns = clock_ns
        self._last: Edge | None
        self._raw_uj: int | None
        self._last, self._raw_uj = history.last() or (None, None)

    @property
    def next_tick_ns(self) -> int:
        """When to read it next if its next change is awaited."""
        return self.next_read_ns

    @property
    def latest_read_ns(self) -> int:
        """Latest time for that reading."""
        return self.next_read_ns + self.period_ns // 4

    @property
    def curve(self) -> EnergyCurve:
        """Its energy over time."""
        return EnergyCurve(self.history, None, self._ceiling_mw)


class ZoneSource(PolledSource):
    """Samples one counter.

    Args:
        zone: The counter.
        history, clock_ns: See `PolledSource`.
    """

    def __init__(
        self, zone: Zone, history: History, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        super().__init__(history, PERIOD_NS, CEILING_MW, clock_ns)
        self._zone = zone
        self._path = str(zone.path / "energy_uj")

    def read(self, streamed: bool, awaited: bool = True) -> Edge | None:
        """Reads it now. Returns the tick that the reading revealed, if any."""
        before_ns = self._clock_ns()
        try:
            with open(self._path, "rb") as file:
                raw_uj = int(file.read(32))
        except (OSError, ValueError) as error:
            self.failure = OSError(str(error))
            self.next_read_ns = before_ns + RETRY_NS
            return None
        t_ns = (before_ns + self._clock_ns()) // 2
        self.next_read_ns = before_ns + PERIOD_NS
        self.failure = None
        earlier_uj, self._raw_uj = self._raw_uj, raw_uj
        last = self._last
        if last is not None and t_ns <= last.t_ns:
            return None
        grown_uj = 0
        if earlier_uj is not None:
            grown_uj = raw_uj - earlier_uj
            if grown_uj < 0:
                grown_uj += self._zone.range_uj
        span_ns = t_ns - last.t_ns if last is not None else PERIOD_NS
        if grown_uj < 0 or grown_uj > CEILING_MW * (span_ns + PERIOD_NS) // 1_000_000:
            grown_uj = 0  # it was reset, for instance by a suspend
        power_mw = grown_uj * 1_000_000 // max(1, span_ns)
        energy_uj = grown_uj + (last.energy_uj if last is not None else 0)
        self._last = edge = Edge(t_ns, energy_uj, power_mw, power_mw, energy_uj)
        self.history.add(edge, raw_uj, Slow())
        return edge

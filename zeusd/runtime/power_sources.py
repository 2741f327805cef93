"""Devices that report power but no energy: superchips, and their CPUs.

The power is integrated at a fixed period. On Grace the kernel's driver `acpi_power_meter` reports
the power of each socket through hwmon, to all users; there is no RAPL. The power of a superchip is
in the readings of its GPUs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from zeus_ipc.replies import CpuInfo
from zeusd.energy.history import History, Slow
from zeusd.energy.meter import Edge
from zeusd.runtime.powercap import RETRY_NS, PolledSource, text_of
from zeusd.runtime.sources import GpuSource

HWMON = "/sys/class/hwmon"
PERIOD_NS = 100_000_000
CEILING_MW = 20_000_000

LABELS = (
    re.compile(r"Grace Power Socket (\d+)"),
    re.compile(r"Total Power in uW socket (\d+)", re.IGNORECASE),
    re.compile(r"CPU Power Socket (\d+)"),
)
"""Labels of a CPU's meter, widest scope first. The first two cover the whole socket. The last
covers the cores' rail, which is part of the socket's power and not added to it."""


@dataclass(frozen=True, slots=True)
class PowerMeter:
    """A CPU's power meter in hwmon."""

    info: CpuInfo
    path: Path
    period_ns: int

    def read_mw(self) -> int:
        """Its power, mW.

        Raises:
            OSError, ValueError: It cannot be read.
        """
        return int(self.path.read_text()) // 1000


def find_power_meters(root: str = HWMON) -> list[PowerMeter]:
    """The power meter of each CPU socket, in the order of the sockets."""
    meters: dict[int, tuple[int, str, Path]] = {}
    for directory in sorted(Path(root).glob("hwmon*")):
        for place in (directory, directory / "device"):
            label = text_of(place / "power1_oem_info")
            for rank, pattern in enumerate(LABELS):
                match = pattern.fullmatch(label)
                path = _power_file(place)
                if match is None or path is None:
                    continue
                socket = int(match.group(1))
                known = meters.get(socket)
                if known is None or rank < known[0]:
                    meters[socket] = rank, label, path
    return [
        PowerMeter(CpuInfo(index=index, name=label, dram=False), path, _period_ns(path))
        for index, (_, (_, label, path)) in enumerate(sorted(meters.items()))
    ]


def _power_file(place: Path) -> Path | None:
    for name in ("power1_average", "power1_input"):
        if text_of(place / name).isdecimal():
            return place / name
    return None


def _period_ns(path: Path) -> int:
    """The meter's averaging interval, within bounds."""
    text = text_of(path.with_name("power1_average_interval"))
    interval_ns = int(text) * 1_000_000 if text.isdecimal() else 0
    return min(max(interval_ns, PERIOD_NS), 1_000_000_000)


def module_power_mw(gpus: Sequence[GpuSource], clock_ns: Callable[[], int]) -> int:
    """A superchip's power: the mean of its GPUs' readings, which they sample separately.

    Raises:
        OSError: None of them has a recent reading.
    """
    # Largest age of a GPU's reading of its module's power.
    since_ns = clock_ns() - 2_000_000_000
    readings = [gpu.module_reading for gpu in gpus]
    powers = [reading[1] for reading in readings if reading is not None and reading[0] >= since_ns]
    if not powers:
        raise OSError("no GPU of this superchip has reported its power in the last 2 s")
    return sum(powers) // len(powers)


class PowerSource(PolledSource):
    """Integrates power.

    Args:
        read_mw: Reads it, mW; raises OSError or ValueError where that fails.
        history, period_ns, clock_ns: See `PolledSource`.
    """

    def __init__(
        self,
        read_mw: Callable[[], int],
        history: History,
        period_ns: int = PERIOD_NS,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        super().__init__(history, period_ns, CEILING_MW, clock_ns)
        self._read_mw = read_mw

    def read(self, streamed: bool, awaited: bool = True) -> Edge | None:
        """Reads it now. Returns the tick that the reading revealed, if any.

        Power is interpolated linearly between readings.
        """
        t_ns = self._clock_ns()
        try:
            power_mw = self._read_mw()
            if not 0 <= power_mw <= CEILING_MW:
                raise ValueError(f"{power_mw} mW is no power")
        except (OSError, ValueError) as error:
            self.failure = OSError(str(error))
            never = self._last is None
            self.next_read_ns = t_ns + (self.period_ns if never else RETRY_NS)
            return None
        self.failure = None
        self.next_read_ns = t_ns + self.period_ns
        last = self._last
        if last is not None and t_ns <= last.t_ns:
            return None
        energy_uj, level_mw = 0, power_mw
        if last is not None:
            level_mw = (last.power_mw + power_mw) // 2
            energy_uj = last.energy_uj + level_mw * (t_ns - last.t_ns) // 1_000_000
        self._last = edge = Edge(t_ns, energy_uj, level_mw, power_mw, energy_uj)
        self.history.add(edge, None, Slow())
        return edge

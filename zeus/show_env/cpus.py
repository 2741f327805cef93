"""The CPU section of `zeus.show_env`."""

from __future__ import annotations

from pathlib import Path

from zeus.show_env.daemon import Zeusd
from zeus.show_env.packages import Row

POWERCAP = "/sys/class/powercap"


def measured(zeusd: Zeusd) -> list[Row]:
    """The CPUs that zeusd measures."""
    if zeusd.info is None:
        return [("through zeusd", "none, as none answers")]
    if not zeusd.info.cpus:
        return [("through zeusd", "none: it reads no counter of powercap on this node")]
    return [
        (f"CPU {cpu.index}", f"{cpu.name}{' and its memory' if cpu.dram else ''}, through zeusd")
        for cpu in zeusd.info.cpus
    ]


def zones(zeusd: Zeusd) -> list[Row]:
    """The RAPL counters, and whether this process may read them."""
    root = Path(POWERCAP)
    found = {
        path.name: path
        for pattern in ("intel-rapl:*/intel-rapl:*:*", "intel-rapl:*")
        for path in root.glob(pattern)
    }
    if not found:
        hint = "virtual machines have none, and elsewhere: modprobe intel_rapl_msr"
        return [("RAPL", f"none under {root}; {hint}")]
    helped = zeusd.info is not None and bool(zeusd.info.cpus)
    return [(str(path), _zone(path, helped)) for _, path in sorted(found.items())]


def _zone(path: Path, helped: bool) -> str:
    try:
        name = (path / "name").read_text().strip()
    except OSError:
        name = "without a name"
    try:
        int((path / "energy_uj").read_text())
    except PermissionError:
        hint = "zeusd reads it for you" if helped else "run zeusd to read it for you"
        return f"{name}: not readable, only root may; {hint}"
    except (OSError, ValueError) as error:
        return f"{name}: not readable: {error}; it cannot be measured"
    return f"{name}: readable"

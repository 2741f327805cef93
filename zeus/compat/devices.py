"""Which devices can be reached, by ml-energy/zeus's names; and systems on a chip, of which there
are none here."""

from __future__ import annotations

from typing import NoReturn

from zeus.compat.table import PAGE
from zeus.exceptions import ZeusBaseError

_REASON = f"No supported system-on-chip is on this node; see {PAGE}"


class ZeusBaseSoCError(ZeusBaseError):
    """An operation on a system-on-chip failed."""


class ZeusSoCInitError(ZeusBaseSoCError):
    """There is no system-on-chip to measure."""


class SoC:
    """A system-on-chip."""


class EmptySoC(SoC):
    """A node without a system-on-chip."""

    def get_available_metrics(self) -> set[str]:
        """None."""
        return set()

    def get_total_energy_consumption(self) -> NoReturn:
        """Raises ValueError: there is none."""
        raise ValueError(_REASON)


def get_soc() -> NoReturn:
    """Raises ZeusSoCInitError: there is none."""
    raise ZeusSoCInitError(_REASON)


def nvml_is_available() -> bool:
    """Whether this process can reach NVIDIA GPUs, through zeusd or NVML."""
    return _has_gpus(amd=False)


def amdsmi_is_available() -> bool:
    """Whether this process can reach AMD GPUs, through zeusd or AMD SMI."""
    return _has_gpus(amd=True)


def _has_gpus(amd: bool) -> bool:
    from zeus.device.gpu import ZeusGPUInitError, get_gpus
    from zeus.device.visible import is_amd

    try:
        gpus = get_gpus()
    except ZeusGPUInitError:
        return False
    return any(is_amd(gpus[index].uuid) == amd for index in range(len(gpus)))


def rapl_is_available() -> bool:
    """Whether the energy of a CPU can be measured, through zeusd or by this process."""
    from zeus.device.cpu import ZeusCPUInitError, get_cpus

    try:
        return len(get_cpus()) > 0
    except ZeusCPUInitError:
        return False


def emi_is_available() -> bool:
    """Whether this process can read Windows' energy meters: never."""
    return False

"""Systems on a chip: there is none here."""

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
        """Raises that there is none.

        Raises:
            ValueError: Always.
        """
        raise ValueError(_REASON)


def get_soc() -> NoReturn:
    """Raises that there is none.

    Raises:
        ZeusSoCInitError: Always.
    """
    raise ZeusSoCInitError(_REASON)

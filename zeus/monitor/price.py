"""Cost of windows, from the price of electricity hour by hour."""

from __future__ import annotations

import calendar
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from types import NoneType
from typing import Any, Literal

from zeus.exceptions import ZeusBaseError
from zeus.monitor.rates import JsonService, Later, Rate, RatedMonitor, ServiceError
from zeus.utils.framework import Framework
from zeus_ipc.overriding import override

KEY_ENV = "OPENEI_API_KEY"
URL = "https://api.openei.org"

_PRICES = {
    "energy_rate_structure": "energyratestructure",
    "energy_weekday_schedule": "energyweekdayschedule",
    "energy_weekend_schedule": "energyweekendschedule",
}


class ZeusElectricityPriceHTTPError(ZeusBaseError):
    """The service cannot be reached, or refuses."""


class ZeusElectricityPriceNotFoundError(ZeusBaseError):
    """The service does not have the rate."""


class ElectricityPriceProvider(ABC):
    """The price of electricity. Subclass it for your own source."""

    @abstractmethod
    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        """The rate in force.

        Returns:
            `energy_rate_structure`: for each period its tiers, each a dictionary with `rate` and
            perhaps `adj`, per kWh; `energy_weekday_schedule` and `energy_weekend_schedule`: the
            period of each hour of each month, in local time.
        """


class OpenEIClient(ElectricityPriceProvider):
    """Prices of utilities in the United States from OpenEI (https://openei.org/).

    Args:
        location: Latitude and longitude.
        label: The rate's identifier at OpenEI.
        radius: Search radius around the location.
        api_key: Your key; None: `$OPENEI_API_KEY`.
        timeout_s: Time to wait for it.
    """

    def __init__(
        self,
        location: tuple[float, float],
        label: str,
        sector: Literal["Residential", "Commercial", "Industrial", "Lighting"] = "Residential",
        radius: int = 0,
        *,
        api_key: str | None = None,
        url: str = URL,
        timeout_s: float = 5.0,
    ) -> None:
        self.lat, self.long = location
        self.label = label
        self.sector = sector
        self.radius = radius
        self._key = os.environ.get(KEY_ENV) if api_key is None else api_key
        self._service = JsonService("OpenEI", url, timeout_s)

    @override
    def get_current_electricity_prices(self) -> dict[str, list[Any]]:
        """Raises:
        ZeusElectricityPriceHTTPError: There is no key, or the service cannot be reached, or
            refuses.
        ZeusElectricityPriceNotFoundError: It does not know the rate.
        """
        hint = f"give your own key as api_key, or in ${KEY_ENV}"
        if not self._key:
            raise ZeusElectricityPriceHTTPError(f"OpenEI wants a key; {hint}")
        parameters: dict[str, str | float] = {
            "version": "latest",
            "format": "json",
            "api_key": self._key,
            "lat": self.lat,
            "lon": self.long,
            "radius": self.radius,
            "detail": "full",
            "sector": self.sector,
        }
        try:
            answer = self._service.get("utility_rates", parameters, {}, hint)
        except ServiceError as error:
            raise ZeusElectricityPriceHTTPError(error.message) from error
        for one in _objects(answer):
            if one.get("label") == self.label and all(key in one for key in _PRICES.values()):
                return {name: one[key] for name, key in _PRICES.items()}
        raise ZeusElectricityPriceNotFoundError(
            f"OpenEI has no rate {self.label!r} at ({self.lat}, {self.long}) for "
            f"{self.sector.lower()} use; look its label up at https://apps.openei.org/USURDB/"
        )


def _objects(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part:
        if isinstance(inner, (dict, list)):
            yield from _objects(inner)


class Price(Rate):
    """The prices of a provider, as last fetched."""

    def __init__(self, provider: ElectricityPriceProvider) -> None:
        self._provider = provider
        self._prices: dict[str, list[Any]] | None = None

    def fetch(self) -> None:
        """Fetches the rate in force from the provider."""
        self._prices = self._provider.get_current_electricity_prices()

    def at(self, hour: datetime) -> float | None:
        """The price of the first tier in this hour of the machine's time zone."""
        if self._prices is None:
            return None
        local = hour.astimezone()
        kind = "weekend" if local.weekday() >= calendar.SATURDAY else "weekday"
        try:
            period = self._prices[f"energy_{kind}_schedule"][local.month - 1][local.hour]
            tier = self._prices["energy_rate_structure"][period][0]
            return float(tier["rate"]) + float(tier.get("adj") or 0.0)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            return None


@dataclass
class EnergyCostMeasurement(Later):
    """The measurement of a window; all but its time is looked up on first access.

    Attributes:
        time: Seconds.
        gpu_energy: Joules by GPU index.
        gpu_energy_cost: Cost by GPU index, in the currency of the provider's prices (OpenEI: US
            dollars); `nan` if the price is unknown.
        cpu_energy: Joules by CPU index; None where it is not measured.
        cpu_energy_cost: Cost by CPU index; None where its energy is not measured.
        dram_energy: Joules of the memory by CPU index; None where it is not measured.
        dram_energy_cost: Cost of the memory by CPU index; None where it is not measured.
    """

    time: float
    gpu_energy: dict[int, float]
    gpu_energy_cost: dict[int, float]
    cpu_energy: dict[int, float] | None = field(default_factory=NoneType)
    cpu_energy_cost: dict[int, float] | None = field(default_factory=NoneType)
    dram_energy: dict[int, float] | None = field(default_factory=NoneType)
    dram_energy_cost: dict[int, float] | None = field(default_factory=NoneType)


class EnergyCostMonitor(RatedMonitor[EnergyCostMeasurement]):
    """Measures the energy and the cost of named windows.

    Each hour's energy is multiplied by that hour's price. If the provider does not answer, one
    warning says so, costs are `nan`, and energy is measured as usual.

    Args:
        electricity_price_provider: The source of the price.

    Attributes:
        zeus_monitor: The monitor that measures the energy.
    """

    def __init__(
        self,
        electricity_price_provider: ElectricityPriceProvider,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        super().__init__(
            Price(electricity_price_provider),
            "The price of electricity",
            EnergyCostMeasurement,
            gpu_indices,
            cpu_indices,
            sync_execution_with,
        )
        self.electricity_price_provider = electricity_price_provider

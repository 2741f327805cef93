"""Emissions of windows, from the carbon intensity of the grid hour by hour."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from types import NoneType
from typing import Any, Literal

from zeus.exceptions import ZeusBaseError
from zeus.monitor.rates import JsonService, Later, Rate, RatedMonitor, ServiceError
from zeus.utils.framework import Framework

TOKEN_ENV = "ELECTRICITYMAPS_TOKEN"
URL = "https://api.electricitymaps.com/v3"


class ZeusCarbonIntensityHTTPError(ZeusBaseError):
    """The service cannot be reached, or refuses the request."""


class ZeusCarbonIntensityNotFoundError(ZeusBaseError):
    """The service has no carbon intensity for this location."""


class CarbonIntensityProvider(ABC):
    """The carbon intensity of the grid at one location. Subclass it for your own source."""

    @abstractmethod
    def get_current_carbon_intensity(self) -> float:
        """The present intensity, gCO2eq/kWh."""

    @abstractmethod
    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        """Intensities, gCO2eq/kWh, of the last hours by start time."""

    @property
    @abstractmethod
    def update_period(self) -> timedelta:
        """How long each value holds."""

    @property
    @abstractmethod
    def history_length(self) -> int:
        """The number of values."""


class ElectrictyMapsClient(CarbonIntensityProvider):
    """Carbon intensity from Electricity Maps (https://www.electricitymaps.com/).

    Args:
        location: Latitude and longitude.
        estimate: Use the service's estimates where nothing was measured.
        emission_factor_type: `direct`: generation only; `lifecycle`: also the plants.
        token: Your key; None: `$ELECTRICITYMAPS_TOKEN`.
        timeout_s: Time to wait for it.
    """

    def __init__(
        self,
        location: tuple[float, float],
        estimate: bool = False,
        emission_factor_type: Literal["direct", "lifecycle"] = "direct",
        *,
        token: str | None = None,
        url: str = URL,
        timeout_s: float = 5.0,
    ) -> None:
        self.lat, self.long = location
        self.estimate = estimate
        self.emission_factor_type = emission_factor_type
        self._token = os.environ.get(TOKEN_ENV) if token is None else token
        self._service = JsonService("Electricity Maps", url, timeout_s)

    def get_current_carbon_intensity(self) -> float:
        """The present intensity, gCO2eq/kWh.

        Raises:
            ZeusCarbonIntensityHTTPError: The service cannot be reached, or refuses.
            ZeusCarbonIntensityNotFoundError: It does not know.
        """
        answer = self._ask("latest")
        try:
            return float(answer["carbonIntensity"])
        except (KeyError, TypeError, ValueError):
            raise self._unknown() from None

    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        """Intensities, gCO2eq/kWh, of the last 24 hours by start time.

        Raises:
            ZeusCarbonIntensityHTTPError: The service cannot be reached, or refuses.
            ZeusCarbonIntensityNotFoundError: It does not know.
        """
        answer = self._ask("history")
        try:
            return {
                datetime.fromisoformat(one["datetime"].replace("Z", "+00:00")): float(
                    one["carbonIntensity"]
                )
                for one in answer["history"]
                if one["carbonIntensity"] is not None
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._unknown() from None

    @property
    def update_period(self) -> timedelta:
        """One hour."""
        return timedelta(hours=1)

    @property
    def history_length(self) -> int:
        """24."""
        return 24

    def _ask(self, what: str) -> Any:
        try:
            return self._service.get(
                f"carbon-intensity/{what}",
                {
                    "lat": self.lat,
                    "lon": self.long,
                    "disableEstimations": str(not self.estimate).lower(),
                    "emissionFactorType": self.emission_factor_type,
                },
                {"auth-token": self._token} if self._token else {},
                hint=f"give your key as token, or in ${TOKEN_ENV}",
            )
        except ServiceError as error:
            raise ZeusCarbonIntensityHTTPError(error.message) from error

    def _unknown(self) -> ZeusCarbonIntensityNotFoundError:
        more = "" if self.estimate else "; estimate=True takes what it estimates"
        return ZeusCarbonIntensityNotFoundError(
            f"Electricity Maps has no carbon intensity of ({self.lat}, {self.long}){more}"
        )


ElectricityMapsClient = ElectrictyMapsClient


class Intensity(Rate):
    """The intensities of a provider that were fetched so far."""

    def __init__(self, provider: CarbonIntensityProvider) -> None:
        self._provider = provider
        self._known: dict[datetime, float] = {}

    def fetch(self) -> None:
        """Fetches the last hours from the provider."""
        recent = self._provider.get_recent_carbon_intensity()
        self._known.update({_hour(begin): value for begin, value in recent.items()})
        this_hour = _hour(datetime.now(timezone.utc))
        if this_hour not in self._known:
            self._known[this_hour] = self._provider.get_current_carbon_intensity()

    def at(self, hour: datetime) -> float | None:
        """Returns the hour's intensity, or that of the last known hour before it."""
        before = [begin for begin in list(self._known) if begin <= hour]
        return self._known[max(before)] if before else None


def _hour(instant: datetime) -> datetime:
    return instant.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)


@dataclass
class CarbonEmissionMeasurement(Later):
    """The measurement of a window; all but its time is looked up on first access.

    Attributes:
        time: Seconds.
        gpu_energy: Joules by GPU index.
        gpu_carbon_emission: gCO2eq by GPU index; `nan` if the intensity is unknown.
        cpu_energy: Joules by CPU index; None where it is not measured.
        cpu_carbon_emission: gCO2eq by CPU index; None where its energy is not measured.
        dram_energy: Joules of the memory by CPU index; None where it is not measured.
        dram_carbon_emission: gCO2eq of the memory by CPU index; None where it is not measured.
    """

    time: float
    gpu_energy: dict[int, float]
    gpu_carbon_emission: dict[int, float]
    cpu_energy: dict[int, float] | None = field(default_factory=NoneType)
    cpu_carbon_emission: dict[int, float] | None = field(default_factory=NoneType)
    dram_energy: dict[int, float] | None = field(default_factory=NoneType)
    dram_carbon_emission: dict[int, float] | None = field(default_factory=NoneType)


class CarbonEmissionMonitor(RatedMonitor[CarbonEmissionMeasurement]):
    """Measures the energy and the emissions of named windows.

    Each hour's energy is multiplied by that hour's intensity. If the provider does not answer, one
    warning says so, emissions are `nan`, and energy is measured as usual.

    Args:
        carbon_intensity_provider: The source of the intensity.

    Attributes:
        zeus_monitor: The monitor that measures the energy.
    """

    def __init__(
        self,
        carbon_intensity_provider: CarbonIntensityProvider,
        gpu_indices: list[int] | None = None,
        cpu_indices: list[int] | None = None,
        sync_execution_with: Framework = "torch",
    ) -> None:
        super().__init__(
            Intensity(carbon_intensity_provider),
            "The carbon intensity",
            CarbonEmissionMeasurement,
            gpu_indices,
            cpu_indices,
            sync_execution_with,
        )
        self.carbon_intensity_provider = carbon_intensity_provider

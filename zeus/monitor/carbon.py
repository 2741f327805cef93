"""Emissions of windows, from the carbon intensity of the grid hour by hour."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from zeus.exceptions import ZeusBaseError
from zeus.monitor.rates import Rate, RatedMonitor
from zeus.monitor.service import Service, ServiceError
from zeus.utils.framework import Framework

TOKEN_ENV = "ELECTRICITYMAPS_TOKEN"
URL = "https://api.electricitymaps.com/v3"


class ZeusCarbonIntensityHTTPError(ZeusBaseError):
    """The service cannot be reached, or refuses."""


class ZeusCarbonIntensityNotFoundError(ZeusBaseError):
    """The service does not know the carbon intensity of this place."""


class CarbonIntensityProvider(ABC):
    """Knows the carbon intensity of the grid at one place. Subclass it for a source of your own."""

    @abstractmethod
    def get_current_carbon_intensity(self) -> float:
        """The present intensity, gCO2eq/kWh."""

    @abstractmethod
    def get_recent_carbon_intensity(self) -> dict[datetime, float]:
        """Intensities, gCO2eq/kWh, of the last hours by the times at which they begin."""

    @property
    @abstractmethod
    def update_period(self) -> timedelta:
        """How long each of these holds."""

    @property
    @abstractmethod
    def history_length(self) -> int:
        """How many of these there are."""


class ElectrictyMapsClient(CarbonIntensityProvider):
    """Carbon intensity from Electricity Maps (https://www.electricitymaps.com/).

    Args:
        location: Latitude and longitude, degrees.
        estimate: Take what the service estimates where nothing was measured.
        emission_factor_type: `direct`: of generation alone; `lifecycle`: of plants, too.
        token: Your key; None: `$ELECTRICITYMAPS_TOKEN`.
        url: The service.
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
        self._service = Service("Electricity Maps", url, timeout_s)

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
        """Intensities, gCO2eq/kWh, of the last 24 hours by the times at which they begin.

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
        """An hour."""
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
    """The intensities of a provider, as far back as they were fetched."""

    def __init__(self, provider: CarbonIntensityProvider) -> None:
        self._provider = provider
        self._known: dict[datetime, float] = {}

    def fetch(self) -> None:
        """Ask the provider for the last hours."""
        recent = self._provider.get_recent_carbon_intensity()
        self._known.update({_hour(begin): value for begin, value in recent.items()})
        this_hour = _hour(datetime.now(timezone.utc))
        if this_hour not in self._known:
            self._known[this_hour] = self._provider.get_current_carbon_intensity()

    def at(self, hour: datetime) -> float | None:
        """The hour's intensity, or that of the last hour before that is known."""
        before = [begin for begin in self._known if begin <= hour]
        return self._known[max(before)] if before else None


def _hour(instant: datetime) -> datetime:
    return instant.astimezone(timezone.utc).replace(minute=0, second=0, microsecond=0)


@dataclass
class CarbonEmissionMeasurement:
    """What a window took.

    Attributes:
        time: Seconds.
        gpu_energy: Joules by GPU index.
        gpu_carbon_emission: gCO2eq by GPU index; `nan` where the intensity is not known.
        cpu_energy: Joules by CPU index; None where it is not measured.
        cpu_carbon_emission: gCO2eq by CPU index; None where its energy is not measured.
        dram_energy: Joules of the memory by CPU index; None where it is not measured.
        dram_carbon_emission: gCO2eq of the memory by CPU index; None where it is not measured.
    """

    time: float
    gpu_energy: dict[int, float]
    gpu_carbon_emission: dict[int, float]
    cpu_energy: dict[int, float] | None = None
    cpu_carbon_emission: dict[int, float] | None = None
    dram_energy: dict[int, float] | None = None
    dram_carbon_emission: dict[int, float] | None = None


class CarbonEmissionMonitor(RatedMonitor[CarbonEmissionMeasurement]):
    """Measures the energy and the emissions of named windows.

    Each hour's energy counts with that hour's intensity. Where the provider does not answer, one
    warning says so, emissions are `nan`, and energy is measured as usual.

    Args:
        carbon_intensity_provider: Knows the intensity.
        gpu_indices: See `ZeusMonitor`.
        cpu_indices: See `ZeusMonitor`.
        sync_execution_with: See `ZeusMonitor`.

    Attributes:
        zeus_monitor: What measures the energy.
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

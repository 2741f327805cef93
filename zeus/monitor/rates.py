"""Windows whose energy is multiplied by a rate per kWh that changes with the hour.

Each hour's rates are fetched once, on a thread: a service that does not answer delays nobody.
Third-party web services are asked with the user's own key.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar

from zeus.exceptions import ZeusBaseError
from zeus.monitor.energy import ZeusMonitor
from zeus.monitor.measurement import Measurement
from zeus.utils.configured import Configured
from zeus.utils.framework import Framework
from zeus.utils.warn import warn
from zeus_common.epoch import offset_ns
from zeus_common.units import HOUR_S, KWH_J, SECOND_NS


class ServiceError(ZeusBaseError):
    """A service cannot be reached, or refuses the request."""


class JsonService:
    """A service that answers with JSON."""

    def __init__(self, name: str, url: str, timeout_s: float) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        with contextlib.suppress(ImportError):
            import httpx  # noqa: F401 - now, as it would delay training

    def get(
        self,
        path: str,
        parameters: Mapping[str, str | float],
        headers: Mapping[str, str],
        hint: str,
    ) -> Any:
        """Returns its answer.

        Raises:
            ServiceError: It cannot be reached, refuses, or does not answer with JSON. The message
                contains no key.
            ImportError: httpx is not installed.
        """
        try:
            import httpx
        except ImportError:
            raise ImportError(
                f"{self._name} is asked with httpx, which is not installed: "
                "pip install 'zeusd[carbon]'"
            ) from None
        try:
            answer = httpx.get(
                f"{self._url}/{path}".rstrip("/"),
                params=dict(parameters),
                headers=dict(headers),
                timeout=self._timeout_s,
                follow_redirects=True,
            )
        except (httpx.HTTPError, httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            raise ServiceError(
                f"{self._name} cannot be reached at {self._url} ({type(error).__name__})"
            ) from None
        if answer.is_error:
            raise ServiceError(f"{self._name} refuses ({answer.status_code}); {hint}")
        try:
            return answer.json()
        except ValueError:
            raise ServiceError(f"{self._name} at {self._url} does not answer with JSON") from None


L = TypeVar("L", bound="Later")

HOUR_NS = HOUR_S * SECOND_NS

FIRST_WAIT_S = 1.0
"""How long after the first request an amount waits for its rate."""


class Rate(ABC):
    """A rate per kWh, hour by hour."""

    @abstractmethod
    def fetch(self) -> None:
        """Fetches the newest rates.

        Raises:
            Exception: They are not available.
        """

    @abstractmethod
    def at(self, hour: datetime) -> float | None:
        """Returns the rate per kWh in the hour that begins then; None if unknown."""


class FetchedRate:
    """A rate that a thread fetches: at once, and in each hour."""

    def __init__(self, rate: Rate, what: str) -> None:
        self._rate = rate
        self._what = what
        self._fetched = threading.Event()
        self._wait_until_s = time.monotonic() + FIRST_WAIT_S
        self._failure = ""
        self._warned = False
        forgotten = threading.Event()
        weakref.finalize(self, forgotten.set)
        threading.Thread(
            target=_fetch_hourly,
            args=(weakref.ref(self), forgotten),
            name="zeus-rates",
            daemon=True,
        ).start()

    def at(self, hour: datetime) -> float:
        """Returns the rate per kWh in the hour that begins then; `nan`, with one warning, if it is
        unknown. Waits for the first answer until `FIRST_WAIT_S` after the request.
        """
        self._fetched.wait(max(0.0, self._wait_until_s - time.monotonic()))
        rate = self._rate.at(hour)
        if rate is not None:
            return rate
        if not self._warned:
            self._warned = True
            why = self._failure or (
                "the service has no value for this hour"
                if self._fetched.is_set()
                else "the service has not answered yet"
            )
            warn(f"{self._what} is not known, and energy is counted alone: {why}")
        return math.nan

    def fetch(self) -> float:
        """Fetches the rates. Returns after how many seconds to fetch them again."""
        try:
            self._rate.fetch()
            self._failure = ""
        except Exception as error:  # noqa: BLE001 - a provider may be the user's
            self._failure = str(error) or type(error).__name__
        self._fetched.set()
        # Pause after a request that failed.
        return 60.0 if self._failure else 1 + 3600 - time.time() % 3600


def _fetch_hourly(rate_ref: weakref.ref[FetchedRate], forgotten: threading.Event) -> None:
    while (rate := rate_ref()) is not None:
        pause_s = rate.fetch()
        del rate
        forgotten.wait(pause_s)


def by_hour(begin_ns: int, end_ns: int, shift_ns: int) -> Iterator[tuple[datetime, int, int]]:
    """Splits a span of CLOCK_MONOTONIC by hour: yields the hour's beginning, and the part's two
    ends. `shift_ns` is what to add to get the time since the epoch.
    """
    while True:
        hour = (begin_ns + shift_ns) // HOUR_NS
        until_ns = min(end_ns, (hour + 1) * HOUR_NS - shift_ns)
        yield datetime.fromtimestamp(hour * HOUR_NS / 1e9, timezone.utc), begin_ns, until_ns
        if until_ns >= end_ns:
            return
        begin_ns = until_ns


class Later:
    """Base of a dataclass whose fields, but the time, are computed on first access. A field may
    have a default factory, but no default, which would be found on the class first.
    """

    time: float
    _compute: Callable[[], tuple[Any, ...]]

    @classmethod
    def later(cls: type[L], seconds: float, compute: Callable[[], tuple[Any, ...]]) -> L:
        """Creates one."""
        self = cls.__new__(cls)
        self.time, self._compute = seconds, compute
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.__init__(*self._compute())  # type: ignore[misc]  # known only now
        return object.__getattribute__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        if "_compute" in vars(self):
            self.__init__(*self._compute())  # type: ignore[misc]  # known only now
        return {name: value for name, value in vars(self).items() if name != "_compute"}


class RatedMonitor(Configured, Generic[L]):
    """Measures the energy of named windows, multiplied by a rate. Each hour's energy is multiplied
    by that hour's rate. If the rate is unknown, one warning says so, amounts are `nan`, and energy
    is measured as usual.

    Args:
        what: Name of the rate, for the warning.
        make: Class of the measurement of a window.

    Attributes:
        zeus_monitor: The monitor that measures the energy.
        current_keys: Names of the open windows.
    """

    def __init__(
        self,
        rate: Rate,
        what: str,
        make: type[L],
        gpu_indices: list[int] | None,
        cpu_indices: list[int] | None,
        sync_execution_with: Framework,
    ) -> None:
        self.zeus_monitor = ZeusMonitor(
            gpu_indices, cpu_indices, sync_execution_with=sync_execution_with
        )
        self.current_keys: set[str] = set()
        self._rate = FetchedRate(rate, what)
        self._make = make
        self.offset_ns = offset_ns
        """Tells what to add to CLOCK_MONOTONIC to get the time since the epoch, ns."""

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        """Open a window. See `ZeusMonitor.begin_window`."""
        self.zeus_monitor.begin_window(key, sync_execution)
        self.current_keys.add(key)

    def end_window(self, key: str, sync_execution: bool = True) -> L:
        """Close a window. See `ZeusMonitor.end_window`. Energies and amounts are looked up on first
        access.
        """
        begin = self.zeus_monitor.measurement_states.get(key)
        whole = self.zeus_monitor.end_window(key, sync_execution)
        assert begin is not None
        self.current_keys.discard(key)
        end_ns = begin.t_ns + round(whole.time * 1e9)
        hours = list(by_hour(begin.t_ns, end_ns, self.offset_ns()))
        ended = self.zeus_monitor._lookup.ended
        pieces = [
            (hour, whole if len(hours) == 1 else ended(key, begin_ns, until_ns, aligned=False))
            for hour, begin_ns, until_ns in hours
        ]
        return self._make.later(whole.time, lambda: self._fields(whole, pieces))

    def _fields(
        self, whole: Measurement, pieces: list[tuple[datetime, Measurement]]
    ) -> tuple[Any, ...]:
        """Returns the time, and energies and amounts of GPUs, CPUs and memory."""
        rates = [self._rate.at(hour) for hour, _ in pieces]
        fields: list[Any] = [whole.time]
        for name in ("gpu_energy", "cpu_energy", "dram_energy"):
            energies = getattr(whole, name)
            parts = [getattr(piece, name) for _, piece in pieces]
            fields += [
                energies,
                energies
                and {
                    index: sum(
                        (part or {}).get(index, math.nan) / KWH_J * rate
                        for part, rate in zip(parts, rates, strict=True)
                    )
                    for index in energies
                },
            ]
        return tuple(fields)

"""Windows whose energy is multiplied by a rate per kWh that changes with the hour.

Rates are fetched on a thread: a service that does not answer does not delay training.
Third-party web services are asked with the user's own key.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Generic, Protocol, TypeVar

from zeus.exceptions import ZeusBaseError
from zeus.monitor.energy import ZeusMonitor
from zeus.monitor.measurement import Measurement
from zeus.monitor.timeline import offset_ns
from zeus.utils.framework import Framework
from zeus.utils.warn import warn
from zeus_ipc.circuit import bounded


class ServiceError(ZeusBaseError):
    """A service cannot be reached, or refuses the request."""


class JsonService:
    """A service that answers with JSON.

    Args:
        name: Its name, for messages.
        url: Where it is.
        timeout_s: Time to wait for it.
    """

    def __init__(self, name: str, url: str, timeout_s: float) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def get(
        self,
        path: str,
        parameters: Mapping[str, str | float],
        headers: Mapping[str, str],
        hint: str,
    ) -> Any:
        """Returns its answer.

        Args:
            path: Path of the request.
            parameters: Query parameters.
            headers: Headers.
            hint: What to do if it refuses.

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


JOULES_PER_KWH = 3.6e6
HOUR_NS = 3_600_000_000_000

FIRST_WAIT_S = 5.0
"""How long the end of a window waits for the first rates."""

FETCH_EVERY_S = 1800.0
"""How often rates are fetched while windows are open."""


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


M_co = TypeVar("M_co", covariant=True)


class MakeMeasurement(Protocol[M_co]):
    """Creates the measurement of a window: energies in J and amounts, by index."""

    def __call__(
        self,
        time: float,
        gpu_energy: dict[int, float],
        gpu_amount: dict[int, float],
        cpu_energy: dict[int, float] | None,
        cpu_amount: dict[int, float] | None,
        dram_energy: dict[int, float] | None,
        dram_amount: dict[int, float] | None,
        /,
    ) -> M_co:
        """Creates it."""


class RatedMonitor(Generic[M_co]):
    """Measures the energy of named windows, multiplied by a rate. Each hour's energy is multiplied
    by that hour's rate. If the rate is unknown, one warning says so, amounts are `nan`, and energy
    is measured as usual.

    Args:
        rate: The rate.
        what: Name of the rate, for the warning.
        make: Creates the measurement of a window.
        gpu_indices: See `ZeusMonitor`.
        cpu_indices: See `ZeusMonitor`.
        sync_execution_with: See `ZeusMonitor`.

    Attributes:
        zeus_monitor: The monitor that measures the energy.
    """

    def __init__(
        self,
        rate: Rate,
        what: str,
        make: MakeMeasurement[M_co],
        gpu_indices: list[int] | None,
        cpu_indices: list[int] | None,
        sync_execution_with: Framework,
    ) -> None:
        self.zeus_monitor = ZeusMonitor(
            gpu_indices, cpu_indices, sync_execution_with=sync_execution_with
        )
        self._windows = RatedWindows(self.zeus_monitor, rate, what)
        self._make = make

    @property
    def current_keys(self) -> set[str]:
        """Names of the open windows."""
        return self._windows.keys

    def begin_window(self, key: str, sync_execution: bool = True) -> None:
        """Open a window. See `ZeusMonitor.begin_window`."""
        self._windows.begin(key, sync_execution)

    def end_window(self, key: str, sync_execution: bool = True) -> M_co:
        """Close a window. See `ZeusMonitor.end_window`."""
        took, amounts = self._windows.end(key, sync_execution)
        gpu, cpu, dram = took.gpu_energy, took.cpu_energy, took.dram_energy
        return self._make(took.time, gpu, amounts.gpu, cpu, amounts.cpu, dram, amounts.dram)


@dataclass
class Amounts:
    """The amounts for the energy of a window, by index; `nan` if the rate is unknown."""

    gpu: dict[int, float]
    cpu: dict[int, float] | None
    dram: dict[int, float] | None


@dataclass
class _Open:
    """An open window: the time before `since_ns` is in `pieces`."""

    since_ns: int
    pieces: list[tuple[datetime, Measurement]] = field(default_factory=list)


class RatedWindows:
    """Windows of a monitor, with amounts for their energy.

    Args:
        monitor: The monitor.
        rate: The rate.
        what: Name of the amount, for the warning.
    """

    def __init__(self, monitor: ZeusMonitor, rate: Rate, what: str) -> None:
        self._monitor = monitor
        self._rate = rate
        self._what = what
        self._guard = threading.Lock()
        self._tending = threading.Lock()
        self._windows: dict[str, _Open] = {}
        self._fetched = threading.Event()
        self._failure = ""
        self._warned = False
        self._offset_ns = offset_ns
        self._tended_s = -math.inf
        self._wake = threading.Event()
        threading.Thread(
            target=_tend_now_and_then,
            args=(weakref.ref(self), self._wake),
            name="zeus-rates",
            daemon=True,
        ).start()

    @property
    def keys(self) -> set[str]:
        """Names of the open windows."""
        return set(self._windows)

    def begin(self, key: str, sync_execution: bool, restart: bool = False) -> None:
        """Open a window.

        Raises:
            ValueError: A window of this name is open.
        """
        self._monitor.begin_window(key, sync_execution, restart)
        with self._guard:
            self._windows[key] = _Open(self._monitor.measurement_states[key].t_ns)
        if time.monotonic() - self._tended_s > FETCH_EVERY_S:
            self._tended_s = time.monotonic()
            self._fetched.clear()
            self._wake.set()

    def end(self, key: str, sync_execution: bool) -> tuple[Measurement, Amounts]:
        """Close a window. Waits for its energy, at most one update period of the sensors.

        Raises:
            ValueError: No window of this name is open.
        """
        begin = self._monitor.measurement_states.get(key)
        measurement = self._monitor.end_window(key, sync_execution)
        assert begin is not None
        end_ns = begin.t_ns + round(measurement.time * 1e9)
        with self._guard:
            window = self._windows.pop(key)
        rest = self._cut(key, window.since_ns, end_ns)
        pieces = window.pieces + rest
        if len(pieces) == 1:
            pieces = [(pieces[0][0], measurement)]
        self._fetched.wait(FIRST_WAIT_S)
        return measurement, self._amounts(measurement, pieces)

    def tend(self) -> None:
        """Fetches the rates, and looks up the energy of open windows in past hours."""
        with self._tending:
            try:
                self._rate.fetch()
                self._failure = ""
            except Exception as error:  # noqa: BLE001 - a provider may be the user's
                self._failure = str(error) or type(error).__name__
            self._fetched.set()
            self._tended_s = time.monotonic()
            now_ns = self._monitor._clock_ns()
            with self._guard:
                windows = list(self._windows.items())
            for key, window in windows:
                *over, _ = self._cut(key, window.since_ns, now_ns)
                for _, piece in over:
                    _energies(piece)
                with self._guard:
                    if self._windows.get(key) is window and over:
                        window.pieces += over
                        window.since_ns += sum(round(piece.time * 1e9) for _, piece in over)

    def _cut(self, key: str, begin_ns: int, end_ns: int) -> list[tuple[datetime, Measurement]]:
        """Splits a span by hour."""
        shift_ns = self._offset_ns()
        found = []
        while True:
            hour = (begin_ns + shift_ns) // HOUR_NS
            until_ns = min(end_ns, (hour + 1) * HOUR_NS - shift_ns)
            start = datetime.fromtimestamp(hour * HOUR_NS / 1e9, timezone.utc)
            found.append((start, self._monitor._lookup.peek(key, begin_ns, until_ns)))
            if until_ns >= end_ns:
                return found
            begin_ns = until_ns

    def _amounts(
        self, whole: Measurement, pieces: Sequence[tuple[datetime, Measurement]]
    ) -> Amounts:
        amounts = [dict.fromkeys(energies or (), 0.0) for energies in _energies(whole)]
        for hour, piece in pieces:
            rate = self._rate.at(hour)
            if rate is None:
                self._warn()
            for amount, energies in zip(amounts, _energies(piece), strict=True):
                for index in amount:
                    joules = (energies or {}).get(index, math.nan)
                    amount[index] += joules / JOULES_PER_KWH * (math.nan if rate is None else rate)
        gpu, cpu, dram = amounts
        return Amounts(
            gpu,
            None if whole.cpu_energy is None else cpu,
            None if whole.dram_energy is None else dram,
        )

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            why = self._failure or "the service has no value for this hour"
            warn(f"{self._what} is not known, and energy is counted alone: {why}")


def _energies(
    measurement: Measurement,
) -> tuple[dict[int, float], dict[int, float] | None, dict[int, float] | None]:
    try:
        with bounded():
            measurement.look_up()
        return measurement.gpu_energy, measurement.cpu_energy, measurement.dram_energy
    except ZeusBaseError:
        return {}, None, None


def _tend_now_and_then(windows_ref: weakref.ref[RatedWindows], wake: threading.Event) -> None:
    while True:
        asked = wake.wait(FETCH_EVERY_S)
        wake.clear()
        windows = windows_ref()
        if windows is None:
            return
        if asked or windows.keys:
            windows.tend()
        del windows

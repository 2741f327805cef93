"""The energy of one training run: its steps, its epochs, and the total."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.monitor.carbon import CarbonIntensityProvider, Intensity
from zeus.monitor.price import ElectricityPriceProvider, Price
from zeus.monitor.rates import JOULES_PER_KWH, Amounts, RatedWindows
from zeus_ipc.circuit import bounded

_numbers = itertools.count()

_UNREAD = 100_000
"""Maximum number of steps waiting for their energy while zeusd does not answer."""


@dataclass(frozen=True)
class EnergySummary:
    """The summary of a training run; `print` it.

    Attributes:
        time: Seconds, with evaluations and checkpoints.
        energy: Joules of all GPUs of the monitor, and of CPUs and memory if they are measured;
            `nan` if unknown.
        gpus: Number of GPUs.
        steps: Number of steps.
        step_energy: Joules of one step on average, without evaluations and checkpoints, and without
            steps whose energy is not known.
        epochs: Number of epochs.
        cost: The cost of the energy; None if no price was given.
        currency: Currency of the cost.
        co2: Grams of CO2 equivalent; None if no carbon intensity was given.
        unknown: Seconds whose energy is not known and not counted: zeusd was restarted and lost its
            history.
    """

    time: float
    energy: float
    gpus: int
    steps: int
    step_energy: float
    epochs: int
    cost: float | None = None
    currency: str = ""
    co2: float | None = None
    unknown: float = 0.0

    @property
    def kwh(self) -> float:
        """Kilowatt hours."""
        return self.energy / JOULES_PER_KWH

    @property
    def power(self) -> float:
        """Mean watts."""
        known_s = self.time - self.unknown
        return self.energy / known_s if known_s else math.nan

    def figures(self) -> dict[str, float]:
        """The summary by the names under which it is logged."""
        found = {"energy/total_kWh": self.kwh, "energy/mean_W": self.power}
        if self.cost is not None:
            found[f"energy/cost_{self.currency}"] = self.cost
        if self.co2 is not None:
            found["energy/co2_g"] = self.co2
        return found

    def __str__(self) -> str:
        gpus = f"{self.gpus} GPU{'' if self.gpus == 1 else 's'}"
        parts = [
            f"{self.kwh:.4g} kWh in {self.time:.1f} s",
            f"mean {self.power:.1f} W on {gpus}",
        ]
        if self.steps:
            parts.append(f"{self.step_energy:.4g} J/step over {self.steps} steps")
        if self.cost is not None:
            parts.append(f"{self.cost:.4g} {self.currency}")
        if self.co2 is not None:
            parts.append(f"{self.co2:.4g} gCO2eq")
        if self.unknown:
            parts.append(f"without {self.unknown:.1f} s whose energy is not known")
        return ", ".join(parts)


class EnergyAccount:
    """Measures a training run, and starts over when the next begins.

    Args:
        monitor: The GPUs.
        price: Cost of a kWh, or an `ElectricityPriceProvider`; None: no cost.
        currency: Currency of the price.
        carbon_intensity: gCO2eq/kWh, or a `CarbonIntensityProvider`; None: emissions are not
            counted.
        sync_execution: Wait for the GPUs at both ends of each step.
    """

    def __init__(
        self,
        monitor: ZeusMonitor,
        price: float | ElectricityPriceProvider | None,
        currency: str,
        carbon_intensity: float | CarbonIntensityProvider | None,
        sync_execution: bool,
    ) -> None:
        self._monitor = monitor
        self._currency = currency
        self._sync = sync_execution
        for name, given, kind in (
            ("price", price, ElectricityPriceProvider),
            ("carbon_intensity", carbon_intensity, CarbonIntensityProvider),
        ):
            constant = isinstance(given, (int, float)) and math.isfinite(given)
            if not (given is None or constant or isinstance(given, kind)):
                raise ValueError(
                    f"{name} must be a finite number or {kind.__name__}, not {given!r}"
                )
        self._constant: dict[str, float] = {}
        self._rated: dict[str, RatedWindows] = {}
        if isinstance(price, (int, float)):
            self._constant["cost"] = price
        elif price is not None:
            self._rated["cost"] = RatedWindows(monitor, Price(price), "The price of electricity")
        if isinstance(carbon_intensity, (int, float)):
            self._constant["co2"] = carbon_intensity
        elif carbon_intensity is not None:
            rate = Intensity(carbon_intensity)
            self._rated["co2"] = RatedWindows(monitor, rate, "The carbon intensity")
        number = next(_numbers)  # several may share a monitor
        self._step, self._epoch, self._training = (
            f"zeus.measure:{what}:{number}" for what in ("step", "epoch", "training")
        )
        self._clear()

    def _clear(self) -> None:
        self._unread: deque[Measurement] = deque(maxlen=_UNREAD)
        self._epochs: deque[Measurement] = deque()
        self._energy_j = 0.0  # of the steps that were read but not reported yet, ...
        self._time_s = 0.0
        self._shown = 0
        self._all_energy_j = 0.0  # ... and of all that were read
        self._read = 0
        # The training in pieces, as a history that is lost ends the energy of the whole.
        self._pieces: list[Measurement] = []
        self._pieces_j = self._lost_s = 0.0
        self._piece_ns = 0
        self.steps = 0
        self.epochs = 0

    def begin_training(self) -> None:
        """Training begins."""
        self._clear()
        self._monitor.begin_window(self._training, restart=True)
        self._piece_ns = self._monitor.measurement_states[self._training].t_ns
        for name, windows in self._rated.items():
            windows.begin(f"{self._training}:{name}", sync_execution=False, restart=True)

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._monitor.begin_window(self._epoch, restart=True)

    def begin_step(self) -> None:
        """A step begins."""
        self._monitor.begin_window(self._step, self._sync, restart=True)

    def end_step(self) -> None:
        """A step has ended. Reads no sensor."""
        if self._step in self._monitor.measurement_states:
            self._unread.append(self._monitor.end_window(self._step, self._sync))
            self.steps += 1

    def end_epoch(self) -> None:
        """An epoch has ended."""
        if self._epoch in self._monitor.measurement_states:
            self._epochs.append(self._monitor.end_window(self._epoch))
            self.epochs += 1

    def figures(self, *, wait: bool = False) -> dict[str, float]:
        """Returns the figures for the steps since the last ones, and for the last epoch.

        Args:
            wait: Wait for the sensors' next update, so that all steps are known.
        """
        while self._unread and (wait or self._monitor.available(self._unread[0])):
            step = self._unread.popleft()
            energy_j = _joules(step)
            if math.isnan(energy_j):
                continue
            self._energy_j += energy_j
            self._time_s += step.time
            self._shown += 1
            self._all_energy_j += energy_j
            self._read += 1
        if self._training in self._monitor.measurement_states:
            self._read_pieces()
            self._cut(self._monitor._clock_ns())
        found = {}
        if self._shown:
            found["energy/step_J"] = self._energy_j / self._shown
            found["energy/power_W"] = self._energy_j / self._time_s if self._time_s else math.nan
            self._energy_j = self._time_s = 0.0
            self._shown = 0
        while self._epochs and (wait or self._monitor.available(self._epochs[0])):
            found["energy/epoch_J"] = _joules(self._epochs.popleft())
        return found

    def end_training(self) -> EnergySummary:
        """Training has ended. Waits for the sensors' next update."""
        for key in (self._step, self._epoch):
            if key in self._monitor.measurement_states:
                self._monitor.end_window(key, sync_execution=False, cancel=True)
        begin_ns = self._monitor.measurement_states[self._training].t_ns
        whole = self._monitor.end_window(self._training)
        self._cut(begin_ns + round(whole.time * 1e9))
        amounts = {
            name: _total(windows.end(f"{self._training}:{name}", sync_execution=False)[1])
            for name, windows in self._rated.items()
        }
        energy_j, unknown_s = _joules(whole), 0.0
        if math.isnan(energy_j):
            self._read_pieces(wait=True)
            unknown_s = self._lost_s + sum(piece.time for piece in self._pieces)
            if unknown_s < whole.time:
                energy_j = self._pieces_j
        for name, rate in self._constant.items():
            amounts[name] = energy_j / JOULES_PER_KWH * rate
        return EnergySummary(
            whole.time,
            energy_j,
            len(self._monitor.gpu_indices),
            self.steps,
            self._all_energy_j / self._read if self._read else math.nan,
            self.epochs,
            amounts.get("cost"),
            self._currency,
            amounts.get("co2"),
            0.0 if math.isnan(energy_j) else unknown_s,
        )

    def _cut(self, now_ns: int) -> None:
        """Ends a piece of the training."""
        piece = self._monitor._lookup.peek(self._training, self._piece_ns, now_ns)
        self._pieces.append(piece)
        self._piece_ns = now_ns

    def _read_pieces(self, *, wait: bool = False) -> None:
        """Reads pieces, newest first: older ones that are not known then are lost."""
        kept, asks, remembers = [], True, False
        for piece in reversed(self._pieces):
            known = False
            if asks and (wait or self._monitor.available(piece)):
                with bounded():
                    known = piece.known
                asks = known or remembers  # otherwise zeusd does not answer, or has lost the rest
            if known:
                self._pieces_j += _joules(piece)
            elif remembers:
                self._lost_s += piece.time
            else:
                kept.append(piece)
            remembers |= known
        self._pieces = kept[::-1]


def _joules(measurement: Measurement) -> float:
    """Returns the energy of GPUs, and of CPUs and memory if measured; `nan` if unknown."""
    try:
        cpus = (measurement.cpu_energy or {}).values()
        drams = (measurement.dram_energy or {}).values()
        return measurement.total_energy + sum(cpus) + sum(drams)
    except ZeusBaseError:
        return math.nan


def _total(amounts: Amounts) -> float:
    parts = (amounts.gpu, amounts.cpu or {}, amounts.dram or {})
    return sum(amount for part in parts for amount in part.values())

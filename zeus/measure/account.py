"""The energy of one training run: its steps, its epochs, and the total."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from zeus.exceptions import ZeusBaseError
from zeus.monitor import Measurement, ZeusMonitor
from zeus.monitor.carbon import CarbonIntensityProvider, Intensity
from zeus.monitor.price import ElectricityPriceProvider, Price
from zeus.monitor.rates import FetchedRate, by_hour
from zeus_common.epoch import offset_ns
from zeus_common.units import KWH_J

_numbers = itertools.count()


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
        return self.energy / KWH_J

    @property
    def power(self) -> float:
        """Mean watts."""
        known_s = self.time - self.unknown
        return self.energy / known_s if known_s else math.nan

    def figures(self) -> dict[str, float]:
        """The summary by the names under which it is logged."""
        figures = {"energy/total_kWh": self.kwh, "energy/mean_W": self.power}
        if self.cost is not None:
            figures[f"energy/cost_{self.currency}"] = self.cost
        if self.co2 is not None:
            figures["energy/co2_g"] = self.co2
        return figures

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
    """Measures a training run, and starts over when the next begins. Only the end waits, for the
    sensors' next update.
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
        self._rates: dict[str, Callable[[datetime], float]] = {}
        if isinstance(price, ElectricityPriceProvider):
            self._rates["cost"] = FetchedRate(Price(price), "The price of electricity").at
        elif price is not None:
            self._rates["cost"] = _constant("price", price, ElectricityPriceProvider)
        if isinstance(carbon_intensity, CarbonIntensityProvider):
            rate = Intensity(carbon_intensity)
            self._rates["co2"] = FetchedRate(rate, "The carbon intensity").at
        elif carbon_intensity is not None:
            self._rates["co2"] = _constant(
                "carbon_intensity", carbon_intensity, CarbonIntensityProvider
            )
        number = next(_numbers)  # several may share a monitor
        self._step, self._epoch, self._training = (
            f"zeus.measure:{what}:{number}" for what in ("step", "epoch", "training")
        )
        self._clear()

    def _clear(self) -> None:
        # Maximum number of steps waiting for their energy while zeusd does not answer.
        self._unread: deque[Measurement] = deque(maxlen=100_000)
        self._epochs: deque[Measurement] = deque()
        self._energy_j = 0.0  # of the steps that are known but not reported yet, ...
        self._time_s = 0.0
        self._shown = 0
        self._all_energy_j = 0.0  # ... and of all that are known
        self._read = 0
        # The training in pieces: a history that is lost ends the energy of the whole, and each hour
        # has its own rates.
        self._pieces: deque[tuple[datetime, Measurement]] = deque()
        self._hours_j: defaultdict[datetime, float] = defaultdict(float)
        self._lost_s = 0.0
        self._piece_ns = 0
        self.steps = 0
        self.epochs = 0

    def begin_training(self) -> None:
        """Training begins."""
        self._clear()
        self._monitor.begin_window(self._training, restart=True)
        self._piece_ns = self._seen_ns = self._monitor.measurement_states[self._training].t_ns

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._monitor.begin_window(self._epoch, restart=True)

    def begin_step(self) -> None:
        """A step begins."""
        self._monitor.begin_window(self._step, self._sync, restart=True)
        self._seen_ns = self._monitor.measurement_states[self._step].t_ns

    def end_step(self) -> None:
        """A step has ended."""
        begin = self._monitor.measurement_states.get(self._step)
        if begin is None:
            return
        step = self._monitor.end_window(self._step, self._sync)
        self._unread.append(step)
        self._seen_ns = begin.t_ns + round(step.time * 1e9)
        self.steps += 1
        # Minimum length of a piece of a training. If zeusd loses its history, one piece is not
        # known.
        if begin.t_ns - self._piece_ns > 2_000_000_000:
            self._cut(begin.t_ns)
            self._collect()

    def end_epoch(self) -> None:
        """An epoch has ended."""
        if self._epoch in self._monitor.measurement_states:
            self._epochs.append(self._monitor.end_window(self._epoch))
            self.epochs += 1

    def figures(self) -> dict[str, float]:
        """Returns the figures of the steps and the epoch that have become known since the last
        ones, and asks for those of the others.
        """
        for waiting in (self._unread, self._epochs):
            if waiting:
                self._monitor.available(waiting[-1])
        return self._figures()

    def end_training(self, interrupted: bool = False) -> tuple[dict[str, float], EnergySummary]:
        """Training has ended. Returns the last figures and the summary.

        Args:
            interrupted: It ended when its last step began or ended, at an unknown time after that.
        """
        for key in (self._step, self._epoch):
            if key in self._monitor.measurement_states:
                self._monitor.end_window(key, sync_execution=False, cancel=True)
        begin_ns = self._monitor.measurement_states[self._training].t_ns
        if interrupted:
            self._monitor.end_window(self._training, cancel=True)
            whole = self._monitor._ended(self._training, begin_ns, self._seen_ns, aligned=False)
        else:
            whole = self._monitor.end_window(self._training)
        self._cut(begin_ns + round(whole.time * 1e9))
        last_hour = self._pieces[-1][0]
        try:
            self._monitor._lookup.catch_up()
            whole.look_up()
        except ZeusBaseError as error:
            self._monitor._lookup.warn(error)
        figures = self._figures()
        hours_j = self._hours_j or {last_hour: 0.0}
        known_j, unknown_s = sum(hours_j.values()), 0.0
        energy_j = _joules(whole)
        if math.isnan(energy_j) and self._hours_j:
            unknown_s = self._lost_s + sum(piece.time for _, piece in self._pieces)
            energy_j = known_j
        amounts = {
            name: sum(
                (joules / known_j if known_j else 1.0) * rate(hour)
                for hour, joules in hours_j.items()
            )
            * energy_j
            / KWH_J
            for name, rate in self._rates.items()
        }
        return figures, EnergySummary(
            whole.time,
            energy_j,
            len(self._monitor.gpu_indices),
            self.steps,
            self._all_energy_j / self._read if self._read else math.nan,
            self.epochs,
            amounts.get("cost"),
            self._currency,
            amounts.get("co2"),
            unknown_s,
        )

    # --------------------------------------------------------------------------------- internals

    def _cut(self, now_ns: int) -> None:
        """Ends a piece of the training."""
        for hour, begin_ns, end_ns in by_hour(self._piece_ns, now_ns, offset_ns()):
            piece = self._monitor._lookup.ended(self._training, begin_ns, end_ns, aligned=False)
            self._pieces.append((hour, piece))
        self._piece_ns = now_ns

    def _collect(self) -> None:
        """Adds up the steps and pieces that have become known."""
        while self._unread and self._unread[0].settled:
            step = self._unread.popleft()
            energy_j = _joules(step)
            if not math.isnan(energy_j):
                self._energy_j += energy_j
                self._time_s += step.time
                self._shown += 1
                self._all_energy_j += energy_j
                self._read += 1
        while self._pieces and self._pieces[0][1].settled:
            hour, piece = self._pieces.popleft()
            energy_j = _joules(piece)
            if math.isnan(energy_j):
                self._lost_s += piece.time
            else:
                self._hours_j[hour] += energy_j

    def _figures(self) -> dict[str, float]:
        self._collect()
        figures = {}
        if self._shown:
            figures["energy/step_J"] = self._energy_j / self._shown
            figures["energy/power_W"] = self._energy_j / self._time_s if self._time_s else math.nan
            self._energy_j = self._time_s = 0.0
            self._shown = 0
        while self._epochs and self._epochs[0].settled:
            figures["energy/epoch_J"] = _joules(self._epochs.popleft())
        return figures


def _constant(name: str, given: object, kind: type) -> Callable[[datetime], float]:
    if not isinstance(given, (int, float)) or not math.isfinite(given):
        raise ValueError(f"{name} must be a finite number or {kind.__name__}, not {given!r}")
    return lambda hour: given


def _joules(measurement: Measurement) -> float:
    """Returns the energy of GPUs, and of CPUs and memory if measured; `nan`, with one warning, if
    it is unknown. Never waits.
    """
    pending = measurement._pending
    if pending is None:
        return measurement._sum()
    if pending.error is not None:
        pending.lookup.warn(pending.error)
    return math.nan

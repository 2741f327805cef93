"""Measures time and energy of each instruction at each clock while training continues.

Each rank sweeps the clocks of its GPU independently, from the highest down. Instructions are timed
with the GPU synchronised at both ends. Their energy is their mean time multiplied by their mean
power, which is separated from other instructions in the sensor's readings (`power_fit`).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.power_fit import (
    WAITING,
    Power,
    Span,
    fill,
    fit,
    mixtures,
    set_apart,
)
from zeus.optimizer.pipeline_frequency.profile import ProfileMeasurement, Setting

log = logging.getLogger(__name__)

LOOKS = 20
"""A clock whose figures are not accurate enough is evaluated again after 1/20 more iterations."""

BLOCKING_W = {"A100": 83.64, "A40": 70.38}
"""Power of a GPU that is blocked on communication, W, if not measured. From the authors of Perseus
(SOSP 2024)."""


@dataclass(frozen=True)
class ProfilerSettings:
    """Settings of the online profiler.

    Attributes:
        start_after: Iterations before it starts, because the first ones of a job are different.
        warmup_iterations: Iterations after each change of the clock that are not measured.
        iterations: Iterations measured at each clock, at least.
        most_iterations: Largest number of these, if the energy is not known to `precision` before.
        precision: Required uncertainty of each instruction's energy, as a share of it (two standard
            deviations).
        every: Step between measured clocks, in supported clocks.
        rises: The sweep ends when the energy of every instruction has risen at this many clocks in
            a row.
        floor_mhz: No clock below this one is measured.
        power_profiles: Names of workload power profiles that are measured after the clocks, such
            as `max-q`; the GPU chooses the clock under each.
        p2p_power_w: Power of the GPU while blocked on communication, W; None: measured, or a known
            value of the product.
        csv_path: CSV file for this rank's measurements, with nine columns; with several ranks,
            `-rankN` is inserted before the suffix.
        synchronize: Function that waits for the GPU; None: torch's, if this process uses it.

    Raises:
        PipelineFrequencyError: A number is out of range.
    """

    start_after: int = 3
    warmup_iterations: int = 1
    iterations: int = 3
    most_iterations: int = 20
    precision: float = 0.01
    every: int = 1
    rises: int = 5
    floor_mhz: int = 0
    power_profiles: Sequence[str] = ()
    p2p_power_w: float | None = None
    csv_path: str | os.PathLike[str] | None = None
    synchronize: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        least = {
            "start_after": 0,
            "warmup_iterations": 0,
            "iterations": 1,
            "most_iterations": self.iterations,
            "every": 1,
            "rises": 1,
            "floor_mhz": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise PipelineFrequencyError(
                    f"the profiler's {name} must be at least {low}, not {getattr(self, name)}"
                )
        if not 0 < self.precision < 1:
            raise PipelineFrequencyError(
                f"the profiler's precision is a share such as 0.01, not {self.precision}"
            )
        if self.p2p_power_w is not None and not 0 <= self.p2p_power_w < math.inf:
            raise PipelineFrequencyError(
                f"p2p_power_w must be watts, at least 0, not {self.p2p_power_w}"
            )

    def chosen(self, supported: Sequence[int]) -> list[int]:
        """The clocks of a GPU to measure, descending."""
        clocks = sorted(supported, reverse=True)[:: self.every]
        return [mhz for mhz in clocks if mhz >= self.floor_mhz] or clocks[:1]


class Sensor(Protocol):
    """The source of power readings."""

    @property
    def window_ns(self) -> int | None:
        """Time before each tick that a reading covers; None: the whole tick."""

    def readings(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Ticks, ns, and their power, mW.

        Raises:
            Exception: They cannot be read now.
        """


class OnlineProfiler:
    """The sweep of one rank.

    Args:
        clocks: The clocks to measure, MHz, descending, followed by names of profiles.
        sensor: The GPU's sensor.
        set_clock: Sets a clock or profile and waits for it; returns whether it is in force.
        in_force: Returns whether it is still in force.
        synchronize: Waits until the GPU has finished launched work.
        place: Columns of each row: the rank's numbers.

    Attributes:
        rows: Results so far.
        instructions: The instructions of an iteration, in order.
        blocking: Power while waiting, if it was measured.
        finished: Whether the sweep has ended.
        failure: Why it was given up; empty: it was not.
    """

    def __init__(
        self,
        clocks: Sequence[Setting],
        settings: ProfilerSettings,
        sensor: Sensor,
        set_clock: Callable[[Setting], bool],
        in_force: Callable[[], bool],
        synchronize: Callable[[], None],
        clock_ns: Callable[[], int],
        place: Mapping[str, int],
    ) -> None:
        self._place = place
        self._clocks = list(clocks)
        self._settings = settings
        self._sensor = sensor
        self._set_clock = set_clock
        self._in_force = in_force
        self._synchronize = synchronize
        self._clock_ns = clock_ns
        self.rows: list[ProfileMeasurement] = []
        self.instructions: list[str] = []
        self.blocking: Power | None = None
        self.finished = not self._clocks
        self.failure = ""
        self._failures = 0
        self._waiting_s = 0.0
        self._position = -1
        self._steps = 0
        self._left = settings.start_after
        self._set_at_ns = 0
        self._next_look = settings.iterations
        self._open: tuple[str, int] | None = None
        self._iteration: list[Span] = []
        self._stretches: list[list[list[Span]]] = [[]]  # consecutive iterations without a pause
        self._training = False
        self._held = False

    @property
    def frequency(self) -> Setting:
        """The clock being measured, MHz, or the profile's name; 0 before the first."""
        return self._clocks[self._position] if 0 <= self._position < len(self._clocks) else 0

    def step_begin(self) -> None:
        """A training step begins."""
        self._close_iteration()
        if not self.finished:
            self._advance()
        self._training = True

    def step_end(self) -> None:
        """A training step has ended."""
        self._close_iteration()
        self._training = False

    def pause(self) -> None:
        """Handles the start of something other than training, whose energy is not assigned."""
        self._close_iteration()
        self._training = False
        if self._stretches[-1]:
            self._stretches.append([])

    def instruction_begin(self, name: str) -> None:
        """An instruction begins."""
        if self._training and not self.finished:
            self._synchronize()
            self._open = name, self._clock_ns()

    def instruction_end(self, name: str) -> None:
        """An instruction has ended."""
        if self._open is None or self._open[0] != name:
            self._open = None
            return
        self._synchronize()
        self._iteration.append(Span(self._open[1], self._clock_ns(), name))
        self._open = None

    # ---------------------------------------------------------------------------------- internals

    def _close_iteration(self) -> None:
        self._open = None
        iteration, self._iteration = self._iteration, []
        if not iteration or self.finished:
            return
        self._left -= 1
        measured = self._position >= 0 and self._left < 0
        # Longest time until a clock that was set is reached.
        if measured and iteration[0].begin_ns - self._set_at_ns >= 100_000_000:
            self.instructions = [span.kind for span in iteration]
            self._stretches[-1].append(iteration)

    def _advance(self) -> None:
        """Between two iterations: sets the next clock when this one is done."""
        if self._position < 0:
            if self._left <= 0:
                self._next_clock()
            return
        if not (self._held and self._in_force()):
            # The measurements may be of another clock: repeat them when clocks can be set.
            self._begin_clock()
            return
        count = sum(len(stretch) for stretch in self._stretches)
        if count < self._next_look:
            return
        if self._known(count):
            self._next_clock()
        else:
            # The training step waits while all iterations are evaluated again.
            soon, last = count + max(1, count // LOOKS), self._settings.most_iterations
            self._next_look = min(soon, last) if count < last else soon

    def _next_clock(self) -> None:
        self._position += 1
        clocks = sum(isinstance(one, int) for one in self._clocks)
        if self._position < clocks and self._rose():
            self._position = clocks
        if self._position >= len(self._clocks):
            self.finished = True
            return
        self._begin_clock()

    def _begin_clock(self) -> None:
        self._held = self._set_clock(self._clocks[self._position])
        self._left = self._settings.warmup_iterations
        self._set_at_ns = self._clock_ns()
        self._next_look = self._settings.iterations
        self._stretches = [[]]

    def _known(self, count: int) -> bool:
        """Whether this clock's figures are accurate enough, or will not improve; then stores
        them."""
        last = count >= self._settings.most_iterations
        try:
            rows, good = self._evaluate()
            if last and not rows:
                raise PipelineFrequencyError(
                    f"{count} iterations did not determine the power of each instruction; are "
                    "there power readings of this GPU?"
                )
        except Exception as error:
            log.debug("power cannot be determined", exc_info=True)
            self._failures += 1
            # Failed evaluations of one clock that end the sweep.
            if self._failures >= 3:
                self.finished = True
                self.failure = str(error) or type(error).__name__
            elif last:
                self._begin_clock()  # readings may be missing only of this time
            return False
        if not (good or last):
            return False
        self._failures = 0
        self.rows += rows
        return True

    def _evaluate(self) -> tuple[list[ProfileMeasurement], bool]:
        """The figures of the present clock, and whether they are accurate enough."""
        seen = []
        durations: dict[str, list[float]] = {}
        waiting_s = 0.0
        every = set_apart([*itertools.chain.from_iterable(self._stretches)])
        for count in map(len, self._stretches):
            spans, every = fill(every[:count]), every[count:]
            if not spans:
                continue
            start_ns, end_ns = spans[0].begin_ns, spans[-1].end_ns
            # Include one tick before: it marks the start of the next one.
            readings = self._sensor.readings(start_ns - 1_000_000_000, end_ns)
            seen += mixtures(spans, readings, self._sensor.window_ns)
            for span in spans:
                seconds = (span.end_ns - span.begin_ns) / 1e9
                if span.kind == WAITING:
                    waiting_s += seconds
                durations.setdefault(span.kind, []).append(seconds)
        powers = fit(seen)
        rows = []
        good = True
        for name in dict.fromkeys(self.instructions):
            power = powers.get(name)
            if power is None or power.watts <= 0:
                return [], False
            seconds = trimmed_mean(durations[name])
            good &= 2 * power.deviation_w <= self._settings.precision * power.watts
            rows.append(
                ProfileMeasurement(
                    **self._place,
                    instruction=name,
                    frequency=self.frequency,
                    time=seconds,
                    energy=power.watts * seconds,
                )
            )
        if good:
            self._waiting_s += waiting_s
            self._take_blocking(powers.get(WAITING), min(power.watts for power in powers.values()))
        return rows, good

    def _take_blocking(self, power: Power | None, least_w: float) -> None:
        """Waiting has the same power at every clock: keeps the most accurate value."""
        # Waiting time that must be measured before its power is used.
        if power is None or power.watts <= 0 or self._waiting_s < 1.0:
            return
        if power.deviation_w <= 0.05 * power.watts and (
            self.blocking is None or power.deviation_w < self.blocking.deviation_w
        ):
            self.blocking = power

    def _rose(self) -> bool:
        """Whether to stop: every instruction took more energy at each of the last clocks."""
        for name in dict.fromkeys(self.instructions):
            energies = [row.energy for row in self.rows if row.instruction == name]
            last = energies[-self._settings.rises - 1 :]
            if len(last) <= self._settings.rises:
                return False
            if not all(later > earlier for earlier, later in itertools.pairwise(last)):
                return False
        return bool(self.rows)


def trimmed_mean(values: Sequence[float]) -> float:
    """The mean without the longest and the shortest tenth."""
    ordered = sorted(values)
    # Share of the longest and of the shortest times that the mean excludes.
    cut = int(len(ordered) * 0.1)
    kept = ordered[cut : len(ordered) - cut]
    return math.fsum(kept) / len(kept)


def known_blocking_w(gpu_name: str) -> float | None:
    """Power of this product while blocked on communication; None: not known."""
    words = gpu_name.replace("-", " ").split()
    return next((watts for name, watts in BLOCKING_W.items() if name in words), None)

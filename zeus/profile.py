"""The energy of one iteration, from trials on a GPU that has cooled down. A warm GPU has more
leakage, so the same work costs more right after other work. A trial waits, runs some iterations to
warm up, and measures the next. Sweeps find how long to wait and to measure until the trials agree.
Under torch.distributed every rank calls the same function: energies are added, the longest time
counts, temperatures are averaged.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zeus.monitor import ZeusMonitor
from zeus.utils.framework import all_reduce, rank, synchronize, world_size

logger = logging.getLogger(__name__)

DURATIONS_S = tuple(map(float, range(1, 11)))
"""Default durations of sweeps."""

_WINDOW = "__zeus_profile"

Parameter = Literal["measurement_duration", "cooldown_duration"]


@dataclass
class TrialResult:
    """Result of one trial.

    Attributes:
        energy_per_iter: Energy of one iteration, J.
        time_per_iter: Time of one iteration, s.
        total_energy: Energy of the measured iterations, J.
        total_time: Time of the measured iterations, s.
        iterations: Their number.
        temperature_before: Temperature of the GPUs before them, degrees Celsius.
        temperature_after: Temperature of the GPUs after them.
    """

    energy_per_iter: float
    time_per_iter: float
    total_energy: float
    total_time: float
    iterations: int
    temperature_before: float
    temperature_after: float


@dataclass
class SweepResult:
    """Result of the trials of one pair of durations.

    Attributes:
        measurement_duration: Time measured, s.
        cooldown_duration: Time waited before, s.
        trials: The trials.
        energy_mean: Mean energy of one iteration, J.
        energy_std: Its standard deviation over the trials, J.
        avg_temperature_before: Mean of the trials', degrees Celsius.
        avg_temperature_after: Mean of the trials'.
        avg_total_time: Mean of the trials', s.
        avg_total_energy: Mean of the trials', J.
        is_valid: Whether the standard deviation is below the threshold.
    """

    measurement_duration: float
    cooldown_duration: float
    trials: list[TrialResult]
    energy_mean: float
    energy_std: float
    avg_temperature_before: float
    avg_temperature_after: float
    avg_total_time: float
    avg_total_energy: float
    is_valid: bool

    def __str__(self) -> str:
        return (
            f"measurement {self.measurement_duration:.1f} s, cooldown "
            f"{self.cooldown_duration:.1f} s: {self._figures()}"
        )

    def _figures(self) -> str:
        return (
            f"{self.energy_mean:.4f} ± {self.energy_std:.4f} J, "
            f"{self.avg_temperature_before:.1f} °C before, {self.avg_temperature_after:.1f} °C "
            f"after, {'valid' if self.is_valid else 'not valid'}"
        )


@dataclass
class SweepReport:
    """Result of a sweep.

    Attributes:
        sweep_param: Name of the duration that varied, and its values, s.
        fixed_param: Name and value of the other.
        entries: One for each value.
    """

    sweep_param: tuple[str, list[float]]
    fixed_param: tuple[str, float]
    entries: list[SweepResult]

    def __str__(self) -> str:
        name, values = self.sweep_param
        lines = [f"{name}, with {self.fixed_param[0]} {self.fixed_param[1]:.1f} s:"]
        lines += [
            f"  {value:5.1f} s: {entry._figures()}"
            for value, entry in zip(values, self.entries, strict=True)
        ]
        return "\n".join(lines)


def measure(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    measurement_duration: float,
    cooldown_duration: float,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
    warmup_settle_duration: float | None = None,
) -> TrialResult:
    """Measure the energy of an iteration in one trial.

    Args:
        target_function: Runs one iteration.
        measurement_duration: Time to measure, s.
        cooldown_duration: Time to wait before, s.
        num_warmup_iterations: Iterations before calibration and measurement.
        num_calibration_iterations: Iterations to determine how long one takes.
        warmup_settle_duration: Time to warm up before the measurement, s, instead of
            `num_warmup_iterations`.

    Raises:
        ValueError: A duration or a number is negative.
    """
    if warmup_settle_duration is not None and warmup_settle_duration < 0:
        raise ValueError(
            f"warmup_settle_duration must not be negative, not {warmup_settle_duration} s"
        )
    warm_up = num_warmup_iterations
    calibration = warm_up, num_calibration_iterations
    trials = _Trials(target_function, zeus_monitor, calibration, None)
    if warmup_settle_duration is not None:
        warm_up = max(1, math.ceil(warmup_settle_duration / trials.iteration_s))
    return trials.run(measurement_duration, cooldown_duration, warm_up)


def profile_measurement_duration(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    measurement_duration_search_range: list[float] | None = None,
    cooldown_duration: float = 10.0,
    num_trials: int = 10,
    num_warmup_trials: int = 2,
    trial_stddev_threshold: float = 0.01,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
    iteration_duration: float | None = None,
) -> SweepReport:
    """Finds how long to measure.

    Args:
        target_function: Runs one iteration.
        measurement_duration_search_range: Times to measure, s; None: 1 to 10.
        cooldown_duration: Time to wait before each trial, s.
        num_warmup_trials: Trials before these, which do not count and do not wait.
        trial_stddev_threshold: Standard deviation, J, below which a time is valid.
        num_calibration_iterations: Iterations to determine how long one takes.
        iteration_duration: How long one takes, s; None: measure it.
    """
    calibration = num_warmup_iterations, num_calibration_iterations
    return _Trials(target_function, zeus_monitor, calibration, iteration_duration).sweep(
        "measurement_duration",
        measurement_duration_search_range or DURATIONS_S,
        cooldown_duration,
        _Counts(num_trials, num_warmup_trials, num_warmup_iterations, trial_stddev_threshold),
    )


def profile_cooldown_duration(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    cooldown_duration_search_range: list[float] | None = None,
    measurement_duration: float = 10.0,
    num_trials: int = 10,
    num_warmup_trials: int = 2,
    trial_stddev_threshold: float = 0.01,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
    iteration_duration: float | None = None,
) -> SweepReport:
    """Finds how long to wait before a trial.

    Args:
        target_function: Runs one iteration.
        cooldown_duration_search_range: Times to wait, s; None: 1 to 10.
        measurement_duration: Time to measure, s.
        num_trials: For this and all others, see `profile_measurement_duration`.
    """
    calibration = num_warmup_iterations, num_calibration_iterations
    return _Trials(target_function, zeus_monitor, calibration, iteration_duration).sweep(
        "cooldown_duration",
        cooldown_duration_search_range or DURATIONS_S,
        measurement_duration,
        _Counts(num_trials, num_warmup_trials, num_warmup_iterations, trial_stddev_threshold),
    )


def profile_parameters(
    target_function: Callable[[], Any],
    zeus_monitor: ZeusMonitor,
    measurement_duration_search_range: list[float] | None = None,
    cooldown_duration_search_range: list[float] | None = None,
    num_trials: int = 10,
    num_warmup_trials: int = 2,
    trial_stddev_threshold: float = 0.01,
    num_warmup_iterations: int = 10,
    num_calibration_iterations: int = 100,
) -> tuple[SweepReport, SweepReport]:
    """Finds how long to measure, and how long to wait: one sweep each, with the other duration at
    its maximum.

    The arguments are those of `profile_measurement_duration` and `profile_cooldown_duration`.

    Returns:
        The reports of the times to measure and of the times to wait.
    """
    measured_s = measurement_duration_search_range or DURATIONS_S
    waited_s = cooldown_duration_search_range or DURATIONS_S
    calibration = num_warmup_iterations, num_calibration_iterations
    trials = _Trials(target_function, zeus_monitor, calibration, None)
    first = _Counts(num_trials, num_warmup_trials, num_warmup_iterations, trial_stddev_threshold)
    second = _Counts(num_trials, 0, num_warmup_iterations, trial_stddev_threshold)
    return (
        trials.sweep("measurement_duration", measured_s, max(waited_s), first),
        trials.sweep("cooldown_duration", waited_s, max(measured_s), second),
    )


@dataclass(frozen=True)
class _Counts:
    """Settings of a sweep; see `profile_measurement_duration`."""

    trials: int
    warmup_trials: int
    warmup_iterations: int
    threshold_j: float


class _Trials:
    """Runs trials of one function."""

    def __init__(
        self,
        target: Callable[[], Any],
        monitor: ZeusMonitor,
        calibration: tuple[int, int],
        iteration_s: float | None,
    ) -> None:
        self._target = target
        self._monitor = monitor
        if iteration_s is None:
            iteration_s = _calibrate(target, monitor, *calibration)
        self.iteration_s = iteration_s

    def run(self, measure_s: float, cool_down_s: float, warm_up: int) -> TrialResult:
        iterations = max(1, math.ceil(measure_s / self.iteration_s))
        if cool_down_s > 0:
            time.sleep(cool_down_s)
        for _ in range(warm_up):
            self._target()
        before_c = self._temperature_c()
        self._monitor.begin_window(_WINDOW)
        for _ in range(iterations):
            self._target()
        window = self._monitor.end_window(_WINDOW)
        after_c = self._temperature_c()
        energy_j, before_sum_c, after_sum_c = all_reduce(
            [window.total_energy, before_c, after_c], "sum"
        )
        (time_s,) = all_reduce([window.time], "max")
        ranks = world_size()
        return TrialResult(
            energy_j / iterations,
            time_s / iterations,
            energy_j,
            time_s,
            iterations,
            before_sum_c / ranks,
            after_sum_c / ranks,
        )

    def sweep(
        self, name: Parameter, values: Sequence[float], fixed: float, counts: _Counts
    ) -> SweepReport:
        cools_down = name == "cooldown_duration"
        for _ in range(counts.warmup_trials):
            self.run(fixed if cools_down else max(values), 0.0, 0)
        entries = []
        for value in values:
            measure_s, cool_down_s = (fixed, value) if cools_down else (value, fixed)
            trials = [
                self.run(measure_s, cool_down_s, counts.warmup_iterations)
                for _ in range(counts.trials)
            ]
            entries.append(_summarize(measure_s, cool_down_s, trials, counts.threshold_j))
        other = "measurement_duration" if cools_down else "cooldown_duration"
        report = SweepReport((name, list(values)), (other, fixed), entries)
        if rank() == 0:
            logger.info("%s", report)
        return report

    def _temperature_c(self) -> float:
        gpus = self._monitor.gpus
        return float(
            statistics.mean(gpus.get_gpu_temperature(i) for i in self._monitor.gpu_indices)
        )


def _summarize(
    measure_s: float, cool_down_s: float, trials: list[TrialResult], threshold_j: float
) -> SweepResult:
    energies_j = [one.energy_per_iter for one in trials]
    deviation_j = statistics.stdev(energies_j) if len(energies_j) > 1 else 0.0
    return SweepResult(
        measure_s,
        cool_down_s,
        trials,
        statistics.mean(energies_j),
        deviation_j,
        statistics.mean(one.temperature_before for one in trials),
        statistics.mean(one.temperature_after for one in trials),
        statistics.mean(one.total_time for one in trials),
        statistics.mean(one.total_energy for one in trials),
        deviation_j < threshold_j,
    )


def _calibrate(
    target: Callable[[], Any], monitor: ZeusMonitor, warm_up: int, iterations: int
) -> float:
    """Seconds of one iteration, on the slowest rank."""
    if warm_up < 0 or iterations < 1:
        raise ValueError(
            f"{iterations} calibration iterations after {warm_up} to warm up: give at least 1 "
            "after at least 0"
        )
    for _ in range(warm_up):
        target()
    synchronize(monitor.sync_with, monitor.gpu_indices)
    begin_s = time.monotonic()
    for _ in range(iterations):
        target()
    synchronize(monitor.sync_with, monitor.gpu_indices)
    (slowest_s,) = all_reduce([(time.monotonic() - begin_s) / iterations], "max")
    return float(slowest_s)

"""Simulates recurring jobs with measured runs, instead of training.

Source of the method: You, Chung, Chowdhury, "Zeus: Understanding and Optimizing GPU Energy
Consumption of DNN Training", NSDI 2023, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zeus.analyze import HistoryEntry
from zeus.job import Job
from zeus.policy.interface import BatchSizeOptimizer, PowerLimitOptimizer, Run
from zeus.policy.knowledge import Place, load, save
from zeus.policy.recurrence import Recurrences, Runs, give, learned
from zeus.simulate.tables import BatchSizeTable, Measurements, Table
from zeus.utils.metric import zeus_cost

MOST_RETRIES = 1000
"""A job of a group that fails this many times in a row will not reach its target."""


class Simulator:
    """Simulates recurring jobs: draws training runs from measured ones. Every call is
    deterministic: it copies the policies and starts with the seed.

    Args:
        summary_train: Training runs: path of a CSV file, or a pandas.DataFrame; see
            `zeus.simulate.tables`.
        summary_power: Power by power limit, in the same form.
        verbose: Whether to print what happens.

    Raises:
        ValueError: A table cannot be used; it says where.
    """

    def __init__(
        self,
        summary_train: Table,
        summary_power: Table,
        batch_size_optimizer: BatchSizeOptimizer,
        power_limit_optimizer: PowerLimitOptimizer,
        seed: int = 123456,
        verbose: bool = True,
    ) -> None:
        self.measurements = Measurements(summary_train, summary_power)
        self.bso = batch_size_optimizer
        self.plo = power_limit_optimizer
        self.seed = seed
        self.verbose = verbose

    def batch_sizes(self, job: Job) -> list[int]:
        """The measured batch sizes of a job's workload, ascending."""
        return list(self.measurements.of(job))

    def power_limits(self, job: Job) -> list[int]:
        """The measured power limits of a job's workload, ascending, W."""
        tables = self.measurements.of(job).values()
        return sorted({limit for table in tables for limit in table.power.limits})

    def simulate_one_job(
        self,
        job: Job,
        num_recurrence: int,
        beta_knob: float,
        eta_knob: float,
        *,
        knowledge: str | Path | None = None,
        gpu_model: str = "",
    ) -> list[HistoryEntry]:
        """Simulates a recurring job, one run after the other.

        Args:
            num_recurrence: How many times it recurs.
            beta_knob: A run is stopped before it costs this multiple of the best; infinite for
                never.
            eta_knob: 1 counts energy only, 0 time only.
            knowledge: File of knowledge about the job on other GPUs, or under other power limits:
                it is used, and updated.
            gpu_model: With `knowledge`: the measured GPU; the power limits are those of the table.

        Returns:
            All runs, in order.

        Raises:
            ValueError: A knob is out of range, there are no measurements of the job, the default
                batch size is missing, or the file is not valid.
            RuntimeError: The default batch size missed the target, or the target is unreachable.
        """
        play = _Play(self, job, eta_knob)
        limits = self.power_limits(job)
        here = Place(gpu_model, (limits[0], limits[-1]))
        known = None if knowledge is None else load(knowledge, here)
        if known is not None:
            give(play.bso, job, known)
        recurrences = Recurrences(play.bso, job, beta_knob)
        history: list[HistoryEntry] = []
        while recurrences.recurrence <= num_recurrence:
            now = recurrences.begin()
            run, entry = play.train(now.batch_size, now.cost_bound)
            if not run.epochs:
                recurrences.skip(now)
                continue
            history.append(entry)
            if self.verbose:
                print(f"[Simulator] {job}, recurrence {now.recurrence}.{now.number}: {history[-1]}")
            recurrences.observe(run)
        learnt = learned(play.bso, job)
        if knowledge is not None and learnt is not None:
            save(knowledge, replace(learnt, place=here))
        return history

    def simulate_one_alibaba_group(
        self, job: Job, group_df: Any, beta_knob: float, eta_knob: float
    ) -> list[HistoryEntry]:
        """Simulates a group of jobs on a cluster, where one may begin before another has ended.

        Args:
            group_df: Table of the group's jobs by start time (a pandas.DataFrame, or a sequence of
                mappings) with columns start_time and end_time (s) and runtime_ratio: the job's run
                time over the mean of its data set.
            beta_knob: A run is stopped before it costs this multiple of the best run; infinite for
                never.
            eta_knob: 1 counts energy only, 0 time only.

        Returns:
            All runs, in the order they ended; time and energy are scaled by their runtime_ratio.

        Raises:
            ValueError: As `simulate_one_job`.
            RuntimeError: A job of the group fails again and again.
        """
        rows = group_df.to_dict("records") if hasattr(group_df, "to_dict") else group_df
        names = ("start_time", "end_time", "runtime_ratio")
        group = [(float(row[names[0]]), float(row[names[1]]), float(row[names[2]])) for row in rows]
        return [entry for entry, _ in self.play_group(job, group, beta_knob, eta_knob)]

    def play_group(
        self,
        job: Job,
        group: Iterable[tuple[float, float, float]],
        beta_knob: float,
        eta_knob: float,
    ) -> list[tuple[HistoryEntry, float]]:
        """Like `simulate_one_alibaba_group`; yields each run with its runtime_ratio.

        Args:
            group: The group's jobs (start_time, end_time, runtime_ratio), by start.
        """
        play = _Group(self, job, beta_knob, eta_knob)
        for start, end, ratio in group:
            play.finish_until(start)
            play.submit(start, end, ratio, retries=0)
        play.finish_until(math.inf)
        return play.history


class _Play:
    """A job being simulated: its copies of the policies, its tables, its random state."""

    def __init__(self, simulator: Simulator, job: Job, eta_knob: float) -> None:
        if not 0 <= eta_knob <= 1:
            raise ValueError(f"eta_knob must be between 0 and 1, not {eta_knob:g}")
        self.job = job
        self.eta = eta_knob
        self.bso = deepcopy(simulator.bso)
        self.plo = deepcopy(simulator.plo)
        self.max_power = simulator.measurements.max_power
        self._tables = simulator.measurements.of(job)
        self._rng = np.random.default_rng(simulator.seed)
        self._max_limit = {size: max(table.power.limits) for size, table in self._tables.items()}
        self.bso.register_job(job, list(self._tables))

    def train(self, batch_size: int, cost_bound: float) -> tuple[Run, HistoryEntry]:
        """Draws a measured run, and stops it before it costs more than the
        bound. It has no epochs if the bound is below the first one's cost."""
        table = self._tables[batch_size]
        limit, profiled = self._power_limit(batch_size)
        targets = self._targets(table, batch_size)
        power = table.power
        at = power.limits.index(limit)
        epoch_energy, epoch_time = (
            float(power.energy_per_epoch[at]),
            float(power.time_per_epoch[at]),
        )
        target_epoch = float(targets[self._rng.choice(len(targets), size=1, replace=False)[0]])
        most: float = self.job.max_epochs
        if not math.isinf(cost_bound):
            highest = self._max_limit[batch_size]
            epoch_cost = zeus_cost(epoch_energy, epoch_time, self.eta, highest)
            most = min(cost_bound // epoch_cost, self.job.max_epochs)
        converged = target_epoch <= most  # never for NaN
        epochs = target_epoch if converged else most
        if most == 0:
            energy = time = overhead = 0.0
        elif profiled:
            # The first epoch is divided among all limits.
            n = len(targets)
            first_energy = float(np.tile(power.energy_per_epoch, n).mean())
            first_time = float(np.tile(power.time_per_epoch, n).mean())
            energy = first_energy + epoch_energy * (epochs - 1)
            time = first_time + epoch_time * (epochs - 1)
            overhead = self._cost(first_energy - epoch_energy, first_time - epoch_time)
        else:
            energy, time, overhead = epoch_energy * epochs, epoch_time * epochs, 0.0
        run = Run(
            batch_size,
            self._cost(energy, time),
            converged,
            int(epochs),
            overhead,
            None if math.isinf(cost_bound) else cost_bound,
            stopped_by_cost=not converged and most < self.job.max_epochs,
            utilization=float(power.average_power[at]) / self._max_limit[batch_size],
        )
        return run, HistoryEntry(batch_size, limit, energy, converged, time)

    def _cost(self, energy: float, time: float) -> float:
        return zeus_cost(energy, time, self.eta, self.max_power)

    def _targets(self, table: BatchSizeTable, batch_size: int) -> np.ndarray[Any, Any]:
        try:
            return table.target_epochs[self.job.target_metric]
        except KeyError:
            known = ", ".join(str(target) for target in sorted(table.target_epochs))
            raise ValueError(
                f"batch size {batch_size} of {self.job} was not measured with target "
                f"{self.job.target_metric}; measured: {known}"
            ) from None

    def _power_limit(self, batch_size: int) -> tuple[int, bool]:
        """Returns the limit to train at, and whether it is profiled in this run."""
        limit = self.plo.predict(self.job, batch_size)
        if limit is not None:
            return limit, False
        power = self._tables[batch_size].power
        epochs = zip(power.limits, power.energy_per_epoch, power.time_per_epoch, strict=True)
        for limit, energy, time in sorted(epochs, key=lambda one: one[0], reverse=True):
            cost = zeus_cost(float(energy), float(time), self.eta, self._max_limit[batch_size])
            self.plo.observe(self.job, batch_size, limit, cost)
        limit = self.plo.predict(self.job, batch_size)
        assert limit is not None, "all limits were profiled"
        return limit, True


@dataclass(frozen=True)
class _InFlight:
    """A run in progress; only the simulator knows how it will end."""

    start: float
    end: float
    ratio: float
    run: Run
    entry: HistoryEntry
    retries: int


class _Group(_Play):
    """A group being simulated."""

    def __init__(self, simulator: Simulator, job: Job, beta_knob: float, eta_knob: float) -> None:
        super().__init__(simulator, job, eta_knob)
        self.history: list[tuple[HistoryEntry, float]] = []
        self._runs = Runs(self.bso, job, beta_knob)
        self._in_flight: list[_InFlight] = []

    def submit(self, start: float, end: float, ratio: float, retries: int) -> None:
        """A job begins."""
        if retries > MOST_RETRIES:
            raise RuntimeError(
                f"{MOST_RETRIES} runs of one job of {self.job} in a row did not reach the target; "
                "check the target and max_epochs, or take a larger beta_knob"
            )
        sizes = [job.run.batch_size for job in self._in_flight]
        begun = self._runs.next(sizes)
        run, entry = self.train(begun.batch_size, begun.cost_bound)
        self._in_flight.append(_InFlight(start, end, ratio, run, entry, retries))

    def finish_until(self, now: float) -> None:
        """Ends the runs that end by then, in that order; failed ones restart at their end."""
        while self._in_flight:
            first = min(self._in_flight, key=lambda job: job.end)
            if first.end > now:
                return
            self._in_flight.remove(first)
            self._finish(first)

    def _finish(self, job: _InFlight) -> None:
        self._runs.observe(job.run)
        if job.run.epochs:
            energy, time = job.entry.energy * job.ratio, job.entry.time * job.ratio
            self.history.append((replace(job.entry, energy=energy, time=time), job.ratio))
        if not job.run.converged:
            # Assumed to last as long as the run before.
            self.submit(job.end, job.end + (job.end - job.start), job.ratio, job.retries + 1)

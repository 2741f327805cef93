"""Measured runs as tables: epochs to the target, and time and power of an epoch by power limit.

Both tables are CSV (plain or compressed) or Parquet files, or pandas.DataFrames, of these columns:

- training runs: dataset, network, batch_size, optimizer, target_metric, target_epoch (empty where
  the run never reached the target), and run, its number, by which a run that is there twice counts
  once (may be missing);
- power: dataset, network, batch_size, optimizer, power_limit (W), time_per_epoch (s),
  average_power (W).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from zeus.job import Job
from zeus.utils.metric import zeus_cost
from zeus_common.tables import Row, TableError, Text, Watts, read

Count = Annotated[int, Field(gt=0, description="a whole number above 0")]


class TrainRow(NamedTuple):
    """A training run."""

    dataset: Text
    network: Text
    optimizer: Text
    batch_size: Count
    target_metric: float
    target_epoch: Count | None
    run: str = ""


class PowerRow(NamedTuple):
    """Epochs under a power limit."""

    dataset: Text
    network: Text
    optimizer: Text
    batch_size: Count
    power_limit: Annotated[int, Field(ge=1, le=20_000, description="whole W, from 1 to 20000")]
    time_per_epoch: Annotated[float, Field(gt=0, description="a time in s, above 0")]
    average_power: Watts


Table = str | Path | Any
"""Path of a CSV file, or a pandas.DataFrame."""

Workload = tuple[str, str, str]
"""Data set, network and optimizer."""


@dataclass(frozen=True)
class PowerTable:
    """Epochs of one batch size, by power limit in the table's order.

    Attributes:
        limits: Power limits, W.
        time_per_epoch: Seconds, shape (limits,).
        average_power: W, shape (limits,).
        energy_per_epoch: J, shape (limits,).
    """

    limits: tuple[int, ...]
    time_per_epoch: NDArray[np.float64]
    average_power: NDArray[np.float64]
    energy_per_epoch: NDArray[np.float64]


@dataclass(frozen=True)
class BatchSizeTable:
    """Measurements of one batch size.

    Attributes:
        target_epochs: For each target metric, epochs that each run took to reach it; NaN for never.
    """

    power: PowerTable
    target_epochs: Mapping[float, NDArray[np.float64]]


@dataclass(frozen=True)
class Expected:
    """The mean recurrence, from its first run to the one that reaches the target, whose runs all
    have the same batch size and power limit.

    Attributes:
        power_limit: Their power limit, W.
        energy: Energy, J.
        time: Time, s.
        cost: Energy-time cost, J.
    """

    batch_size: int
    power_limit: int
    energy: float
    time: float
    cost: float


class Measurements:
    """Measurements of workloads on one GPU: only sizes that are in both tables.

    Raises:
        TableError: A table cannot be read, lacks a column, or has a value that is not possible; the
            message says where.
    """

    def __init__(self, summary_train: Table, summary_power: Table) -> None:
        power = _power(summary_power)
        self._workloads: dict[Workload, dict[int, BatchSizeTable]] = {}
        for (*workload, batch_size), epochs in _target_epochs(summary_train).items():
            key = (*workload, batch_size)
            if key in power:
                sizes = self._workloads.setdefault((workload[0], workload[1], workload[2]), {})
                sizes[batch_size] = BatchSizeTable(power[key], epochs)
        if not self._workloads:
            raise ValueError(
                "no batch size of any workload is in both tables; both must name data set, "
                "network, optimizer and batch size alike"
            )
        self.max_power = max(
            limit
            for sizes in self._workloads.values()
            for table in sizes.values()
            for limit in table.power.limits
        )
        """Highest power limit of all workloads, W."""

    @property
    def workloads(self) -> list[Workload]:
        """Data set, network and optimizer of all workloads."""
        return list(self._workloads)

    def of(self, job: Job) -> dict[int, BatchSizeTable]:
        """Returns the measurements of a job's workload, by batch size in ascending order.

        Raises:
            ValueError: There are none.
        """
        key = (job.dataset, job.network, job.optimizer)
        if key not in self._workloads:
            known = "; ".join(", ".join(workload) for workload in self._workloads)
            raise ValueError(f"nothing was measured of {', '.join(key)}; there are: {known}")
        return dict(sorted(self._workloads[key].items()))

    def expected(self, job: Job, eta_knob: float) -> list[Expected]:
        """Returns all combinations of batch size and power limit, without sizes of which no run
        reached the target. Policies do not know them. A run that does not reach the target takes
        all epochs, and another one follows.

        Raises:
            ValueError: There are no measurements of the job.
        """
        rows = []
        for batch_size, table in self.of(job).items():
            epochs = _epochs(table, job)
            if epochs is None:
                continue
            power = table.power
            for limit, joules, seconds in zip(
                power.limits, power.energy_per_epoch, power.time_per_epoch, strict=True
            ):
                energy, time = epochs * float(joules), epochs * float(seconds)
                cost = zeus_cost(energy, time, eta_knob, self.max_power)
                rows.append(Expected(batch_size, limit, energy, time, cost))
        return rows

    def best(self, job: Job, eta_knob: float) -> Expected:
        """Returns the batch size and power limit of the lowest expected cost.

        Raises:
            ValueError: There are no measurements of the job, or no run reached the target.
        """
        rows = self.expected(job, eta_knob)
        if not rows:
            raise ValueError(f"no measured run of {job} reached the target")
        return min(rows, key=lambda one: one.cost)

    def usual(self, job: Job, eta_knob: float) -> Expected:
        """Returns the baseline: the default batch size at the highest power limit.

        Raises:
            ValueError: There are no measurements of that, or no run reached the target.
        """
        rows = [one for one in self.expected(job, eta_knob) if one.batch_size == job.default_bs]
        if not rows:
            raise ValueError(
                f"no measured run of {job} with the default batch size {job.default_bs} reached "
                "the target; give another default, or another target"
            )
        return max(rows, key=lambda one: one.power_limit)


def _epochs(table: BatchSizeTable, job: Job) -> float | None:
    """Epochs of a recurrence; None: the target is out of reach."""
    runs = [float(epochs) for epochs in table.target_epochs.get(job.target_metric, ())]
    reached = [epochs for epochs in runs if epochs <= job.max_epochs]  # not NaN
    if not reached:
        return None
    failures = (len(runs) - len(reached)) / len(reached)
    return sum(reached) / len(reached) + failures * job.max_epochs


_Key = tuple[str, str, str, int]


def _read(table: Table, row: Callable[..., Row]) -> Iterator[tuple[str, Row]]:
    source = table if isinstance(table, (str, Path)) else table.to_dict("list")
    rows = list(read(source, row))
    if not rows:
        raise TableError(f"{table if isinstance(table, (str, Path)) else 'the table'} has no rows")
    return iter(rows)


def _power(table: Table) -> dict[_Key, PowerTable]:
    groups: dict[_Key, dict[int, PowerRow]] = {}
    for place, row in _read(table, PowerRow):
        if groups.setdefault(row[:4], {}).setdefault(row.power_limit, row) != row:
            raise TableError(
                f"{place}: another row has other figures for batch size {row.batch_size} at "
                f"{row.power_limit} W; leave one of them out"
            )
    tables = {}
    for key, by_limit in groups.items():
        time = np.array([row.time_per_epoch for row in by_limit.values()])
        power = np.array([row.average_power for row in by_limit.values()])
        tables[key] = PowerTable(tuple(by_limit), time, power, time * power)
    return tables


def _target_epochs(table: Table) -> dict[_Key, dict[float, NDArray[np.float64]]]:
    epochs_by_key: dict[_Key, dict[float, list[float]]] = {}
    runs: dict[tuple[object, ...], TrainRow] = {}
    for place, row in _read(table, TrainRow):
        known = runs.setdefault((row[:5], row.run or place), row)
        if known != row:
            raise TableError(
                f"{place}: another row has another target_epoch for run {row.run} of batch size "
                f"{row.batch_size} with target_metric {row.target_metric:g}; leave one of them out"
            )
        if known is not row:
            continue
        epochs = epochs_by_key.setdefault(row[:4], {}).setdefault(row.target_metric, [])
        epochs.append(math.nan if row.target_epoch is None else row.target_epoch)
    return {
        key: {target: np.array(epochs, np.float64) for target, epochs in targets.items()}
        for key, targets in epochs_by_key.items()
    }

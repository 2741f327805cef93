"""Measured runs as tables: epochs to the target, and time and power of an epoch by power limit.

Both tables are CSV files, which may be compressed (.gz, .xz), or pandas.DataFrames, of these
columns:

- training runs: dataset, network, batch_size, optimizer, run, target_metric, target_epoch (empty
  where the run never reached the target);
- power: dataset, network, batch_size, optimizer, power_limit (W), time_per_epoch (s),
  average_power (W).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeus.job import Job
from zeus_ipc.tables import records

TRAIN_COLUMNS = ("dataset", "network", "batch_size", "optimizer", "target_metric", "target_epoch")
POWER_COLUMNS = (
    "dataset",
    "network",
    "batch_size",
    "optimizer",
    "power_limit",
    "time_per_epoch",
    "average_power",
)
_NUMBERS = ("target_metric", "target_epoch", "time_per_epoch", "average_power")
_INTEGERS = ("batch_size", "power_limit")

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
        power: By power limit.
        target_epochs: For each target metric, epochs that each run took to reach it; NaN for never.
    """

    power: PowerTable
    target_epochs: Mapping[float, NDArray[np.float64]]


class Measurements:
    """Measurements of workloads on one GPU: only sizes that are in both tables.

    Args:
        summary_train: Training runs.
        summary_power: Power.

    Raises:
        ValueError: A table lacks a column, or has a value that is not a number; the message says
            where.
        FileNotFoundError: There is no such file.
    """

    def __init__(self, summary_train: Table, summary_power: Table) -> None:
        train = _grouped(_rows(summary_train, TRAIN_COLUMNS))
        power = _grouped(_rows(summary_power, POWER_COLUMNS))
        self._workloads: dict[Workload, dict[int, BatchSizeTable]] = {}
        for key, rows in train.items():
            if key not in power:
                continue
            dataset, network, optimizer, batch_size = key
            sizes = self._workloads.setdefault((dataset, network, optimizer), {})
            sizes[batch_size] = BatchSizeTable(_power(power[key]), _target_epochs(rows))
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


def _rows(table: Table, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    if isinstance(table, (str, Path)):
        rows: list[dict[str, Any]] = [dict(row) for row in records(table)]
        where = str(table)
    else:
        rows = table.to_dict("records")
        where = "the table"
    if not rows:
        raise ValueError(f"{where} has no rows")
    missing = [column for column in columns if column not in rows[0]]
    if missing:
        raise ValueError(f"{where} has no column {', '.join(missing)}")
    for number, row in enumerate(rows, start=2):
        for column in columns:
            try:
                if column in _INTEGERS:
                    row[column] = int(row[column])
                elif column in _NUMBERS:
                    row[column] = _number(row[column])
            except (TypeError, ValueError):
                raise ValueError(
                    f"{where}, line {number}: {column} is {row[column]!r}, not a number"
                ) from None
    return rows


def _number(value: Any) -> float:
    return math.nan if value == "" else float(value)


def _grouped(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str, int], list[dict[str, Any]]]:
    groups: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        key = (row["dataset"], row["network"], row["optimizer"], row["batch_size"])
        groups.setdefault(key, []).append(row)
    return groups


def _power(rows: list[dict[str, Any]]) -> PowerTable:
    time = np.array([row["time_per_epoch"] for row in rows])
    power = np.array([row["average_power"] for row in rows])
    return PowerTable(tuple(row["power_limit"] for row in rows), time, power, time * power)


def _target_epochs(rows: list[dict[str, Any]]) -> dict[float, NDArray[np.float64]]:
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(row["target_metric"], []).append(row["target_epoch"])
    return {target: np.array(epochs) for target, epochs in found.items()}

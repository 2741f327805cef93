"""Simulated training runs as rows: written to CSV or Parquet, and read back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from pydantic import Field

from zeus_common.tables import Amount, kinds, read, write


@dataclass(frozen=True, slots=True)
class RunRow:
    """One training run.

    Attributes:
        name: Name of the simulated job; in a cluster, of its group.
        policy: The policy that chose the batch sizes.
        gpu: The GPU that it ran on.
        dataset: Name of the data set.
        network: Name of the network.
        optimizer: Name of the optimizer.
        eta_knob: 1 counts energy only, 0 time only.
        beta_knob: Runs are stopped at this multiple of the lowest cost.
        seed: Seed of the policy and the simulator.
        run: From 1, in each job.
        recurrence: Number of the recurrence, from 1. It ends with a run that reaches the target.
        batch_size: Its batch size.
        power_limit: Its power limit, W; None if it was found during the run.
        energy: Energy, J.
        time: Time, s.
        cost: Energy-time cost, J (`zeus.utils.metric.zeus_cost`).
        reached: Whether it reached the target.
        best_cost: Expected cost of such a recurrence with the batch size that is best for it, J.
        default_energy: Expected energy of such a recurrence with the default batch size at the
            highest power limit, J.
        default_time: Expected time of the same, s.
        default_cost: Expected cost of the same, J.
    """

    name: str
    policy: str
    gpu: str
    dataset: str
    network: str
    optimizer: str
    eta_knob: Amount
    beta_knob: Annotated[float, Field(gt=0, allow_inf_nan=True)]
    seed: int
    run: int
    recurrence: int
    batch_size: int
    power_limit: int | None
    energy: Amount
    time: Amount
    cost: Amount
    reached: bool
    best_cost: Amount
    default_energy: Amount
    default_time: Amount
    default_cost: Amount


COLUMNS = tuple(field.name for field in fields(RunRow))


@dataclass(frozen=True)
class Series:
    """Results of one simulated job, by recurrence.

    Attributes:
        runs: Its runs.
        costs: Cost of each recurrence, all its runs together, J.
        best_costs: Expected cost of each with the best batch size, J.
    """

    runs: tuple[RunRow, ...]
    costs: tuple[float, ...]
    best_costs: tuple[float, ...]

    @property
    def relative_costs(self) -> list[float]:
        """Cost of each recurrence, relative to the expected cost of the best batch size."""
        pairs = zip(self.costs, self.best_costs, strict=True)
        return [cost / best if best else 1.0 for cost, best in pairs]

    @property
    def regrets(self) -> list[float]:
        """Cumulative regret: the excess cost of all recurrences so far over the best ones.

        The unit is the expected cost of a recurrence with the best batch size.
        """
        return list(accumulate(cost - 1 for cost in self.relative_costs))


def series(rows: Iterable[RunRow]) -> list[Series]:
    """Groups rows by simulated job, in the order of the rows. A job is identified by name, policy,
    GPU, knobs and seed.
    """
    jobs: dict[tuple[object, ...], list[RunRow]] = {}
    for row in rows:
        key = (row.name, row.policy, row.gpu, row.dataset, row.network, row.optimizer)
        jobs.setdefault((*key, row.eta_knob, row.beta_knob, row.seed), []).append(row)
    return [_one_series(runs) for runs in jobs.values()]


def _one_series(runs: list[RunRow]) -> Series:
    costs: dict[int, float] = {}
    best: dict[int, float] = {}
    for row in runs:
        costs[row.recurrence] = costs.get(row.recurrence, 0.0) + row.cost
        best[row.recurrence] = row.best_cost
    order = sorted(costs)
    return Series(
        tuple(sorted(runs, key=lambda row: row.run)),
        tuple(costs[number] for number in order),
        tuple(best[number] for number in order),
    )


def write_rows(rows: Iterable[RunRow], path: str | os.PathLike[str]) -> None:
    """Writes rows; see `zeus_common.tables.write`."""
    write(Path(path), kinds(RunRow), map(astuple, rows))


def read_rows(path: str | os.PathLike[str]) -> list[RunRow]:
    """Reads what `write_rows` wrote; see `zeus_common.tables.read`."""
    return [row for _, row in read(path, RunRow)]

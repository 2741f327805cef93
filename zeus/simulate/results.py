"""Simulated training runs as rows: written to CSV or Parquet, and read back."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

from zeus.utils.lazy import needed
from zeus_ipc import tables


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
    eta_knob: float
    beta_knob: float
    seed: int
    run: int
    recurrence: int
    batch_size: int
    power_limit: int | None
    energy: float
    time: float
    cost: float
    reached: bool
    best_cost: float
    default_energy: float
    default_time: float
    default_cost: float


_KINDS = {one.name: str(one.type) for one in fields(RunRow)}
COLUMNS = tuple(_KINDS)
_OF_TEXT: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "int | None": lambda text: int(text) if text else None,
    "float": float,
    "bool": {"True": True, "False": False}.__getitem__,
}


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
    return [_one_series(found) for found in jobs.values()]


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
    """Writes rows: Parquet if the path ends with `.parquet`, else CSV.

    Raises:
        ImportError: Parquet needs pyarrow.
        OSError: The file cannot be written.
    """
    target = Path(path)
    if target.suffix == ".parquet":
        pyarrow, parquet = _pyarrow()
        types = {"str": "string", "float": "float64", "bool": "bool_"}
        schema = [(n, getattr(pyarrow, types.get(kind, "int64"))()) for n, kind in _KINDS.items()]
        table = pyarrow.Table.from_pylist(
            [asdict(row) for row in rows], schema=pyarrow.schema(schema)
        )
        parquet.write_table(table, target, compression="zstd")
        return
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_rows(path: str | os.PathLike[str]) -> list[RunRow]:
    """Reads what `write_rows` wrote.

    Raises:
        ImportError: Parquet needs pyarrow.
        OSError: The file cannot be read.
        ValueError: It is not such a file; the message says where.
    """
    source = Path(path)
    if source.suffix == ".parquet":
        return list(_of_parquet(source))
    _check_columns(source, next(tables.rows(source), ()))
    rows = enumerate(tables.records(source), start=2)
    return [_of_texts(row, f"{source}, row {number}") for number, row in rows]


def _of_parquet(path: Path) -> Iterator[RunRow]:
    pyarrow, parquet = _pyarrow()
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file ({str(error).splitlines()[0]})") from None
    _check_columns(path, table.column_names)
    for row in table.select(list(COLUMNS)).to_pylist():
        yield RunRow(**row)


def _of_texts(row: Mapping[str, str], place: str) -> RunRow:
    values: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        try:
            values[name] = _OF_TEXT[kind](row[name])
        except (KeyError, ValueError):
            raise ValueError(f"{place}: {name} cannot be {row[name]!r}") from None
    return RunRow(**values)


def _check_columns(path: Path, found: Sequence[str]) -> None:
    missing = [name for name in COLUMNS if name not in found]
    if missing:
        raise ValueError(
            f"{path} holds no simulated runs: it has no column {', '.join(missing)}; give a file "
            "that a simulation wrote with --output"
        )


def _pyarrow() -> tuple[Any, Any]:
    what = "a Parquet file"
    return needed("pyarrow", what, "parquet"), needed("pyarrow.parquet", what, "parquet")

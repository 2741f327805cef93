"""Expected time, energy and cost of a recurrence whose runs all have the same batch size and power
limit."""

from __future__ import annotations

from dataclasses import dataclass

from zeus.job import Job
from zeus.simulate.tables import BatchSizeTable, Measurements
from zeus.utils.metric import zeus_cost


@dataclass(frozen=True)
class Expected:
    """The mean recurrence, from its first run to the one that reaches the target.

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


def all_expected(measurements: Measurements, job: Job, eta_knob: float) -> list[Expected]:
    """Returns all combinations of batch size and power limit, without sizes of which no run reached
    the target. Policies do not know them. A run that does not reach the target takes all epochs,
    and another one follows.

    Raises:
        ValueError: There are no measurements of the job.
    """
    found = []
    for batch_size, table in measurements.of(job).items():
        epochs = _epochs(table, job)
        if epochs is None:
            continue
        power = table.power
        for limit, joules, seconds in zip(
            power.limits, power.energy_per_epoch, power.time_per_epoch, strict=True
        ):
            energy, time = epochs * float(joules), epochs * float(seconds)
            cost = zeus_cost(energy, time, eta_knob, measurements.max_power)
            found.append(Expected(batch_size, limit, energy, time, cost))
    return found


def best(measurements: Measurements, job: Job, eta_knob: float) -> Expected:
    """Returns the batch size and power limit of the lowest expected cost.

    Raises:
        ValueError: There are no measurements of the job, or no run reached the target.
    """
    found = all_expected(measurements, job, eta_knob)
    if not found:
        raise ValueError(f"no measured run of {job} reached the target")
    return min(found, key=lambda one: one.cost)


def usual(measurements: Measurements, job: Job, eta_knob: float) -> Expected:
    """Returns the baseline: the default batch size at the highest power limit.

    Raises:
        ValueError: There are no measurements of that, or no run reached the target.
    """
    found = [
        one for one in all_expected(measurements, job, eta_knob) if one.batch_size == job.default_bs
    ]
    if not found:
        raise ValueError(
            f"no measured run of {job} with the default batch size {job.default_bs} reached the "
            "target; give another default, or another target"
        )
    return max(found, key=lambda one: one.power_limit)


def _epochs(table: BatchSizeTable, job: Job) -> float | None:
    """Epochs of a recurrence; None: the target is out of reach."""
    runs = [float(epochs) for epochs in table.target_epochs.get(job.target_metric, ())]
    reached = [epochs for epochs in runs if epochs <= job.max_epochs]  # not NaN
    if not reached:
        return None
    failures = (len(runs) - len(reached)) / len(reached)
    return sum(reached) / len(reached) + failures * job.max_epochs

"""What a run has cost, what its next epoch will cost, and whether to train it.

Pure: an account is told what each epoch took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeus.policy.stopping import LearningCurve, Verdict, judge
from zeus.run.files import TrainResult
from zeus.utils.metric import zeus_cost


@dataclass(frozen=True)
class Spent:
    """Energy, J, and time, s."""

    energy: float = 0.0
    time: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.energy + other.energy, self.time + other.time)

    def over(self, other: Spent) -> Spent:
        """What it is more than another, not less than nothing."""
        return Spent(max(0.0, self.energy - other.energy), max(0.0, self.time - other.time))


@dataclass(frozen=True)
class Reading:
    """What training, or evaluating, does at a power limit.

    Attributes:
        power: Mean power of all GPUs together, W.
        throughput: Iterations a second.
    """

    power: float
    throughput: float


@dataclass(frozen=True)
class Epoch:
    """What an epoch took.

    Attributes:
        total: From its beginning to the next one's: training, evaluation and what else there is.
        train: Training alone.
        iterations: Iterations of training.
        settled: Whether all of it ran at the limit that later epochs will have.
    """

    total: Spent
    train: Spent
    iterations: int
    settled: bool


class Account:
    """The costs of one run.

    Args:
        eta_knob: 1 counts energy only, 0 time only.
        max_power: The highest limits of all GPUs together, W.
        max_epochs: The run is given up after so many epochs.
        cost_thresh: Cost that no epoch is begun for, J.

    Attributes:
        epochs: What its epochs took.
    """

    def __init__(
        self, eta_knob: float, max_power: float, max_epochs: int, cost_thresh: float
    ) -> None:
        self.epochs: list[Epoch] = []
        self._eta = eta_knob
        self._max_power = max_power
        self._max_epochs = max_epochs
        self._cost_thresh = cost_thresh

    @property
    def spent(self) -> Spent:
        """All epochs together."""
        return sum((epoch.total for epoch in self.epochs), Spent())

    def cost(self, spent: Spent) -> float:
        """What that costs, J."""
        return zeus_cost(spent.energy, spent.time, self._eta, self._max_power)

    def next_epoch(self, reading: Reading | None) -> Spent | None:
        """What another epoch will take; None: none has been trained.

        Args:
            reading: What training does at the limit that it will have, if that is measured.
        """
        if not self.epochs:
            return None
        settled = [epoch.total for epoch in self.epochs if epoch.settled]
        if settled:
            return _mean(settled)
        if reading is None:
            return _mean([epoch.total for epoch in self.epochs])
        # The first epochs were spent on finding the limit: what they have besides training stays.
        last = self.epochs[-1]
        seconds = last.iterations / reading.throughput
        return last.total.over(last.train) + Spent(reading.power * seconds, seconds)

    def judge(
        self,
        reached: bool,
        profiling: bool,
        reading: Reading | None,
        curve: LearningCurve | None = None,
    ) -> Verdict:
        """Whether to train another epoch.

        Args:
            reached: Whether the target is reached: then the run is a success whatever it cost.
            profiling: Whether limits are still being measured, which no cost interrupts.
            reading: See `next_epoch`.
            curve: The learning curve, where it may end the run.
        """
        more = None if profiling else self.next_epoch(reading)
        return judge(
            reached=reached,
            epochs=len(self.epochs),
            max_epochs=self._max_epochs,
            next_cost=None if more is None else self.cost(self.spent + more),
            cost_bound=self._cost_thresh,
            cost=self.cost(self.spent),
            curve=curve,
        )

    def result(self, verdict: Verdict, reading: Reading | None) -> TrainResult:
        """What is written of the run when it ends."""
        spent = self.spent
        return TrainResult(
            energy=spent.energy,
            time=spent.time,
            cost=self.cost(spent),
            num_epochs=len(self.epochs),
            reached=verdict.reached,
            overhead=self._overhead(reading),
            stopped_by_cost=verdict.by_cost,
            stopped_by_curve=verdict.by_curve,
            next_cost=verdict.next_cost,
            max_power=self._max_power,
        )

    def _overhead(self, reading: Reading | None) -> float:
        """What the run cost more than it would have at the limit it has now."""
        searched = [epoch for epoch in self.epochs if not epoch.settled]
        settled = self.next_epoch(reading)
        if settled is None or not searched:
            return 0.0
        extra = sum(self.cost(epoch.total) - self.cost(settled) for epoch in searched)
        return min(max(0.0, extra), self.cost(self.spent))


def _mean(parts: Sequence[Spent]) -> Spent:
    total = sum(parts, Spent())
    return Spent(total.energy / len(parts), total.time / len(parts))

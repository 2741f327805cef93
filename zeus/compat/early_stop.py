"""`EarlyStopController`: decides when training should end."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from zeus.callback import Callback
from zeus.policy.recurrence import judge, reaches
from zeus.utils.metric import zeus_cost

if TYPE_CHECKING:
    from zeus.monitor import ZeusMonitor

_WINDOW = "__EarlyStopController_epoch"


class EarlyStopController(Callback):
    """Ends training at a number of epochs, at a cost (J), or at a metric, whichever comes first.

    Raises:
        ValueError: An argument is not positive, or one of two is missing.

    Attributes:
        should_training_stop: Whether training should end; read it after `on_epoch_end` and
            `on_evaluate`.
    """

    def __init__(
        self,
        monitor: ZeusMonitor | None = None,
        eta_knob: float = 0.5,
        cost_threshold: float | None = None,
        max_epochs: int | None = None,
        target_metric: float | None = None,
        higher_is_better: bool | None = None,
    ) -> None:
        for name, value in (("max_epochs", max_epochs), ("cost_threshold", cost_threshold)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if (cost_threshold is None) != (monitor is None):
            raise ValueError("give cost_threshold and monitor together, or neither")
        if (target_metric is None) != (higher_is_better is None):
            raise ValueError("give target_metric and higher_is_better together, or neither")
        self.monitor = monitor
        self.eta_knob = eta_knob
        self.cost_threshold = cost_threshold
        self.max_epochs = max_epochs
        self.target_metric = target_metric
        self.higher_is_better = higher_is_better
        self.epochs_trained = 0
        self.epoch_costs: list[float] = []
        self.should_training_stop = False

    def on_epoch_begin(self) -> None:
        """Begins to measure an epoch."""
        if self.monitor is not None:
            self.monitor.begin_window(_WINDOW)

    def on_epoch_end(self) -> None:
        """Compares epochs and cost with their limits."""
        self.epochs_trained += 1
        next_cost = None
        if self.monitor is not None:
            self.epoch_costs.append(self._epoch_cost(self.monitor))
            # An epoch of unknown cost counts as the mean of the others; and one more is foreseen.
            known = [cost for cost in self.epoch_costs if not math.isnan(cost)]
            if known:
                next_cost = (len(self.epoch_costs) + 1) * sum(known) / len(known)
        self.should_training_stop |= judge(
            reached=False,
            epochs=self.epochs_trained,
            max_epochs=self.max_epochs or sys.maxsize,
            next_cost=next_cost,
            cost_bound=self.cost_threshold,
        ).stop

    def on_evaluate(self, metric: float) -> None:
        """Compares the metric with its target."""
        if self.target_metric is not None:
            higher = bool(self.higher_is_better)
            self.should_training_stop |= reaches(metric, self.target_metric, higher)

    def _epoch_cost(self, monitor: ZeusMonitor) -> float:
        epoch = monitor.end_window(_WINDOW)
        constraints = map(monitor.gpus.get_power_management_limit_constraints, monitor.gpu_indices)
        max_power_w = sum(highest_mw for _, highest_mw in constraints) / 1000
        return zeus_cost(epoch.total_energy, epoch.time, self.eta_knob, max_power_w)

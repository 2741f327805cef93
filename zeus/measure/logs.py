"""Logging of figures to loggers, through their standard interfaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeus.utils.warn import warn

Log = Callable[[dict[str, float], int], object]
"""A function of figures by name, and the step."""


def as_log(target: Any) -> Log:
    """Returns a function that logs to a target.

    Args:
        target: A `SummaryWriter` of TensorBoard, a run of Weights & Biases (or `wandb`), `mlflow`
            (or its client's like), a Lightning logger, a function of figures and step, or None.

    Raises:
        TypeError: It is none of these.
    """
    if target is None:
        return lambda figures, step: None
    if hasattr(target, "add_scalar"):  # TensorBoard
        return lambda figures, step: [
            target.add_scalar(name, value, step) for name, value in figures.items()
        ]
    if hasattr(target, "log_metrics"):  # MLflow, Lightning
        return lambda figures, step: target.log_metrics(figures, step=step)
    if hasattr(target, "log"):  # Weights & Biases
        return lambda figures, step: target.log(figures, step=step)
    if callable(target):
        log: Log = target
        return log
    raise TypeError(
        f"log must be a SummaryWriter, a run of Weights & Biases, mlflow, or a function of figures "
        f"and step, not {target!r}"
    )


class Once:
    """Logs figures; an error ends only the logging, with one warning.

    Args:
        log: The target.
    """

    def __init__(self, log: Log) -> None:
        self._log: Log | None = log

    def __call__(self, figures: dict[str, float], step: int) -> None:
        """Log figures, if there are any."""
        if not figures or self._log is None:
            return
        try:
            self._log(figures, step)
        except Exception as error:  # noqa: BLE001 - a logger's, of which there are many
            self._log = None
            warn(f"Energy is measured but logged no more: {error!r}")

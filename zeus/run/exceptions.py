"""Exceptions of `ZeusDataLoader` and `ZeusMaster`."""

from __future__ import annotations

from zeus.exceptions import ZeusBaseError


class ZeusCostThresholdExceededError(ZeusBaseError):
    """A run was stopped: its next epoch would have cost too much. Its result is written.

    Attributes:
        time_consumed: Time of the run, s.
        energy_consumed: Energy of the run, J.
        cost: Cost of the run, J.
        next_cost: What it would have cost after another epoch, J.
        cost_thresh: Cost at which runs are stopped, J.
    """

    def __init__(
        self,
        time_consumed: float,
        energy_consumed: float,
        cost: float,
        next_cost: float,
        cost_thresh: float,
    ) -> None:
        super().__init__(
            f"training was given up: another epoch would take its cost from {cost:.2f} J to "
            f"{next_cost:.2f} J, and {cost_thresh:.2f} J is too much (until now "
            f"{time_consumed:.2f} s, {energy_consumed:.2f} J)"
        )
        self.time_consumed = time_consumed
        self.energy_consumed = energy_consumed
        self.cost = cost
        self.next_cost = next_cost
        self.cost_thresh = cost_thresh


class ScriptFailedError(RuntimeError):
    """A training script ended before it had a result.

    Attributes:
        out_of_memory: Whether GPU memory was too small.
    """

    def __init__(self, message: str, out_of_memory: bool = False) -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory

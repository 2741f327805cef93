"""The power limit of each batch size, profiled in its first run."""

from __future__ import annotations

from zeus.job import Job
from zeus.policy.interface import PowerLimitOptimizer
from zeus_ipc.overriding import override


class JITPowerLimitOptimizer(PowerLimitOptimizer):
    """Remembers for each batch size the power limit whose epoch cost least.

    Of equal costs the first counts; limits are profiled from the highest to the lowest.

    Args:
        verbose: Whether to print what is chosen.
    """

    def __init__(self, verbose: bool = True) -> None:
        self.verbose = verbose
        self.best_pl: dict[Job, dict[int, int]] = {}
        self.best_cost: dict[Job, dict[int, float]] = {}

    @property
    @override
    def name(self) -> str:
        return "JITPSO"

    @override
    def predict(self, job: Job, batch_size: int) -> int | None:
        limit = self.best_pl.get(job, {}).get(batch_size)
        if self.verbose:
            chosen = "has to be profiled" if limit is None else f"{limit} W"
            print(f"[{self.name}] {job} @ {batch_size}: power limit {chosen}")
        return limit

    @override
    def observe(self, job: Job, batch_size: int, power_limit: int, cost: float) -> None:
        costs = self.best_cost.setdefault(job, {})
        if batch_size not in costs or cost < costs[batch_size]:
            costs[batch_size] = cost
            self.best_pl.setdefault(job, {})[batch_size] = power_limit

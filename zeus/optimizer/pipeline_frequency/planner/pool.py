"""Plans found so far for one problem: each is the cheapest of those that are not slower."""

from __future__ import annotations

import numpy as np

from zeus.optimizer.pipeline_frequency.planner.problem import Floats, Ints, PipelineProblem, fits


class Pool:
    """Keeps every plan that no other plan beats, the fastest first."""

    def __init__(self, problem: PipelineProblem) -> None:
        self._problem = problem
        self._plans = np.zeros((problem.count, 0), dtype=np.int16)
        self.time_s: Floats = np.zeros(0)
        self.cost_j: Floats = np.zeros(0)

    def add(self, plans: Ints) -> None:
        """Adds those plans (instructions, plans) that may be run and that no other beats."""
        problem = self._problem
        plans = plans[:, problem.allowed(plans)]
        time_s = np.concatenate([self.time_s, problem.time(plans)])
        cost_j = np.concatenate([self.cost_j, problem.cost(plans)])
        rank = np.lexsort((cost_j, time_s))
        cheapest = np.minimum.accumulate(cost_j[rank])
        kept = rank[np.diff(cheapest, prepend=np.inf) < 0]
        kept = self._apart(kept, time_s)
        old, new = kept[kept < len(self.time_s)], kept[kept >= len(self.time_s)]
        both = [self._plans[:, old], plans[:, new - len(self.time_s)].astype(np.int16)]
        order = np.argsort(time_s[np.concatenate([old, new])], kind="stable")
        self._plans = np.concatenate(both, axis=1)[:, order]
        self.time_s, self.cost_j = time_s[kept], cost_j[kept]

    @staticmethod
    def _apart(kept: Ints, time_s: Floats) -> Ints:
        """Of plans whose times are one, the cheapest: the last of them."""
        apart: list[int] = []
        first_s = -np.inf
        for plan, plan_s in zip(kept.tolist(), time_s[kept].tolist(), strict=True):
            if apart and fits(plan_s, first_s):
                apart[-1] = plan
            else:
                apart.append(plan)
                first_s = plan_s
        return np.array(apart, dtype=np.intp)

    def plans(self, places: Ints | np.intp) -> Ints:
        """Plans (instructions, plans), or one of them."""
        return self._plans[:, places].astype(np.intp)

    def fitting(self, limit_s: float) -> int:
        """How many plans keep a deadline."""
        return int(np.count_nonzero(fits(self.time_s, limit_s)))

    def totals(self, limit_s: float, price_w: float) -> Floats:
        """What the plans within a deadline cost, J, with a price for a second."""
        fit = self.fitting(limit_s)
        return self.cost_j[:fit] + price_w * self.time_s[:fit]

    def best(self, limit_s: float, price_w: float = 0.0) -> Ints | None:
        """The plan within a deadline that costs least; None: none is that fast."""
        total_j = self.totals(limit_s, price_w)
        return self.plans(total_j.argmin()) if len(total_j) else None

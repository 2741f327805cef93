"""Policies by their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from zeus.policy.gp import EXPLORED_RUNS, GPBatchSizeOptimizer
from zeus.policy.interface import BatchSizeOptimizer
from zeus.policy.pruning import GTSBatchSizeOptimizer, PruningGTSBatchSizeOptimizer

POLICIES: dict[str, Callable[[int], BatchSizeOptimizer]] = {}
"""Your own policies by their names: each makes one with a seed."""


def make_policy(
    name: str = "gp",
    *,
    seed: int | None = None,
    window_size: int = 0,
    prior_mean: float = 0.0,
    prior_precision: float = 0.0,
    num_exploration: int = 2,
    num_pruning_rounds: int = 2,
    concurrency: bool = False,
    replay: bool = False,
    verbose: bool = False,
    explored_runs: int = EXPLORED_RUNS,
) -> BatchSizeOptimizer:
    """A policy.

    Args:
        name: `gp` (`GPBatchSizeOptimizer`), `pruning-gts` (`PruningGTSBatchSizeOptimizer`, the
            published one), `gts` (`GTSBatchSizeOptimizer`, without pruning), or one of `POLICIES`.
        seed: Of its draws; None for the policy's default.
        window_size: So many of each size's last runs count; 0 for all.
        prior_mean: Mean reward (negative cost, J) expected of a size; `pruning-gts` and `gts`.
        prior_precision: Its precision; 0 for nothing known; the same.
        num_exploration: Runs of each size before the first draw; the same.
        num_pruning_rounds: Rounds of the walk of `pruning-gts`.
        concurrency: Whether runs may end in another order than they were asked for.
        replay: Whether runs are observed that were not asked for just before: for who recomputes a
            policy from a log.
        verbose: Whether it prints what it chooses.
        explored_runs: For `gp`: after so many runs, sizes that have never reached the target are
            not chosen any more.

    Raises:
        ValueError: There is no policy of this name.
    """
    seed = 123456 if seed is None else seed
    policies: dict[str, Callable[[], BatchSizeOptimizer]] = {
        "gp": lambda: GPBatchSizeOptimizer(window_size, seed, verbose, explored_runs),
        "pruning-gts": lambda: PruningGTSBatchSizeOptimizer(
            prior_mean,
            prior_precision,
            window_size,
            concurrency,
            seed,
            verbose,
            num_pruning_rounds=num_pruning_rounds,
            num_exploration=num_exploration,
            replay=replay,
        ),
        "gts": lambda: GTSBatchSizeOptimizer(
            True, 0.0, prior_mean, prior_precision, num_exploration, seed, verbose, replay=replay
        ),
        **{own: partial(make, seed) for own, make in POLICIES.items()},
    }
    if name not in policies:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(policies)}")
    return policies[name]()

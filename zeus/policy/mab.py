"""A multi-armed bandit: Gaussian rewards of known precision, Thompson sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeus.utils.warn import warn

Array = NDArray[np.float64]


class GaussianTS:
    """Draws each arm's mean from what is believed of it, and takes the largest.

    Args:
        reward_precision: Precision (1 / variance) of an arm's rewards, of all arms or of each;
            infinite for rewards without noise.
        prior_mean: Mean reward expected of an arm.
        prior_precision: Precision of that; 0 for nothing known.
        num_exploration: Observations of each arm before the first draw.
        verbose: Whether to print what is drawn.

    Source: Thompson, "On the likelihood that one unknown probability exceeds another in view of
    the evidence of two samples", 1933; the conjugate prior is textbook.
    """

    name = "GaussianTS"

    def __init__(
        self,
        arms: list[int],
        reward_precision: list[float] | float,
        prior_mean: float = 0.0,
        prior_precision: float = 0.0,
        num_exploration: int = 1,
        seed: int = 123456,
        verbose: bool = True,
    ) -> None:
        self.arms = arms
        self.prior_mean = prior_mean
        self.prior_prec = prior_precision
        self.num_exploration = num_exploration
        self.verbose = verbose
        self.rng = np.random.default_rng(seed)
        precisions = (
            reward_precision
            if isinstance(reward_precision, list)
            else [reward_precision] * len(arms)
        )
        self.arm_reward_prec: dict[int, float] = dict(zip(arms, precisions, strict=True))
        self.arm_param_mean: dict[int, float] = dict.fromkeys(arms, prior_mean)
        self.arm_param_prec: dict[int, float] = dict.fromkeys(arms, prior_precision)
        self.arm_num_observations: dict[int, int] = dict.fromkeys(arms, 0)

    def fit(
        self, decisions: Sequence[int] | Any, rewards: Sequence[float] | Any, reset: bool
    ) -> None:
        """Learns from observations.

        Args:
            decisions: Arms that were chosen, shape (n,).
            rewards: What each brought, shape (n,).
            reset: Whether to forget what was learnt of every arm.
        """
        chosen = np.asarray(decisions)
        brought = np.asarray(rewards, dtype=float)
        for arm in self.arms:
            self.fit_arm(arm, brought[chosen == arm], reset)

    def fit_arm(self, arm: int, rewards: Array, reset: bool) -> None:
        """Learns from one arm's observations.

        Args:
            rewards: What it brought, shape (n,).
            reset: Whether to forget what was learnt of it.
        """
        if reset:
            self.arm_param_mean[arm] = self.prior_mean
            self.arm_param_prec[arm] = self.prior_prec
            self.arm_num_observations[arm] = 0
        n = len(rewards)
        if n == 0:
            return
        noise = self.arm_reward_prec[arm]
        if np.isinf(noise):
            self.arm_param_mean[arm] = float(rewards.mean())
            self.arm_param_prec[arm] = np.inf
        else:
            before = self.arm_param_prec[arm]
            after = before + n * noise
            total = before * self.arm_param_mean[arm] + noise * rewards.sum()
            self.arm_param_mean[arm] = float(total / after)
            self.arm_param_prec[arm] = float(after)
        self.arm_num_observations[arm] += n

    def predict(self) -> int:
        """The arm to choose: one seen too seldom, else that of the largest draw."""
        for arm in self.rng.choice(np.array(self.arms), len(self.arms), replace=False):
            if self.arm_num_observations[int(arm)] < self.num_exploration:
                if self.verbose:
                    print(f"[{self.name}] exploring {arm}")
                return int(arm)
        drawn = self.predict_expectations()
        if self.verbose:
            print(f"[{self.name}] drawn mean rewards: {drawn}")
        return max(drawn, key=lambda arm: drawn[arm])

    def predict_expectations(self) -> dict[int, float]:
        """A draw of each arm's mean reward."""
        drawn = {}
        for arm in self.arms:
            precision = self.arm_param_prec[arm]
            if precision == self.prior_prec:
                warn(f"arm {arm} is drawn without an observation")
            drawn[arm] = float(self.rng.normal(self.arm_param_mean[arm], deviation(precision)))
        return drawn


def deviation(precision: float) -> float:
    """Standard deviation of what has this precision."""
    return float(np.inf if precision == 0 else np.sqrt(1 / precision))


def precision_of(rewards: Array) -> float:
    """Precision of rewards by their own (population) variance; infinite where all are equal."""
    variance = float(np.var(rewards))
    return float("inf") if variance == 0 else float(np.reciprocal(variance))

"""Where the regret of invented jobs comes from, and how much knowing more would save.

`Informed` knows what no policy can know: how `recurring_held_out` makes jobs, and what an epoch of
each size costs. It samples jobs that the generator may have made and weights them by the runs so
far. How it chooses the next size and the bound of a run is as in `gp`. What it still loses is the
price of finding out which of these jobs it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from recurring_held_out import (
    BETA,
    KINDS,
    MAX_EPOCHS_OVER_USUAL,
    NOISE_SHARES,
    NOISES,
    RECURRENCES,
    USUAL_EPOCHS,
    HeldOut,
    jobs_of,
)
from recurring_plays import play, policy_of
from rich.table import Table

from zeus.job import Job
from zeus.policy.gp import most_informative
from zeus.policy.interface import BatchSizeOptimizer, Run

ndtr = np.vectorize(lambda z: 0.5 * math.erfc(-z / math.sqrt(2)))
"""The normal distribution function."""

INFORMED = "informed"
PARTS = (
    "first run",
    "new size, reached",
    "new size, missed",
    "known size, missed",
    "known, to 5 % worse",
    "known, over 5 % worse",
    "best size",
)
NEARLY_BEST = 1.05

_SAMPLES, _LOOKED_AT = 6000, 600
_DISCREPANCY = 0.05
"""No sample is exactly the job: each of its sizes departs from it by so much, in logarithms."""


class Informed(BatchSizeOptimizer):
    """Knows how jobs are made.

    Args:
        held: The job, of which only the above is used.
        seed: Of its samples.
    """

    name = INFORMED

    def __init__(self, held: HeldOut, seed: int) -> None:
        self._held = held
        self._rng = np.random.default_rng([seed, 31])
        self._reached: list[int] = []
        self._retry = False
        self._best_cost = math.inf

    def register_job(self, job: Job, batch_sizes: list[int]) -> None:
        held, rng = self._held, self._rng
        x = np.log2(np.array(held.sizes) / held.sizes[held.default])
        kinds = list(KINDS.values())
        made = [kinds[i % len(kinds)](x, held.default, rng) for i in range(_SAMPLES)]
        log_cost, reach = (np.array(part) for part in zip(*made, strict=True))
        self._reach = np.clip(reach, 0.0, 1.0)
        self._reach[self._reach < 0.1] = 0.0
        self._reach[:, held.default] = 1.0
        # Logarithm of the epochs at each size over those at the default.
        relative = log_cost - np.log(held.epoch_cost)
        self._relative = relative - relative[:, [held.default]]

    def predict(self, job: Job) -> int:
        held = self._held
        if not self._reached:
            return held.sizes[held.default]
        weights = np.exp(self._log_weights - self._log_weights.max())
        picked = self._rng.choice(_SAMPLES, _LOOKED_AT, p=weights / weights.sum())
        log_cost = self._log_epochs[picked] + np.log(held.epoch_cost)
        spread = np.sqrt(self._variance[picked] + self._noise[picked, None] ** 2)
        reach = self._reach[picked]
        expected = reach * np.exp(log_cost + spread**2 / 2)
        best = float(expected.mean(axis=0)[self._reached].min())
        for _ in range(3):  # what a rerun costs depends on what the best size costs
            z = (math.log(BETA * best) - log_cost) / spread
            paid = expected * ndtr(z - spread) + (1 - reach * ndtr(z)) * (BETA + 1) * best
            means = paid.mean(axis=0)
            best = float(means[self._reached].min())
        self._best_cost = best
        if self._retry:
            return held.sizes[min(self._reached, key=lambda at: float(means[at]))]
        return held.sizes[most_informative(paid / best)]

    def cost_bound(self, job: Job, beta_knob: float, failures: int) -> float:
        return beta_knob * self._best_cost * 1.5 ** max(0, failures - 1)

    def observe(
        self, job: Job, batch_size: int, cost: float, converged: bool | None = None
    ) -> None:
        raise TypeError("only runs that report their epochs are expected")

    def observe_run(self, job: Job, run: Run) -> None:
        at = self._held.sizes.index(run.batch_size)
        self._retry = not run.converged
        if not self._reached:
            self._begin(run.epochs)
        else:
            mean, variance = self._log_epochs[:, at], self._variance[:, at]
            spread = np.sqrt(variance + self._noise**2)
            upper = ndtr((math.log(run.epochs + 0.5) - mean) / spread)
            if run.converged:
                lower = ndtr((math.log(run.epochs - 0.5) - mean) / spread)
                likelihood = self._reach[:, at] * (upper - lower)
                gain = variance / spread**2
                self._log_epochs[:, at] += gain * (math.log(run.epochs) - mean)
                self._variance[:, at] *= 1 - gain
            else:
                likelihood = 1 - self._reach[:, at] * upper
            self._log_weights += np.log(np.maximum(likelihood, 1e-9))
        if run.converged and at not in self._reached:
            self._reached.append(at)

    def _begin(self, epochs: int) -> None:
        """After the first run, with the default."""
        rng, many = self._rng, 20 * _SAMPLES
        least, most = (self._held.max_epochs / over for over in reversed(MAX_EPOCHS_OVER_USUAL))
        usual = rng.uniform(max(USUAL_EPOCHS[0], 0.97 * least), min(USUAL_EPOCHS[1], most), many)
        noise = rng.choice(NOISES, many, p=NOISE_SHARES)
        upper, lower = (ndtr(np.log((epochs + off) / usual) / noise) for off in (0.5, -0.5))
        likelihood = (upper - lower) / usual
        chosen = rng.choice(many, _SAMPLES, p=likelihood / likelihood.sum())
        self._noise = noise[chosen]
        self._log_epochs = np.maximum(self._relative + np.log(usual[chosen])[:, None], 0.0)
        self._variance = np.full(self._log_epochs.shape, _DISCREPANCY**2)
        self._variance[:, self._held.default] = 0.0
        self._log_weights = np.zeros(_SAMPLES)


@dataclass(frozen=True)
class Regret:
    """R_N of a job, c*.

    Attributes:
        total: All of it; NaN if the job ended before its last recurrence.
        parts: How much of it is due to each of `PARTS`.
    """

    total: float
    parts: tuple[float, ...]


def play_parts(task: tuple[int, int, str, int]) -> Regret:
    """Plays an invented job; the arguments are those of `play_held_out`."""
    jobs_seed, number, name, seed = task
    held = jobs_of(jobs_seed)[number]
    policy = Informed(held, seed) if name == INFORMED else policy_of(name, seed)
    policy.register_job(held.job, list(held.sizes))
    trains = held.trainer(seed)
    runs: list[Run] = []

    def train(batch_size: int, cost_bound: float, recurrence: int) -> Run | None:
        run = trains(batch_size, cost_bound, recurrence)
        if run is not None:
            runs.append(run)
        return run

    costs = held.expected / held.expected.min()
    least = [float(held.expected.min())] * RECURRENCES
    found = play(policy, held.job, train, RECURRENCES, BETA, least)
    parts = dict.fromkeys(PARTS, 0.0)
    known: set[int] = set()
    for run in runs:
        cost = costs[held.sizes.index(run.batch_size)]
        if not known:
            part = PARTS[0]
        elif run.batch_size not in known:
            part = PARTS[1 if run.converged else 2]
        elif cost == 1:
            part = PARTS[6]
        elif not run.converged:
            part = PARTS[3]
        else:
            part = PARTS[4 if cost <= NEARLY_BEST else 5]
        parts[part] += run.cost / least[0] - run.converged
        known.add(run.batch_size)
    return Regret(math.nan if found.stuck else found.r_n, tuple(parts.values()))


def floor_table(found: dict[tuple[int, int, str, int], Regret]) -> Table:
    """Both policies, and what each loses where."""
    table = Table(title="where the regret R_N of invented jobs comes from, c*")
    table.add_column("policy, jobs", no_wrap=True)
    for head in ("jobs", "mean", "median", *PARTS):
        table.add_column(head, justify="right")
    for policy in ("gp", INFORMED):
        of_job: dict[tuple[int, int], list[Regret]] = {}
        for task, regret in found.items():
            if task[2] == policy and not math.isnan(regret.total):
                of_job.setdefault(task[:2], []).append(regret)
        rows = np.array(
            [np.mean([[one.total, *one.parts] for one in each], axis=0) for each in of_job.values()]
        )
        rows = rows[rows[:, 0].argsort()]
        fifth = len(rows) // 5
        for name, part in (("all", rows), ("middle fifth", rows[2 * fifth : -2 * fifth])):
            figures = [part[:, 0].mean(), np.median(part[:, 0]), *part[:, 1:].mean(axis=0)]
            texts = (f"{figure:.2f}" for figure in figures)
            table.add_row(f"{policy}, {name}", str(len(part)), *texts)
    return table

"""Simulates recurring jobs: measured ones, and synthetic ones that drift or have other shapes.

Regret is counted in c*, see `recurring.py`, which reports the results.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from recurring_held_out import (
    BETA,
    Grid,
    SuccessiveHalving,
    jobs_of,
)
from recurring_held_out import (
    RECURRENCES as HELD_OUT_RECURRENCES,
)
from rich.progress import track

from zeus.job import Job
from zeus.policy import JITPowerLimitOptimizer, make_policy
from zeus.policy.interface import BatchSizeOptimizer, Run
from zeus.policy.recurrence import Recurrences
from zeus.simulate import Simulator
from zeus.simulate.tables import Measurements
from zeus.simulate.workloads import GPUS, WORKLOADS, power_trace, train_trace
from zeus.utils.metric import zeus_cost
from zeus_common.tables import records

POLICIES = ("gp", "pruning-gts")
ALL_POLICIES = (*POLICIES, "grid", "successive halving")
RECURRENCES = 80
EPOCHS = 20


@dataclass(frozen=True)
class Outcome:
    """The result of one simulated job.

    Attributes:
        r_10: Regret over the first ten recurrences, c*.
        r_30: Over the first thirty.
        r_n: Over all.
        last: Mean cost of the last five, c*.
        stops: Runs that were stopped early.
        stuck: Whether it ended before its last recurrence.
    """

    r_10: float
    r_30: float
    r_n: float
    last: float
    stops: int
    stuck: bool


class Jobs(Protocol):
    """Trains: with a batch size, up to a cost, in a recurrence."""

    def __call__(self, batch_size: int, cost_bound: float, recurrence: int) -> Run | None:
        """The run; None where not even one epoch was within the bound."""


def play(
    policy: BatchSizeOptimizer,
    job: Job,
    train: Jobs,
    recurrences: int,
    beta: float,
    best_costs: Sequence[float],
) -> Outcome:
    """Simulates a job.

    Args:
        policy: Chooses sizes; the job is registered.
        job: The job.
        train: Its runs.
        recurrences: Number of recurrences.
        beta: Of the bound.
        best_costs: c* of each recurrence.
    """
    loop = Recurrences(policy, job, beta)
    costs = np.zeros(recurrences)
    stops = 0
    stuck = False
    try:
        while loop.recurrence <= recurrences:
            now = loop.begin()
            run = train(now.batch_size, now.cost_bound, now.recurrence)
            if run is None:
                loop.skip(now)
                continue
            costs[now.recurrence - 1] += run.cost
            stops += not run.converged
            loop.observe(run)
    except RuntimeError:
        stuck = True
    return outcome(costs / np.asarray(best_costs), stops, stuck)


def outcome(ratio: np.ndarray, stops: int, stuck: bool) -> Outcome:
    """From the cost of each recurrence, in c*."""
    regret = np.cumsum(ratio - 1)
    r_10, r_30, r_n = (float(regret[min(n, len(regret)) - 1]) for n in (10, 30, len(regret)))
    return Outcome(r_10, r_30, r_n, float(ratio[-5:].mean()), stops, stuck)


def play_all(
    pool: Executor, play: Callable[[Any], Any], tasks: Sequence[Any], what: str
) -> dict[Any, Any]:
    """Plays all tasks, in any process: what came of each."""
    outcomes = track(pool.map(play, tasks, chunksize=4), what, len(tasks))
    return dict(zip(tasks, outcomes, strict=True))


def policy_of(name: str, seed: int, window_size: int = 0) -> BatchSizeOptimizer:
    """Any of `ALL_POLICIES`."""
    simple = {"grid": Grid, "successive halving": SuccessiveHalving}
    if name in simple:
        return simple[name]()
    return make_policy(name, seed=seed, window_size=window_size)


def mean(outcomes: Sequence[Outcome], of: str) -> float:
    """Of one attribute, over the jobs that were not stuck."""
    values = [getattr(o, of) for o in outcomes if not math.isnan(getattr(o, of))]
    return statistics.fmean(values) if values else math.nan


def chance_of(more: Sequence[float]) -> float:
    """Sign test: probability that so many of these differences are positive if half are expected
    to be."""
    differ = [one for one in more if one]
    positive = sum(one > 0 for one in differ)
    ways = sum(math.comb(len(differ), count) for count in range(positive, len(differ) + 1))
    return float(ways / 2 ** len(differ))


def is_worse(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> bool:
    """Whether ours has more regret. A policy that is stuck with any seed has lost."""
    if any(one.stuck for one in ours) or any(one.stuck for one in theirs):
        return any(one.stuck for one in ours)
    return mean(ours, "r_n") > mean(theirs, "r_n")


# --- measured workloads -----------------------------------------------------------------------


@lru_cache
def measurements(gpu: str) -> Measurements:
    """The measurements of one GPU."""
    return Measurements(train_trace(), power_trace(gpu))


def workload_job(gpu: str, number: int, default: str, target: float | None = None) -> Job:
    """One of the workloads, with its usual size as default, or another that reaches the target."""
    tables = measurements(gpu).of(WORKLOADS[number].job([1]))
    job = WORKLOADS[number].job(list(tables))
    if target is not None:
        job = replace(job, target_metric=target)
    if default == "usual":
        return job
    sure = [
        size
        for size, table in tables.items()
        if (table.target_epochs[job.target_metric] <= job.max_epochs).all()
    ]
    chosen = min(sure) if default == "smallest" else max(sure)
    return replace(job, default_bs=chosen)


def other_targets(gpu: str, number: int) -> list[float]:
    """A workload's targets, but for its usual one, that every run of its usual size reached."""
    job = workload_job(gpu, number, "usual")
    tables = measurements(gpu).of(job)
    assert job.default_bs is not None
    common = set.intersection(*(set(table.target_epochs) for table in tables.values()))
    epochs = tables[job.default_bs].target_epochs
    reached = {target for target in common if (epochs[target] <= job.max_epochs).all()}
    return sorted(reached - {job.target_metric})


@dataclass(frozen=True)
class Case:
    """A measured workload, under one setting; the target is its usual one where none is given."""

    gpu: str
    workload: int
    policy: str
    seed: int
    eta: float
    beta: float
    default: str
    target: float | None = None


def recurrences_of(simulator: Simulator, job: Job) -> int:
    """N of a job."""
    return 2 * len(simulator.batch_sizes(job)) * len(simulator.power_limits(job))


def play_case(case: Case) -> Outcome:
    """Simulates it."""
    simulator = Simulator(
        train_trace(),
        power_trace(case.gpu),
        policy_of(case.policy, case.seed),
        JITPowerLimitOptimizer(verbose=False),
        case.seed,
        verbose=False,
    )
    job = workload_job(case.gpu, case.workload, case.default, case.target)
    n = recurrences_of(simulator, job)
    try:
        history = simulator.simulate_one_job(job, n, case.beta, case.eta)
    except RuntimeError:
        return Outcome(math.nan, math.nan, math.nan, math.nan, 0, stuck=True)
    known = measurements(case.gpu)
    costs = [0.0]
    for run in history:
        costs[-1] += zeus_cost(run.energy, run.time, case.eta, known.max_power)
        if run.reached:
            costs.append(0.0)
    ratio = np.array(costs[:-1]) / known.best(job, case.eta).cost
    return outcome(ratio, sum(not run.reached for run in history), stuck=False)


# --- drift, and other shapes ------------------------------------------------------------------


@dataclass(frozen=True)
class Synthetic:
    """A synthetic job: eight sizes, 20 epochs a run on average.

    Attributes:
        name: What it is.
        shape: Logarithm of a run's cost at each size, in each recurrence from 0.
        noise: Standard deviation of a run's logarithm.
        in_epochs: Whether drift changes the number of epochs, rather than the cost of one.
    """

    name: str
    shape: Callable[[int, np.random.Generator], np.ndarray]
    noise: float
    in_epochs: bool = False


SIZES = [16, 32, 64, 128, 256, 512, 1024, 2048]
DEFAULT = 5


def valley(at: int, steep: float = 0.06) -> np.ndarray:
    """One valley."""
    return steep * (np.arange(len(SIZES)) - at) ** 2


def still(shape: np.ndarray) -> Callable[[int, np.random.Generator], np.ndarray]:
    """A shape that stays."""
    return lambda recurrence, rng: shape


def step(recurrence: int, rng: np.random.Generator) -> np.ndarray:
    """Everything costs 2.5 times as much from the middle on."""
    return valley(3) + (math.log(2.5) if recurrence >= RECURRENCES // 2 else 0.0)


def growth(recurrence: int, rng: np.random.Generator) -> np.ndarray:
    """Everything costs 2 % more each time."""
    return valley(3) + recurrence * math.log(1.02)


def moves(recurrence: int, rng: np.random.Generator) -> np.ndarray:
    """The best size is another from the middle on, two sizes up."""
    return valley(3 if recurrence < RECURRENCES // 2 else 5)


def two_valleys(recurrence: int, rng: np.random.Generator) -> np.ndarray:
    """Two valleys; the deeper one is away from the default."""
    return np.minimum(valley(1, 0.15), 0.2 + valley(6, 0.15))


def shapeless(recurrence: int, rng: np.random.Generator) -> np.ndarray:
    """Each size its own; the same throughout a job."""
    return np.asarray(rng.uniform(0, math.log(2), len(SIZES)))


DRIFT = (
    Synthetic("no drift, noise 0.3", still(valley(3)), 0.3),
    Synthetic("x 2.5 at once", step, 0.05),
    Synthetic("x 2.5 at once, more epochs", step, 0.05, in_epochs=True),
    Synthetic("2 % more each time", growth, 0.05),
    Synthetic("2 % more each time, more epochs", growth, 0.05, in_epochs=True),
    Synthetic("best size moves", moves, 0.05),
    Synthetic("best size moves, noise 0.3", moves, 0.3),
)
SHAPES = (
    Synthetic("one valley, noise 0.05", still(valley(3)), 0.05),
    Synthetic("one valley, noise 0.2", still(valley(3)), 0.2),
    Synthetic("two valleys, noise 0.05", two_valleys, 0.05),
    Synthetic("two valleys, noise 0.2", two_valleys, 0.2),
    Synthetic("shapeless, noise 0.05", shapeless, 0.05),
    Synthetic("shapeless, noise 0.2", shapeless, 0.2),
)


def play_synthetic(job: tuple[int, str, int, int]) -> Outcome:
    """Simulates one job, by its number, policy, window and seed."""
    number, name, window, seed = job
    made = (*DRIFT, *SHAPES)[number]
    what = Job("made up", made.name, "sgd", 1.0, 10 * EPOCHS, SIZES[DEFAULT])
    policy = policy_of(name, seed, window)
    policy.register_job(what, SIZES)
    shapes = [made.shape(at, np.random.default_rng(seed)) for at in range(RECURRENCES)]
    rng = np.random.default_rng([seed, number])

    def train(batch_size: int, cost_bound: float, recurrence: int) -> Run | None:
        now = shapes[recurrence - 1]
        at = SIZES.index(batch_size)
        noise = rng.normal(0, made.noise)
        # In hundredths, so that the noise is not lost in whole epochs.
        changed = float(now.min()) if made.in_epochs else 0.0
        epochs = max(1, round(100 * EPOCHS * math.exp(noise + changed)))
        cost_of_one = math.exp(float(now[at]) - changed) / (100 * EPOCHS)
        most = min(cost_bound / cost_of_one, 100.0 * what.max_epochs)
        if most < 1:
            return None
        done = min(epochs, int(most))
        return Run(
            batch_size, done * cost_of_one, done == epochs, done, 0.0, cost_bound, done < epochs
        )

    best_costs = [float(np.exp(shape.min() + made.noise**2 / 2)) for shape in shapes]
    return play(policy, what, train, RECURRENCES, 2.0, best_costs)


# --- invented jobs ------------------------------------------------------------------------------


def play_held_out(task: tuple[int, int, str, int]) -> tuple[Outcome, bool]:
    """Simulates one job, by the jobs' seed, its number, policy and seed.

    Returns:
        Its result, and whether most of its last ten runs had the best size.
    """
    jobs_seed, number, name, seed = task
    held = jobs_of(jobs_seed)[number]
    policy = policy_of(name, seed)
    policy.register_job(held.job, list(held.sizes))
    trains = held.trainer(seed)
    sizes: list[int] = []

    def train(batch_size: int, cost_bound: float, recurrence: int) -> Run | None:
        sizes.append(batch_size)
        return trains(batch_size, cost_bound, recurrence)

    expected = held.expected
    costs = [float(expected.min())] * HELD_OUT_RECURRENCES
    found = play(policy, held.job, train, HELD_OUT_RECURRENCES, BETA, costs)
    best = held.sizes[int(expected.argmin())]
    return found, sizes[-10:].count(best) >= 5


# --- from one GPU to another ----------------------------------------------------------------------

TRANSFER_FROM = "v100"
TRANSFER_TO = tuple(gpu for gpu in GPUS if gpu != TRANSFER_FROM)
CAPS_W = {"a40": 175, "v100": 150, "p100": 175, "rtx6000": 160}
"""Highest power limit, if a site allows no more."""


class Capped:
    """A table of power without the limits above one, W; as a pandas.DataFrame is used."""

    def __init__(self, gpu: str, most: float) -> None:
        self._rows = [
            dict(row) for row in records(power_trace(gpu)) if int(row["power_limit"]) <= most
        ]

    def to_dict(self, orient: str) -> dict[str, list[str]]:
        """Its columns."""
        return {name: [row[name] for row in self._rows] for name in self._rows[0]}


def play_transfer(task: tuple[int, str, bool, int, bool]) -> float:
    """R_30 of a workload on a GPU, with or without the knowledge from `TRANSFER_FROM`; the seed;
    and whether the knowledge is instead from the same GPU, whose limits now end at `CAPS_W`."""
    number, gpu, with_it, seed, caps = task

    def regret(gpu: str, seed: int, recurrences: int, path: str | None, most: float) -> float:
        simulator = Simulator(
            train_trace(),
            Capped(gpu, most),
            make_policy("gp", seed=seed),
            JITPowerLimitOptimizer(verbose=False),
            seed,
            verbose=False,
        )
        job = workload_job(gpu, number, "usual")
        history = simulator.simulate_one_job(
            job, recurrences, 2.0, 0.5, knowledge=path, gpu_model=gpu
        )
        known = simulator.measurements
        spent = sum(zeus_cost(run.energy, run.time, 0.5, known.max_power) for run in history)
        return spent / known.best(job, 0.5).cost - recurrences

    cap = CAPS_W[gpu] if caps else math.inf
    if not with_it:
        return regret(gpu, seed, 30, None, cap)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "knowledge.json")
        regret(gpu if caps else TRANSFER_FROM, seed + 1000, 60, path, math.inf)
        return regret(gpu, seed, 30, path, cap)

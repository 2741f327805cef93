"""How much recurring jobs lose until their batch size is found: the default policy, the published.

    python benchmarks/recurring.py [--seeds 20] [--quick] [--reference PYTHON] [--jobs N]
    python benchmarks/recurring.py --transfer [--seeds 20]
    python benchmarks/recurring.py --held-out SEED [--held-out SEED ...] [--seeds 20]

Regret is counted in c*, the expected cost of a recurrence with the best batch size: R_n = sum of
the costs of the first n recurrences, retries and power profiling with them, over c*, less n.

- Measured workloads: six workloads on four GPUs (You et al., NSDI 2023, from ml-energy/zeus,
  Apache-2.0), each over N = 2 x sizes x power limits recurrences; then with other eta and beta,
  and with the smallest and largest batch size that always reaches the target as the default.
- Drift: eight sizes, 80 recurrences, costs that grow, jump, or whose best size moves. "Stuck" is a
  job that missed its target 20 times in a row.
- Other shapes: eight sizes whose cost has one valley, two, or no shape at all.
- `--reference`: an interpreter with zeus 0.16 installed; its simulator plays the same jobs, which
  must give the same runs as `pruning-gts` here, and is timed beside ours.

- `--transfer`: each workload on a V100 for 60 recurrences, and then on the other GPUs, with and
  without what was learnt there.
- `--held-out`: invented jobs of thirteen kinds (`recurring_held_out.py`), other ones for each SEED.
  The settings of `gp` were chosen on SEED 1 and 2.

Seeds are 0 to N - 1, of policies and of runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from recurring_held_out import (
    BETA,
    CLIFFS,
    KINDS,
    Grid,
    SuccessiveHalving,
    jobs_of,
)
from recurring_held_out import (
    RECURRENCES as HELD_OUT_RECURRENCES,
)
from rich.console import Console
from rich.progress import track
from rich.table import Table

from zeus.job import Job
from zeus.policy import JITPowerLimitOptimizer, make_policy
from zeus.policy.interface import BatchSizeOptimizer, Run
from zeus.policy.recurrence import Recurrences
from zeus.simulate import Simulator
from zeus.simulate.expected import best
from zeus.simulate.tables import Measurements
from zeus.simulate.workloads import GPUS, WORKLOADS, power_trace, train_trace
from zeus.utils.metric import zeus_cost

POLICIES = ("gp", "pruning-gts")
RECURRENCES = 80
EPOCHS = 20


@dataclass(frozen=True)
class Outcome:
    """One job, played through.

    Attributes:
        r_10: Regret over the first ten recurrences, c*.
        r_30: Over the first thirty.
        r_n: Over all.
        last: Mean cost of the last five, c*.
        stops: Runs that were given up.
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
    """Plays a job through.

    Args:
        policy: Chooses sizes; the job is registered.
        job: The job.
        train: Its runs.
        recurrences: How many.
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
                bad = 100 * now.cost_bound
                seen = Run(now.batch_size, bad, False, 0, 0.0, now.cost_bound, True)
                loop.end(Run(now.batch_size, 0.0, False), observed=seen)
                continue
            costs[now.recurrence - 1] += run.cost
            stops += not run.converged
            loop.end(run)
    except RuntimeError:
        stuck = True
    return outcome(costs / np.asarray(best_costs), stops, stuck)


def outcome(ratio: np.ndarray, stops: int, stuck: bool) -> Outcome:
    """From the cost of each recurrence, in c*."""
    regret = np.cumsum(ratio - 1)
    r_10, r_30, r_n = (float(regret[min(n, len(regret)) - 1]) for n in (10, 30, len(regret)))
    return Outcome(r_10, r_30, r_n, float(ratio[-5:].mean()), stops, stuck)


# --- measured workloads -----------------------------------------------------------------------


@lru_cache
def measurements(gpu: str) -> Measurements:
    """What was measured on one GPU."""
    return Measurements(train_trace(), power_trace(gpu))


def workload_job(gpu: str, number: int, default: str) -> Job:
    """One of the workloads, with its usual size as default, or another that reaches the target."""
    tables = measurements(gpu).of(WORKLOADS[number].job([1]))
    job = WORKLOADS[number].job(list(tables))
    if default == "usual":
        return job
    sure = [
        size
        for size, table in tables.items()
        if (table.target_epochs[job.target_metric] <= job.max_epochs).all()
    ]
    chosen = min(sure) if default == "smallest" else max(sure)
    return Job(job.dataset, job.network, job.optimizer, job.target_metric, job.max_epochs, chosen)


@dataclass(frozen=True)
class Case:
    """A measured workload, under one setting."""

    gpu: str
    workload: int
    policy: str
    seed: int
    eta: float
    beta: float
    default: str


def recurrences_of(simulator: Simulator, job: Job) -> int:
    """N of a job."""
    return 2 * len(simulator.batch_sizes(job)) * len(simulator.power_limits(job))


def play_case(case: Case) -> Outcome:
    """Plays it through."""
    simulator = Simulator(
        train_trace(),
        power_trace(case.gpu),
        make_policy(case.policy, seed=case.seed),
        JITPowerLimitOptimizer(verbose=False),
        case.seed,
        verbose=False,
    )
    job = workload_job(case.gpu, case.workload, case.default)
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
    ratio = np.array(costs[:-1]) / best(known, job, case.eta).cost
    return outcome(ratio, sum(not run.reached for run in history), stuck=False)


SETTINGS: tuple[tuple[str, float, float, str], ...] = (
    ("eta 0.5, beta 2", 0.5, 2.0, "usual"),
    ("eta 0", 0.0, 2.0, "usual"),
    ("eta 1", 1.0, 2.0, "usual"),
    ("beta 1.5", 0.5, 1.5, "usual"),
    ("beta 3", 0.5, 3.0, "usual"),
    ("no early stop", 0.5, math.inf, "usual"),
    ("smallest size as default", 0.5, 2.0, "smallest"),
    ("largest size as default", 0.5, 2.0, "largest"),
)


def of_setting(setting: tuple[str, float, float, str], seeds: int) -> list[Case]:
    """All jobs of a setting."""
    _, eta, beta, default = setting
    return [
        Case(gpu, number, policy, seed, eta, beta, default)
        for gpu in GPUS
        for number in range(len(WORKLOADS))
        for policy in POLICIES
        for seed in range(seeds)
    ]


# --- drift, and other shapes ------------------------------------------------------------------


@dataclass(frozen=True)
class Synthetic:
    """A job that is made up: eight sizes, 20 epochs a run on average.

    Attributes:
        name: What it is.
        shape: Logarithm of a run's cost at each size, in each recurrence from 0.
        noise: Standard deviation of a run's logarithm.
        in_epochs: Whether what changes over time changes the epochs, and not the cost of one.
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
    """Plays one through: its number, the policy, the window, the seed."""
    number, name, window, seed = job
    made = (*DRIFT, *SHAPES)[number]
    what = Job("made up", made.name, "sgd", 1.0, 10 * EPOCHS, SIZES[DEFAULT])
    policy = make_policy(name, seed=seed, window_size=window)
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
    """Plays one through: the jobs' seed, its number, the policy, the seed.

    Returns:
        What came of it, and whether most of its last ten runs had the best size.
    """
    jobs_seed, number, name, seed = task
    held = jobs_of(jobs_seed)[number]
    simple = {"grid": Grid, "successive halving": SuccessiveHalving}
    policy = simple[name]() if name in simple else make_policy(name, seed=seed)
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


def held_out_table(
    policies: Sequence[str], found: dict[tuple[int, int, str, int], tuple[Outcome, bool]]
) -> Table:
    """By policy and kind; of each job the mean over its seeds."""
    jobs_seeds = sorted({key[0] for key in found})
    kind_of = {(seed, n): job.kind for seed in jobs_seeds for n, job in enumerate(jobs_of(seed))}
    table = Table(title=f"invented jobs {', '.join(map(str, jobs_seeds))}: regret R_N, c*")
    table.add_column("kind")
    for policy in policies:
        table.add_column(policy, justify="right")

    def of(policy: str, kinds: Sequence[str]) -> list[list[tuple[Outcome, bool]]]:
        groups: dict[tuple[int, int], list[tuple[Outcome, bool]]] = {}
        for key, outcome in found.items():
            if key[2] == policy and kind_of[key[:2]] in kinds:
                groups.setdefault(key[:2], []).append(outcome)
        return list(groups.values())

    def means(policy: str, kinds: Sequence[str]) -> list[float]:
        per_job = [mean([one for one, _ in group], "r_n") for group in of(policy, kinds)]
        return [value for value in per_job if not math.isnan(value)]

    every = list(KINDS)
    rows: list[tuple[str, Callable[[str], str]]] = [
        (kind, lambda policy, kind=kind: f"{statistics.fmean(means(policy, [kind])):.1f}")
        for kind in every
    ]
    rows += [
        ("all, mean", lambda policy: f"{statistics.fmean(means(policy, every)):.2f}"),
        ("all, median", lambda policy: f"{statistics.median(means(policy, every)):.2f}"),
        (
            "stuck",
            lambda policy: str(sum(o.stuck for group in of(policy, every) for o, _ in group)),
        ),
        (
            "neighbor beside a cliff found",
            lambda policy: f"{_share([ok for g in of(policy, CLIFFS) for _, ok in g]):.0%}",
        ),
    ]
    for name, cell in rows:
        table.add_row(name, *(cell(policy) for policy in policies))
    return table


def _share(of: Sequence[bool]) -> float:
    return sum(of) / len(of)


def held_out(jobs_seeds: Sequence[int], seeds: int, pool: ProcessPoolExecutor) -> Table:
    """Plays all invented jobs of these seeds."""
    policies = (*POLICIES, "grid", "successive halving")
    tasks = [
        (jobs_seed, number, policy, seed)
        for jobs_seed in jobs_seeds
        for number in range(len(jobs_of(jobs_seed)))
        for policy in policies
        for seed in range(seeds)
    ]
    outcomes = track(pool.map(play_held_out, tasks, chunksize=8), "invented", len(tasks))
    return held_out_table(policies, dict(zip(tasks, outcomes, strict=True)))


# --- from one GPU to another ----------------------------------------------------------------------

TRANSFER_FROM = "v100"
TRANSFER_TO = tuple(gpu for gpu in GPUS if gpu != TRANSFER_FROM)


def play_transfer(task: tuple[int, str, bool, int]) -> float:
    """R_30 of a workload on a GPU, with or without what was learnt on `TRANSFER_FROM`; the seed."""
    number, gpu, with_it, seed = task

    def regret(gpu: str, seed: int, recurrences: int, path: str | None) -> float:
        simulator = Simulator(
            train_trace(),
            power_trace(gpu),
            make_policy("gp", seed=seed),
            JITPowerLimitOptimizer(verbose=False),
            seed,
            verbose=False,
        )
        job = workload_job(gpu, number, "usual")
        history = simulator.simulate_one_job(job, recurrences, 2.0, 0.5, knowledge=path)
        known = measurements(gpu)
        spent = sum(zeus_cost(run.energy, run.time, 0.5, known.max_power) for run in history)
        return spent / best(known, job, 0.5).cost - recurrences

    if not with_it:
        return regret(gpu, seed, 30, None)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "knowledge.json")
        regret(TRANSFER_FROM, seed + 1000, 60, path)
        return regret(gpu, seed, 30, path)


def transfer(seeds: int, pool: ProcessPoolExecutor) -> Table:
    """All workloads on all other GPUs."""
    tasks = [
        (number, gpu, with_it, seed)
        for number in range(len(WORKLOADS))
        for gpu in TRANSFER_TO
        for with_it in (False, True)
        for seed in range(seeds)
    ]
    values = track(pool.map(play_transfer, tasks, chunksize=4), "transfer", len(tasks))
    found = dict(zip(tasks, values, strict=True))
    table = Table(title=f"R_30 without, and with what was learnt on {TRANSFER_FROM}, c*")
    for column in ("workload", *TRANSFER_TO):
        table.add_column(column, justify="left" if column == "workload" else "right")

    def both(numbers: Sequence[int], gpus: Sequence[str]) -> str:
        means = (
            statistics.fmean(
                value
                for (number, gpu, given, _), value in found.items()
                if number in numbers and gpu in gpus and given == with_it
            )
            for with_it in (False, True)
        )
        return " / ".join(f"{value:.2f}" for value in means)

    for number, workload in enumerate(WORKLOADS):
        table.add_row(workload.dataset, *(both([number], [gpu]) for gpu in TRANSFER_TO))
    every = range(len(WORKLOADS))
    table.add_row("mean", *(both(every, [gpu]) for gpu in TRANSFER_TO))
    table.add_row("all", both(every, TRANSFER_TO), *("" for _ in TRANSFER_TO[1:]))
    return table


# --- beside the reference ---------------------------------------------------------------------

REFERENCE = """
import contextlib, io, json, sys, time, warnings
warnings.filterwarnings("ignore")
from zeus._legacy.job import Job
from zeus._legacy.policy import JITPowerLimitOptimizer, PruningGTSBatchSizeOptimizer
from zeus._legacy.simulate import Simulator
answers = []
for case in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()):
        simulator = Simulator(
            case["train"], case["power"],
            PruningGTSBatchSizeOptimizer(seed=case["seed"], verbose=False),
            JITPowerLimitOptimizer(verbose=False), case["seed"], verbose=False,
        )
        began = time.perf_counter()
        runs = simulator.simulate_one_job(Job(*case["job"]), case["n"], case["beta"], case["eta"])
    took = time.perf_counter() - began
    told = [[int(r.bs), int(r.pl), float(r.energy), bool(r.reached), float(r.time)] for r in runs]
    answers.append([took, told])
json.dump(answers, sys.stdout)
"""


def beside_reference(python: str, console: Console) -> bool:
    """Plays the same jobs with both simulators; whether all runs are the same."""
    asked, ours = [], []
    took = dict.fromkeys(POLICIES, 0.0)
    recurrences = 0
    for gpu in GPUS:
        for number in range(len(WORKLOADS)):
            job = workload_job(gpu, number, "usual")
            for policy in POLICIES:
                simulator = Simulator(
                    train_trace(),
                    power_trace(gpu),
                    make_policy(policy, seed=1),
                    JITPowerLimitOptimizer(verbose=False),
                    1,
                    verbose=False,
                )
                n = recurrences_of(simulator, job)
                began = time.perf_counter()
                history = simulator.simulate_one_job(job, n, 2.0, 0.5)
                took[policy] += time.perf_counter() - began
            ours.append([[r.bs, r.pl, r.energy, r.reached, r.time] for r in history])
            recurrences += n
            fields = (job.dataset, job.network, job.optimizer, job.target_metric, job.max_epochs)
            asked.append(
                {
                    "train": str(train_trace()),
                    "power": str(power_trace(gpu)),
                    "job": [*fields, job.default_bs],
                    "seed": 1,
                    "n": n,
                    "beta": 2.0,
                    "eta": 0.5,
                }
            )
    with tempfile.TemporaryDirectory() as elsewhere:  # not where another `zeus` would be found
        done = subprocess.run(
            [python, "-c", REFERENCE],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            cwd=elsewhere,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{python} cannot run zeus 0.16: {done.stderr.strip().splitlines()[-1]}")
    answers = json.loads(done.stdout)
    same = sum(_same(a, b[1]) for a, b in zip(ours, answers, strict=True))
    reference = sum(answer[0] for answer in answers)
    table = Table(title=f"{recurrences} recurrences of {len(ours)} jobs, one process")
    for column in ("simulator", "policy", "ms / recurrence", "times as fast"):
        table.add_column(column, justify="left" if column in ("simulator", "policy") else "right")
    rows = [("zeus 0.16", "pruning-gts", reference)]
    rows += [("here", policy, took[policy]) for policy in reversed(POLICIES)]
    for who, policy, seconds in rows:
        table.add_row(
            who, policy, f"{1000 * seconds / recurrences:.3f}", f"{reference / seconds:.1f}"
        )
    console.print(table)
    console.print(f"{same} of {len(ours)} jobs gave the same runs as zeus 0.16 with pruning-gts.\n")
    return same == len(ours)


def _same(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    return len(ours) == len(theirs) and all(
        a[:2] == b[:2]
        and a[3] == b[3]
        and math.isclose(a[2], b[2], rel_tol=1e-9)
        and math.isclose(a[4], b[4], rel_tol=1e-9)
        for a, b in zip(ours, theirs, strict=True)
    )


# --- tables -----------------------------------------------------------------------------------


def mean(outcomes: Sequence[Outcome], of: str) -> float:
    """Of one attribute, over the jobs that were not stuck."""
    values = [getattr(o, of) for o in outcomes if not math.isnan(getattr(o, of))]
    return statistics.fmean(values) if values else math.nan


def pairs_table(cases: list[Case], found: dict[Case, Outcome]) -> Table:
    """Each workload on each GPU."""
    table = Table(title="R_N by workload and GPU, eta 0.5, beta 2")
    for column in ("workload", "GPU", "default", "N", *(f"{p}" for p in POLICIES), "R_30", "stops"):
        table.add_column(column, justify="left" if column in ("workload", "GPU") else "right")
    for gpu, number in sorted({(c.gpu, c.workload) for c in cases}, key=lambda k: (k[1], k[0])):
        mine = {
            policy: [
                found[c] for c in cases if (c.gpu, c.workload, c.policy) == (gpu, number, policy)
            ]
            for policy in POLICIES
        }
        job = workload_job(gpu, number, "usual")
        known = measurements(gpu).of(job)
        limits = {limit for t in known.values() for limit in t.power.limits}
        ours = mine[POLICIES[0]]
        table.add_row(
            job.dataset,
            gpu,
            str(job.default_bs),
            str(2 * len(known) * len(limits)),
            *(f"{mean(mine[policy], 'r_n'):.2f}" for policy in POLICIES),
            f"{mean(ours, 'r_30'):.2f}",
            f"{mean(ours, 'stops'):.2f}",
        )
    return table


def settings_table(rows: dict[str, tuple[list[Case], dict[Case, Outcome]]]) -> Table:
    """Means over all pairs, setting by setting."""
    table = Table(title="means over workloads and GPUs")
    columns = ("setting", "policy", "R_10", "R_30", "R_N", "last 5", "stops", "stuck", "worse on")
    for column in columns:
        table.add_column(column, justify="left" if column in ("setting", "policy") else "right")
    for name, (cases, found) in rows.items():
        for policy in POLICIES:
            mine = [found[c] for c in cases if c.policy == policy]
            worse = "" if policy != POLICIES[0] else worse_on(cases, found)
            table.add_row(
                name if policy == POLICIES[0] else "",
                policy,
                *(f"{mean(mine, of):.2f}" for of in ("r_10", "r_30", "r_n")),
                f"{mean(mine, 'last'):.3f}",
                f"{mean(mine, 'stops'):.2f}",
                f"{sum(o.stuck for o in mine)}/{len(mine)}",
                worse,
            )
    return table


def worse_on(cases: list[Case], found: dict[Case, Outcome]) -> str:
    """On how many pairs ours has more regret than the published policy, and by how much at most."""
    pairs = {(c.gpu, c.workload) for c in cases}
    more = []
    for pair in pairs:
        ours, theirs = (
            mean(
                [found[c] for c in cases if (c.gpu, c.workload) == pair and c.policy == policy],
                "r_n",
            )
            for policy in POLICIES
        )
        if ours > theirs:
            more.append(ours - theirs)
    return f"{len(more)} of {len(pairs)}" + (f", {max(more):.2f}" if more else "")


def synthetic_table(
    title: str, numbers: Sequence[int], found: dict[tuple[int, str, int, int], Outcome]
) -> Table:
    """Made-up jobs."""
    table = Table(title=title)
    variants = sorted({key[1:3] for key in found}, key=lambda v: (v[1], POLICIES.index(v[0])))
    table.add_column("job")
    for policy, window in variants:
        table.add_column(policy + (f", window {window}" if window else ""), justify="right")
    for number in numbers:
        cells = []
        for policy, window in variants:
            mine = [o for key, o in found.items() if key[:3] == (number, policy, window)]
            stuck = sum(o.stuck for o in mine)
            text = (
                f"{mean([o for o in mine if not o.stuck], 'r_n'):.1f}" if stuck < len(mine) else ""
            )
            stops = f"{mean(mine, 'stops'):.1f} stops"
            cells.append(f"stuck {stuck}/{len(mine)} {text}" if stuck else f"{text}, {stops}")
        table.add_row((*DRIFT, *SHAPES)[number].name, *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="the measured workloads only")
    parser.add_argument("--transfer", action="store_true", help="from one GPU to the others only")
    parser.add_argument("--held-out", type=int, action="append", metavar="SEED")
    parser.add_argument("--reference", metavar="PYTHON", help="an interpreter with zeus 0.16")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    console = Console(width=max(110, Console().width))
    if args.transfer:
        with ProcessPoolExecutor(args.jobs) as pool:
            console.print(transfer(args.seeds, pool))
        return
    if args.held_out:
        with ProcessPoolExecutor(args.jobs) as pool:
            console.print(held_out(args.held_out, args.seeds, pool))
        return
    same = beside_reference(args.reference, console) if args.reference else True
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = {}
        for setting in SETTINGS[: 1 if args.quick else None]:
            cases = of_setting(setting, args.seeds)
            outcomes = track(pool.map(play_case, cases, chunksize=4), setting[0], len(cases))
            rows[setting[0]] = (cases, dict(zip(cases, outcomes, strict=True)))
        console.print(pairs_table(*rows[SETTINGS[0][0]]))
        console.print(settings_table(rows))
        if not args.quick:
            jobs = [
                (number, policy, window, seed)
                for number in range(len(DRIFT) + len(SHAPES))
                for policy in POLICIES
                for window in ((0, 10) if number < len(DRIFT) else (0,))
                for seed in range(max(1, args.seeds // 2))
            ]
            outcomes = track(pool.map(play_synthetic, jobs, chunksize=4), "made up", len(jobs))
            found = dict(zip(jobs, outcomes, strict=True))
            console.print(
                synthetic_table(
                    "regret over 80 recurrences under drift, c*",
                    range(len(DRIFT)),
                    {key: o for key, o in found.items() if key[0] < len(DRIFT)},
                )
            )
            console.print(
                synthetic_table(
                    "regret over 80 recurrences, other shapes, c*",
                    range(len(DRIFT), len(DRIFT) + len(SHAPES)),
                    {key: o for key, o in found.items() if key[0] >= len(DRIFT)},
                )
            )
    if not same:
        sys.exit("the runs differ from zeus 0.16's")


if __name__ == "__main__":
    main()

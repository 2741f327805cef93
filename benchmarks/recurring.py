"""Measures the regret of recurring jobs until their batch size is found, for several policies.

    python benchmarks/recurring.py [--seeds 4] [--jobs N]
    python benchmarks/recurring.py --details [--seeds 20] [--quick] [--reference PYTHON]
    python benchmarks/recurring.py --transfer [--seeds 20]
    python benchmarks/recurring.py --targets [--seeds 20] [--first-seed 0]
    python benchmarks/recurring.py --held-out SEED [--held-out SEED ...] [--seeds 20]
    python benchmarks/recurring.py --floor SEED [--floor SEED ...] [--seeds 20]

Without an option: each goal with its figure beside zeus 0.16, a grid and successive halving, and
where the default policy loses (`recurring_goals.py`). zeus 0.16 is `pruning-gts` here, which
produces the same runs (`--details --reference`).

Regret is counted in c*, the expected cost of a recurrence with the best batch size: R_n = sum of
the costs of the first n recurrences, retries and power profiling with them, over c*, less n.

`--details`:

- Measured workloads: six workloads on four GPUs (You et al., NSDI 2023, from ml-energy/zeus,
  Apache-2.0), each over N = 2 x sizes x power limits recurrences; then with other eta and beta,
  and with the smallest and largest batch size that always reaches the target as the default.
- Drift: eight sizes, 80 recurrences, costs that grow, jump, or whose best size moves. "Stuck" is a
  job that missed its target 20 times in a row.
- Other shapes: eight sizes whose cost has one valley, two, or no shape at all.
- `--reference`: an interpreter with zeus 0.16 installed; its simulator simulates the same jobs,
must produce
  the same runs as `pruning-gts` here, and is timed beside ours.

- `--transfer`: each workload on a V100 for 60 recurrences, and then on the other GPUs, with and
  without the knowledge from the V100.
- `--targets`: the measured workloads with all other targets that their usual size always reached.
- `--held-out`: invented jobs of thirteen kinds (`recurring_held_out.py`), other ones for each SEED.
  The settings of `gp` were chosen on SEED 1 and 2.
- `--floor`: what the regret on invented jobs is made of, and what is left of it with a policy that
  knows how they were invented (`recurring_floor.py`).

Seeds are N consecutive numbers from 0, or from `--first-seed`, of policies and of runs.
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

from recurring_floor import INFORMED, floor_table, play_parts
from recurring_goals import all_goals, table
from recurring_held_out import CLIFFS, KINDS, jobs_of
from recurring_plays import (
    ALL_POLICIES,
    DRIFT,
    POLICIES,
    SHAPES,
    TRANSFER_FROM,
    TRANSFER_TO,
    Case,
    Outcome,
    chance_of,
    is_worse,
    mean,
    measurements,
    other_targets,
    play_all,
    play_case,
    play_held_out,
    play_synthetic,
    play_transfer,
    recurrences_of,
    workload_job,
)
from rich.console import Console
from rich.table import Table

from zeus.policy import JITPowerLimitOptimizer, make_policy
from zeus.simulate import Simulator
from zeus.simulate.workloads import GPUS, WORKLOADS, power_trace, train_trace

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


# --- other targets ------------------------------------------------------------------------------


def targets(seeds: Sequence[int], pool: ProcessPoolExecutor) -> tuple[Table, str]:
    """All workloads and GPUs with all other targets: the pairs on which `gp` has more regret."""
    pairs = [
        (gpu, number, target)
        for number in range(len(WORKLOADS))
        for gpu in GPUS
        for target in other_targets(gpu, number)
    ]
    cases = [
        Case(gpu, number, policy, seed, 0.5, 2.0, "usual", target)
        for gpu, number, target in pairs
        for policy in POLICIES
        for seed in seeds
    ]
    found = play_all(pool, play_case, cases, "targets")
    table = Table(title="R_N where gp has more than the published policy")
    columns = ("workload", "GPU", "target", *POLICIES, "standard error", "more with", "sign test p")
    for column in columns:
        table.add_column(column, justify="left" if column in ("workload", "GPU") else "right")
    worse = clearly = by_sign = 0
    for gpu, number, target in pairs:
        ours, theirs = (
            [found[Case(gpu, number, policy, n, 0.5, 2.0, "usual", target)] for n in seeds]
            for policy in POLICIES
        )
        if not is_worse(ours, theirs):
            continue
        worse += 1
        more = [a.r_n - b.r_n for a, b in zip(ours, theirs, strict=True)]
        error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.inf
        clearly += statistics.fmean(more) > 2 * error
        chance = chance_of(more)
        by_sign += chance < 0.05
        row = (
            WORKLOADS[number].dataset,
            gpu,
            f"{target:g}",
            mean(ours, "r_n"),
            mean(theirs, "r_n"),
        )
        table.add_row(
            *(one if isinstance(one, str) else f"{one:.2f}" for one in (*row, error)),
            f"{sum(one > 0 for one in more)} of {len(more)} seeds",
            f"{chance:.3f}",
        )
    said = []
    for policy in POLICIES:
        mine = [found[case] for case in cases if case.policy == policy]
        stuck = sum(one.stuck for one in mine)
        said.append(f"{policy} {mean(mine, 'r_n'):.2f}, stuck {stuck}/{len(mine)}")
    return table, (
        f"worse on {worse} of {len(pairs)}, on {clearly} by over two standard errors, on {by_sign} "
        "with p < 0.05 in a sign test; mean R_N " + "; ".join(said)
    )


# --- invented jobs ------------------------------------------------------------------------------


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
    """Simulates all invented jobs of these seeds."""
    tasks = [
        (jobs_seed, number, policy, seed)
        for jobs_seed in jobs_seeds
        for number in range(len(jobs_of(jobs_seed)))
        for policy in ALL_POLICIES
        for seed in range(seeds)
    ]
    return held_out_table(ALL_POLICIES, play_all(pool, play_held_out, tasks, "invented"))


def floor(jobs_seeds: Sequence[int], seeds: int, pool: ProcessPoolExecutor) -> Table:
    """Plays all invented jobs of these seeds with `gp`, and with a policy that knows more."""
    tasks = [
        (jobs_seed, number, policy, seed)
        for jobs_seed in jobs_seeds
        for number in range(len(jobs_of(jobs_seed)))
        for policy in ("gp", INFORMED)
        for seed in range(seeds)
    ]
    return floor_table(play_all(pool, play_parts, tasks, "floor"))


# --- from one GPU to another ----------------------------------------------------------------------


def transfer(seeds: int, pool: ProcessPoolExecutor) -> Table:
    """All workloads on all other GPUs."""
    tasks = [
        (number, gpu, with_it, seed, False)
        for number in range(len(WORKLOADS))
        for gpu in TRANSFER_TO
        for with_it in (False, True)
        for seed in range(seeds)
    ]
    found = play_all(pool, play_transfer, tasks, "transfer")
    table = Table(title=f"R_30 without, and with what was learnt on {TRANSFER_FROM}, c*")
    for column in ("workload", *TRANSFER_TO):
        table.add_column(column, justify="left" if column == "workload" else "right")

    def both(numbers: Sequence[int], gpus: Sequence[str]) -> str:
        means = (
            statistics.fmean(
                value
                for (number, gpu, given, *_), value in found.items()
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
    """Simulates the same jobs with both simulators. Returns whether all runs are the same."""
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
    parser.add_argument("--seeds", type=int, help="number of seeds (20; for the goals 4)")
    parser.add_argument("--details", action="store_true", help="settings, drift and shapes")
    parser.add_argument("--quick", action="store_true", help="only the measured workloads")
    parser.add_argument(
        "--transfer", action="store_true", help="only transfer from one GPU to the others"
    )
    parser.add_argument("--targets", action="store_true", help="only other targets")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed of --targets")
    parser.add_argument("--held-out", type=int, action="append", metavar="SEED")
    parser.add_argument("--floor", type=int, action="append", metavar="SEED")
    parser.add_argument(
        "--reference", metavar="PYTHON", help="interpreter of an environment with zeus 0.16"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    console = Console(width=max(130, Console().width))
    parts = (args.details, args.transfer, args.targets, args.held_out, args.floor)
    seeds = args.seeds or (20 if any(parts) else 4)
    if not args.details:
        with ProcessPoolExecutor(args.jobs) as pool:
            if args.transfer:
                console.print(transfer(seeds, pool))
            if args.targets:
                for part in targets(range(args.first_seed, args.first_seed + seeds), pool):
                    console.print(part)
            if args.held_out:
                console.print(held_out(args.held_out, seeds, pool))
            if args.floor:
                console.print(floor(args.floor, seeds, pool))
            if not any(parts):
                goals = all_goals(pool, range(seeds))
                console.print(table(goals))
                console.print("Where gp is worse:")
                for loss in goals.losses:
                    console.print(f"- {loss}")
        return
    same = beside_reference(args.reference, console) if args.reference else True
    with ProcessPoolExecutor(args.jobs) as pool:
        rows = {}
        for setting in SETTINGS[: 1 if args.quick else None]:
            cases = of_setting(setting, seeds)
            rows[setting[0]] = (cases, play_all(pool, play_case, cases, setting[0]))
        console.print(pairs_table(*rows[SETTINGS[0][0]]))
        console.print(settings_table(rows))
        if not args.quick:
            jobs = [
                (number, policy, window, seed)
                for number in range(len(DRIFT) + len(SHAPES))
                for policy in POLICIES
                for window in ((0, 10) if number < len(DRIFT) else (0,))
                for seed in range(max(1, seeds // 2))
            ]
            found = play_all(pool, play_synthetic, jobs, "made up")
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

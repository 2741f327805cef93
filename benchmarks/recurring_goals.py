"""The goals of recurring jobs as one table, and where the default policy loses; see `recurring.py`.

Nothing here was used to choose a setting but the 24 measured pairs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from recurring_held_out import CLIFFS, jobs_of
from recurring_plays import (
    ALL_POLICIES,
    CAPS_W,
    POLICIES,
    TRANSFER_TO,
    Case,
    Outcome,
    is_worse,
    mean,
    other_targets,
    play_all,
    play_case,
    play_held_out,
    play_transfer,
)
from recurring_server import decisions
from rich.table import Table

from zeus.simulate.workloads import GPUS, WORKLOADS

HELD_OUT = (21, 22)
"""Seeds of invented jobs on which no setting was chosen."""

OURS, PUBLISHED = POLICIES
MOST_NAMED = 20


@dataclass(frozen=True)
class Goal:
    """A row of the table.

    Attributes:
        of: The simulated jobs.
        what: Name of the figure.
        figures: By policy; policies without this figure are missing.
        most: The goal is at most this; None for no such goal.
        least: The goal is at least this; None for no such goal.
        form: Format of the figures.
    """

    of: str
    what: str
    figures: dict[str, float]
    most: float | None = None
    least: float | None = None
    form: str = ".2f"

    @property
    def met(self) -> str:
        """Whether ours meets it."""
        ours = self.figures[OURS]
        if self.most is None and self.least is None:
            return ""
        missed = (self.most is not None and ours > self.most) or (
            self.least is not None and ours < self.least
        )
        return "missed" if missed else "met"

    def cells(self) -> list[str]:
        """As text."""
        bounds = [(self.most, "at most"), (self.least, "at least")]
        goal = [f"{word} {bound:{self.form}}" for bound, word in bounds if bound is not None]
        figures = [self.figures.get(policy) for policy in ALL_POLICIES]
        texts = ["-" if one is None else f"{one:{self.form}}" for one in figures]
        return [self.of, self.what, *(goal or ["-"]), *texts, self.met]


class Goals:
    """Simulates everything.

    Args:
        pool: Runs the simulations.
        seeds: Of policies and of runs.
    """

    def __init__(self, pool: Executor, seeds: Sequence[int]) -> None:
        self._pool = pool
        self._seeds = seeds
        self.rows: list[Goal] = []
        self.losses: list[str] = []

    def _play(self, play: Callable[[Any], Any], tasks: list[Any], what: str) -> dict[Any, Any]:
        return play_all(self._pool, play, tasks, what)

    def measured(self) -> None:
        """Six workloads on four GPUs."""
        pairs = [(gpu, number) for number in range(len(WORKLOADS)) for gpu in GPUS]
        found = self._cases([(*pair, None) for pair in pairs], "measured")
        of_pair = {pair: found[pair[0], pair[1], None] for pair in pairs}
        for of, most in (("r_n", 2.2), ("r_30", 2.1)):
            means = {
                policy: statistics.fmean(mean(of_pair[pair][policy], of) for pair in pairs)
                for policy in ALL_POLICIES
            }
            name = f"mean {of.upper()}"
            self.rows.append(Goal(f"{len(pairs)} measured pairs", name, means, most))
        worse = [pair for pair in pairs if _beaten(of_pair[pair])]
        self._lost("measured pairs", len(pairs), (f"{WORKLOADS[n].dataset} {g}" for g, n in worse))
        self._of_others = {
            policy: statistics.fmean(
                mean(found[(gpu, n, None)][policy], "r_30")
                for gpu, n in pairs
                if gpu in TRANSFER_TO
            )
            for policy in ALL_POLICIES[1:]
        }

    def targets(self) -> None:
        """All other targets."""
        pairs = [
            (gpu, number, target)
            for number in range(len(WORKLOADS))
            for gpu in GPUS
            for target in other_targets(gpu, number)
        ]
        found = self._cases(pairs, "targets")
        worse = {
            policy: [p for p in pairs if is_worse(found[p][policy], found[p][PUBLISHED])]
            for policy in ALL_POLICIES
            if policy != PUBLISHED
        }
        counts = {policy: float(len(of)) for policy, of in worse.items()}
        what = "worse than zeus 0.16 on"
        self.rows.append(Goal(f"{len(pairs)} other targets", what, counts, 5, form=".0f"))
        names = (f"{WORKLOADS[n].dataset} {gpu} {target:g}" for gpu, n, target in worse[OURS])
        self._lost("other targets", len(pairs), names, "to zeus 0.16")

    def invented(self) -> None:
        """Jobs that no setting was chosen on."""
        jobs = [(seed, number) for seed in HELD_OUT for number in range(len(jobs_of(seed)))]
        tasks = [(*job, p, seed) for job in jobs for p in ALL_POLICIES for seed in self._seeds]
        found = self._play(play_held_out, tasks, "invented")
        of: dict[str, dict[str, list[float]]] = {p: defaultdict(list) for p in ALL_POLICIES}
        stuck, beside = dict.fromkeys(ALL_POLICIES, 0.0), defaultdict(list)
        for jobs_seed, number in jobs:
            kind = jobs_of(jobs_seed)[number].kind
            for policy in ALL_POLICIES:
                both = [found[jobs_seed, number, policy, seed] for seed in self._seeds]
                outcomes = [outcome for outcome, _ in both]
                stuck[policy] += sum(one.stuck for one in outcomes)
                of[policy][kind].append(mean(outcomes, "r_n"))
                if kind in CLIFFS:
                    beside[policy] += [100.0 * best for _, best in both]
        all_of = {p: [r for rs in kinds.values() for r in rs] for p, kinds in of.items()}
        name = f"{len(jobs)} invented jobs"
        for what, figure, most in (
            ("mean R_N", np.nanmean, 10.0),
            ("median R_N", np.nanmedian, 3.5),
        ):
            figures = {policy: float(figure(values)) for policy, values in all_of.items()}
            self.rows.append(Goal(name, what, figures, most))
        self.rows.append(Goal(name, "stuck", stuck, 0, form=".0f"))
        shares = {policy: statistics.fmean(values) for policy, values in beside.items()}
        self.rows.append(Goal(name, "better neighbor found, %", shares, least=95, form=".0f"))
        kinds = {k: {p: float(np.nanmean(of[p][k])) for p in ALL_POLICIES} for k in of[OURS]}
        worse = [k for k, means in kinds.items() if min(means.values()) < means[OURS]]
        self._lost("kinds of invented jobs", len(kinds), worse)

    def transfer(self) -> None:
        """From a V100 to other GPUs, and to lower power limits of the same GPU."""
        for what, gpus, caps in (
            ("on three GPUs, after a V100", TRANSFER_TO, False),
            ("within lower power limits", tuple(CAPS_W), True),
        ):
            tasks = [
                (number, gpu, with_it, seed, caps)
                for number in range(len(WORKLOADS))
                for gpu in gpus
                for with_it in (False, True)
                for seed in self._seeds
            ]
            found = self._play(play_transfer, tasks, "transfer")
            without, after = (
                statistics.fmean(value for task, value in found.items() if task[2] is with_it)
                for with_it in (False, True)
            )
            others = {} if caps else self._of_others
            self.rows.append(Goal(what, "R_30 with nothing known", {OURS: without, **others}))
            most = None if caps else 1.0
            self.rows.append(Goal(what, "R_30 with what was learned", {OURS: after}, most))

    def server(self) -> None:
        """How long the server takes to choose, ms of CPU."""
        for sizes, before in ((1000, 0), (12, 5000)):
            cpu_ms = decisions(sizes, before)[1][1:]
            what = f"{sizes} sizes, {before} trials: p99, ms"
            figure = float(np.quantile(cpu_ms, 0.99))
            self.rows.append(Goal("a decision of the server", what, {OURS: figure}, 20, form=".1f"))

    def _cases(
        self, pairs: list[tuple[str, int, float | None]], what: str
    ) -> dict[tuple[str, int, float | None], dict[str, list[Outcome]]]:
        of = {
            (pair, policy): [
                Case(pair[0], pair[1], policy, seed, 0.5, 2.0, "usual", pair[2])
                for seed in self._seeds
            ]
            for pair in pairs
            for policy in ALL_POLICIES
        }
        found = self._play(play_case, [case for cases in of.values() for case in cases], what)
        return {
            pair: {policy: [found[case] for case in of[pair, policy]] for policy in ALL_POLICIES}
            for pair in pairs
        }

    def _lost(self, what: str, count: int, names: Iterable[str], to: str = "") -> None:
        lost = list(names)
        shown = ", ".join(lost[:MOST_NAMED]) + (", ..." if len(lost) > MOST_NAMED else "")
        to = to or "to at least one of the three others"
        self.losses.append(f"{len(lost)} of {count} {what} {to}{': ' if lost else ''}{shown}")


def _beaten(outcomes: dict[str, list[Outcome]]) -> bool:
    return any(is_worse(outcomes[OURS], outcomes[policy]) for policy in ALL_POLICIES[1:])


def table(goals: Goals) -> Table:
    """All goals."""
    found = Table(title="recurring jobs: regret in costs of the best batch size, c*")
    heads = ("of", "figure", "goal", "gp", "zeus 0.16", "grid", "halving", "")
    for head in heads:
        found.add_column(head, justify="left" if head in ("of", "figure", "") else "right")
    for row in goals.rows:
        found.add_row(*row.cells())
    return found


def all_goals(pool: Executor, seeds: Sequence[int]) -> Goals:
    """Simulates all of them."""
    goals = Goals(pool, seeds)
    for part in (
        goals.measured,
        goals.targets,
        goals.invented,
        goals.transfer,
        goals.server,
    ):
        part()
    assert not any(math.isnan(row.figures[OURS]) for row in goals.rows)
    return goals

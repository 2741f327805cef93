"""One training job: its ranks, their progress, and the plan of each pipeline.

No file or socket: methods that depend on the time take it as an argument (Unix time, s).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

from pydantic import BaseModel, ConfigDict

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import (
    Choice,
    Chosen,
    FrequencySchedule,
    JobInfo,
    PlanUpdate,
    ProfilingResult,
    Progress,
    RankInfo,
    RankProfile,
    report_interval_s,
)
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.profile import Setting
from zeus.optimizer.pipeline_frequency.server.drift import DriftWatch, Kind
from zeus.optimizer.pipeline_frequency.server.scheduler import FrequencyScheduler, choose
from zeus.optimizer.pipeline_frequency.server.stragglers import StragglerWatch, plans_for

LEAD = 2.5
"""Report intervals before a plan starts, in which every rank has reported and received it."""


class JobRefused(PipelineFrequencyError):
    """A request that cannot be fulfilled.

    Attributes:
        status: HTTP status.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class InForce:
    """The plan that a pipeline runs from `at_iteration` on.

    Attributes:
        version: Number that increases with each change; ranks report theirs.
        plan: Its index in the frontier.
        lead: Iterations until `at_iteration` at the time of the decision.
    """

    version: int = 1
    plan: int = 0
    at_iteration: int = 0
    lead: int = 0


@dataclass
class RankProgress:
    """The last report of a rank.

    Attributes:
        heard_s: Time of the report, Unix time.
        time_s: Time of its last finished iteration; None: none yet.
        per_second: Last rate of iterations, 1/s; 0: not known yet.
        moved_s: When it first reported this iteration; None: not known.
        since: Iterations up to this one ran at least partly under an earlier version.
    """

    iteration: int
    version: int
    heard_s: float
    time_s: float | None = None
    per_second: float = 0.0
    moved_s: float | None = None
    since: int = -1


class JobState(BaseModel):
    """What outlives a restart of the server, other than ranks, plans and reports."""

    model_config = ConfigDict(from_attributes=True)

    info: JobInfo
    created_s: float
    heard_s: float
    initial: Choice
    choice: Choice
    base: int
    version: int
    in_force: list[InForce]
    slowdowns: list[float]
    round: int
    planning_error: str | None


class TrainingJob:
    """A training job; see the module."""

    def __init__(self, info: JobInfo, now_s: float) -> None:
        self.info = info
        self.created_s = now_s
        self.heard_s = now_s
        self.idle_from_s = time.monotonic()
        """When it was heard, of CLOCK_MONOTONIC: setting the clock must not make jobs idle."""
        self.lock = asyncio.Lock()
        """Of its scheduler and its plans."""
        self.changed = asyncio.Event()
        """Set when a schedule may have come."""
        self.scheduler: FrequencyScheduler | None = None
        self.past: dict[int, dict[int, ProfilingResult]] = {}
        """Results of past rounds, by round and rank, that a new scheduler needs."""
        self.ranks: dict[int, RankInfo] = {}
        self._at: dict[tuple[int, int, int], int] = {}
        self.progress: dict[int, RankProgress] = {}
        self.profiles: dict[int, RankProfile] = {}
        self.failure: JobRefused | None = None
        """Why the scheduler gives no schedule; sent to every rank that asks."""
        self.planning = 0
        """Number of times that it is being planned, one after the other."""
        self.planning_error: str | None = None
        self.frontier: Frontier | None = None
        self.initial = Choice(automatic=True)
        self.choice = Choice(automatic=True)
        self.base = 0
        self.in_force: list[InForce] = []
        self.version = 0
        self.round = -1
        """Number of the schedules in `schedules`; -1 before the first."""
        self.schedules: dict[int, FrequencySchedule] = {}
        self.results: dict[int, ProfilingResult] = {}
        self.watch = StragglerWatch([])
        self.drift = DriftWatch()
        self.replanning = False
        self.replans = 0
        """Number of times it was planned again because instructions took longer than planned."""

    def notify(self) -> None:
        """Wakes those who wait for a schedule."""
        self.changed.set()
        self.changed = asyncio.Event()

    # -----------------------------------------------------------------------------------------
    # ranks

    @property
    def complete(self) -> bool:
        """Whether all ranks have registered."""
        return len(self.ranks) == self.info.world_size

    def missing(self, there: Iterable[int]) -> list[int]:
        """Ranks of the job that are not among these."""
        present = set(there)
        return [rank for rank in range(self.info.world_size) if rank not in present]

    def check_rank(self, rank: RankInfo) -> bool:
        """Checks a rank.

        Returns:
            Whether registering it would change anything.

        Raises:
            PipelineFrequencyError: Its data are not valid.
        """
        self.info.check(**rank.numbers)
        known = self.ranks.get(rank.rank)
        if known == rank:
            return False
        if known is not None and self.complete:
            raise JobRefused(
                409,
                f"rank {rank.rank} has registered with other figures, and the job is running; "
                "register a new job if it has changed",
            )
        place = _place(rank)
        other = self._at.get(place, rank.rank)
        if other != rank.rank:
            raise JobRefused(
                409,
                f"rank {rank.rank} says it is dp_rank {place[0]}, pp_rank {place[1]}, tp_rank "
                f"{place[2]}, which is rank {other}; each rank needs a place of its own",
            )
        return True

    def register(self, rank: RankInfo) -> None:
        """Registers a rank, once it is checked."""
        if self.check_rank(rank):
            if rank.rank in self.ranks:
                del self._at[_place(self.ranks[rank.rank])]
            self._at[_place(rank)] = rank.rank
            self.ranks[rank.rank] = rank

    def known_rank(self, rank: int) -> RankInfo:
        """Raises PipelineFrequencyError if it is outside the job, or has not registered."""
        if rank not in self.ranks:
            self.info.check(rank=rank)
            raise JobRefused(409, f"rank {rank} has not registered; POST /register_rank first")
        return self.ranks[rank]

    # -----------------------------------------------------------------------------------------
    # plans

    def schedule(self, rank: int) -> FrequencySchedule | None:
        """The schedule of a rank; None: not known yet."""
        if not self.complete:
            return None
        info = self.ranks[rank]
        if self.frontier is not None:
            now = self.in_force[info.dp_rank]
            steps = self.frontier.plans[now.plan].stages[info.pp_rank]
            return FrequencySchedule(rank=rank, frequencies=list(steps), version=now.version)
        if rank in self.results or rank not in self.schedules:
            return None
        schedule = self.schedules[rank]
        version = self.round + 1 if schedule.frequencies else 0
        return schedule.model_copy(update={"version": version})

    def take_schedules(self, schedules: list[FrequencySchedule]) -> None:
        """The scheduler's schedules for the next round.

        Raises:
            Refused: A rank has none.
        """
        by_rank = {schedule.rank: schedule for schedule in schedules}
        missing = self.missing(by_rank)
        if missing:
            raise JobRefused(500, f"the scheduler gave no schedule for {ranks_in_words(missing)}")
        self.schedules = by_rank
        self.results = {}
        self.round += 1

    def check_profile(self, profile: RankProfile) -> None:
        """Checks a rank's profile against what it has registered.

        Raises:
            Refused: They differ.
        """
        rank = self.known_rank(profile.rank)
        if profile.numbers != rank.numbers:
            raise JobRefused(
                409, f"rank {profile.rank} has registered with another place in the job"
            )
        offered = rank.available_frequencies
        clocks = {row.frequency for row in profile.rows if isinstance(row.frequency, int)}
        if offered and clocks.difference(offered):  # a rank that names none offers any
            raise JobRefused(
                422,
                f"rank {rank.rank} has measured {min(clocks.difference(offered))} MHz, which it "
                f"does not offer; it offers {len(offered)} clocks from {min(offered)} to "
                f"{max(offered)} MHz: measure with these",
            )

    def take_frontier(
        self,
        frontier: Frontier,
        initial: Choice,
        now_s: float,
        slowdowns: Sequence[float] | None = None,
    ) -> None:
        """Sets the plans to choose from; starts with the choice `initial`.

        Args:
            slowdowns: Of the pipelines, if known.
        """
        index, _ = choose(frontier, initial)
        self.frontier = frontier
        self.initial = self.choice = initial
        self.base = index
        self.planning_error = None
        at_iteration, lead = self._begin(now_s)
        self.version += 1
        now = InForce(self.version, index, at_iteration, lead)
        self.in_force = [now] * self.info.dp_degree
        self._watch(frontier, slowdowns)
        self.watch.restart(at_iteration)

    def _watch(self, frontier: Frontier, slowdowns: Sequence[float] | None) -> None:
        pipelines: list[list[int]] = [[] for _ in range(self.info.dp_degree)]
        for rank in self.ranks.values():
            pipelines[rank.dp_rank].append(rank.rank)
        self.watch = StragglerWatch(pipelines, slowdowns)
        self.drift.restart(frontier.problem, self.ranks.values())

    def take_replanned(self, frontier: Frontier, now_s: float) -> None:
        """Sets new plans for changed times of instructions; keeps the choice."""
        before = self.frontier
        assert before is not None

        def kept(choice: Choice) -> Choice:
            if choice.plan is None:
                return choice
            fastest_s = before.plans[before.fastest()].time_s
            slowdown = max(1.0, before.plans[choice.plan].time_s / fastest_s)
            return Choice(max_slowdown=slowdown)

        choice = kept(self.choice)
        self.take_frontier(frontier, kept(self.initial), now_s, self.slowdowns)
        self.replans += 1
        self.choose(choice, now_s)

    def choose(self, choice: Choice, now_s: float) -> Chosen:
        """Handles a choice of another plan.

        Raises:
            Refused: There are no plans.
            PipelineFrequencyError: There is no such plan.
        """
        frontier = self.frontier
        if frontier is None:
            raise JobRefused(
                409,
                "this job has no frontier to choose from yet; it has one when all its ranks have "
                "sent their profiles, or at once when the server is started with a folder of plans",
            )
        if choice.dp_rank is not None and choice.dp_rank >= self.info.dp_degree:
            raise JobRefused(422, f"there is no pipeline {choice.dp_rank} (dp_rank)")
        index, note = choose(frontier, self.effective_choice(choice))
        self.choice = choice
        self.base = index
        plans = self._wanted()
        if choice.dp_rank is not None:
            plans[choice.dp_rank] = frontier.fastest()
        self._switch(plans, now_s)
        at_iteration = max(one.at_iteration for one in self.in_force)
        return Chosen(plan=index, at_iteration=at_iteration, plans=plans, note=note)

    def effective_choice(self, choice: Choice | None = None) -> Choice:
        """A choice, or the present one, with `automatic` resolved."""
        choice = self.choice if choice is None else choice
        return self.initial if choice.automatic else choice

    def _wanted(self) -> list[int]:
        assert self.frontier is not None
        if not self.effective_choice().watches_stragglers:
            return [self.base] * self.info.dp_degree
        return plans_for(self.frontier, self.base, self.slowdowns)

    def _switch(self, plans: list[int], now_s: float) -> bool:
        changes = [i for i, plan in enumerate(plans) if plan != self.in_force[i].plan]
        if not changes:
            return False
        at_iteration, lead = self._begin(now_s)
        self.version += 1
        for pipeline in changes:
            self.in_force[pipeline] = InForce(self.version, plans[pipeline], at_iteration, lead)
        self.watch.restart(at_iteration)
        self.drift.plans_changed()
        return True

    def _begin(self, now_s: float) -> tuple[int, int]:
        """The first iteration that no rank reaches before it receives the plan, and its
        distance."""
        # Ranks that have not reported for this long do not affect when a plan starts.
        heard = [one for one in self.progress.values() if now_s - one.heard_s < 60.0]
        if not heard:
            return 0, 0
        # No iteration is shorter, s; a report of less must not delay a plan without end.
        paces = [
            max(one.per_second, 1 / max(one.time_s, 1e-4) if one.time_s else 0.0) for one in heard
        ]
        if self.frontier is not None and not max(paces) and self.frontier.plans[-1].time_s > 0:
            # No iteration has ended yet: assume the fastest plan's time.
            paces.append(1 / self.frontier.plans[-1].time_s)
        # Ranks wait for each other in every iteration. A report far ahead of most is wrong, and
        # must not delay the plan.
        pace = min(max(paces), 2 * median_low([one for one in paces if one] or [0.0]))
        at = [one.iteration + pace * max(0.0, now_s - one.heard_s) for one in heard]
        interval_s = report_interval_s(self.info.world_size)
        reached = min(max(at), median_low(at) + 1 + pace * interval_s)
        # One more, because the present iteration may be about to end.
        lead = 1 + math.ceil(LEAD * interval_s * pace)
        return math.floor(reached) + lead, lead

    # --------------------------------------------------------------------------------------
    # progress

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """Of each pipeline; 1: not a straggler. Empty before there are plans."""
        return self.watch.slowdowns

    @property
    def iteration(self) -> int | None:
        """The iteration that the last rank is in; None: no rank has reported."""
        return min((one.iteration for one in self.progress.values()), default=None)

    def times(self) -> dict[int, float]:
        """Longest last iteration of a pipeline's ranks, s, where one is known."""
        times: dict[int, float] = {}
        for number, seen in self.progress.items():
            if seen.time_s is not None:
                dp_rank = self.ranks[number].dp_rank
                times[dp_rank] = max(seen.time_s, times.get(dp_rank, 0.0))
        return times

    def drifted(self) -> dict[Kind, float] | None:
        """Factors for the profile's times, if the job must be planned again."""
        if self.frontier is None or self.frontier.problem is None or not self.complete:
            return None
        return self.drift.decide()

    def report(self, report: Progress, now_s: float) -> tuple[PlanUpdate, bool]:
        """Handles a rank's progress.

        Returns:
            Its schedule, and whether its report has changed plans.

        Raises:
            Refused: There is no such rank.
        """
        info = self.known_rank(report.rank)
        known = self.progress.get(report.rank)
        if known is not None and report.iteration < known.iteration:
            known = None  # the process was restarted
            self.watch.restart()
        new = replace(
            known or RankProgress(0, 0, 0.0),
            iteration=report.iteration,
            version=report.version,
            heard_s=now_s,
        )
        if known is not None and report.iteration > known.iteration:
            # If an iteration takes longer than the report interval, most reports show no progress.
            if known.moved_s is not None and now_s > known.moved_s:
                new.per_second = (report.iteration - known.iteration) / (now_s - known.moved_s)
            new.moved_s = now_s
        if known is None or known.version != report.version:
            new.since = report.iteration
        if report.iter_times:
            new.time_s = report.iter_times[-1][1]
        self.progress[report.rank] = new
        changed = self._look_for_stragglers(report, info, new.since, now_s)
        return self._update(report, info), changed

    def _look_for_stragglers(
        self, report: Progress, info: RankInfo, since: int, now_s: float
    ) -> bool:
        if self.frontier is None or not self.complete:
            return False
        now = self.in_force[info.dp_rank]
        if report.version != now.version:
            return False
        times: dict[int, list[tuple[str, Setting, float]]] = {}
        for iteration, name, setting, time_s in report.instruction_times:
            if iteration > since:
                times.setdefault(iteration, []).append((name, setting, time_s))
        for iteration, seen in times.items():
            self.drift.observe(report.rank, iteration, seen)
        promised_s = self.frontier.plans[now.plan].time_s
        changed = False
        for iteration, time_s in report.iter_times:
            # A plan without a known time promises nothing.
            if iteration > since and promised_s > 0:
                changed |= self.watch.observe(report.rank, iteration, time_s / promised_s)
        return changed and self._switch(self._wanted(), now_s)

    def _update(self, report: Progress, info: RankInfo) -> PlanUpdate:
        now = self.in_force[info.dp_rank] if self.frontier is not None else None
        if now is not None and now.version == report.version:
            return PlanUpdate(version=now.version, at_iteration=now.at_iteration)
        schedule = self.schedule(report.rank)
        if schedule is None or schedule.version == report.version:
            return PlanUpdate(
                version=report.version, at_iteration=report.iteration, note=self.planning_error
            )
        at_iteration = report.iteration + 1
        # Where it is much further away, it counts from another start than this rank.
        if now is not None and now.at_iteration <= report.iteration + 2 * now.lead + 10:
            at_iteration = now.at_iteration
        return PlanUpdate(
            version=schedule.version, at_iteration=at_iteration, frequencies=schedule.frequencies
        )

    # --------------------------------------------------------------------------------------
    # restarts

    @classmethod
    def restored(cls, records: Mapping[str, Mapping[int, Any]], now_s: float) -> TrainingJob:
        """The job of its records by kind and key, perhaps of an older backup.

        Ranks may run plans that were made since the backup; so versions go on from the time, above
        all that were ever given.
        """
        state: JobState = records["job"][0]
        job = cls(state.info, state.created_s)
        job.idle_from_s -= max(0.0, now_s - state.heard_s)
        for name in JobState.model_fields.keys() - {"slowdowns"}:
            setattr(job, name, getattr(state, name))
        job.version = max(state.version, int(now_s))
        for rank in records.get("rank", {}).values():
            job.register(rank)
        job.profiles = dict(records.get("profile", {}))
        job.progress = records.get("progress", {}).get(0, {})
        job.frontier = records.get("frontier", {}).get(0)
        if job.frontier is not None:
            job._watch(job.frontier, state.slowdowns)
        for key, result in records.get("result", {}).items():
            number, rank = divmod(key, job.info.world_size)
            job.past.setdefault(number, {})[rank] = result
        if job.round >= 0:
            job.results = job.past.pop(job.round, {})
            job.schedules = {one.rank: one for one in records["round"][job.round]}
        return job

    # ---------------------------------------------------------------------------------------
    # display

    @property
    def phase(self) -> str:
        """`failed`, `registering`, `planning`, `profiling` or `running`."""
        if self.failure is not None:
            return "failed"
        if not self.complete:
            return "registering"
        if self.planning:
            return "planning"
        if self.frontier is not None or any(one.frequencies for one in self.schedules.values()):
            return "running"
        return "profiling" if self.schedules else "registering"


def _place(rank: RankInfo) -> tuple[int, int, int]:
    return rank.dp_rank, rank.pp_rank, rank.tp_rank


def ranks_in_words(ranks: list[int]) -> str:
    """`rank 3`, `ranks 3, 5`, `ranks 0, 1, ... and 12 more`."""
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"

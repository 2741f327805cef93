"""Schedulers: the interface for your own, and the built-in ones.

A scheduler is created when all ranks of a job have registered. It runs in a thread of the server
and may take long. Its exceptions are sent to every rank, a `ValueError` as an error in the request.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import (
    Choice,
    FrequencySchedule,
    JobInfo,
    PFOServerSettings,
    ProfilingResult,
    RankInfo,
)
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan, read_plan
from zeus_common.text import sentence

Rounds = Generator[list[FrequencySchedule], list[ProfilingResult], None]
"""Yields the next schedules of all ranks, and receives their measurements."""


class FrequencyScheduler(ABC):
    """Decides the clocks of the ranks of one job.

    Implement `_run`: yield a schedule for each rank; once every rank has posted a result for it,
    the results come back from the `yield`. When `_run` ends, its last schedules stay. After a
    restart of the server it is run again and sent the same results.

    Args:
        job_info: The job.
        rank_infos: All its ranks.
        pfo_settings: The server's settings.

    Attributes:
        frontier: A scheduler that sets this leaves the choice of plans to the server; `_run` is
            not called then.
        choice: The server's initial choice among them.
    """

    frontier: Frontier | None = None
    choice: Choice = Choice(automatic=True)

    def __init__(
        self, job_info: JobInfo, rank_infos: list[RankInfo], pfo_settings: PFOServerSettings
    ) -> None:
        self.job_info = job_info
        self.rank_infos = sorted(rank_infos, key=lambda info: info.rank)
        self.world_size = job_info.world_size
        self.pfo_settings = pfo_settings
        self._rounds: Rounds | None = None
        self._schedules: list[FrequencySchedule] = []

    @classmethod  # noqa: B027 - most have nothing to check
    def check(cls, **scheduler_args: Any) -> None:
        """Called at the server's start, to report bad arguments then.

        Raises:
            PipelineFrequencyError: They are not valid for any job.
        """

    @abstractmethod
    def _run(self) -> Rounds:
        """Yields lists of schedules, and receives the ranks' results for each."""

    def of_plan(self, plan: Plan) -> list[FrequencySchedule]:
        """The schedules of all ranks under a plan."""
        return [
            FrequencySchedule(rank=info.rank, frequencies=list(plan.stages[info.pp_rank]))
            for info in self.rank_infos
        ]

    def next_schedule(self) -> list[FrequencySchedule]:
        """The present schedules of the ranks."""
        if self._rounds is None:
            self._rounds = self._run()
            try:
                self._schedules = next(self._rounds)
            except StopIteration:
                raise RuntimeError(
                    f"{type(self).__name__}._run ended before its first yield"
                ) from None
        return self._schedules

    def observe(self, profiling_results: list[ProfilingResult]) -> None:
        """Handles the ranks' measurements under it."""
        self.next_schedule()
        assert self._rounds is not None
        with suppress(StopIteration):
            self._schedules = self._rounds.send(profiling_results)


def make_3d_parallel(
    sched_cls: type[FrequencyScheduler], name: str | None = None
) -> type[FrequencyScheduler]:
    """Extends a scheduler for pipelines to jobs with data and tensor parallelism.

    The scheduler sees one pipeline with a rank per stage. All ranks of a stage get that stage's
    schedule; of their results it sees the longest times and the sums of the energies.

    Args:
        sched_cls: Scheduler for jobs whose degrees of data and tensor parallelism are 1.
        name: Of the new class; `sched_cls.__name__ + "3D"` if None.
    """

    class Wrapper(sched_cls):  # type: ignore[valid-type,misc]  # made at run time
        def __init__(
            self,
            job_info: JobInfo,
            rank_infos: list[RankInfo],
            pfo_settings: PFOServerSettings,
            **scheduler_args: Any,
        ) -> None:
            self._all_ranks = sorted(rank_infos, key=lambda info: info.rank)
            pipeline = {"dp_degree": 1, "tp_degree": 1, "world_size": job_info.pp_degree}
            stages = [
                info.model_copy(update={"rank": info.pp_rank, "dp_rank": 0, "tp_rank": 0})
                for info in self._all_ranks
                if info.dp_rank == info.tp_rank == 0
            ]
            super().__init__(
                job_info.model_copy(update=pipeline), stages, pfo_settings, **scheduler_args
            )

        def next_schedule(self) -> list[FrequencySchedule]:
            of_stage = {schedule.rank: schedule for schedule in super().next_schedule()}
            return [
                of_stage[info.pp_rank].model_copy(update={"rank": info.rank})
                for info in self._all_ranks
            ]

        def observe(self, profiling_results: list[ProfilingResult]) -> None:
            of_rank = {result.rank: result for result in profiling_results}
            by_stage: dict[int, list[ProfilingResult]] = {}
            for info in self._all_ranks:
                by_stage.setdefault(info.pp_rank, []).append(of_rank[info.rank])
            super().observe([_joined(stage, by_stage[stage]) for stage in sorted(by_stage)])

    Wrapper.__name__ = Wrapper.__qualname__ = name or f"{sched_cls.__name__}3D"
    Wrapper.__module__ = sched_cls.__module__
    Wrapper.__doc__ = f"`{sched_cls.__name__}` for jobs with data and tensor parallelism, too."
    # Reports wrong arguments when the server starts.
    Wrapper.__signature__ = inspect.signature(sched_cls)
    return Wrapper


def _joined(stage: int, results: Sequence[ProfilingResult]) -> ProfilingResult:
    def each(values: Iterable[Sequence[float]], how: Callable[[Iterable[float]], float]) -> Any:
        return [how(together) for together in zip(*values, strict=False)]

    def nested(field: str, how: Callable[[Iterable[float]], float]) -> dict[str, list[Any]]:
        breakdowns = [getattr(result, field) for result in results]
        names = [name for name in breakdowns[0] if all(name in one for one in breakdowns)]
        return {
            name: [
                each(iteration, how)
                for iteration in zip(*(one[name] for one in breakdowns), strict=False)
            ]
            for name in names
        }

    return ProfilingResult(
        rank=stage,
        iter_time=each([result.iter_time for result in results], max),
        iter_energy=each([result.iter_energy for result in results], sum),
        time_breakdown=nested("time_breakdown", max),
        energy_breakdown=nested("energy_breakdown", sum),
    )


class PointSolution(FrequencyScheduler):
    """Runs one plan.

    Args:
        rank_infos: All its ranks; those of one stage get the same schedule.
        pfo_settings: The server's settings.
        solution_path: The plan, a file `freqs_pipeline_00042.py`.
    """

    def __init__(
        self,
        job_info: JobInfo,
        rank_infos: list[RankInfo],
        pfo_settings: PFOServerSettings,
        solution_path: str,
    ) -> None:
        super().__init__(job_info, rank_infos, pfo_settings)
        self.plan: Plan = read_plan(solution_path)
        check_stages(len(self.plan.stages), job_info, solution_path)

    @classmethod
    def check(cls, **scheduler_args: Any) -> None:
        """Reads the plan."""
        read_plan(_path(scheduler_args))

    def _run(self) -> Rounds:
        yield self.of_plan(self.plan)


PointSolution3D = make_3d_parallel(PointSolution)


def _choice(given: Mapping[str, Any]) -> Choice:
    """The server's initial choice from a frontier, by a scheduler's arguments."""
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return Choice.model_validate(given or {"automatic": True}, strict=True)
    except ValidationError as error:
        raise PipelineFrequencyError(sentence(error)) from None


class FrontierSolution(FrequencyScheduler):
    """Holds all plans of a frontier; the server chooses, and chooses again as training continues.

    Args:
        pfo_settings: The server's settings.
        solution_path: The folder that `run_optimization.py` wrote.
        choice: How to start, as `POST /choose` has it: such as `deadline_s`, `max_slowdown` or
            `plan`. Without it: with the fastest plan.
    """

    def __init__(
        self,
        job_info: JobInfo,
        rank_infos: list[RankInfo],
        pfo_settings: PFOServerSettings,
        solution_path: str,
        **choice: Any,
    ) -> None:
        super().__init__(job_info, rank_infos, pfo_settings)
        self.frontier, self.choice = _read(solution_path), _choice(choice)
        check_stages(self.frontier.num_stages, job_info, solution_path)

    @classmethod
    def check(cls, **scheduler_args: Any) -> None:
        """Reads the frontier."""
        frontier = _read(_path(scheduler_args))
        del scheduler_args["solution_path"]
        choose(frontier, _choice(scheduler_args))

    def _run(self) -> Rounds:
        assert self.frontier is not None
        yield self.of_plan(self.frontier.plans[choose(self.frontier, self.choice)[0]])


class OnlineSolution(FrequencyScheduler):
    """For jobs that profile themselves: the server plans when all ranks have sent their profiles.

    Args:
        job_info: The job; its `schedule` (default `1f1b`) and `num_microbatches` say what to plan.
        pfo_settings: The server's settings.
        points: Most plans; None: as many as it takes for neighbours to differ by at most 0.1 % in
            energy.
        p2p_power_w: What a GPU draws while it is blocked on communication, W, where no rank has
            measured it.
        choice: As for `FrontierSolution`.
    """

    def __init__(
        self,
        job_info: JobInfo,
        rank_infos: list[RankInfo],
        pfo_settings: PFOServerSettings,
        points: int | None = None,
        p2p_power_w: float = 70.0,
        **choice: Any,
    ) -> None:
        super().__init__(job_info, rank_infos, pfo_settings)
        self.choice = _choice(choice)
        self.points = points
        self.p2p_power_w = p2p_power_w

    @classmethod
    def check(cls, **scheduler_args: Any) -> None:
        """Validates the arguments."""
        points, power = scheduler_args.pop("points", None), scheduler_args.pop("p2p_power_w", 0.0)
        _choice(scheduler_args)
        if points is not None and not (type(points) is int and points >= 1):
            raise PipelineFrequencyError(f"points must be a whole number above 0, not {points!r}")
        if not (type(power) in (int, float) and 0 <= power < math.inf):
            raise PipelineFrequencyError(f"p2p_power_w must be watts, not {power!r}")

    def _run(self) -> Rounds:
        yield [FrequencySchedule(rank=info.rank, frequencies=[]) for info in self.rank_infos]


def choose(frontier: Frontier, choice: Choice) -> tuple[int, str | None]:
    """The plan of a choice, and a note if the choice cannot be met exactly.

    Raises:
        PipelineFrequencyError: There is no such plan.
    """
    fastest = frontier.fastest()
    least_s, limit_s = frontier.plans[fastest].time_s, choice.deadline_s or choice.straggler_s
    if choice.max_slowdown is not None:
        limit_s = choice.max_slowdown * least_s
    if limit_s is None:
        index = fastest if choice.plan is None else choice.plan
        if index > fastest:
            raise PipelineFrequencyError(
                f"there is no plan {index}; plans are 0 (slowest) to {fastest} (fastest)"
            )
        return index, None
    of = frontier.by_deadline if choice.straggler_s is None else frontier.by_straggler
    index = of(limit_s)
    if frontier.plans[index].time_s <= limit_s * (1 + 1e-9):
        return index, None
    return index, f"no plan is as fast as {limit_s:g} s; this is the fastest, {least_s:.4g} s"


def check_stages(stages: int, job_info: JobInfo, what: str) -> None:
    """Raises PipelineFrequencyError if a plan has another number of stages than the job."""
    if stages != job_info.pp_degree:
        raise PipelineFrequencyError(
            f"{what} has {stages} stages, but the job has {job_info.pp_degree} (pp_degree); plan "
            "for that number of stages"
        )


@lru_cache(maxsize=1)
def _read(path: str) -> Frontier:
    """Reads a folder's frontier; a large one takes seconds, and its files do not change."""
    return Frontier.read(path)


def _path(scheduler_args: dict[str, Any]) -> str:
    path = scheduler_args.get("solution_path")
    if not isinstance(path, str):
        raise PipelineFrequencyError(f"solution_path must be a path, not {path!r}")
    return path

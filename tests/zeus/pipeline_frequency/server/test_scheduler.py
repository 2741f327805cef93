"""The interface for schedulers, and those that are built in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.pipeline_frequency.server.running import PLAN, frontier, job_body, rank_bodies
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import (
    FrequencySchedule,
    JobInfo,
    ProfilingResult,
    RankInfo,
)
from zeus.optimizer.pipeline_frequency.plans import read_plan
from zeus.optimizer.pipeline_frequency.server.scheduler import (
    FrequencyScheduler,
    FrontierSolution,
    OnlineSolution,
    PointSolution,
    PointSolution3D,
    Rounds,
    make_3d_parallel,
)
from zeus.optimizer.pipeline_frequency.server.settings import PlanServerSettings

SETTINGS = PlanServerSettings.from_env({})


class Watching(FrequencyScheduler):
    """Records its arguments."""

    def __init__(self, *job: Any, rounds: int = 2) -> None:
        super().__init__(*job)
        self.rounds = rounds
        self.seen: list[list[ProfilingResult]] = []

    def _run(self) -> Rounds:
        for number in range(self.rounds):
            clocks = {info.rank: 100 * number + info.rank for info in self.rank_infos}
            self.seen.append(
                (
                    yield [
                        FrequencySchedule(rank=rank, frequencies=[("forward", mhz)])
                        for rank, mhz in clocks.items()
                    ]
                )
            )


def made(cls: Any, dp: int, pp: int, tp: int, **args: Any) -> Any:
    ranks = [RankInfo(**body) for body in reversed(rank_bodies(dp, pp, tp))]
    return cls(JobInfo(**job_body(dp, pp, tp)), ranks, SETTINGS, **args)


def clocks(scheduler: FrequencyScheduler) -> dict[int, int]:
    return {one.rank: one.frequencies[0][1] for one in scheduler.next_schedule()}


def result(rank: int, time: float, energy: float) -> ProfilingResult:
    return ProfilingResult(
        rank=rank,
        iter_time=[time, time + 1],
        iter_energy=[energy, energy],
        time_breakdown={"forward": [[time], [time / 2]]},
        energy_breakdown={"forward": [[energy], [energy / 2]]},
    )


def test_schedules_stay_until_results_come_and_the_last_forever() -> None:
    scheduler = made(Watching, 1, 2, 1)
    assert clocks(scheduler) == clocks(scheduler) == {0: 0, 1: 1}
    results = [result(0, 1, 1), result(1, 1, 1)]
    scheduler.observe(results)
    assert scheduler.seen == [results]
    assert clocks(scheduler) == {0: 100, 1: 101}
    for _ in range(3):
        scheduler.observe(results)
        assert clocks(scheduler) == {0: 100, 1: 101}


def test_a_scheduler_without_any_schedule_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"Watching\._run ended before its first yield"):
        made(Watching, 1, 2, 1, rounds=0).next_schedule()


def test_in_3d_the_scheduler_sees_one_pipeline_and_all_ranks_get_their_stages() -> None:
    scheduler = made(make_3d_parallel(Watching), 2, 3, 2)
    assert type(scheduler).__name__ == "Watching3D"
    info = scheduler.job_info
    assert (info.dp_degree, info.pp_degree, info.tp_degree, info.world_size) == (1, 3, 1, 3)
    assert scheduler.world_size == 3
    assert [(one.rank, one.dp_rank, one.pp_rank, one.tp_rank) for one in scheduler.rank_infos] == [
        (stage, 0, stage, 0) for stage in range(3)
    ]
    assert clocks(scheduler) == {rank: rank // 4 for rank in range(12)}
    scheduler.observe([result(rank, rank, 10 + rank) for rank in reversed(range(12))])
    (seen,) = scheduler.seen
    assert [one.rank for one in seen] == [0, 1, 2]
    assert seen[1].iter_time == [7, 8]  # the longest of ranks 4 to 7
    assert seen[1].iter_energy == [14 + 15 + 16 + 17] * 2
    assert seen[1].time_breakdown == {"forward": [[7], [3.5]]}
    assert seen[1].energy_breakdown == {"forward": [[62], [31]]}


def test_a_wrapped_scheduler_takes_the_same_arguments() -> None:
    wrapped = make_3d_parallel(Watching, "Mine")
    assert wrapped.__name__ == "Mine"
    with pytest.raises(PipelineFrequencyError, match="round"):
        PlanServerSettings.from_env(
            {"ZEUS_PFO_SCHEDULER": f"{__name__}:Wrapped", "ZEUS_PFO_SCHEDULER_ARGS": '{"round": 1}'}
        )
    assert made(wrapped, 1, 2, 1, rounds=5).rounds == 5


Wrapped = make_3d_parallel(Watching)


@pytest.mark.parametrize("cls", [PointSolution, PointSolution3D])
def test_a_plan_is_run_by_all_ranks_of_its_stages(cls: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.py"
    path.write_text(PLAN)
    scheduler = made(cls, 2, 2, 2, solution_path=str(path))
    found = {one.rank: one.frequencies for one in scheduler.next_schedule()}
    stages = read_plan(path).stages
    assert found == {rank: list(stages[rank // 4]) for rank in range(8)}
    with pytest.raises(PipelineFrequencyError, match="has 2 stages, but the job has 3"):
        made(cls, 1, 3, 1, solution_path=str(path))


def test_a_frontier_can_be_run_without_a_server(tmp_path: Path) -> None:
    frontier().write(tmp_path)
    scheduler = made(FrontierSolution, 1, 2, 1, solution_path=str(tmp_path), plan=3)
    assert clocks(scheduler) == {0: 1407, 1: 1402}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"deadline_s": 1, "plan": 2}, "give exactly one of deadline_s, max_slowdown"),
        ({"max_slowdown": 0.5}, r"max_slowdown: .* not 0\.5"),
        ({"plan": -1}, "plan: .* not -1"),
        ({"plan": True}, "plan: .* not True"),
        ({"deadline_s": "x"}, "deadline_s: .* not 'x'"),
        ({"deadline": 1}, "there is no setting deadline;"),
    ],
)
def test_invalid_wishes_are_reported(tmp_path: Path, args: dict[str, Any], says: str) -> None:
    frontier().write(tmp_path)
    for cls, more in ((FrontierSolution, {"solution_path": str(tmp_path)}), (OnlineSolution, {})):
        with pytest.raises(PipelineFrequencyError, match=says):
            cls.check(**more, **args)
    with pytest.raises(PipelineFrequencyError, match="there is no plan 20"):
        FrontierSolution.check(solution_path=str(tmp_path), plan=20)
    with pytest.raises(PipelineFrequencyError, match="points must be"):
        OnlineSolution.check(points=True)
    with pytest.raises(PipelineFrequencyError, match="p2p_power_w must be"):
        OnlineSolution.check(p2p_power_w=float("inf"))


def test_the_path_says_which_scheduler(tmp_path: Path) -> None:
    frontier().write(tmp_path)
    plan = tmp_path / "freqs_pipeline_00003.py"
    for args, cls in (
        ({"solution_path": str(tmp_path)}, FrontierSolution),
        ({"solution_path": str(tmp_path / "frontier.json")}, FrontierSolution),
        ({"solution_path": str(plan)}, PointSolution),
        ({"points": 5}, OnlineSolution),
        ({}, OnlineSolution),
    ):
        environment = {"zeus_pfo_scheduler_args": json.dumps(args), "HOME": "/"}
        settings = PlanServerSettings.from_env(environment)
        assert (settings.scheduler, settings.scheduler_args) == (cls, args)
    assert SETTINGS.scheduler is OnlineSolution

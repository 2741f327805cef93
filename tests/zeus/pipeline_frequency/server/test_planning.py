"""The planner's processes: each answers a question, and none outlives it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.pipeline_frequency.server.running import job_body, profile_body
from tests.zeus.pipeline_frequency.toys import random_profile
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankProfile
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.plans import Frontier
from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b
from zeus.optimizer.pipeline_frequency.server import planning


def planner_of(seed: int) -> Planner:
    """A small planner."""
    profile = random_profile(random.Random(seed), 2, 2)
    return Planner(profile, one_f_one_b(2, 2), p2p_power_w=60.0)


class Started(list[asyncio.subprocess.Process]):
    """The processes that were started; the first one gets a signal before its question."""

    signal: int = 0


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """They are noted here."""
    found = Started()
    start = asyncio.create_subprocess_exec

    async def noted(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        found.append(await start(*command, **options))
        if len(found) == 1:
            os.kill(found[0].pid, found.signal)
        return found[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return found


async def made(points: int = 5) -> Frontier:
    """A frontier of a small problem."""
    return await planning.frontier_of(planner_of(3).problem, points)


ORDER = ["forward", "forward", "backward", "backward"]


def profile(rank: int, **more: Any) -> RankProfile:
    """Of stage `rank` of two."""
    place = {"rank": rank, "dp_rank": 0, "pp_rank": rank, "tp_rank": 0}
    return RankProfile.model_validate({**profile_body(place), "instructions": ORDER, **more})


def test_a_problem_is_of_the_job_and_of_all_its_profiles() -> None:
    info = JobInfo(**job_body(1, 2, 4, schedule="gpipe"))
    found = planning.problem_of(info, [profile(0, p2p_power_w=60.0), profile(1)], 50.0)
    assert (found.p2p_power_w, found.gpus_per_stage, found.energy_per) == (70.0, 4, "gpu")
    assert (found.change_time_s, found.max_changes) == (0.0, None)
    assert {(kind.stage, kind.instruction) for kind in found.profile} == {
        (stage, name) for stage in (0, 1) for name in ("forward", "backward")
    }
    unmeasured = [profile(rank, p2p_power_w=None) for rank in (0, 1)]
    assert planning.problem_of(info, unmeasured, 50.0).p2p_power_w == 50
    with pytest.raises(PipelineFrequencyError, match="give num_microbatches with the job, or"):
        planning.problem_of(info, [profile(rank, instructions=[]) for rank in (0, 1)], 50.0)
    other = profile(1, instructions=["forward", "backward", "forward", "backward"])
    words = (
        r"stage 1 runs 4 instructions in another order than gpipe with 2 microbatches has it \(4; "
        "they differ from number 1 on"
    )
    with pytest.raises(PipelineFrequencyError, match=words):
        planning.problem_of(info, [profile(0), other], 50.0)


def test_a_process_answers_and_ends(started: Started) -> None:
    assert asyncio.run(made()) == planner_of(3).frontier(5)
    assert [process.returncode for process in started] == [0]
    with pytest.raises(PipelineFrequencyError, match="at least one plan, not 0"):
        asyncio.run(made(0))


def test_after_a_crash_the_next_question_is_answered(started: Started) -> None:
    started.signal = signal.SIGKILL
    with pytest.raises(PipelineFrequencyError, match=r"exit code -9.*log"):
        asyncio.run(made())
    assert len(asyncio.run(made()).plans) == 5


def test_what_runs_is_ended_with_who_asked(started: Started) -> None:
    started.signal = signal.SIGSTOP

    async def cancelled() -> None:
        asking = asyncio.create_task(made())
        while not started:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(cancelled())
    assert started[0].returncode == -signal.SIGKILL


def test_a_planner_that_takes_too_long_is_ended(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "LIMIT_S", 0.001)
    with pytest.raises(PipelineFrequencyError, match="ask for fewer points"):
        asyncio.run(made())
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_output_of_a_library_does_not_get_into_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a solver's banner, from C."""
    (tmp_path / "highspy.py").write_text(
        "import importlib, os, sys\n"
        "os.write(1, b'Running')\n"
        f"sys.path.remove({str(tmp_path)!r})\n"
        "del sys.modules['highspy']\n"
        "sys.modules['highspy'] = importlib.import_module('highspy')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    assert len(asyncio.run(made()).plans) == 5


def test_a_planner_that_is_not_installed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "highspy.py").write_text("raise ImportError('no highspy')\n")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(PipelineFrequencyError, match=r"pip install.*zeusd\[pfo"):
        asyncio.run(made())

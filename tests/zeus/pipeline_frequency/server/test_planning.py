"""The planner's processes: each answers a question, and none outlives it."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.pipeline_frequency.toys import random_profile
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.planner import Planner
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


def run(work: Callable[[planning.PlannerProcesses], Awaitable[None]]) -> None:
    """Runs something with processes, and stops them."""

    async def both() -> None:
        planners = planning.PlannerProcesses()
        try:
            await asyncio.wait_for(work(planners), 60.0)
        finally:
            await planners.close()

    asyncio.run(both())


def test_processes_answer_and_end(started: Started) -> None:
    planner = planner_of(3)
    time_s = 1.1 * planner.fastest_time_s

    async def work(planners: planning.PlannerProcesses) -> None:
        frontier = await planners.frontier(planner.problem, 5)
        assert len(frontier.plans) == 5
        straggling, fast, same = await asyncio.gather(
            planners.plans(planner.problem, [("straggler", time_s)]),
            planners.plans(planner.problem, [("deadline", time_s), ("deadline", time_s / 1.1)]),
            planners.plans(planner.problem, [("straggler", time_s)]),
        )
        assert [len(straggling), len(fast)] == [1, 2]
        assert straggling[0].time_s <= time_s
        assert straggling == same
        assert fast[1].time_s <= time_s / 1.1 * (1 + 1e-9)
        with pytest.raises(PipelineFrequencyError, match="the fastest takes"):
            await planners.plans(planner.problem, [("deadline", 1e-6)])
        assert [process.returncode for process in started] == [0] * 4

    run(work)


def test_after_a_crash_the_next_question_is_answered(started: Started) -> None:
    planner = planner_of(3)
    started.signal = signal.SIGKILL

    async def work(planners: planning.PlannerProcesses) -> None:
        with pytest.raises(PipelineFrequencyError, match=r"exit code -9.*log"):
            await planners.plans(planner.problem, [("straggler", 1.0)])
        assert await planners.plans(planner.problem, [("straggler", 1.0)])

    run(work)


def test_what_runs_is_ended_with_the_server(started: Started) -> None:
    started.signal = signal.SIGSTOP

    async def work(planners: planning.PlannerProcesses) -> None:
        asking = asyncio.create_task(planners.frontier(planner_of(3).problem, 5))
        while not started:
            await asyncio.sleep(0.001)
        await planners.close()
        with pytest.raises(asyncio.CancelledError):
            await asking

    run(work)
    assert started[0].returncode == -signal.SIGKILL


def test_a_planner_that_takes_too_long_is_ended(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "LIMIT_S", 0.001)

    async def work(planners: planning.PlannerProcesses) -> None:
        with pytest.raises(PipelineFrequencyError, match="ask for fewer points"):
            await planners.frontier(planner_of(3).problem, 5)
        assert [process.returncode for process in started] == [-signal.SIGKILL]

    run(work)


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

    async def work(planners: planning.PlannerProcesses) -> None:
        found = await planners.frontier(planner_of(3).problem, 5)
        assert len(found.plans) == 5

    run(work)


def test_a_planner_that_is_not_installed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "highspy.py").write_text("raise ImportError('no highspy')\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def work(planners: planning.PlannerProcesses) -> None:
        with pytest.raises(PipelineFrequencyError, match=r"pip install.*zeusd\[pfo"):
            await planners.frontier(planner_of(3).problem, 5)

    run(work)

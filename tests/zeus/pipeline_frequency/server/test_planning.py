"""The planner's processes: one answers all questions about a problem, and none outlives its use."""

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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """The processes that were started."""
    found: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*command: Any, **options: Any) -> asyncio.subprocess.Process:
        found.append(await start(*command, **options))
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


async def ended(process: asyncio.subprocess.Process) -> None:
    """Waits until a process has ended."""
    await asyncio.wait_for(process.wait(), 30.0)


def test_one_process_answers_all_questions_about_a_problem(
    started: list[asyncio.subprocess.Process],
) -> None:
    planner = planner_of(3)
    time_s = 1.1 * planner.fastest_time_s

    async def work(planners: planning.PlannerProcesses) -> None:
        frontier = await planners.frontier(planner.problem, 5)
        assert len(frontier.plans) == 5
        straggling, fast = await asyncio.gather(
            planners.plans(planner.problem, [("straggler", time_s)]),
            planners.plans(planner.problem, [("deadline", time_s), ("deadline", time_s / 1.1)]),
        )
        assert [len(straggling), len(fast)] == [1, 2]
        assert straggling[0].time_s <= time_s
        assert fast[1].time_s <= time_s / 1.1 * (1 + 1e-9)
        assert len(started) == 1

    run(work)
    assert started[0].returncode is not None


def test_a_question_without_an_answer_leaves_the_process_to_others(
    started: list[asyncio.subprocess.Process],
) -> None:
    planner = planner_of(3)

    async def work(planners: planning.PlannerProcesses) -> None:
        with pytest.raises(PipelineFrequencyError, match="the fastest takes"):
            await planners.plans(planner.problem, [("deadline", 1e-6)])
        assert await planners.plans(planner.problem, [("straggler", 1.0)])
        assert len(started) == 1

    run(work)


def test_after_a_crash_the_next_question_is_answered(
    started: list[asyncio.subprocess.Process],
) -> None:
    planner = planner_of(3)

    async def work(planners: planning.PlannerProcesses) -> None:
        await planners.frontier(planner.problem, 5)
        os.kill(started[0].pid, signal.SIGSTOP)
        asking = asyncio.create_task(planners.plans(planner.problem, [("straggler", 1.0)]))
        for _ in range(20):  # the question is on its way after fewer turns
            await asyncio.sleep(0)
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(PipelineFrequencyError, match=r"exit code -9.*log"):
            await asking
        assert await planners.plans(planner.problem, [("straggler", 1.0)])
        os.kill(started[1].pid, signal.SIGKILL)
        await ended(started[1])
        assert await planners.plans(planner.problem, [("straggler", 2.0)])
        assert len(started) == 3

    run(work)


def test_few_idle_processes_are_kept(
    started: list[asyncio.subprocess.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "PLANNERS", 1)

    async def work(planners: planning.PlannerProcesses) -> None:
        await planners.frontier(planner_of(3).problem, 5)
        await planners.frontier(planner_of(4).problem, 5)
        await ended(started[0])
        assert started[1].returncode is None
        monkeypatch.setattr(planning, "IDLE_S", 0.0)
        await planners.frontier(planner_of(4).problem, 4)
        await ended(started[1])
        assert len(started) == 2

    run(work)


def test_a_planner_that_takes_too_long_is_ended(
    started: list[asyncio.subprocess.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "LIMIT_S", 0.001)

    async def work(planners: planning.PlannerProcesses) -> None:
        with pytest.raises(PipelineFrequencyError, match="ask for fewer points"):
            await planners.frontier(planner_of(3).problem, 5)
        for process in started:
            await ended(process)

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

"""Plans in separate processes, because the planner computes for seconds.

A process gets a problem and a question: the number of plans, or their times. It answers with a
frontier or plans, or with the sentence of an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankProfile
from zeus.optimizer.pipeline_frequency.placed_schedules import BY_NAME, CHUNKED
from zeus.optimizer.pipeline_frequency.plans import Ask, Frontier, Plan
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile

LIMIT_S = 3600.0
"""Time limit of the planner."""

KEPT = 32
"""Most frontiers that are cached for further jobs with the same profile."""

Question = int | list[Ask] | None
"""The number of plans of a frontier, as few or many as it takes for None; or single plans."""


def problem_of(
    info: JobInfo, profiles: Sequence[RankProfile], p2p_power_w: float
) -> dict[str, Any]:
    """The planning problem of a job, in JSON-compatible form.

    Raises:
        PipelineFrequencyError: Data are missing, or the profiles contradict the schedule.
    """
    measured = [one.p2p_power_w for one in profiles if one.p2p_power_w is not None]
    orders = {one.pp_rank: one.instructions for one in profiles if one.instructions}
    forwards = {steps.count("forward") for steps in orders.values()}
    microbatches = info.num_microbatches or (forwards.pop() if len(forwards) == 1 else None)
    if not microbatches:
        raise PipelineFrequencyError(
            "the number of microbatches is not known; give num_microbatches with the job, or "
            "instructions with each profile"
        )
    profile = InstructionProfile.from_rows(row for one in profiles for row in one.rows)
    name = info.schedule or "1f1b"
    if name in CHUNKED:
        chunks = 1 + max(row.chunk for one in profiles for row in one.rows)
        if orders:
            chunks = max(1, next(iter(orders.values())).count("forward") // microbatches)
        pipeline = BY_NAME[name](info.pp_degree, microbatches, chunks)
    elif name in BY_NAME:
        pipeline = BY_NAME[name](info.pp_degree, microbatches)
    else:
        raise PipelineFrequencyError(f"there is no schedule {name}; take {', '.join(BY_NAME)}")
    for stage, steps in orders.items():
        planned = [pipeline.instructions[place].name for place in pipeline.stages[stage]]
        if planned != steps:
            differ = next(
                (n for n, (a, b) in enumerate(zip(planned, steps, strict=False)) if a != b),
                min(len(planned), len(steps)),
            )
            raise PipelineFrequencyError(
                f"stage {stage} runs {len(steps)} instructions in another order than {name} with "
                f"{microbatches} microbatches has it ({len(planned)}; they differ from number "
                f"{differ} on); give schedule and num_microbatches with the job"
            )
    return {
        "profile": profile.to_json(),
        "pipeline": pipeline.to_json(),
        "p2p_power_w": sum(measured) / len(measured) if measured else p2p_power_w,
        "gpus_per_stage": info.tp_degree,
        "energy_per": "gpu",
        "change_time_s": 0.0,
        "max_changes": None,
    }


class PlannerProcesses:
    """Plans in processes, and caches results: jobs with the same profile share them."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, asyncio.Task[Any]] = OrderedDict()

    async def frontier(self, problem: dict[str, Any], points: int | None) -> Frontier:
        """The frontier of a problem.

        Raises:
            PipelineFrequencyError: There is none, and why.
        """
        found: Frontier = await self._shared(problem, points)
        return found

    async def plans(self, problem: dict[str, Any], asks: Sequence[Ask]) -> list[Plan]:
        """A plan for each time.

        Raises:
            PipelineFrequencyError: There is none, and why.
        """
        found: list[Plan] = await self._shared(problem, list(asks))
        return found

    async def close(self) -> None:
        """Stops running processes."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def _shared(self, problem: dict[str, Any], question: Question) -> Any:
        key = json.dumps([question, problem])
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(_ask(problem, question))
            while len(self._tasks) > KEPT and next(iter(self._tasks.values())).done():
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(key)
        try:
            # A job that is dropped meanwhile must not cancel it for another one.
            return await asyncio.shield(task)
        except PipelineFrequencyError:
            if self._tasks.get(key) is task:
                del self._tasks[key]
            raise


async def _ask(problem: dict[str, Any], question: Question) -> Any:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        sent = json.dumps([problem, question]).encode()
        answer, _ = await asyncio.wait_for(process.communicate(sent), LIMIT_S)
    except asyncio.TimeoutError:
        raise PipelineFrequencyError(
            f"the planner took longer than {LIMIT_S:g} s; ask for fewer points"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise PipelineFrequencyError(
            f"the planner ended with exit code {process.returncode}; see its messages in the "
            "server's log"
        )
    found = await asyncio.to_thread(_ANSWER.validate_json, answer)
    if isinstance(found, str):
        raise PipelineFrequencyError(found)
    return found


_ANSWER: TypeAdapter[Any] = TypeAdapter(str | Frontier | list[Plan])


def _answer(problem: dict[str, Any], question: Question) -> Any:
    try:
        from zeus.optimizer.pipeline_frequency.planner import Planner
    except ImportError as error:
        raise PipelineFrequencyError(
            f"the planner cannot be imported ({error}); install it beside the server: "
            'pip install "zeusd[pfo-server]"'
        ) from None
    planner = Planner.of_json(problem)
    if not isinstance(question, list):
        return planner.frontier(question)
    by = {"deadline": planner.deadline, "straggler": planner.straggler}
    return [by[kind](time_s).plans[0] for kind, time_s in question]


def main() -> None:
    """The process."""
    os.nice(5)  # the server and its clients come first; beside other work it must not starve
    with os.fdopen(os.dup(1), "wb") as file:
        os.dup2(2, 1)  # of what a library prints
        try:
            found = _answer(*json.load(sys.stdin))
        except PipelineFrequencyError as error:
            found = error.message
        file.write(_ANSWER.dump_json(found))


if __name__ == "__main__":
    main()

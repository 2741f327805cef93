"""Plans in separate processes, because the planner computes for seconds.

A process gets a problem, and answers with a frontier, or with the sentence of an error.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Sequence

from pydantic import TypeAdapter

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankProfile
from zeus.optimizer.pipeline_frequency.placed_schedules import make_schedule
from zeus.optimizer.pipeline_frequency.plans import Frontier, PlanningProblem
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile

LIMIT_S = 3600.0
"""Time limit of the planner."""


def problem_of(
    info: JobInfo, profiles: Sequence[RankProfile], p2p_power_w: float
) -> PlanningProblem:
    """The planning problem of a job.

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
    chunks = 1 + max(row.chunk for one in profiles for row in one.rows)
    if orders:
        chunks = max(1, next(iter(orders.values())).count("forward") // microbatches)
    pipeline = make_schedule(name, info.pp_degree, microbatches, chunks)
    for stage, steps in orders.items():
        planned = [pipeline.instructions[place].name for place in pipeline.stages[stage]]
        if planned != steps:
            both = enumerate(itertools.zip_longest(planned, steps))
            differ = next(number for number, (a, b) in both if a != b)
            raise PipelineFrequencyError(
                f"stage {stage} runs {len(steps)} instructions in another order than {name} with "
                f"{microbatches} microbatches has it ({len(planned)}; they differ from number "
                f"{differ} on); give schedule and num_microbatches with the job"
            )
    return PlanningProblem(
        profile=profile.kinds,
        pipeline=pipeline.graph,
        p2p_power_w=sum(measured) / len(measured) if measured else p2p_power_w,
        gpus_per_stage=info.tp_degree,
        energy_per="gpu",
        change_time_s=0.0,
        max_changes=None,
    )


async def frontier_of(problem: PlanningProblem, points: int | None) -> Frontier:
    """The frontier of a problem, made in a process of its own.

    Args:
        points: As for `planner.Planner.frontier`.

    Raises:
        PipelineFrequencyError: There is none, and why.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        sent = _QUESTION.dump_json((problem, points))
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
    reply = await asyncio.to_thread(_ANSWER.validate_json, answer)
    if isinstance(reply, str):
        raise PipelineFrequencyError(reply)
    return reply


_QUESTION = TypeAdapter(tuple[PlanningProblem, int | None])
_ANSWER: TypeAdapter[str | Frontier] = TypeAdapter(str | Frontier)


def main() -> None:
    """The process."""
    os.nice(5)  # the server and its clients come first; beside other work it must not starve
    with os.fdopen(os.dup(1), "wb") as file:
        os.dup2(2, 1)  # of what a library prints
        problem, points = _QUESTION.validate_json(sys.stdin.buffer.read())
        reply: str | Frontier
        try:
            from zeus.optimizer.pipeline_frequency.planner import Planner

            reply = Planner.of(problem).frontier(points)
        except ImportError as error:
            reply = (
                f"the planner cannot be imported ({error}); install it beside the server: "
                'pip install "zeusd[pfo-server]"'
            )
        except PipelineFrequencyError as error:
            reply = error.message
        file.write(_ANSWER.dump_json(reply))


if __name__ == "__main__":
    main()

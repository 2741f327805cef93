"""Plans in a separate process, because the planner computes for seconds and uses scipy.

`python -m zeus.optimizer.pipeline_frequency.server.planning` reads a problem and the number or
times of plans as JSON, and prints the frontier or the plans as JSON. On an error it prints one
sentence to stderr and exits with code 2.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankProfile
from zeus.optimizer.pipeline_frequency.placed_schedules import BY_NAME, CHUNKED
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Row

LIMIT_S = 3600.0
"""Time limit of the planner."""

KEPT = 32
"""Most frontiers that are cached for further jobs with the same profile."""

_REFUSED = 2

Ask = tuple[Literal["deadline", "straggler"], float]
"""The purpose of a single plan, and its time, s."""


def problem_of(
    info: JobInfo, profiles: Sequence[RankProfile], p2p_power_w: float
) -> dict[str, Any]:
    """The planning problem of a job, in JSON-compatible form.

    Args:
        info: The job.
        profiles: The profiles of all its ranks.
        p2p_power_w: Power of a blocked GPU if no rank has measured it, W.

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
    profile = InstructionProfile.from_rows(rows_of(profiles))
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


def rows_of(profiles: Sequence[RankProfile]) -> list[Row]:
    """The measurements of all ranks, as a profile's rows."""
    return [
        Row(
            stage=one.pp_rank,
            instruction=row.instruction,
            frequency=row.frequency,
            time=row.time,
            energy=row.energy,
            rank=one.rank,
            dp_rank=one.dp_rank,
            pp_rank=one.pp_rank,
            tp_rank=one.tp_rank,
            chunk=row.chunk,
        )
        for one in sorted(profiles, key=lambda one: one.rank)
        for row in one.rows
    ]


class PlannerProcesses:
    """Plans in processes, and caches results: jobs with the same profile share them."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[bytes, asyncio.Task[Any]] = OrderedDict()

    async def frontier(self, problem: dict[str, Any], points: int | None) -> Frontier:
        """The frontier of a problem.

        Raises:
            PipelineFrequencyError: There is none, and why.
        """
        found: Frontier = await self._shared(
            {"problem": problem, "points": points}, Frontier.from_json
        )
        return found

    async def plans(self, problem: dict[str, Any], asks: Sequence[Ask]) -> list[Plan]:
        """A plan for each time.

        Raises:
            PipelineFrequencyError: There is none, and why.
        """
        found: list[Plan] = await self._shared(
            {"problem": problem, "asks": list(asks)},
            lambda data: [Plan.from_json(one) for one in data],
        )
        return found

    async def close(self) -> None:
        """Stops running processes."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()

    async def _shared(self, what: dict[str, Any], read: Callable[[Any], Any]) -> Any:
        text = json.dumps(what)
        key = hashlib.sha256(text.encode()).digest()
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(_run(text, read))
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


async def _run(text: str, read: Callable[[Any], Any]) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(text.encode()), timeout=LIMIT_S)
    except asyncio.TimeoutError:
        raise PipelineFrequencyError(
            f"the planner took longer than {LIMIT_S:g} s; ask for fewer points"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return read(json.loads(out))
    lines = err.decode(errors="replace").strip().splitlines() or ["no message"]
    if process.returncode == _REFUSED:
        raise PipelineFrequencyError(lines[-1])
    raise PipelineFrequencyError(
        f"the planner failed with exit code {process.returncode}: {lines[-1]}"
    )


def _carry_out(what: dict[str, Any]) -> Any:
    try:
        from zeus.optimizer.pipeline_frequency.planner import Planner
    except ImportError as error:
        raise PipelineFrequencyError(
            f"the planner cannot be imported ({error}); install it beside the server: "
            'pip install "zeusd[pfo-server]"'
        ) from None
    planner = Planner.of_json(what["problem"])
    if "asks" not in what:
        return planner.frontier(what["points"]).to_json()
    found = []
    for kind, time_s in what["asks"]:
        ask = planner.straggler if kind == "straggler" else planner.deadline
        found.append(ask(time_s).plans[0].to_json())
    return found


def main() -> int:
    """The process."""
    os.nice(5)  # the server and its clients come first; beside other work it must not starve
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library is not part of the result
    try:
        found = _carry_out(json.load(sys.stdin))
    except PipelineFrequencyError as error:
        sys.stderr.write(f"{error.message}\n")
        return _REFUSED
    with answer:
        json.dump(found, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Plans in a separate process, because the planner computes for seconds.

The process gets a problem, then questions about it: the number of plans, or their times. It answers
each with a frontier or plans, or with the sentence of an error. What both send are objects of this
program, nothing that a client wrote.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankProfile
from zeus.optimizer.pipeline_frequency.placed_schedules import BY_NAME, CHUNKED
from zeus.optimizer.pipeline_frequency.plans import Ask, Frontier, Plan
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile

if TYPE_CHECKING:
    from zeus.optimizer.pipeline_frequency.planner import Planner

LIMIT_S = 3600.0
"""Time limit of the planner."""

KEPT = 32
"""Most frontiers that are cached for further jobs with the same profile."""

PLANNERS = 2
"""Most idle processes that are kept; one needs at most 200 MB."""

IDLE_S = 600.0
"""How long they are kept."""

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
    """Plans in processes, and caches results: jobs with the same profile share them.

    A problem's process is kept for a while: after a frontier, further plans take a third of the
    time.
    """

    def __init__(self) -> None:
        self._tasks: OrderedDict[bytes, asyncio.Task[Any]] = OrderedDict()
        self._processes: OrderedDict[str, _Process] = OrderedDict()

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
        await asyncio.gather(*(one.end() for one in self._processes.values()))
        self._processes.clear()

    async def _shared(self, problem: dict[str, Any], question: Question) -> Any:
        text = json.dumps(problem)
        key = hashlib.sha256(f"{question} {text}".encode()).digest()
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(self._ask(text, problem, question))
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

    async def _ask(self, text: str, problem: dict[str, Any], question: Question) -> Any:
        process = self._processes.setdefault(text, _Process(problem))
        self._processes.move_to_end(text)
        try:
            return await process.answer(question)
        finally:
            asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)
            self._end_idle()

    def _end_idle(self) -> None:
        idle = [(key, one) for key, one in self._processes.items() if one.idle_s is not None]
        for place, (key, one) in enumerate(reversed(idle)):
            if place >= PLANNERS or (one.idle_s or 0.0) >= IDLE_S:
                one.kill()
                del self._processes[key]


class _Process:
    """Answers questions about one problem, one after the other."""

    def __init__(self, problem: dict[str, Any]) -> None:
        self._problem = problem
        self._process: asyncio.subprocess.Process | None = None
        self._connection: Connection[Any, Any]
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._answered_s = 0.0

    @property
    def idle_s(self) -> float | None:
        """Since when it has no question; None: it has one."""
        return None if self._waiting else time.monotonic() - self._answered_s

    async def answer(self, question: Question) -> Any:
        """The answer to a question.

        Raises:
            PipelineFrequencyError: There is none, and why.
        """
        self._waiting += 1
        try:
            async with self._lock:
                found, error = await asyncio.wait_for(self._answer(question), LIMIT_S)
        except asyncio.TimeoutError:
            raise PipelineFrequencyError(
                f"the planner took longer than {LIMIT_S:g} s; ask for fewer points"
            ) from None
        finally:
            self._waiting -= 1
            self._answered_s = time.monotonic()
        if error is not None:
            raise PipelineFrequencyError(error)
        return found

    async def _answer(self, question: Question) -> tuple[Any, str | None]:
        messages: list[Any] = [question]
        if self._process is None or self._process.returncode is not None:
            messages.insert(0, self._problem)
            self._connection, theirs = Pipe()
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", __name__, str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        try:
            for message in messages:
                await asyncio.to_thread(self._connection.send, message)
            await _readable(self._connection)
            found: tuple[Any, str | None] = await asyncio.to_thread(self._connection.recv)
            return found
        except (EOFError, OSError):
            raise PipelineFrequencyError(
                f"the planner ended with exit code {await self._process.wait()}; see its messages "
                "in the server's log"
            ) from None
        except BaseException:
            await self.end()
            raise

    def kill(self) -> None:
        """Ends the process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def end(self) -> None:
        """Ends the process, and waits for its end."""
        if self._process is not None:
            self.kill()
            await self._process.wait()


async def _readable(connection: Connection[Any, Any]) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)


def _planner(problem: Any) -> Planner:
    try:
        from zeus.optimizer.pipeline_frequency.planner import Planner
    except ImportError as error:
        raise PipelineFrequencyError(
            f"the planner cannot be imported ({error}); install it beside the server: "
            'pip install "zeusd[pfo-server]"'
        ) from None
    return Planner.of_json(problem)


def _carry_out(planner: Planner, question: Question) -> Any:
    if not isinstance(question, list):
        return planner.frontier(question)
    by = {"deadline": planner.deadline, "straggler": planner.straggler}
    return [by[kind](time_s).plans[0] for kind, time_s in question]


def main(connection: Connection[Any, Any]) -> None:
    """The process."""
    os.nice(5)  # the server and its clients come first; beside other work it must not starve
    problem, planner = connection.recv(), None
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        try:
            planner = planner or _planner(problem)
            answer: tuple[Any, str | None] = _carry_out(planner, question), None
        except PipelineFrequencyError as error:
            answer = None, error.message
        connection.send(answer)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))

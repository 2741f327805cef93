"""Plans a frontier in a process of its own: the planner computes for seconds, and uses scipy.

`python -m zeus.optimizer.pipeline_frequency.server.planning` reads an order as JSON, writes profile
and plans to the order's folder, and prints the frontier as JSON; or one sentence to stderr and
exit code 2.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.common import JobInfo, RankProfile
from zeus.optimizer.pipeline_frequency.plans import Frontier

LIMIT_S = 3600.0
"""A planner that takes longer is stopped."""

SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved-1f1b")

_REFUSED = 2


def order(
    info: JobInfo, profiles: Sequence[RankProfile], folder: Path, points: int, p2p_power_w: float
) -> dict[str, Any]:
    """What the process is told.

    Args:
        info: The job.
        profiles: Of all its ranks.
        folder: Where the profile and the plans are written.
        points: How many plans.
        p2p_power_w: Where no rank has measured it, W.

    Raises:
        PipelineFrequencyError: Something is missing.
    """
    measured = [one.p2p_power_w for one in profiles if one.p2p_power_w is not None]
    order_of = {one.pp_rank: one.instructions for one in profiles if one.instructions}
    forwards = {steps.count("forward") for steps in order_of.values()}
    microbatches = info.num_microbatches or (forwards.pop() if len(forwards) == 1 else None)
    if not microbatches:
        raise PipelineFrequencyError(
            "the number of microbatches is not known; give num_microbatches with the job, or "
            "instructions with each profile"
        )
    return {
        "folder": str(folder),
        "schedule": info.schedule or "1f1b",
        "num_stages": info.pp_degree,
        "num_microbatches": microbatches,
        "gpus_per_stage": info.tp_degree,
        "points": points,
        "p2p_power_w": sum(measured) / len(measured) if measured else p2p_power_w,
        "instructions": {str(stage): steps for stage, steps in order_of.items()},
        "rows": [
            [one.rank, one.dp_rank, one.pp_rank, one.tp_rank, *row.model_dump().values()]
            for one in sorted(profiles, key=lambda one: one.rank)
            for row in one.rows
        ],
    }


async def plan(what: dict[str, Any]) -> Frontier:
    """Carries out an order.

    Raises:
        PipelineFrequencyError: There is no plan for it, and why.
    """
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
        out, err = await asyncio.wait_for(
            process.communicate(json.dumps(what).encode()), timeout=LIMIT_S
        )
    except asyncio.TimeoutError:
        raise PipelineFrequencyError(
            f"the planner took longer than {LIMIT_S:g} s; ask for fewer points"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return Frontier.from_json(json.loads(out))
    lines = err.decode(errors="replace").strip().splitlines() or ["no message"]
    if process.returncode == _REFUSED:
        raise PipelineFrequencyError(lines[-1])
    raise PipelineFrequencyError(
        f"the planner failed with exit code {process.returncode}: {lines[-1]}"
    )


def _carry_out(what: dict[str, Any]) -> Frontier:
    try:
        from zeus.optimizer.pipeline_frequency import schedules
        from zeus.optimizer.pipeline_frequency.planner import plan_frontier
        from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Row, write_profile
    except ImportError as error:
        raise PipelineFrequencyError(
            f"the planner cannot be imported ({error}); install it beside the server: "
            'pip install "zeusd[pfo-server]"'
        ) from None
    rows = [
        Row(pp, instruction, mhz, time_s, energy_j, rank, dp, pp, tp, chunk)
        for rank, dp, pp, tp, instruction, chunk, mhz, time_s, energy_j in what["rows"]
    ]
    folder = Path(what["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    write_profile(rows, folder / "profile.csv")
    name, stages, count = what["schedule"], what["num_stages"], what["num_microbatches"]
    orders = {int(stage): steps for stage, steps in what["instructions"].items()}
    if name in ("interleaved", "interleaved-1f1b"):
        chunks = 1 + max(row.chunk for row in rows)
        if orders:
            chunks = max(1, next(iter(orders.values())).count("forward") // count)
        pipeline = schedules.interleaved_1f1b(stages, count, chunks)
    elif name in schedules.BY_NAME:
        pipeline = schedules.BY_NAME[name](stages, count)
    else:
        raise PipelineFrequencyError(f"there is no schedule {name}; take {', '.join(SCHEDULES)}")
    frontier = plan_frontier(
        InstructionProfile.from_rows(rows),
        pipeline,
        p2p_power_w=what["p2p_power_w"],
        gpus_per_stage=what["gpus_per_stage"],
        energy_per="gpu",
        points=what["points"],
    )
    for stage, steps in orders.items():
        planned = [instruction for instruction, _ in frontier.plans[0].stages[stage]]
        if planned != steps:
            differ = next(
                (n for n, (a, b) in enumerate(zip(planned, steps, strict=False)) if a != b),
                min(len(planned), len(steps)),
            )
            raise PipelineFrequencyError(
                f"stage {stage} runs {len(steps)} instructions in another order than {name} with "
                f"{count} microbatches has it ({len(planned)}; they differ from number {differ} "
                "on); give schedule and num_microbatches with the job"
            )
    frontier.write(folder)
    return frontier


def main() -> int:
    """The process."""
    os.nice(10)  # the server and its clients come first
    try:
        frontier = _carry_out(json.load(sys.stdin))
    except PipelineFrequencyError as error:
        sys.stderr.write(f"{error.message}\n")
        return _REFUSED
    json.dump(frontier.to_json(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

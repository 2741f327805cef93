"""Measures how the server plans again when a stage gets slower, without a new profile.

    python benchmarks/pipeline_drift.py [--slower 1.06] [--scale 8]

Three ranks train with torch.distributed on simulated GPUs under a plan of the server for the
fastest iteration. Then the GPU of the middle stage gets slower, like a hot one. The ranks report
the times of their instructions, and the server plans again. It prints the number of iterations
until the new plan, and the time and energy of an iteration before the change, after it, and under
the new plan. It takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support import running_daemon
from tests.zeus.pipeline_frequency.client import test_distributed as job
from tests.zeus.pipeline_frequency.server.running import ok, running_server
from zeus.optimizer.pipeline_frequency.planner import Planner
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile
from zeus.optimizer.pipeline_frequency.schedules import gpipe


def write_profile(path: Path, scale: float, slower: float) -> None:
    """The job's profile with longer instructions, and a slower stage in the middle."""
    lines = job.profile().splitlines()
    found = lines[:1]
    for line in lines[1:]:
        stage, name, mhz, time_s, energy_j = line.split(",")
        factor = scale * (slower if stage == "1" else 1.0)
        figures = (float(time_s) * factor, float(energy_j) * factor)
        found.append(",".join([stage, name, mhz, *(f"{one:.6f}" for one in figures)]))
    path.write_text("\n".join(found) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--slower", type=float, default=1.06, help="slowdown factor of the middle stage (1.06)"
    )
    parser.add_argument(
        "--scale", type=float, default=8.0, help="factor of the instructions' times (8)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zeus-drift-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_profile(folder / "base.csv", args.scale, 1.0)
        write_profile(folder / "slower.csv", args.scale, args.slower)
        pipeline = gpipe(job.STAGES, job.MICROBATCHES)
        plans = folder / "plans"

        def planner(profile: str) -> Planner:
            return Planner(InstructionProfile.read(folder / profile), pipeline, p2p_power_w=84.0)

        planner("base.csv").frontier(40).write(plans)
        (folder / "server").mkdir()
        settings = {"SCHEDULER_ARGS": json.dumps({"solution_path": str(plans)})}
        daemon = running_daemon("--simulate", f"{job.STAGES}xa100:setter_ms=2", gpus=job.STAGES)
        with daemon as running, running_server(folder / "server", settings) as server:
            process = job.start(folder, running, server, "drifting")
            (folder / "profile.csv").write_text((folder / "base.csv").read_text())
            process.communicate(timeout=1200)
            ranks = [
                json.loads((folder / f"drifting-{rank}.json").read_text())
                for rank in range(job.STAGES)
            ]
            (listed,) = ok(server.http.get("/jobs"))
            shown = ok(server.http.get(f"/jobs/{listed['job_id']}"))
        best_s = planner("slower.csv").fastest_time_s
        planned_s = planner("base.csv").fastest_time_s
    before, meanwhile, after = ranks[0]["times"]
    print(
        f"planned: {planned_s:.3f} s; with the slower stage no plan is faster than {best_s:.3f} s"
    )
    print(f"planned again {shown['replans']} times; detected after {len(meanwhile)} iterations:")
    for one in shown["pipelines"]:
        print(f"  new planned time: {one['planned_time_s']:.3f} s")
    print("| | iterations | median, s | energy of an iteration, J |")
    print("|---|--:|--:|--:|")
    parts = (("before", before), ("meanwhile", meanwhile), ("after", after))
    for number, (what, times) in enumerate(parts):
        energy_j = sum(rank["energies"][number] for rank in ranks)
        median_s = statistics.median(times[2:] or times)
        print(f"| {what} | {len(times)} | {median_s:.3f} | {energy_j:.1f} |")


if __name__ == "__main__":
    main()

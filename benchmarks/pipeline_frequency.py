"""Measures the planning of pipeline clocks: its time, and the distance of plans from the bound.

    python benchmarks/pipeline_frequency.py [--instances 4x8,8x128] [--lowtime PYTHON]

The profiles are those of GPT-3 175B that are shipped with the simulated node (measured by Chung et
al., SOSP 2024; ml-energy/zeus, Apache-2.0): eight stages on A100 SXM and on A40; pipelines of four
stages take stages 0, 1, 2 and 7 of them. `--gpus random1,random2` uses random profiles instead, by
number: 20 to 60 clocks, curves that are not convex. Each row runs in its own process, on one
thread.

- seconds: CPU time from the profile to the frontier, on one thread; without imports.
- one: from the profile to the plan for 1.1 times the fastest time.
- next: a further plan after the frontier: the median and the slowest of eleven, s.
- MB: peak memory of the process, including imports.
- plans: of the frontier; close: of these, plans up to 5 % slower than the fastest.
- gap: energy above the lower bound at the plan's own time, mean and largest of the close ones, %.
- 2 %: energy saved by the list's plan for 2 % slowdown, and by a plan for exactly that time, %.
- saved: energy saved without slowdown, against the highest clocks, %.

With --lowtime, an interpreter that has lowtime (`pip install 'lowtime>=0.3'`), lowtime plans the
same pipelines, with a unit of 1 ms and for at most --seconds. Its plans are evaluated on the same
graph with the profile's times and energies, and for up to --compare of them, this planner plans for
the same time. diff: our energy relative to lowtime's at equal time, %; below 0 if ours is less.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
P2P_W = {"a100": 83.64, "a40": 70.38}
INSTANCES = ("4x8", "4x16", "4x32", "8x12", "8x32", "8x64", "8x128")
FURTHER = (1.001, 1.004, 1.012, 1.02, 1.04, 1.07, 1.1, 1.15, 1.2, 1.3, 1.5)
UNIT_S = 0.001
DATA = Path(__file__).parents[1] / "zeusd/devices/simulated/data/perseus"


@dataclass(frozen=True)
class Instance:
    """A pipeline on a GPU."""

    gpu: str
    stages: int
    microbatches: int

    @classmethod
    def of(cls, text: str) -> Instance:
        """Reads `a100:4x8`."""
        gpu, size = text.split(":")
        stages, microbatches = size.split("x")
        return cls(gpu, int(stages), int(microbatches))

    def __str__(self) -> str:
        return f"{self.gpu}:{self.stages}x{self.microbatches}"

    @property
    def p2p_power_w(self) -> float:
        """Power of a blocked GPU, W."""
        return P2P_W.get(self.gpu, 75.0)

    def load(self) -> tuple[Any, Any]:
        """Profile and pipeline."""
        from zeus.optimizer.pipeline_frequency.profile import InstructionProfile
        from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b

        if self.gpu.startswith("random"):
            profile = random_profile(int(self.gpu.removeprefix("random")), self.stages)
            return profile, one_f_one_b(self.stages, self.microbatches)
        profile = InstructionProfile.read(DATA / f"gpt3-175b+{self.gpu}.columns.csv.xz")
        if self.stages < profile.num_stages:
            profile = profile.pick([*range(self.stages - 1), profile.num_stages - 1])
        return profile, one_f_one_b(self.stages, self.microbatches)

    def planner(self, **options: Any) -> Any:
        """A planner for it."""
        from zeus.optimizer.pipeline_frequency.planner import Planner

        profile, pipeline = self.load()
        return Planner(profile, pipeline, p2p_power_w=self.p2p_power_w, **options)


def random_profile(seed: int, stages: int) -> Any:
    """A profile of stages that differ, with noise as measured ones have."""
    from zeus.optimizer.pipeline_frequency.profile import InstructionProfile, Option

    rnd = random.Random(seed)
    options = {}
    for stage in range(stages):
        ratio = rnd.uniform(1.5, 2.5)
        forward_s, number = rnd.uniform(0.03, 0.06), rnd.randint(20, 60)
        for name, factor in (("forward", 1.0), ("backward", ratio)):
            # The share that waits for memory does not get slower with the clock.
            memory, floor_w, span_w = (
                rnd.uniform(0.1, 0.5),
                rnd.uniform(90, 130),
                rnd.uniform(120, 220),
            )
            rows = []
            for step in range(number):
                clock = 1 - 0.6 * step / 60
                time_s = factor * forward_s * (memory + (1 - memory) / clock) * rnd.gauss(1, 0.004)
                power_w = floor_w + span_w * clock**3
                energy_j = time_s * power_w * rnd.gauss(1, 0.008)
                rows.append(Option(1410 - 15 * step, time_s, energy_j))
            options[stage, name, 0] = rows
    return InstructionProfile(options)


def frontier_of(instance: Instance, points: int | None) -> dict[str, Any]:
    """One row: the frontier."""
    from zeus.optimizer.pipeline_frequency import planner as _  # exclude imports from the time

    _.Planner(*Instance("a100", 4, 1).load(), p2p_power_w=80.0).frontier(2)
    began = time.process_time()
    planner = instance.planner()
    frontier = planner.frontier(points)
    seconds = time.process_time() - began
    fastest = frontier.plans[-1]
    close_s = 1.05 * planner.fastest_time_s
    gaps = [100 * plan.gap for plan in frontier.plans if plan.time_s <= close_s]
    listed = frontier.plans[frontier.by_max_slowdown(1.02)]
    asked = planner.max_slowdown(1.02).plans[0]
    further = []
    for factor in FURTHER:
        began = time.process_time()
        # Not at a time that it was asked for above.
        planner.max_slowdown(factor + 1e-4)
        further.append(time.process_time() - began)
    return {
        "further": [statistics.median(further), max(further)],
        "seconds": seconds,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "plans": len(frontier.plans),
        "close": len(gaps),
        "listed": 100 * (1 - listed.energy_j / frontier.baseline_energy_j),
        "asked": 100 * (1 - asked.energy_j / frontier.baseline_energy_j),
        "gap": sum(gaps) / len(gaps),
        "worst": max(gaps),
        "saved": 100 * (1 - fastest.energy_j / frontier.baseline_energy_j),
        "slower": 100 * (fastest.time_s / planner.fastest_time_s - 1),
    }


def one_of(instance: Instance) -> dict[str, Any]:
    """One row: a single deadline, cold."""
    from zeus.optimizer.pipeline_frequency import planner as _

    _.Planner(*Instance("a100", 4, 1).load(), p2p_power_w=80.0).frontier(2)
    began = time.process_time()
    plan = instance.planner().max_slowdown(1.1).plans[0]
    return {"seconds": time.process_time() - began, "gap": 100 * plan.gap}


def compared(instance: Instance, python: str, seconds: float, number: int) -> dict[str, Any]:
    """Runs one row, beside lowtime."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.zeus.pipeline_frequency.timeline import timeline, totals

    profile, pipeline = instance.load()
    power_w = instance.p2p_power_w
    work = {
        "nodes": [(one.stage, one.name, one.microbatch) for one in pipeline.instructions],
        "arcs": pipeline.arcs,
        "options": [
            {
                name: [
                    (option.frequency, option.time_s, option.energy_j)
                    for option in profile.options(stage, name)
                ]
                for name in ("forward", "backward")
            }
            for stage in range(instance.stages)
        ],
        "power_w": power_w,
        "unit_time_s": UNIT_S,
        "seconds": seconds,
    }
    script = Path(__file__).with_name("lowtime_peer.py")
    found = subprocess.run(
        [python, str(script)], input=json.dumps(work), capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in found.stdout.splitlines()]
    finished = "stopped" not in lines[-1]
    plans = [line for line in lines if "clocks" in line]
    planner = instance.planner()
    frontier = planner.frontier()
    # As many from its fastest hundredths, where pipelines are run, as from all.
    places = {round(n * (len(plans) - 1) / max(1, number - 1)) for n in range(number)}
    places |= set(range(max(0, len(plans) - number), len(plans)))
    differences, close, slower = [], [], None
    for place in sorted(places):
        clocks = plans[place]["clocks"]
        stages = [
            [(pipeline.instructions[one].name, clocks[one]) for one in order]
            for order in pipeline.stages
        ]
        time_s, energy_j = totals(timeline(profile, pipeline, stages), instance.stages, power_w)
        if time_s < planner.fastest_time_s * (1 - 1e-9):
            continue
        ours = frontier.plans[frontier.by_straggler(time_s)]
        asked = planner.straggler(time_s).plans[0]
        if asked.effective_energy_j < ours.effective_energy_j:
            ours = asked
        # Both wait until the same instant.
        waiting_j = instance.stages * power_w * (time_s - ours.time_s)
        differences.append(100 * ((ours.energy_j + waiting_j) / energy_j - 1))
        slower = 100 * (time_s / planner.fastest_time_s - 1)
        if slower <= 5:
            bound_j = ours.bound_j + instance.stages * power_w * (time_s - ours.time_s)
            close.append(100 * (energy_j / bound_j - 1))
    return {
        "seconds": plans[-1]["elapsed_s"],
        "plans": len(plans),
        "finished": finished,
        "slower": slower,
        "gap": sum(close) / len(close) if close else None,
        "largest": max(close, default=None),
        "difference": sum(differences) / len(differences),
        "worst": max(differences),
        "best": min(differences),
    }


def child(*arguments: str) -> dict[str, Any]:
    """Runs one row in its own process."""
    found = subprocess.run(
        [sys.executable, __file__, "--child", *arguments],
        env={**os.environ, **THREADS},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    row: dict[str, Any] = json.loads(found.stdout)
    return row


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", default=",".join(INSTANCES))
    parser.add_argument("--gpus", default="a100,a40")
    parser.add_argument("--points", type=int, help="maximum number of plans")
    parser.add_argument(
        "--lowtime", metavar="PYTHON", help="interpreter of an environment with lowtime"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="for each run of lowtime")
    parser.add_argument("--compare", type=int, default=40, help="plans of each run of lowtime")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, instance, *rest = arguments.child
        work = {"frontier": frontier_of, "one": one_of, "compared": compared}[kind]
        values = [json.loads(text) for text in rest]
        print(json.dumps(work(Instance.of(instance), *values)))
        return
    from rich.console import Console
    from rich.table import Table

    names = (
        "seconds",
        "one",
        "next",
        "MB",
        "plans",
        "close",
        "gap mean",
        "largest",
        "saved",
        "2 %",
    )
    table = Table("instance", *names)
    peers = Table(
        "instance",
        "lowtime: plans",
        "seconds",
        "all",
        "its fastest",
        "gap",
        "largest",
        "diff",
        "to",
        "from",
    )
    means: dict[str, list[float]] = {}
    console = Console(width=120)
    for gpu in arguments.gpus.split(","):
        for size in arguments.instances.split(","):
            name = f"{gpu}:{size}"
            row = child("frontier", name, json.dumps(arguments.points))
            one = child("one", name)
            means.setdefault(gpu, []).append(row["gap"])
            table.add_row(
                name,
                f"{row['seconds']:.2f}",
                f"{one['seconds']:.2f}",
                "{:.2f} {:.2f}".format(*row["further"]),
                f"{row['megabytes']:.0f}",
                str(row["plans"]),
                str(row["close"]),
                f"{row['gap']:.3f}",
                f"{row['worst']:.3f}",
                f"{row['saved']:.2f}",
                f"{row['listed']:.2f} {row['asked']:.2f}",
            )
            assert row["slower"] < 1e-9, "the fastest plan is slower than the pipeline can be"
            if arguments.lowtime:
                peer = child(
                    "compared",
                    name,
                    json.dumps(arguments.lowtime),
                    json.dumps(arguments.seconds),
                    json.dumps(arguments.compare),
                )
                peers.add_row(
                    name,
                    str(peer["plans"]),
                    f"{peer['seconds']:.1f}",
                    "yes" if peer["finished"] else "stopped",
                    f"+{peer['slower']:.2f} %" if peer["finished"] else "",
                    "" if peer["gap"] is None else f"{peer['gap']:.3f}",
                    "" if peer["largest"] is None else f"{peer['largest']:.3f}",
                    f"{peer['difference']:+.3f}",
                    f"{peer['worst']:+.3f}",
                    f"{peer['best']:+.3f}",
                )
    console.print(table)
    for gpu, gaps in means.items():
        console.print(f"{gpu}: gap {sum(gaps) / len(gaps):.3f} % on average")
    if arguments.lowtime:
        console.print(peers)


if __name__ == "__main__":
    main()

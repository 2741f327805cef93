"""A real pipeline of torch.distributed processes with a real zeusd and a real server."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.examples.programs import environment, torchrun
from tests.support import RunningDaemon, running_daemon, wait_for
from tests.zeus.pipeline_frequency.server.running import RunningServer, ok, running_server
from zeus.optimizer.pipeline_frequency.plans import Frontier, Plan
from zeus.optimizer.pipeline_frequency.profile import InstructionProfile
from zeusd.devices.simulated.instructions import find_instructions
from zeusd.devices.simulated.models import DEVICES

needs.package("torch")
needs.package("fastapi")

ROOT = Path(__file__).parents[4]
JOB = Path(__file__).with_name("pipeline_job.py")
STAGES, MICROBATCHES = 3, 3
OUTPUT = "output.txt"
CLOCKS = range(1410, 840, -15)


def profile() -> str:
    """Three unequal stages whose energy has its minimum inside the range."""
    lines = ["stage,instruction,frequency,time,energy"]
    for stage, scale in enumerate((0.6, 1.0, 0.75)):
        for mhz in CLOCKS:
            x = mhz / 1410
            for name, base_s in (("forward", 0.02), ("backward", 0.035)):
                seconds = base_s * scale * (0.15 + 0.85 / x)
                watts = 100 + 280 * x**3
                lines.append(f"{stage},{name},{mhz},{seconds:.6f},{seconds * watts:.6f}")
    return "\n".join(lines) + "\n"


def frontier() -> Frontier:
    """Two plans, with different clocks."""

    def plan(top: int, time_s: float, energy_j: float) -> Plan:
        stages = tuple(
            tuple(
                (name, top - 15 * n - 5 * 15 * stage)
                for n, name in enumerate(["forward"] * MICROBATCHES + ["backward"] * MICROBATCHES)
            )
            for stage in range(STAGES)
        )
        return Plan(
            stages,
            time_s=time_s,
            energy_j=energy_j,
            effective_energy_j=energy_j - 84 * STAGES * time_s,
            blocking_energy_j=1.0,
            bound_j=energy_j * 0.999,
        )

    plans = (plan(1140, 0.5, 60.0), plan(1410, 0.4, 70.0))
    return Frontier(plans, "gpipe", STAGES, MICROBATCHES, 84.0, 1, 0.4, 75.0)


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", f"{STAGES}xa100:setter_ms=2", gpus=STAGES) as running:
        yield running


@pytest.fixture
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    plans = tmp_path / "plans"
    where = tmp_path / "server"
    where.mkdir()
    settings = {}
    if getattr(request, "param", "plans") == "plans":
        frontier().write(plans)
        settings["SCHEDULER_ARGS"] = json.dumps({"solution_path": str(plans)})
    with running_server(where, settings) as running:
        yield running


def start(
    folder: Path, daemon: RunningDaemon, server: RunningServer, case: str
) -> subprocess.Popen[bytes]:
    (folder / "profile.csv").write_text(profile())
    with (folder / OUTPUT).open("w") as output:  # to be read even if a rank never ends
        return subprocess.Popen(
            torchrun(STAGES, JOB, folder, server.url, case),
            cwd=ROOT,
            env=environment(daemon.socket, ROOT),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(job: subprocess.Popen[bytes]) -> None:
    """Its ranks end with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)


def seen(job: subprocess.Popen[bytes], folder: Path, case: str) -> list[dict[str, Any]]:
    """The observations of each rank in a case that ended normally."""
    try:
        ended = job.wait(timeout=105)
    except subprocess.TimeoutExpired:
        job.terminate()  # torchrun ends its ranks, which are in sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=5)
        ended = None
    end(job)
    assert ended == 0, (folder / OUTPUT).read_text()
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(STAGES)]


def default_clocks(daemon: RunningDaemon) -> None:
    """All clocks went back, and nobody holds a lease."""
    with daemon.client() as client:
        wait_for(lambda: client.leases() == [], "the leases to end")


def clocks_of(plan: Plan, stage: int) -> list[int]:
    return [mhz for _, mhz in plan.stages[stage]]


def test_all_ranks_train_under_the_plan_and_go_over_to_another_with_the_same_iteration(
    tmp_path: Path, daemon: RunningDaemon, server: RunningServer
) -> None:
    job = start(tmp_path, daemon, server, "switched")

    def running() -> bool:
        """The server knows how fast they are, and that they wait."""
        listed = ok(server.http.get("/jobs"))
        if not listed:
            return job.poll() is not None
        ranks = ok(server.http.get(f"/jobs/{listed[0]['job_id']}"))["ranks"]
        reached = [one.get("iteration") or 0 for one in ranks]
        return job.poll() is not None or (len(reached) == STAGES and min(reached) == 7)

    wait_for(running, "all ranks to report")
    [listed] = ok(server.http.get("/jobs"))
    chosen = ok(server.http.post(f"/choose/{listed['job_id']}", json={"plan": 0}))
    ranks = seen(job, tmp_path, "switched")
    slow, fast = frontier().plans
    changed_at = set()
    for stage, one in enumerate(ranks):
        assert one["told"] == []
        kinds = []
        for iteration in sorted(map(int, one["clocks"])):
            clocks = one["clocks"][str(iteration)]
            assert clocks in (clocks_of(slow, stage), clocks_of(fast, stage))
            kinds.append(clocks == clocks_of(slow, stage))
        assert kinds == sorted(kinds)  # fast, then slow
        assert sorted(map(int, one["clocks"])) == list(range(len(kinds)))
        assert not any(kinds[:4])  # under the plan from the first iteration
        changed_at.add(kinds.index(True))
        assert one["first_mhz"] == clocks_of(fast, stage)[-1]
        assert one["versions"] == [1, 2]
    assert len({one["job_id"] for one in ranks}) == 1
    assert changed_at == {chosen["at_iteration"]}
    default_clocks(daemon)


@pytest.mark.parametrize("server", ["online"], indirect=True)
def test_a_job_profiles_itself_and_trains_under_the_plan_of_that(
    tmp_path: Path, daemon: RunningDaemon, server: RunningServer
) -> None:
    ranks = seen(start(tmp_path, daemon, server, "profiled"), tmp_path, "profiled")
    device = DEVICES["a100-sxm-80"]
    for stage, one in enumerate(ranks):
        assert one["version"] >= 1
        truth = find_instructions(f"profile:{tmp_path}/profile.csv#stage={stage}", device)
        assert truth is not None
        lines = (tmp_path / f"measured-rank{stage}.csv").read_text().splitlines()
        header = lines[0].split(",")
        rows = [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]
        assert [int(row["frequency"]) for row in rows[::2]] == [1410, 1260, 1110, 960]
        for row in rows:
            seconds, watts = truth.tables[row["instruction"]].at(int(row["frequency"]), device)
            # In real time a busy machine notices late that an instruction is over; the simulated
            # GPU waits meanwhile: for the next one, or with nothing to do.
            took_s, drawn_j = float(row["time"]), float(row["energy"])
            assert took_s > 0.99 * seconds
            least_j, most_j = (
                seconds * watts + (took_s - seconds) * waiting_w
                for waiting_w in sorted((device.idle_w[0], truth.blocking_w))
            )
            assert 0.75 * least_j < drawn_j < 1.25 * most_j
    # The plan consists of measured clocks, and slows down the stages that have slack.
    last = str(max(map(int, ranks[0]["clocks"])))
    mean = [sum(one["clocks"][last]) / len(one["clocks"][last]) for one in ranks]
    assert all(len(one["clocks"][last]) == 2 * MICROBATCHES for one in ranks)
    assert {mhz for one in ranks for mhz in one["clocks"][last]} <= {1410, 1260, 1110, 960}
    assert mean[0] <= mean[1]
    default_clocks(daemon)
    assert InstructionProfile.read(tmp_path / "profile.csv").num_stages == STAGES

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
from zeus.optimizer.pipeline_frequency.plans import Frontier

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


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", f"{STAGES}xa100:setter_ms=2", gpus=STAGES) as running:
        yield running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    (tmp_path / "server").mkdir()
    with running_server(tmp_path / "server") as running:
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
        ended = job.wait(timeout=210)
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


def by_number(iteration: tuple[str, object]) -> int:
    return int(iteration[0])


@pytest.mark.timeout(240)  # three processes that import PyTorch, on a busy machine
def test_a_job_profiles_itself_and_its_ranks_go_over_to_plans_with_the_same_iteration(
    tmp_path: Path, daemon: RunningDaemon, server: RunningServer
) -> None:
    job = start(tmp_path, daemon, server, "profiled")

    def trains() -> bool:
        return job.poll() is not None or len(list(tmp_path.glob("trains-*"))) == STAGES

    wait_for(trains, "all ranks to train under a plan", 180)
    [listed] = ok(server.http.get("/jobs"))
    chosen = ok(server.http.post(f"/choose/{listed['job_id']}", json={"plan": 0}))
    ranks = seen(job, tmp_path, "profiled")
    slow, *_, fast = Frontier.read(tmp_path / "server/dump" / listed["job_id"]).plans
    for stage, one in enumerate(ranks):
        assert one["told"] == []
        rows = (tmp_path / f"measured-rank{stage}.csv").read_text().splitlines()[1::2]
        assert [int(row.split(",")[6]) for row in rows] == [1410, 1260, 1110, 960]
        under = [(int(at), clocks) for at, clocks in sorted(one["clocks"].items(), key=by_number)]
        assert under[-1][0] - under[0][0] == len(under) - 1
        for iteration, clocks in under:
            plan = slow if iteration >= chosen["at_iteration"] else fast
            assert clocks == [mhz for _, mhz in plan.stages[stage]]
        assert under[0][0] < chosen["at_iteration"] <= under[-1][0]
        assert one["first_mhz"] == fast.stages[stage][-1][1]
        assert one["versions"] == [1, 2]
    assert {one["job_id"] for one in ranks} == {listed["job_id"]}
    # The fastest plan slows down the stages that have slack.
    mean = [sum(mhz for _, mhz in stage) / len(stage) for stage in fast.stages]
    assert mean[0] <= mean[1]
    assert {mhz for stage in fast.stages for _, mhz in stage} <= {1410, 1260, 1110, 960}
    default_clocks(daemon)

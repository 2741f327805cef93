"""Processes of one torch.distributed job, each with a GPU of a real zeusd, and their failures."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.examples.programs import environment, limits_set, limits_w, torchrun, with_torch
from tests.support import RunningDaemon, free_port, running_daemon, wait_for
from zeus.optimizer.power_limit import ZeusCost
from zeus.optimizer.power_limit.adaptive import AVERAGED_S, REACH
from zeus.optimizer.power_limit.profile import PowerLimitMeasurement
from zeus.optimizer.power_limit.review import APART

needs.package("torch")

ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("distributed_job.py")
HIGHEST_W = 250
LIMITS_W = [250, 200, 150, 100]
SAID = re.compile(
    "training continues at (?:the highest limit"
    # Where zeusd answers late on a busy machine.
    r"|a power limit that cannot be read now"
    r"|[0-9]+ W on GPU [0-9]+ \(`zeusctl status` says who set it\)): (.*)"
)
"""What an optimizer that gives up says. Which limit is in force then is asserted by itself."""
NODE = "3xv100-pcie,v100-pcie:unprivileged"
"""Nobody may change the last GPU."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon("--simulate", NODE, gpus=4) as running:
        yield running


def run(command: list[str], daemon: RunningDaemon, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(daemon.socket, ROOT, **env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*jobs: subprocess.Popen[str]) -> None:
    """All have ended in order."""
    try:
        outputs = [job.communicate(timeout=110)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, output


def seen(folder: Path, case: str, ranks: int) -> list[dict[str, Any]]:
    """The observations of each process in a case."""
    return [json.loads((folder / f"{case}-{rank}.json").read_text()) for rank in range(ranks)]


def chosen(all_seen: list[dict[str, Any]]) -> float:
    """The limit that all chose, and that their GPUs had."""
    assert not any(one["disabled"] for one in all_seen)
    (limit,) = {one["chosen_w"] for one in all_seen}
    assert [one["limit_w"] for one in all_seen] == [limit] * len(all_seen)
    return float(limit)


def of_least_energy(all_seen: list[dict[str, Any]]) -> None:
    """All chose the limit of least energy among those that are sure to save some against the
    highest; which that is, and how sure it is, a busy machine has its part in. One that is so busy
    that the GPUs draw too little for any limit, or that no two measurements agree, is left alone.
    """
    first, second = (one["estimates"] for one in all_seen)
    assert first == second
    highest = first[0]
    draw_w = highest["energy_j"] / highest["time_s"] / len(all_seen)
    times_s = [one["zeus/step_time_s"] for one in all_seen[0]["pieces"]]
    reach = 1.0 if min(times_s) < AVERAGED_S else REACH
    alone = draw_w < reach * LIMITS_W[-1]
    assert len(first) > 1 or alone or max(times_s) / min(times_s) > 1 + APART
    sure = [
        one
        for one in first
        if one is highest
        or one["energy_j"] * (1 + one["energy_ratio_error"]) <= highest["energy_j"]
    ]
    least_w = min(sure, key=lambda one: one["energy_j"])["power_limit_mw"] / 1000
    assert chosen(all_seen) == least_w or (alone and chosen(all_seen) == HIGHEST_W)


def given_up(all_seen: list[dict[str, Any]]) -> list[str]:
    """All are at the highest limit. Returns the reason that each gave."""
    for one in all_seen:
        assert one["disabled"]
        assert one["chosen_w"] == one["limit_w"] == HIGHEST_W
    said = [SAID.search(" ".join(one["messages"])) for one in all_seen]
    return ["" if found is None else found[1] for found in said]


def assert_agreed(folder: Path, ranks: int) -> None:
    """Of the energy of all and the time of the slowest, all made one choice."""
    all_seen = seen(folder, "agree", ranks)
    limit = chosen(all_seen)
    measurements = all_seen[0]["measurements"]
    assert all(one["measurements"] == measurements for one in all_seen)
    assert [one["power_limit"] for one in measurements] == LIMITS_W
    rows = [PowerLimitMeasurement(**one) for one in measurements]
    assert ZeusCost(0.5, ranks).select(rows) == limit

    kept = json.loads((folder / "agree-profile-0.json").read_text())
    for limit in LIMITS_W:
        samples = [one for one in kept["samples"] if one["power_limit_mw"] == limit * 1000]
        own = [
            [piece for piece in one["pieces"] if piece["zeus/power_limit_w"] == limit]
            for one in all_seen
        ]
        assert samples
        for sample, *parts in zip(samples, *own, strict=False):  # the last may have come too late
            joules = [part["zeus/step_energy_j"] for part in parts]
            assert sample["energy_j"] / sample["steps"] == pytest.approx(sum(joules))
            assert sum(joules) == pytest.approx(ranks * joules[0], rel=0.25)
            seconds = [part["zeus/step_time_s"] for part in parts]
            assert sample["time_s"] / sample["steps"] == pytest.approx(max(seconds))
    assert kept["selector"] == f"ZeusCost(eta_knob=0.5, world_size={ranks})"
    assert len(kept["gpus"]) == ranks
    assert not list(folder.glob("agree-profile-[1-9]*"))


def test_two_nodes(daemon: RunningDaemon, tmp_path: Path) -> None:
    options = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "1"]
    options += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    cases = ("agree", "adaptive", "denied")
    command = with_torch("-m", "torch.distributed.run", *options, JOB, tmp_path, *cases)
    with running_daemon("--simulate", NODE, gpus=4) as other:
        ended(run(command, daemon), run(command, other))
        for node in (daemon, other):
            assert set(limits_set(node, 4)[3]) <= {"250 W"}
            assert limits_w(node, 4) == [HIGHEST_W] * 4
    assert_agreed(tmp_path, 2)
    of_least_energy(seen(tmp_path, "adaptive", 2))
    leads, refused = given_up(seen(tmp_path, "denied", 2))
    assert refused.startswith("the power limit cannot be set: ")
    assert leads == f"rank 1: {refused}"


def test_a_process_that_is_killed_leaves_no_limit_behind(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    job = run(torchrun(2, JOB, tmp_path, "killed"), daemon)
    output, _ = job.communicate(timeout=110)
    assert job.returncode != 0
    assert "Signal 9 (SIGKILL)" in output
    wait_for(lambda: limits_w(daemon, 4) == [HIGHEST_W] * 4, "all limits to go back")


def test_ranks_that_continue_without_the_others_give_up(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    port = free_port()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    jobs = [
        run(with_torch(JOB, tmp_path, "alone"), daemon, RANK=rank, LOCAL_RANK=rank, **meeting)
        for rank in "012"
    ]
    ended(jobs[1])
    for job in (jobs[0], jobs[2]):
        job.communicate(timeout=60)
        assert job.returncode == -signal.SIGKILL

    leads, _ = given_up(seen(tmp_path, "without-2", 2))
    assert leads == "rank 2 did not report steps"
    last = json.loads((tmp_path / "without-0-1.json").read_text())
    (reason,) = given_up([last])
    assert reason.startswith("the store of torch.distributed does not answer")
    assert limits_w(daemon, 4) == [HIGHEST_W] * 4

"""ml-energy/zeus's scripts for several ranks, under the torchrun that they are published with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.examples.programs import environment, limits_set, limits_w, torchrun
from tests.support import running_daemon

SCRIPTS = ("data_parallel", "fully_sharded")
ROOT = Path(__file__).parents[3]
JOB = Path(__file__).with_name("ranks_job.py")


def test_ranks_hold_the_same_limits_and_make_the_same_choice(tmp_path: Path) -> None:
    with running_daemon("--simulate", "2xv100-pcie:setter_ms=0", gpus=2) as daemon:
        env = environment(daemon.socket, ROOT, ZEUS_MAX_SLOWDOWN="1.2")
        ran = subprocess.run(torchrun(2, JOB, tmp_path), env=env, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        of_gpus = limits_set(daemon, 2)
        assert limits_w(daemon, 2) == [250, 250]
    first, second = (json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    measured = [limits for script in SCRIPTS for limits in first[script]["measured_mw"]]
    assert {len(limits) for limits in measured} == {1}
    measured_mw = {limit for limits in measured for limit in limits}
    assert len(measured_mw) > 2
    # A limit that is wanted for a moment, as the highest between epochs, need not be set at all.
    for limits in of_gpus:
        assert measured_mw <= {int(limit.removesuffix(" W")) * 1000 for limit in limits}
    assert not first["warned"]
    assert not any(first[script]["disabled"] for script in SCRIPTS)
    # Which limit it is, a busy machine has its part in.
    assert first["data_parallel"]["state"] == "Done"
    assert first["fully_sharded"]["limit_mw"] > 0

"""`zeusctl set --ceiling` and `zeusctl reset --ceiling`."""

from __future__ import annotations

import contextlib
import json
import os
import pwd

from tests.support import RunningDaemon, wait_for
from tests.zeusctl.conftest import Ctl, limits
from zeus_common.simulation import SimulatedWork
from zeusctl.exporter.collector import ZeusdCollector


def test_the_least_of_the_ceilings_is_in_force_until_it_is_removed(
    ctl: Ctl, daemon: RunningDaemon
) -> None:
    said = ctl("set", "0", "-p", "200", "--ceiling", "job:1234")
    assert (said.code, said.out) == (0, "GPU 0: power_limit at most 200 W\n")
    said = ctl("set", "0", "-p", "220", "--ceiling", "fleet", "--json")
    (setting,) = json.loads(said.out)["settings"]
    assert (setting["asked"], setting["value"], setting["unit"]) == (220, 200, "W")
    assert limits(daemon)[0] == 200
    said = ctl("set", "0", "-p", "210", "--", "true")
    bound = f"ceiling job:1234 of user {user_name()} allows at most 200 W until the job ends"
    assert f"is outside 100 to 200 W: {bound}" in said.err
    said = ctl("reset", "0", "--ceiling", "job:1234")
    assert (said.code, said.out) == (0, "removed the ceiling job:1234 from GPU 0\n")
    assert limits(daemon)[0] == 220
    assert ctl("reset", "0,1", "--ceiling", "fleet").out == "removed the ceiling fleet from GPU 0\n"
    assert ctl("reset", "0,1", "--ceiling", "fleet").out == "there is no ceiling fleet\n"
    assert limits(daemon)[0] == 250


def test_ceilings_are_shown_beside_every_limit(ctl: Ctl) -> None:
    ctl("set", "0", "-p", "200", "--ceiling", "job:1234")
    ctl("set", "1", "-p", "220", "--ceiling", "fleet", "--for", "10min", "--then", "150")
    try:
        said = ctl("status").out
        rows = [line.split() for line in said.partition("CEILING")[2].splitlines()[1:]]
        assert rows[0][:8] == ["0", "job:1234", "200", "W", "the", "job", "ends", user_name()]
        assert rows[1][:5] == ["1", "fleet", "220", "W", "in"]
        assert rows[1][-4:] == ["then", "150", "W", user_name()]
        for verb in (("show", "0"), ("leases",)):
            assert "job:1234" in ctl(*verb).out
        assert "CEILING" not in ctl("leases", "--mine").out
        (bound,) = json.loads(ctl("show", "1", "--json").out)["ceilings"]
        assert (bound["value"], bound["unit"], bound["then"]) == (220, "W", 150)
        assert 500 < bound["expires_in_s"] <= 600
    finally:
        ctl("reset", "0", "--ceiling", "job:1234")
        ctl("reset", "1", "--ceiling", "fleet")
    assert "CEILING" not in ctl("status").out


def test_the_ceiling_that_throttles_a_gpu_is_named(ctl: Ctl, daemon: RunningDaemon) -> None:
    with daemon.client() as client, contextlib.ExitStack() as cleanup:
        node = client.node()
        uuid = node.gpus[0].uuid
        work = SimulatedWork(node.simulated or "", [uuid], "model/compute")
        cleanup.callback(work.close)
        work.launch(1e9)
        cleanup.callback(ctl, "reset", "0", "--ceiling", "job:1234")
        ctl("set", "0", "-p", "150", "--ceiling", "job:1234")

        def shown() -> tuple[str | None, bool]:
            (gpu,) = json.loads(ctl("status", "0", "--json").out)["gpus"]
            return gpu["limit_author"], "power limit" in gpu["throttle_reasons"]

        wait_for(lambda: shown() == ("job:1234", True), "the ceiling to throttle")
        assert "power limit (job:1234)" in ctl("status").out
        said = ctl("status", "0", "--columns", "limit_author", "--format", "csv")
        assert said.out == "limit_author\njob:1234\n"
        families = {one.name: one for one in ZeusdCollector(client).collect()}
        (sample,) = families["zeusd_gpu_limit_author"].samples
        assert (sample.labels["uuid"], sample.labels["author"]) == (uuid, "job:1234")
        client.set_power_limit(uuid, 120_000)  # now its holder throttles it
        wait_for(lambda: shown() == ("lease", True), "the holder's limit to throttle")
        client.release(uuid)


def user_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def test_a_ceiling_falls_to_the_lower_bound_in_time(ctl: Ctl, daemon: RunningDaemon) -> None:
    ctl("set", "1", "-p", "220", "--ceiling", "fleet", "--for", "0.2s", "--then", "150")
    wait_for(lambda: limits(daemon)[1] == 150, "the lower bound")
    ctl("reset", "1", "--ceiling", "fleet")
    assert limits(daemon)[1] == 250

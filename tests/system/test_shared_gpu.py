"""Two users on one GPU, through the driver's own calls: whole, and split into MIG instances."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fake_nvml import fixtures
from tests.support import configuration, running_daemon, wait_for
from zeus_ipc.replies import UsageSum
from zeus_ipc.requests import BUCKET_S
from zeusd.energy.split import Account
from zeusd.runtime.identities import Identities

nvml_double = fixtures.nvml_double

pytestmark = pytest.mark.needs("root", "gcc")

USERS = (1, 65534)
WHOLE = {"load_mw": 300_000, "compute_percent": 60, "second_percent": 20, "use_age_us": 100_000}
SPLIT = {
    "architecture": 9,
    "mig": 1,
    "instance": 7,
    "second_instance": 8,
    "load_mw": 300_000,
    "mig_slices_1": 1,
    "mig_slices_2": 3,
    "mig_percent_1": 90,
    "mig_percent_2": 10,
}


@pytest.fixture
def tenants() -> Iterator[list[tuple[int, Account]]]:
    """A process of each user, and the account that is charged."""
    with ExitStack() as stack:
        found = []
        for uid in USERS:
            process = subprocess.Popen(["sleep", "600"], user=uid, group=uid)
            stack.callback(process.wait)
            stack.callback(process.kill)
            identity = Identities().identify(process.pid)
            assert identity is not None
            os.close(identity.pidfd)
            found.append((process.pid, identity.account))
        yield found


@pytest.mark.parametrize(("gpu", "share"), [(WHOLE, 0.75), (SPLIT, 0.75)], ids=["whole", "MIG"])
def test_two_users_are_charged_by_what_the_driver_measures(
    nvml_double: fixtures.MakeDouble,
    tenants: list[tuple[int, Account]],
    gpu: dict[str, int],
    share: float,
    tmp_path: Path,
) -> None:
    (first, one), (second, other) = tenants
    double = nvml_double([{**gpu, "compute_pid": first, "second_pid": second}])
    text = f'[accounting]\ndirectory = "{tmp_path}/ledger"\nprocesses = true\n'
    options = configuration(tmp_path, text)
    daemon = running_daemon("--nvml-library", double.library, *options, env=double.env, gpus=1)
    with daemon as running, running.client() as client:
        end = int(time.time()) // BUCKET_S * BUCKET_S + 2 * BUCKET_S

        def charged() -> dict[tuple[str, str, int], UsageSum]:
            usage = client.usage([0, end], "account")
            total = sum(one.active_uj + one.idle_uj for one in usage.sums)
            assert total == sum(usage.metered_uj)
            return {(one.kind, one.name, one.uid): one for one in usage.sums}

        def both() -> list[UsageSum] | None:
            sums = charged()
            keys = [(whose.kind.value, whose.name, whose.uid) for whose in (one, other)]
            found = [sums[key] for key in dict.fromkeys(keys) if key in sums]
            return found if len(found) == len({*keys}) else None

        def of_first(found: list[UsageSum]) -> float:
            return found[0].active_uj / sum(used.active_uj for used in found)

        def measured() -> list[UsageSum] | None:
            # What is before the first sample is shared in equal parts; it weighs ever less.
            found = both()
            return found if found and of_first(found) > 0.6 else None

        found = wait_for(both if one == other else measured, "both to be charged")
        for used in found:
            assert used.lower_uj <= used.active_uj + used.idle_uj <= used.upper_uj
        if one == other:  # the tests run in a service, whose processes are all its own
            assert found[0].methods == ["exclusive"]
            return
        assert "utilization" in found[0].methods
        assert of_first(found) <= share + 0.01

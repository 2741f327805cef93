"""A node's agent: its GPUs' demand, and another agent of the same name. Neither needs etcd."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tests.support import running_daemon, wait_for
from tests.zeus_fleet.test_etcd import QUICK, FakeGpus, awaited, until
from tests.zeusctl.conftest import READINGS
from zeus_common.simulation import SimulatedNode
from zeus_fleet import shells
from zeus_fleet.gpus import ZeusdGpus
from zeus_fleet.messages import NodeReport, StoreAnswer
from zeus_fleet.shells import run_agent


def test_a_gpu_that_is_lost_has_no_demand() -> None:
    with (
        running_daemon("--simulate", "2xv100-pcie", gpus=2) as daemon,
        daemon.client() as agent,
        daemon.client() as job,
    ):
        gpus = ZeusdGpus(agent, "n1")
        info = agent.node()
        assert info.simulated is not None
        leased = info.gpus[1].uuid
        job.set_power_limit(leased, 150_000)

        def wanted() -> list[int]:
            return [one // 1000 for one in gpus.load().wanted_mw]

        assert wanted() == [100, 150]
        with contextlib.closing(SimulatedNode(info.simulated)) as node:
            for gpu in (0, 1):
                for call in READINGS:
                    node.inject(gpu, call, 15)
            wait_for(lambda: wanted() == [100, 100], "the demand of lost GPUs to end")
            assert gpus.load().works == ()
            node.clear_faults()
        wait_for(lambda: wanted()[1] == 150, "the demand to return with the GPU")


@awaited
async def test_another_agent_of_the_same_name_is_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shells, "HEARTBEAT_S", 0.02)
    caplog.set_level("INFO", "zeus_fleet")

    class Shared:
        """A store to which another agent wrote a newer heartbeat, five times."""

        beats = 0

        async def newest_number(self, name: str) -> int:
            return 0

        async def beat(self, name: str, beat: NodeReport, works: object) -> StoreAnswer | None:
            self.beats += 1
            return None if self.beats <= 5 else StoreAnswer(None, None)

    store: Any = Shared()
    task = asyncio.create_task(run_agent("a", store, FakeGpus(100_000), timing=QUICK))
    await until(lambda: store.beats >= 7, "seven heartbeats")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert caplog.messages == [
        "another agent is running for a; stop one of the two",
        "no other agent is running for a now",
    ]

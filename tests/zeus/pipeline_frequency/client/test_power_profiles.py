"""Workload power profiles as settings of a plan: measured, planned, and requested on a GB200."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import wait_for
from tests.zeus.node import VirtualNode
from tests.zeus.pipeline_frequency.client.fakes import FakeServer, Store, fake_torch
from tests.zeus.pipeline_frequency.client.test_optimizer import ONE
from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer, connection
from zeus.optimizer.pipeline_frequency.common import RankProfile
from zeus.optimizer.pipeline_frequency.online_profiler import OnlineProfiler, ProfilerSettings
from zeus.optimizer.pipeline_frequency.power_profiles import PowerProfiles
from zeusd.devices.simulated.models import DEVICES

MODEL = DEVICES["gb200"]
HIGHEST = MODEL.clocks_mhz[0]
MAX_Q, LLM_TRAINING = 1, 7


@pytest.fixture
def node(
    virtual_node: Callable[[str], VirtualNode], monkeypatch: pytest.MonkeyPatch
) -> VirtualNode:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(Store()))
    monkeypatch.setattr(connection, "report_interval_s", lambda world_size: 0.02)
    monkeypatch.setattr(connection, "POLL_S", 0.01)
    return virtual_node("2xgb200:setter_ms=0")


@pytest.fixture
def begin(node: VirtualNode) -> Iterator[Callable[..., PipelineFrequencyOptimizer]]:
    """Makes an optimizer of the first GPU whose server has one plan."""
    server = FakeServer()
    made: list[PipelineFrequencyOptimizer] = []

    def make(plan: list[Any], **options: Any) -> PipelineFrequencyOptimizer:
        server.schedule, server.version = plan, int(bool(plan))
        made.append(PipelineFrequencyOptimizer(**{**ONE, **options}, server_url=server.url))
        return made[-1]

    yield make
    for one in made:
        one.close()
    server.stop()


def requested(node: VirtualNode) -> tuple[int, ...]:
    return node.nvml.requested_power_profiles(node.nvml.device_handle(0))


def locked_mhz(node: VirtualNode) -> list[int] | None:
    uuid = node.nvml.specs[0].uuid
    return node.client.state(uuid)[uuid].locked_gpu_clocks_mhz


def held(node: VirtualNode) -> tuple[tuple[int, ...], list[int] | None]:
    return requested(node), locked_mhz(node)


def test_a_plan_has_profiles_in_place_of_clocks(
    node: VirtualNode, begin: Callable[..., PipelineFrequencyOptimizer]
) -> None:
    plan = [("forward", "max-q"), ("forward", "llm-training"), ("backward", 1200), ("update", 0)]
    optimizer = begin(plan)
    wanted: list[tuple[tuple[int, ...], list[int] | None]] = [
        ((MAX_Q,), None),
        ((LLM_TRAINING,), None),
        ((), [1200, 1200]),
        ((), [1200, 1200]),
    ]
    for _ in range(2):
        optimizer.on_step_begin()
        for (name, _), (profiles, clock) in zip(plan, wanted, strict=True):
            optimizer.on_instruction_begin(name)
            now = profiles, clock
            wait_for(lambda now=now: held(node) == now, "profile and clock")
            optimizer.on_instruction_end(name)
        optimizer.on_step_end()
    optimizer.on_step_begin()
    optimizer.on_instruction_begin("forward")
    wait_for(lambda: requested(node) == (MAX_Q,), "the profile")
    optimizer.on_pause()  # an evaluation runs at default settings
    wait_for(lambda: requested(node) == (), "the default")
    optimizer.close()
    assert (requested(node), locked_mhz(node)) == ((), None)
    assert node.client.leases() == []


def test_a_profile_that_loses_is_reported_once_and_training_continues(
    node: VirtualNode, begin: Callable[..., PipelineFrequencyOptimizer], caplog: Any
) -> None:
    node.nvml.set_profiles_outside(0, (6,))
    optimizer = begin([("forward", "llm-training"), ("backward", "network"), ("update", 1200)])
    assert optimizer.plan_version == 0  # this GPU has no profile network
    assert "settings that are neither clocks (network)" in caplog.text
    profiles = PowerProfiles(0)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert not profiles.hold("llm-training")
        assert not profiles.hold("llm-training")
        assert profiles.hold("max-q")
    assert caplog.text.count("llm-training is not in force") == 1
    profiles.end()
    assert requested(node) == (6,)


def test_profiles_are_measured_after_the_clocks(
    node: VirtualNode, begin: Callable[..., PipelineFrequencyOptimizer], tmp_path: Path
) -> None:
    clocks = [HIGHEST - 30 * step for step in range(0, 60, 6)]
    table = {mhz: (0.05 * HIGHEST / mhz, 45 * (0.4 + 0.6 * (mhz / HIGHEST) ** 2)) for mhz in clocks}
    path = tmp_path / "profile.csv"
    lines = [f"0,forward,{mhz},{time},{energy}" for mhz, (time, energy) in table.items()]
    path.write_text("\n".join(["stage,instruction,frequency,time,energy", *lines, ""]))
    work = node.nvml.open_work([0], f"profile:{path}#stage=0")
    optimizer = begin(
        [],
        profile=ProfilerSettings(
            power_profiles=["max-q", "network"], every=12, iterations=3, warmup_iterations=1
        ),
    )
    optimizer.clock_ns = node.clock
    assert optimizer._settings is not None
    profiler: OnlineProfiler | None = None
    for _ in range(3000):
        optimizer.on_step_begin()
        profiler = optimizer._profiler or profiler
        if not optimizer.profiling:
            break
        for _ in range(8):
            optimizer.on_instruction_begin("forward")
            work.run(1, "forward")
            optimizer.on_instruction_end("forward")
            node.clock.sleep(0.01)
        optimizer.on_step_end()
        node.clock.sleep(0.1)
    assert profiler is not None
    assert profiler.failure == ""
    assert [type(row.frequency) for row in profiler.rows[:-1]] == [int] * (len(profiler.rows) - 1)
    row = profiler.rows[-1]
    assert row.frequency == "max-q"
    ceiling = round(0.9 * HIGHEST)
    above = min(mhz for mhz in clocks if mhz >= ceiling)
    below = max(mhz for mhz in clocks if mhz <= ceiling)
    low, high = sorted((table[above][0], table[below][0]))
    assert 0.98 * low <= row.time <= 1.02 * high
    wait_for(lambda: requested(node) == (), "the default")


def test_a_profiles_name_reaches_the_planner() -> None:
    row = {"instruction": "forward", "frequency": "max-q", "time": 0.1, "energy": 20.0}
    made = RankProfile.model_validate(
        {"rank": 3, "dp_rank": 1, "pp_rank": 2, "tp_rank": 0, "rows": [row]}
    )
    (found,) = RankProfile.model_validate_json(made.model_dump_json()).rows
    assert (found.frequency, found.stage, found.rank) == ("max-q", 2, 3)

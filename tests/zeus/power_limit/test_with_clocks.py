"""Power limits and bounds of the graphics clock: the search, the choice, and an H100 node."""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.zeus.node import VirtualNode, train
from zeus.exceptions import ZeusGPUNoPermissionError
from zeus.optimizer.power_limit import (
    Done,
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
)
from zeus.optimizer.power_limit.estimates import SettingSample
from zeus.optimizer.power_limit.messages import RankHello
from zeus.optimizer.power_limit.planner import LimitPlanner
from zeus.optimizer.power_limit.search import SearchName, SettingsSearch
from zeus.optimizer.power_limit.settings import Beside, Setting
from zeusd.devices.simulated.models import DEVICES
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import ModelWorkload

MODEL = DEVICES["h100-sxm"]
TOP = MODEL.clocks_mhz[0]
LOWEST_W, _, HIGHEST_W = MODEL.power_limits_w
MEMORY_BOUND = ModelWorkload(ModelLoad(unit_s=0.1, k=0.15, power_w=0.95 * LOWEST_W))
"""Draws less than the lowest limit: no power limit changes anything."""
SMALL: dict[str, Any] = {"warmup_steps": 4, "profile_steps": 16, "pl_step": 100}
OpenNode = Callable[[str], VirtualNode]


def truth(clock_mhz: int | None, limit_w: float = HIGHEST_W) -> tuple[float, float]:
    """Energy and time of a step, as the simulator has them."""
    point = MEMORY_BOUND.point(MODEL, 0, limit_w, clock_mhz or TOP)
    return point.power_w / point.rate, 1 / point.rate


@pytest.fixture
def node(virtual_node: OpenNode) -> VirtualNode:
    return virtual_node("2xh100-sxm:setter_ms=0")


def search(node: VirtualNode, selector: OptimumSelector, **options: Any) -> Any:
    plo = GlobalPowerLimitOptimizer(
        node.monitor(), selector, **{**SMALL, "search_clocks": True, **options}
    )
    work = node.nvml.open_work([0, 1], MEMORY_BOUND)
    train(plo, work, 3000, until_done=True)
    work.close()
    assert isinstance(plo.state, Done)
    assert plo.state.chosen
    return plo


def clocks(node: VirtualNode) -> list[tuple[int, int] | None]:
    return [node.nvml._gpus[gpu].gpu_lock_mhz for gpu in (0, 1)]


@pytest.mark.parametrize("name", ["adaptive", "exhaustive"])
def test_where_no_limit_saves_a_clock_does(node: VirtualNode, name: SearchName) -> None:
    alone = search(node, MaxSlowdownConstraint(1.12), search_clocks=False)
    assert alone.state.optimal_power_limit == HIGHEST_W * 1000
    alone.close()
    plo = search(node, MaxSlowdownConstraint(1.12), search=name, pl_step=500)
    clock = plo.state.optimal_clock
    tried = [one.of("graphics_clock") for one in plo.estimates if one.beside]
    highest_j, fastest_s = truth(None)
    allowed = [truth(one)[0] for one in tried if truth(one)[1] <= 1.12 * fastest_s]
    assert truth(clock)[0] <= 1.03 * min(allowed) < 0.95 * highest_j
    assert plo.current_clock == clock
    assert clocks(node) == [(MODEL.clocks_mhz[-1], clock)] * 2
    assert f"with clocks up to {clock} MHz" in str(plo.report())
    plo.close()
    assert clocks(node) == [None, None]
    assert node.client.leases() == []


def test_clocks_are_lowered_until_two_were_no_better() -> None:
    variants = [Beside("graphics_clock", mhz) for mhz in range(1800, 800, -100)]
    participants = RankHello(gpus=["GPU"], min_mw=200_000, max_mw=400_000, beside=variants)
    planner = LimitPlanner("adaptive", Energy(), 10, 40, 50_000, None, variants)
    chance = random.Random(3)

    def sampled(held: Setting, steps: int, position: int) -> SettingSample:
        mhz = held.of("graphics_clock") or 1900
        seconds = 0.1 * (0.7 + 0.3 * 1900 / mhz) * steps * chance.uniform(0.99, 1.01)
        # Least energy at 1500 MHz; a job of 100 W, which no limit reaches.
        watts = 100 * (0.8 + ((mhz - 1500) / 1000) ** 2) / (0.7 + 0.3 * 1900 / mhz)
        return SettingSample(
            held.power_limit_mw, steps, watts * seconds, seconds, 0.1,
            position - steps / 2, beside=held.beside,
        )  # fmt: skip

    def run(searching: SettingsSearch, position: int) -> tuple[list[int | None], int]:
        tried: list[int | None] = []
        held: Setting | None = None
        while (trial := searching.next(held, position)) is not None:
            position += trial.warmup_steps + trial.steps
            held = trial.setting
            if held.of("graphics_clock") not in tried:
                tried.append(held.of("graphics_clock"))
            searching.add(sampled(held, trial.steps, position))
        return tried, position

    searching = planner.begin(participants)
    tried, position = run(searching, 0)
    assert tried == [None, 1800, 1700, 1600, 1500, 1400, 1300]
    assert planner.choose(searching.estimates()).of("graphics_clock") == 1500
    # A run that continues from lower limits under a clock tries no clock that this one skipped.
    lower = sampled(Setting(350_000, beside=Beside("graphics_clock", 1500)), 5, position + 5)
    resumed = planner.begin(participants)
    resumed.resume([*searching.samples, lower], position + 5)
    assert set(run(resumed, position + 5)[0]) <= set(tried)


def test_where_clocks_may_not_be_locked_limits_are_searched_alone_and_the_user_is_told_once(
    node: VirtualNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plo = GlobalPowerLimitOptimizer(node.monitor(), Energy(), search_clocks=True, **SMALL)

    def refuse(indices: Sequence[int], mhz: int | None) -> None:
        raise ZeusGPUNoPermissionError("gpu_clocks are not allowed here")

    monkeypatch.setattr(plo.monitor.gpus, "bound_graphics_clocks", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(plo, node.nvml.open_work([0, 1], MEMORY_BOUND), 3000, until_done=True)
    assert isinstance(plo.state, Done)
    assert plo.state.chosen
    assert not any(one.beside for one in plo.estimates)
    refused = "gpu_clocks are not allowed here"
    told = [one.levelno for one in caplog.records if refused in one.getMessage()]
    assert told.count(logging.WARNING) == 1


def test_the_choice_is_kept_in_the_profile(node: VirtualNode, tmp_path: Path) -> None:
    path = tmp_path / "pl.json"
    first = search(node, Energy(), profile_path=path)
    first.on_train_end()
    kept = json.loads(path.read_text())
    clocks_mhz = [one["value"] for one in kept["beside"] if one["kind"] == "graphics_clock"]
    assert clocks_mhz[0] == max(clocks_mhz) == round(0.9 * TOP / 15) * 15
    assert len(clocks_mhz) == 5
    again = GlobalPowerLimitOptimizer(
        node.monitor(), Energy(), search_clocks=True, profile_path=path, **SMALL
    )
    assert again.state == first.state
    assert clocks(node) == [(MODEL.clocks_mhz[-1], first.state.optimal_clock)] * 2
    again.close()
    plain = GlobalPowerLimitOptimizer(node.monitor(), Energy(), profile_path=path, **SMALL)
    train(plain, node.nvml.open_work([0, 1], MEMORY_BOUND), 3000, until_done=True)
    assert isinstance(plain.state, Done)
    assert plain.state.optimal_clock is None
    assert clocks(node) == [None, None]


def test_the_next_optimizer_has_no_clock_of_one_that_never_ended(node: VirtualNode) -> None:
    work = node.nvml.open_work([0, 1], MEMORY_BOUND)
    first = GlobalPowerLimitOptimizer(node.monitor(), Energy(), search_clocks=True, **SMALL)
    while first.current_clock is None:
        train(first, work, 1)
    assert clocks(node) != [None, None]
    second = GlobalPowerLimitOptimizer(node.monitor(), Energy(), **SMALL)
    assert clocks(node) == [None, None]
    with pytest.warns(UserWarning, match="another power limit optimizer"):
        train(first, work, 1)
    train(second, work, 3000, until_done=True)
    assert second.state.optimal_power_limit == node.limit_w() * 1000
    second.close()


def test_clocks_that_gpus_do_not_have_are_refused_in_one_sentence(node: VirtualNode) -> None:
    with pytest.raises(ValueError, match=r"names 1234, which these GPUs do not offer"):
        GlobalPowerLimitOptimizer(node.monitor(), search_clocks=[1500, 1234])


@pytest.mark.parametrize("given", [1500, "1500", ["1500"], [1500.5], [True]])
def test_what_is_no_list_of_clocks_is_refused_in_one_sentence(
    node: VirtualNode, given: Any
) -> None:
    with pytest.raises(
        ValueError, match=r"search_clocks (must be .*give \[|names .*, which these)"
    ):
        GlobalPowerLimitOptimizer(node.monitor(), search_clocks=given)


@pytest.mark.parametrize(
    ("seed", "noise", "profile_steps", "late"),
    [(23, 0.1, 10, 2), (11, 0.2, 10, 2), (0, 0.2, 10, 4), (37, 0.2, 16, 1), (38, 0.3, 16, 4)],
)
def test_a_late_piece_leaves_no_search_without_the_highest_limit(
    seed: int, noise: float, profile_steps: int, late: int
) -> None:
    """Steps until the next command are measured, too, and may show that training has changed."""
    clocks = [Beside("graphics_clock", mhz) for mhz in (1200, 900)]
    participants = RankHello(gpus=["GPU"], min_mw=200_000, max_mw=400_000, beside=clocks)
    selector = MaxSlowdownConstraint(1.1)
    planner = LimitPlanner("adaptive", selector, 4, profile_steps, 100_000, None, clocks)
    searching = planner.begin(participants)
    chance = random.Random(seed)
    held: Setting | None = None
    position = 0

    def measure(setting: Setting, steps: int) -> None:
        nonlocal position
        position += steps
        limit_mw, middle = setting.power_limit_mw, position - steps / 2
        seconds = 0.1 * (400_000 / limit_mw) ** 0.3 * steps
        seconds *= chance.uniform(1 - noise, 1 + noise)
        joules = 0.9 * limit_mw / 1000 * seconds
        searching.add(
            SettingSample(limit_mw, steps, joules, seconds, 0.1, middle, beside=setting.beside)
        )

    while (trial := searching.next(held, position)) is not None:
        if held is not None and trial.setting != held:
            for _ in range(late):
                measure(held, 1)
        position += trial.warmup_steps
        held = trial.setting
        measure(held, trial.steps)
        assert position < 1000
    assert searching.estimates()[0].setting == Setting(400_000)

"""Pairs of a power limit and a workload power profile: the search, the choice, and a GB200 node."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from tests.zeus.node import VirtualNode, train
from zeus.device import get_gpus
from zeus.exceptions import ZeusGPUInvalidArgError
from zeus.optimizer.power_limit import (
    Done,
    Energy,
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    OptimumSelector,
    PowerLimitMeasurement,
    Time,
    ZeusCost,
)
from zeus.optimizer.power_limit.estimates import LimitEstimate, SettingSample
from zeus.optimizer.power_limit.messages import RankHello
from zeus.optimizer.power_limit.planner import LimitPlanner
from zeus.optimizer.power_limit.profile import ProfileFile
from zeus.optimizer.power_limit.search import SearchName
from zeus.optimizer.power_limit.selectors import best
from zeus.optimizer.power_limit.settings import Beside, Setting
from zeusd.devices.simulated.models import DEVICES
from zeusd.devices.simulated.physics import ModelLoad
from zeusd.devices.simulated.workloads import ModelWorkload

SEVEN = Beside("power_profile", 7)
PARTICIPANTS = RankHello(
    gpus=["GPU"], min_mw=200_000, max_mw=500_000, beside=[Beside("power_profile", 1), SEVEN]
)
HIGHEST = 500_000


class Job:
    """A job that draws 480 W. Profile 1 takes a quarter of the power and a little time, profile 7
    some power and no time, and then limits bind later.
    """

    cheaper: ClassVar[dict[int | None, float]] = {None: 1.0, 1: 0.75, 7: 0.95}
    slower: ClassVar[dict[int | None, float]] = {None: 1.0, 1: 1.04, 7: 1.0}

    def __init__(self, seed: int, noise: float = 0.02) -> None:
        self.random = random.Random(seed)
        self.noise = noise
        self.position = 0
        self.ran: list[tuple[int, int | None]] = []

    def time_s(self, limit_mw: int, profile: int | None) -> float:
        below = max(0.0, math.log(480_000 * self.cheaper[profile] / limit_mw))
        return 0.3 * self.slower[profile] * math.exp(0.25 * below + 0.8 * below**2)

    def energy_j(self, limit_mw: int, profile: int | None) -> float:
        power_w = min(480.0 * self.cheaper[profile], 0.97 * limit_mw / 1000)
        return self.time_s(limit_mw, profile) * power_w

    def run(self, setting: Setting, steps: int) -> SettingSample:
        limit_mw, profile = setting.power_limit_mw, setting.of("power_profile")
        self.ran.append((limit_mw, profile))
        off = sum(math.exp(self.random.gauss(0, self.noise)) for _ in range(steps))
        self.position += steps
        found = self.energy_j(limit_mw, profile) * off, self.time_s(limit_mw, profile) * off
        middle = self.position - steps / 2
        return SettingSample(limit_mw, steps, *found, 0.5, middle, beside=setting.beside)


def planner(
    selector: OptimumSelector, name: SearchName = "adaptive", path: Path | None = None
) -> LimitPlanner:
    file = None if path is None else ProfileFile(path)
    return LimitPlanner(name, selector, 10, 40, 50_000, file, PARTICIPANTS.beside)


def search(
    planning: LimitPlanner, job: Job, participants: RankHello = PARTICIPANTS
) -> LimitEstimate:
    """Runs a search to its end, with samples that come a piece late. Returns its choice."""
    searching = planning.begin(participants)
    late: list[SettingSample] = []
    current: Setting | None = None
    trial = searching.next(current, job.position)
    while trial is not None or late:
        assert job.position < 3000, "the search does not end"
        if trial is not None:
            if trial.setting != current:
                job.run(trial, max(1, trial.warmup_steps))
            current = trial.setting
            late.append(job.run(current, trial.steps))
        if len(late) > 1 or trial is None:
            searching.add(late.pop(0))
        outstanding = [(one.setting, one.steps) for one in late]
        trial = searching.next(current, job.position, outstanding)
    planning.save(searching, job.position, complete=True)
    return planning.choose(searching.estimates())


def pairs(job: Job) -> list[tuple[int, int | None]]:
    limits = range(HIGHEST, 199_999, -50_000)
    return [(limit, profile) for profile in job.cheaper for limit in limits]


@pytest.mark.parametrize("name", ["adaptive", "exhaustive"])
@pytest.mark.parametrize(
    "selector", [Energy(), ZeusCost(0.5), Time()], ids=lambda s: type(s).__name__
)
def test_the_choice_is_as_good_as_the_best_pair(
    selector: OptimumSelector, name: SearchName
) -> None:
    for seed in range(2):
        job = Job(seed)
        planning = planner(selector, name)
        chosen = search(planning, job)
        rows = [
            PowerLimitMeasurement(
                power_limit=limit / 1000, energy=job.energy_j(limit, p), time=job.time_s(limit, p)
            )
            for limit, p in pairs(job)
        ]
        costs = selector.costs(rows)
        cost = costs[pairs(job).index((chosen.power_limit_mw, chosen.of("power_profile")))]
        assert cost <= 1.02 * min(costs), f"seed {seed} chose {chosen}"
        assert sum(one.steps for one in planning.begin(PARTICIPANTS).samples) == 0
        assert job.position <= planning.expected_steps


@pytest.mark.parametrize("name", ["adaptive", "exhaustive"])
def test_a_slowdown_counts_against_the_highest_limit_without_a_profile(name: SearchName) -> None:
    """1.03 excludes profile 1, which takes 4 % more time at any limit."""
    for seed in range(2):
        job = Job(seed, noise=0.005)
        chosen = search(planner(MaxSlowdownConstraint(1.03), name), job)
        slowdown = job.time_s(chosen.power_limit_mw, chosen.of("power_profile")) / job.time_s(
            HIGHEST, None
        )
        assert slowdown <= 1.03, f"seed {seed}: {chosen}"
        assert chosen.of("power_profile") == 7
        loose = search(planner(MaxSlowdownConstraint(1.08), name), Job(seed, noise=0.005))
        assert loose.of("power_profile") == 1


def test_profiles_that_save_nothing_are_not_searched_further() -> None:
    class Useless(Job):
        cheaper: ClassVar[dict[int | None, float]] = {None: 1.0, 1: 1.0, 7: 1.02}
        slower: ClassVar[dict[int | None, float]] = {None: 1.0, 1: 1.05, 7: 1.0}

    job = Useless(3)
    chosen = search(planner(Energy()), job)
    assert chosen.of("power_profile") is None
    assert chosen.power_limit_mw < HIGHEST
    assert {limit for limit, profile in job.ran if profile is not None} == {HIGHEST}


def test_a_profile_that_is_refused_is_left_out() -> None:
    job, searching = Job(1), planner(Energy()).begin(PARTICIPANTS)
    held: Setting | None = None
    tried = set()
    while (trial := searching.next(held, job.position)) is not None:
        if trial.of("power_profile") == 1:
            searching.without(trial.setting)
            continue
        held = trial.setting
        tried.add(held.of("power_profile"))
        searching.add(job.run(held, trial.steps))
    assert tried == {None, 7}
    assert {one.of("power_profile") for one in searching.estimates()} == {None, 7}


def test_a_complete_file_answers_the_same_question_only(tmp_path: Path) -> None:
    path = tmp_path / "pl.json"
    job = Job(2)
    chosen = search(planner(Energy(), path=path), job)
    written = json.loads(path.read_text())
    assert [one["value"] for one in written["beside"]] == [1, 7]
    assert {row.get("power_profile") for row in written["measurements"]} == {
        None,
        "max-q",
        "llm-training",
    }
    again = planner(Energy(), path=path)
    assert again.read_profile()
    idle = Job(9)
    found = search(again, idle)
    assert found.setting == chosen.setting
    assert idle.ran == []
    plain = LimitPlanner("adaptive", Energy(), 10, 40, 50_000, ProfileFile(path))
    assert plain.read_profile()
    alone = PARTICIPANTS.model_copy(update={"beside": []})
    without = search(plain, Job(9), alone)
    assert without.of("power_profile") is None
    assert not any(one.beside for one in plain.begin(alone).samples)


class ByLimit(OptimumSelector):
    """A user's, which knows nothing of profiles."""

    def select(self, measurements: list[PowerLimitMeasurement]) -> int | float:
        return min(measurements, key=lambda one: one.energy).power_limit


def test_a_selector_that_names_a_limit_gets_the_profile_of_least_energy() -> None:
    found = [
        LimitEstimate(500_000, 1.0, 10.0, 0.0, 0.0, 8),
        LimitEstimate(400_000, 1.1, 9.0, 0.0, 0.0, 8),
        LimitEstimate(500_000, 1.0, 9.5, 0.0, 0.0, 8, beside=SEVEN),
        LimitEstimate(400_000, 1.2, 8.0, 0.0, 0.0, 8, beside=SEVEN),
    ]
    assert best(ByLimit(), found, 40, cautious=False) is found[3]


def test_a_profile_that_changes_next_to_nothing_is_not_chosen() -> None:
    plain = (
        LimitEstimate(500_000, 1.0, 10.0, 0.0, 0.0, 8),
        LimitEstimate(400_000, 1.1, 9.0, 0.0, 0.0, 8),
    )
    alike = LimitEstimate(400_000, 1.1, 8.95, 0.0, 0.0, 8, beside=SEVEN)
    assert best(Energy(), [*plain, alike], 40, cautious=False) is plain[1]
    faster = LimitEstimate(400_000, 1.05, 8.95, 0.0, 0.0, 8, beside=SEVEN)
    assert best(Energy(), [*plain, faster], 40, cautious=False) is faster


# ------------------------------------------------------------------------------- a GB200 node

MODEL = DEVICES["gb200"]
WORKLOAD = ModelWorkload(ModelLoad(unit_s=0.1, k=0.3, power_w=1100.0))
SMALL = {"warmup_steps": 4, "profile_steps": 16, "pl_step": 200}


@pytest.fixture
def node(virtual_node: Callable[[str], VirtualNode]) -> VirtualNode:
    return virtual_node("2xgb200:setter_ms=0")


def truth(limit_w: float, profile: int | None) -> tuple[float, float]:
    """Energy and time of a step, as the simulator has them."""
    clock = MODEL.clocks_mhz[0]
    if profile is not None:
        one = next(one for one in MODEL.profiles if one.profile == profile)
        limit_w = min(limit_w, one.limit * MODEL.power_limits_w[2])
        clock = round(one.clock * clock)
    point = WORKLOAD.point(MODEL, 0, limit_w, clock)
    return point.power_w / point.rate, 1 / point.rate


def requested(node: VirtualNode) -> list[tuple[int, ...]]:
    return [node.nvml.requested_power_profiles(node.nvml.device_handle(gpu)) for gpu in range(2)]


def test_a_search_on_gb200s_sets_the_best_pair_and_restores_both(node: VirtualNode) -> None:
    """Within 15 % more time, memory-bound saves a sixth against either limit alone."""
    plo = GlobalPowerLimitOptimizer(
        node.monitor(),
        MaxSlowdownConstraint(1.15),
        search_profiles=True,
        **{**SMALL, "pl_step": 600},
    )
    train(plo, node.nvml.open_work([0, 1], WORKLOAD), 3000, until_done=True)
    assert isinstance(plo.state, Done)
    assert plo.state.chosen
    name = plo.state.optimal_power_profile
    profiles = {one.profile: one for one in node.client.node().gpus[0].power_profiles}
    number = next(one for one, info in profiles.items() if info.name == name)
    _, fastest_s = truth(MODEL.power_limits_w[2], None)
    tried = [truth(limit / 1000, p) for limit in plo.power_limits for p in (None, *profiles)]
    least_j = min(energy_j for energy_j, time_s in tried if time_s <= 1.15 * fastest_s)
    energy_j, time_s = truth(plo.state.optimal_power_limit / 1000, number)
    assert energy_j <= 1.02 * least_j
    assert time_s <= 1.1 * fastest_s
    assert plo.current_power_profile == name
    assert requested(node) == [(number,)] * 2
    report = str(plo.report())
    assert f"At {plo.state.optimal_power_limit / 1000:g} W with the power profile {name}" in report
    assert f"{name}  <- chosen" in report
    plo.close()
    assert requested(node) == [(), ()]
    assert node.limit_w() == MODEL.power_limits_w[1]


def test_a_profile_that_loses_to_another_users_is_left_out(node: VirtualNode) -> None:
    node.nvml.set_profiles_outside(1, (6,))  # wins over 7
    plo = GlobalPowerLimitOptimizer(
        node.monitor(),
        Energy(),
        search_profiles=["llm-training"],
        **SMALL,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(plo, node.nvml.open_work([0, 1], WORKLOAD), 3000, until_done=True)
    assert isinstance(plo.state, Done)
    assert plo.state.chosen
    assert plo.state.optimal_power_profile is None
    assert requested(node) == [(), (6,)]


@pytest.mark.parametrize(
    ("spec", "wanted", "said"),
    [
        ("a100", True, "A100.* offers no workload power profiles"),
        ("4xmi300x", True, "MI300X offers no workload power profiles"),
        (
            "2xgb200",
            ["max-q", "turbo"],
            "names 'turbo', which these GPUs do not offer; there are max",
        ),
        ("2xgb200", "max-q", r"give \['max-q'\]"),
    ],
)
def test_profiles_that_gpus_do_not_offer_are_refused_in_one_sentence(
    virtual_node: Callable[[str], VirtualNode],
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    wanted: bool | Sequence[str],
    said: str,
) -> None:
    node = virtual_node(f"{spec}:setter_ms=0")
    with pytest.raises(ValueError, match=said):
        GlobalPowerLimitOptimizer(node.monitor(gpu_indices=[0]), search_profiles=wanted)


def test_profiles_are_set_by_name_and_those_that_lose_are_named(node: VirtualNode) -> None:
    gpu = get_gpus()[0]
    assert {"max-q", "llm-training"} <= set(gpu.get_supported_power_profiles())
    node.nvml.set_profiles_outside(0, (6,))
    gpu.set_power_management_limit(800_000)
    assert gpu.set_power_profiles(["max-q", 7]) == ["llm-training"]
    assert requested(node)[0] == (1, 6, 7)
    assert gpu.set_power_profiles([]) == []
    assert requested(node)[0] == (6,)
    with pytest.raises(ZeusGPUInvalidArgError, match="has no workload power profile 'turbo'"):
        gpu.set_power_profiles(["turbo"])

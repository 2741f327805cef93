"""The online profiler on simulated GPUs whose truth is measured, in virtual time."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from tests.zeus.node import VirtualNode
from zeus.exceptions import PipelineFrequencyError
from zeus.optimizer.pipeline_frequency.frequency_controller import FrequencyController
from zeus.optimizer.pipeline_frequency.online_profiler import (
    OnlineProfiler,
    ProfilerSettings,
    Sensor,
    known_blocking_w,
    trimmed_mean,
)
from zeus.optimizer.pipeline_frequency.profile import ProfileMeasurement, Setting
from zeus.optimizer.pipeline_frequency.schedules import one_f_one_b
from zeusd.devices.simulated import Work
from zeusd.devices.simulated.instructions import Instructions, find_instructions

OpenNode = Callable[[str], VirtualNode]


@functools.cache
def order(stage: int, microbatches: int = 8) -> list[str]:
    """Of the instructions of one of eight stages."""
    pipeline = one_f_one_b(8, microbatches)
    return [pipeline.instructions[place].name for place in pipeline.stages[stage]]


@dataclass
class Training:
    """One rank, its GPU, and its true profile."""

    node: VirtualNode
    controller: FrequencyController
    work: Work
    truth: Instructions
    stage: int
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    iterations: int = 0
    late: float = 0.0
    """Share of instructions whose end is noticed ten times as late."""
    microbatches: int = 8
    most_wait_s: float = 0.04
    """For another stage, before an instruction."""

    def profiler(
        self,
        sensor: Sensor | None = None,
        hold: Callable[[Setting], bool] | None = None,
        **options: object,
    ) -> OnlineProfiler:
        settings = ProfilerSettings(**options)
        return OnlineProfiler(
            settings.chosen(self.controller.supported),
            settings,
            sensor or self.controller.sensor(),
            hold or self.controller.hold,
            lambda: self.controller.working,
            lambda: None,
            self.node.clock,
            {"stage": self.stage},
        )

    def iterate(self, profiler: OnlineProfiler) -> None:
        profiler.step_begin()
        for name in order(self.stage, self.microbatches):
            self.node.clock.sleep(self.chance.uniform(0, self.most_wait_s))
            profiler.instruction_begin(name)
            begin_ns = self.node.clock()
            self.work.run(1, name)
            if self.chance.random() < self.late:
                self.node.clock.sleep(9 * (self.node.clock() - begin_ns) / 1e9)
            profiler.instruction_end(name)
        profiler.step_end()
        self.node.clock.sleep(0.1)
        self.iterations += 1

    def sweep(self, profiler: OnlineProfiler) -> list[ProfileMeasurement]:
        while not profiler.finished:
            self.iterate(profiler)
            assert self.iterations < 3000
        return profiler.rows

    def check(
        self, rows: list[ProfileMeasurement], time: float = 0.005, energy: float = 0.02
    ) -> None:
        """Time and energy of each row are as near to the truth as that."""
        model = self.node.nvml.specs[0].model
        for row in rows:
            seconds, watts = self.truth.tables[row.instruction].at(row.frequency, model)
            assert row.time == pytest.approx(seconds, rel=time)
            assert row.energy == pytest.approx(seconds * watts, rel=energy)


@pytest.fixture
def train(
    virtual_node: OpenNode, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Training]]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stack = ExitStack()

    def begin(gpu: str, stage: int, options: str = "") -> Training:
        node = virtual_node(f"{gpu}:setter_ms=12{options}")
        name = f"perseus/{gpu}/gpt3-175b/stage{stage}"
        truth = find_instructions(name, node.nvml.specs[0].model)
        assert truth is not None
        controller = FrequencyController()
        stack.callback(controller.end)
        return Training(node, controller, node.nvml.open_work([0], name), truth, stage)

    with stack:
        yield begin


@pytest.mark.parametrize(
    ("gpu", "stage", "options"),
    [("a100", 0, ""), ("a100", 7, ":counts_all"), ("a40", 2, ":seed=4")],
)
def test_time_and_energy_are_recovered_within_two_percent(
    train: Callable[..., Training], gpu: str, stage: int, options: str
) -> None:
    rank = train(gpu, stage, options)
    profiler = rank.profiler()
    rows = rank.sweep(profiler)
    assert profiler.failure == ""
    assert {row.instruction for row in rows} == {"forward", "backward"}
    clocks = [row.frequency for row in rows if row.instruction == "forward"]
    assert clocks == rank.controller.supported[: len(clocks)]
    assert len(clocks) >= 25
    rank.check(rows)
    assert profiler.blocking is not None
    assert profiler.blocking.watts == pytest.approx(rank.truth.blocking_w, rel=0.05)
    assert profiler.instructions == order(stage)
    # The sweep costs tens of iterations, not hundreds, and stays in the clocks that matter.
    assert rank.iterations <= 6 * len(clocks)


def test_a_host_that_notices_late_that_an_instruction_is_over_changes_neither_time_nor_energy(
    train: Callable[..., Training],
) -> None:
    """Its GPU waits meanwhile, so a reading of that time is a mixture."""
    rank = train("a100", 3)
    rank.late = 0.08
    profiler = rank.profiler(every=8, precision=0.02, most_iterations=40)
    rank.check(rank.sweep(profiler), time=0.01, energy=0.03)


def test_the_sweep_ends_by_the_rule_of_five(train: Callable[..., Training]) -> None:
    rank = train("a100", 0)
    rows = rank.sweep(rank.profiler(every=2))
    for name in ("forward", "backward"):
        energies = [row.energy for row in rows if row.instruction == name]
        assert all(later > earlier for earlier, later in pairwise(energies[-6:]))
    lowest = rows[-1].frequency
    assert 600 <= lowest <= 900
    # Not earlier: five in a row had not risen for both before.
    model = rank.node.nvml.specs[0].model
    swept = [row.frequency for row in rows if row.instruction == "forward"]
    for last in range(6, len(swept)):
        rises = all(
            rank.truth.tables[name].at(later, model)[0]
            * rank.truth.tables[name].at(later, model)[1]
            > rank.truth.tables[name].at(earlier, model)[0]
            * rank.truth.tables[name].at(earlier, model)[1]
            * 1.005
            for name in ("forward", "backward")
            for earlier, later in pairwise(swept[last - 6 : last])
        )
        assert not rises


def test_the_sweep_keeps_its_bounds(train: Callable[..., Training]) -> None:
    rank = train("a100", 0)
    rows = rank.sweep(rank.profiler(every=8, floor_mhz=1000))
    forward = [row.frequency for row in rows if row.instruction == "forward"]
    assert forward == [1410, 1290, 1170, 1050]
    rows = rank.sweep(rank.profiler(every=4, rises=1))
    assert len({row.frequency for row in rows}) < 11


def test_a_pause_and_odd_calls_do_not_falsify_the_figures(train: Callable[..., Training]) -> None:
    rank = train("a100", 5)
    profiler = rank.profiler(every=10, floor_mhz=1000)
    while not profiler.finished:
        rank.iterate(profiler)
        call = rank.chance.randrange(5)
        if call == 0:
            profiler.pause()
            for _ in range(3):  # an evaluation at another load
                profiler.instruction_begin("forward")
                rank.work.run(1, "forward")
                profiler.instruction_end("forward")
        elif call == 1:
            profiler.step_end()
            profiler.instruction_end("backward")
        elif call == 2:
            profiler.step_begin()
            profiler.instruction_begin("forward")
            profiler.step_end()
        assert rank.iterations < 500
    assert [row.frequency for row in profiler.rows[::2]] == [1410, 1260, 1110]
    rank.check(profiler.rows)


def test_clocks_that_cannot_be_set_stop_the_sweep_and_not_the_training(
    train: Callable[..., Training],
) -> None:
    rank = train("a100", 0)
    works = [True]
    profiler = rank.profiler(
        hold=lambda mhz: works[0] and rank.controller.hold(mhz), every=20, start_after=0
    )
    for _ in range(3):
        rank.iterate(profiler)
    works[0] = False
    while profiler.frequency == 1410:
        rank.iterate(profiler)
        assert rank.iterations < 100
    measured = len(profiler.rows)
    for _ in range(30):
        rank.iterate(profiler)
    assert len(profiler.rows) == measured
    assert not profiler.finished
    works[0] = True
    rows = rank.sweep(profiler)
    rank.check(rows)


def test_without_readings_the_sweep_is_given_up(train: Callable[..., Training]) -> None:
    class Broken:
        window_ns = None

        def readings(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
            raise OSError("no sensor today")

    class Dark(Broken):
        def readings(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
            return []

    rank = train("a100", 0)
    for sensor, said in ((Broken(), "no sensor today"), (Dark(), "power readings")):
        profiler = rank.profiler(sensor, every=20)
        assert rank.sweep(profiler) == []
        assert said in profiler.failure


def test_a_clock_whose_readings_are_missing_is_measured_again(
    train: Callable[..., Training],
) -> None:
    rank = train("a100", 0)
    sensor = rank.controller.sensor()
    looked_at: list[tuple[int, object]] = []

    class Interrupted:
        window_ns = sensor.window_ns

        def readings(self, start_ns: int, end_ns: int) -> list[tuple[int, int]]:
            looked_at.append((rank.iterations, profiler.frequency))
            return [] if rank.iterations < 12 else sensor.readings(start_ns, end_ns)

    profiler = rank.profiler(Interrupted(), every=20, most_iterations=6)
    rows = rank.sweep(profiler)
    assert profiler.failure == ""
    first = rank.controller.supported[0]
    assert max(at for at, mhz in looked_at if mhz == first) >= 12
    assert [row.instruction for row in rows if row.frequency == first] == ["forward", "backward"]
    rank.check(rows, energy=0.05)


@pytest.mark.parametrize(("gpu", "covered_ns"), [("h100-sxm", None), ("gh200", 25_000_000)])
def test_readings_cover_what_the_sensor_in_use_covers(
    virtual_node: OpenNode, gpu: str, covered_ns: int | None
) -> None:
    """A superchip's power stands in for a counter that counts the module."""
    node = virtual_node(f"{gpu}:setter_ms=0")
    controller = FrequencyController()
    sensor = controller.sensor()
    node.clock.sleep(10)
    controller.end()
    assert sensor.window_ns == covered_ns


def test_short_instructions_are_distinguished(virtual_node: OpenNode, tmp_path: Path) -> None:
    """5 ms and 9 ms, of a sensor that ticks each 100 ms."""
    path = tmp_path / "own.csv"
    path.write_text(
        "stage,instruction,frequency,time,energy\n"
        + "".join(
            f"0,forward,{mhz},{5 / mhz},{0.0012 * mhz}\n0,backward,{mhz},{9 / mhz},{0.003 * mhz}\n"
            for mhz in (1410, 900)
        )
    )
    node = virtual_node("a100:setter_ms=12")
    work = node.nvml.open_work([0], f"profile:{path}#stage=0")
    truth = find_instructions(f"profile:{path}#stage=0", node.nvml.specs[0].model)
    assert truth is not None
    controller = FrequencyController()
    rank = Training(node, controller, work, truth, 6, microbatches=32, most_wait_s=0.004)
    profiler = rank.profiler(every=34, floor_mhz=900, most_iterations=90)
    rank.sweep(profiler)
    controller.end()
    assert {row.frequency for row in profiler.rows} == {1410, 900}
    rank.check(profiler.rows)


# ---------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"iterations": 9, "most_iterations": 8}, "most_iterations must be at least 9"),
        ({"precision": 0.0}, "precision"),
        ({"p2p_power_w": -1.0}, "p2p_power_w"),
        ({"floor_mhz": -5}, "floor_mhz"),
        ({"start_after": -1}, "start_after must be at least 0, not -1"),
        ({"warmup_iterations": -1}, "warmup_iterations must be at least 0"),
        ({"iterations": 0}, "profiler's iterations must be at least 1"),
        ({"rises": 0}, "rises must be at least 1"),
        ({"precision": 1.0}, "a share such as 0.01, not 1.0"),
        ({"p2p_power_w": math.inf}, "p2p_power_w must be watts, at least 0, not inf"),
    ],
)
def test_invalid_settings_are_reported(options: dict[str, float], said: str) -> None:
    with pytest.raises(PipelineFrequencyError, match=said):
        ProfilerSettings(**options)


def test_the_clocks_that_are_measured() -> None:
    clocks = [300, 600, 900, 1200]
    assert ProfilerSettings().chosen(clocks) == [1200, 900, 600, 300]
    assert ProfilerSettings(every=3).chosen(clocks) == [1200, 300]
    assert ProfilerSettings(floor_mhz=700).chosen(clocks) == [1200, 900]
    assert ProfilerSettings(floor_mhz=2000).chosen(clocks) == [1200]
    assert ProfilerSettings().chosen([]) == []
    least = {"start_after": 0, "warmup_iterations": 0, "iterations": 1, "most_iterations": 1}
    assert ProfilerSettings(**least, p2p_power_w=0.0).chosen(clocks) == [1200, 900, 600, 300]


def test_blocking_power_of_known_products() -> None:
    assert known_blocking_w("NVIDIA A100-SXM4-80GB") == 83.64
    assert known_blocking_w("NVIDIA A40") == 70.38
    assert known_blocking_w("NVIDIA A4000") is None
    assert known_blocking_w("NVIDIA H100 80GB HBM3") is None


def test_a_few_odd_times_do_not_move_the_mean() -> None:
    assert trimmed_mean([1.0] * 18 + [50.0, 60.0]) == 1.0
    assert trimmed_mean([3.0]) == 3.0

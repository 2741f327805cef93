"""The scope of a superchip's energy counter, determined from its powers."""

from __future__ import annotations

import pytest

from tests.zeusd.energy.support import empty_history
from zeusd.devices.port import SensorValues
from zeusd.energy.channel import Channel
from zeusd.energy.scope import Scope, ScopeTest

STEP_NS = 100_000_000
GPU_W, MODULE_W = 166, 464


class Chip:
    """A GPU of a superchip at constant power, whose counter counts a given power."""

    def __init__(self, counted_w: float, gpu_w: int | None = GPU_W, module_w: int = MODULE_W):
        self.test = ScopeTest()
        self.t_ns = 10**10
        self.energy_mj = 5_000_000.0
        self.counted_w = counted_w
        self.gpu_mw = None if gpu_w is None else gpu_w * 1000
        self.module_mw: int | None = module_w * 1000

    def reading(self) -> SensorValues:
        return SensorValues(
            self.t_ns, int(self.energy_mj), self.gpu_mw, None, None, module_power_mw=self.module_mw
        )

    def run(self, seconds: float) -> Scope:
        for _ in range(round(seconds * 10)):
            self.t_ns += STEP_NS
            self.energy_mj += self.counted_w * 100
            self.test.observe(self.reading())
        return self.test.verdict


@pytest.mark.parametrize(
    ("counted_w", "gpu_w", "verdict"),
    [
        (GPU_W, GPU_W, Scope.GPU),
        (GPU_W * 1.05, GPU_W, Scope.GPU),
        (MODULE_W * 0.95, GPU_W, Scope.MODULE),
        (MODULE_W, None, Scope.MODULE),
        (GPU_W, None, Scope.UNKNOWN),
        (300, GPU_W, Scope.UNKNOWN),
        (MODULE_W, MODULE_W - 20, Scope.UNKNOWN),  # both
    ],
)
def test_a_counter_counts_the_power_that_it_agrees_with_alone(
    counted_w: float, gpu_w: int | None, verdict: Scope
) -> None:
    chip = Chip(counted_w, gpu_w)
    assert chip.run(4.9) is Scope.UNKNOWN
    assert chip.run(0.3) is verdict
    assert chip.run(30) is verdict


def test_a_gpu_without_a_module_is_not_tested() -> None:
    chip = Chip(counted_w=50)
    chip.module_mw = None
    assert chip.run(20) is Scope.GPU


@pytest.mark.parametrize("pauses", [True, False], ids=["no readings", "no counter"])
def test_a_comparison_begins_again_after_a_pause(pauses: bool) -> None:
    chip = Chip(counted_w=GPU_W)
    chip.run(4)
    if pauses:
        chip.t_ns += 2_000_000_000  # in which it counted as if it were the module's
        chip.energy_mj += 2_120_000
    else:
        chip.t_ns += STEP_NS
        module_mw = chip.module_mw
        chip.test.observe(
            SensorValues(chip.t_ns, None, chip.gpu_mw, None, None, module_power_mw=module_mw)
        )
    assert chip.run(4) is Scope.UNKNOWN
    assert chip.run(1.3) is Scope.GPU


def test_a_counter_that_starts_again_is_tested_again() -> None:
    chip = Chip(counted_w=GPU_W)
    assert chip.run(6) is Scope.GPU
    chip.energy_mj, chip.counted_w = 0, MODULE_W
    assert chip.run(1) is Scope.UNKNOWN
    assert chip.run(6) is Scope.MODULE


def test_energy_is_the_gpus_for_every_counter_scope() -> None:
    """Power is integrated until the counter is known to count the GPU alone."""
    for counted_w in (GPU_W, MODULE_W, 300):
        chip = Chip(counted_w)
        channel = Channel(chip.t_ns, empty_history(), 10, "GB200", 10**6)
        for _ in range(200):
            chip.t_ns += STEP_NS
            chip.energy_mj += chip.counted_w * 100
            chip.gpu_mw = GPU_W * 1000 + chip.t_ns // STEP_NS % 2  # readings move at each tick
            channel.observe(chip.reading())
        edge, raw = channel.history.last() or (None, None)
        assert edge is not None
        seconds = (edge.t_ns - channel.history.t_ns[0]) / 1e9
        assert seconds > 15
        assert edge.counted_uj / 1e6 == pytest.approx(GPU_W * seconds, rel=0.01)
        assert (raw is not None) == (counted_w == GPU_W)

"""How far measured energy is from the truth, beside the difference of two counter readings.

    python benchmarks/accuracy.py [--windows N] [--seed N] [--picture FILE]

On simulated GPUs, whose true energy is known, in simulated time: the sampler of zeusd looks at each
GPU as it would (late now and then, as threads are), while a load runs and windows of 5 ms to 10 s
are opened and closed. "raw" is what a program gets that reads the energy counter at both ends of a
window. Boards' gain errors are left out: no software sees them.

With `--reference PYTHON`, an interpreter of an environment that has zeus (the reference package)
installed, its monitor's figures for the burst loads are added, on the recording C library, in real
time.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from zeusd.energy.channel import Channel
from zeusd.energy.history import SIZE, History
from zeusd.nvml.simulated import SimulatedNvml, VirtualClock
from zeusd.nvml.simulated.workloads import ScriptedWorkload

LENGTHS_MS = (5, 10, 20, 50, 100, 200, 300, 500, 1000, 3000, 10_000)
DEVICES = ("v100-pcie", "a100-sxm-80", "a40", "h100-sxm", "p100")
LATE_S = 60e-6
HELD_UP = 0.01
"""Share of looks that come milliseconds late."""


@dataclass
class Window:
    """One window and what is said of it, J."""

    begin_ns: int
    begin_j: float
    begin_mj: int | None
    end_ns: int = 0
    truth_j: float = 0.0
    raw_j: float | None = None
    aligned: bool = False
    energy_j: float = 0.0
    uncertainty_j: float = 0.0

    @property
    def error(self) -> float:
        return abs(self.energy_j - self.truth_j) / self.truth_j

    @property
    def raw_error(self) -> float | None:
        return None if self.raw_j is None else abs(self.raw_j - self.truth_j) / self.truth_j

    @property
    def covered(self) -> bool:
        return abs(self.energy_j - self.truth_j) <= self.uncertainty_j


class Bench:
    """One simulated GPU, the sampler that looks at it, and a load, in simulated time."""

    def __init__(self, device: str, seed: int) -> None:
        self.chance = random.Random(f"{device}:{seed}")
        self.clock = VirtualClock(start_ns=1_000_000_000 + self.chance.randrange(10**9))
        self.nvml = SimulatedNvml(
            f"{device}:setter_ms=0:seed={seed}", clock_ns=self.clock, sleep=self.clock.sleep
        )
        self.nvml.init()
        self.load = ScriptedWorkload(0.0)
        self.work = self.nvml.open_work([0], self.load)
        self.model = self.nvml.specs[0].model
        self.idle_w = self.model.idle_w[1]
        self.limit_w = self.model.power_limits_w[1]
        history = History(memoryview(bytearray(SIZE)))
        ceiling_mw = round(self.model.power_limits_w[2] * 1000)
        self.channel = Channel(
            self.clock(), history, self.model.architecture, self.model.name, ceiling_mw
        )
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = iter(range(10**9))
        self._look_at = self.clock()
        self.work.launch(1e9)
        self.draw(self.idle_w)
        self.stamps: list[float] = []
        self.looks = 0

    def draw(self, watts: float) -> None:
        self.load.draw_w = watts
        self.work.refresh()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        due_ns = self.clock() + round(seconds * 1e9)
        heapq.heappush(self._events, (due_ns, next(self._numbers), call))

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        end_ns = self.clock() + round(seconds * 1e9)
        while True:
            due_ns = min(self._events[0][0] if self._events else end_ns, self._look_at, end_ns)
            self.clock.sleep(max(0, due_ns - self.clock()) / 1e9)
            if due_ns == end_ns:
                return
            if due_ns == self._look_at:
                self._look()
            else:
                heapq.heappop(self._events)[2]()

    def _look(self) -> None:
        self.looks += 1
        edge = self.channel.observe(self.nvml.sensors(0))
        if edge is not None and self.channel.period_ns:
            state = self.nvml._gpus[0].sensor
            self.stamps.append((edge.t_ns / 1e9 - state._last_tick_s) * 1e3)
        assert self.channel.latest_read_ns >= self.channel.next_read_ns
        late_s = self.chance.expovariate(1 / LATE_S)
        if self.chance.random() < HELD_UP:
            late_s += self.chance.uniform(0.001, 0.008)
        patient = self.chance.uniform(0, self.channel.latest_read_ns - self.channel.next_read_ns)
        due_ns = self.channel.next_read_ns + round(patient)
        self._look_at = max(due_ns, self.clock()) + round(late_s * 1e9)

    # ----------------------------------------------------------------------------------- windows

    def begin(self, aligned: bool) -> Window:
        energy_mj = self.nvml.sensors(0).energy_mj
        return Window(self.clock(), self.nvml.true_energy_j(0), energy_mj, aligned=aligned)

    def end(self, window: Window) -> Window:
        window.end_ns = self.clock()
        window.truth_j = self.nvml.true_energy_j(0) - window.begin_j
        energy_mj = self.nvml.sensors(0).energy_mj
        if energy_mj is not None and window.begin_mj is not None:
            window.raw_j = (energy_mj - window.begin_mj) / 1000
        return window

    def look_up(self, window: Window) -> None:
        """As the daemon does: once the tick after the window's end has come."""
        while self.channel.history.ends_ns < window.end_ns:
            self.run(0.001)
        energy = self.channel.curve.window(window.begin_ns, window.end_ns, window.aligned)
        window.energy_j = energy.energy_uj / 1e6
        window.uncertainty_j = energy.uncertainty_uj / 1e6


# -------------------------------------------------------------------------------------- loads


def training(bench: Bench, stall: float = 0.0) -> None:
    """Steps back to back, 150 ms give or take 5 %, of phases that draw about alike.

    With `stall`, so much of each step waits for data.
    """
    chance, top_w = bench.chance, 0.85 * bench.limit_w
    base_s = chance.uniform(0.08, 0.3)

    def step() -> None:
        step_s = base_s * chance.gauss(1.0, 0.05)
        watts = top_w * chance.gauss(1.0, 0.02)
        phases = [(0.32, 0.97), (0.60, 1.02), (0.08, 0.92)]
        at_s = 0.0
        for share, factor in phases:
            bench.later(at_s, lambda factor=factor: bench.draw(watts * factor))
            at_s += share * step_s * (1 - stall)
        if stall:
            bench.later(at_s, lambda: bench.draw(1.1 * bench.idle_w))
        bench.later(step_s, step)

    step()


def square(bench: Bench) -> None:
    """Power goes up and down, at a period of 30 ms to 2 s."""
    chance = bench.chance
    period_s = math.exp(chance.uniform(math.log(0.03), math.log(2.0)))
    share = chance.uniform(0.2, 0.8)
    high_w = chance.uniform(0.5, 1.0) * bench.limit_w

    def up() -> None:
        jitter = chance.gauss(1.0, 0.03)
        bench.draw(high_w)
        bench.later(share * period_s * jitter, lambda: bench.draw(bench.idle_w))
        bench.later(period_s * jitter, up)

    up()


def caps(bench: Bench) -> None:
    """Training while its power limit changes every few seconds."""
    training(bench)
    low_w, _, high_w = bench.model.power_limits_w

    def change() -> None:
        bench.nvml.set_power_limit(0, round(1000 * bench.chance.uniform(low_w, high_w)))
        bench.later(bench.chance.uniform(1.0, 4.0), change)

    change()


def idle(bench: Bench) -> None:
    """Nothing runs."""
    bench.draw(bench.idle_w)


LOADS: dict[str, Callable[[Bench], None]] = {
    "training": training,
    "training, 15 % stalls": lambda bench: training(bench, 0.15),
    "power limit changes": caps,
    "square waves": square,
    "idle": idle,
}
BURSTS = "bursts on an idle GPU"
BUSY_BURSTS = "bursts beside others"


def sweep(
    device: str, load: str, seed: int, lengths_ms: list[int], count: int
) -> Iterator[tuple[int, Window]]:
    """Windows of each length under a load, each on a phase of its own."""
    bench = Bench(device, seed)
    chance = bench.chance
    bursts = load in (BURSTS, BUSY_BURSTS)
    if not bursts:
        LOADS[load](bench)
    bench.run(3.0 + chance.random())
    for length_ms in lengths_ms:
        for _ in range(count):
            if load == BUSY_BURSTS:
                bench.run(chance.uniform(0.0, 0.15))
                bench.draw(chance.uniform(0.4, 1.0) * bench.limit_w)
                bench.run(chance.uniform(0.005, 0.1))
                bench.draw(bench.idle_w)
                bench.run(chance.uniform(0.0, 0.05))
            else:
                bench.run(chance.uniform(0.15, 0.6) if bursts else chance.uniform(0.0, 0.3))
            window = bench.begin(aligned=bursts)
            if bursts:
                bench.draw(chance.uniform(0.4, 1.0) * bench.limit_w)
            bench.run(length_ms / 1000)
            if bursts:
                bench.draw(bench.idle_w)
            bench.end(window)
            bench.look_up(window)
            yield length_ms, window


@dataclass
class Cell:
    """Windows of one length."""

    windows: list[Window] = field(default_factory=list)

    def errors(self) -> list[float]:
        return [100 * window.error for window in self.windows]

    def raw_errors(self) -> list[float]:
        found = [window.raw_error for window in self.windows]
        return [100 * error for error in found if error is not None]


def p95(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def mean_or_dash(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f}" if values else "–"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=60, help="of each length, load and device")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--devices", nargs="*", default=DEVICES)
    parser.add_argument("--loads", nargs="*", default=[*LOADS, BURSTS, BUSY_BURSTS])
    parser.add_argument("--picture")
    options = parser.parse_args()
    for load in options.loads:
        for device in options.devices:
            cells: dict[int, Cell] = {}
            for part in range(4):
                seed = 1000 * options.seed + part
                for length_ms, window in sweep(
                    device, load, seed, list(LENGTHS_MS), max(1, options.windows // 4)
                ):
                    cells.setdefault(length_ms, Cell()).windows.append(window)
            print(f"\n{load}, {device}")
            print(" ms    mean%   p95%  | raw mean  p95 | covered  unc/E")
            for length_ms, cell in cells.items():
                errors, raw = cell.errors(), cell.raw_errors()
                covered = statistics.fmean(window.covered for window in cell.windows)
                unc = statistics.fmean(
                    window.uncertainty_j / window.truth_j for window in cell.windows
                )
                print(
                    f"{length_ms:6d} {statistics.fmean(errors):7.2f} {p95(errors):7.2f} |"
                    f" {mean_or_dash(raw):>7} {p95(raw) if raw else 0:7.2f} | {100 * covered:5.1f} {100 * unc:6.1f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

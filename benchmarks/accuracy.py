"""Compares measured energy with the true energy, beside the difference of two counter readings.

    python benchmarks/accuracy.py [--windows N] [--seed N] [--picture FILE] [--reference PYTHON]

On simulated GPUs, whose true energy is known, in simulated time: the sampler of zeusd reads each
GPU as on a node (late now and then, as threads are), while a load runs and windows of 5 ms to 10 s
are opened and closed. "raw" is the energy that a program measures when it reads the energy counter
at both ends of a window. Boards' gain errors are excluded: no software can detect them.

With `--reference PYTHON`, an interpreter of an environment that has zeus (the reference package)
installed, the figures of its monitor for the burst loads are added, on the recording C library, in
real time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zeusd.devices.simulated import SimulatedBackend, VirtualClock
from zeusd.devices.simulated.workloads import ScriptedWorkload
from zeusd.energy.channel import Channel
from zeusd.energy.history import SIZE, History

LENGTHS_MS = (5, 10, 20, 50, 100, 200, 300, 500, 1000, 3000, 10_000)
DEVICES = {"a100-sxm-80": 100, "b200": 100, "a40": 100, "h100-sxm": 20, "v100-pcie": 20, "p100": 20}
"""Devices, and the tick of their sensors, ms. Of each tick A100 and H100 see 25 ms, V100 and P100
10 ms, A40 all; P100 has no energy counter."""


def tick_ms(device: str) -> int:
    """The tick of a device that may be given with options, such as `a100-sxm-80:counts_all`."""
    return DEVICES[device.partition(":")[0]]


PHASES = 8
"""Nodes for each load and device: each boots at another phase of its sensors' ticks."""

LATE_S = 60e-6
HELD_UP = 0.01
"""Share of looks that come milliseconds late."""

COUNTER_MS, COUNTER_SLOW_MS, SLOW = (2.6, 3.5), (5, 15), 0.25
"""Time that a reading of Hopper's counter takes, mostly and otherwise, as measured on an H100 and
an H200 (docs/reference/hardware); it may be read at any moment of that."""


@dataclass
class Window:
    """One window, with its measured and true energy, J."""

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
    """A simulated GPU, its sampler, and a load, in simulated time."""

    def __init__(self, device: str, seed: int) -> None:
        """`device` is a kind of the simulated node, with options if there are any."""
        self.chance = random.Random(f"{device}:{seed}")
        self.clock = VirtualClock(start_ns=1_000_000_000 + self.chance.randrange(10**9))
        self.nvml = SimulatedBackend(
            f"{device}:setter_ms=0:seed={seed}", clock_ns=self.clock, sleep=self.clock.sleep
        )
        self.nvml.init()
        self.load = ScriptedWorkload(0.0)
        self.work = self.nvml.open_work([0], self.load)
        self.model = self.nvml.specs[0].model
        self.idle_w = self.model.idle_w[1]
        self.limit_w = self.model.power_limits_w[1]
        history = History(memoryview(bytearray(SIZE)))
        limit_mw = round(self.model.power_limits_w[2] * 1000)
        self.channel = Channel(
            self.clock(), history, self.model.architecture, self.model.name, limit_mw
        )
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = iter(range(10**9))
        self._look_at = self.clock()
        self._began_ns = self._look_at + 100_000_000  # earlier samples are of a GPU without context
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
        took_ns = 0
        if self.model.sensor.samples_ms is None:
            took_ns = self._look_at_counter()
        elif samples := self.nvml.power_samples(0, self.channel.sampled_ns or self._began_ns):
            due = self.channel.lacks(samples) or self.clock() >= self.channel.next_row_ns
            self.channel.extend(self.clock(), samples, self.nvml.sensors(0) if due else None)
        assert self.channel.latest_read_ns >= self.channel.next_read_ns
        late_s = self.chance.expovariate(1 / LATE_S)
        if self.chance.random() < HELD_UP:
            late_s += self.chance.uniform(0.001, 0.008)
        patient = self.chance.uniform(0, self.channel.latest_read_ns - self.channel.next_read_ns)
        due_ns = max(self.clock() + 1_000_000, self.channel.next_read_ns + round(patient))
        self._look_at = max(due_ns, self.clock() + took_ns) + round(late_s * 1e9)

    def _look_at_counter(self) -> int:
        """Reads the counter; returns how long the reading still takes, ns."""
        took_ns = self._reading_takes_ns()
        passed_ns = self.chance.randrange(took_ns + 1)
        read = self.nvml.sensors(0)
        middle_ns = read.t_ns - passed_ns + took_ns // 2
        edge = self.channel.observe(read._replace(t_ns=middle_ns, took_ns=took_ns))
        if edge is not None and self.channel.period_ns:
            sensor = self.nvml._gpus[0].sensor
            counted_s = sensor.last_tick_s - sensor._lag_s
            self.stamps.append((edge.t_ns / 1e9 - counted_s) * 1e3)
        return took_ns - passed_ns

    def _reading_takes_ns(self) -> int:
        if self.model.sensor.counter_lag_ms is None:
            return 0
        slow = self.chance.random() < SLOW
        return round(self.chance.uniform(*COUNTER_SLOW_MS if slow else COUNTER_MS) * 1e6)

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
        """Reads the energy as the daemon does: after the update that follows the window's end."""
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
CLOSE_BURSTS = "bursts close together"
BUSY_BURSTS = "bursts beside others"
RHYTHM = "bursts in a rhythm"
"""At equal pauses: shorter ones than an update show the same in each. Only if asked for."""


def sweep(
    device: str, load: str, seed: int, lengths_ms: Sequence[int], count: int
) -> Iterator[tuple[int, Window]]:
    """Windows of each length under a load, each with a sensor of random phase."""
    bench = Bench(device, seed)
    chance = bench.chance
    bursts = load in (BURSTS, CLOSE_BURSTS, BUSY_BURSTS)
    if load == RHYTHM:
        yield from rhythm(bench, lengths_ms, count)
        return
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
            elif load == CLOSE_BURSTS:
                bench.run(chance.uniform(0.05, 0.33))
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


def rhythm(bench: Bench, lengths_ms: Sequence[int], count: int) -> Iterator[tuple[int, Window]]:
    """Bursts of equal power and length, give or take 2 %, and equal pauses; every fifth is measured
    and looked up when more have followed."""
    chance = bench.chance

    def burst(high_w: float, length_s: float, pause_s: float) -> Window:
        window = bench.begin(aligned=True)
        bench.draw(high_w)
        bench.run(length_s * chance.gauss(1.0, 0.02))
        bench.draw(bench.idle_w)
        bench.end(window)
        bench.run(pause_s * chance.gauss(1.0, 0.02))
        return window

    bench.run(3.0 + chance.random())
    for length_ms in lengths_ms:
        high_w = chance.uniform(0.4, 1.0) * bench.limit_w
        pause_s = chance.uniform(0.5, 2.0) * length_ms / 1000
        for _ in range(int(2.0 / pause_s)):
            burst(high_w, length_ms / 1000, pause_s)
        for _ in range(count):
            window, *_ = [burst(high_w, length_ms / 1000, pause_s) for _ in range(5)]
            bench.look_up(window)
            yield length_ms, window


# ------------------------------------------------------------------------------------- figures


@dataclass
class Cell:
    """Windows of one length."""

    windows: list[Window] = field(default_factory=list)

    def errors(self) -> list[float]:
        """Percent."""
        return [100 * window.error for window in self.windows]

    def raw_errors(self) -> list[float]:
        """Percent, of the windows that the raw method can measure."""
        found = [window.raw_error for window in self.windows]
        return [100 * error for error in found if error is not None]

    def covered(self) -> float:
        """Percent of windows whose truth lies within the stated uncertainty."""
        return 100 * statistics.fmean(window.covered for window in self.windows)

    def stated(self) -> float:
        """Stated uncertainty over true energy, median, percent."""
        return 100 * statistics.median(w.uncertainty_j / w.truth_j for w in self.windows)


Cells = dict[tuple[str, str, int], Cell]
"""By load, device and length in ms."""


def run_all(
    loads: Sequence[str], devices: Sequence[str], lengths_ms: Sequence[int], count: int, seed: int
) -> Cells:
    """Everything, on `PHASES` nodes of different phase for each load and device."""
    cells: Cells = {}
    for load in loads:
        for device in devices:
            for part in range(PHASES):
                number = 1000 * seed + part
                for length_ms, window in sweep(device, load, number, lengths_ms, count // PHASES):
                    cells.setdefault((load, device, length_ms), Cell()).windows.append(window)
            print(f"{load}: {device} done", file=sys.stderr)
    return cells


def joined(cells: Cells, load: str, devices: Sequence[str], length_ms: int) -> Cell:
    """The windows of several devices."""
    return Cell([w for device in devices for w in cells[load, device, length_ms].windows])


def p95(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def figure(values: Sequence[float], of: Callable[[Sequence[float]], float]) -> str:
    if not values:
        return "–"
    value = of(values)
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def print_devices(cells: Cells, load: str, devices: Sequence[str], lengths: Sequence[int]) -> None:
    print(f"\n## {load}: mean error in percent, with the raw counters' in brackets\n")
    print("| window | " + " | ".join(devices) + " |")
    print("|--:|" + "--:|" * len(devices))
    for length_ms in lengths:
        row = []
        for device in devices:
            cell = cells[load, device, length_ms]
            ours = figure(cell.errors(), statistics.fmean)
            row.append(f"{ours} ({figure(cell.raw_errors(), statistics.fmean)})")
        print(f"| {length_ms} ms | " + " | ".join(row) + " |")


def print_load(cells: Cells, load: str, devices: Sequence[str], lengths: Sequence[int]) -> None:
    print(f"\n## {load} ({', '.join(devices)})\n")
    print("| window | mean % | p95 % | raw mean % | raw p95 % | truth within | stated ± % |")
    print("|--:|--:|--:|--:|--:|--:|--:|")
    for length_ms in lengths:
        cell = joined(cells, load, devices, length_ms)
        errors, raw = cell.errors(), cell.raw_errors()
        print(
            f"| {length_ms} ms | {figure(errors, statistics.fmean)} | {figure(errors, p95)} | "
            f"{figure(raw, statistics.fmean)} | {figure(raw, p95)} | {cell.covered():.0f} % | "
            f"{figure([cell.stated()], max)} |"
        )


def draw(cells: Cells, loads: Sequence[str], devices: Sequence[str], path: str) -> None:
    """Error against window length, on both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = sorted({length_ms for _, _, length_ms in cells})
    columns = 3
    rows = math.ceil(len(loads) / columns)
    fig, axes = pyplot.subplots(
        rows, columns, figsize=(12, 3.3 * rows), sharex=True, sharey=True, squeeze=False
    )
    for axis, load in zip(axes.flat, loads, strict=False):
        found = [joined(cells, load, devices, length_ms) for length_ms in lengths]
        for values, label, colour in (
            ([cell.raw_errors() for cell in found], "counter at both ends", "#b5443a"),
            ([cell.errors() for cell in found], "zeusd", "#2a6f97"),
        ):
            means = [max(0.01, statistics.fmean(one)) for one in values]
            axis.plot(lengths, means, color=colour, label=label, linewidth=2)
            axis.fill_between(
                lengths, means, [max(0.01, p95(one)) for one in values], color=colour, alpha=0.15
            )
        axis.set_title(load, fontsize=10)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylim(0.01, 2000)
        axis.grid(True, which="major", linewidth=0.4, alpha=0.6)
    for axis in axes.flat[len(loads) :]:
        axis.set_visible(False)
    for column in range(min(columns, len(loads))):
        lowest = axes[(len(loads) - 1 - column) // columns][column]
        lowest.set_xlabel("window (ms)")
        lowest.tick_params(labelbottom=True)
    for axis in axes[:, 0]:
        axis.set_ylabel("error (%), mean to p95")
    axes[0][0].legend(fontsize=8)
    fig.suptitle(f"Energy of windows on sensors that tick every 100 ms ({', '.join(devices)})")
    fig.tight_layout()
    fig.savefig(path, dpi=110)


# ----------------------------------------------------------------- the reference, in real time

PROGRAM = """
import ctypes, json, os, sys, time, types
path, library, offset, count, lengths = sys.argv[1:6]
double = ctypes.CDLL(library)
def load(milliwatts):
    code = double.nvml_double_set(
        path.encode(), 0, ctypes.c_int64(int(offset)), ctypes.c_int64(milliwatts)
    )
    assert code == 0
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 0,
    memory_reserved=lambda index: 1, synchronize=lambda *args, **kwargs: None,
)
torch.distributed = types.SimpleNamespace(is_available=lambda: False)
from zeus.monitor import ZeusMonitor
sys.modules["torch"] = torch
monitor = ZeusMonitor(gpu_indices=[0], cpu_indices=[])
load(60000)
time.sleep(3)
windows = []
for length in json.loads(lengths):
    for number in range(int(count)):
        time.sleep(0.3 + 0.0137 * (number % 9))
        monitor.begin_window("w")
        t0 = time.monotonic()
        load(250000)
        time.sleep(length / 1000)
        load(60000)
        t1 = time.monotonic()
        windows.append((length, 250 * (t1 - t0), monitor.end_window("w")))
print(json.dumps([(length, truth, w.total_energy) for length, truth, w in windows]))
"""


def compare_with_reference(python: str, count: int) -> None:
    """Bursts on an idle GPU, through the C library, by ours and by the reference package."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.fake_nvml.double import NvmlDouble, _Gpu
    from tests.support import running_daemon

    lengths = [20, 50, 100, 300, 1000]
    found: dict[str, dict[int, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        gpu = {"name": "NVIDIA A40", "architecture": 7, "tick_ms": 100, "limit_max_mw": 300_000}
        gpu |= {"limit_mw": 300_000, "limit_default_mw": 300_000}
        double = NvmlDouble(Path(directory), [gpu])
        arguments = [str(double.state_path), double.library, str(_Gpu.load_mw.offset)]
        arguments += [str(count), json.dumps(lengths)]
        env = {**os.environ, **double.env, "LD_LIBRARY_PATH": str(Path(double.library).parent)}

        def run(name: str, interpreter: str, **more: str) -> None:
            out = subprocess.run(
                [interpreter, "-W", "ignore", "-c", PROGRAM, *arguments],
                env={**env, **more},
                cwd="/" if name != "zeusd" else Path(__file__).resolve().parents[1],
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            ).stdout
            for length, truth_j, energy_j in json.loads(out.splitlines()[-1]):
                errors = found.setdefault(name, {}).setdefault(length, [])
                errors.append(100 * abs(energy_j - truth_j) / truth_j)

        with running_daemon("--nvml-library", double.library, env=double.env, gpus=1) as daemon:
            run("zeusd", sys.executable, ZEUSD_SOCK_PATH=daemon.socket)
        run("reference", python)
    print("\n## Bursts on an idle GPU, tick 100 ms, through libnvidia-ml, in real time\n")
    print("| window | zeusd mean % | p95 % | reference mean % | p95 % |")
    print("|--:|--:|--:|--:|--:|")
    for length in lengths:
        ours, theirs = found["zeusd"][length], found["reference"][length]
        print(
            f"| {length} ms | {figure(ours, statistics.fmean)} | {figure(ours, p95)} | "
            f"{figure(theirs, statistics.fmean)} | {figure(theirs, p95)} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=400, help="of each length, load and device")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--devices", nargs="*", default=DEVICES)
    parser.add_argument("--loads", nargs="*", default=[*LOADS, BURSTS, CLOSE_BURSTS, BUSY_BURSTS])
    parser.add_argument("--picture", help="file for the picture")
    parser.add_argument("--reference", help="interpreter of an environment with ml-energy/zeus")
    options = parser.parse_args()
    lengths = LENGTHS_MS
    cells = run_all(options.loads, options.devices, lengths, options.windows, options.seed)
    slow = [device for device in options.devices if tick_ms(device) == 100]
    fast = [device for device in options.devices if tick_ms(device) == 20]
    print(f"seed {options.seed}, {options.windows} windows of each length, load and device")
    if "training" in options.loads:
        print_devices(cells, "training", options.devices, lengths)
    for load in options.loads:
        for devices in (slow, fast):
            if devices:
                print_load(cells, load, devices, lengths)
    every = [window for cell in cells.values() for window in cell.windows]
    print(
        f"\nTruth lies within the stated uncertainty in "
        f"{100 * statistics.fmean(window.covered for window in every):.1f} % of all "
        f"{len(every)} windows."
    )
    if options.picture:
        draw(cells, options.loads, slow, options.picture)
    if options.reference:
        compare_with_reference(options.reference, 24)
    return 0


if __name__ == "__main__":
    sys.exit(main())

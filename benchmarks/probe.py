"""Compares what `zeusctl probe` measures with the settings of stand-ins and simulated nodes.

    python benchmarks/probe.py [--stand-ins 6] [--seed 2000] [--real 3]

The C stand-in gets random update periods, phases, visible windows, jitter, rounding and call
latencies, and is probed through nvidia-ml-py on its own clock; with `--real N`, N more are probed
in real time. Thresholds of the analysis were chosen on the synthetic series of tests/zeusctl/probe
and on stand-ins 1000 to 1003, so report others. Simulated nodes are probed in simulated time. Exits
with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.zeusctl.probe.stand_in import START_NS, StandInLoad, stand_in
from zeusctl.probe.driver import Clock
from zeusctl.probe.run import ProbeTiming, probe
from zeusctl.probe.simulated import ProbedSimulation
from zeusd.devices.simulated.models import DEVICES
from zeusd.energy.probed.report import ProbedGpu, ProbeReport

LIES: dict[str, dict[str, Any]] = {
    "counter 40 % too high": {"counter_permille": 1400},
    "counter stands still": {"counter_stuck_mj": 7_000_000},
    "power stands still": {"power_stuck_mw": 91_000},
    "power of 990 W": {"power_stuck_mw": 990_000},
    "limit outside its range": {"limit_mw": 300_000},
    "clock above the highest": {"lock_max": 2000},
}


class Row(NamedTuple):
    """One quantity, and whether it is within its bound."""

    of: str
    quantity: str
    truth: str
    found: str
    off: str
    bound: str
    good: bool


def _truth(chance: random.Random) -> dict[str, Any]:
    tick_us = round(chance.choice((16_000, 25_000, 50_000, 100_000)) * chance.uniform(0.9, 1.15))
    return {
        "tick_us": tick_us,
        "window_us": round(tick_us * chance.choice((0.2, 0.25, 0.5, 1.0))),
        "start_ns": START_NS + chance.randrange(tick_us * 1000),
        "counter_windowed": chance.randrange(2),
        "jitter_us": chance.choice((0, 300, 900)),
        "quantum_mw": chance.choice((0, 125, 400)),
        "counter_quantum_mj": chance.choice((0, 10, 100)),
        "load_mw": chance.randrange(150_000, 240_000),
        "idle_mw": chance.randrange(30_000, 80_000),
    }


def _share(value: float, truth: float) -> str:
    return f"{100 * abs(value - truth) / truth:.2f} %"


def _rows(of: str, gpu: ProbedGpu, truth: dict[str, Any], report: ProbeReport) -> Iterator[Row]:
    tick_ms, window_ms = truth["tick_us"] / 1000, truth["window_us"] / 1000
    for name in ("power_instant_mw", "energy_field_mj"):
        period = gpu.sensors[name].period
        found = 0.0 if period is None else period.period_ms
        good = abs(found - tick_ms) <= 0.02 * tick_ms
        row = (f"{tick_ms:.3f} ms", f"{found:.3f} ms", _share(found, tick_ms), "2 %", good)
        yield Row(of, f"update period, {name}", *row)
    counter = gpu.sensors["energy_field_mj"].together
    if counter is not None and counter.phase_ms is not None:
        mean_late = truth["jitter_us"] / 2000
        phase = ((truth["start_ns"] - report.phases_from_ns) / 1e6 + mean_late) % tick_ms
        off = (counter.phase_ms - phase) % tick_ms
        off = min(off, tick_ms - off)
        row = (f"{phase:.2f} ms", f"{counter.phase_ms:.2f} ms", f"{off:.2f} ms", "2 ms", off <= 2)
        yield Row(of, "phase, energy_field_mj", *row)
    seen = {"power_instant_mw": window_ms / tick_ms}
    seen["energy_field_mj"] = seen["power_instant_mw"] if truth["counter_windowed"] else 1.0
    for name, share in seen.items():
        window = None if gpu.loaded is None else gpu.loaded.windows.get(name)
        found = 0.0 if window is None else window.share(tick_ms)
        good = abs(found - share) <= 0.1 * share
        row = (f"{share:.3f}", f"{found:.3f}", _share(found, share), "10 %", good)
        yield Row(of, f"visible share, {name}", *row)
    for name, knob in (
        ("power_instant_mw", "quantum_mw"),
        ("energy_field_mj", "counter_quantum_mj"),
    ):
        step, found_step = truth[knob] or 1, gpu.sensors[name].resolution
        row = (str(step), str(found_step), "", "exact", found_step == step)
        yield Row(of, f"rounding, {name}", *row)


def _stand_in(seed: int, real: bool) -> tuple[list[Row], float, float]:
    chance = random.Random(seed)
    truth, read_us = _truth(chance), chance.randrange(5, 200)
    if real:
        truth["start_ns"] = time.monotonic_ns() - chance.randrange(10**10)
    begin_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        stand_in(Path(folder), patch, truth, read_us=read_us) as (driver, double),
    ):
        if real:
            double.node.clock_ns = 0
            driver.clock = Clock(time.monotonic_ns, time.sleep)
            state = double.node.gpus[0]
            state.updated_ns, state.shown_tick, state.energy_nj = truth["start_ns"], 0, 0
        report = probe(driver, ProbeTiming(), load_on=lambda index: StandInLoad(double, index))
    gpu = report.gpus[0]
    of = f"stand-in {seed}" + (", real time" if real else "")
    rows = list(_rows(of, gpu, truth, report))
    latency = gpu.latency["power_usage_mw"].alone
    if latency is not None and not real:
        good = abs(latency.p50_us - read_us) < 1
        row = (f"{read_us} us", f"{latency.p50_us:.0f} us", "", "1 us", good)
        rows.append(Row(of, "latency p50", *row))
    rows.append(Row(of, "doubts", "0", str(len(gpu.doubts)), "", "exact", not gpu.doubts))
    return rows, report.seconds, time.monotonic() - begin_s


def _lies() -> Iterator[Row]:
    for number, (lie, settings) in enumerate(LIES.items()):
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.MonkeyPatch.context() as patch,
            stand_in(Path(folder), patch, {"tick_ms": 50, **settings}) as (driver, double),
        ):
            plan = ProbeTiming(seconds=4, calls=1, load_scale=0.1)
            load = StandInLoad(double, 0)
            report = probe(driver, plan, load_on=lambda index, load=load: load)
        doubts = report.gpus[0].doubts
        found = doubts[0].subject if doubts else "nothing"
        yield Row(f"liar {number + 1}", lie, "noticed", found, "", "", bool(doubts))


def _simulated(key: str, spec: str) -> tuple[list[Row], float, float]:
    begin_s = time.monotonic()
    driver = ProbedSimulation(spec)
    report = probe(driver, ProbeTiming(calls=1), load_on=driver.load_on)
    gpu, sensor = report.gpus[0], DEVICES[key].sensor
    period = gpu.sensors["power_instant_mw"].period
    window = None if gpu.loaded is None else gpu.loaded.windows.get("power_instant_mw")
    found, share = (0.0 if period is None else period.period_ms), sensor.window_ms / sensor.tick_ms
    seen = 0.0 if window is None else window.share(sensor.tick_ms)
    of = f"simulated {key}"
    rows = [
        Row(
            of,
            "update period, power_instant_mw",
            f"{sensor.tick_ms:g} ms",
            f"{found:.3f} ms",
            _share(found, sensor.tick_ms),
            "2 %",
            abs(found - sensor.tick_ms) < 0.02 * found,
        ),
        Row(
            of,
            "visible share, power_instant_mw",
            f"{share:.3f}",
            f"{seen:.3f}",
            _share(seen, share),
            "10 %",
            abs(seen - share) <= 0.1 * share,
        ),
    ]
    return rows, report.seconds, time.monotonic() - begin_s


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stand-ins", type=int, default=6)
    parser.add_argument("--seed", type=int, default=2000)
    parser.add_argument("--real", type=int, default=0)
    options = parser.parse_args()
    missed = 0
    print("| of | quantity | truth | found | off | bound | |")
    print("|---|---|--:|--:|--:|--:|---|")

    def show(rows: Iterator[Row] | list[Row], probed_s: float = 0, took_s: float = 0) -> None:
        nonlocal missed
        for row in rows:
            missed += not row.good
            mark = "ok" if row.good else "MISSED"
            print("| " + " | ".join((*row[:6], mark)) + " |", flush=True)
        if took_s:
            print(f"| {row.of} | time probed | | {probed_s:.0f} s | | | in {took_s:.1f} s |")

    for seed in range(options.seed, options.seed + options.stand_ins):
        show(*_stand_in(seed, real=False))
    for seed in range(options.real):
        show(*_stand_in(options.seed + options.stand_ins + seed, real=True))
    show(_lies())
    for key in ("h100-sxm", "v100-sxm2", "a40", "p100"):
        show(*_simulated(key, f"{key}:seed={options.seed}"))
    print(f"\n{missed} bounds missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Probes a node: asks every question once, times calls, samples sensors, and analyses the
results.
"""

from __future__ import annotations

import itertools
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zeus_ipc._version import __version__
from zeusctl.probe.backend import BackendGpu, Driver
from zeusctl.probe.driver import IDENTITY, SENSORS, CallError, NoDriverError, Question
from zeusctl.probe.load import Load, Wave
from zeusctl.probe.sampling import sample, time_calls, time_together
from zeusd.energy.probed import report as reports
from zeusd.energy.probed.counter import compare_energy, find_resolution, window_errors
from zeusd.energy.probed.doubts import find_doubts
from zeusd.energy.probed.period import date, find_period
from zeusd.energy.probed.report import Latency
from zeusd.energy.probed.series import Series
from zeusd.energy.probed.window import VisibleWindow, find_window

Loads = Callable[[int], Load | None]
"""Makes a load on a GPU, by index; None: no load."""

_SLOW = frozenset({"power_samples", "compute_processes", "graphics_processes"})
"""Calls that take milliseconds: they are timed a tenth as often."""


DATED_SHARE = 0.25
"""An update in an interval longer than this share of the period says nothing about the window: the
machine was busy."""


@dataclass(frozen=True)
class ProbeTiming:
    """How long a probe takes.

    Attributes:
        seconds: Sampling of all GPUs at once.
        alone_seconds: Sampling of each GPU by itself, where there are several.
        calls: How often each call is timed.
        load_scale: Factor for the time under load.
        identify: Whether to report what identifies a board.
    """

    seconds: float = 30.0
    alone_seconds: float = 8.0
    calls: int = 200
    load_scale: float = 1.0
    identify: bool = False


@dataclass
class _Probed:
    """What is known about one GPU so far."""

    gpu: BackendGpu
    values: dict[str, Any]
    answers: dict[str, reports.Answer]
    sensors: list[str]
    latency_alone: dict[str, Latency | None]
    latency_together: dict[str, Latency | None]
    alone: dict[str, Series]
    together: dict[str, Series]
    under_load: dict[str, Series] = field(default_factory=dict)
    begin_ns: int = 0
    loaded: reports.Loaded | None = None


def probe(
    driver: Driver,
    plan: ProbeTiming,
    *,
    only: Sequence[int] | None = None,
    load_on: Loads | None = None,
    stand_in: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> reports.ProbeReport:
    """Probes a node.

    Args:
        driver: The node.
        plan: How long each part takes.
        only: Indices of the GPUs to probe; None: all.
        load_on: Makes the load on a GPU; None: no load.
        stand_in: Whether the library may be a stand-in.
        say: Called with a line about each next step.

    Raises:
        NoDriverError: There is no GPU that can be probed.
    """
    begin_ns = driver.clock.now_ns()
    found = driver.gpus()
    if only is not None:
        missing = sorted(set(only) - set(found))
        if missing:
            raise NoDriverError(f"there is no GPU {missing[0]}; this node has {len(found)}")
        found = {index: found[index] for index in only}
    opened = {
        index: _ask(gpu, plan) for index, gpu in found.items() if not isinstance(gpu, CallError)
    }
    unopened = [
        reports.Unopened(index, gpu.code, gpu.text)
        for index, gpu in found.items()
        if isinstance(gpu, CallError)
    ]
    if not opened and not unopened:
        raise NoDriverError("this node has no GPUs; check `nvidia-smi -L`")
    for index, probed in opened.items():
        say(f"GPU {index}: latency of {len(probed.values)} calls")
        probed.latency_alone = {
            **time_calls(_timed(probed), driver.clock, plan.calls),
            **time_calls(_timed(probed, slow=True), driver.clock, max(1, plan.calls // 10)),
        }
    if len(opened) > 1:
        say(f"latency on all {len(opened)} GPUs at once")
        timed = {index: _timed(probed) for index, probed in opened.items()}
        latencies = time_together(timed, driver.clock, plan.calls)
        for index, probed in opened.items():
            probed.latency_together = latencies[index]
            say(f"GPU {index}: sensors for {plan.alone_seconds:g} s")
            probed.alone = sample(
                {index: probed.gpu}, {index: probed.sensors}, driver.clock, plan.alone_seconds
            )[index]
    together_ns = driver.clock.now_ns()
    if opened:
        say(f"sensors of {'all GPUs' if len(opened) > 1 else 'the GPU'} for {plan.seconds:g} s")
        together_ns = driver.clock.now_ns()
        sampled = sample(
            {index: probed.gpu for index, probed in opened.items()},
            {index: probed.sensors for index, probed in opened.items()},
            driver.clock,
            plan.seconds,
        )
        for index, probed in opened.items():
            probed.begin_ns = together_ns
            probed.together = sampled[index]
    for index, probed in opened.items():
        if load_on is not None:
            probed.loaded = _load(driver, index, probed, plan, load_on, say)
    versions = driver.versions()
    return reports.ProbeReport(
        at=reports.now(),
        simulated=driver.simulated,
        stand_in=stand_in,
        seconds=(driver.clock.now_ns() - begin_ns) / 1e9,
        phases_from_ns=together_ns,
        uptime_s=None if driver.simulated else _uptime_s(),
        software=reports.Software(
            zeusd=__version__,
            binding=versions["binding"],
            driver=versions["driver"],
            nvml=versions.get("nvml"),
            cuda_driver=versions.get("cuda_driver"),
            python=platform.python_version(),
            kernel=platform.release().partition("-")[0],
            machine=platform.machine(),
            root=os.geteuid() == 0,
        ),
        gpus=[_report(index, probed, plan) for index, probed in opened.items()],
        unopened=unopened,
    )


# ------------------------------------------------------------------------------------- measuring


def _ask(gpu: BackendGpu, plan: ProbeTiming) -> _Probed:
    """Asks every question once."""
    values: dict[str, Any] = {}
    answers = {}
    for name, question in gpu.questions.items():
        if name in IDENTITY and not plan.identify:
            continue
        try:
            values[name] = question.ask()
            answers[name] = reports.Answer(question.call, 0, "ok")
        except CallError as error:
            answers[name] = reports.Answer(question.call, error.code, error.text)
    sensors = [name for name in SENSORS if name in values]
    if "memory_power_average_mw" in values and not values["memory_power_average_mw"]:
        sensors.remove("memory_power_average_mw")  # boards without it return zero and success
    return _Probed(gpu, values, answers, sensors, {}, {}, {}, {})


def _timed(probed: _Probed, slow: bool = False) -> dict[str, Question]:
    """The questions that were answered: the fast ones, or those of `_SLOW`."""
    return {name: probed.gpu.questions[name] for name in probed.values if (name in _SLOW) == slow}


def _load(
    driver: Driver,
    index: int,
    probed: _Probed,
    plan: ProbeTiming,
    load_on: Loads,
    say: Callable[[str], None],
) -> reports.Loaded | None:
    load = load_on(index)
    if load is None:
        return None
    seconds = Wave.seconds(plan.load_scale)
    say(f"GPU {index}: bursts of load for {seconds:g} s ({load.name})")
    try:
        wave = Wave(load, driver.clock.now_ns() + 200_000_000, plan.load_scale)
        sampled = sample(
            {index: probed.gpu}, {index: probed.sensors}, driver.clock, seconds + 0.5, wave.drive
        )[index]
        bursts = load.bursts()
    finally:
        load.close()
    probed.under_load = sampled
    windows: dict[str, VisibleWindow] = {}
    for name, series in sampled.items():
        widths = sorted(change.width_ns for change in series.changes()) or [0]
        window = find_window(_powers(name, series), bursts, widths[len(widths) // 2] / 2e6)
        if window is not None:
            windows[name] = window
    power = next((windows[name] for name in reports.POWERS if name in windows), None)
    counter = next((sampled[name] for name in reports.COUNTERS if name in sampled), None)
    errors = [] if power is None or counter is None else window_errors(counter, bursts, power)
    return reports.Loaded(load.name, len(bursts), windows, errors)


def _powers(name: str, series: Series) -> list[tuple[float, float]]:
    """Returns the power of each update, W; for a counter, the mean since the last update."""
    changes = series.changes()
    begin_ns = series.t_ns[0] if series.t_ns else 0
    period = find_period(changes, begin_ns)
    period_ns = (period.period_ms if period else 100.0) * 1e6
    dated = [
        (date(change, period, begin_ns), change.value, change.width_ns <= DATED_SHARE * period_ns)
        for change in changes
    ]
    if not name.startswith("energy"):
        return [(t_ns, value / 1000) for t_ns, value, good in dated if good]
    return [
        (later_ns, (later - earlier) * 1e6 / (later_ns - earlier_ns))
        for (earlier_ns, earlier, first), (later_ns, later, second) in itertools.pairwise(dated)
        if first and second and 0 < later_ns - earlier_ns < 1.5 * period_ns
    ]


# ------------------------------------------------------------------------------------- reporting


def _report(index: int, probed: _Probed, plan: ProbeTiming) -> reports.ProbedGpu:
    values = probed.values
    sensors = {
        name: _sensor(probed, name) for name in probed.sensors if probed.together[name].values
    }
    gpu = reports.ProbedGpu(
        index=index,
        name=values.get("name"),
        vbios_version=values.get("vbios_version"),
        architecture=values.get("architecture"),
        compute_capability=values.get("compute_capability"),
        pci_device_id=values.get("pci_device_id"),
        memory_mib=values.get("memory_mib"),
        modes={name: one for name, one in values.items() if name.endswith("_mode")},
        power_limits=_limits(values),
        clocks=[
            reports.Clocks(memory, sorted(clocks, reverse=True))
            for memory, clocks in sorted(values.get("supported_clocks_mhz", {}).items())[::-1]
        ],
        state=reports.State(
            **{name: values.get(name) for name in reports.State.__dataclass_fields__}
        ),
        processes=_processes(values),
        answers=probed.answers,
        latency={
            name: reports.CallLatency(
                probed.gpu.questions[name].call,
                probed.latency_alone.get(name),
                probed.latency_together.get(name),
            )
            for name in probed.latency_alone
        },
        sensors=sensors,
        counter=None,
        counter_total_j=None,
        loaded=probed.loaded,
    )
    power, counter = gpu.power_sensor, gpu.counter_sensor
    if power is not None and counter is not None:
        period = sensors[counter].period
        gpu = replace(
            gpu,
            counter=compare_energy(
                probed.together[counter],
                probed.together[power],
                None if period is None else period.period_ms,
            ),
            counter_total_j=probed.together[counter].values[-1] / 1000,
        )
    if plan.identify:
        gpu = replace(
            gpu, identity=reports.Identity(**{name: values.get(name) for name in IDENTITY})
        )
    return replace(gpu, doubts=find_doubts(gpu))


def _sensor(probed: _Probed, name: str) -> reports.Sensor:
    series = probed.together[name]
    alone, loaded = probed.alone.get(name, Series()), probed.under_load.get(name, Series())
    values, every = series.values, series.values + alone.values + loaded.values
    gaps = sorted(b - a for a, b in zip(series.t_ns, series.t_ns[1:], strict=False)) or [0]
    return reports.Sensor(
        readings=len(values),
        failures={str(code): count for code, count in series.failures.items()},
        reading_gap_ms=gaps[len(gaps) // 2] / 1e6,
        longest_gap_ms=gaps[-1] / 1e6,
        first=values[0],
        last=values[-1],
        smallest=min(every),
        largest=max(every),
        mean=sum(values) / len(values),
        resolution=find_resolution(every),
        alone=find_period(alone.changes(), alone.t_ns[0] if alone.t_ns else 0),
        together=find_period(series.changes(), probed.begin_ns),
        under_load=find_period(loaded.changes(), loaded.t_ns[0] if loaded.t_ns else 0),
    )


def _limits(values: Mapping[str, Any]) -> reports.PowerLimits | None:
    limits = values.get("power_limit_range_mw")
    if limits is None:
        return None

    def watts(name: str) -> float | None:
        found = values.get(name)
        return None if found is None else found / 1000

    return reports.PowerLimits(
        smallest_w=limits[0] / 1000,
        largest_w=limits[1] / 1000,
        default_w=watts("default_power_limit_mw"),
        requested_w=watts("power_limit_mw"),
        enforced_w=watts("enforced_power_limit_mw"),
    )


def _processes(values: Mapping[str, Any]) -> reports.Processes:
    compute, graphics = values.get("compute_processes"), values.get("graphics_processes")
    listed = dict((compute or []) + (graphics or []))
    return reports.Processes(
        compute=None if compute is None else len(compute),
        graphics=None if graphics is None else len(graphics),
        pids_visible=sum(Path(f"/proc/{pid}").exists() for pid in listed),
        memory_known=sum(memory is not None for memory in listed.values()),
    )


def _uptime_s() -> float | None:
    if not sys.platform.startswith("linux"):
        return None
    return float(Path("/proc/uptime").read_text().split()[0])

"""Probes a node: asks every question once, times calls, samples sensors, and analyses the
results.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zeus_ipc._version import __version__
from zeus_ipc.errors import ErrorCode
from zeusctl.exits import CommandError
from zeusctl.probe.backend import BackendGpu, ProbedNode
from zeusctl.probe.driver import IDENTITY, SENSORS, CallError, Clock, NoDriverError, Question
from zeusctl.probe.load import ProbeLoad, Wave
from zeusd.energy.probed import report as reports
from zeusd.energy.probed.counter import compare_energy
from zeusd.energy.probed.doubts import find_doubts
from zeusd.energy.probed.report import Latency
from zeusd.energy.probed.sensor import describe, describe_load, summarize
from zeusd.energy.probed.series import ReadingSeries

Loads = Callable[[int], ProbeLoad | None]
"""Makes a load on a GPU, by index; None: no load."""

_PRODUCT = (
    *("name", "vbios_version", "architecture", "compute_capability", "pci_device_id"),
    "memory_mib",
)
_PLACE = ("platform", "fabric")
_SLOW = frozenset(
    {"power_samples", "performance_samples", "compute_processes", "graphics_processes"}
)
"""Calls that take milliseconds: they are timed a tenth as often."""


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
    latency_alone: dict[str, Latency | None] = field(default_factory=dict)
    latency_together: dict[str, Latency | None] = field(default_factory=dict)
    alone: dict[str, ReadingSeries] = field(default_factory=dict)
    together: dict[str, ReadingSeries] = field(default_factory=dict)
    under_load: dict[str, ReadingSeries] = field(default_factory=dict)
    loaded: reports.Loaded | None = None


def probe(
    driver: ProbedNode,
    plan: ProbeTiming,
    *,
    only: Sequence[int] | None = None,
    load_on: Loads | None = None,
    stand_in: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> reports.ProbeReport:
    """Probes a node.

    Args:
        only: Indices of the GPUs to probe; None: all.
        load_on: Makes the load on a GPU; None: no load.
        stand_in: Whether the library may be a stand-in.
        say: Called with a line about each next step.

    Raises:
        CommandError: There is no GPU that can be probed.
    """
    begin_ns = driver.clock.now_ns()
    gpus = driver.gpus()
    if only is not None:
        missing = sorted(set(only) - set(gpus))
        if missing:
            text = f"there is no GPU {missing[0]}; this node has {len(gpus)}"
            raise CommandError(text, ErrorCode.UNKNOWN_GPU)
        gpus = {index: gpus[index] for index in only}
    opened: dict[int, _Probed] = {}
    unopened = []
    for index, gpu in gpus.items():
        if isinstance(gpu, CallError):
            unopened.append(reports.Unopened(index, gpu.code, gpu.text))
        else:
            opened[index] = _ask(gpu, plan)
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
            probed.alone = _sample(driver, {index: probed}, plan.alone_seconds)[index]
    together_ns = driver.clock.now_ns()
    if opened:
        say(f"sensors of {'all GPUs' if len(opened) > 1 else 'the GPU'} for {plan.seconds:g} s")
        together_ns = driver.clock.now_ns()
        sampled = _sample(driver, opened, plan.seconds)
        for index, probed in opened.items():
            probed.together = sampled[index]
    for index, probed in opened.items():
        if load_on is not None:
            probed.loaded = _load(driver, index, probed, plan, load_on, say)
    versions: dict[str, Any] = {"nvml": None, "cuda_driver": None, **driver.versions()}
    return reports.ProbeReport(
        at=reports.now(),
        simulated=driver.simulated,
        stand_in=stand_in,
        seconds=(driver.clock.now_ns() - begin_ns) / 1e9,
        phases_from_ns=together_ns,
        uptime_s=None if driver.simulated else _uptime_s(),
        software=reports.Software(
            zeusd=__version__,
            **versions,
            python=platform.python_version(),
            kernel=platform.release().partition("-")[0],
            machine=platform.machine(),
            root=os.geteuid() == 0,
        ),
        gpus=[_report(index, probed, plan, together_ns) for index, probed in opened.items()],
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
    return _Probed(gpu, values, answers, sensors)


def _sample(
    driver: ProbedNode,
    opened: Mapping[int, _Probed],
    seconds: float,
    *meanwhile: Callable[[int], None],
) -> dict[int, dict[str, ReadingSeries]]:
    gpus = {index: probed.gpu for index, probed in opened.items()}
    sensors = {index: probed.sensors for index, probed in opened.items()}
    return sample(gpus, sensors, driver.clock, seconds, *meanwhile)


def _timed(probed: _Probed, slow: bool = False) -> dict[str, Question]:
    """The questions that were answered: the fast ones, or those of `_SLOW`."""
    return {name: probed.gpu.questions[name] for name in probed.values if (name in _SLOW) == slow}


def _load(
    driver: ProbedNode,
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
        sampled = _sample(driver, {index: probed}, seconds + 0.5, wave.drive)[index]
        bursts = load.bursts()
    finally:
        load.close()
    probed.under_load = sampled
    return describe_load(load.name, sampled, bursts)


# ------------------------------------------------------------------------------------- reporting


def _report(index: int, probed: _Probed, plan: ProbeTiming, together_ns: int) -> reports.ProbedGpu:
    values = probed.values
    none, alone, loaded = ReadingSeries(), probed.alone, probed.under_load
    sensors = {
        name: describe(series, together_ns, alone.get(name, none), loaded.get(name, none))
        for name, series in probed.together.items()
        if series.values
    }
    product: dict[str, Any] = {name: values.get(name) for name in _PRODUCT}
    gpu = reports.ProbedGpu(
        index=index,
        **product,
        modes={name: one for name, one in values.items() if name.endswith("_mode")},
        place={name: values[name] for name in _PLACE if name in values},
        estimates=values.get("performance_samples"),
        power_limits=_limits(values),
        clocks=[
            reports.ProbedClocks(memory, sorted(clocks, reverse=True))
            for memory, clocks in sorted(values.get("supported_clocks_mhz", {}).items())[::-1]
        ],
        state=reports.ProbedState(
            **{name: values.get(name) for name in reports.ProbedState.__dataclass_fields__}
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
    more: dict[str, Any] = {}
    if power is not None and counter is not None:
        period, counted = sensors[counter].period, probed.together[counter]
        period_ms = None if period is None else period.period_ms
        more["counter"] = compare_energy(counted, probed.together[power], period_ms)
        more["counter_total_j"] = counted.values[-1] / 1000
    if plan.identify:
        more["identity"] = reports.ProbedIdentity(*(values.get(name) for name in IDENTITY))
    gpu = replace(gpu, **more)
    return replace(gpu, doubts=find_doubts(gpu))


def _limits(values: Mapping[str, Any]) -> reports.ProbedPowerLimits | None:
    limits = values.get("power_limit_range_mw")
    if limits is None:
        return None
    names = ("default_power_limit_mw", "power_limit_mw", "enforced_power_limit_mw")
    limits_mw = (*limits, *(values.get(name) for name in names))
    watts: list[Any] = [None if mw is None else mw / 1000 for mw in limits_mw]
    return reports.ProbedPowerLimits(*watts)


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


PAUSE_S = 0.001
"""Pause after each reading: without it, some drivers fail, and the GPU's work slows down."""


def sample(
    gpus: Mapping[int, BackendGpu],
    sensors: Mapping[int, Sequence[str]],
    clock: Clock,
    seconds: float,
    meanwhile: Callable[[int], None] = lambda now_ns: None,
) -> dict[int, dict[str, ReadingSeries]]:
    """Reads each GPU in turn.

    Returns:
        The readings by index and sensor.
    """
    series = {index: {name: ReadingSeries() for name in sensors[index]} for index in gpus}
    begin_ns = clock.now_ns()
    while (now_ns := clock.now_ns()) - begin_ns < seconds * 1e9:
        meanwhile(now_ns)
        for index, gpu in gpus.items():
            for name, (t_ns, value) in gpu.read(sensors[index]).items():
                if isinstance(value, CallError):
                    series[index][name].failed(value.code)
                else:
                    series[index][name].add(t_ns, value)
        clock.sleep(PAUSE_S)
    return series


def time_calls(
    questions: Mapping[str, Question], clock: Clock, calls: int
) -> dict[str, Latency | None]:
    """How long each call takes."""
    latencies = {}
    for name, question in questions.items():
        durations = []
        for _ in range(calls):
            begin_ns = clock.now_ns()
            try:
                question.ask()
            except CallError:
                continue
            finally:
                durations.append(clock.now_ns() - begin_ns)
                clock.sleep(PAUSE_S / 2)
        latencies[name] = summarize(durations)
    return latencies


def time_together(
    questions: Mapping[int, Mapping[str, Question]], clock: Clock, calls: int
) -> dict[int, dict[str, Latency | None]]:
    """How long each call takes while one thread per GPU makes calls."""
    with ThreadPoolExecutor(len(questions)) as pool:
        latencies = pool.map(lambda one: time_calls(one, clock, calls), questions.values())
        return dict(zip(questions, latencies, strict=True))

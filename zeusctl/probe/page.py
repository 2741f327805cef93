"""A report as a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeus_common.text import count, table
from zeusd.energy.probed.compare import compare, model_of
from zeusd.energy.probed.period import UpdatePeriod
from zeusd.energy.probed.report import DriverEstimates, EstimatedPoint, ProbedGpu, ProbeReport

_LATENCIES = (
    *("power_usage_mw", "power_instant_mw", "energy_counter_mj", "temperature_c"),
    *("gpu_clock_mhz", "power_limit_mw", "compute_processes", "utilization_percent"),
)
"""Calls whose latency the page shows; the JSON has all."""

_MARKS = {"ok": "OK", "differs": "DIFFERS", "not supported": "not supported", "not known": "?"}


def lines(report: ProbeReport) -> Iterator[str]:
    """The page, line by line."""
    software = report.software
    what = f"simulated node {report.simulated}" if report.simulated else "GPUs of this machine"
    if report.stand_in:
        what = "a library given with --library, which may be a stand-in"
    yield f"Probe of {what}: {report.at}, {report.seconds:.0f} s; nothing was set"
    user = "root" if software.root else "an ordinary user"
    yield f"driver {software.driver}, {software.binding}, Python {software.python}, as {user}"
    for unopened in report.unopened:
        yield ""
        yield f"GPU {unopened.index}: cannot be opened: {unopened.text} ({unopened.code})"
    for gpu in report.gpus:
        yield ""
        yield from _gpu(gpu, report.uptime_s)
    if report.sandbox is not None:
        yield ""
        differing = report.sandbox["differs"]
        yield f"inside zeusd's unit: {len(report.sandbox['same'])} answers are the same"
        yield from (f"  differs: {one}" for one in differing)


def _gpu(gpu: ProbedGpu, uptime_s: float | None) -> Iterator[str]:
    vbios = f", VBIOS {gpu.vbios_version}" if gpu.vbios_version else ""
    yield f"GPU {gpu.index}: {gpu.name or 'unnamed'}{vbios}"
    yield from _table(
        ("  SENSOR", "PERIOD ms", "PHASE ms", "JITTER ms", "SEES ms", "RESOLUTION", "MEAN"),
        [
            (
                f"  {name}",
                *_period(sensor.period),
                _sees(gpu, name),
                "" if sensor.resolution is None else f"{sensor.resolution} {_unit(name)}",
                "" if name.startswith("energy") else f"{(sensor.mean or 0) / 1000:.2f} W",
            )
            for name, sensor in gpu.sensors.items()
        ],
    )
    stalled_ms = max((sensor.longest_gap_ms for sensor in gpu.sensors.values()), default=0.0)
    # Readings this far apart miss updates.
    if stalled_ms > 50.0:
        yield (
            f"  readings stalled for up to {stalled_ms:.0f} ms: the machine was busy; probe again "
            "when it is quiet"
        )
    if gpu.counter is not None:
        counter = gpu.counter
        yield (
            f"  energy counter over integrated power: {counter.ratio:.4f} +- "
            f"{counter.ratio_uncertainty:.4f} in {counter.span_s:.0f} s"
        )
    yield from _epoch(gpu, uptime_s)
    yield from _table(
        ("  COUNTER OVER BURSTS OF ms", "BURSTS", "MEAN ERROR", "BIAS", "TRUTH +-"),
        [
            (
                f"  {one.burst_ms:.0f}",
                str(one.bursts),
                f"{one.mean_error_percent:.1f} %",
                f"{one.bias_percent:+.1f} %",
                f"{one.truth_uncertainty_percent:.2f} %",
            )
            for one in (gpu.loaded.counter_windows if gpu.loaded else ())
        ],
    )
    yield from _table(
        ("  CALL", "p50 us", "p99 us", "max us", "p50 us, all GPUs", "p99 us, all GPUs"),
        [
            (f"  {gpu.latency[name].call}", *_latency(gpu, name))
            for name in _LATENCIES
            if _takes_time(gpu, name)
        ],
    )
    yield from _place(gpu)
    refused = [answer for answer in gpu.answers.values() if answer.code]
    if refused:
        yield f"  not answered ({len(refused)} of {len(gpu.answers)} reads):"
        yield from (f"    {one.call}: {one.text} ({one.code})" for one in refused)
    model = model_of(gpu.name)
    if model is None:
        yield "  this product is not in the simulator's table"
    else:
        yield f"  compared with the simulator's {model.key}:"
        yield from _table(
            ("  QUANTITY", "TABLE", "FOUND", ""),
            [
                (f"  {row.quantity}", row.table, row.found, _MARKS[row.verdict])
                for row in compare(gpu, model)
            ],
        )
    if gpu.doubts:
        yield "  contradictions:"
        yield from (f"    {doubt.subject}: {doubt.text}" for doubt in gpu.doubts)
    else:
        yield "  the driver's answers do not contradict each other"


_FABRIC_STATES = ("none", "not started", "in progress", "completed")
"""nvmlGpuFabricState_t."""


def _place(gpu: ProbedGpu) -> Iterator[str]:
    """Returns what a GPU is part of, and the driver's estimates."""
    for name, fields in gpu.place.items():
        numbers = {one: str(value) for one, value in fields.items()}
        if "state" in fields and fields["state"] < len(_FABRIC_STATES):
            numbers["state"] = _FABRIC_STATES[fields["state"]]
        parts = ", ".join(f"{one.replace('_', ' ')} {value}" for one, value in numbers.items())
        yield f"  {name}: {parts}"
    if gpu.estimates is not None:
        yield f"  the driver's own {', '.join(_estimated(gpu.estimates))}"


def _estimated(estimates: DriverEstimates) -> Iterator[str]:
    points = sorted(estimates.points, key=lambda one: one.gpu_mhz)
    yield f"{count(len(points), 'estimate')} in {count(estimates.samples, 'sample')}"
    if points:
        yield " to ".join(_at(one) for one in dict.fromkeys([points[0], points[-1]]))
    for name in ("observed", "most_efficient", "fastest"):
        point = getattr(estimates, name)
        if point is not None:
            yield f"{name.replace('_', ' ')} {_at(point)}"
    if estimates.headroom_w is not None:
        yield f"headroom {estimates.headroom_w:.1f} W"


def _at(point: EstimatedPoint) -> str:
    return f"{point.power_w:.1f} W at {point.gpu_mhz} MHz"


def _epoch(gpu: ProbedGpu, uptime_s: float | None) -> Iterator[str]:
    """Returns how long the counter may have counted."""
    power = gpu.power_sensor
    mean_w = 0.0 if power is None else (gpu.sensors[power].mean or 0.0) / 1000
    if gpu.counter_total_j is None or mean_w <= 0:
        return
    hours = gpu.counter_total_j / mean_w / 3600
    up = "" if uptime_s is None else f"; the machine has been up for {uptime_s / 3600:.1f} h"
    yield (
        f"  energy counter: {gpu.counter_total_j / 1000:.1f} kJ since its epoch, as in {hours:.1f} "
        f"h of this power{up}"
    )


def _takes_time(gpu: ProbedGpu, name: str) -> bool:
    """Whether a call was timed and takes time; a simulated one takes none."""
    latency = gpu.latency[name].alone if name in gpu.latency else None
    return latency is not None and latency.max_us > 0


def _unit(name: str) -> str:
    return name.rpartition("_")[2].replace("mw", "mW").replace("mj", "mJ")


def _period(period: UpdatePeriod | None) -> tuple[str, str, str]:
    if period is None:
        return "none", "", ""
    phase = "drifts" if period.phase_ms is None else f"{period.phase_ms:.1f}"
    return f"{period.period_ms:.3f}", phase, f"{period.jitter_ms:.2f}"


def _sees(gpu: ProbedGpu, name: str) -> str:
    window = None if gpu.loaded is None else gpu.loaded.windows.get(name)
    if window is None:
        return ""
    return f"{window.window_ms:.1f} +- {window.window_uncertainty_ms:.1f}"


def _latency(gpu: ProbedGpu, name: str) -> tuple[str, ...]:
    alone, together = gpu.latency[name].alone, gpu.latency[name].together
    cells = [(alone, one) for one in ("p50_us", "p99_us", "max_us")]
    cells += [(together, one) for one in ("p50_us", "p99_us")]
    return tuple(
        "" if latency is None else f"{getattr(latency, one):.0f}" for latency, one in cells
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Formats columns; omits those that are empty everywhere."""
    if not rows:
        return
    kept = [n for n in range(len(head)) if not head[n] or any(row[n] for row in rows)]
    cells = [[row[n] for n in kept] for row in rows]
    yield from table([head[n] for n in kept], cells, left=len(kept)).splitlines()

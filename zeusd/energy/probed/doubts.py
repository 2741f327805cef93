"""Impossible or contradictory answers of a driver."""

from __future__ import annotations

from collections.abc import Iterator

from zeusd.energy.probed.report import Doubt, ProbedGpu

IDLE_W = 2.0
"""Power that every GPU draws at least."""

ABOVE_LIMIT = 1.5
"""Readings above this multiple of the largest limit cannot be this GPU's power."""


def find_doubts(gpu: ProbedGpu) -> list[Doubt]:
    """Yields all doubts about one GPU's answers."""
    doubts = [*_limits(gpu), *_power(gpu), *_counter(gpu), *_rest(gpu)]
    return [Doubt(subject, text) for subject, text in doubts]


def _limits(gpu: ProbedGpu) -> Iterator[tuple[str, str]]:
    limits = gpu.power_limits
    if limits is None:
        return
    low, high = limits.smallest_w, limits.largest_w
    if low > high:
        yield "power limit", f"the smallest limit ({low:g} W) is above the largest ({high:g} W)"
        return
    for name, value in (("default", limits.default_w), ("requested", limits.requested_w)):
        if value is not None and not low <= value <= high:
            yield "power limit", f"the {name} limit ({value:g} W) is outside {low:g} to {high:g} W"
    enforced_w, requested_w = limits.enforced_w, limits.requested_w
    if enforced_w is not None and requested_w is not None and enforced_w > requested_w:
        yield (
            "power limit",
            f"the limit in force ({enforced_w:g} W) is above the requested one ({requested_w:g} W)",
        )


def _power(gpu: ProbedGpu) -> Iterator[tuple[str, str]]:
    name = gpu.power_sensor
    if name is None:
        return
    sensor = gpu.sensors[name]
    assert sensor.largest is not None
    largest_w = gpu.power_limits.largest_w if gpu.power_limits else None
    if sensor.largest < IDLE_W * 1000:
        yield "power", f"{name} never exceeded {sensor.largest / 1000:g} W"
    elif largest_w is not None and sensor.largest > ABOVE_LIMIT * largest_w * 1000:
        yield (
            "power",
            f"{name} showed {sensor.largest / 1000:g} W on a GPU of at most {largest_w:g} W",
        )
    elif not sensor.moved and (gpu.loaded or gpu.state.utilization_percent):
        yield "power", f"{name} stood at {sensor.largest / 1000:g} W while the GPU worked"


def _counter(gpu: ProbedGpu) -> Iterator[tuple[str, str]]:
    name, power = gpu.counter_sensor, gpu.power_sensor
    if name is None:
        return
    sensor = gpu.sensors[name]
    drew = power is not None and (gpu.sensors[power].mean or 0) > IDLE_W * 1000
    if not sensor.moved and drew:
        yield "energy counter", f"{name} stood still while the GPU drew power"
    energy = gpu.counter
    if energy is None:
        return
    if energy.restarts:
        times = "once" if energy.restarts == 1 else f"{energy.restarts} times"
        yield "energy counter", f"{name} fell {times} within {energy.span_s:.0f} s"
    elif not energy.same_scope:
        yield (
            "energy counter",
            f"{name} grew by {energy.counter_j:.1f} J while {power} adds up to "
            f"{energy.integrated_j:.1f} J ({energy.ratio:.3f} times): they are of different parts "
            "of the board, or one is wrong",
        )


def _rest(gpu: ProbedGpu) -> Iterator[tuple[str, str]]:
    for name, sensor in gpu.sensors.items():
        failed = sum(sensor.failures.values())
        if failed:
            codes = ", ".join(f"code {code}" for code in sensor.failures)
            yield name, f"{failed} of {failed + sensor.readings} readings failed ({codes})"
    state = gpu.state
    fastest = max((clocks.gpu_mhz[0] for clocks in gpu.clocks if clocks.gpu_mhz), default=None)
    if fastest is not None and state.gpu_clock_mhz is not None and state.gpu_clock_mhz > fastest:
        yield (
            "graphics clock",
            f"it runs at {state.gpu_clock_mhz} MHz, and {fastest} MHz is the highest supported",
        )
    if state.temperature_c is not None and not 0 < state.temperature_c < 120:
        yield "temperature", f"it is {state.temperature_c} C"
    used_mib, memory_mib = state.memory_used_mib, gpu.memory_mib
    if used_mib is not None and memory_mib is not None and used_mib > memory_mib:
        yield "memory", f"{used_mib} of {memory_mib} MiB are in use"

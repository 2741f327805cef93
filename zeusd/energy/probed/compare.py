"""Compares a probed GPU with the simulator's table of products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from zeusd.devices.simulated.models import DEVICES, DeviceModel

if TYPE_CHECKING:
    from zeusd.energy.probed.report import ProbedGpu

Verdict = Literal["ok", "differs", "not supported", "not known"]

IDLE_SHARE, IDLE_W = 0.3, 10.0
"""Idle powers that differ by less than either agree: boards differ."""


@dataclass(frozen=True)
class ProbedComparison:
    """One quantity: the table's value, the probe's, and whether they agree.

    `not supported`: the GPU does not offer it. `not known`: the probe could not determine it.
    """

    quantity: str
    table: str
    found: str
    verdict: Verdict


def model_of(name: str | None) -> DeviceModel | None:
    """Returns the table's product of this name."""
    return next((model for model in DEVICES.values() if model.name == name), None)


def compare(gpu: ProbedGpu, model: DeviceModel) -> list[ProbedComparison]:
    """Yields each quantity in the table."""
    return [*_fixed(gpu, model), *_sensors(gpu, model)]


def _fixed(gpu: ProbedGpu, model: DeviceModel) -> Iterator[ProbedComparison]:
    yield _exact("architecture", model.architecture, gpu.architecture)
    yield _exact("memory", model.memory_mib, gpu.memory_mib, "MiB")
    limits = gpu.power_limits
    names = ("smallest power limit", "default power limit", "largest power limit")
    limits_w = (
        (None, None, None)
        if limits is None
        else (limits.smallest_w, limits.default_w, limits.largest_w)
    )
    for name, table, value in zip(names, model.power_limits_w, limits_w, strict=True):
        yield _exact(name, float(table), value, "W")
    memory = [clocks.memory_mhz for clocks in gpu.clocks]
    yield _exact("memory clocks", _clocks(model.memory_clocks_mhz), _clocks(memory))
    for clocks in gpu.clocks:
        if clocks.memory_mhz in model.memory_clocks_mhz:
            expected = model.clocks_at(clocks.memory_mhz)
            yield _exact(
                f"graphics clocks at {clocks.memory_mhz} MHz",
                _range(expected),
                _range(clocks.gpu_mhz),
                same=list(expected) == clocks.gpu_mhz,
            )


def _sensors(gpu: ProbedGpu, model: DeviceModel) -> Iterator[ProbedComparison]:
    expected = model.sensor
    power, counter = gpu.power_sensor, gpu.counter_sensor
    yield _exact("average power", _yes(expected.average), _yes("power_average_mw" in gpu.sensors))
    yield _exact("energy counter", _yes(model.energy_counter), _yes(counter is not None))
    for label, name in (("power", power), ("energy counter", counter)):
        if name is None:
            if label == "power" or model.energy_counter:
                yield ProbedComparison(
                    f"update period of {label}", f"{expected.tick_ms:g} ms", "none", "not supported"
                )
            continue
        period = gpu.sensors[name].period
        table = f"{expected.tick_ms:g} ms"
        quantity = f"update period of {label}"
        if period is None:
            yield ProbedComparison(quantity, table, "no period", "not known")
            continue
        off = abs(period.period_ms - expected.tick_ms)
        # Update periods that differ by less agree.
        slack_ms = max(0.02 * expected.tick_ms, period.period_uncertainty_ms)
        if period.phase_ms is None:  # measured when it is read, up to a slow reading later
            slack_ms = max(slack_ms, 2 * gpu.sensors[name].reading_gap_ms)
        agrees = off <= slack_ms
        period_text = f"{period.period_ms:.4g} ms"
        yield ProbedComparison(quantity, table, period_text, "ok" if agrees else "differs")
    yield _window(gpu, model, power)
    if power is not None:
        yield _idle(gpu, model, power)


def _window(gpu: ProbedGpu, model: DeviceModel, power: str | None) -> ProbedComparison:
    quantity, table = "window that power sees", f"{model.sensor.window_ms:g} ms"
    window = None if gpu.loaded is None or power is None else gpu.loaded.windows.get(power)
    if window is None:
        return ProbedComparison(quantity, table, "needs a load", "not known")
    # Visible windows that differ by less, or by their uncertainty, agree.
    allowed = max(0.1 * model.sensor.window_ms, window.window_uncertainty_ms)
    agrees = abs(window.window_ms - model.sensor.window_ms) <= allowed
    return ProbedComparison(
        quantity, table, f"{window.window_ms:.3g} ms", "ok" if agrees else "differs"
    )


def _idle(gpu: ProbedGpu, model: DeviceModel, power: str) -> ProbedComparison:
    unused_w, context_w = model.idle_w
    table = f"{unused_w:g} to {context_w:g} W"
    mean_w = (gpu.sensors[power].mean or 0.0) / 1000
    busy = bool(gpu.processes.compute or gpu.processes.graphics or gpu.state.utilization_percent)
    if busy:
        return ProbedComparison("idle power", table, "in use", "not known")
    slack = max(IDLE_W, IDLE_SHARE * context_w)
    agrees = unused_w - slack <= mean_w <= context_w + slack
    return ProbedComparison("idle power", table, f"{mean_w:.3g} W", "ok" if agrees else "differs")


def _exact(
    quantity: str,
    table: float | str,
    probed: float | str | None,
    unit: str = "",
    same: bool | None = None,
) -> ProbedComparison:
    def text(value: float | str) -> str:
        return f"{value:g} {unit}".strip() if isinstance(value, int | float) else value

    if probed is None or probed == "":
        return ProbedComparison(quantity, text(table), "none", "not supported")
    agrees = table == probed if same is None else same
    return ProbedComparison(quantity, text(table), text(probed), "ok" if agrees else "differs")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _clocks(clocks: list[int] | tuple[int, ...]) -> str:
    return ", ".join(str(mhz) for mhz in clocks) + (" MHz" if clocks else "")


def _range(clocks: list[int] | tuple[int, ...]) -> str:
    return f"{clocks[-1]} to {clocks[0]} MHz ({len(clocks)})" if clocks else ""

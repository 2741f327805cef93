"""Simulated GPUs from a report of `zeusctl probe`; the table supplies what was not measured.

A probe sets nothing, so a report does not say how power depends on the clock. That comes from the
product of the same name in the table, or else from the newest one of the same architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeusd.devices.simulated.models import DEVICES, DeviceModel, SensorModel
from zeusd.energy.probed.report import COUNTERS, POWERS, from_json

ALL_SEEN = 0.95
"""A window of a larger share of the update period counts as the whole period."""


@dataclass(frozen=True, slots=True)
class ReportedGpu:
    """One GPU of a report.

    Attributes:
        model: The product as it was measured.
        counts_all: Whether its counter includes what its power readings miss.
        driver_version: The driver that it was measured on.
    """

    model: DeviceModel
    counts_all: bool
    driver_version: str


def read_report(path: str) -> list[ReportedGpu]:
    """The GPUs of a report.

    Raises:
        ValueError: The file cannot be read or is not a report; the message says which.
    """
    try:
        body = from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the report {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not a report of `zeusctl probe`: {error}") from None
    try:
        driver = str(body["software"]["driver"])
        gpus = [_gpu(one, driver) for one in body["gpus"]]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is a damaged report: {error} is missing or wrong") from None
    if not gpus:
        raise ValueError(f"{path} reports no GPU that could be opened; probe as another user")
    return gpus


def _gpu(gpu: Mapping[str, Any], driver: str) -> ReportedGpu:
    like = _like(gpu)
    name = gpu["name"] or like.name
    limits = gpu["power_limits"]
    clocks = {int(one["memory_mhz"]): tuple(map(int, one["gpu_mhz"])) for one in gpu["clocks"]}
    clocks = clocks or {mhz: like.clocks_at(mhz) for mhz in like.memory_clocks_mhz}
    memory = tuple(sorted(clocks, reverse=True))
    sensors = gpu["sensors"]
    power = next((one for one in POWERS if one in sensors), None)
    counter = next((one for one in COUNTERS if one in sensors), None)
    model = replace(
        like,
        key=like.key if name == like.name else "report",
        name=name,
        architecture=gpu["architecture"] or like.architecture,
        memory_mib=gpu["memory_mib"] or like.memory_mib,
        power_limits_w=like.power_limits_w if limits is None else _limits_w(limits),
        idle_w=_idle_w(gpu, power, like),
        clocks_mhz=clocks[memory[0]],
        memory_clocks_mhz=memory,
        clock_table=tuple(clocks.items()),
        sensor=_sensor(gpu, power, counter, like.sensor),
        has_counter=counter is not None,
    )
    return ReportedGpu(model, _counts_all(gpu, counter, model.sensor), driver)


def _like(gpu: Mapping[str, Any]) -> DeviceModel:
    for model in DEVICES.values():
        if model.name == gpu["name"]:
            return model
    known = [
        device for device in DEVICES.values() if device.architecture <= (gpu["architecture"] or 9)
    ]
    return max(known or DEVICES.values(), key=lambda one: one.architecture)


def _limits_w(limits: Mapping[str, Any]) -> tuple[float, float, float]:
    largest_w = limits["largest_w"]
    return limits["smallest_w"], limits["default_w"] or largest_w, largest_w


def _idle_w(gpu: Mapping[str, Any], power: str | None, like: DeviceModel) -> tuple[float, float]:
    """Power without and with a context; not known if the GPU was in use during the probe."""
    used = gpu["processes"]["compute"] or gpu["state"]["utilization_percent"]
    if power is None or used or not gpu["sensors"][power]["mean"]:
        return like.idle_w
    unused_w = gpu["sensors"][power]["mean"] / 1000
    return unused_w, unused_w + like.idle_w[1] - like.idle_w[0]


def _periods(gpu: Mapping[str, Any], names: tuple[str | None, ...]) -> Iterator[float]:
    for name in names:
        sensor = gpu["sensors"].get(name, {})
        for part in ("together", "alone", "under_load"):
            if sensor.get(part):
                yield float(sensor[part]["period_ms"])


def _window_ms(gpu: Mapping[str, Any], name: str | None) -> float | None:
    window = (gpu["loaded"] or {}).get("windows", {}).get(name)
    return None if window is None else float(window["window_ms"])


def _sensor(
    gpu: Mapping[str, Any], power: str | None, counter: str | None, like: SensorModel
) -> SensorModel:
    names = (power, counter) if like.counter_lag_ms is None else (counter, power)
    tick_ms = next(_periods(gpu, names), float(like.tick_ms))
    window_ms = _window_ms(gpu, power)
    if window_ms is None:
        window_ms = tick_ms * like.window_ms / like.tick_ms
    resolution = None if power is None else gpu["sensors"][power]["resolution"]
    return SensorModel(
        tick_ms=tick_ms,
        window_ms=tick_ms if window_ms > ALL_SEEN * tick_ms else window_ms,
        quantum_mw=like.quantum_mw if resolution is None else int(resolution),
        average="power_average_mw" in gpu["sensors"],
        dither=resolution is None or resolution <= 1,
        counter_lag_ms=like.counter_lag_ms,
        samples_ms=like.samples_ms,
    )


def _counts_all(gpu: Mapping[str, Any], counter: str | None, sensor: SensorModel) -> bool:
    window_ms = _window_ms(gpu, counter)
    return window_ms is not None and window_ms > ALL_SEEN * sensor.tick_ms > sensor.window_ms

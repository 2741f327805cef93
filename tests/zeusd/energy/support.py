"""Sensors whose history begins now."""

from __future__ import annotations

from zeus_common.units import MS
from zeusd.devices.port import SensorValues
from zeusd.energy.channel import Channel
from zeusd.energy.history import SIZE, History


def empty_history() -> History:
    return History(memoryview(bytearray(SIZE)))


def channel_of(architecture: int, product: str, ceiling_mw: int = 700_000) -> Channel:
    return Channel(0, empty_history(), architecture, product, ceiling_mw)


def reading(t_ns: int, energy_mj: int | None, power_mw: int | None) -> SensorValues:
    return SensorValues(t_ns, energy_mj, power_mw, None, None)


def joules(channel: Channel, begin_ms: float, end_ms: float, aligned: bool = False) -> float:
    """Energy between two times, ms."""
    window = channel.curve.window(round(begin_ms * MS), round(end_ms * MS), aligned)
    return window.energy_uj / 1e6
